//! A fake model that repeats its prompt. Its cost is known only when the completion is done.

/// A prompt and the maximum length of its completion.
pub(crate) struct Prompt {
    pub(crate) text: String,
    pub(crate) max_tokens: u32,
}

/// A completion and its cost in tokens.
pub(crate) struct Completion {
    pub(crate) text: String,
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
}

impl Prompt {
    /// Estimates the cost: one token per four bytes of the prompt, and a completion of the maximum length.
    pub(crate) fn estimate(&self) -> u32 {
        let letters = u32::try_from(self.text.len()).unwrap_or(u32::MAX);
        letters.div_ceil(4).saturating_add(self.max_tokens)
    }

    /// Completes the prompt. Each word is a token, so a prompt of short words costs more than the estimate.
    pub(crate) async fn complete(self) -> Completion {
        // Lets other tasks run, as during real work.
        tokio::task::yield_now().await;
        let words: Vec<&str> = self.text.split_whitespace().collect();
        let said: Vec<&str> = words.iter().rev().copied().take(self.max_tokens as usize).collect();
        let count = |words: &[&str]| u32::try_from(words.len()).unwrap_or(u32::MAX);
        Completion { text: said.join(" "), prompt_tokens: count(&words), completion_tokens: count(&said) }
    }
}
