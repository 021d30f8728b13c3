//! The text form of a limit: `QUOTA/WINDOW [ALGORITHM] [option=value …]`.
//!
//! The same grammar is used on the command line, in configuration files and in wire protocols. An error names the place
//! in the text and what is accepted there. The length of the text is checked before it is parsed, so the input cannot
//! make the parser or its messages large.
//!
//! A text in another common form, such as `10 per minute`, is an error too, so that there is one way to write a limit. Its
//! message says how it is written here; see [`meant`].

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::{Algorithm, Limit, LimitError};

/// The maximum length of a limit text. The longest sensible one has about 60 bytes.
const TEXT_BYTES_MAX: usize = 256;
/// The maximum number of characters of the input that an error message repeats.
const SHOWN_CHARS_MAX: usize = 32;

/// The maximum number of digits of a fraction for which a limit is suggested. The product with a week is below 2^53, so
/// the clients in other languages can compute it too.
const FRACTION_DIGITS_MAX: u32 = 3;

/// Unit names and their microseconds. `Display` uses the first name of each size.
const UNITS: [(&str, u64); 23] = [
    ("week", 604_800_000_000),
    ("weeks", 604_800_000_000),
    ("w", 604_800_000_000),
    ("day", 86_400_000_000),
    ("days", 86_400_000_000),
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("hr", 3_600_000_000),
    ("hour", 3_600_000_000),
    ("hours", 3_600_000_000),
    ("min", 60_000_000),
    ("mins", 60_000_000),
    ("minute", 60_000_000),
    ("minutes", 60_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("sec", 1_000_000),
    ("secs", 1_000_000),
    ("second", 1_000_000),
    ("seconds", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
    ("µs", 1),
];

/// The error of a limit text that cannot be parsed.
///
/// The message says what is wrong, where, and what would be accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LimitTextError {
    span: Range<usize>,
    found: String,
    problem: Problem,
    /// The limit that is probably meant, as it must be written.
    meant: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Problem {
    TooLong(usize),
    Empty,
    Slash,
    Quota,
    Window,
    Fraction,
    Unit,
    Word,
    OptionName,
    OptionTwice,
    OptionNumber(&'static str),
    OptionFlag,
    Limit(LimitError),
}

impl LimitTextError {
    /// Returns the byte range of the part of the text that is wrong.
    ///
    /// Empty if something is missing at that place. The whole text if it is too long or blank.
    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// Returns the limit that is probably meant, as it must be written: `10/min` for `10 per minute`. Returns `None` if
    /// the text has no such form. The message contains it.
    pub fn meant(&self) -> Option<&str> {
        self.meant.as_deref()
    }
}

impl fmt::Display for LimitTextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LimitTextError { span, found, problem, meant } = self;
        // The suggestion is an example already.
        let example = if meant.is_some() { "" } else { "; for example 10/min or 100/min token-bucket burst=20" };
        match problem {
            Problem::TooLong(bytes) => {
                return write!(f, "a limit can have at most {TEXT_BYTES_MAX} bytes, but this one has {bytes}{example}");
            }
            Problem::Empty => return write!(f, "expected QUOTA/WINDOW, found nothing{example}"),
            Problem::Slash => write!(f, "expected a / between quota and window{example}")?,
            Problem::Quota => write!(f, "expected a quota from 1 to {} in digits{example}", super::QUOTA_MAX)?,
            Problem::Window => {
                write!(f, "expected a window: a whole number and a unit, or a unit alone (500ms, 10s, min, day)")?
            }
            Problem::Fraction => write!(f, "expected a window in whole numbers, such as 90min")?,
            Problem::Unit => write!(f, "unknown unit of time; expected one of us, ms, s, min, h, day, week")?,
            Problem::Word => {
                write!(f, "unknown algorithm; expected one of ")?;
                for (index, algorithm) in Algorithm::ALL.into_iter().enumerate() {
                    write!(f, "{}{}", if index == 0 { "" } else { ", " }, algorithm.as_str())?;
                }
            }
            Problem::OptionName => {
                write!(f, "unknown option; expected one of burst=N, queue=N, count_denied=true|false")?
            }
            Problem::OptionTwice => write!(f, "this option is given twice")?,
            Problem::OptionNumber(option) => {
                write!(f, "expected {option}=N with N from 1 to {}, in digits", super::QUOTA_MAX)?
            }
            Problem::OptionFlag => write!(f, "expected count_denied=true or count_denied=false")?,
            // Without the number of microseconds: the text follows.
            Problem::Limit(LimitError::Window { got_us }) => write!(f, "{}", WindowRange { got_us: *got_us })?,
            Problem::Limit(error) => write!(f, "{error}")?,
        }
        write!(f, " (at byte {}: {found:?})", span.start)?;
        match meant {
            Some(limit) => write!(f, "; did you mean {limit}?"),
            None => Ok(()),
        }
    }
}

/// Shows the range of windows; and the reason for the maximum, if the rejected window is too long.
pub(super) struct WindowRange {
    pub(super) got_us: u64,
}

impl fmt::Display for WindowRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a window must be from 1ms to 400day")?;
        if self.got_us > super::WINDOW_US_MAX {
            write!(f, ", the longest whose arithmetic is exact in Redis")?;
        }
        Ok(())
    }
}

