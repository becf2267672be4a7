//! Decides the next step of a Benchmark from the state of the cluster. Pure.

use kube::ResourceExt as _;
use russet_crds::conditions::Reason;
use russet_crds::{Benchmark, BenchmarkSpec};

use crate::routes::{Deployment, DeploymentState, Endpoint, RoutingTable};

/// The next step of a Benchmark.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// It is finished, or another gateway runs it.
    Nothing,
    /// It cannot start yet.
    Wait(WaitReason),
    /// Send the load to these endpoints.
    Start(Vec<Endpoint>),
}

/// Why a Benchmark does not start.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WaitReason {
    pub(super) reason: Reason,
    pub(super) message: String,
    /// Whether only a person can resolve it.
    pub(super) stalled: bool,
}

/// Tokens that a chat template may add to a prompt; a Benchmark whose requests an engine would reject does
/// not start.
const TEMPLATE_TOKENS: u32 = 32;

/// The next step of `benchmark` among `all`; `runs` says whether a gateway runs a given one.
pub(super) fn next_step(
    benchmark: &Benchmark,
    all: &[&Benchmark],
    table: &RoutingTable,
    runs: impl Fn(&Benchmark) -> bool,
) -> NextStep {
    if is_finished(benchmark) || runs(benchmark) {
        return NextStep::Nothing;
    }
    let wait = |reason, stalled, message| NextStep::Wait(WaitReason { reason, message, stalled });
    let (namespace, name) = (benchmark.namespace().unwrap_or_default(), &benchmark.spec.deployment_ref.name);
    let is_target = |deployment: &&Deployment| deployment.namespace == namespace && deployment.name == *name;
    let Some(deployment) = table.deployments.iter().find(is_target) else {
        let message = format!("ModelDeployment {name} does not exist in namespace {namespace}; create it");
        return wait(Reason::TargetNotFound, true, message);
    };
    if let Some(message) = too_long(&benchmark.spec, deployment.context_tokens) {
        return wait(Reason::InvalidSpec, true, message);
    }
    if deployment.endpoints.is_empty() {
        let message = match &deployment.state {
            DeploymentState::Ready => "its group is being re-formed",
            DeploymentState::Working(message) | DeploymentState::Halted(message) => message,
        };
        let message = format!("ModelDeployment {name} is not ready: {message}");
        return wait(Reason::WaitingForDeployment, false, message);
    }
    let order =
        |benchmark: &Benchmark| (benchmark.creation_timestamp().map(|time| time.0), benchmark.name_any());
    let earlier = all.iter().find(|other| {
        let same = other.namespace() == benchmark.namespace()
            && other.spec.deployment_ref == benchmark.spec.deployment_ref;
        let is_queued =
            too_long(&other.spec, deployment.context_tokens).is_none() && order(other) < order(benchmark);
        other.uid() != benchmark.uid() && same && !is_finished(other) && (runs(other) || is_queued)
    });
    match earlier {
        Some(other) => {
            let message = format!("Benchmark {} of the same deployment runs first", other.name_any());
            wait(Reason::WaitingForBenchmark, false, message)
        }
        None => NextStep::Start(deployment.endpoints.clone()),
    }
}

/// Whether it has finished or failed.
pub(super) fn is_finished(benchmark: &Benchmark) -> bool {
    benchmark.status.as_ref().is_some_and(|status| status.finished_at.is_some())
}

fn too_long(spec: &BenchmarkSpec, context: u32) -> Option<String> {
    let (prompt, output) = (spec.prompt_tokens, spec.output_tokens);
    let needed = prompt.saturating_add(output).saturating_add(TEMPLATE_TOKENS);
    (needed > context).then(|| {
        format!(
            "a prompt of {prompt} tokens and a response of {output} need a context of {needed} tokens with the chat \
             template, but ModelDeployment {} has {context}; create a Benchmark with fewer tokens, or raise the \
             deployment's kv.contextTokens",
            spec.deployment_ref.name
        )
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::{BenchmarkStatus, LocalReference};

    use super::*;
    use crate::routes::fixtures;

    fn benchmark(name: &str, created: i64, output: u32) -> Benchmark {
        let spec = BenchmarkSpec {
            deployment_ref: LocalReference::new("m"),
            prompt_tokens: 100,
            output_tokens: output,
            concurrency: 1,
            repetitions: 1,
        };
        let mut one = Benchmark::new(name, spec);
        one.metadata.namespace = Some("default".into());
        one.metadata.uid = Some(name.to_owned());
        one.metadata.creation_timestamp = Some(Time(jiff::Timestamp::from_second(created).unwrap()));
        one
    }

    fn over(mut one: Benchmark) -> Benchmark {
        let finished_at = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        one.status = Some(BenchmarkStatus { finished_at, ..BenchmarkStatus::default() });
        one
    }

    fn table(state: DeploymentState, is_serving: bool) -> RoutingTable {
        let deployment = Deployment {
            context_tokens: 1024,
            state,
            endpoints: if is_serving { vec![fixtures::endpoint("a:1")] } else { vec![] },
            ..fixtures::deployment("default", "m")
        };
        RoutingTable { synced: true, deployments: vec![deployment], ..RoutingTable::default() }
    }

    #[test]
    fn benchmark_starts_when_its_deployment_is_ready_and_it_is_next() {
        let (first, second) = (benchmark("b", 1, 100), benchmark("a", 2, 100));
        let long = benchmark("c", 0, 1000);
        let elsewhere = RoutingTable { deployments: vec![], ..table(DeploymentState::Ready, true) };
        let ready = || table(DeploymentState::Ready, true);
        let copying = DeploymentState::Working("copying files".into());
        for (case, benchmark, all, table, running, expected) in [
            ("alone", &first, vec![], ready(), "", "start"),
            ("it has run", &over(first.clone()), vec![], ready(), "", "nothing"),
            ("a gateway runs it", &first, vec![], ready(), "b", "nothing"),
            ("no such deployment", &first, vec![], elsewhere, "", "TargetNotFound! does not exist"),
            ("too long", &long, vec![], ready(), "", "InvalidSpec! need a context of 1132"),
            (
                "its deployment is not ready yet",
                &first,
                vec![],
                table(copying, false),
                "",
                "WaitingForDeployment copying files",
            ),
            (
                "its deployment's group was lost",
                &first,
                vec![],
                table(DeploymentState::Ready, false),
                "",
                "WaitingForDeployment re-formed",
            ),
            ("an older one waits", &second, vec![&first], ready(), "", "WaitingForBenchmark Benchmark b"),
            ("a younger one waits", &first, vec![&second], ready(), "", "start"),
            ("a younger one runs", &first, vec![&second], ready(), "a", "WaitingForBenchmark Benchmark a"),
            ("an older one has run", &second, vec![&over(first.clone())], ready(), "", "start"),
            ("an older one can never run", &first, vec![&long], ready(), "", "start"),
        ] {
            match next_step(benchmark, &all, &table, |other| other.name_any() == running) {
                NextStep::Nothing => assert_eq!(expected, "nothing", "{case}"),
                NextStep::Start(endpoints) => {
                    assert_eq!((expected, endpoints.len()), ("start", 1), "{case}")
                }
                NextStep::Wait(WaitReason { reason, message, stalled }) => {
                    let (expected_reason, words) = expected.split_once(' ').unwrap();
                    let suffix = if stalled { "!" } else { "" };
                    assert_eq!(format!("{reason:?}{suffix}"), expected_reason, "{case}: {message}");
                    assert!(message.contains(words), "{case}: {message}");
                }
            }
        }
    }
}
