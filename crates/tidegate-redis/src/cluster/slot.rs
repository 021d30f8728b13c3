//! The hash slot of a key: CRC16 (XMODEM) of its hash tag, modulo 16384.

/// The number of hash slots.
pub(crate) const SLOTS: usize = 16_384;

const TABLE: [u16; 256] = table();

/// Returns the slot of a key: that of its hash tag, the text between the first `{` and the next `}`, or of the whole
/// key if the tag is missing or empty.
pub(crate) fn slot_of_key(key: &[u8]) -> u16 {
    let tag = memchr::memchr(b'{', key).and_then(|open| {
        let rest = &key[open + 1..];
        memchr::memchr(b'}', rest).filter(|&length| length > 0).map(|length| &rest[..length])
    });
    slot_of_tag(tag.unwrap_or(key))
}

/// Returns the slot of a hash tag.
pub(crate) fn slot_of_tag(tag: &[u8]) -> u16 {
    let step = |crc: u16, &byte: &u8| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)];
    tag.iter().fold(0, step) % SLOTS as u16
}

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first value is the check value of the CRC; the others are those that `CLUSTER KEYSLOT` returns.
    #[test]
    fn slot_is_that_of_the_hash_tag() {
        assert_eq!(slot_of_tag(b"123456789"), 0x31c3);
        assert_eq!(slot_of_key(b"foo"), 12_182);
        assert_eq!(slot_of_key(b"tidegate:tg2:{foo}:ban"), 12_182);
        assert_eq!(slot_of_key(b"a{foo}{bar}"), 12_182);
        assert_eq!(slot_of_key(b"{}foo"), slot_of_tag(b"{}foo"));
        assert_eq!(slot_of_key(b"{foo"), slot_of_tag(b"{foo"));
        assert_eq!(slot_of_key(b""), 0);
    }
}
