//! The routes of the service and their OpenAPI document.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::http::header::{LOCATION, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tidegate::layer::RateLimitLayer;
use url::Url;
use utoipa::{OpenApi, ToSchema};
use utoipa_swagger_ui::{Config, SwaggerUi};

use crate::slugs::{Away, NotMade, Slugs};

/// Maximum length of a URL. Not all browsers and proxies support longer ones.
const URL_BYTES_MAX: usize = 2_048;
/// Maximum size of a body: the longest URL with each byte escaped, and the JSON around it.
const BODY_BYTES_MAX: usize = 16 * 1_024;

#[derive(OpenApi)]
#[openapi(info(title = "shortener", description = "Short links. Creating them is limited; following them is not."))]
#[openapi(paths(shorten, follow))]
struct Document;

#[derive(Clone)]
struct Shortener {
    slugs: Slugs,
    public_url: Arc<str>,
}

/// Builds the service. The limits apply to `POST /shorten` only.
pub(crate) fn app(slugs: Slugs, public_url: &str, limits: RateLimitLayer) -> Router {
    // The page loads nothing from other hosts, so the online validator of the document is off.
    let page = Config::default().validator_url("none");
    Router::new()
        .route("/shorten", post(shorten).route_layer(limits))
        .route("/{slug}", get(follow))
        .merge(SwaggerUi::new("/docs").url("/openapi.json", Document::openapi()).config(page))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Shortener { slugs, public_url: public_url.into() })
}

/// The body of `POST /shorten`.
#[derive(Deserialize, ToSchema)]
struct ShortenRequest {
    /// An absolute http or https URL of at most 2048 bytes.
    #[schema(example = "https://example.com/a/long/path?with=a&query", max_length = 2048)]
    url: String,
}

/// A created link.
#[derive(Serialize, ToSchema)]
struct Shortened {
    #[schema(example = "x7Gh2Kq")]
    slug: String,
    #[schema(example = "http://127.0.0.1:3000/x7Gh2Kq")]
    short_url: String,
}

/// The body of an error: what is wrong, and what would be accepted.
#[derive(Serialize, ToSchema)]
struct Problem {
    #[schema(example = "bad_request")]
    error: &'static str,
    message: String,
}

/// The body of a 429, as Tidegate writes it.
#[derive(ToSchema)]
#[allow(dead_code)] // only for the document
struct RateLimited {
    #[schema(example = "rate_limited")]
    error: String,
    message: String,
    /// The number of links that an address may create per window.
    #[schema(example = 10)]
    limit: u32,
    /// The wait in seconds, rounded up, as in `Retry-After`.
    #[schema(example = 42)]
    retry_after: u64,
    /// The wait in milliseconds, rounded up.
    #[schema(example = 41873)]
    retry_after_ms: u64,
    #[schema(example = "per-minute")]
    policy: String,
    #[schema(example = "shorten")]
    rule: String,
}

/// Create a link
#[utoipa::path(
    post,
    path = "/shorten",
    request_body = ShortenRequest,
    responses(
        (status = 201, description = "The link", body = Shortened, headers(
            ("RateLimit" = String, description = "Links left, and seconds until one more is available: `\"per-minute\";r=9;t=60`"),
            ("RateLimit-Policy" = String, description = "The limit: `\"per-minute\";q=10;w=60`"),
            ("X-RateLimit-Limit" = u32, description = "Links per window"),
            ("X-RateLimit-Remaining" = u32, description = "Links left now"),
            ("X-RateLimit-Reset" = u64, description = "When one more link is available, in Unix seconds"),
        )),
        (status = 400, description = "The URL cannot be shortened", body = Problem),
        (status = 429, description = "Too many links from this address", body = RateLimited, headers(
            ("Retry-After" = u64, description = "Seconds until a link can be created again"),
            ("RateLimit" = String, description = "Links left, and seconds until the next attempt: `\"per-minute\";r=0;t=42`"),
            ("RateLimit-Policy" = String, description = "The limit: `\"per-minute\";q=10;w=60`"),
            ("X-RateLimit-Limit" = u32, description = "Links per window"),
            ("X-RateLimit-Remaining" = u32, description = "0"),
            ("X-RateLimit-Reset" = u64, description = "When to try again, in Unix seconds"),
        )),
        (status = 503, description = "Redis is unavailable and too many links are waiting for it, or no free slug was found", body = Problem, headers(
            ("Retry-After" = u64, description = "Seconds"),
        )),
    )
)]
async fn shorten(
    State(shortener): State<Shortener>,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Shortened>), Failure> {
    let url = read_url(body)?;
    let slug = shortener.slugs.add(url.as_str()).await.map_err(|not_made| match not_made {
        NotMade::NoFreeSlug => Failure::Unavailable("no free slug was found; try again"),
        NotMade::NoPlace => {
            Failure::Unavailable("no link was created: too many links are waiting for Redis; try again")
        }
    })?;
    let short_url = format!("{}/{slug}", shortener.public_url);
    Ok((StatusCode::CREATED, Json(Shortened { slug, short_url })))
}

/// Follow a link; never limited
#[utoipa::path(
    get,
    path = "/{slug}",
    params(("slug" = String, Path)),
    responses(
        (status = 302, description = "Redirect to the URL", headers(("Location" = String, description = "The URL"))),
        (status = 404, description = "No such link", body = Problem),
        (status = 503, description = "Redis is unavailable, and this instance does not have the link", body = Problem, headers(
            ("Retry-After" = u64, description = "Seconds"),
        )),
    )
)]
async fn follow(State(shortener): State<Shortener>, Path(slug): Path<String>) -> Result<Response, Failure> {
    match shortener.slugs.find(&slug).await {
        Ok(Some(url)) => Ok((StatusCode::FOUND, [(LOCATION, &*url)]).into_response()),
        Ok(None) => Err(Failure::NotFound),
        Err(Away) => Err(Failure::Unavailable("the link cannot be read from Redis; try again")),
    }
}

/// Parses the URL in the body. The content type is ignored.
fn read_url(body: Result<Bytes, BytesRejection>) -> Result<Url, Failure> {
    let body = body.map_err(|_| Failure::Bad(format!("expected a body of at most {BODY_BYTES_MAX} bytes")))?;
    let request: ShortenRequest = serde_json::from_slice(&body)
        .map_err(|error| Failure::Bad(format!("expected JSON like {{\"url\":\"https://example.com/\"}}: {error}")))?;
    let expected = format!("expected an absolute http or https URL of at most {URL_BYTES_MAX} bytes");
    let url = Url::parse(&request.url).map_err(|error| Failure::Bad(format!("{expected}: {error}")))?;
    match url.scheme() {
        // Parsing may escape characters, so both forms are checked.
        "http" | "https" if request.url.len() <= URL_BYTES_MAX && url.as_str().len() <= URL_BYTES_MAX => Ok(url),
        _ => Err(Failure::Bad(expected)),
    }
}

/// An error response.
enum Failure {
    /// The request is invalid. The message says what would be accepted.
    Bad(String),
    NotFound,
    /// The request cannot be served at the moment, with the reason.
    Unavailable(&'static str),
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, error, message) = match self {
            Failure::Bad(message) => (StatusCode::BAD_REQUEST, "bad_request", message),
            Failure::NotFound => (StatusCode::NOT_FOUND, "not_found", "there is no such link".to_owned()),
            Failure::Unavailable(why) => (StatusCode::SERVICE_UNAVAILABLE, "unavailable", why.to_owned()),
        };
        let mut response = (status, Json(Problem { error, message })).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, 1.into());
        }
        response
    }
}
