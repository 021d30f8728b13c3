//! Reads a journal, which is a log as `docs/redis-state.md` describes it.

use tidegate_testkit::history::JournalEntry;
use tidegate_testkit::server::{Reply, Server};

const OPEN_HEADER_BYTES: usize = 17;
const RECORD_BYTES: usize = 10;
const TIME_BYTES: usize = 7;

/// Returns the journal of a key, in the order of time.
pub(super) fn read(redis: &Server, key: &str) -> Vec<JournalEntry> {
    let key = format!("tidegate:tg2:{{{key}}}:sliding-log:3600000000");
    let reply = redis.command(&["LRANGE", &key, "0", "-1"]);
    let element = |item: &Reply| match item {
        Reply::Bulk(bytes) => bytes.clone(),
        other => panic!("{key}: {other:?}"),
    };
    let elements: Vec<Vec<u8>> = reply.items().iter().map(element).collect();
    elements.iter().flat_map(|element| entries(element)).collect()
}

fn entries(element: &[u8]) -> Vec<JournalEntry> {
    let records = match element[0] {
        b'D' => &[],
        b'C' => &element[1..],
        b'O' => &element[OPEN_HEADER_BYTES..],
        _ => {
            let at_us = std::str::from_utf8(element).unwrap().parse().unwrap();
            return vec![JournalEntry { at_us, units: 1 }];
        }
    };
    let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let entry = |record: &[u8]| {
        let (at, units) = record.split_at(TIME_BYTES);
        JournalEntry { at_us: number(at), units: number(units) }
    };
    records.chunks(RECORD_BYTES).map(entry).collect()
}
