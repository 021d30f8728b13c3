//! The headers of a described request: an object of texts.
//!
//! JSON lets a name stand in an object twice, and readers commonly keep the last. A header may be why a request is refused, so which
//! one was meant is not guessed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

#[derive(Default)]
pub(super) struct Headers(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Headers, D::Error> {
        struct HeadersVisitor;
        impl<'de> Visitor<'de> for HeadersVisitor {
            type Value = Headers;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of texts by the names of headers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
                let mut headers = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    match headers.entry(name) {
                        Entry::Vacant(vacant) => drop(vacant.insert(map.next_value()?)),
                        Entry::Occupied(known) => {
                            let name = known.key();
                            return Err(A::Error::custom(format_args!("request.headers: `{name}` stands there twice")));
                        }
                    }
                }
                Ok(Headers(headers))
            }
        }
        deserializer.deserialize_map(HeadersVisitor)
    }
}
