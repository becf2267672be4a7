//! Output stream of a request: incremental detokenisation up to the end of the output. A function of the
//! tokens alone, so a resumed output continues in the middle of a word, a character or a stop string. Pure;
//! not here: caches and steps.

use std::sync::Arc;

use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::GenerationRequest;
use thiserror::Error;

use crate::tokenizer::TokenizerError;
use crate::tokenizer::detokenizer::Detokenizer;
use crate::tokenizer::stop_strings::StopStrings;

/// The output stream of one request.
pub struct OutputStream {
    tokens: u32,
    limit: u32,
    eos_token_ids: Arc<[u32]>,
    ignore_eos: bool,
    detokenizer: Detokenizer,
    stop_strings: StopStrings,
}

/// Result of a sampled token.
#[derive(Debug, PartialEq, Eq)]
pub struct AcceptedToken {
    /// Event to emit, if there is text or a token to count.
    pub event: Option<GenerationEvent>,
    /// Set when the output is complete.
    pub finished: Option<FinishReason>,
}

/// Why an output cannot resume after the tokens that came with the request.
#[derive(Debug, Error)]
pub enum ResumeError {
    /// The tokenizer failed.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    /// An end token is not the last emitted token.
    #[error(
        "{emitted} tokens of this answer are said to have been sent, but it ends with token {end}; it was begun by another model or with another context"
    )]
    BeyondEnd {
        /// Emitted tokens in the request.
        emitted: usize,
        /// Position of the end token, counted from 1.
        end: usize,
    },
}

impl ResumeError {
    /// The failure that the client gets.
    pub fn failure(&self) -> GenerationFailure {
        let kind = match self {
            Self::Tokens(TokenizerError::OutOfVocabulary { .. }) | Self::BeyondEnd { .. } => {
                FailureKind::InvalidRequest
            }
            Self::Tokens(_) => FailureKind::Internal,
        };
        GenerationFailure { kind, message: self.to_string() }
    }
}

impl OutputStream {
    /// An output of at most `limit` tokens, with none emitted yet.
    pub fn new(
        request: &GenerationRequest,
        limit: u32,
        eos_token_ids: Arc<[u32]>,
        detokenizer: Detokenizer,
    ) -> Self {
        Self {
            tokens: 0,
            limit,
            eos_token_ids,
            ignore_eos: request.ignore_eos,
            stop_strings: StopStrings::new(request.stop.iter().cloned(), |stop| {
                detokenizer.holds_special_token(stop)
            }),
            detokenizer,
        }
    }

    /// Output tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Maximum output tokens.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Tokens that must not be sampled.
    pub fn banned(&self) -> Arc<[u32]> {
        if self.ignore_eos { self.eos_token_ids.clone() } else { Arc::new([]) }
    }

    /// Resumes after the emitted tokens; returns the finish reason if the last of them ended the output.
    pub fn resume(&mut self, emitted: &[u32]) -> Result<Option<FinishReason>, ResumeError> {
        for (index, &token) in emitted.iter().enumerate() {
            let AcceptedToken { event: _, finished } = self.accept(token)?;
            if finished.is_some() {
                let end = index + 1;
                return if end == emitted.len() {
                    Ok(finished)
                } else {
                    Err(ResumeError::BeyondEnd { emitted: emitted.len(), end })
                };
            }
        }
        Ok(None)
    }

    /// Takes the next token.
    pub fn accept(&mut self, token: u32) -> Result<AcceptedToken, TokenizerError> {
        if self.eos_token_ids.contains(&token) && !self.ignore_eos {
            let text = self.flush()?;
            let event = (!text.is_empty()).then_some(GenerationEvent::Token { id: token, text });
            return Ok(AcceptedToken { event, finished: Some(FinishReason::Stop) });
        }
        self.tokens += 1;
        let special = if self.stop_strings.hold_special_tokens() {
            self.detokenizer.special_token(token)
        } else {
            None
        };
        let mut pushed = match special {
            Some(special) => self.stop_strings.push_special(&special),
            None => self.stop_strings.push(&self.detokenizer.push(token)?),
        };
        let finished = if pushed.stopped {
            Some(FinishReason::Stop)
        } else if self.tokens >= self.limit {
            // The remaining bytes may still complete a stop string.
            let last = self.detokenizer.flush()?;
            let rest = self.stop_strings.push(&last);
            pushed.text.push_str(&rest.text);
            if rest.stopped {
                Some(FinishReason::Stop)
            } else {
                pushed.text.push_str(&self.stop_strings.flush());
                Some(FinishReason::Length)
            }
        } else {
            None
        };
        Ok(AcceptedToken { event: Some(GenerationEvent::Token { id: token, text: pushed.text }), finished })
    }

    /// The text held back when the model ended its turn.
    fn flush(&mut self) -> Result<String, TokenizerError> {
        let last = self.detokenizer.flush()?;
        let mut pushed = self.stop_strings.push(&last);
        if !pushed.stopped {
            pushed.text.push_str(&self.stop_strings.flush());
        }
        Ok(pushed.text)
    }
}
