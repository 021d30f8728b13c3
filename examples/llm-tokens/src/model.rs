//! A model that says its prompt again. What matters here is only that its cost is known when it is done.

/// What was asked for.
pub(crate) struct Prompt {
    pub(crate) text: String,
    pub(crate) max_tokens: u32,
}

/// What came of it, and what it cost.
pub(crate) struct Completion {
    pub(crate) text: String,
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
}

impl Prompt {
    /// What it will probably cost at most: four letters are a token, as everybody guesses, and the answer is as long as it may be.
    pub(crate) fn estimate(&self) -> u32 {
        let letters = u32::try_from(self.text.len()).unwrap_or(u32::MAX);
        letters.div_ceil(4).saturating_add(self.max_tokens)
    }

    /// To this model a word is a token; so short words cost more than the guess.
    pub(crate) async fn complete(self) -> Completion {
        // The others get their turn, as during real work.
        tokio::task::yield_now().await;
        let words: Vec<&str> = self.text.split_whitespace().collect();
        let said: Vec<&str> = words.iter().rev().copied().take(self.max_tokens as usize).collect();
        let count = |words: &[&str]| u32::try_from(words.len()).unwrap_or(u32::MAX);
        Completion { text: said.join(" "), prompt_tokens: count(&words), completion_tokens: count(&said) }
    }
}
