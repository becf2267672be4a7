//! Throughput of a group, as its rank 0 reports it: rounded, and updated only when it changes noticeably,
//! because a status that follows every token would be telemetry. Pure.

use russet_crds::MeasuredThroughput;
use russet_plan::prediction::show_rate;
use russet_rpc::engine as pb;

/// Relative change of a rate before it is updated.
const CHANGE_THRESHOLD: f64 = 0.05;

/// The throughput to publish, from the engine's report; `shown` is the published one.
pub(crate) fn update(
    shown: Option<&MeasuredThroughput>,
    report: &pb::EngineState,
) -> Option<MeasuredThroughput> {
    let pb::Throughput { tokens_per_second, streams, context_tokens, prompt_tokens_per_second } =
        report.throughput?;
    let prompts = (prompt_tokens_per_second > 0.0).then_some(prompt_tokens_per_second);
    let same = |shown: &&MeasuredThroughput| {
        let prompts = match (shown.prompt_tokens_per_second.as_deref(), prompts) {
            (None, None) => true,
            (Some(shown), Some(now)) => is_close(shown, now),
            _ => false,
        };
        shown.streams == streams && is_close(&shown.tokens_per_second, tokens_per_second) && prompts
    };
    Some(shown.filter(same).cloned().unwrap_or_else(|| MeasuredThroughput {
        tokens_per_second: show_rate(tokens_per_second),
        streams,
        context_tokens: context_tokens.min(1 << 31).next_power_of_two(),
        prompt_tokens_per_second: prompts.map(show_rate),
    }))
}

fn is_close(shown: &str, now: f64) -> bool {
    shown.parse().is_ok_and(|shown: f64| (now / shown - 1.0).abs() < CHANGE_THRESHOLD)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rate: f64, streams: u32, prompts: f64) -> pb::EngineState {
        let throughput = pb::Throughput {
            tokens_per_second: rate,
            streams,
            context_tokens: 900,
            prompt_tokens_per_second: prompts,
        };
        pb::EngineState { throughput: Some(throughput), ..Default::default() }
    }

    #[test]
    fn throughput_is_republished_only_when_it_changed() {
        assert_eq!(update(None, &pb::EngineState::default()), None);
        let first = update(None, &report(41.27, 1, 0.0)).unwrap();
        let expected = MeasuredThroughput {
            tokens_per_second: "41.3".to_owned(),
            streams: 1,
            context_tokens: 1024,
            prompt_tokens_per_second: None,
        };
        assert_eq!(first, expected);
        for (story, now, stays) in [
            ("the same", report(41.27, 1, 0.0), true),
            ("a little faster", report(43.0, 1, 0.0), true),
            ("a tenth faster", report(45.5, 1, 0.0), false),
            ("a tenth slower", report(37.0, 1, 0.0), false),
            ("of other streams", report(41.27, 2, 0.0), false),
            ("prompts were read", report(41.27, 1, 800.0), false),
        ] {
            assert_eq!(update(Some(&first), &now).unwrap() == first, stays, "{story}");
        }
        let prompts = update(Some(&first), &report(41.27, 1, 800.0)).unwrap();
        assert_eq!(prompts.prompt_tokens_per_second.as_deref(), Some("800"));
        assert_eq!(update(Some(&prompts), &report(42.0, 1, 790.0)), Some(prompts));
    }
}
