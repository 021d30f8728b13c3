//! A decision as a worker received it, encoded with the fields that the history checker needs.

use std::io::{self, ErrorKind, Read, Write};

use tidegate::{Decision, LimitStatus, Source, Timestamp, Wait};

pub(super) struct Record {
    /// The counter of each limit status.
    pub(super) counters: Vec<usize>,
    pub(super) sent_us: u64,
    pub(super) received_us: u64,
    pub(super) decision: Decision,
}

impl Record {
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let is_cached = self.decision.source == Source::DenyCache;
        out.write_all(&[self.counters.len() as u8, u8::from(is_cached)])?;
        for number in [self.sent_us, self.received_us, self.decision.at.as_micros()] {
            out.write_all(&number.to_le_bytes())?;
        }
        for (counter, line) in self.counters.iter().zip(&self.decision.limits) {
            out.write_all(&[*counter as u8, u8::from(line.allowed), line.cost as u8])?;
            out.write_all(&line.remaining.to_le_bytes())?;
            for wait in [line.retry_after, line.next_after] {
                out.write_all(&wait.as_micros().unwrap_or(u64::MAX).to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Reads the next record. Returns `None` at the end of the input.
    pub(super) fn read(input: &mut impl Read, quota_of: impl Fn(usize) -> u32) -> io::Result<Option<Record>> {
        let [limit_count, is_cached] = match bytes(input) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            head => head?,
        };
        let [sent_us, received_us, at_us] = [number(input)?, number(input)?, number(input)?];
        let source = if is_cached == 1 { Source::DenyCache } else { Source::Store };
        let mut decision = Decision::new(Timestamp::from_micros(at_us), source, Default::default());
        let mut counters = Vec::with_capacity(limit_count.into());
        for _ in 0..limit_count {
            let [counter, allowed, cost] = bytes(input)?;
            counters.push(counter.into());
            let remaining = u32::from_le_bytes(bytes(input)?);
            let [retry_after, next_after] = [wait(input)?, wait(input)?];
            let (quota, reset_after) = (quota_of(counter.into()), next_after);
            let (allowed, cost) = (allowed == 1, cost.into());
            decision.limits.push(LimitStatus {
                allowed,
                cost,
                quota,
                remaining,
                retry_after,
                next_after,
                reset_after,
                late_us: 0,
                refunded_before: 0,
            });
        }
        Ok(Some(Record { counters, sent_us, received_us, decision }))
    }
}

fn wait(input: &mut impl Read) -> io::Result<Wait> {
    number(input).map(|us| if us == u64::MAX { Wait::NEVER } else { Wait::from_micros(us) })
}

fn number(input: &mut impl Read) -> io::Result<u64> {
    bytes(input).map(u64::from_le_bytes)
}

fn bytes<const LENGTH: usize>(input: &mut impl Read) -> io::Result<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    input.read_exact(&mut bytes).map(|()| bytes)
}
