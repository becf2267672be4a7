//! The inventory of files for the copy planner, built from objects; and preloads that cannot be planned.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{CopyMode, InferenceNode, Model, ModelCopy, ModelDeployment, PreloadPolicy, Tier};
use russet_plan::ClusterObjects;
use russet_plan::cluster::{availability, resolve_pools};
use russet_plan::copies::{self, Inventory, NodeCopy, NodeStorage, PreloadRule};
use russet_plan::note::Note;
use russet_plan::pool::EligibleNodes;
use russet_plan::snapshot::ObjectKey;

type ResolvedPools = BTreeMap<String, Result<EligibleNodes, Note>>;

/// Why a preload cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnplannedPreload {
    /// The reason for conditions.
    pub reason: Reason,
    /// The message.
    pub message: String,
}

/// Objects that a copy plan depends on.
pub struct InventoryObjects {
    /// Machines, pools, tiers, replicas and ranks, and all Models.
    pub cluster: ClusterObjects,
    /// All copies.
    pub copies: Vec<Arc<ModelCopy>>,
    /// All deployments.
    pub deployments: Vec<Arc<ModelDeployment>>,
}

impl InventoryObjects {
    /// Whether there is nothing to plan: no preloads, and no agent lacks space for a requested fetch.
    pub fn is_idle(&self) -> bool {
        let models = &self.cluster.models;
        models.iter().all(|model| model.spec.preload.is_none())
            && !self.copies.iter().any(|copy| has_disk_pressure(copy))
    }

    /// The inventory.
    pub fn inventory(&self, now: Timestamp) -> Inventory {
        let ClusterObjects {
            nodes,
            models,
            strategies: _,
            pools,
            tiers,
            groups,
            shards,
            copies: _,
            approvals: _,
        } = &self.cluster;
        let areas = resolve_pools(pools, nodes);
        let files: Vec<&Arc<ModelCopy>> = self
            .copies
            .iter()
            .filter(|copy| copy.spec.want == CopyMode::Files && copy.metadata.deletion_timestamp.is_none())
            .collect();
        let of_groups = groups.iter().flat_map(|group| {
            let namespace = group.namespace().unwrap_or_default();
            let files = group.spec.plan.files(&group.spec.model_ref.name);
            files.map(move |(model, node)| ((namespace.clone(), model.to_owned()), node.to_owned()))
        });
        let of_shards = shards.iter().flat_map(|shard| {
            let namespace = shard.namespace().unwrap_or_default();
            let node = &shard.spec.node_name;
            shard.spec.models().map(move |model| ((namespace.clone(), model.to_owned()), node.clone()))
        });
        Inventory {
            nodes: nodes.iter().map(|node| (node.name_any(), node_storage(node, &files, now))).collect(),
            models: models
                .iter()
                .map(|model| (key(model), model_files(model, &self.copies, &self.deployments, tiers, &areas)))
                .collect(),
            copies: files.iter().map(|copy| node_copy(copy)).collect(),
            uses: of_groups.chain(of_shards).collect(),
        }
    }
}

/// Namespace and name.
pub fn key(model: &Model) -> ObjectKey {
    (model.namespace().unwrap_or_default(), model.name_any())
}

/// Eviction priority of a model's files: that of the most important tier whose deployments name it.
pub fn priority(model: &ObjectKey, deployments: &[Arc<ModelDeployment>], tiers: &[Arc<Tier>]) -> i32 {
    let of = |deployment: &Arc<ModelDeployment>| {
        let tier = deployment.spec.tier_ref.as_ref()?;
        let tier = tiers.iter().find(|it| it.name_any() == tier.name)?;
        tier.spec.allows(&model.0).then_some(tier.spec.priority)
    };
    deployments_of(model, deployments).filter_map(of).max().unwrap_or(0)
}

