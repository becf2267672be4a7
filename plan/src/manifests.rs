//! Manifests: objects such as the output of `kubectl get … -o yaml`, combined to a cluster and the
//! deployments to plan. Not here: files and clients. Objects are added one after another; each invalid one
//! gives an error.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    Approval, ENGINE_OPTIONS, GROUP, InferenceNode, Model, ModelCopy, ModelDeployment, NodePool, Shard,
    ShardGroup, ShardingStrategy, Tier, VERSION,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::cluster::ClusterObjects;

/// Kinds of a cluster, with the names of their lists.
pub const KINDS: [(&str, &str); 9] = [
    ("InferenceNode", "inferencenodes"),
    ("NodePool", "nodepools"),
    ("ShardingStrategy", "shardingstrategies"),
    ("Tier", "tiers"),
    ("Model", "models"),
    ("ModelCopy", "modelcopies"),
    ("ShardGroup", "shardgroups"),
    ("Shard", "shards"),
    ("Approval", "approvals"),
];
/// Kinds without a namespace.
const CLUSTER_SCOPED: [&str; 5] = ["InferenceNode", "NodePool", "ShardingStrategy", "Tier", "ModelCopy"];
/// Sharding modes of engines of this release, as agents report them.
const SUPPORTED_MODES: [&str; 4] = ["Single", "Pipeline", "Tensor", "Hybrid"];

/// Origin of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestOrigin {
    /// An API server: what is missing is not known yet.
    Server,
    /// The description of a cluster, possibly hand-written.
    Cluster,
    /// To be applied to the cluster.
    Spec,
}

/// An invalid object.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ManifestError {
    /// It lacks a kind, version or name.
    #[error("{place}: an object without {field}; write it, or take the object out")]
    Unidentified {
        /// Its location.
        place: String,
        /// The missing field.
        field: &'static str,
    },
    /// Its fields do not match its kind.
    #[error(
        "{place}: {kind} {name}: {why}; correct it, or print it anew with kubectl get {kind} {name} -o yaml"
    )]
    Invalid {
        /// Its location.
        place: String,
        /// Its kind.
        kind: String,
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// It is to be applied and has a field unknown to its kind; a server would reject it.
    #[error("{place}: {kind} {name}: {field} is no field of {kind}; is its name right?")]
    UnknownField {
        /// Its location.
        place: String,
        /// Its kind.
        kind: String,
        /// Its name.
        name: String,
        /// The field, as a path.
        field: String,
    },
}

/// Kind, namespace and name.
type ObjectId = (String, String, String);

/// Objects; of each kind and name, the last one added.
#[derive(Clone, Debug)]
pub struct ManifestSet {
    namespace: String,
    ids: BTreeMap<ObjectId, usize>,
    objects: Vec<(Value, ManifestObject)>,
    /// Whether some came from a server, which lists every copy.
    from_server: bool,
}

#[derive(Clone, Debug)]
enum ManifestObject {
    Node(Arc<InferenceNode>),
    Pool(Arc<NodePool>),
    Strategy(Arc<ShardingStrategy>),
    Tier(Arc<Tier>),
    Model(Arc<Model>),
    Copy(Arc<ModelCopy>),
    Group(Arc<ShardGroup>),
    Shard(Arc<Shard>),
    Approval(Arc<Approval>),
    Deployment(Arc<ModelDeployment>),
}

