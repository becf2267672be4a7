//! Load generator of a Benchmark: sends its requests to the engines and times every token. The gateway has no
//! tokenizer, so it first sends two short prompts to learn the tokens per word; these also warm the engine up
//! and are not measured.

use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;
use russet_crds::BenchmarkSpec;
use russet_rpc::engine::GenerateRequest;
use russet_wire::event::{FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::{GenerationRequest, Message, Sampling};
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
    pub(super) silence: Duration,
}

/// Sends the whole load and reports the number of answered requests; returns the statistics, or why there are
/// none.
pub(super) async fn run(work: LoadPlan, progress: watch::Sender<u32>) -> Result<BenchmarkStatistics, String> {
    let mut words = 0;
    for endpoint in &work.endpoints {
        let short = work.send(endpoint, "warm-up 1", prompt(0, SHORT_WORDS), 2).await?;
        let long = work.send(endpoint, "warm-up 2", prompt(0, LONG_WORDS), 2).await?;
        words = words_for(work.spec.prompt_tokens, short.prompt_tokens, long.prompt_tokens);
    }
    let begun = Instant::now();
    let streams = (0..work.spec.concurrency).zip(work.endpoints.iter().cycle()).map(|(stream, endpoint)| {
        let (work, progress) = (&work, &progress);
        async move {
            let mut timed = Vec::new();
            for repetition in 0..work.spec.repetitions {
                let number = stream * work.spec.repetitions + repetition;
                let prompt = prompt(number, words);
                timed.push(work.send(endpoint, &number.to_string(), prompt, work.spec.output_tokens).await?);
                progress.send_modify(|answered| *answered += 1);
            }
            Ok::<_, String>(timed)
        }
    });
    let timed: Vec<RequestTiming> = try_join_all(streams).await?.concat();
    statistics(&timed, begun.elapsed())
}

/// The number of words that makes `wanted` tokens, given the tokens of `SHORT_WORDS` and `LONG_WORDS` words.
fn words_for(wanted: u32, short: u32, long: u32) -> u32 {
    let each = f64::from(long.saturating_sub(short)) / f64::from(LONG_WORDS - SHORT_WORDS);
    let fixed = f64::from(short) - each * f64::from(SHORT_WORDS);
    if each > 0.0 { ((f64::from(wanted) - fixed) / each).round().max(1.0) as u32 } else { wanted }
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
    /// Sends one request for an answer of exactly `tokens` tokens to one engine.
    async fn send(
        &self,
        endpoint: &Endpoint,
        id: &str,
        prompt: String,
        tokens: u32,
    ) -> Result<RequestTiming, String> {
        let at = |what: String| format!("request {id} to the engine on node {}: {what}", endpoint.node);
        let request = GenerationRequest {
            id: format!("benchmark {} {id}", self.name),
            messages: vec![Message { role: "user".into(), content: prompt }],
            max_tokens: Some(tokens),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: Vec::new(),
            ignore_eos: true,
            emitted: Vec::new(),
            priority: 0,
            deadline_milliseconds: None,
        };
        let (mut client, _lease) =
            self.backends.acquire(endpoint).map_err(|error| at(russet_telemetry::errors::chain(&error)))?;
        let silent = |_| at(format!("it said nothing for {} s", self.silence.as_secs()));
        let begun = Instant::now();
        let generate = client.generate(GenerateRequest::from(request));
        let answer = timeout(self.silence, generate).await.map_err(silent)?;
        let mut events = answer.map_err(|status| at(status.message().to_owned()))?.into_inner();
        let mut timed = RequestTiming::default();
        let mut last = None;
        loop {
            let event = timeout(self.silence, events.message()).await.map_err(silent)?;
            let event = event.map_err(|status| at(status.message().to_owned()))?;
            let Some(event) = event else { return Err(at("its answer just ended".into())) };
            match GenerationEvent::from(event) {
                GenerationEvent::Started { prompt_tokens, .. } => timed.prompt_tokens = prompt_tokens,
                GenerationEvent::Token { .. } => {
                    let now = Instant::now();
                    match last.replace(now) {
                        None => timed.first_token = now - begun,
                        Some(last) => timed.token_gaps.push(now - last),
                    }
                    timed.tokens += 1;
                }
                GenerationEvent::Finished { reason: FinishReason::Cancelled, .. } => {
                    return Err(at("it goes down and stopped the answer".into()));
                }
                GenerationEvent::Finished { .. } => return Ok(timed),
                GenerationEvent::Failed(GenerationFailure { message, .. }) => return Err(at(message)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_as_long_as_asked_and_none_is_like_another() {
        let words = |text: &str| text.split(' ').count();
        let prompts: Vec<String> = (0..1000).map(|number| prompt(number, 40)).collect();
        assert!(prompts.iter().all(|prompt| words(prompt) == 40));
        let different: std::collections::BTreeSet<&String> = prompts.iter().collect();
        assert_eq!(different.len(), prompts.len());
        assert_eq!(words(&prompt(0, 1)), 1);
    }

    #[test]
    fn word_count_follows_from_two_calibration_prompts() {
        for (wanted, short, long, words) in
            [(512, 18, 34, 502), (512, 42, 122, 102), (4, 18, 34, 1), (100, 18, 18, 100)]
        {
            assert_eq!(words_for(wanted, short, long), words, "{wanted} {short} {long}");
        }
    }
}
