//! A refusal's bytes as a body of the inner service's type.

use bytes::Bytes;

/// Makes a body of type `B` for a refusal. [`FromBytes`] does for most; a closure `Fn(Bytes) -> B` is one, too.
///
/// ```
/// use bytes::Bytes;
/// use tollgate::layer::{EmptyBody, FromBytes, MakeBody};
///
/// fn makes<B>(_: impl MakeBody<B>) {}
/// makes::<axum::body::Body>(FromBytes);
/// makes::<tonic::body::Body>(EmptyBody);
/// makes::<String>(|bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned());
/// ```
pub trait MakeBody<B>: Clone {
    /// The body that holds these bytes, as far as it can.
    fn make(&self, bytes: Bytes) -> B;
}

/// Bodies that can be made from bytes: axum's, `Full`, `Vec<u8>`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FromBytes;

impl<B: From<Bytes>> MakeBody<B> for FromBytes {
    fn make(&self, bytes: Bytes) -> B {
        bytes.into()
    }
}

/// Empty bodies: for tonic, whose refusals are all headers. A plain HTTP request is told by status and headers alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EmptyBody;

impl<B: Default> MakeBody<B> for EmptyBody {
    fn make(&self, _bytes: Bytes) -> B {
        B::default()
    }
}

impl<B, F: Fn(Bytes) -> B + Clone> MakeBody<B> for F {
    fn make(&self, bytes: Bytes) -> B {
        self(bytes)
    }
}