/// A model's preload; `None` without one.
pub fn preload_rule(model: &Model, areas: &ResolvedPools) -> Result<Option<PreloadRule>, UnplannedPreload> {
    let Some(preload) = &model.spec.preload else { return Ok(None) };
    let pinned = match preload.policy {
        PreloadPolicy::OnDemand => return Ok(None),
        PreloadPolicy::Always => false,
        PreloadPolicy::Pinned => true,
        PreloadPolicy::Unknown => {
            let message = Note::Newer { field: "spec.preload.policy".to_owned() }.to_string();
            return Err(UnplannedPreload { reason: Reason::NewerRelease, message });
        }
    };
    let nodes = match &preload.pool_ref {
        None => None,
        Some(pool) => match areas.get(&pool.name) {
            Some(Ok(area)) => area.nodes.clone(),
            Some(Err(why)) => return Err(unplanned(why)),
            None => {
                let known = areas.keys().cloned().collect();
                return Err(unplanned(&Note::PoolUnknown { pool: pool.name.clone(), known }));
            }
        },
    };
    if !model.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready)) {
        let message = "waits until the model's headers are read and the engine knows them".to_owned();
        return Err(UnplannedPreload { reason: Reason::WaitingForModel, message });
    }
    Ok(Some(PreloadRule { nodes, min_nodes: preload.copies, pinned }))
}

fn unplanned(note: &Note) -> UnplannedPreload {
    UnplannedPreload { reason: note.reason(), message: note.to_string() }
}

/// Whether every byte is present and verified.
pub fn is_ready(copy: &ModelCopy) -> bool {
    copy.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
}

/// Whether its agent cannot fetch it for lack of space.
pub fn has_disk_pressure(copy: &ModelCopy) -> bool {
    let conditions = copy.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let ready = conditions::get(conditions, Type::Ready);
    ready.and_then(conditions::reason) == Some(Reason::DiskPressure)
}

fn deployments_of<'a>(
    (namespace, model): &'a ObjectKey,
    deployments: &'a [Arc<ModelDeployment>],
) -> impl Iterator<Item = &'a Arc<ModelDeployment>> {
    deployments.iter().filter(move |deployment| {
        deployment.metadata.deletion_timestamp.is_none()
            && deployment.metadata.namespace.as_ref() == Some(namespace)
            && deployment.spec.models().any(|named| named == model)
    })
}

fn model_files(
    model: &Model,
    copies: &[Arc<ModelCopy>],
    deployments: &[Arc<ModelDeployment>],
    tiers: &[Arc<Tier>],
    areas: &ResolvedPools,
) -> copies::ModelFiles {
    let key = key(model);
    let status = model.status.clone().unwrap_or_default();
    let measured = copies
        .iter()
        .filter(|copy| copy.spec.model_ref.namespace == key.0 && copy.spec.model_ref.name == key.1)
        .filter_map(|copy| copy.status.as_ref())
        .map(|status| status.bytes_total);
    let shape = status.shape.as_ref().map_or(0, |shape| shape.total_bytes());
    let leaving = model.metadata.deletion_timestamp.is_some();
    copies::ModelFiles {
        files: copies::files_id(model),
        bytes: measured.max().unwrap_or(0).max(shape),
        priority: priority(&key, deployments, tiers),
        preload: if leaving { None } else { preload_rule(model, areas).ok().flatten() },
        runs_on: deployments_of(&key, deployments)
            .flat_map(|deployment| runs_on(deployment, tiers, areas))
            .collect(),
    }
}

/// Nodes that a deployment may use, if it or its tier names pools.
fn runs_on(deployment: &ModelDeployment, tiers: &[Arc<Tier>], areas: &ResolvedPools) -> BTreeSet<String> {
    let tier = deployment.spec.tier_ref.as_ref();
    let tier = tier.and_then(|reference| tiers.iter().find(|tier| tier.name_any() == reference.name));
    let groups = tier.and_then(|tier| tier.status.as_ref()).map(|status| status.workload_groups.as_slice());
    let own = deployment
        .spec
        .workload_group
        .as_ref()
        .and_then(|name| groups.unwrap_or_default().iter().find(|group| group.name == *name));
    if let Some(own) = own {
        return own.nodes.iter().cloned().collect();
    }
    let pools = tier.map_or(&deployment.spec.pool_refs, |tier| &tier.spec.pool_refs);
    let areas = pools.iter().filter_map(|pool| areas.get(&pool.name)?.as_ref().ok()?.nodes.as_deref());
    areas.flatten().cloned().collect()
}

