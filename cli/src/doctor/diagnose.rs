//! Diagnosis of a cluster from its objects. Pure functions.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use russet_crds::conditions::{Reason, Type, get, is_true, reason};
use russet_crds::{InferenceNode, Model, ModelCopy, ModelDeployment};
use russet_plan::quantity;

use super::{Finding, Mark};

/// One line for each healthy node, and one for each problem of the others.
pub fn nodes(nodes: &[InferenceNode]) -> Vec<Finding> {
    let builds = nodes.iter().filter_map(|node| node.status.as_ref()?.engine_build.clone());
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    builds.for_each(|build| *counts.entry(build).or_default() += 1);
    let usual = counts.iter().max_by_key(|(_, count)| **count).map(|(build, _)| build.clone());
    if nodes.is_empty() {
        let words =
            "there is none; add a machine with `russet join` (`russet token create` here prints the command)";
        return vec![Finding::new(Mark::Bad, "nodes", words)];
    }
    nodes.iter().flat_map(|node| node_findings(node, usual.as_deref())).collect()
}

fn node_findings(node: &InferenceNode, usual: Option<&str>) -> Vec<Finding> {
    let subject = format!("node {}", node.name_any());
    let bad = |words: String| Finding::new(Mark::Bad, subject.clone(), words);
    let note = |words: String| Finding::new(Mark::Note, subject.clone(), words);
    let Some(status) = &node.status else {
        return vec![bad("its agent has not reported anything; start it on that machine".to_owned())];
    };
    let conditions = status.conditions.as_slice();
    let mut found = Vec::new();
    // An unreachable node's last report may be outdated.
    if let Some(ready) = get(conditions, Type::Ready).filter(|ready| ready.status != "True") {
        return vec![bad(reason_and_message(ready))];
    }
    for kind in [Type::MemoryPressure, Type::DiskPressure] {
        found.extend(
            get(conditions, kind).filter(|it| it.status == "True").map(|it| bad(reason_and_message(it))),
        );
    }
    for kind in [Type::NetworkApplied, Type::WiredLimitSet] {
        let fails = |it: &&Condition| it.status == "False" && reason(it) != Some(Reason::Restored);
        found.extend(get(conditions, kind).filter(fails).map(|it| bad(reason_and_message(it))));
    }
    match get(conditions, Type::FabricHealthy) {
        Some(health) if health.status == "False" => found.push(bad(reason_and_message(health))),
        Some(health) if reason(health) == Some(Reason::PeerNotJoined) => {
            found.push(note(reason_and_message(health)))
        }
        _ => {}
    }
    if let (Some(build), Some(usual)) = (status.engine_build.as_deref(), usual)
        && build != usual
    {
        let words = format!(
            "its engine is of build {build}, and most are of {usual}; only engines of one build share a model"
        );
        found.push(note(words));
    }
    let own = env!("CARGO_PKG_VERSION");
    if let Some(agent) = status.agent_version.as_deref().filter(|agent| *agent != own) {
        found.push(note(format!("its agent is of release {agent}, and this program of {own}")));
    }
    if !found.iter().any(|finding| finding.mark == Mark::Bad) {
        let memory = status.memory.as_ref().map(|memory| {
            let all = quantity::show(memory.serving_limit_bytes);
            format!(", {} of {all} granted", quantity::show(memory.granted_bytes))
        });
        let disk =
            status.disk.as_ref().map(|disk| format!(", {} of disk free", quantity::show(disk.free_bytes)));
        let chip = status.chip.as_deref().unwrap_or("unnamed chip");
        let words = format!("ready: {chip}{}{}", memory.unwrap_or_default(), disk.unwrap_or_default());
        found.insert(0, Finding::new(Mark::Good, subject.clone(), words));
    }
    found
}

/// Models and copies that do not become ready.
pub fn models(models: &[Model], copies: &[ModelCopy]) -> Vec<Finding> {
    let name = |namespace: Option<String>, name: String| format!("{}/{name}", namespace.unwrap_or_default());
    let of_models = models.iter().filter_map(|model| {
        let words = stalled(&model.status.as_ref()?.conditions)?;
        Some(Finding::new(Mark::Bad, format!("model {}", name(model.namespace(), model.name_any())), words))
    });
    let of_copies = copies.iter().filter_map(|copy| {
        let words = stalled(&copy.status.as_ref()?.conditions)?;
        let on = &copy.spec.node_name;
        Some(Finding::new(Mark::Bad, format!("copy on {on}"), format!("{}: {words}", copy.name_any())))
    });
    of_models.chain(of_copies).collect()
}

/// One line for each deployment: whether it is ready, and why not.
pub fn deployments(deployments: &[ModelDeployment]) -> Vec<Finding> {
    let one = |deployment: &ModelDeployment| {
        let subject = format!("{}/{}", deployment.namespace().unwrap_or_default(), deployment.name_any());
        let conditions =
            deployment.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let Some(ready) = get(conditions, Type::Ready) else {
            return Finding::new(Mark::Note, subject, "the operator has not processed it yet");
        };
        let on_purpose = matches!(
            reason(ready),
            Some(Reason::Stopped | Reason::OutsideSchedule | Reason::Idle | Reason::AwaitingApproval)
        );
        match (ready.status.as_str(), on_purpose || is_true(conditions, Type::Reconciling)) {
            ("True", _) => Finding::new(Mark::Good, subject, "answers"),
            (_, true) => Finding::new(Mark::Note, subject, reason_and_message(ready)),
            (_, false) => Finding::new(Mark::Bad, subject, reason_and_message(ready)),
        }
    };
    deployments.iter().map(one).collect()
}

