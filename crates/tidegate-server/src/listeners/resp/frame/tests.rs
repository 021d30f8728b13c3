//! Tests of the parser by itself, and against another parser.

use proptest::prelude::*;
use redis_protocol::resp2::decode::decode;
use redis_protocol::resp2::types::OwnedFrame;

use super::*;

/// The length of a command, and its arguments.
type Parsed = Option<(usize, Vec<Vec<u8>>)>;

fn parsed(buffer: &[u8]) -> Result<Parsed, FrameError> {
    let mut args = Args::default();
    let consumed = parse(buffer, &mut args)?;
    Ok(consumed.map(|consumed| {
        let words = (0..args.len()).map(|index| args.get(buffer, index).unwrap().to_vec());
        (consumed, words.collect())
    }))
}

fn array(words: &[Vec<u8>]) -> Vec<u8> {
    let mut frame = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        frame.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        frame.extend_from_slice(word);
        frame.extend_from_slice(b"\r\n");
    }
    frame
}

#[test]
fn arrays_and_inline_commands_are_parsed() {
    let ping = Ok(Some((14, vec![b"PING".to_vec()])));
    assert_eq!(parsed(b"*1\r\n$4\r\nPING\r\n*1\r\n"), ping);
    assert_eq!(parsed(b"PING\r\nmore"), Ok(Some((6, vec![b"PING".to_vec()]))));
    assert_eq!(parsed(b"  a  b\n"), Ok(Some((7, vec![b"a".to_vec(), b"b".to_vec()]))));
    assert_eq!(parsed(b"\r\n"), Ok(Some((2, vec![]))));
    assert_eq!(parsed(b"*0\r\n"), Ok(Some((4, vec![]))));
}

/// All texts of up to six bytes of these kinds, with each bound.
#[test]
fn a_short_length_is_parsed_like_a_long_one() {
    const BYTES: &[u8] = b"0456\r\nx";
    for length in 0..=6 {
        for number in 0..BYTES.len().pow(length) {
            let byte = |place| BYTES[number / BYTES.len().pow(place) % BYTES.len()];
            let line: Vec<u8> = std::iter::once(b'$').chain((0..length).map(byte)).collect();
            for (max, error) in [(ARGS_MAX, FrameError::Arguments), (ARG_BYTES_MAX, FrameError::Length)] {
                let shown = String::from_utf8_lossy(&line);
                assert_eq!(length_line(&line, 0, max, error), long_length_line(&line, 0, max, error), "{shown:?}");
            }
        }
    }
}

#[test]
fn hostile_frames_are_rejected_before_their_bytes_arrive() {
    for (frame, error) in [
        (&b"*-1\r\n"[..], FrameError::Arguments),
        (b"*1025\r\n", FrameError::Arguments),
        (b"*99999999999999999999", FrameError::Arguments),
        (b"*00000000000000000", FrameError::Arguments),
        (b"*\r\n", FrameError::Arguments),
        (b"*1\rx", FrameError::Arguments),
        (b"*1\r\n$-1\r\n", FrameError::Length),
        (b"*1\r\n$131073\r\n", FrameError::Length),
        (b"*1\r\n*1\r\n*1\r\n", FrameError::Length),
        (b"*1\r\n:5\r\n", FrameError::Length),
        (b"*1\r\n$\r\n", FrameError::Length),
        (b"*1\r\n$4\r\nPINGxx", FrameError::Terminator),
    ] {
        assert_eq!(parsed(frame), Err(error), "{:?}", String::from_utf8_lossy(frame));
    }
    let many_large = array(&vec![vec![b'x'; ARG_BYTES_MAX]; 3]);
    assert_eq!(parsed(&many_large[..many_large.len() - 70_000]), Err(FrameError::TooLarge));
    assert_eq!(parsed(&vec![b'x'; LINE_BYTES_MAX]), Err(FrameError::LineTooLong));
    assert_eq!(parsed(&vec![b'x'; LINE_BYTES_MAX - 1]), Ok(None));
    assert_eq!(parsed(&b"x ".repeat(1025).into_iter().chain(*b"\n").collect::<Vec<_>>()), Err(FrameError::Arguments));
}

proptest! {
    #[test]
    fn a_command_is_parsed_and_every_prefix_of_it_is_incomplete(
        words in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..8),
    ) {
        let frame = array(&words);
        prop_assert_eq!(parsed(&frame), Ok(Some((frame.len(), words))));
        for cut in 0..frame.len() {
            prop_assert_eq!(parsed(&frame[..cut]), Ok(None));
        }
    }

    #[test]
    fn arbitrary_bytes_neither_panic_nor_are_read_past_the_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(Some((consumed, _))) = parsed(&bytes) {
            prop_assert!(consumed <= bytes.len());
        }
    }

    /// Valid frames with a few bytes changed, cut off or inserted. What this parser accepts, the other one parses
    /// alike. What is incomplete for one is incomplete for the other. This one rejects only what no client may send.
    #[test]
    fn the_parser_agrees_with_redis_protocol(
        words in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..24), 0..8),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), change()), 0..3),
        keep in any::<prop::sample::Index>(),
        is_whole in any::<bool>(),
    ) {
        let mut frame = array(&words);
        for (index, change) in changes {
            let at = 1 + index.index(frame.len());
            match change {
                Change::Replace(byte) if at < frame.len() => frame[at] = byte,
                Change::Insert(byte) => frame.insert(at, byte),
                Change::Replace(_) => {}
            }
        }
        if !is_whole {
            frame.truncate(1 + keep.index(frame.len()));
        }
        match (parsed(&frame), decode(&frame)) {
            (Ok(Some((consumed, words))), Ok(Some((OwnedFrame::Array(items), taken)))) => {
                prop_assert_eq!(consumed, taken);
                let items: Vec<OwnedFrame> = items;
                prop_assert_eq!(words.into_iter().map(OwnedFrame::BulkString).collect::<Vec<_>>(), items);
            }
            (Ok(None), Ok(None)) => {}
            // The other parser accepts any two bytes after an argument.
            (Err(FrameError::Terminator), _) => {}
            // Null or negative, nested, of another type, too many, or with leading zeros: valid in replies at most.
            (Err(FrameError::Arguments | FrameError::Length), _) => {}
            // The other parser may reject a length before its bytes have arrived.
            (Ok(None), Err(_)) => {}
            (ours, theirs) => prop_assert!(false, "{:?}: {ours:?}, {theirs:?}", String::from_utf8_lossy(&frame)),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Replace(u8),
    Insert(u8),
}

/// Generates mostly bytes that have a meaning in the protocol.
fn change() -> impl Strategy<Value = Change> {
    let byte = prop_oneof![proptest::sample::select(b"*$:+-_%~,#0123456789\r\n\0".to_vec()), any::<u8>()];
    (any::<bool>(), byte).prop_map(|(insert, byte)| if insert { Change::Insert(byte) } else { Change::Replace(byte) })
}
