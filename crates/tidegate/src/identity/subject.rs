//! The subject: the identity that is counted, encoded without collisions.
//!
//! **Problem.** A limiter that joins parts with a separator counts `("a", "b_c")` and `("a_b", "c")` as one subject, so
//! a client that can choose one part can impersonate another client. A limiter that drops missing parts counts all
//! clients without the part together, so that a few of them can use up the quota of the rest.
//!
//! **Layout.** It is readable text, because operators see it in `redis-cli`:
//!
//! ```text
//!   subject = part *( "&" part )              ip:203.0.113.9&user:42
//!   part    = kind ":" value
//!   kind    = "ip" | "api_key" | "user" | "caller" | "header:" name | "cookie:" name | "path" | "global"
//!   value   =     text                        203.0.113.9   2001:db8::/64   /shorten
//!           | "#" digest                      long or secret values: 16 bytes of SHA-256 in hexadecimal
//!           | "~" pseudonym                   with `anonymize`
//!           | "!" value                       the part is missing; the value is the client's network
//! ```
//!
//! In texts and names, everything except visible ASCII, and the characters `% & # ~ ! { }`, is written as `%XX`. So an
//! `&` is always a separator, the marks `#`, `~` and `!` never come from a client, and the bytes can be decoded in only
//! one way. Different parts always give different subjects. `global` has no value.
//!
//! **A missing part** (no such header, no known key, no user, an ambiguous path) is replaced by the client's network
//! behind a `!`. Clients that omit the part are counted by address. They are never counted together, never uncounted,
//! and never share a counter with a client that sent the part, even if its value looks like an address.
//!
//! **Credentials.** API keys, cookies and headers that carry credentials are written as digests. `anonymize` replaces
//! each value except `path` by a pseudonym of the value that would have been written.

use std::fmt::{self, Write};

use percent_encoding::{AsciiSet, CONTROLS, percent_encode};
use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use super::address::{AddressKey, V4_TEXT_BYTES};
use super::anonymize::Salt;

/// Longest value that is written as text. A longer one is written as its digest.
const VALUE_BYTES_MAX: usize = 128;

/// The subject under which a request is counted, such as `ip:203.0.113.9`. Its bytes are for use in a
/// [`Key`](crate::Key).
///
/// Created by [`Identity::subject`](super::Identity::subject). `Display` shows the bytes as text.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct SubjectKey(SubjectBytes);

impl SubjectKey {
    /// Creates an empty subject for a [`SubjectWriter`] to fill.
    pub(crate) fn empty() -> SubjectKey {
        SubjectKey(SubjectBytes::new())
    }

    /// Returns the subject as bytes. All of them are visible ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn as_str(&self) -> &str {
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

/// The text before the value of a part: its kind, such as `ip`; and the name of a header or cookie.
#[derive(Clone, Copy)]
pub(crate) struct PartLabel<'a> {
    pub(crate) kind: &'static str,
    pub(crate) name: Option<&'a str>,
}

