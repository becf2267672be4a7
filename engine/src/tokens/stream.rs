//! Text out of tokens, one token at a time. A character whose bytes come in several tokens is
//! told when its last byte is there, never in halves. It knows nothing of stop texts.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::TokensError;

/// Most tokens held back for an incomplete character. A character has at most four bytes, but a
/// token may end one character and begin the next, so a chain of such tokens can be longer; no
/// real text needs as many as this, and a model that emits broken bytes for ever must not make
/// decoding quadratic.
const MOST_HELD: usize = 16;

/// Decodes one answer as it grows.
#[derive(Clone)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    /// Tokens whose text was told last, kept because decoders look at what stands before
    /// (a word's leading space is dropped at the beginning of a text only).
    before: Vec<u32>,
    /// Tokens whose text was not told yet.
    held: Vec<u32>,
}

impl TextStream {
    /// A stream for one answer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, before: Vec::new(), held: Vec::new() }
    }

    /// Adds a token; returns the text that became certain, often a few characters, sometimes none.
    pub fn push(&mut self, token: u32) -> Result<String, TokensError> {
        self.held.push(token);
        let text = self.text_of_held()?;
        if text.ends_with('\u{FFFD}') && self.held.len() < MOST_HELD {
            return Ok(String::new());
        }
        // A special token has no text: what stood before it stays the context of what follows.
        if text.is_empty() && self.held.len() < MOST_HELD {
            return Ok(String::new());
        }
        self.before = std::mem::take(&mut self.held);
        Ok(text)
    }

    /// The answer is over: what is left, with a replacement character for bytes that never became one.
    pub fn flush(&mut self) -> Result<String, TokensError> {
        let text = self.text_of_held()?;
        self.held.clear();
        Ok(text)
    }

    fn text_of_held(&self) -> Result<String, TokensError> {
        let decode = |tokens: &[u32]| {
            self.tokenizer.decode(tokens, true).map_err(|error| TokensError::Decode(error.to_string()))
        };
        if self.held.is_empty() {
            return Ok(String::new());
        }
        let before = decode(&self.before)?;
        let all = decode(&[self.before.as_slice(), self.held.as_slice()].concat())?;
        // Decoders only append; should one rewrite what was told, telling nothing is the least harm.
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }
}