impl std::error::Error for LimitTextError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.problem {
            Problem::Limit(error) => Some(error),
            _ => None,
        }
    }
}

impl FromStr for Limit {
    type Err = LimitTextError;

    fn from_str(text: &str) -> Result<Limit, LimitTextError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(LimitTextError {
                span: 0..text.len(),
                found: String::new(),
                problem: Problem::TooLong(text.len()),
                meant: None,
            });
        }
        parse(text).map_err(|error| LimitTextError { meant: meant(text), ..error })
    }
}

/// Parses a limit. An error has no suggestion.
fn parse(text: &str) -> Result<Limit, LimitTextError> {
    let words: Vec<Word<'_>> = words(text).collect();
    let Some((&rate, rest)) = words.split_first() else {
        return Err(LimitTextError { span: 0..text.len(), found: String::new(), problem: Problem::Empty, meant: None });
    };
    let (quota, window_us) = parse_rate(rate)?;

    let mut algorithm = (Algorithm::Sliding, rate);
    let mut options = rest;
    if let Some((&word, after)) = rest.split_first()
        && !word.text.contains('=')
    {
        algorithm = (word.text.parse().map_err(|_| word.error(Problem::Word))?, word);
        options = after;
    }
    let options = Options::parse(options)?;

    let mut limit = Limit::build(quota, window_us, algorithm.0, None, false).map_err(|error| match error {
        LimitError::Quota { of: Some(_), .. } => algorithm.1.error(Problem::Limit(error)),
        error => rate.error(Problem::Limit(error)),
    })?;
    if let Some((burst, word)) = options.burst {
        limit = limit.with_burst(burst).map_err(|error| word.error(Problem::Limit(error)))?;
    }
    if let Some((queue, word)) = options.queue {
        limit = limit.with_queue(queue).map_err(|error| word.error(Problem::Limit(error)))?;
    }
    Ok(limit.with_count_denied(options.count_denied.is_some_and(|(value, _)| value)))
}

/// Writes the text form. Parsing it gives the same limit.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.quota(), WindowText(self.window_us()))?;
        if self.algorithm() != Algorithm::Sliding {
            write!(f, " {}", self.algorithm().as_str())?;
        }
        if self.cost_max() != self.quota() {
            let option = if self.algorithm() == Algorithm::LeakyBucket { "queue" } else { "burst" };
            write!(f, " {option}={}", self.cost_max())?;
        }
        if self.count_denied() {
            write!(f, " count_denied=true")?;
        }
        Ok(())
    }
}

/// Returns a window in the largest unit that divides it, such as 90 and `min`. 0 is in `us`.
pub(super) fn in_largest_unit(window_us: u64) -> (u64, &'static str) {
    let divides = |&(_, unit_us): &(&str, u64)| window_us >= unit_us && window_us.is_multiple_of(unit_us);
    let (unit, unit_us) = UNITS.into_iter().find(divides).unwrap_or(("us", 1));
    (window_us / unit_us, unit)
}

/// A window in microseconds, displayed in the largest unit that divides it: `min`, `90min`, `500ms`.
struct WindowText(u64);

impl fmt::Display for WindowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match in_largest_unit(self.0) {
            (1, unit) => write!(f, "{unit}"),
            (count, unit) => write!(f, "{count}{unit}"),
        }
    }
}

