//! Suggestions ("did you mean …?") for misspelt words in configuration.

/// Returns the accepted word that is most similar to `word`, or `None` if none is similar enough to be a misspelling.
///
/// Similar enough means an edit distance of at most a third of the accepted word's length. Case and the difference
/// between `-` and `_` are ignored. Returns `None` for words of more than 64 characters.
pub fn nearest<'a>(word: &str, accepted: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Longer than every accepted word. Bounds the distance computation, which takes quadratic time.
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
    fn misspelt_word_finds_its_correction_and_other_words_find_none() {
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
