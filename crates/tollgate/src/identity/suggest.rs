//! "Did you mean …?" for words that people type into configuration files.

/// The accepted word that `word` was most likely meant to be, if any is near enough to be a slip.
///
/// Case and the choice between `-` and `_` are no distance at all: they are what people confuse most.
pub(crate) fn nearest<'a>(word: &str, accepted: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// More than the longest word we know, and a bound on the quadratic work.
    const CHARS_MAX: usize = 64;

    if word.chars().count() > CHARS_MAX {
        return None;
    }
    let fold = |text: &str| text.to_lowercase().replace('_', "-");
    let folded = fold(word);
    accepted
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&folded, &fold(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.chars().count() / 3)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_word_and_a_stranger_finds_none() {
        let words = ["caller", "ip", "api_key", "user", "path", "global"];
        for (word, meant) in [
            ("calller", Some("caller")),
            ("api-key", Some("api_key")),
            ("apikey", Some("api_key")),
            ("IP", Some("ip")),
            ("usre", Some("user")),
            ("paht", Some("path")),
            ("tenant", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, words), meant, "{word}");
        }
        assert_eq!(nearest(&"a".repeat(100_000), words), None);
    }
}
