//! Measured throughput over the last few thousand tokens: the agent reports it for this group, and the
//! planner uses it instead of its prediction. Pure; the scheduler feeds it.

use std::collections::BTreeMap;
use std::time::Duration;

use russet_rpc::engine as pb;

/// Steps of each stream count that are ignored: the first ones load kernels.
const WARM_UP_STEPS: u32 = 16;
/// Tokens per stream before a rate is reported.
const MIN_STREAM_TOKENS: f64 = 256.0;
/// Half-life in tokens per stream: machines get hot, and cool down again.
const HALF_LIFE_TOKENS: f64 = 4096.0;
/// Minimum prompt length: a shorter prompt measures step latency rather than the prefill rate.
const MIN_PROMPT_TOKENS: u32 = 256;
/// Prompt tokens before a prefill rate is reported.
const MIN_PREFILL_TOKENS: f64 = 1024.0;
/// Half-life of the prefill rate in prompt tokens.
const PREFILL_HALF_LIFE_TOKENS: f64 = 65_536.0;

/// Measured throughput so far.
#[derive(Debug, Default)]
pub struct ThroughputMeter {
    /// By the number of concurrent streams.
    decode: BTreeMap<u32, RateAverage>,
    prefill: RateAverage,
}

#[derive(Debug, Default)]
struct RateAverage {
    skipped: u32,
    tokens: f64,
    seconds: f64,
    /// Tokens in the KV cache, summed over the tokens.
    context: f64,
}

impl RateAverage {
    fn add(&mut self, tokens: f64, context: f64, took: Duration, remembered: f64) {
        if self.tokens >= remembered {
            (self.tokens, self.seconds, self.context) =
                (self.tokens / 2.0, self.seconds / 2.0, self.context / 2.0);
        }
        self.tokens += tokens;
        self.context += context * tokens;
        self.seconds += took.as_secs_f64();
    }

    fn rate(&self, enough: f64) -> Option<f64> {
        (self.tokens >= enough && self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }
}

impl ThroughputMeter {
    /// Records a decode round: each of `streams` streams got a token, with `cached` tokens in their KV caches
    /// together.
    pub fn record_decode(&mut self, streams: u32, cached: u32, took: Duration) {
        let average = self.decode.entry(streams).or_default();
        if average.skipped < WARM_UP_STEPS {
            average.skipped += 1;
            return;
        }
        average.add(1.0, f64::from(cached) / f64::from(streams.max(1)), took, HALF_LIFE_TOKENS);
    }

    /// Records the prefill of a prompt while no other request was running.
    pub fn record_prefill(&mut self, tokens: u32, took: Duration) {
        if tokens >= MIN_PROMPT_TOKENS {
            self.prefill.add(f64::from(tokens), 0.0, took, PREFILL_HALF_LIFE_TOKENS);
        }
    }

    /// Expected prefill time of `tokens` prompt tokens, once enough were measured.
    pub fn prefill_time(&self, tokens: u32) -> Option<Duration> {
        let rate = self.prefill.rate(MIN_PREFILL_TOKENS)?;
        Duration::try_from_secs_f64(f64::from(tokens) / rate).ok()
    }

    /// The rate at the smallest number of streams with enough data.
    pub fn average(&self) -> Option<pb::Throughput> {
        let rates = self
            .decode
            .iter()
            .filter_map(|(streams, average)| Some((*streams, average, average.rate(MIN_STREAM_TOKENS)?)));
        let (streams, average, rate) = rates.min_by_key(|(streams, ..)| *streams)?;
        Some(pb::Throughput {
            tokens_per_second: rate,
            streams,
            context_tokens: (average.context / average.tokens).round() as u32,
            prompt_tokens_per_second: self.prefill.rate(MIN_PREFILL_TOKENS).unwrap_or(0.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    /// Rounds given as (number of rounds, streams, duration).
    fn meter(rounds: &[(u32, u32, Duration)]) -> ThroughputMeter {
        let mut meter = ThroughputMeter::default();
        for (count, streams, took) in rounds {
            (0..*count).for_each(|_| meter.record_decode(*streams, 100 * streams, *took));
        }
        meter
    }

    #[test]
    fn throughput_reports_the_fewest_streams_with_enough_samples() {
        let slow = STEP * 2;
        for (case, rounds, expected) in [
            ("nothing was asked", &[][..], None),
            ("too little", &[(271, 1, STEP)][..], None),
            ("enough, the first steps left out", &[(16, 1, STEP * 50), (256, 1, STEP)], Some((1, 50))),
            ("too little alone, enough together", &[(100, 1, STEP), (272, 4, slow)], Some((4, 25))),
            ("alone counts first", &[(272, 4, slow), (272, 1, STEP)], Some((1, 50))),
            ("a machine that became slower", &[(300, 1, STEP), (40_000, 1, slow)], Some((1, 25))),
        ] {
            let average = meter(rounds).average();
            let rate = |average: pb::Throughput| (average.streams, average.tokens_per_second.round() as u32);
            assert_eq!(average.map(rate), expected, "{case}");
        }
        assert_eq!(meter(&[(300, 4, STEP)]).average().unwrap().context_tokens, 100, "of each stream");
    }

    #[test]
    fn only_long_prompts_count_for_prefill_throughput() {
        let mut meter = self::meter(&[(300, 1, STEP)]);
        (0..100).for_each(|_| meter.record_prefill(MIN_PROMPT_TOKENS - 1, STEP));
        assert_eq!(meter.average().unwrap().prompt_tokens_per_second, 0.0);
        assert_eq!(meter.prefill_time(512), None);
        (0..3).for_each(|_| meter.record_prefill(512, Duration::from_secs(1)));
        assert_eq!(meter.average().unwrap().prompt_tokens_per_second, 512.0);
        assert_eq!(meter.prefill_time(256), Some(Duration::from_millis(500)));
    }
}
