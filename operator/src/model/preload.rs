//! One Model's part of the joint plan of copies, and the status of its preload. Pure.

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type, get};
use russet_crds::{Model, ModelCopy, ModelStatus, Retention};
use russet_plan::copies::{CopyPlan, CopyRemoval, PreloadOutcome};
use russet_plan::snapshot::ObjectKey;

use super::inventory::{UnplannedPreload, is_ready};

/// Maximum number of nodes and shortages to show.
const MAX_SHOWN: usize = 4;

/// The plan for a Model's files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FilesPlan {
    /// Nodes that have to fetch the files.
    pub create: Vec<String>,
    /// Copies of other models to evict for them.
    pub remove: Vec<CopyRemoval>,
    /// Retention of the model's own copies.
    pub retention: Retention,
    /// State of its preload, or why it cannot be planned; `None` without one.
    pub preload: Option<Result<PreloadOutcome, UnplannedPreload>>,
}

impl FilesPlan {
    /// One Model's part of a plan.
    pub fn for_model(
        plan: CopyPlan,
        key: &ObjectKey,
        retention: Retention,
        unplanned: Option<UnplannedPreload>,
    ) -> Self {
        let CopyPlan { create, remove, mut preloads } = plan;
        Self {
            create: create.into_iter().filter(|(model, _)| model == key).map(|(_, node)| node).collect(),
            remove: remove.into_iter().filter(|removal| removal.beneficiaries.contains(key)).collect(),
            retention,
            preload: unplanned.map(Err).or_else(|| preloads.remove(key).map(Ok)),
        }
    }

    /// Whether nothing has to be fetched or evicted.
    pub fn is_settled(&self) -> bool {
        self.create.is_empty() && self.remove.is_empty()
    }

    /// The model's copies with an outdated retention.
    pub fn outdated_retention(&self, copies: &[Arc<ModelCopy>]) -> Vec<String> {
        let other = |copy: &&Arc<ModelCopy>| copy.spec.retention.unwrap_or_default() != self.retention;
        copies.iter().filter(other).map(|copy| copy.name_any()).collect()
    }
}

/// Writes the preload into the status.
pub fn write_status(
    model: &Model,
    preload: Option<&Result<PreloadOutcome, UnplannedPreload>>,
    copies: &[Arc<ModelCopy>],
    now: Timestamp,
    status: &mut ModelStatus,
) {
    let Some(preload) = preload else {
        (status.wanted_copies, status.preloaded) = (0, None);
        status.conditions.retain(|condition| condition.type_ != format!("{:?}", Type::Preloaded));
        return;
    };
    let (good, reason, message) = match preload {
        Err(UnplannedPreload { reason, message }) => (false, *reason, message.clone()),
        Ok(preloaded) => {
            status.wanted_copies = preloaded.desired_nodes;
            let (ready, coming) = ready_and_pending(preloaded, copies);
            status.preloaded = Some(format!("{}/{}", ready.len(), preloaded.desired_nodes));
            preload_condition(preloaded, &ready, &coming, copies)
        }
    };
    conditions::set(
        &mut status.conditions,
        Type::Preloaded,
        good,
        reason,
        message,
        model.metadata.generation,
        now,
    );
}

/// Nodes with every byte, and nodes that are fetching. Bytes fetched for another Model of the same source
/// count once the agent reports them.
fn ready_and_pending<'a>(
    preloaded: &'a PreloadOutcome,
    copies: &[Arc<ModelCopy>],
) -> (Vec<&'a str>, Vec<&'a str>) {
    let ready = |node: &&str| copies.iter().any(|copy| copy.spec.node_name == **node && is_ready(copy));
    preloaded.holders.keys().map(String::as_str).partition(ready)
}

fn preload_condition(
    preloaded: &PreloadOutcome,
    ready: &[&str],
    coming: &[&str],
    copies: &[Arc<ModelCopy>],
) -> (bool, Reason, String) {
    let PreloadOutcome { desired_nodes: desired, holders: _, shortages: lacks } = preloaded;
    let mut message = match desired {
        1 => format!("{} of 1 node holds every file", ready.len()),
        desired => format!("{} of {desired} nodes hold every file", ready.len()),
    };
    if !ready.is_empty() {
        message.push_str(&format!(": {}", join_bounded(ready, ", ")));
    }
    let coming: Vec<(Reason, String)> = coming.iter().map(|node| self::pending_state(node, copies)).collect();
    // Problems that need a person come first; waiting for another node comes last, because that node's state
    // says more.
    let rank = |reason: &Reason| match reason {
        Reason::WaitingForPeer => 2,
        Reason::Downloading => 1,
        _ => 0,
    };
    let worst = coming.iter().map(|(reason, _)| *reason).min_by_key(rank);
    let reason = lacks.first().map(|lack| lack.reason()).or(worst).unwrap_or(Reason::Settled);
    let lacks: Vec<String> = lacks.iter().map(ToString::to_string).collect();
    let coming: Vec<String> = coming.into_iter().map(|(_, text)| text).collect();
    for texts in [lacks, coming].iter().filter(|texts| !texts.is_empty()) {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        message.push_str(&format!("; {}", join_bounded(&texts, "; ")));
    }
    let good = ready.len() >= *desired as usize;
    // A pool without nodes satisfies every request trivially.
    match (good, desired) {
        (true, 0) => (false, Reason::NoNodes, "no node of the pool takes work".to_owned()),
        _ => (good, reason, message),
    }
}

