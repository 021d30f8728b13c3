//! The parts of a request that rules match.

use std::borrow::Cow;
use std::fmt;

use http::{Extensions, HeaderMap, Method, Uri};

use super::path;

/// A borrowed view of the parts of a request that rules match: method, path, host and headers.
///
/// ```
/// use tidegate::rules::RequestView;
///
/// let request = http::Request::post("https://api.example.com/shorten?x=1").body(())?;
/// let view = RequestView::of(&request);
/// assert_eq!(view.path(), "/shorten");
/// assert_eq!(view.hosts().collect::<Vec<_>>(), ["api.example.com"]);
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone)]
pub struct RequestView<'r> {
    method: &'r Method,
    headers: &'r HeaderMap,
    target: RequestTarget<'r>,
    caller: Option<&'r str>,
}

/// A function that returns the URI that the client sent from the extensions of a request, or `None` if it is not there.
pub(crate) type FindUri = fn(&Extensions) -> Option<&Uri>;

/// The target of a request: its path and authority.
#[derive(Clone, Copy)]
enum RequestTarget<'r> {
    /// The URI of the request. If a router may have changed its path, also a way to find the URI that the client sent.
    Uri(&'r Uri, Option<(&'r Extensions, FindUri)>),
    Parts {
        path: &'r str,
        authority: Option<&'r str>,
    },
}