fn node_copy(copy: &ModelCopy) -> NodeCopy {
    let status = copy.status.clone().unwrap_or_default();
    let model = &copy.spec.model_ref;
    let created = copy.metadata.creation_timestamp.as_ref();
    NodeCopy {
        model: (model.namespace.clone(), model.name.clone()),
        node: copy.spec.node_name.clone(),
        bytes: status.bytes_total,
        done: status.bytes_done,
        ready: is_true(&status.conditions, Type::Ready),
        last_used: status.last_used_time.as_ref().or(created).map(|time| time.0),
        pinned: copy.spec.retention.unwrap_or_default().pinned,
    }
}

fn node_storage(node: &InferenceNode, files: &[&Arc<ModelCopy>], now: Timestamp) -> NodeStorage {
    let name = node.name_any();
    let measured = node.status.as_ref().and_then(|status| status.disk.as_ref());
    let limit = measured.map(|disk| {
        let here = files.iter().filter(|copy| copy.spec.node_name == name);
        let held = here.filter_map(|copy| Some(copy.status.as_ref()?.bytes_done)).sum();
        copies::limit(disk, held)
    });
    NodeStorage { limit, availability: availability(node, now) }
}

#[cfg(test)]
mod tests {
    use russet_crds::{
        InferenceNodeSpec, InferenceNodeStatus, LocalReference, ModelCopyStatus, ModelDeploymentSpec,
        ModelSpec, ModelStatus, NodeDisk, TierSpec,
    };

    use super::*;
    use crate::model::{copy_object, copy_spec};

    const GIB: u64 = 1 << 30;

    fn model(ready: bool, preload: Option<russet_crds::Preload>) -> Model {
        let mut model = Model::new("m", ModelSpec { preload, ..ModelSpec::default() });
        model.metadata.namespace = Some("ns".to_owned());
        let mut status = ModelStatus::default();
        let now = Timestamp::UNIX_EPOCH;
        conditions::set(&mut status.conditions, Type::Ready, ready, Reason::Settled, "", None, now);
        model.status = Some(status);
        model
    }

    #[test]
    fn unplannable_preload_gives_its_reason() {
        let areas: ResolvedPools = [("p".to_owned(), Ok(EligibleNodes::default()))].into();
        for (policy, pool, ready, expected) in [
            (None, None, true, "nothing"),
            (Some(PreloadPolicy::OnDemand), None, true, "nothing"),
            (Some(PreloadPolicy::Always), Some("p"), true, "kept"),
            (Some(PreloadPolicy::Pinned), None, true, "pinned"),
            (Some(PreloadPolicy::Always), Some("q"), true, "PoolNotFound"),
            (Some(PreloadPolicy::Always), None, false, "WaitingForModel"),
            (Some(PreloadPolicy::Unknown), None, true, "NewerRelease"),
        ] {
            let pool_ref = pool.map(LocalReference::new);
            let preload = policy.map(|policy| russet_crds::Preload { policy, pool_ref, copies: None });
            let said = match preload_rule(&model(ready, preload), &areas) {
                Ok(None) => "nothing".to_owned(),
                Ok(Some(preload)) if preload.pinned => "pinned".to_owned(),
                Ok(Some(_)) => "kept".to_owned(),
                Err(why) => format!("{:?}", why.reason),
            };
            assert_eq!(said, expected, "{policy:?} of {pool:?}");
        }
    }

