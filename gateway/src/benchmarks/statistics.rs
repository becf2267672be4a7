//! Statistics of a Benchmark from the timing of its requests. Pure.

use std::time::Duration;

use russet_crds::Percentiles;

/// Timing of one completed request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestTiming {
    /// Prompt tokens, as the engine counted them.
    pub(super) prompt_tokens: u32,
    /// Tokens of the response.
    pub(super) tokens: u32,
    /// Time to first token.
    pub(super) first_token: Duration,
    /// Inter-token latencies.
    pub(super) token_gaps: Vec<Duration>,
}

/// Statistics of all requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BenchmarkStatistics {
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    /// Tokens per second of each stream.
    pub(super) stream_rate: f64,
    /// Tokens per second of all streams.
    pub(super) total_rate: f64,
    /// Prompt tokens per second.
    pub(super) prompt_rate: f64,
    pub(super) first_token: Percentiles,
    pub(super) inter_token: Percentiles,
}

/// The statistics of these requests, which took `duration` in total; or why there are none.
pub(super) fn statistics(
    requests: &[RequestTiming],
    duration: Duration,
) -> Result<BenchmarkStatistics, String> {
    let sum = |value: fn(&RequestTiming) -> f64| requests.iter().map(value).sum::<f64>();
    let (prompts, tokens) = (sum(|one| one.prompt_tokens.into()), sum(|one| one.tokens.into()));
    let prefill_time = sum(|one| one.first_token.as_secs_f64());
    let decode_time = sum(|one| one.token_gaps.iter().map(Duration::as_secs_f64).sum());
    let gaps = sum(|one| one.token_gaps.len() as f64);
    let count = requests.len() as f64;
    if gaps == 0.0 || decode_time <= 0.0 || prefill_time <= 0.0 {
        return Err("no response had a second token, so there is no rate to measure".to_owned());
    }
    Ok(BenchmarkStatistics {
        prompt_tokens: (prompts / count).round() as u32,
        output_tokens: (tokens / count).round() as u32,
        stream_rate: gaps / decode_time,
        total_rate: tokens / duration.as_secs_f64(),
        prompt_rate: prompts / prefill_time,
        first_token: percentiles(requests.iter().map(|one| one.first_token).collect()),
        inter_token: percentiles(requests.iter().flat_map(|one| one.token_gaps.iter().copied()).collect()),
    })
}

/// For each percentile the smallest value that this share of the values does not exceed.
fn percentiles(mut values: Vec<Duration>) -> Percentiles {
    values.sort_unstable();
    let at = |percent: usize| {
        let rank = (values.len() * percent).div_ceil(100).max(1);
        let value = values.get(rank - 1).copied().unwrap_or_default();
        format!("{:.1}", value.as_secs_f64() * 1e3)
    };
    Percentiles { p50: at(50), p90: at(90), p99: at(99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    fn request(first: u64, gaps: usize) -> RequestTiming {
        let tokens = gaps as u32 + 1;
        RequestTiming {
            prompt_tokens: 100,
            tokens,
            first_token: Duration::from_millis(first),
            token_gaps: vec![STEP; gaps],
        }
    }

    #[test]
    fn rates_are_received_tokens_over_elapsed_time() {
        let measured = statistics(&[request(100, 50), request(300, 50)], Duration::from_secs(2)).unwrap();
        assert_eq!((measured.prompt_tokens, measured.output_tokens), (100, 51));
        assert_eq!(
            (measured.stream_rate.round(), measured.total_rate.round(), measured.prompt_rate.round()),
            (50.0, 51.0, 500.0)
        );
        assert_eq!(
            (measured.first_token.p50.as_str(), measured.first_token.p90.as_str()),
            ("100.0", "300.0")
        );
        assert_eq!((measured.inter_token.p50.as_str(), measured.inter_token.p99.as_str()), ("20.0", "20.0"));
    }

    #[test]
    fn percentiles_are_measured_values() {
        let of = |count: u64| {
            let Percentiles { p50, p90, p99 } = percentiles((1..=count).map(Duration::from_millis).collect());
            [p50, p90, p99].join(" ")
        };
        for (count, expected) in
            [(1, "1.0 1.0 1.0"), (2, "1.0 2.0 2.0"), (10, "5.0 9.0 10.0"), (1000, "500.0 900.0 990.0")]
        {
            assert_eq!(of(count), expected);
        }
    }

    #[test]
    fn responses_of_one_token_yield_no_statistics() {
        for requests in [vec![], vec![request(100, 0)]] {
            assert!(statistics(&requests, STEP).unwrap_err().contains("second token"));
        }
    }
}
