//! Builds the status of a Benchmark. Pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{Benchmark, BenchmarkResult, BenchmarkStatus, PredictedThroughput, ScalingResult};

use super::decide::WaitReason;
use super::statistics::BenchmarkStatistics;

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunProgress<'a> {
    /// The gateway that runs it.
    pub(super) runner: &'a str,
    pub(super) started: Timestamp,
    /// Completed requests.
    pub(super) completed: u32,
}

/// The subject of the measurement.
#[derive(Clone, Debug, Default)]
pub(super) struct BenchmarkSubject {
    pub(super) model: String,
    /// Nodes of a replica.
    pub(super) nodes: u32,
    pub(super) predicted: Option<PredictedThroughput>,
}

/// The overall condition of a Benchmark (kstatus).
enum BenchmarkCondition {
    Ready,
    Reconciling,
    Stalled,
}

/// The status when it cannot start yet.
pub(super) fn waiting(benchmark: &Benchmark, waiting: &WaitReason, now: Timestamp) -> BenchmarkStatus {
    let condition =
        if waiting.stalled { BenchmarkCondition::Stalled } else { BenchmarkCondition::Reconciling };
    // Results of an abandoned run of another gateway are discarded.
    let blank =
        BenchmarkStatus { conditions: previous_status(benchmark).conditions, ..BenchmarkStatus::default() };
    with_conditions(benchmark, blank, condition, waiting.reason, &waiting.message, now)
}

/// The status while it runs.
pub(super) fn running(benchmark: &Benchmark, progress: &RunProgress<'_>, now: Timestamp) -> BenchmarkStatus {
    let requests = benchmark.spec.requests();
    let status = BenchmarkStatus { renewed_at: Some(Time(now)), ..started(benchmark, progress) };
    let message = format!("{requests} requests, {} at once", benchmark.spec.concurrency);
    with_conditions(benchmark, status, BenchmarkCondition::Reconciling, Reason::Running, &message, now)
}

/// The status with its results; `all` are the Benchmarks it may be compared with.
pub(super) fn finished(
    benchmark: &Benchmark,
    progress: &RunProgress<'_>,
    measured: &BenchmarkStatistics,
    subject: &BenchmarkSubject,
    all: &[&Benchmark],
    now: Timestamp,
) -> BenchmarkStatus {
    let single_stream = benchmark.spec.concurrency == 1;
    let predicted =
        subject.predicted.as_ref().filter(|_| single_stream).map(|predicted| &predicted.tokens_per_second);
    let expected = predicted.and_then(|rate| rate.parse::<f64>().ok()).filter(|rate| *rate > 0.0);
    let result = BenchmarkResult {
        model: subject.model.clone(),
        nodes: subject.nodes,
        prompt_tokens: measured.prompt_tokens,
        output_tokens: measured.output_tokens,
        tokens_per_second: show(measured.stream_rate),
        total_tokens_per_second: show(measured.total_rate),
        prompt_tokens_per_second: show(measured.prompt_rate),
        ttft_milliseconds: measured.first_token.clone(),
        inter_token_milliseconds: measured.inter_token.clone(),
        predicted_tokens_per_second: predicted.cloned(),
        percent_of_predicted: expected
            .map(|expected| (100.0 * measured.stream_rate / expected).round() as u32),
        scaling: scaling(benchmark, measured.stream_rate, subject, all),
    };
    let message = format!(
        "{} tokens/s per stream, {} in total; median time to first token {} ms",
        result.tokens_per_second, result.total_tokens_per_second, result.ttft_milliseconds.p50
    );
    let done = Time(now);
    let status =
        BenchmarkStatus { finished_at: Some(done), result: Some(result), ..started(benchmark, progress) };
    with_conditions(benchmark, status, BenchmarkCondition::Ready, Reason::Finished, &message, now)
}

/// The status when a request failed.
pub(super) fn failed(
    benchmark: &Benchmark,
    progress: &RunProgress<'_>,
    cause: &str,
    now: Timestamp,
) -> BenchmarkStatus {
    let status = BenchmarkStatus { finished_at: Some(Time(now)), ..started(benchmark, progress) };
    let message = format!("{cause}; create another Benchmark to measure again");
    with_conditions(benchmark, status, BenchmarkCondition::Stalled, Reason::Failed, &message, now)
}

fn previous_status(benchmark: &Benchmark) -> BenchmarkStatus {
    benchmark.status.clone().unwrap_or_default()
}

fn started(benchmark: &Benchmark, progress: &RunProgress<'_>) -> BenchmarkStatus {
    BenchmarkStatus {
        runner: Some(progress.runner.to_owned()),
        started_at: Some(Time(progress.started)),
        requests: Some(format!("{}/{}", progress.completed, benchmark.spec.requests())),
        conditions: previous_status(benchmark).conditions,
        ..BenchmarkStatus::default()
    }
}

fn with_conditions(
    benchmark: &Benchmark,
    mut status: BenchmarkStatus,
    condition: BenchmarkCondition,
    reason: Reason,
    message: &str,
    now: Timestamp,
) -> BenchmarkStatus {
    let generation = benchmark.metadata.generation;
    status.observed_generation = generation;
    for (kind, value) in [
        (Type::Ready, matches!(condition, BenchmarkCondition::Ready)),
        (Type::Reconciling, matches!(condition, BenchmarkCondition::Reconciling)),
        (Type::Stalled, matches!(condition, BenchmarkCondition::Stalled)),
    ] {
        conditions::set(&mut status.conditions, kind, value, reason, message, generation, now);
    }
    status
}

