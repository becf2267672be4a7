//! Progress of a deployment, from its Model, itself and its copies: ready, waiting, or failed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use russet_crds::conditions::{Reason, Type, get, is_true, reason};
use russet_crds::{CopyMode, Model, ModelCopy, ModelDeployment};

/// Number of polls after which a stalled deployment counts as failed. Its status may be a moment old: from
/// before the Model was added, or from while a node was unreachable.
const MAX_STALLED_POLLS: u32 = 15;

/// Progress of a deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeploymentProgress {
    /// It is ready, or a request scales it up.
    Ready,
    /// It is in progress.
    Waiting {
        /// What it waits for.
        words: String,
        /// Bytes present on nodes and bytes wanted there, while files are downloaded.
        bytes: Option<(u64, u64)>,
    },
    /// It will not become ready without a change.
    Failed(String),
}

/// State kept between polls.
#[derive(Debug, Default)]
pub struct ProgressTracker {
    stalled_polls: u32,
}

impl ProgressTracker {
    /// The progress according to the current objects.
    pub fn observe(
        &mut self,
        model: &Model,
        deployment: &ModelDeployment,
        copies: &[ModelCopy],
    ) -> DeploymentProgress {
        let conditions = model.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let current = model
            .status
            .as_ref()
            .is_some_and(|status| status.observed_generation == model.metadata.generation);
        if let Some(stalled) = get(conditions, Type::Stalled).filter(|it| current && it.status == "True") {
            return DeploymentProgress::Failed(format!(
                "Model {}: {}",
                model.name_any(),
                reason_and_message(stalled)
            ));
        }
        let unread = get(conditions, Type::Ready).filter(|it| it.status != "True");
        let name = deployment.name_any();
        let status = deployment.status.as_ref();
        let current =
            status.is_some_and(|status| status.observed_generation == deployment.metadata.generation);
        let conditions = status.map(|status| status.conditions.as_slice()).unwrap_or_default();
        let Some(ready) = get(conditions, Type::Ready).filter(|_| current) else {
            return DeploymentProgress::Waiting {
                words: "the operator to process it".to_owned(),
                bytes: None,
            };
        };
        if ready.status == "True" {
            return match reason(ready) {
                Some(Reason::Stopped | Reason::OutsideSchedule) => DeploymentProgress::Failed(format!(
                    "ModelDeployment {name} is stopped: {}; raise its replicas, or wait for its hours",
                    reason_and_message(ready)
                )),
                _ => DeploymentProgress::Ready,
            };
        }
        self.stalled_polls = if is_true(conditions, Type::Stalled) { self.stalled_polls + 1 } else { 0 };
        if self.stalled_polls >= MAX_STALLED_POLLS {
            return DeploymentProgress::Failed(format!(
                "ModelDeployment {name}: {}",
                reason_and_message(ready)
            ));
        }
        let bytes = pending_bytes(copies);
        let words = match unread {
            Some(unread) => format!("Model: {}", reason_and_message(unread)),
            None => reason_and_message(ready),
        };
        DeploymentProgress::Waiting { words, bytes }
    }
}

fn reason_and_message(condition: &Condition) -> String {
    format!("{}: {}", condition.reason, condition.message)
}

