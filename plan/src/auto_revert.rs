//! Auto-revert: replaces a spec that never became ready with the last known good one, until the spec is
//! edited. Not here: the steps from one plan to the next (`placement`).
//!
//! ```text
//! requested ─ ready ─▶ last known good
//!     └─ re-forms three times and never becomes ready, with a last known good ─▶ failed: plan that one
//! ```

use crate::digest::digest;
use crate::valid_deployment::ValidDeployment;
use russet_crds::{
    Adapter, AutoRevert, DeploymentEngine, FailedRollout, LastKnownGood, LocalReference, ModelDeploymentSpec,
    RolloutStatus,
};

/// Maximum re-forms of a group that never became ready; then its plan has failed.
pub const MAX_ATTEMPTS: u32 = 3;
/// Maximum message length; the schema says the same.
const MAX_MESSAGE_BYTES: usize = 2048;

/// Digest of the parts of a spec that determine a plan: model, split, engine options,
/// draft model and adapters.
pub fn spec_digest(desired: &ValidDeployment) -> String {
    let (split, engine) = ((&desired.model, &desired.sharding), &desired.capacity.engine);
    // Digests stored before engine options, draft models or adapters existed stay valid.
    match &desired.draft {
        _ if !desired.adapters.is_empty() => {
            let adapters: Vec<&Adapter> = desired.adapters.iter().map(|deployed| &deployed.adapter).collect();
            digest(&(split, engine, desired.draft.as_ref().map(|draft| &draft.name), adapters))
        }
        Some(draft) => digest(&(split, engine, &draft.name)),
        None if engine.is_default() => digest(&split),
        None => digest(&(split, engine)),
    }
}

/// The spec to plan instead of `spec`, whose digest is `intent`, and the reason; `None` if it has not failed.
pub fn rolled_back_spec(
    spec: &ModelDeploymentSpec,
    status: Option<&RolloutStatus>,
    intent: &str,
) -> Option<(ModelDeploymentSpec, String)> {
    let RolloutStatus { proven, failed } = status?;
    let (proven, failed) = (proven.as_ref()?, failed.as_ref()?);
    let enabled = spec.rollout.clone().unwrap_or_default().auto_revert == AutoRevert::Enabled;
    if !enabled || failed.intent != intent || proven.intent == intent {
        return None;
    }
    let before = ModelDeploymentSpec {
        model_ref: proven.model_ref.clone(),
        draft_model_ref: proven.draft_model_ref.clone(),
        adapters: proven.adapters.clone(),
        sharding: Some(proven.sharding.clone()),
        strategy_ref: None,
        engine: DeploymentEngine { options: proven.engine, ..spec.engine.clone() },
        ..spec.clone()
    };
    Some((before, failed.message.clone()))
}

/// The updated status: whether all desired replicas are ready, or the failure of a group that was re-formed
/// too often. `want` is the planned spec.
pub fn record_outcome(
    before: Option<RolloutStatus>,
    desired: &ValidDeployment,
    answers: bool,
    failing: Option<&str>,
) -> Option<RolloutStatus> {
    let RolloutStatus { mut proven, mut failed } = before.unwrap_or_default();
    failed = failed.filter(|failed| failed.intent == desired.spec_digest);
    let known = proven.as_ref().is_some_and(|proven| proven.intent == desired.spec_digest);
    match failing {
        _ if desired.rollback_reason.is_some() => {}
        _ if answers => {
            proven = Some(LastKnownGood {
                intent: desired.spec_digest.clone(),
                model_ref: LocalReference::new(&desired.model),
                draft_model_ref: desired.draft.as_ref().map(|draft| LocalReference::new(&draft.name)),
                adapters: desired.adapters.iter().map(|deployed| deployed.adapter.clone()).collect(),
                sharding: desired.sharding.clone(),
                engine: desired.capacity.engine,
            });
            failed = None;
        }
        // A spec that was ready once and fails now is not replaced by an older one.
        Some(message) if proven.is_some() && !known => {
            let message = message.chars().take(MAX_MESSAGE_BYTES).collect();
            failed = Some(FailedRollout { intent: desired.spec_digest.clone(), message });
        }
        _ => {}
    }
    let status = RolloutStatus { proven, failed };
    (status != RolloutStatus::default()).then_some(status)
}

#[cfg(test)]
mod tests {
    use russet_crds::{EngineOptions, KvCacheType, KvCapacity, Rollout, Sharding};
    use russet_model::adapter::AdapterShape;
    use russet_model::shape::ModelShape;

    use super::*;
    use crate::snapshot::Snapshot;
    use crate::validate::validate;

    fn spec(context_tokens: u32, auto_revert: AutoRevert) -> ModelDeploymentSpec {
        let kv = KvCapacity { context_tokens, ..KvCapacity::default() };
        ModelDeploymentSpec {
            model_ref: LocalReference::new("m"),
            sharding: Some(Sharding { kv, ..Sharding::default() }),
            rollout: Some(Rollout { auto_revert, ..Rollout::default() }),
            replicas: 1,
            ..ModelDeploymentSpec::default()
        }
    }