impl ManifestSet {
    /// An empty set; `namespace` is the default of objects without one.
    pub fn new(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            ids: BTreeMap::new(),
            objects: Vec::new(),
            from_server: false,
        }
    }

    /// Adds an object found at `place`. Kinds that no plan depends on are skipped, and so are deployments of
    /// the cluster: their groups represent them.
    pub fn add(
        &mut self,
        origin: ManifestOrigin,
        place: &str,
        mut object: Value,
    ) -> Result<(), ManifestError> {
        self.from_server |= origin == ManifestOrigin::Server;
        let nameless = |field| ManifestError::Unidentified { place: place.to_owned(), field };
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let version = text(&object["apiVersion"]).ok_or(nameless("apiVersion"))?;
        let kind = text(&object["kind"]).ok_or(nameless("kind"))?;
        let asked = kind == "ModelDeployment" && origin == ManifestOrigin::Spec;
        if version != format!("{GROUP}/{VERSION}")
            || !(asked || KINDS.iter().any(|(known, _)| *known == kind))
        {
            return Ok(());
        }
        let name = text(&object["metadata"]["name"]).ok_or(nameless("metadata.name"))?;
        let mut namespace = String::new();
        if !CLUSTER_SCOPED.contains(&kind.as_str()) {
            namespace = text(&object["metadata"]["namespace"]).unwrap_or_else(|| self.namespace.clone());
            object["metadata"]["namespace"] = Value::String(namespace.clone());
        }
        let id = (kind.clone(), namespace, name.clone());
        let before = self.ids.get(&id).copied();
        if let Some((before, _)) =
            before.and_then(|index| self.objects.get(index)).filter(|_| origin == ManifestOrigin::Spec)
        {
            carry_over(before, &mut object);
        }
        let read = parse_object(origin, &kind, &mut object).map_err(|wrong| match wrong {
            ReadError::Field(field) => ManifestError::UnknownField {
                place: place.to_owned(),
                kind,
                name,
                field: format!("spec.{field}"),
            },
            ReadError::Value(error) => {
                ManifestError::Invalid { place: place.to_owned(), kind, name, why: error.to_string() }
            }
        })?;
        match before.and_then(|index| self.objects.get_mut(index)) {
            Some(slot) => *slot = (object, read),
            None => {
                self.ids.insert(id, self.objects.len());
                self.objects.push((object, read));
            }
        }
        Ok(())
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterObjects {
        // If there is only a description without copies, the location of files is unknown.
        let copies = self.from_server.then(Vec::new);
        let mut cluster = ClusterObjects { copies, ..ClusterObjects::default() };
        for (_, object) in &self.objects {
            match object {
                ManifestObject::Node(node) => cluster.nodes.push(node.clone()),
                ManifestObject::Pool(pool) => cluster.pools.push(pool.clone()),
                ManifestObject::Strategy(strategy) => cluster.strategies.push(strategy.clone()),
                ManifestObject::Tier(tier) => cluster.tiers.push(tier.clone()),
                ManifestObject::Model(model) => cluster.models.push(model.clone()),
                ManifestObject::Copy(copy) => cluster.copies.get_or_insert_default().push(copy.clone()),
                ManifestObject::Group(group) => cluster.groups.push(group.clone()),
                ManifestObject::Shard(shard) => cluster.shards.push(shard.clone()),
                ManifestObject::Approval(approval) => cluster.approvals.push(approval.clone()),
                ManifestObject::Deployment(_) => {}
            }
        }
        cluster
    }

    /// The deployments to plan, in the order in which they were added.
    pub fn deployments(&self) -> Vec<Arc<ModelDeployment>> {
        let deployments = self.objects.iter().filter_map(|(_, object)| match object {
            ManifestObject::Deployment(deployment) => Some(deployment.clone()),
            _ => None,
        });
        deployments.collect()
    }
}

/// Applying a manifest replaces its own fields only: status, labels and server-managed metadata stay. The
/// shape does not if the source changes.
fn carry_over(before: &Value, after: &mut Value) {
    let same_source = before["spec"]["source"] == after["spec"]["source"];
    let (Some(old), Some(new)) = (before.as_object(), after.as_object_mut()) else { return };
    if let Some(status) = old.get("status").filter(|_| same_source)
        && new.get("status").is_none_or(Value::is_null)
    {
        new.insert("status".to_owned(), status.clone());
    }
    let Some(mut metadata) = old.get("metadata").and_then(Value::as_object).cloned() else { return };
    for (key, value) in new.get("metadata").and_then(Value::as_object).into_iter().flatten() {
        match (metadata.get_mut(key).and_then(Value::as_object_mut), value) {
            (Some(there), Value::Object(more)) => there.extend(more.clone()),
            _ => {
                metadata.insert(key.clone(), value.clone());
            }
        }
    }
    new.insert("metadata".to_owned(), Value::Object(metadata));
}