    #[test]
    fn files_matter_as_the_most_important_tier_that_needs_them() {
        let tier =
            |name: &str, priority| Arc::new(Tier::new(name, TierSpec { priority, ..TierSpec::default() }));
        let deployment = |name: &str, namespace: &str, tier: Option<&str>| {
            let spec = ModelDeploymentSpec {
                model_ref: LocalReference::new("m"),
                tier_ref: tier.map(LocalReference::new),
                ..ModelDeploymentSpec::default()
            };
            let mut deployment = ModelDeployment::new(name, spec);
            deployment.metadata.namespace = Some(namespace.to_owned());
            Arc::new(deployment)
        };
        let tiers = [tier("gold", 100), tier("lead", 1)];
        let key = ("ns".to_owned(), "m".to_owned());
        for (deployments, expected) in [
            (vec![], 0),
            (vec![deployment("a", "ns", None)], 0),
            (vec![deployment("a", "ns", Some("lead")), deployment("b", "ns", Some("gold"))], 100),
            (vec![deployment("a", "ns", Some("lead")), deployment("b", "other", Some("gold"))], 1),
            (vec![deployment("a", "ns", Some("nosuch"))], 0),
        ] {
            assert_eq!(priority(&key, &deployments, &tiers), expected);
        }
    }

    #[test]
    fn inventory_is_idle_without_preloads_or_full_disks() {
        let fetches = |reason: Option<Reason>| {
            let mut copy = copy_object(copy_spec(&model(true, None), "a", CopyMode::Files));
            copy.status = reason.map(|reason| {
                let mut status = ModelCopyStatus::default();
                let (kind, now) = (Type::Ready, Timestamp::UNIX_EPOCH);
                conditions::set(
                    &mut status.conditions,
                    kind,
                    reason == Reason::Verified,
                    reason,
                    "",
                    None,
                    now,
                );
                status
            });
            vec![Arc::new(copy)]
        };
        let ahead = |policy| Some(russet_crds::Preload { policy, ..russet_crds::Preload::default() });
        for (story, copies, preload, idle) in [
            ("nothing is there", Vec::new(), None, true),
            ("its agent has not begun", fetches(None), None, true),
            ("it comes", fetches(Some(Reason::Downloading)), None, true),
            ("it is there", fetches(Some(Reason::Verified)), None, true),
            ("its agent has no room", fetches(Some(Reason::DiskPressure)), None, false),
            ("files are wanted ahead", Vec::new(), ahead(PreloadPolicy::Always), false),
        ] {
            let models = vec![Arc::new(model(true, preload))];
            let cluster = ClusterObjects { models, ..ClusterObjects::default() };
            assert_eq!(
                InventoryObjects { cluster, copies, deployments: Vec::new() }.is_idle(),
                idle,
                "{story}"
            );
        }
    }

    #[test]
    fn disk_limit_of_an_older_agent_is_derived_from_its_status() {
        let mut copy = copy_object(copy_spec(&model(true, None), "a", CopyMode::Files));
        copy.status = Some(ModelCopyStatus { bytes_done: 30 * GIB, ..ModelCopyStatus::default() });
        let copy = Arc::new(copy);
        for (said, disk, expected) in [
            ("nothing yet", None, None),
            ("free bytes only", Some((50 * GIB, None)), Some(79 * GIB)),
            ("free bytes only, few", Some((0, None)), Some(29 * GIB)),
            ("the limit", Some((50 * GIB, Some(7))), Some(7)),
        ] {
            let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
            let disk = disk.map(|(free_bytes, models_limit_bytes)| NodeDisk {
                free_bytes,
                models_limit_bytes,
                ..NodeDisk::default()
            });
            node.status = Some(InferenceNodeStatus { disk, ..InferenceNodeStatus::default() });
            let seen = InventoryObjects {
                cluster: ClusterObjects { nodes: vec![Arc::new(node)], ..ClusterObjects::default() },
                copies: vec![copy.clone()],
                deployments: Vec::new(),
            };
            assert_eq!(seen.inventory(Timestamp::UNIX_EPOCH).nodes["a"].limit, expected, "{said}");
        }
    }
}
