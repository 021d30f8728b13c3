//! What a rule looks at in a request.

use std::borrow::Cow;

use http::{HeaderMap, Method};

use super::path;

/// A request as rules see it.
///
/// ```
/// use tollgate::rules::RequestView;
///
/// let request = http::Request::post("https://api.example.com/shorten?x=1").body(())?;
/// let view = RequestView::of(&request);
/// assert_eq!(view.path(), "/shorten");
/// assert_eq!(view.hosts().collect::<Vec<_>>(), ["api.example.com"]);
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RequestView<'r> {
    method: &'r Method,
    path: &'r str,
    headers: &'r HeaderMap,
    authority: Option<&'r str>,
}

impl<'r> RequestView<'r> {
    /// A request with this method, path (a query does not matter) and headers, of which Host is one.
    pub fn new(method: &'r Method, path: &'r str, headers: &'r HeaderMap) -> RequestView<'r> {
        RequestView { method, path, headers, authority: None }
    }

    /// The same request, whose URI names a host too.
    #[must_use]
    pub fn with_authority(self, authority: Option<&'r str>) -> RequestView<'r> {
        RequestView { authority, ..self }
    }

    /// An HTTP request.
    pub fn of<B>(request: &'r http::Request<B>) -> RequestView<'r> {
        RequestView::new(request.method(), request.uri().path(), request.headers())
            .with_authority(request.uri().authority().map(|authority| authority.as_str()))
    }

    /// The head of an HTTP request.
    pub fn of_parts(parts: &'r http::request::Parts) -> RequestView<'r> {
        RequestView::new(&parts.method, parts.uri.path(), &parts.headers)
            .with_authority(parts.uri.authority().map(|authority| authority.as_str()))
    }

    /// The method.
    pub fn method(&self) -> &'r Method {
        self.method
    }

    /// The path as it was sent.
    pub fn path(&self) -> &'r str {
        self.path
    }

    /// The one spelling under which the path is counted, whatever the client wrote: for `by = ["path"]`, as the
    /// [`Origin`](crate::identity::Origin) of a request wants it. Empty if servers would understand the path as different
    /// ones, so that nobody can say which it is.
    ///
    /// ```
    /// use tollgate::rules::RequestView;
    ///
    /// let request = http::Request::get("//a/./x/../%62/?q=1").body(())?;
    /// assert_eq!(RequestView::of(&request).canonical_path(), "/a/b");
    /// let request = http::Request::get("/1%2Fx/../login").body(())?;
    /// assert_eq!(RequestView::of(&request).canonical_path(), "");
    /// # Ok::<(), http::Error>(())
    /// ```
    pub fn canonical_path(&self) -> Cow<'r, str> {
        path::canonical(self.path).unwrap_or_default()
    }

    /// The headers.
    pub fn headers(&self) -> &'r HeaderMap {
        self.headers
    }

    /// Every host that the request names: in its URI, in Host.
    pub fn hosts(&self) -> impl Iterator<Item = &'r str> {
        // `user@host` is an authority too.
        let authority = self.authority.map(|authority| authority.rsplit('@').next().unwrap_or(authority));
        // Looked up when it is asked for: most rules are for every host.
        let lines = std::iter::once(self.headers).flat_map(|headers| headers.get_all(http::header::HOST));
        authority.into_iter().chain(lines.filter_map(|line| line.to_str().ok()))
    }
}