enum ReadError {
    Value(serde_json::Error),
    Field(String),
}

fn parse_object(origin: ManifestOrigin, kind: &str, value: &mut Value) -> Result<ManifestObject, ReadError> {
    Ok(match kind {
        "InferenceNode" if origin == ManifestOrigin::Server => ManifestObject::Node(read(origin, value)?),
        "InferenceNode" => ManifestObject::Node(parse_node(origin, value)?),
        "NodePool" => ManifestObject::Pool(read(origin, value)?),
        "ShardingStrategy" => ManifestObject::Strategy(read(origin, value)?),
        "Tier" => ManifestObject::Tier(read(origin, value)?),
        "Model" => ManifestObject::Model(read(origin, value)?),
        "ModelCopy" => ManifestObject::Copy(read(origin, value)?),
        "ShardGroup" => ManifestObject::Group(read(origin, value)?),
        "Shard" => ManifestObject::Shard(read(origin, value)?),
        "Approval" => ManifestObject::Approval(read(origin, value)?),
        _ => ManifestObject::Deployment(read(origin, value)?),
    })
}

fn read<K: DeserializeOwned + Serialize>(origin: ManifestOrigin, value: &Value) -> Result<Arc<K>, ReadError> {
    let object = K::deserialize(value).map_err(ReadError::Value)?;
    if origin == ManifestOrigin::Spec {
        // A cluster of a newer release may have unknown fields; a typing error in a manifest must not change
        // the plan.
        let understood = serde_json::to_value(&object).map_err(ReadError::Value)?;
        if let Some(field) = unknown_field(&value["spec"], &understood["spec"]) {
            return Err(ReadError::Field(field));
        }
    }
    Ok(Arc::new(object))
}

/// The first field of `given` that was not understood. Empty values are omitted when serialised again.
fn unknown_field(given: &Value, understood: &Value) -> Option<String> {
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    match (given, understood) {
        (Value::Object(given), Value::Object(understood)) => {
            given.iter().find_map(|(key, value)| match understood.get(key) {
                None => (!empty(value)).then(|| key.clone()),
                Some(inner) => unknown_field(value, inner).map(|field| format!("{key}.{field}")),
            })
        }
        (Value::Array(given), Value::Array(understood)) => {
            let pairs = given.iter().zip(understood).enumerate();
            pairs.into_iter().find_map(|(index, (given, understood))| {
                unknown_field(given, understood).map(|field| format!("{index}.{field}"))
            })
        }
        _ => None,
    }
}

/// A node of a description. One without conditions is hand-written: a node whose agent ever reported has
/// some. It has no reachability and was described in order to be planned on, so it takes work, and its engine
/// is of this release unless the description names another.
fn parse_node(origin: ManifestOrigin, value: &mut Value) -> Result<Arc<InferenceNode>, ReadError> {
    if let Some(fields) = value.as_object_mut() {
        fields.entry("spec").or_insert_with(|| Value::Object(Map::new()));
        let memory = fields.get_mut("status").and_then(|status| status.get_mut("memory"));
        if let Some(memory) = memory.and_then(Value::as_object_mut) {
            // Nothing runs there, and the texts are for display.
            for (field, absent) in
                [("grantedBytes", json!(0)), ("granted", json!("")), ("servingLimit", json!(""))]
            {
                memory.entry(field).or_insert(absent);
            }
        }
    }
    let mut node: Arc<InferenceNode> = read(origin, value)?;
    let status = Arc::make_mut(&mut node).status.get_or_insert_default();
    if status.conditions.is_empty() {
        for kind in [Type::Reachable, Type::Ready] {
            let why = "written by hand";
            conditions::set(
                &mut status.conditions,
                kind,
                true,
                Reason::Settled,
                why,
                None,
                Timestamp::UNIX_EPOCH,
            );
        }
        if status.sharding_modes.is_empty() {
            status.sharding_modes = SUPPORTED_MODES.map(str::to_owned).to_vec();
        }
        if status.engine_options.is_empty() {
            status.engine_options = ENGINE_OPTIONS.iter().map(|option| (*option).to_owned()).collect();
        }
    }
    Ok(node)
}

