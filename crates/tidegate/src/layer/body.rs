//! Converts the bytes of a refusal into a body of the inner service's type.

use bytes::Bytes;

/// Converts the bytes of a refusal to the body type `B` of a service.
///
/// [`FromBytes`] suits most services. A closure `Fn(Bytes) -> B` implements this trait, too.
///
/// ```
/// use bytes::Bytes;
/// use tidegate::layer::{EmptyBody, FromBytes, MakeBody};
///
/// fn makes<B>(_: impl MakeBody<B>) {}
/// makes::<axum::body::Body>(FromBytes);
/// makes::<tonic::body::Body>(EmptyBody);
/// makes::<String>(|bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned());
/// ```
pub trait MakeBody<B>: Clone {
    /// Returns a body with these bytes. An implementation may ignore them, as [`EmptyBody`] does.
    fn make(&self, bytes: Bytes) -> B;
}

/// Makes bodies with `From<Bytes>`, for body types such as axum's `Body`, `Full<Bytes>` and `Vec<u8>`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FromBytes;

impl<B: From<Bytes>> MakeBody<B> for FromBytes {
    fn make(&self, bytes: Bytes) -> B {
        bytes.into()
    }
}

/// Makes empty bodies with `Default` and drops the bytes, for tonic. A refusal then has only a status and headers.
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