impl<'r> RequestView<'r> {
    /// Creates a view from a method, a path and headers. Rules ignore a query in the path.
    ///
    /// The host is read from the `Host` header; [`with_authority`](RequestView::with_authority) adds another.
    pub fn new(method: &'r Method, path: &'r str, headers: &'r HeaderMap) -> RequestView<'r> {
        RequestView::on(method, headers, RequestTarget::Parts { path, authority: None })
    }

    fn on(method: &'r Method, headers: &'r HeaderMap, target: RequestTarget<'r>) -> RequestView<'r> {
        RequestView { method, headers, target, caller: None }
    }

    /// Sets the authority (`host[:port]`), which rules match in addition to the `Host` header. `None` removes it.
    ///
    /// Replaces the authority of the URI in a view that was created from a request.
    #[must_use]
    pub fn with_authority(self, authority: Option<&'r str>) -> RequestView<'r> {
        RequestView { target: RequestTarget::Parts { path: self.path(), authority }, ..self }
    }

    /// Sets the value by which rules by [`Subject::Caller`](crate::Subject::Caller) count this request.
    ///
    /// If it is `None`, they count by API key, verified user or client address, which is the default.
    #[must_use]
    pub fn with_caller(self, caller: Option<&'r str>) -> RequestView<'r> {
        RequestView { caller, ..self }
    }

    /// Returns the caller that [`with_caller`](RequestView::with_caller) has set, else `None`.
    pub fn caller(&self) -> Option<&'r str> {
        self.caller
    }

    /// Creates a view of an HTTP request: its method, its URI and its headers.
    pub fn of<B>(request: &'r http::Request<B>) -> RequestView<'r> {
        RequestView::on(request.method(), request.headers(), RequestTarget::Uri(request.uri(), None))
    }

    /// Creates a view of the head of an HTTP request: its method, its URI and its headers.
    pub fn of_parts(parts: &'r http::request::Parts) -> RequestView<'r> {
        RequestView::on(&parts.method, &parts.headers, RequestTarget::Uri(&parts.uri, None))
    }

    /// Creates a view of an HTTP request whose URI a router may have rewritten.
    ///
    /// Its path is that of the URI that `find_sent` returns from the request's extensions. Without `find_sent`, or if it
    /// returns `None`, the path is that of the request's URI. The authority is always that of the request's URI.
    #[cfg(feature = "tower")]
    pub(crate) fn of_rewritten<B>(request: &'r http::Request<B>, find_sent: Option<FindUri>) -> RequestView<'r> {
        let sent = find_sent.map(|find_sent| (request.extensions(), find_sent));
        RequestView::on(request.method(), request.headers(), RequestTarget::Uri(request.uri(), sent))
    }

    /// Returns the method.
    pub fn method(&self) -> &'r Method {
        self.method
    }

    /// Returns the path as the client sent it, without decoding.
    ///
    /// The path of a URI has no query. A view that was created by [`new`](RequestView::new) returns the given text, which
    /// may have one.
    pub fn path(&self) -> &'r str {
        match self.target {
            RequestTarget::Uri(uri, None) => uri.path(),
            RequestTarget::Uri(uri, Some((extensions, find_sent))) => find_sent(extensions).unwrap_or(uri).path(),
            RequestTarget::Parts { path, .. } => path,
        }
    }

    /// Returns whether [`path`](RequestView::path), without query and fragment, has more than `bytes_max` bytes.
    ///
    /// Also `true` if the path in the request's own URI has, which may be another one if a router has rewritten it.
    pub(crate) fn is_path_longer_than(&self, bytes_max: usize) -> bool {
        let is_longer = |path: &str| path.len() > bytes_max && path.find(['?', '#']).unwrap_or(path.len()) > bytes_max;
        is_longer(self.path()) || matches!(self.target, RequestTarget::Uri(uri, Some(_)) if is_longer(uri.path()))
    }

    fn authority(&self) -> Option<&'r str> {
        match self.target {
            RequestTarget::Uri(uri, _) => uri.authority().map(|authority| authority.as_str()),
            RequestTarget::Parts { authority, .. } => authority,
        }
    }

    /// Returns the canonical form of the path, by which rules by [`Subject::Path`](crate::Subject::Path) count.
    ///
    /// All spellings of a path (escapes, dot segments, repeated slashes) have the same form. It begins with a slash,
    /// and has no query and no trailing slash, except that of the root, `/`. Empty if the path is ambiguous: servers
    /// may take it for different paths.
    ///
    /// ```
    /// use tidegate::rules::RequestView;
    ///
    /// let request = http::Request::get("/a/./x/../%62/?q=1").body(())?;
    /// assert_eq!(RequestView::of(&request).canonical_path(), "/a/b");
    /// let request = http::Request::get("/1%2Fx/../login").body(())?;
    /// assert_eq!(RequestView::of(&request).canonical_path(), "");
    /// # Ok::<(), http::Error>(())
    /// ```
    pub fn canonical_path(&self) -> Cow<'r, str> {
        path::canonical(self.path()).unwrap_or_default()
    }

    /// Returns the headers.
    pub fn headers(&self) -> &'r HeaderMap {
        self.headers
    }

    /// Iterates over all hosts that the request names: the one in its authority, then that of each `Host` header.
    ///
    /// They are as the client sent them, with port and in any case, but the authority is without its `user@`. A `Host`
    /// header that is not visible ASCII is skipped.
    pub fn hosts(&self) -> impl Iterator<Item = &'r str> {
        // Drops the user of an authority `user@host`.
        let authority = self.authority().map(|authority| authority.rsplit('@').next().unwrap_or(authority));
        // Lazy, because most rules match every host.
        let lines = std::iter::once(self.headers).flat_map(|headers| headers.get_all(http::header::HOST));
        authority.into_iter().chain(lines.filter_map(|line| line.to_str().ok()))
    }
}

/// Shows method and path only: headers, authority and query may contain credentials.
impl fmt::Debug for RequestView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path().split(['?', '#']).next().unwrap_or_default();
        f.debug_struct("RequestView").field("method", self.method).field("path", &path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_contains_no_credentials() {
        let request = http::Request::get("https://planted:planted@example.com/reset?token=planted")
            .header("authorization", "Bearer planted")
            .header("x-api-key", "planted")
            .body(())
            .unwrap();
        let whole = RequestView::of(&request);
        let headers = request.headers();
        let parts = RequestView::new(request.method(), "/reset?token=planted#planted", headers);
        for view in [whole, parts.with_authority(Some("planted@example.com"))] {
            let printed = format!("{view:?}");
            assert!(!printed.contains("planted") && printed.contains("GET") && printed.contains("/reset"), "{printed}");
        }
    }
}
