//! Verifies that a list has the log format of `docs/redis-state.md`.

use tidegate_testkit::server::Server;

const PLAIN_UNITS_MAX: usize = 500;
const CHUNK_ENTRIES_MAX: usize = 256;
const OPEN_HEADER_BYTES: usize = 17;
const RECORD_BYTES: usize = 10;

/// Returns the number of closed chunks of all logs on this server.
///
/// # Panics
/// If a list is not a log as documented.
pub(crate) fn verify_logs(server: &Server) -> usize {
    let keys = server.command(&["KEYS", "*"]);
    let mut connection = server.connect().unwrap();
    let mut chunks = 0;
    for key in keys.items().iter().map(|key| key.text()) {
        if connection.call(&["TYPE", &key]).unwrap().text() != "list" {
            continue;
        }
        let reply = connection.call(&["LRANGE", &key, "0", "-1"]).unwrap();
        let elements: Vec<Vec<u8>> = reply
            .items()
            .iter()
            .map(|item| match item {
                tidegate_testkit::server::Reply::Bulk(bytes) => bytes.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        if let Err(problem) = verify_log(&elements, &mut chunks) {
            panic!("{key}: {problem}");
        }
    }
    chunks
}

fn verify_log(elements: &[Vec<u8>], chunks: &mut usize) -> Result<(), String> {
    let ensure = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
    let open = elements.last().unwrap();
    if open[0] != b'O' {
        let times: Vec<u64> = elements.iter().map(|time| std::str::from_utf8(time).unwrap().parse().unwrap()).collect();
        ensure(times.is_sorted(), "the times of a plain list ascend")?;
        return ensure(times.len() <= PLAIN_UNITS_MAX, "a plain list is short");
    }
    let [oldest, total, closed, left] = [&open[1..8], &open[8..11], &open[11..14], &open[14..17]].map(number);
    let mut entries: Vec<(u64, u64)> = Vec::new();
    if elements.len() > 1 {
        ensure(elements[0][0] == b'D', "the directory is in front")?;
        let directory = records(&elements[0], 1);
        ensure(directory.len() + 2 == elements.len(), "the directory has a record for each closed chunk")?;
        *chunks += directory.len();
        let mut lengths = Vec::new();
        for (&(newest, sum), chunk) in directory.iter().zip(&elements[1..]) {
            ensure(chunk[0] == b'C', "a closed chunk")?;
            let records = records(chunk, 1);
            ensure((1..=CHUNK_ENTRIES_MAX).contains(&records.len()), "a chunk is neither empty nor too long")?;
            ensure(records.last().unwrap().0 == newest, "the directory has the newest time of a chunk")?;
            ensure(records.iter().map(|(_, units)| units).sum::<u64>() == sum, "the directory has the sum of a chunk")?;
            lengths.push(records.len());
            entries.extend(records);
        }
        let is_wasteful = |pair: &[usize]| pair[0] + pair[1] <= CHUNK_ENTRIES_MAX;
        ensure(!lengths[1..].windows(2).any(is_wasteful), "two neighbours do not fit into one chunk")?;
        ensure(left < directory[0].1, "something of the first chunk counts")?;
    }
    let closed_units: u64 = entries.iter().map(|(_, units)| units).sum();
    ensure(closed_units == closed + left, "the open chunk knows the units of the closed ones")?;
    entries.extend(records(open, OPEN_HEADER_BYTES));
    ensure(entries.iter().map(|(_, units)| units).sum::<u64>() == total + left, "the open chunk knows the total")?;
    ensure(entries.is_sorted_by(|a, b| a.0 < b.0), "times ascend")?;
    ensure(entries.iter().all(|(_, units)| *units > 0), "no entry is empty")?;
    let mut before = 0;
    let counts = |(_, units): &&(u64, u64)| {
        before += units;
        before > left
    };
    ensure(entries.iter().find(counts).unwrap().0 == oldest, "the open chunk knows the oldest time that counts")
}

fn records(element: &[u8], header_bytes: usize) -> Vec<(u64, u64)> {
    assert_eq!((element.len() - header_bytes) % RECORD_BYTES, 0);
    element[header_bytes..].chunks(RECORD_BYTES).map(|record| (number(&record[..7]), number(&record[7..]))).collect()
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