fn stalled(conditions: &[Condition]) -> Option<String> {
    let stalled = get(conditions, Type::Stalled).filter(|stalled| stalled.status == "True")?;
    // Stalled may leave the message to Ready.
    let condition = if stalled.message.is_empty() { get(conditions, Type::Ready)? } else { stalled };
    Some(reason_and_message(condition))
}

fn reason_and_message(condition: &Condition) -> String {
    format!("{}: {}", condition.reason, condition.message)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use russet_crds::conditions;
    use russet_crds::{
        InferenceNodeSpec, InferenceNodeStatus, ModelDeploymentSpec, ModelDeploymentStatus, NodeMemory,
    };

    use super::*;

    fn set(all: &mut Vec<Condition>, kind: Type, status: bool, reason: Reason, words: &str) {
        conditions::set(all, kind, status, reason, words, None, Timestamp::UNIX_EPOCH);
    }

    fn node(name: &str) -> InferenceNode {
        let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
        let mut status = InferenceNodeStatus {
            chip: Some("Apple M3 Ultra".to_owned()),
            engine_build: Some("one".to_owned()),
            agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            memory: Some(NodeMemory {
                serving_limit_bytes: 8 << 30,
                granted_bytes: 1 << 30,
                ..NodeMemory::default()
            }),
            ..InferenceNodeStatus::default()
        };
        set(&mut status.conditions, Type::Ready, true, Reason::Settled, "takes work");
        node.status = Some(status);
        node
    }

    fn summary(found: &[Finding]) -> Vec<(Mark, &str)> {
        found.iter().map(|finding| (finding.mark, finding.words.as_str())).collect()
    }

    #[test]
    fn healthy_node_is_one_line_and_each_fault_is_another() {
        assert_eq!(nodes(&[])[0].mark, Mark::Bad);
        let well = nodes(&[node("a")]);
        assert_eq!(summary(&well), [(Mark::Good, "ready: Apple M3 Ultra, 1.0 GiB of 8.0 GiB granted")]);

        let mut ill = node("a");
        let status = ill.status.as_mut().unwrap();
        set(&mut status.conditions, Type::DiskPressure, true, Reason::Insufficient, "free some");
        set(&mut status.conditions, Type::MemoryPressure, false, Reason::Sufficient, "enough");
        set(&mut status.conditions, Type::FabricHealthy, false, Reason::PortInBridge, "take it out");
        let found = nodes(&[ill.clone()]);
        assert_eq!(
            summary(&found),
            [(Mark::Bad, "Insufficient: free some"), (Mark::Bad, "PortInBridge: take it out")]
        );

        // The other conditions of an unreachable node are outdated.
        let status = ill.status.as_mut().unwrap();
        set(&mut status.conditions, Type::Ready, false, Reason::LeaseExpired, "start the agent");
        assert_eq!(summary(&nodes(&[ill])), [(Mark::Bad, "LeaseExpired: start the agent")]);
    }

    #[test]
    fn nodes_that_differ_from_the_others_are_noted_and_no_fault() {
        let mut other = node("c");
        let status = other.status.as_mut().unwrap();
        status.engine_build = Some("two".to_owned());
        status.agent_version = Some("0.0.1".to_owned());
        set(&mut status.conditions, Type::FabricHealthy, true, Reason::PeerNotJoined, "join it");
        let found = nodes(&[node("a"), node("b"), other]);
        assert_eq!(
            found.iter().map(|one| one.mark).collect::<Vec<_>>(),
            [Mark::Good, Mark::Good, Mark::Good, Mark::Note, Mark::Note, Mark::Note]
        );
        assert!(
            found[4].words.contains("build two") && found[5].words.contains("release 0.0.1"),
            "{found:?}"
        );
    }

    #[test]
    fn idle_or_progressing_deployment_is_no_fault() {
        for (ready, reason, reconciling, mark) in [
            (true, Reason::Serving, false, Mark::Good),
            (false, Reason::NothingFits, false, Mark::Bad),
            (false, Reason::InProgress, true, Mark::Note),
            (false, Reason::Idle, false, Mark::Note),
            (false, Reason::OutsideSchedule, false, Mark::Note),
        ] {
            let mut deployment = ModelDeployment::new("chat", ModelDeploymentSpec::default());
            let mut status = ModelDeploymentStatus::default();
            set(&mut status.conditions, Type::Ready, ready, reason, "words");
            set(&mut status.conditions, Type::Reconciling, reconciling, reason, "words");
            deployment.status = Some(status);
            assert_eq!(deployments(&[deployment])[0].mark, mark, "{reason:?}");
        }
        let fresh = ModelDeployment::new("chat", ModelDeploymentSpec::default());
        assert_eq!(deployments(&[fresh])[0].mark, Mark::Note);
    }

    #[test]
    fn stalled_model_says_why() {
        let mut model = Model::new("m", russet_crds::ModelSpec::default());
        let mut status = russet_crds::ModelStatus::default();
        set(&mut status.conditions, Type::Ready, false, Reason::SourceNotFound, "no such repository");
        set(&mut status.conditions, Type::Stalled, false, Reason::SourceNotFound, "");
        model.status = Some(status.clone());
        assert!(models(&[model.clone()], &[]).is_empty(), "it is tried again");
        set(&mut status.conditions, Type::Stalled, true, Reason::SourceNotFound, "");
        model.status = Some(status);
        assert_eq!(summary(&models(&[model], &[])), [(Mark::Bad, "SourceNotFound: no such repository")]);
    }
}