    fn valid(spec: &ModelDeploymentSpec) -> ValidDeployment {
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers: 2,
            layer_bytes: vec![1; 2],
            head_dim: 64,
            ..ModelShape::default()
        };
        let mut view = Snapshot::default();
        for name in ["m", "d", "e"] {
            view.models.insert(("ns".to_owned(), name.to_owned()), shape.clone());
        }
        let adapter = Some(AdapterShape::default());
        view.models
            .insert(("ns".to_owned(), "a".to_owned()), ModelShape { adapter, ..ModelShape::default() });
        validate(&view, "ns", "chat", spec).unwrap()
    }

    #[test]
    fn failed_spec_is_rolled_back_until_it_is_edited() {
        let (old, new, other) = (
            spec(1024, AutoRevert::Enabled),
            spec(2048, AutoRevert::Enabled),
            spec(4096, AutoRevert::Enabled),
        );
        let proven = record_outcome(None, &valid(&old), true, None);
        let intent = |spec: &ModelDeploymentSpec| valid(spec).spec_digest;
        assert_eq!(proven.as_ref().unwrap().proven.as_ref().unwrap().intent, intent(&old));

        let failed = record_outcome(proven.clone(), &valid(&new), false, Some("rank 0: out of luck"));
        let (planned, why) = rolled_back_spec(&new, failed.as_ref(), &intent(&new)).unwrap();
        assert_eq!((planned.sharding.clone(), why.as_str()), (old.sharding.clone(), "rank 0: out of luck"));
        // While the old spec is planned, its readiness proves nothing about the requested one.
        let mut desired = valid(&planned);
        (desired.spec_digest, desired.rollback_reason) = (intent(&new), Some(why));
        assert_eq!(record_outcome(failed.clone(), &desired, true, None), failed);

        for (story, spec, status, expected) in [
            ("nothing failed", &new, &proven, false),
            ("it failed", &new, &failed, true),
            ("another edit is tried", &other, &failed, false),
            ("back by hand", &old, &failed, false),
            ("its owner wants to see it fail", &self::spec(2048, AutoRevert::Disabled), &failed, false),
        ] {
            assert_eq!(rolled_back_spec(spec, status.as_ref(), &intent(spec)).is_some(), expected, "{story}");
        }
        let after = record_outcome(failed, &valid(&other), false, None).unwrap();
        assert_eq!(after.failed, None, "an edit begins anew");
    }

    #[test]
    fn engine_options_change_the_digest_and_are_rolled_back() {
        let with_kv_cache = |kv_cache| ModelDeploymentSpec {
            engine: EngineOptions { kv_cache, ..EngineOptions::default() }.into(),
            ..spec(1024, AutoRevert::Enabled)
        };
        let (old, new) = (with_kv_cache(KvCacheType::Int8), with_kv_cache(KvCacheType::Int4));
        let proven = record_outcome(None, &valid(&old), true, None);
        let failed = record_outcome(proven, &valid(&new), false, Some("out of luck"));
        let (planned, _) = rolled_back_spec(&new, failed.as_ref(), &valid(&new).spec_digest).unwrap();
        assert_eq!(planned.engine, old.engine);
        // A status stored before engine options existed stays valid.
        let default = valid(&with_kv_cache(KvCacheType::AsComputed));
        assert_eq!(default.spec_digest, digest(&("m", &default.sharding)));
    }

    #[test]
    fn rollback_restores_the_draft_model() {
        let with_draft = |draft: Option<&str>| ModelDeploymentSpec {
            draft_model_ref: draft.map(LocalReference::new),
            ..spec(1024, AutoRevert::Enabled)
        };
        for (old, new) in [(Some("d"), Some("e")), (None, Some("d")), (Some("d"), None)] {
            let (old, new) = (with_draft(old), with_draft(new));
            let proven = record_outcome(None, &valid(&old), true, None);
            let failed = record_outcome(proven, &valid(&new), false, Some("out of luck"));
            let (planned, _) = rolled_back_spec(&new, failed.as_ref(), &valid(&new).spec_digest).unwrap();
            assert_eq!(planned.draft_model_ref, old.draft_model_ref);
        }
    }

    #[test]
    fn rollback_restores_the_adapters() {
        let with_adapters = |names: &[&str]| {
            let adapter =
                |name: &&str| Adapter { name: (*name).to_owned(), model_ref: LocalReference::new("a") };
            ModelDeploymentSpec {
                adapters: names.iter().map(adapter).collect(),
                ..spec(1024, AutoRevert::Enabled)
            }
        };
        for (old, new) in [(&["x"][..], &["x", "y"][..]), (&[], &["x"]), (&["x"], &[]), (&["x"], &["y"])] {
            let (old, new) = (with_adapters(old), with_adapters(new));
            let proven = record_outcome(None, &valid(&old), true, None);
            let failed = record_outcome(proven, &valid(&new), false, Some("out of luck"));
            let (planned, _) = rolled_back_spec(&new, failed.as_ref(), &valid(&new).spec_digest).unwrap();
            assert_eq!(planned.adapters, old.adapters);
        }
        // A status stored before adapters existed stays valid.
        let draft_model_ref = Some(LocalReference::new("d"));
        let drafted = valid(&ModelDeploymentSpec { draft_model_ref, ..spec(1024, AutoRevert::Enabled) });
        let engine = drafted.capacity.engine;
        assert_eq!(drafted.spec_digest, digest(&(("m", &drafted.sharding), engine, "d")));
    }

    #[test]
    fn the_first_plan_and_one_that_answered_once_are_not_reverted() {
        let new = spec(2048, AutoRevert::Enabled);
        assert_eq!(record_outcome(None, &valid(&new), false, Some("no")), None);
        let proven = record_outcome(None, &valid(&new), true, None);
        assert_eq!(record_outcome(proven.clone(), &valid(&new), false, Some("no")), proven);
    }
}