/// The last Benchmark of the same Model on one node that measured the same load, and the speed-up over it.
fn scaling(
    benchmark: &Benchmark,
    rate: f64,
    subject: &BenchmarkSubject,
    all: &[&Benchmark],
) -> Option<ScalingResult> {
    let single = |other: &&Benchmark| {
        let status = other.status.as_ref()?;
        let (result, finished) = (status.result.as_ref()?, status.finished_at.as_ref()?);
        let same_load =
            other.namespace() == benchmark.namespace() && other.spec.measures_same(&benchmark.spec);
        let single = result.nodes == 1 && result.model == subject.model;
        let base = result.tokens_per_second.parse::<f64>().ok().filter(|base| *base > 0.0)?;
        (same_load && single).then(|| (finished.0, other.name_any(), base))
    };
    let latest = all.iter().filter_map(single).max_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let (_, name, base) = latest.filter(|_| subject.nodes > 1)?;
    Some(ScalingResult { benchmark: name, times: format!("{:.2}", rate / base) })
}

/// A rate with one decimal.
fn show(rate: f64) -> String {
    format!("{rate:.1}")
}

#[cfg(test)]
mod tests {
    use russet_crds::{BenchmarkSpec, LocalReference, Percentiles};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn benchmark(name: &str, concurrency: u32) -> Benchmark {
        let spec = BenchmarkSpec {
            deployment_ref: LocalReference::new(name),
            prompt_tokens: 100,
            output_tokens: 50,
            concurrency,
            repetitions: 3,
        };
        let mut one = Benchmark::new(name, spec);
        one.metadata.namespace = Some("default".into());
        one.metadata.generation = Some(1);
        one
    }

    fn measured(rate: f64) -> BenchmarkStatistics {
        let percentiles = Percentiles { p50: "1.0".into(), p90: "2.0".into(), p99: "3.0".into() };
        BenchmarkStatistics {
            prompt_tokens: 99,
            output_tokens: 50,
            stream_rate: rate,
            total_rate: 30.0,
            prompt_rate: 400.0,
            first_token: percentiles.clone(),
            inter_token: percentiles,
        }
    }

    fn subject(model: &str, nodes: u32) -> BenchmarkSubject {
        let predicted =
            PredictedThroughput { tokens_per_second: "40.0".into(), ..PredictedThroughput::default() };
        BenchmarkSubject { model: model.into(), nodes, predicted: Some(predicted) }
    }

    const PROGRESS: RunProgress<'static> =
        RunProgress { runner: "g", started: Timestamp::UNIX_EPOCH, completed: 2 };

    fn words(status: &BenchmarkStatus) -> String {
        let value = |kind| conditions::get(&status.conditions, kind).map_or("?", |one| one.status.as_str());
        let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
        let kinds = [Type::Ready, Type::Reconciling, Type::Stalled].map(value).join(" ");
        format!("{kinds} {} {}", ready.reason, status.requests.as_deref().unwrap_or("-"))
    }

    #[test]
    fn benchmark_status_is_right_at_every_stage() {
        let mut one = benchmark("b", 2);
        let wait = |reason, stalled| WaitReason { reason, message: "m".into(), stalled };
        let (deployment, target) =
            (wait(Reason::WaitingForDeployment, false), wait(Reason::TargetNotFound, true));
        for (status, expected) in [
            (waiting(&one, &target, at(1)), "False False True TargetNotFound -"),
            (waiting(&one, &deployment, at(1)), "False True False WaitingForDeployment -"),
            (running(&one, &PROGRESS, at(2)), "False True False Running 2/6"),
            (failed(&one, &PROGRESS, "node a was lost", at(3)), "False False True Failed 2/6"),
            (
                finished(&one, &PROGRESS, &measured(30.0), &subject("m", 1), &[], at(4)),
                "True False False Finished 2/6",
            ),
        ] {
            assert_eq!(words(&status), expected);
            assert_eq!(
                status.finished_at.is_some(),
                expected.ends_with('6') && !expected.contains("Running")
            );
        }
        one.status = Some(waiting(&one, &deployment, at(1)));
        assert_eq!(one.status, Some(waiting(&one, &deployment, at(9))), "the same reason changes nothing");
    }

    #[test]
    fn a_result_is_compared_with_the_prediction_and_with_one_node() {
        let done = |name: &str, model: &str, nodes, rate, second| {
            let mut one = benchmark(name, 1);
            one.status =
                Some(finished(&one, &PROGRESS, &measured(rate), &subject(model, nodes), &[], at(second)));
            one
        };
        let others = [
            done("old", "m", 1, 10.0, 5),
            done("new", "m", 1, 20.0, 6),
            done("two", "m", 2, 99.0, 7),
            done("other", "n", 1, 99.0, 8),
        ];
        let all: Vec<&Benchmark> = others.iter().collect();
        let (alone, four) = (benchmark("b", 1), benchmark("b", 4));
        let result = |one: &Benchmark, nodes| {
            let status = finished(one, &PROGRESS, &measured(30.0), &subject("m", nodes), &all, at(9));
            status.result.unwrap()
        };
        let pair = result(&alone, 2);
        assert_eq!(pair.scaling, Some(ScalingResult { benchmark: "new".into(), times: "1.50".into() }));
        assert_eq!(pair.percent_of_predicted, Some(75));
        assert_eq!(pair.predicted_tokens_per_second.as_deref(), Some("40.0"));
        assert_eq!(result(&alone, 1).scaling, None, "one node is not compared with itself");
        let four = result(&four, 2);
        assert_eq!(
            (four.scaling, four.predicted_tokens_per_second),
            (None, None),
            "the others measured another load"
        );
    }
}
