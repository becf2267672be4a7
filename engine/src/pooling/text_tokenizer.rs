//! The tokenizer of a model that embeds or scores: texts and pairs of texts with the special tokens that its file adds.
//! No templates.

use std::path::Path;
use std::sync::Arc;

use russet_wire::event::{FailureKind, GenerationFailure};
use tokenizers::{Encoding, Tokenizer};

use super::invalid;
use crate::executor::{PooledModel, PooledText};
use crate::tokenizer::{TokenizerError, load_plain};

/// Longest text that is tokenised, in bytes: what the tokenizer keeps of a text is up to 200 times as large, and the
/// longest context of a model that embeds is some 150 KB of text.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// A text of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextInput {
    /// A text.
    Text(String),
    /// Its tokens.
    Tokens(Vec<u32>),
    /// A query and a document.
    Pair(Arc<str>, String),
}

impl TextInput {
    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => size_of_val(tokens.as_slice()),
            Self::Pair(query, document) => query.len() + document.len(),
        }
    }
}

/// A tokenizer.
pub struct TextTokenizer(Tokenizer);

impl TextTokenizer {
    /// Loads it from a model's folder.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        load_plain(dir).map(Self)
    }

    /// The tokens of a text of any length.
    ///
    /// # Errors
    /// It is empty, too large to be tokenised, or has a token that the model does not have.
    pub fn tokens(&self, input: TextInput, model: &PooledModel) -> Result<PooledText, GenerationFailure> {
        self.tokenize(input, 0, u32::MAX, None, model)
    }

    /// The tokens of the text at `index` of a request: at most `context` of them, or of a longer one the first `truncate`,
    /// if that is given; a special token at its end stays there.
    pub(super) fn tokenize(
        &self,
        input: TextInput,
        index: usize,
        context: u32,
        truncate: Option<u32>,
        model: &PooledModel,
    ) -> Result<PooledText, GenerationFailure> {
        let bytes = input.bytes();
        if bytes > MAX_TEXT_BYTES {
            return Err(too_long(format!(
                "text {index} of the request has {bytes} bytes, more than the limit of {MAX_TEXT_BYTES}; divide it"
            )));
        }
        let limit = truncate.unwrap_or(u32::MAX) as usize;
        let mut text = match input {
            TextInput::Tokens(mut tokens) => {
                tokens.truncate(limit);
                PooledText { token_types: vec![0; tokens.len()], tokens }
            }
            TextInput::Text(text) => self.encode(self.0.encode(text, false), None, limit)?,
            TextInput::Pair(query, document) => {
                let document = self.0.encode(document, false);
                self.encode(self.0.encode(&*query, false), Some(document), limit)?
            }
        };
        let tokens = text.tokens.len();
        if tokens == 0 {
            return Err(invalid(format!("text {index} of the request is empty; leave it out")));
        }
        if tokens > context as usize {
            return Err(too_long(format!(
                "This model's maximum context length is {context} tokens. However, text {index} of the request has {tokens} tokens. Shorten it, or let it be cut with truncate_prompt_tokens: -1."
            )));
        }
        if let Some(unknown) = text.tokens.iter().find(|&&token| token >= model.vocabulary) {
            return Err(invalid(format!(
                "text {index} of the request has token {unknown}, but the model has only {} tokens",
                model.vocabulary
            )));
        }
        // A model without segments has a table of one row.
        let most = model.token_types.saturating_sub(1);
        text.token_types.iter_mut().for_each(|kind| *kind = (*kind).min(most));
        Ok(text)
    }

    /// Cuts what was encoded and adds the special tokens.
    fn encode(
        &self,
        first: tokenizers::Result<Encoding>,
        second: Option<tokenizers::Result<Encoding>>,
        limit: usize,
    ) -> Result<PooledText, GenerationFailure> {
        let failed = |error: tokenizers::Error| {
            let message = format!("the tokenizer cannot encode the text: {error}");
            GenerationFailure { kind: FailureKind::Internal, message }
        };
        let mut first = first.map_err(failed)?;
        let mut second = second.transpose().map_err(failed)?;
        let added = self
            .0
            .get_post_processor()
            .map_or(0, |processor| tokenizers::PostProcessor::added_tokens(processor, second.is_some()));
        let room = limit.saturating_sub(added);
        // The longer of both first: a query that is cut away leaves nothing to compare.
        let over = |first: &Encoding, second: &Option<Encoding>| {
            (first.len() + second.as_ref().map_or(0, Encoding::len)).saturating_sub(room)
        };
        let cut = |encoding: &mut Encoding, to: usize| {
            encoding.truncate(to, 0, tokenizers::TruncationDirection::Right);
        };
        if over(&first, &second) > 0 {
            match &mut second {
                None => cut(&mut first, room),
                Some(document) => {
                    let query = first.len().min(room / 2).max(room.saturating_sub(document.len()));
                    cut(&mut first, query);
                    cut(document, room - first.len());
                }
            }
        }
        let whole = self.0.post_process(first, second, true).map_err(failed)?;
        Ok(PooledText { tokens: whole.get_ids().to_vec(), token_types: whole.get_type_ids().to_vec() })
    }
}

fn too_long(message: String) -> GenerationFailure {
    GenerationFailure { kind: FailureKind::ContextLengthExceeded, message }
}