#[cfg(test)]
mod tests {
    use kube::{CustomResourceExt as _, ResourceExt as _};

    use super::*;
    use crate::cluster::availability;
    use crate::snapshot::Availability;

    fn object(kind: &str, name: &str, rest: Value) -> Value {
        let mut object =
            json!({"apiVersion": "russet.dev/v1alpha1", "kind": kind, "metadata": {"name": name}});
        for (key, value) in rest.as_object().unwrap() {
            object[key] = value.clone();
        }
        object
    }

    fn described(objects: Vec<(ManifestOrigin, Value)>) -> ManifestSet {
        let mut described = ManifestSet::new("default");
        for (origin, object) in objects {
            described.add(origin, "there", object).unwrap();
        }
        described
    }

    #[test]
    fn the_kinds_are_those_of_the_api() {
        for (kind, plural) in KINDS {
            let crd = russet_crds::all().into_iter().find(|crd| crd.spec.names.kind == kind).unwrap();
            assert_eq!((crd.spec.names.plural.as_str(), crd.spec.group.as_str()), (plural, GROUP));
            assert_eq!(crd.spec.scope == "Cluster", CLUSTER_SCOPED.contains(&kind), "{kind}");
        }
        assert_eq!(ModelDeployment::crd().spec.names.kind, "ModelDeployment");
    }

    #[test]
    fn handwritten_node_without_conditions_is_open() {
        let memory = json!({"totalBytes": 64, "servingLimitBytes": 48});
        let bare = json!({"status": {"chip": "Apple M3 Ultra", "memory": memory}});
        let full = json!({"totalBytes": 64, "servingLimitBytes": 48, "grantedBytes": 0, "granted": "0", "servingLimit": "48"});
        let silent = |reachable: &str| {
            let at = "2026-11-01T00:00:00Z";
            let one = json!({"type": "Reachable", "status": reachable, "reason": "LeaseExpired", "message": "", "lastTransitionTime": at});
            json!({"spec": {}, "status": {"memory": full, "conditions": [one]}})
        };
        let closed = json!({"spec": {"scheduling": "Cordoned"}, "status": bare["status"]});
        for (story, origin, node, expected) in [
            ("by hand", ManifestOrigin::Cluster, bare.clone(), Availability::Open),
            ("by hand, to be applied", ManifestOrigin::Spec, bare, Availability::Open),
            ("by hand, and closed", ManifestOrigin::Cluster, closed, Availability::Cordoned),
            ("fresh on a server", ManifestOrigin::Server, json!({"spec": {}}), Availability::Unreachable),
            (
                "silent when it was printed",
                ManifestOrigin::Cluster,
                silent("False"),
                Availability::Unreachable,
            ),
            (
                "reached, its memory not known",
                ManifestOrigin::Cluster,
                silent("True"),
                Availability::Unmeasured,
            ),
        ] {
            let cluster = described(vec![(origin, object("InferenceNode", "a", node))]).cluster();
            // The time of a description is unknown, so no node in it is unreachable for long.
            assert_eq!(availability(&cluster.nodes[0], Timestamp::MIN), expected, "{story}");
            let cuts = cluster.snapshot(Timestamp::MIN).nodes["a"].supports_tensor;
            assert_eq!(cuts, expected == Availability::Open || story.ends_with("closed"), "{story}");
        }
    }