/// Returns the limit that a text in another common form means, as it must be written: `10/min` for `10 / min`,
/// `10 per minute` or `10/MIN`, and `10/90min` for `10/1.5h`.
///
/// Returns `None` if the text has another form, or that limit would be invalid.
fn meant(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase().replace('/', " / ");
    let mut words = text.split_ascii_whitespace();
    let quota = words.next()?;
    words.next().filter(|word| ["/", "per"].contains(word))?;
    let mut window = words.next()?.to_owned();
    if window.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        window += words.next()?;
    }
    let window = WindowText(fractional_window_us(&window)?);
    let rest: String = words.flat_map(|word| [" ", word]).collect();
    let limit = format!("{quota}/{window}{rest}");
    parse(&limit).is_ok().then_some(limit)
}

/// Parses a window whose number may have a fraction of up to three digits, such as `1.5h`. Returns `None` if it is not a
/// whole number of microseconds.
fn fractional_window_us(text: &str) -> Option<u64> {
    let number_bytes = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(number_bytes);
    let (_, unit_us) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
    if number.is_empty() {
        return Some(unit_us);
    }
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let divisor = 10_u64.pow(u32::try_from(fraction.len()).ok().filter(|digits| *digits <= FRACTION_DIGITS_MAX)?);
    let parts = fraction.parse::<u64>().ok()? * unit_us;
    whole.checked_mul(unit_us)?.checked_add(parts / divisor).filter(|_| parts.is_multiple_of(divisor))
}

/// A part of the limit text, and the byte at which it starts.
#[derive(Clone, Copy)]
struct Word<'t> {
    text: &'t str,
    start: usize,
}

impl<'t> Word<'t> {
    /// Creates an error that points at this word.
    fn error(self, problem: Problem) -> LimitTextError {
        LimitTextError {
            span: self.start..self.start + self.text.len(),
            found: self.text.chars().take(SHOWN_CHARS_MAX).collect(),
            problem,
            meant: None,
        }
    }

    fn split_at(self, at: usize) -> (Word<'t>, Word<'t>) {
        let (left, right) = self.text.split_at(at);
        (Word { text: left, start: self.start }, Word { text: right, start: self.start + at })
    }

    /// Parses a decimal number; `None` if the word is empty or has anything but digits, `u64::MAX` if it is too large.
    fn digits(self) -> Option<u64> {
        let all_digits = !self.text.is_empty() && self.text.bytes().all(|byte| byte.is_ascii_digit());
        // Every range check rejects u64::MAX.
        all_digits.then(|| self.text.parse().unwrap_or(u64::MAX))
    }
}

/// Splits the text at ASCII whitespace into words, each with its position.
fn words(text: &str) -> impl Iterator<Item = Word<'_>> {
    let base = text.as_ptr().addr();
    text.split_ascii_whitespace().map(move |word| Word { text: word, start: word.as_ptr().addr() - base })
}

/// Parses `QUOTA/WINDOW` and returns the quota and the window in microseconds, both in range.
fn parse_rate(rate: Word<'_>) -> Result<(u64, u64), LimitTextError> {
    let slash = rate.text.find('/').ok_or_else(|| rate.error(Problem::Slash))?;
    let (quota_word, window_word) = rate.split_at(slash);
    let window_word = window_word.split_at(1).1;
    let quota = quota_word.digits().ok_or_else(|| quota_word.error(Problem::Quota))?;
    if !(1..=u64::from(super::QUOTA_MAX)).contains(&quota) {
        return Err(quota_word.error(Problem::Quota));
    }
    let digits = window_word.text.bytes().take_while(u8::is_ascii_digit).count();
    let (count_word, unit_word) = window_word.split_at(digits);
    let count = if digits == 0 { Some(1) } else { count_word.digits() };
    if unit_word.text.is_empty() {
        return Err(window_word.error(Problem::Window));
    }
    if unit_word.text.strip_prefix('.').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit())) {
        return Err(window_word.error(Problem::Fraction));
    }
    let unit_us = UNITS.into_iter().find(|&(name, _)| name == unit_word.text).map(|(_, us)| us);
    let unit_us = unit_us.ok_or_else(|| unit_word.error(Problem::Unit))?;
    let window_us = count.unwrap_or(u64::MAX).saturating_mul(unit_us);
    if !(super::WINDOW_US_MIN..=super::WINDOW_US_MAX).contains(&window_us) {
        return Err(window_word.error(Problem::Limit(LimitError::Window { got_us: window_us })));
    }
    Ok((quota, window_us))
}

