//! What a rule looks at in a request.

use std::borrow::Cow;
use std::fmt;

use http::{Extensions, HeaderMap, Method, Uri};

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
#[derive(Clone)]
pub struct RequestView<'r> {
    method: &'r Method,
    headers: &'r HeaderMap,
    target: Target<'r>,
    caller: Option<&'r str>,
}

/// How to find the URI that the client sent among a request's extensions.
pub(crate) type FindUri = fn(&Extensions) -> Option<&Uri>;

/// Where a request goes. A URI is looked for, and taken apart, when a rule looks at it.
#[derive(Clone, Copy)]
enum Target<'r> {
    /// With the place of the URI that was sent, if this one was changed on the way.
    Uri(&'r Uri, Option<(&'r Extensions, FindUri)>),
    Parts {
        path: &'r str,
        authority: Option<&'r str>,
    },
}

impl<'r> RequestView<'r> {
    /// A request with this method, path (a query does not matter) and headers, of which Host is one.
    pub fn new(method: &'r Method, path: &'r str, headers: &'r HeaderMap) -> RequestView<'r> {
        RequestView { method, headers, target: Target::Parts { path, authority: None }, caller: None }
    }

    /// The same request, whose URI names a host too.
    #[must_use]
    pub fn with_authority(self, authority: Option<&'r str>) -> RequestView<'r> {
        RequestView { target: Target::Parts { path: self.path(), authority }, ..self }
    }

    /// Sets the caller, in place of the one that API key, token or address determine. `None` removes it.
    ///
    /// Rules by [`Subject::Caller`](crate::Subject::Caller) count by it.
    #[must_use]
    pub fn with_caller(self, caller: Option<&'r str>) -> RequestView<'r> {
        RequestView { caller, ..self }
    }

    /// Returns the caller that [`with_caller`](RequestView::with_caller) has set, if any.
    pub fn caller(&self) -> Option<&'r str> {
        self.caller
    }

    /// An HTTP request.
    pub fn of<B>(request: &'r http::Request<B>) -> RequestView<'r> {
        RequestView {
            method: request.method(),
            headers: request.headers(),
            target: Target::Uri(request.uri(), None),
            caller: None,
        }
    }

    /// The head of an HTTP request.
    pub fn of_parts(parts: &'r http::request::Parts) -> RequestView<'r> {
        RequestView {
            method: &parts.method,
            headers: &parts.headers,
            target: Target::Uri(&parts.uri, None),
            caller: None,
        }
    }

    /// An HTTP request, whose path is that of the URI that is found in its extensions, if one is.
    #[cfg(feature = "tower")]
    pub(crate) fn sent_as<B>(request: &'r http::Request<B>, find_sent: Option<FindUri>) -> RequestView<'r> {
        let sent = find_sent.map(|find_sent| (request.extensions(), find_sent));
        RequestView {
            method: request.method(),
            headers: request.headers(),
            target: Target::Uri(request.uri(), sent),
            caller: None,
        }
    }

    /// The method.
    pub fn method(&self) -> &'r Method {
        self.method
    }

    /// The path as it was sent.
    pub fn path(&self) -> &'r str {
        match self.target {
            Target::Uri(uri, None) => uri.path(),
            Target::Uri(uri, Some((extensions, find_sent))) => find_sent(extensions).unwrap_or(uri).path(),
            Target::Parts { path, .. } => path,
        }
    }

    /// Returns whether the path that was sent has more bytes than this, without its query.
    pub(crate) fn is_path_longer_than(&self, bytes_max: usize) -> bool {
        is_longer(self.path(), bytes_max)
    }

    /// Returns whether the path that the service received, which something before it may have shortened, has more bytes than this.
    /// Cheaper than [`RequestView::is_path_longer_than`].
    pub(crate) fn is_received_path_longer_than(&self, bytes_max: usize) -> bool {
        match self.target {
            Target::Uri(uri, _) => uri.path().len() > bytes_max,
            Target::Parts { path, .. } => is_longer(path, bytes_max),
        }
    }

    fn authority(&self) -> Option<&'r str> {
        match self.target {
            Target::Uri(uri, _) => uri.authority().map(|authority| authority.as_str()),
            Target::Parts { authority, .. } => authority,
        }
    }

    /// The one spelling under which the path is counted, whatever the client wrote: for `by = ["path"]`, as the
    /// [`Origin`](crate::identity::Origin) of a request wants it. Empty if servers would understand the path as different
    /// ones, so that nobody can say which it is.
    ///
    /// ```
    /// use tollgate::rules::RequestView;
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

    /// The headers.
    pub fn headers(&self) -> &'r HeaderMap {
        self.headers
    }

    /// Every host that the request names: in its URI, in Host.
    pub fn hosts(&self) -> impl Iterator<Item = &'r str> {
        // `user@host` is an authority too.
        let authority = self.authority().map(|authority| authority.rsplit('@').next().unwrap_or(authority));
        // Looked up when it is asked for: most rules are for every host.
        let lines = std::iter::once(self.headers).flat_map(|headers| headers.get_all(http::header::HOST));
        authority.into_iter().chain(lines.filter_map(|line| line.to_str().ok()))
    }
}

fn is_longer(path: &str, bytes_max: usize) -> bool {
    path.len() > bytes_max && path.find(['?', '#']).unwrap_or(path.len()) > bytes_max
}

/// Headers, authority and query hold credentials, and so are not printed.
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
    fn no_credential_of_a_request_is_printed() {
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