/// State of a requested copy, without changing numbers.
fn pending_state(node: &str, copies: &[Arc<ModelCopy>]) -> (Reason, String) {
    let copy = copies.iter().find(|copy| copy.spec.node_name == node);
    let ready = copy.and_then(|copy| get(&copy.status.as_ref()?.conditions, Type::Ready));
    let reason = ready.and_then(conditions::reason);
    match (ready, reason) {
        (Some(ready), Some(reason)) => (reason, format!("node {node}: {}", ready.message)),
        _ => (Reason::WaitingForAgent, format!("waiting for node {node} to fetch the files")),
    }
}

fn join_bounded(texts: &[&str], separator: &str) -> String {
    let more = texts.len().saturating_sub(MAX_SHOWN);
    let shown = texts[..texts.len() - more].join(separator);
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

#[cfg(test)]
mod tests {
    use russet_crds::{CopyMode, ModelCopyStatus, ModelSpec};
    use russet_plan::copies::Shortage;

    use super::*;
    use crate::model::{copy_object, copy_spec};

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn copy(node: &str, ready: bool, reason: Reason, message: &str) -> Arc<ModelCopy> {
        let model = Model::new("m", ModelSpec::default());
        let mut copy = copy_object(copy_spec(&model, node, CopyMode::Files));
        let mut status = ModelCopyStatus::default();
        conditions::set(&mut status.conditions, Type::Ready, ready, reason, message, None, NOW);
        copy.status = Some(status);
        Arc::new(copy)
    }

    #[test]
    fn preload_status_names_holders_and_shortages() {
        let room = |node: &str| Shortage::Space {
            node: node.to_owned(),
            needed: 40 << 30,
            free: 12 << 30,
            evictable: 8 << 30,
            limit: 100 << 30,
        };
        let copies = [
            copy("a", true, Reason::Verified, "every byte matches"),
            copy("b", false, Reason::Downloading, "files are being fetched"),
            copy("c", false, Reason::DiskPressure, "/models has 1.0 GiB free"),
            copy("0", false, Reason::WaitingForPeer, "another node fetches these files"),
        ];
        for (story, expected, held, lacks, shown, reason, words) in [
            ("there", 1, vec![("a", true)], vec![], "1/1", "+Settled", "1 of 1 node holds every file: a"),
            (
                "on its way",
                2,
                vec![("a", true), ("b", false)],
                vec![],
                "1/2",
                "-Downloading",
                "1 of 2 nodes hold every file: a; node b: files are being fetched",
            ),
            (
                "one fetches, the others wait for it",
                3,
                vec![("a", true), ("b", false), ("0", false)],
                vec![],
                "1/3",
                "-Downloading",
                "; node 0: another node fetches these files; node b: files are being fetched",
            ),
            (
                "its agent refuses",
                2,
                vec![("b", false), ("c", false)],
                vec![],
                "0/2",
                "-DiskPressure",
                "node c: /models has 1.0 GiB free",
            ),
            (
                "no room",
                2,
                vec![("a", true)],
                vec![room("d")],
                "1/2",
                "-DiskPressure",
                "node d: 40.0 GiB more are needed, 12.0 GiB are free beyond the reserve and 8.0 GiB could go",
            ),
            (
                "asked just now",
                1,
                vec![("e", false)],
                vec![],
                "0/1",
                "-WaitingForAgent",
                "waiting for node e to fetch the files",
            ),
            ("nobody", 0, vec![], vec![], "0/0", "-NoNodes", "no node of the pool takes work"),
        ] {
            let held = held.into_iter().map(|(node, ready)| (node.to_owned(), ready)).collect();
            let preload =
                Some(Ok(PreloadOutcome { desired_nodes: expected, holders: held, shortages: lacks }));
            let mut status = ModelStatus::default();
            write_status(&Model::new("m", ModelSpec::default()), preload.as_ref(), &copies, NOW, &mut status);
            let condition = get(&status.conditions, Type::Preloaded).unwrap();
            let sign = if condition.status == "True" { '+' } else { '-' };
            assert_eq!(format!("{sign}{}", condition.reason), reason, "{story}");
            assert!(condition.message.contains(words), "{story}: {}", condition.message);
            assert_eq!(status.preloaded.as_deref(), Some(shown), "{story}");
            write_status(&Model::new("m", ModelSpec::default()), None, &copies, NOW, &mut status);
            assert_eq!(status, ModelStatus::default(), "{story}: and nothing of it stays");
        }
    }
}
