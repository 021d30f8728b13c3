//! The formats of `/metrics`: OpenMetrics text, and the older text format of Prometheus.
//!
//! The encoder writes OpenMetrics, which Prometheus asks for by name in `Accept`. Tools that read a page from `curl`,
//! such as `promtool check metrics`, know the older format only, and so do clients that ask for nothing. The samples
//! are the same in both. What differs are the comments:
//!
//! | | OpenMetrics | text format 0.0.4 |
//! |---|---|---|
//! | counter `x_total` | described as `x` | described as `x_total` |
//! | info `x_info` | described as `x`, type `info` | described as `x_info`, type `gauge` |
//! | end of the page | `# EOF` | |

use http::HeaderMap;
use http::header::ACCEPT;

const OPEN_METRICS: &str = "application/openmetrics-text";
const PLAIN_TEXT: &str = "text/plain";

/// A format of the metrics page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MetricsFormat {
    /// OpenMetrics text, version 1.0.0.
    OpenMetrics,
    /// The text format of Prometheus, version 0.0.4.
    Text,
}

impl MetricsFormat {
    /// Chooses the format by the `Accept` header of a request.
    ///
    /// Returns OpenMetrics if the header names it and does not prefer `text/plain`, else the text format.
    pub(crate) fn negotiate(headers: &HeaderMap) -> MetricsFormat {
        let weight = |media_type: &str| {
            let lines = headers.get_all(ACCEPT).iter().filter_map(|line| line.to_str().ok());
            let ranges = lines.flat_map(|line| line.split(','));
            ranges.filter_map(|range| weight_of(range, media_type)).fold(0.0, f64::max)
        };
        let open_metrics = weight(OPEN_METRICS);
        if open_metrics > 0.0 && open_metrics >= weight(PLAIN_TEXT) {
            MetricsFormat::OpenMetrics
        } else {
            MetricsFormat::Text
        }
    }

    /// Returns the content type of a page in this format.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            MetricsFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            MetricsFormat::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts a page of OpenMetrics text to this format.
    pub(super) fn convert(self, open_metrics: String) -> String {
        match self {
            MetricsFormat::OpenMetrics => open_metrics,
            MetricsFormat::Text => to_text(&open_metrics),
        }
    }
}

/// Returns the weight (`q`) of a media range of `Accept`, or `None` if the range is not exactly `media_type`.
///
/// A range without a valid weight has the weight 1.
fn weight_of(range: &str, media_type: &str) -> Option<f64> {
    let mut parts = range.split(';').map(str::trim);
    parts.next().filter(|name| name.eq_ignore_ascii_case(media_type))?;
    let mut parameters = parts.filter_map(|parameter| parameter.split_once('='));
    let weight = parameters.find(|(name, _)| name.eq_ignore_ascii_case("q"));
    Some(weight.and_then(|(_, weight)| weight.parse().ok()).unwrap_or(1.0))
}

/// Converts OpenMetrics text to the text format 0.0.4.
///
/// The encoder writes the `# HELP` of a metric directly before its `# TYPE`, which decides the name of both.
fn to_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|described| described.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                _ => ("", kind),
            };
            if let Some((_, help)) = help.take() {
                text.extend(["# HELP ", name, suffix, " ", help, "\n"]);
            }
            text.extend(["# TYPE ", name, suffix, " ", kind, "\n"]);
        } else if !line.starts_with('#') {
            text.extend([line, "\n"]);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_sent_to_clients_that_name_it_and_do_not_prefer_plain_text() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let plain_text_first = "text/plain;version=0.0.4;q=0.6, application/openmetrics-text;version=1.0.0;q=0.5";
        for (accept, format) in [
            (&[][..], MetricsFormat::Text),
            (&["*/*"], MetricsFormat::Text),
            (&["text/plain"], MetricsFormat::Text),
            (&[prometheus], MetricsFormat::OpenMetrics),
            (&[plain_text_first], MetricsFormat::Text),
            (&["text/plain;q=0.5", "Application/OpenMetrics-Text ; q=0.5"], MetricsFormat::OpenMetrics),
            (&["application/openmetrics-text;q=0"], MetricsFormat::Text),
            (&["application/openmetrics-text;q=nonsense"], MetricsFormat::OpenMetrics),
            (&[",;,q=1;;"], MetricsFormat::Text),
        ] {
            let headers = HeaderMap::from_iter(accept.iter().map(|line| (ACCEPT, line.parse().unwrap())));
            assert_eq!(MetricsFormat::negotiate(&headers), format, "{accept:?}");
        }
    }

    #[test]
    fn the_text_format_describes_each_metric_by_the_name_of_its_samples() {
        let open_metrics = "\
# HELP t_calls Calls to it.
# TYPE t_calls counter
t_calls_total{a=\"# TYPE x\"} 7
# HELP t_bytes Bytes.
# TYPE t_bytes gauge
# UNIT t_bytes bytes
t_bytes 5
# HELP t_build The version.
# TYPE t_build info
t_build_info{version=\"1\"} 1
# HELP t_seconds Time.
# TYPE t_seconds histogram
t_seconds_bucket{le=\"+Inf\"} 0
# EOF
";
        let text = "\
# HELP t_calls_total Calls to it.
# TYPE t_calls_total counter
t_calls_total{a=\"# TYPE x\"} 7
# HELP t_bytes Bytes.
# TYPE t_bytes gauge
t_bytes 5
# HELP t_build_info The version.
# TYPE t_build_info gauge
t_build_info{version=\"1\"} 1
# HELP t_seconds Time.
# TYPE t_seconds histogram
t_seconds_bucket{le=\"+Inf\"} 0
";
        assert_eq!(MetricsFormat::Text.convert(open_metrics.to_owned()), text);
        assert_eq!(MetricsFormat::OpenMetrics.convert(open_metrics.to_owned()), open_metrics);
    }
}
