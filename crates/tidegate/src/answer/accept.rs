//! Decides whether a request's `Accept` header asks for `application/problem+json`.
//!
//! The media type must be named. `*/*` and `application/*` come from clients that take any type, and these keep getting
//! plain JSON. If a client names both `application/problem+json` and `application/json`, the one with the higher weight
//! is used. On a tie it is the problem, since a client does not name that type by accident.

use http::HeaderMap;
use http::header::ACCEPT;

const PROBLEM: &str = "application/problem+json";
const JSON: &str = "application/json";

/// The highest weight, in thousandths: HTTP allows three decimal places.
const WEIGHT_MAX: u16 = 1_000;

/// Returns whether `Accept` names `application/problem+json`, with a weight above 0 and not below that of
/// `application/json`. `headers` are those of the request.
pub(super) fn asks_for_problem(headers: &HeaderMap) -> bool {
    let (mut problem, mut json) = (0, 0);
    for line in headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()) {
        for range in line.split(',') {
            let (name, parameters) = range.split_once(';').unwrap_or((range, ""));
            let found = match name.trim() {
                name if name.eq_ignore_ascii_case(PROBLEM) => &mut problem,
                name if name.eq_ignore_ascii_case(JSON) => &mut json,
                _ => continue,
            };
            *found = weight(parameters).max(*found);
        }
    }
    problem > 0 && problem >= json
}

/// Returns the weight in the parameters of a media type, such as `charset=utf-8;q=0.5`, in thousandths.
///
/// 1,000 if there is no `q`, 0 if its value is invalid.
fn weight(parameters: &str) -> u16 {
    let named = |parameter: &str| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("q").then(|| thousandths(value.trim()).unwrap_or(0))
    };
    parameters.split(';').find_map(named).unwrap_or(WEIGHT_MAX)
}

/// Parses a weight into thousandths: `0.25` is 250. Values above 1 are cut to 1,000.
///
/// Returns `None` unless the text is `0` or `1`, optionally with a point and at most three digits.
fn thousandths(text: &str) -> Option<u16> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let whole: u16 = matches!(whole, "0" | "1").then(|| whole.parse().ok())??;
    if part.len() > 3 || !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let part: u16 = format!("{part:0<3}").parse().ok()?;
    Some((whole * WEIGHT_MAX + part).min(WEIGHT_MAX))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn asks(lines: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(ACCEPT, HeaderValue::from_str(line).unwrap());
        }
        asks_for_problem(&headers)
    }

    #[test]
    fn problem_json_must_be_named() {
        assert!(asks(&["application/problem+json"]));
        assert!(asks(&["Application/Problem+JSON ; q=0.1"]));
        assert!(asks(&["text/html, application/problem+json;charset=utf-8;q=0.5, */*;q=0.1"]));
        assert!(asks(&["text/html", "application/problem+json"]));
        for lines in [&[][..], &["*/*"], &["application/*"], &["application/json"], &["application/problem+xml"], &[""]]
        {
            assert!(!asks(lines), "{lines:?}");
        }
    }

    #[test]
    fn the_higher_weight_wins_and_a_tie_is_the_problem() {
        assert!(asks(&["application/json, application/problem+json"]));
        assert!(asks(&["application/json;q=0.8, application/problem+json;q=0.801"]));
        assert!(!asks(&["application/json, application/problem+json;q=0.9"]));
    }

    #[test]
    fn zero_and_invalid_weights_do_not_ask_for_a_problem() {
        for q in ["0", "0.0", "0.000", "2", "-1", "nan", "", ".5", "0.1234", "1e3", "0.5x"] {
            assert!(!asks(&[&format!("application/problem+json;q={q}")]), "{q}");
        }
        assert!(asks(&["application/problem+json;q=1.000"]));
        assert!(asks(&["application/problem+json;q=1."]));
    }
}
