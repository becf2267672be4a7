//! Incremental detokenisation, one token at a time. A character whose bytes span several tokens is emitted
//! with its last byte, never in parts. Not here: stop strings.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::TokenizerError;

/// Maximum tokens held back for an incomplete character. A character has at most four bytes, but a token may
/// end one character and begin the next, so a chain of such tokens can be longer. No real text needs as many
/// as this, and a model that emits broken bytes endlessly must not make decoding quadratic.
const MAX_PENDING_TOKENS: usize = 16;

/// Decodes one answer as it grows.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The last emitted tokens, kept because decoders look at the preceding tokens (a word's leading space is
    /// dropped only at the beginning of a text).
    context: Vec<u32>,
    /// Tokens whose text is not emitted yet.
    pending: Vec<u32>,
}

impl Detokenizer {
    /// A decoder for one output.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, context: Vec::new(), pending: Vec::new() }
    }

    /// Adds a token; returns the text that became certain, often a few characters, sometimes none.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        // Neither context nor part of a character: it would only take the place of one that is.
        if !self.has_text(token) {
            return Ok(String::new());
        }
        self.pending.push(token);
        let text = self.pending_text()?;
        let incomplete = text.is_empty() || text.ends_with('\u{FFFD}');
        if incomplete && self.pending.len() < MAX_PENDING_TOKENS {
            return Ok(String::new());
        }
        self.context = std::mem::take(&mut self.pending);
        Ok(text)
    }

    /// The output has ended: the rest, with a replacement character for incomplete bytes.
    pub fn flush(&mut self) -> Result<String, TokenizerError> {
        let text = self.pending_text()?;
        self.pending.clear();
        Ok(text)
    }

    /// The text of a special token, which is not part of the output.
    pub fn special_token(&self, token: u32) -> Option<String> {
        let text = self.tokenizer.id_to_token(token)?;
        self.tokenizer.get_added_vocabulary().is_special_token(&text).then_some(text)
    }

    /// Whether special tokens are written in `text`.
    pub fn holds_special_token(&self, text: &str) -> bool {
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        added.values().any(|token| token.special && text.contains(&token.content))
    }

    /// Whether a token is decoded: special tokens and those that the tokenizer does not have are left out.
    fn has_text(&self, token: u32) -> bool {
        let text = self.tokenizer.id_to_token(token);
        text.is_some_and(|text| !self.tokenizer.get_added_vocabulary().is_special_token(&text))
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
        // Decoders only append; if one rewrites emitted text, emitting nothing does the least harm.
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }
}