/// The options of a limit text, each with its word, so that a later error can point at it.
#[derive(Default)]
struct Options<'t> {
    burst: Option<(u64, Word<'t>)>,
    queue: Option<(u64, Word<'t>)>,
    count_denied: Option<(bool, Word<'t>)>,
}

impl<'t> Options<'t> {
    fn parse(words: &[Word<'t>]) -> Result<Options<'t>, LimitTextError> {
        let mut options = Options::default();
        for &word in words {
            let Some(equals) = word.text.find('=') else {
                return Err(word.error(Problem::OptionName));
            };
            let value = word.split_at(equals).1.split_at(1).1;
            let taken_before = match &word.text[..equals] {
                "burst" => options.burst.replace((number(value, "burst")?, word)).is_some(),
                "queue" => options.queue.replace((number(value, "queue")?, word)).is_some(),
                "count_denied" => options.count_denied.replace((flag(value)?, word)).is_some(),
                _ => return Err(word.error(Problem::OptionName)),
            };
            if taken_before {
                return Err(word.error(Problem::OptionTwice));
            }
        }
        Ok(options)
    }
}

fn number(value: Word<'_>, option: &'static str) -> Result<u64, LimitTextError> {
    value.digits().ok_or_else(|| value.error(Problem::OptionNumber(option)))
}

fn flag(value: Word<'_>) -> Result<bool, LimitTextError> {
    match value.text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(value.error(Problem::OptionFlag)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> LimitTextError {
        text.parse::<Limit>().expect_err(text)
    }

    #[test]
    fn parses_every_documented_form() {
        for (text, quota, window_us, algorithm) in [
            ("10/min", 10, 60_000_000, Algorithm::Sliding),
            ("600/10s", 600, 10_000_000, Algorithm::Sliding),
            ("250/500ms", 250, 500_000, Algorithm::Sliding),
            ("5000/day sliding-log", 5_000, 86_400_000_000, Algorithm::SlidingLog),
            ("100/min token-bucket burst=20", 100, 60_000_000, Algorithm::TokenBucket),
            ("  7/2hours   leaky-bucket  queue=3 ", 7, 7_200_000_000, Algorithm::LeakyBucket),
            ("1/1ms", 1, 1_000, Algorithm::Sliding),
            ("10000000/400day fixed-window", 10_000_000, 34_560_000_000_000, Algorithm::FixedWindow),
            ("1/1500us sliding-counter", 1, 1_500, Algorithm::SlidingCounter),
        ] {
            let limit: Limit = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!((limit.quota(), limit.window_us(), limit.algorithm()), (quota, window_us, algorithm), "{text}");
        }
    }

    #[test]
    fn limit_with_any_unit_survives_display_and_parse() {
        for (name, us) in UNITS {
            if us < 1_000 {
                continue;
            }
            let limit: Limit = format!("3/{name} token-bucket burst=9 count_denied=true").parse().unwrap();
            assert_eq!(limit.window_us(), us);
            assert_eq!(limit.to_string().parse::<Limit>().unwrap(), limit);
        }
    }

    /// Each case: an invalid text, the span of its error, and a phrase that the message contains.
    #[test]
    fn error_names_the_place_and_what_is_accepted() {
        for (text, span, phrase) in [
            ("10/fortnight", 3..12, "us, ms, s, min, h, day, week"),
            ("0/min", 0..1, "1 to 10000000"),
            ("-1/s", 0..2, "1 to 10000000"),
            ("1e9/s", 0..3, "1 to 10000000"),
            ("10000001/s", 0..8, "1 to 10000000"),
            ("10/0s", 3..5, "1ms to 400day"),
            ("10/401day", 3..9, "1ms to 400day"),
            ("10/999us", 3..8, "1ms to 400day"),
            ("10/99999999999999999999999day", 3..29, "1ms to 400day"),
            ("10", 0..2, "expected a /"),
            ("", 0..0, "expected QUOTA/WINDOW"),
            ("  ", 0..2, "expected QUOTA/WINDOW"),
            ("10/", 3..3, "expected a window"),
            ("10/5", 3..4, "expected a window"),
            ("/min", 0..0, "1 to 10000000"),
            ("10/min slidding", 7..15, "sliding, sliding-log, sliding-counter"),
            ("10/min sliding burst=5", 15..22, "burst is an option of token-bucket"),
            ("10/min token-bucket queue=5", 20..27, "queue is an option of leaky-bucket"),
            ("10/min token-bucket burst=0", 20..27, "burst must be from 1 to 10000000"),
            ("10/min token-bucket burst=x", 26..27, "burst=N"),
            ("10/min token-bucket burst=", 26..26, "burst=N"),
            ("10/min token-bucket burst=5 burst=5", 28..35, "twice"),
            ("10/min token-bucket speed=5", 20..27, "burst=N, queue=N"),
            ("10/min token-bucket fast", 20..24, "burst=N, queue=N"),
            ("10/min count_denied=yes", 20..23, "count_denied=true"),
            ("200000/min sliding-log", 11..22, "1 to 100000 for sliding-log"),
            ("ten/min", 0..3, "in digits"),
            ("10/mïn", 3..7, "us, ms, s"),
            ("10/1.5h", 3..7, "in whole numbers, such as 90min"),
            ("10/1.h", 4..6, "us, ms, s"),
        ] {
            let error = refused(text);
            assert_eq!(error.span(), span, "{text}: {error}");
            assert!(error.to_string().contains(phrase), "{text}: {error}");
        }
    }

    /// Each case: an invalid text, and the limit that its message suggests.
    #[test]
    fn error_suggests_the_limit_that_is_meant() {
        for (text, meant) in [
            ("10 / min", Some("10/min")),
            ("10/ min", Some("10/min")),
            ("10 /min", Some("10/min")),
            ("10 per minute", Some("10/min")),
            ("10 per 5 minutes", Some("10/5min")),
            ("10/5 min token-bucket burst=3", Some("10/5min token-bucket burst=3")),
            ("10/MIN", Some("10/min")),
            ("10/min Sliding", Some("10/min sliding")),
            ("10/1.5h", Some("10/90min")),
            ("10/0.5s", Some("10/500ms")),
            ("10/.5min fixed-window", Some("10/30s fixed-window")),
            ("10/24.0h", Some("10/day")),
            ("10/1.5.5h", None),
            ("10/1.0000001s", None),
            ("10/0.0001ms", None),
            ("10/99999999999999999999.5day", None),
            ("10/0.99999999999999999999day", None),
            ("10 per fortnight", None),
            ("ten per minute", None),
            ("10 per minute quickly", None),
            ("10/500.5d", None),
            ("10", None),
            ("10/", None),
            ("10 per", None),
        ] {
            let error = refused(text);
            assert_eq!(error.meant(), meant, "{text}: {error}");
            let suggestion = meant.map(|limit| format!("; did you mean {limit}?")).unwrap_or_default();
            assert!(error.to_string().ends_with(&suggestion), "{text}: {error}");
            assert_eq!(error.to_string().contains("did you mean"), meant.is_some(), "{text}: {error}");
        }
    }

    #[test]
    fn error_of_a_window_that_is_too_long_has_the_maximum_and_its_reason() {
        let error = refused("10/500d").to_string();
        let expected =
            "a window must be from 1ms to 400day, the longest whose arithmetic is exact in Redis (at byte 3: \"500d\")";
        assert_eq!(error, expected);
        assert_eq!(refused("10/999us").to_string(), "a window must be from 1ms to 400day (at byte 3: \"999us\")");
        let error = Limit::new(10, std::time::Duration::from_secs(500 * 86_400)).unwrap_err().to_string();
        assert!(error.ends_with("exact in Redis; found 500day"), "{error}");
        let error = Limit::new(10, std::time::Duration::ZERO).unwrap_err().to_string();
        assert_eq!(error, "a window must be from 1ms to 400day; found 0us");
    }

    #[test]
    fn error_for_a_long_text_is_short() {
        let error = refused(&"9".repeat(10_000)).to_string();
        assert!(error.contains("at most 256 bytes") && error.len() < 200, "{error}");
        let error = refused(&format!("{}/s", "9".repeat(200))).to_string();
        assert!(error.contains("1 to 10000000") && error.len() < 250, "{error}");
    }
}