    #[test]
    fn applied_manifest_replaces_the_spec_and_keeps_the_status() {
        let shape = json!({"status": {"copies": 3}, "spec": {"source": {"uri": "hf://a/b"}}});
        let same = json!({"spec": {"source": {"uri": "hf://a/b"}}});
        let other = json!({"spec": {"source": {"uri": "hf://a/c"}}});
        for (story, applied, copies) in [("the same files", same, Some(3)), ("other files", other, None)] {
            let there = (ManifestOrigin::Cluster, object("Model", "m", shape.clone()));
            let cluster =
                described(vec![there, (ManifestOrigin::Spec, object("Model", "m", applied))]).cluster();
            let status = cluster.models[0].status.as_ref();
            assert_eq!((cluster.models.len(), status.map(|status| status.copies)), (1, copies), "{story}");
        }

        let mut node = object("InferenceNode", "a", json!({"status": {"cores": 8}}));
        node["metadata"]["labels"] = json!({"russet.dev/memory": "512Gi"});
        let mut cordon = object("InferenceNode", "a", json!({"spec": {"scheduling": "Cordoned"}}));
        cordon["metadata"]["labels"] = json!({"rack": "b"});
        let cluster =
            described(vec![(ManifestOrigin::Cluster, node), (ManifestOrigin::Spec, cordon)]).cluster();
        let node = &cluster.nodes[0];
        assert_eq!(node.labels().len(), 2);
        assert_eq!(node.status.as_ref().unwrap().cores, Some(8));
        assert_eq!(availability(node, Timestamp::MIN), Availability::Cordoned);
    }

    #[test]
    fn deployments_keep_spec_order_and_the_last_of_a_name_wins() {
        let deployment = |name, replicas| {
            object(
                "ModelDeployment",
                name,
                json!({"spec": {"modelRef": {"name": "m"}, "replicas": replicas}}),
            )
        };
        let mut lab = deployment("b", 9);
        lab["metadata"]["namespace"] = json!("lab");
        let described = described(vec![
            (ManifestOrigin::Cluster, deployment("a", 1)),
            (ManifestOrigin::Spec, deployment("c", 2)),
            (ManifestOrigin::Spec, deployment("b", 3)),
            (ManifestOrigin::Spec, object("ModelRoute", "r", json!({"spec": 7}))),
            (ManifestOrigin::Spec, lab),
            (ManifestOrigin::Spec, deployment("c", 4)),
        ]);
        let found = described.deployments();
        let found: Vec<_> =
            found.iter().map(|it| (it.namespace().unwrap(), it.name_any(), it.spec.replicas)).collect();
        let expected = [("default", "c", 4), ("default", "b", 3), ("lab", "b", 9)];
        assert_eq!(
            found,
            expected.map(|(namespace, name, count)| (namespace.to_owned(), name.to_owned(), count))
        );
    }

    #[test]
    fn unreadable_manifest_is_named_with_its_error() {
        let spec = |spec: Value| object("ModelDeployment", "chat", json!({"spec": spec}));
        for (origin, object, expected) in [
            (ManifestOrigin::Spec, json!({"kind": "Model"}), "there: an object without apiVersion"),
            (ManifestOrigin::Spec, json!("text"), "there: an object without apiVersion"),
            (
                ManifestOrigin::Cluster,
                json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Model", "metadata": []}),
                "an object without metadata.name",
            ),
            (ManifestOrigin::Spec, spec(json!({})), "there: ModelDeployment chat: missing field `modelRef`"),
            (
                ManifestOrigin::Spec,
                spec(json!({"modelRef": {"name": "m"}, "sharding": {"kv": {"contextToken": 9}}})),
                "ModelDeployment chat: spec.sharding.kv.contextToken is no field of ModelDeployment",
            ),
            (
                ManifestOrigin::Cluster,
                object("InferenceNode", "a", json!({"status": {"memory": {"totalBytes": 1}}})),
                "InferenceNode a: missing field `servingLimitBytes`",
            ),
            (
                ManifestOrigin::Cluster,
                object("InferenceNode", "a", json!({"status": "good"})),
                "InferenceNode a: invalid type",
            ),
        ] {
            let error = ManifestSet::new("default").add(origin, "there", object).unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} lacks {expected:?}");
        }
        // Newer releases have more fields, and an empty one means nothing.
        let newer = json!({"spec": {"modelRef": {"name": "m"}, "poolRefs": [], "strategyRef": null}});
        described(vec![(ManifestOrigin::Spec, object("ModelDeployment", "chat", newer))]);
        described(vec![(
            ManifestOrigin::Cluster,
            object("NodePool", "p", json!({"spec": {"selector": {}, "tint": 1}})),
        )]);
    }
}
