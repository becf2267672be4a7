//! Smoke prompt: the test request that a group answers before it takes requests. It runs on every rank like a
//! request, and leaves nothing in caches or request metrics.

use jiff::Zoned;
use russet_chat::template::Prompt;
use russet_wire::conversation::Message;
use russet_wire::event::GenerationEvent;
use russet_wire::request::{GenerationRequest, RawPrompt};
use thiserror::Error;
use tokio::time::Instant;

use super::batching::compose_batch;
use super::ranks::Ranks;
use crate::executor::Sampled;
use crate::prefix_cache::CacheCommand;
use crate::prefix_cache::checkpoints::Checkpoints;
use crate::sequence::{self, AcceptedToken, OutputStream, Sequence};
use crate::tokenizer::{ChatTokenizer, PromptFit, PromptLimits, PromptSource, ResponseRules, TokenizerError};

/// All slots are free when it runs.
const SMOKE_SLOT: u32 = 0;
/// What it says.
const GREETING: &str = "Hello";
/// Enough that some of the output is fed back; the largest model takes seconds for it.
const SMOKE_TOKENS: u32 = 4;

/// Why the smoke prompt failed.
#[derive(Debug, Error)]
pub enum SmokeError {
    /// Between text and tokens.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    /// The context is shorter than the rendered template of one word.
    #[error("{0}")]
    Context(String),
    /// A step failed or hung on some rank, or no token can be sampled.
    #[error("{0}")]
    Step(String),
    /// A token that the tokenizer does not know.
    #[error(
        "token {index} of its answer is {token}, which the tokenizer does not have; the weights and tokenizer.json belong to different models"
    )]
    Unknown {
        /// Counted from 1.
        index: usize,
        /// The token.
        token: u32,
    },
    /// The output tokens have no text.
    #[error(
        "the tokens of its answer, {0:?}, have no text; the weights and tokenizer.json belong to different models, or the weights are damaged"
    )]
    EmptyAnswer(Vec<u32>),
}

fn request() -> GenerationRequest {
    GenerationRequest {
        id: "smoke".into(),
        messages: vec![Message::new("user", GREETING)],
        max_tokens: Some(SMOKE_TOKENS),
        // A model that ends its output at once is sound, and its next tokens are needed all the same.
        ignore_eos: true,
        ..GenerationRequest::default()
    }
}

/// Answers the smoke prompt on every rank, before the first request.
pub(super) async fn run(
    ranks: &Ranks,
    tokenizer: &ChatTokenizer,
    context_tokens: u32,
) -> Result<(), SmokeError> {
    let started = Instant::now();
    let request = request();
    let prompt = {
        let limits = PromptLimits { context_tokens, is_abandoned: &|| false };
        let (now, raw) = (Zoned::now(), RawPrompt::Text(GREETING.into()));
        let conversation = Prompt::new(&request.messages, &now);
        let source = match tokenizer.has_chat_template() {
            true => PromptSource::Conversation(&conversation),
            false => PromptSource::Raw(&raw),
        };
        let prepared = tokenizer.prepare(source, ResponseRules::default(), PromptFit::default(), &limits)?;
        prepared.tokens
    };
    let limit = sequence::max_new_tokens(prompt.len(), request.max_tokens, context_tokens)
        .map_err(|failure| SmokeError::Context(failure.message))?;
    let (eos_tokens, detokenizer) = (tokenizer.eos_token_ids().clone(), tokenizer.detokenizer());
    let output = OutputStream::new(&request, limit, eos_tokens, detokenizer);
    let mut sequence = Sequence::new(&request, prompt, 0, output);
    sequence.admit(SMOKE_SLOT, 0, Checkpoints::default());
    let (tokens, text) = answer(ranks, tokenizer, context_tokens, &mut sequence).await?;
    ranks.apply_cache_command(CacheCommand::Reset { slot: SMOKE_SLOT });
    let elapsed = started.elapsed();
    ranks.metrics.record_smoke_test(elapsed);
    tracing::info!(?tokens, text, ?elapsed, "the smoke prompt is answered");
    Ok(())
}

/// Tokens and text of the output.
async fn answer(
    ranks: &Ranks,
    tokenizer: &ChatTokenizer,
    context_tokens: u32,
    sequence: &mut Sequence,
) -> Result<(Vec<u32>, String), SmokeError> {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    loop {
        let scheduled = compose_batch(&[sequence.readiness(false)], 1, false, context_tokens);
        let steps = scheduled.iter().map(|turn| sequence.step(turn.tokens)).collect();
        let results = ranks.dispatch(steps).wait().await;
        let results = results.map_err(|failure| SmokeError::Step(failure.reason))?;
        let sampled: Sampled = results.into_iter().flat_map(|result| result.sampled).collect();
        let Some(token) = sampled.first().cloned() else { continue };
        let token = token.map_err(|error| SmokeError::Step(error.to_string()))?;
        sequence.verify(&sampled);
        tokens.push(token.id);
        if !tokenizer.has_token(token.id) {
            return Err(SmokeError::Unknown { index: tokens.len(), token: token.id });
        }
        let AcceptedToken { event, finished } = sequence.accept(token)?;
        if let Some(GenerationEvent::Token { delta, .. }) = event {
            text.push_str(&delta.text);
        }
        match finished {
            None => {}
            Some(_) if text.is_empty() => return Err(SmokeError::EmptyAnswer(tokens)),
            Some(_) => return Ok((tokens, text)),
        }
    }
}
