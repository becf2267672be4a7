//! Text out of tokens, one token at a time. A character whose bytes come in several tokens is
//! told when its last byte is there, never in halves. It knows nothing of stop texts.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::TokenizerError;

/// Most tokens held back for an incomplete character. A character has at most four bytes, but a
/// token may end one character and begin the next, so a chain of such tokens can be longer; no
/// real text needs as many as this, and a model that emits broken bytes for ever must not make
/// decoding quadratic.
const MAX_PENDING_TOKENS: usize = 16;

/// Decodes one answer as it grows.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// Tokens whose text was told last, kept because decoders look at what stands before
    /// (a word's leading space is dropped at the beginning of a text only).
    context: Vec<u32>,
    /// Tokens whose text was not told yet.
    pending: Vec<u32>,
}

impl Detokenizer {
    /// A stream for one answer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, context: Vec::new(), pending: Vec::new() }
    }

    /// Adds a token; returns the text that became certain, often a few characters, sometimes none.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        self.pending.push(token);
        let text = self.pending_text()?;
        if text.ends_with('\u{FFFD}') && self.pending.len() < MAX_PENDING_TOKENS {
            return Ok(String::new());
        }
        // A special token has no text: what stood before it stays the context of what follows.
        if text.is_empty() && self.pending.len() < MAX_PENDING_TOKENS {
            return Ok(String::new());
        }
        self.context = std::mem::take(&mut self.pending);
        Ok(text)
    }

    /// The answer is over: what is left, with a replacement character for bytes that never became one.
    pub fn flush(&mut self) -> Result<String, TokenizerError> {
        let text = self.pending_text()?;
        self.pending.clear();
        Ok(text)
    }

    fn pending_text(&self) -> Result<String, TokenizerError> {
        let decode = |tokens: &[u32]| {
            self.tokenizer.decode(tokens, true).map_err(|error| TokenizerError::Decode(error.to_string()))
        };
        if self.pending.is_empty() {
            return Ok(String::new());
        }
        let before = decode(&self.context)?;
        let all = decode(&[self.context.as_slice(), self.pending.as_slice()].concat())?;
        // Decoders only append; should one rewrite what was told, telling nothing is the least harm.
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }
}
