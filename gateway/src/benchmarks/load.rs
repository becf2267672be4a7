//! Load generator of a Benchmark: sends its requests to the engines and times every token. The gateway has no
//! tokenizer, so it first sends two short prompts to learn the tokens per word; these also warm the engine up
//! and are not measured.

use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;
use russet_crds::BenchmarkSpec;
use russet_rpc::engine::GenerateRequest;
use russet_wire::conversation::Message;
use russet_wire::event::{FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::{GenerationRequest, Sampling};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::statistics::{BenchmarkStatistics, RequestTiming, statistics};
use crate::backends::Backends;
use crate::routes::Endpoint;

/// Words of every prompt, repeated; every repetition has the same number of tokens.
const WORDS: [&str; 8] = ["the", "sun", "was", "hot", "and", "we", "sat", "down"];
/// Word counts of the two calibration prompts.
const SHORT_WORDS: u32 = 8;
const LONG_WORDS: u32 = 24;

/// The load, and the engines it is sent to.
pub(super) struct LoadPlan {
    /// `namespace/name` of the Benchmark, which its requests carry.
    pub(super) name: String,
    pub(super) spec: BenchmarkSpec,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) backends: Arc<Backends>,
    /// How long an engine may send no event.
    pub(super) event_timeout: Duration,
}

/// Sends the whole load and reports the number of completed requests; returns the statistics, or why there are
/// none.
pub(super) async fn run(plan: LoadPlan, progress: watch::Sender<u32>) -> Result<BenchmarkStatistics, String> {
    let mut words = 0;
    for endpoint in &plan.endpoints {
        let short = plan.send(endpoint, "warm-up 1", prompt(0, SHORT_WORDS), 2).await?;
        let long = plan.send(endpoint, "warm-up 2", prompt(0, LONG_WORDS), 2).await?;
        words = words_for(plan.spec.prompt_tokens, short.prompt_tokens, long.prompt_tokens);
    }
    let started = Instant::now();
    let streams = (0..plan.spec.concurrency).zip(plan.endpoints.iter().cycle()).map(|(stream, endpoint)| {
        let (plan, progress) = (&plan, &progress);
        async move {
            let mut timings = Vec::new();
            for repetition in 0..plan.spec.repetitions {
                let number = stream * plan.spec.repetitions + repetition;
                let prompt = prompt(number, words);
                timings
                    .push(plan.send(endpoint, &number.to_string(), prompt, plan.spec.output_tokens).await?);
                progress.send_modify(|completed| *completed += 1);
            }
            Ok::<_, String>(timings)
        }
    });
    let timings: Vec<RequestTiming> = try_join_all(streams).await?.concat();
    statistics(&timings, started.elapsed())
}

/// The number of words that makes `prompt_tokens` tokens, given the tokens of `SHORT_WORDS` and `LONG_WORDS` words.
fn words_for(prompt_tokens: u32, short: u32, long: u32) -> u32 {
    let per_word = f64::from(long.saturating_sub(short)) / f64::from(LONG_WORDS - SHORT_WORDS);
    let fixed = f64::from(short) - per_word * f64::from(SHORT_WORDS);
    if per_word > 0.0 {
        ((f64::from(prompt_tokens) - fixed) / per_word).round().max(1.0) as u32
    } else {
        prompt_tokens
    }
}

/// A prompt of `words` words. Prompts differ from their first words on, so that the prefix cache never hits.
fn prompt(number: u32, words: u32) -> String {
    // The number itself, each word being a digit.
    let base = WORDS.len() as u32;
    let digits = [number / base.pow(3), number / base.pow(2), number / base, number];
    let head = digits.into_iter().filter_map(|digit| WORDS.get((digit % base) as usize));
    head.chain(WORDS.iter().cycle()).take(words as usize).copied().collect::<Vec<_>>().join(" ")
}

impl LoadPlan {
    /// Sends one request for a response of exactly `tokens` tokens to one engine.
    async fn send(
        &self,
        endpoint: &Endpoint,
        id: &str,
        prompt: String,
        tokens: u32,
    ) -> Result<RequestTiming, String> {
        let context =
            |cause: String| format!("request {id} to the engine on node {}: {cause}", endpoint.node);
        let request = GenerationRequest {
            id: format!("benchmark {} {id}", self.name),
            messages: vec![Message::new("user", prompt)],
            max_tokens: Some(tokens),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            ignore_eos: true,
            ..GenerationRequest::default()
        };
        let (mut client, _in_flight) = self
            .backends
            .acquire(endpoint)
            .map_err(|error| context(russet_telemetry::errors::chain(&error)))?;
        let timed_out = |_| context(format!("it sent no event for {} s", self.event_timeout.as_secs()));
        let sent = Instant::now();
        let generate = client.generate(GenerateRequest::from(request));
        let response = timeout(self.event_timeout, generate).await.map_err(timed_out)?;
        let mut events = response.map_err(|status| context(status.message().to_owned()))?.into_inner();
        let mut timing = RequestTiming::default();
        let mut last = None;
        loop {
            let event = timeout(self.event_timeout, events.message()).await.map_err(timed_out)?;
            let event = event.map_err(|status| context(status.message().to_owned()))?;
            let Some(event) = event else {
                return Err(context("its stream ended without a finish event".into()));
            };
            match GenerationEvent::from(event) {
                GenerationEvent::Started { prompt_tokens, .. } => timing.prompt_tokens = prompt_tokens,
                // It asks for none.
                GenerationEvent::Prompt { .. } => {}
                GenerationEvent::Token { .. } => {
                    let now = Instant::now();
                    match last.replace(now) {
                        None => timing.first_token = now - sent,
                        Some(last) => timing.token_gaps.push(now - last),
                    }
                    timing.tokens += 1;
                }
                GenerationEvent::Finished { reason: FinishReason::Cancelled, .. } => {
                    return Err(context("it is shutting down and stopped the response".into()));
                }
                GenerationEvent::Finished { .. } => return Ok(timing),
                GenerationEvent::Failed(GenerationFailure { message, .. }) => return Err(context(message)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_the_requested_length_and_all_differ() {
        let words = |text: &str| text.split(' ').count();
        let prompts: Vec<String> = (0..1000).map(|number| prompt(number, 40)).collect();
        assert!(prompts.iter().all(|prompt| words(prompt) == 40));
        let different: std::collections::BTreeSet<&String> = prompts.iter().collect();
        assert_eq!(different.len(), prompts.len());
        assert_eq!(words(&prompt(0, 1)), 1);
    }

    #[test]
    fn word_count_follows_from_two_calibration_prompts() {
        for (prompt_tokens, short, long, words) in
            [(512, 18, 34, 502), (512, 42, 122, 102), (4, 18, 34, 1), (100, 18, 18, 100)]
        {
            assert_eq!(words_for(prompt_tokens, short, long), words, "{prompt_tokens} {short} {long}");
        }
    }
}