/// Bytes of files that are still being downloaded, if any.
fn pending_bytes(copies: &[ModelCopy]) -> Option<(u64, u64)> {
    let statuses = copies
        .iter()
        .filter(|copy| copy.spec.want == CopyMode::Files)
        .filter_map(|copy| copy.status.as_ref());
    let (done, total) = statuses.fold((0_u64, 0_u64), |(done, total), status| {
        (done.saturating_add(status.bytes_done), total.saturating_add(status.bytes_total))
    });
    (done < total).then_some((done, total))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use russet_crds::conditions::set;
    use russet_crds::{
        ModelCopySpec, ModelCopyStatus, ModelDeploymentSpec, ModelDeploymentStatus, ModelSpec, ModelStatus,
    };

    use super::*;

    fn conditions(list: &[(Type, bool, Reason)]) -> Vec<Condition> {
        let mut conditions = Vec::new();
        for (kind, status, reason) in list {
            set(&mut conditions, *kind, *status, *reason, "words", Some(1), Timestamp::UNIX_EPOCH);
        }
        conditions
    }

    fn model(list: &[(Type, bool, Reason)]) -> Model {
        let mut model = Model::new("m", ModelSpec::default());
        model.metadata.generation = Some(1);
        model.status = Some(ModelStatus {
            observed_generation: Some(1),
            conditions: conditions(list),
            ..ModelStatus::default()
        });
        model
    }

    fn deployment(generation: i64, list: &[(Type, bool, Reason)]) -> ModelDeployment {
        let mut deployment = ModelDeployment::new("d", ModelDeploymentSpec::default());
        deployment.metadata.generation = Some(generation);
        deployment.status = Some(ModelDeploymentStatus {
            observed_generation: Some(1),
            conditions: conditions(list),
            ..ModelDeploymentStatus::default()
        });
        deployment
    }

    #[test]
    fn deployment_is_ready_waiting_or_failed() {
        let good = [(Type::Ready, true, Reason::Settled)];
        let unread = [(Type::Ready, false, Reason::WaitingForAgent)];
        let foreign = [(Type::Stalled, true, Reason::UnsupportedArchitecture)];
        let waits = |words: &str| DeploymentProgress::Waiting { words: words.to_owned(), bytes: None };
        let at_work = [(Type::Ready, false, Reason::WaitingForRanks)];
        for (model_conditions, generation, list, step) in [
            (&good[..], 1, &[(Type::Ready, true, Reason::Serving)][..], DeploymentProgress::Ready),
            // A request scales it up.
            (&good, 1, &[(Type::Ready, true, Reason::Idle)], DeploymentProgress::Ready),
            (&good, 1, &at_work, waits("WaitingForRanks: words")),
            (&unread, 1, &at_work, waits("Model: WaitingForAgent: words")),
            (&good, 2, &[(Type::Ready, true, Reason::Serving)], waits("the operator to process it")),
            (&good, 1, &[], waits("the operator to process it")),
            (
                &foreign,
                1,
                &at_work,
                DeploymentProgress::Failed("Model m: UnsupportedArchitecture: words".to_owned()),
            ),
            (
                &good,
                1,
                &[(Type::Ready, true, Reason::Stopped)],
                DeploymentProgress::Failed(
                    "ModelDeployment d is stopped: Stopped: words; raise its replicas, or wait for its hours"
                        .to_owned(),
                ),
            ),
        ] {
            let shown = ProgressTracker::default().observe(
                &model(model_conditions),
                &deployment(generation, list),
                &[],
            );
            assert_eq!(shown, step, "{list:?}");
        }
    }

    #[test]
    fn stalled_deployment_fails_after_repeated_polls() {
        let stuck = deployment(
            1,
            &[(Type::Ready, false, Reason::NothingFits), (Type::Stalled, true, Reason::NothingFits)],
        );
        let moves = deployment(1, &[(Type::Ready, false, Reason::WaitingForRanks)]);
        let mut looks = ProgressTracker::default();
        let mut waits = |deployment: &ModelDeployment| {
            matches!(looks.observe(&model(&[]), deployment, &[]), DeploymentProgress::Waiting { .. })
        };
        for _ in 1..MAX_STALLED_POLLS {
            assert!(waits(&stuck));
        }
        assert!(waits(&moves));
        for _ in 1..MAX_STALLED_POLLS {
            assert!(waits(&stuck));
        }
        assert!(!waits(&stuck));
    }

    #[test]
    fn files_that_are_on_their_way_are_counted_and_headers_are_not() {
        let copy = |mode, bytes_done, bytes_total| {
            let mut copy = ModelCopy::new("c", ModelCopySpec { want: mode, ..ModelCopySpec::default() });
            copy.status = Some(ModelCopyStatus { bytes_done, bytes_total, ..ModelCopyStatus::default() });
            copy
        };
        for (copies, bytes) in [
            (vec![], None),
            (vec![copy(CopyMode::Headers, 1, 9)], None),
            (vec![copy(CopyMode::Files, 9, 9)], None),
            (
                vec![copy(CopyMode::Files, 1, 9), copy(CopyMode::Files, 9, 9), copy(CopyMode::Headers, 1, 9)],
                Some((10, 18)),
            ),
        ] {
            assert_eq!(pending_bytes(&copies), bytes);
        }
    }
}
