//! The figures of a Benchmark from what was timed. Pure.

use std::time::Duration;

use russet_crds::Percentiles;

/// One answered request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Timed {
    /// Tokens of its prompt, as the engine counted them.
    pub(super) prompt_tokens: u32,
    /// Tokens of its answer.
    pub(super) tokens: u32,
    /// From its beginning to the first token.
    pub(super) first: Duration,
    /// From each token to the next.
    pub(super) gaps: Vec<Duration>,
}

/// Figures of all requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    /// Tokens a second of each stream.
    pub(super) rate: f64,
    /// Tokens a second of all streams.
    pub(super) total: f64,
    /// Tokens of prompts a second.
    pub(super) prompts: f64,
    pub(super) first: Percentiles,
    pub(super) between: Percentiles,
}

/// The figures of these requests, which took so long together; or why there are none.
pub(super) fn figures(requests: &[Timed], took: Duration) -> Result<Figures, String> {
    let sum = |of: fn(&Timed) -> f64| requests.iter().map(of).sum::<f64>();
    let (prompts, tokens) = (sum(|one| one.prompt_tokens.into()), sum(|one| one.tokens.into()));
    let waited = sum(|one| one.first.as_secs_f64());
    let decoded = sum(|one| one.gaps.iter().map(Duration::as_secs_f64).sum());
    let gaps = sum(|one| one.gaps.len() as f64);
    let count = requests.len() as f64;
    if gaps == 0.0 || decoded <= 0.0 || waited <= 0.0 {
        return Err("no answer had a second token, so there is nothing to measure".to_owned());
    }
    Ok(Figures {
        prompt_tokens: (prompts / count).round() as u32,
        output_tokens: (tokens / count).round() as u32,
        rate: gaps / decoded,
        total: tokens / took.as_secs_f64(),
        prompts: prompts / waited,
        first: percentiles(requests.iter().map(|one| one.first).collect()),
        between: percentiles(requests.iter().flat_map(|one| one.gaps.iter().copied()).collect()),
    })
}

/// Of each percentile the smallest value that so many do not exceed.
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

    fn request(first: u64, gaps: usize) -> Timed {
        let tokens = gaps as u32 + 1;
        Timed { prompt_tokens: 100, tokens, first: Duration::from_millis(first), gaps: vec![STEP; gaps] }
    }

    #[test]
    fn rates_are_of_tokens_that_came_and_of_the_time_they_took() {
        let figures = figures(&[request(100, 50), request(300, 50)], Duration::from_secs(2)).unwrap();
        assert_eq!((figures.prompt_tokens, figures.output_tokens), (100, 51));
        assert_eq!(
            (figures.rate.round(), figures.total.round(), figures.prompts.round()),
            (50.0, 51.0, 500.0)
        );
        assert_eq!((figures.first.p50.as_str(), figures.first.p90.as_str()), ("100.0", "300.0"));
        assert_eq!((figures.between.p50.as_str(), figures.between.p99.as_str()), ("20.0", "20.0"));
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
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
    fn answers_of_one_token_measure_nothing() {
        for requests in [vec![], vec![request(100, 0)]] {
            assert!(figures(&requests, STEP).unwrap_err().contains("second token"));
        }
    }
}
