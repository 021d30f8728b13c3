//! The subject: who is counted, as bytes that cannot be confused with anybody else's.
//!
//! **Problem.** A limiter that joins parts with a separator counts `("a", "b_c")` and `("a_b", "c")` as one, and
//! whoever may choose a part may choose to be somebody else. A limiter that drops a missing part puts all
//! who lack it into one bucket, where a few can starve the rest.
//!
//! **Layout.** Readable, because an operator will meet it in `redis-cli` at three in the morning:
//!
//! ```text
//!   subject = part *( "&" part )              ip:203.0.113.9&user:42
//!   part    = kind ":" value
//!   kind    = "ip" | "api_key" | "user" | "header:" name | "cookie:" name | "path" | "global"
//!   value   =     text                        203.0.113.9   2001:db8::/64   /shorten
//!           | "#" digest                      what is long or secret: SHA-256, 16 bytes in hexadecimal
//!           | "~" pseudonym                   under `anonymize`
//!           | "!" value                       not there; the address stands in
//! ```
//!
//! In texts and names everything but visible ASCII, and the characters `% & # ~ ! { }`, is written as `%XX`. So an `&`
//! always separates, a mark is always ours, and the bytes can be read back into the parts in only one way: different
//! parts, different subjects. `global` has no value.
//!
//! **A missing part** (no such header, no known key, no user, a path that may be several) is replaced by the address
//! behind a mark. Those who leave it out are counted by address: never all together, never uncounted, and never in the bucket of somebody
//! who did say it, not even if that one's value reads like an address.
//!
//! **Credentials.** API keys, cookies and the headers that carry credentials are never written out: their digest
//! is the subject. `anonymize` replaces each value but `path` by a pseudonym of what would have stood there.

use std::fmt::{self, Write};

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use super::address::{AddressKey, V4_TEXT_BYTES};
use super::anonymize::Salt;

/// A longer value is written as its digest.
const VALUE_BYTES_MAX: usize = 128;

/// Who is counted. Made by [`Identity::subject`](super::Identity::subject); goes into a [`Key`](crate::Key).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct SubjectKey(Bytes);

impl SubjectKey {
    /// Nobody yet: what a [`SubjectWriter`] begins with.
    pub(crate) fn unwritten() -> SubjectKey {
        SubjectKey(Bytes::new())
    }

    /// The bytes, all of them visible ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a subject is written in ASCII")
    }
}

impl AsRef<[u8]> for SubjectKey {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for SubjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for SubjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SubjectKey({})", self.as_str())
    }
}

/// The kind of one part, with the name that `header` and `cookie` have.
#[derive(Clone, Copy)]
pub(crate) struct PartKind<'a> {
    pub(crate) word: &'static str,
    pub(crate) name: Option<&'a str>,
}

/// The value of one part.
#[derive(Clone, Copy)]
pub(crate) enum PartValue<'a> {
    /// A client's network.
    Address(AddressKey),
    /// May be read by whoever can read the store.
    Plain(&'a [u8]),
    /// Must not be read: its digest is written.
    Secret(&'a [u8]),
    /// The digest of what must not be read.
    Digest(&'a [u8; 32]),
    /// Nobody's secret and nobody's data, written out under `anonymize` too.
    Public(&'a [u8]),
    /// Not there; this network is counted instead.
    Missing(AddressKey),
}

/// Writes a subject, part by part.
pub(crate) struct SubjectWriter<'s> {
    bytes: &'s mut Bytes,
    salt: Option<&'s Salt>,
}

/// A subject of one or two parts fits without an allocation.
type Bytes = SmallVec<[u8; INLINE_BYTES]>;
const INLINE_BYTES: usize = 64;

const IP: PartKind<'static> = PartKind { word: "ip", name: None };

impl<'s> SubjectWriter<'s> {
    /// With a salt, values become pseudonyms.
    pub(crate) fn new(SubjectKey(bytes): &'s mut SubjectKey, salt: Option<&'s Salt>) -> SubjectWriter<'s> {
        SubjectWriter { bytes, salt }
    }

    /// A part that is its kind alone.
    pub(crate) fn word(&mut self, word: &'static str) {
        self.separate();
        self.bytes.extend_from_slice(word.as_bytes());
    }

    /// The part that is a client's network.
    #[inline]
    pub(crate) fn address(&mut self, address: AddressKey) {
        match address.single_v4_text() {
            // What most subjects are: written in one go.
            Some((v4, len)) if self.bytes.is_empty() && self.salt.is_none() => {
                let mut text = [0; INLINE_BYTES];
                text[..3].copy_from_slice(b"ip:");
                text[3..3 + V4_TEXT_BYTES].copy_from_slice(&v4);
                *self.bytes = Bytes::from_buf_and_len(text, 3 + len);
            }
            _ => self.part(IP, PartValue::Address(address)),
        }
    }

    pub(crate) fn part(&mut self, kind: PartKind<'_>, value: PartValue<'_>) {
        self.separate();
        let kind_from = self.bytes.len();
        self.bytes.extend_from_slice(kind.word.as_bytes());
        if let Some(name) = kind.name {
            self.bytes.push(b':');
            escape(name.as_bytes(), self.bytes);
        }
        let kind_range = kind_from..self.bytes.len();
        self.bytes.push(b':');
        if matches!(value, PartValue::Missing(_)) {
            self.bytes.push(b'!');
        }
        let value_from = self.bytes.len();
        write_value(value, self.bytes);

        if let Some(salt) = self.salt
            && !matches!(value, PartValue::Public(_))
        {
            let pseudonym = salt.pseudonym(&self.bytes[kind_range], &self.bytes[value_from..]);
            self.bytes.truncate(value_from);
            print(format_args!("~{pseudonym}"), self.bytes);
        }
    }

    fn separate(&mut self) {
        if !self.bytes.is_empty() {
            self.bytes.push(b'&');
        }
    }
}

fn write_value(value: PartValue<'_>, bytes: &mut Bytes) {
    match value {
        // Digits, letters, `.`, `:` and `/`: nothing to escape.
        PartValue::Address(address) | PartValue::Missing(address) => address.write(bytes),
        PartValue::Plain(value) | PartValue::Public(value) if value.len() <= VALUE_BYTES_MAX => escape(value, bytes),
        PartValue::Plain(value) | PartValue::Public(value) | PartValue::Secret(value) => {
            write_digest(&Sha256::digest(value).into(), bytes);
        }
        PartValue::Digest(digest) => write_digest(digest, bytes),
    }
}

/// Writes `value` so that it holds no separator, no mark and nothing invisible.
fn escape(value: &[u8], bytes: &mut Bytes) {
    for &byte in value {
        if byte.is_ascii_graphic() && !b"%&#~!{}".contains(&byte) {
            bytes.push(byte);
        } else {
            print(format_args!("%{byte:02X}"), bytes);
        }
    }
}

/// Writes 16 bytes of a digest: two values that share them would have to be searched for among 2^64.
fn write_digest(digest: &[u8; 32], bytes: &mut Bytes) {
    let half = digest.first_chunk().map_or(0, |half| u128::from_be_bytes(*half));
    print(format_args!("#{half:032x}"), bytes);
}

fn print(text: fmt::Arguments<'_>, bytes: &mut Bytes) {
    /// Lets text be formatted into bytes.
    struct Ascii<'b>(&'b mut Bytes);

    impl Write for Ascii<'_> {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.extend_from_slice(text.as_bytes());
            Ok(())
        }
    }
    Ascii(bytes).write_fmt(text).expect("writing to memory does not fail");
}

#[cfg(test)]
mod tests;