/// The value of one part of a subject. The variant determines how it is written.
#[derive(Clone, Copy)]
pub(crate) enum PartValue<'a> {
    /// A client's network.
    Address(AddressKey),
    /// A value that may be stored in plain text. Written as text if it is short, else as its digest.
    Plain(&'a [u8]),
    /// A credential. Written as its digest.
    Secret(&'a [u8]),
    /// The SHA-256 digest of a credential. Its first 16 bytes are written.
    Digest(&'a [u8; 32]),
    /// A value that is neither secret nor personal. With `anonymize` it is still written as text.
    Public(&'a [u8]),
    /// A part that the request does not have, with the client's network that replaces it.
    Missing(AddressKey),
}

/// Appends parts to a subject. If there is a salt, values are replaced by pseudonyms.
pub(crate) struct SubjectWriter<'s> {
    bytes: &'s mut SubjectBytes,
    salt: Option<&'s Salt>,
}

/// The bytes of a subject. One or two parts fit without an allocation.
type SubjectBytes = SmallVec<[u8; INLINE_BYTES]>;
const INLINE_BYTES: usize = 64;

const IP: PartLabel<'static> = PartLabel { kind: "ip", name: None };

impl<'s> SubjectWriter<'s> {
    /// Creates a writer that appends to a subject. With a `salt`, all values except public ones are written as
    /// pseudonyms.
    pub(crate) fn new(SubjectKey(bytes): &'s mut SubjectKey, salt: Option<&'s Salt>) -> SubjectWriter<'s> {
        SubjectWriter { bytes, salt }
    }

    /// Appends a part that has a kind and no value.
    pub(crate) fn part_without_value(&mut self, kind: &'static str) {
        self.separate();
        self.bytes.extend_from_slice(kind.as_bytes());
    }

    /// Appends a part `ip:` with a client's network, or its pseudonym.
    #[inline]
    pub(crate) fn address(&mut self, address: AddressKey) {
        match address.single_v4_text() {
            // The most frequent subject is a single IPv4 address, so it is written in one copy.
            Some((v4, len)) if self.bytes.is_empty() && self.salt.is_none() => {
                let mut text = [0; INLINE_BYTES];
                text[..3].copy_from_slice(b"ip:");
                text[3..3 + V4_TEXT_BYTES].copy_from_slice(&v4);
                *self.bytes = SubjectBytes::from_buf_and_len(text, 3 + len);
            }
            _ => self.part(IP, PartValue::Address(address)),
        }
    }

    /// Appends a part: its label, a colon, and its value, which becomes a pseudonym if there is a salt and the value is
    /// not public.
    pub(crate) fn part(&mut self, label: PartLabel<'_>, value: PartValue<'_>) {
        self.separate();
        let label_from = self.bytes.len();
        self.bytes.extend_from_slice(label.kind.as_bytes());
        if let Some(name) = label.name {
            self.bytes.push(b':');
            escape(name.as_bytes(), self.bytes);
        }
        let label_range = label_from..self.bytes.len();
        self.bytes.push(b':');
        if matches!(value, PartValue::Missing(_)) {
            self.bytes.push(b'!');
        }
        let value_from = self.bytes.len();
        write_value(value, self.bytes);

        if let Some(salt) = self.salt
            && !matches!(value, PartValue::Public(_))
        {
            let pseudonym = salt.pseudonym(&self.bytes[label_range], &self.bytes[value_from..]);
            self.bytes.truncate(value_from);
            print(format_args!("~{pseudonym}"), self.bytes);
        }
    }

    /// Appends the separator `&`, unless the subject is empty.
    fn separate(&mut self) {
        if !self.bytes.is_empty() {
            self.bytes.push(b'&');
        }
    }
}

/// Replaces the values in `plain`, a subject that was written without a salt, by their pseudonyms with this salt.
///
/// Values that are already pseudonyms are kept.
pub(crate) fn anonymize_subject(plain: &str, salt: &Salt) -> String {
    let anonymize = |part: &str| {
        // A kind contains no `:`, except the one before the name of a header or cookie.
        let colon = if part.starts_with("header:") || part.starts_with("cookie:") { 1 } else { 0 };
        let Some((at, _)) = part.match_indices(':').nth(colon) else { return part.to_owned() };
        let (label, value) = (&part[..at], &part[at + 1..]);
        let (mark, value) = value.strip_prefix('!').map_or(("", value), |value| ("!", value));
        let is_public = label == "path" && mark.is_empty();
        if is_public || value.starts_with('~') {
            part.to_owned()
        } else {
            format!("{label}:{mark}~{}", salt.pseudonym(label, value.as_bytes()))
        }
    };
    plain.split('&').map(anonymize).collect::<Vec<_>>().join("&")
}

fn write_value(value: PartValue<'_>, bytes: &mut SubjectBytes) {
    match value {
        // Contains only digits, letters, `.`, `:` and `/`, none of which is escaped.
        PartValue::Address(address) | PartValue::Missing(address) => address.write(bytes),
        PartValue::Plain(value) | PartValue::Public(value) if value.len() <= VALUE_BYTES_MAX => escape(value, bytes),
        PartValue::Plain(value) | PartValue::Public(value) | PartValue::Secret(value) => {
            write_digest(&Sha256::digest(value).into(), bytes);
        }
        PartValue::Digest(digest) => write_digest(digest, bytes),
    }
}

/// Appends `value`. Writes `% & # ~ ! { }` and everything except visible ASCII as `%XX` (upper-case hexadecimal).
fn escape(value: &[u8], bytes: &mut SubjectBytes) {
    const ESCAPED: &AsciiSet =
        &CONTROLS.add(b' ').add(b'%').add(b'&').add(b'#').add(b'~').add(b'!').add(b'{').add(b'}');
    percent_encode(value, ESCAPED).for_each(|piece| bytes.extend_from_slice(piece.as_bytes()));
}

/// Appends `#` and the first 16 bytes of a digest in hexadecimal. Finding two values that share them takes about 2^64
/// attempts.
fn write_digest(digest: &[u8; 32], bytes: &mut SubjectBytes) {
    let half = digest.first_chunk().map_or(0, |half| u128::from_be_bytes(*half));
    print(format_args!("#{half:032x}"), bytes);
}

/// Appends formatted text.
fn print(text: fmt::Arguments<'_>, bytes: &mut SubjectBytes) {
    struct Ascii<'b>(&'b mut SubjectBytes);

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
