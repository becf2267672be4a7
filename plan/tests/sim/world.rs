//! The world of a story: the server's objects and the machines behind them, all of which outlives the
//! operator. The planner's view is built from it as the operator builds it from its caches. Not here: what
//! agents do (`agent`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{
    Approval, ApprovalDecision, ApprovalSpec, GroupMember, InferenceNode, InferenceNodeStatus,
    LocalReference, Model, ModelDeployment, ModelDeploymentSpec, ModelSource, ModelSpec, ModelStatus,
    NodePool, NodePoolSpec, PlacementReport, Scheduling, ShardGroup, ShardGroupSpec, Sharding,
    ShardingStrategy, ShardingStrategySpec, Tier, TierSpec, TierStatus, WorkloadGroup,
};
use russet_model::shape::ModelShape;
use russet_plan::cluster::{ClusterObjects, availability};
use russet_plan::placement::{ApprovalRequest, NewGroup};
use russet_plan::snapshot::{Availability, Snapshot};
use russet_plan::tier::{assign, members};

use super::cable::{SimCable, links};
use super::machine::SimMachine;
use super::words::LineError;

/// Annotation of a group: the UID of its deployment, instead of an owner reference.
pub const OWNER: &str = "owner";
/// The only namespace of a script.
pub const SPACE: &str = "default";

/// The cluster, its machines, and what the operator last wrote about deployments.
#[derive(Clone, Debug)]
pub struct World {
    /// Objects on the server.
    pub cluster: ClusterObjects,
    /// Deployments, by name.
    pub deployments: BTreeMap<String, ModelDeployment>,
    /// The operator's last messages about each.
    pub said: BTreeMap<String, ShownStatus>,
    /// Machines, by name.
    pub machines: BTreeMap<String, SimMachine>,
    /// Cables between them.
    pub cables: Vec<SimCable>,
    /// Nodes whose agents release nothing.
    pub refusing: BTreeSet<String>,
    /// Deployments whose groups never become ready, each with the exempted groups.
    pub failing: BTreeMap<String, BTreeSet<String>>,
    /// Files that the operator requested in advance: models and nodes.
    pub fetching: BTreeSet<(String, String)>,
    /// Memory of engines, by node: groups' UIDs and ranks, with the rank.
    pub engine_ranks: BTreeMap<String, BTreeMap<(String, u32), GroupMember>>,
    /// The deployment's spec when a group was created, by the group's UID.
    pub asked: BTreeMap<String, GroupInputs>,
    /// The time.
    pub now: Timestamp,
    /// Short names of groups, by their name.
    pub labels: BTreeMap<String, String>,
    count: u64,
}

/// A deployment's status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShownStatus {
    /// Why it is invalid.
    pub refused: Option<String>,
    /// Notes of the last reconciliation, one per line.
    pub notes: String,
    /// Pending replicas.
    pub waiting: Vec<i32>,
    /// The last decision.
    pub report: Option<PlacementReport>,
    /// Why no replica should run now.
    pub rests: Option<String>,
    /// Requested approvals.
    pub asks: Vec<ApprovalRequest>,
}

/// Inputs of a group: its deployment's Model, pools and split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupInputs {
    model: String,
    pools: Vec<String>,
    sharding: Option<Sharding>,
}

impl Default for World {
    fn default() -> Self {
        Self {
            cluster: ClusterObjects::default(),
            deployments: BTreeMap::new(),
            said: BTreeMap::new(),
            machines: BTreeMap::new(),
            cables: Vec::new(),
            refusing: BTreeSet::new(),
            failing: BTreeMap::new(),
            fetching: BTreeSet::new(),
            engine_ranks: BTreeMap::new(),
            asked: BTreeMap::new(),
            // Any time works that leaves room to set the clock back.
            now: Timestamp::from_second(1_800_000_000).unwrap_or(Timestamp::UNIX_EPOCH),
            labels: BTreeMap::new(),
            count: 0,
        }
    }
}

impl World {
    /// The view that the operator would take.
    pub fn view(&self) -> Snapshot {
        self.cluster.snapshot(self.now)
    }

    fn uid(&mut self) -> String {
        self.count += 1;
        format!("uid-{}", self.count)
    }

    /// Adds a machine.
    pub fn add(&mut self, machine: SimMachine) -> Result<(), LineError> {
        let name = machine.name.clone();
        if self.machines.contains_key(&name) {
            return Err(format!("node {name} is there already"));
        }
        if machine.disk.is_some() {
            self.cluster.copies.get_or_insert_default();
        }
        self.cluster.nodes.push(Arc::new(machine.object(self.now)));
        self.machines.insert(name, machine);
        self.relink();
        Ok(())
    }

    /// Removes a machine's object from the server for good.
    pub fn remove_machine(&mut self, name: &str) -> Result<(), LineError> {
        self.node(name)?;
        self.cluster.nodes.retain(|node| node.metadata.name.as_deref() != Some(name));
        self.machines.remove(name);
        Ok(())
    }

    /// Changes a node's object.
    pub fn node(&mut self, name: &str) -> Result<&mut InferenceNode, LineError> {
        let node = self.cluster.nodes.iter_mut().find(|node| node.metadata.name.as_deref() == Some(name));
        node.map(Arc::make_mut).ok_or(format!("there is no node {name}"))
    }

    /// Changes a node's status.
    pub fn status(&mut self, name: &str) -> Result<&mut InferenceNodeStatus, LineError> {
        Ok(self.node(name)?.status.get_or_insert_default())
    }

    /// A node as the planner sees it.
    pub fn availability(&self, name: &str) -> Option<Availability> {
        let node = self.cluster.nodes.iter().find(|node| node.metadata.name.as_deref() == Some(name))?;
        Some(availability(node, self.now))
    }

    /// Whether a node's agent is reachable.
    pub fn is_reachable(&self, name: &str) -> bool {
        let heard = |seen| !matches!(seen, Availability::Unreachable | Availability::Lost);
        self.availability(name).is_some_and(heard)
    }

    /// Sets whether a node is open, cordoned or draining.
    pub fn schedule(&mut self, name: &str, scheduling: Scheduling) -> Result<(), LineError> {
        self.node(name)?.spec.scheduling = scheduling;
        Ok(())
    }

    /// Sets whether an agent's Lease is renewed.
    pub fn reach(&mut self, name: &str, reached: bool) -> Result<(), LineError> {
        let now = self.now;
        let reason = if reached { Reason::LeaseRenewed } else { Reason::LeaseExpired };
        let conditions = &mut self.status(name)?.conditions;
        conditions::set(conditions, Type::Reachable, reached, reason, "", None, now);
        self.relink();
        Ok(())
    }

    /// Updates the reported links of every reachable agent.
    pub fn relink(&mut self) {
        for (name, machine) in self.machines.clone() {
            let links = links(&self.cables, &name, machine.rdma);
            if self.is_reachable(&name)
                && let Ok(status) = self.status(&name)
            {
                status.links = links;
            }
        }
    }

    /// Adds or replaces a pool.
    pub fn pool(&mut self, name: &str, spec: NodePoolSpec) {
        self.cluster.pools.retain(|pool| pool.metadata.name.as_deref() != Some(name));
        self.cluster.pools.push(Arc::new(NodePool::new(name, spec)));
    }

    /// Adds or replaces a strategy.
    pub fn strategy(&mut self, name: &str, sharding: Sharding) {
        self.cluster.strategies.retain(|strategy| strategy.metadata.name.as_deref() != Some(name));
        let spec = ShardingStrategySpec { sharding };
        self.cluster.strategies.push(Arc::new(ShardingStrategy::new(name, spec)));
    }

    /// Adds or replaces a tier; its workload groups keep their nodes.
    pub fn tier(&mut self, name: &str, spec: TierSpec) {
        let before = self.cluster.tiers.iter().position(|tier| tier.metadata.name.as_deref() == Some(name));
        let mut tier = Tier::new(name, spec);
        tier.status = before.and_then(|at| self.cluster.tiers.remove(at).status.clone());
        self.cluster.tiers.push(Arc::new(tier));
    }

    /// Assigns nodes to the workload groups of Dedicated tiers, as the operator's tier controller does.
    pub fn assign(&mut self) {
        for at in 0..self.cluster.tiers.len() {
            let name = self.cluster.tiers[at].metadata.name.clone().unwrap_or_default();
            let members = members(&name, self.deployments.values());
            let Ok(grants) = assign(&self.view(), &name, &members) else { continue };
            let groups = grants.into_iter().map(|(name, grant)| WorkloadGroup {
                name,
                nodes: grant.nodes.into_iter().collect(),
                ..WorkloadGroup::default()
            });
            let status = TierStatus { workload_groups: groups.collect(), ..TierStatus::default() };
            Arc::make_mut(&mut self.cluster.tiers[at]).status = Some(status);
        }
    }

    /// Sets the tier of a deployment's groups, as the operator does.
    pub fn retier(&mut self, name: &str) {
        let tier = self.deployments.get(name).and_then(|deployment| deployment.spec.tier_ref.clone());
        for group in &mut self.cluster.groups {
            if group.spec.deployment_ref.name == name && group.spec.tier_ref != tier {
                Arc::make_mut(group).spec.tier_ref = tier.clone();
            }
        }
    }

    /// Decides a deployment's last approval request.
    pub fn answer(&mut self, name: &str, decision: ApprovalDecision) -> Result<(), LineError> {
        let asks = self.said.get(name).map(|said| said.asks.clone()).unwrap_or_default();
        let ask = asks.first().ok_or(format!("deployment {name} asks nothing"))?;
        let spec = ApprovalSpec {
            deployment_ref: Some(LocalReference::new(name)),
            action: ask.action,
            plan_hash: ask.hash.clone(),
            decision: Some(decision),
            ..ApprovalSpec::default()
        };
        let mut approval = Approval::new(&ask.hash, spec);
        approval.metadata.namespace = Some(SPACE.to_owned());
        self.cluster.approvals.push(Arc::new(approval));
        Ok(())
    }

    /// Sends requests to a deployment; `waiting` of them are held.
    pub fn request(&mut self, name: &str, waiting: u32) -> Result<(), LineError> {
        let demand = serde_json::json!({
            "gateway": "gateway", "reportedAt": self.now, "lastRequestTime": self.now, "waiting": waiting, "active": 0,
        });
        let deployment = self.deployments.get_mut(name).ok_or(format!("there is no deployment {name}"))?;
        let demand = serde_json::from_value(demand).map_err(|wrong| wrong.to_string())?;
        deployment.status.get_or_insert_default().demand = vec![demand];
        Ok(())
    }

    /// Replicas that should run now: none of an idle tier.
    pub fn desired(&self, name: &str) -> i32 {
        let Some(deployment) = self.deployments.get(name) else { return 0 };
        let rests = self.said.get(name).is_some_and(|said| said.rests.is_some());
        if rests { 0 } else { deployment.spec.replicas }
    }

    /// Adds or replaces a model; without a shape its headers are unread.
    pub fn model(&mut self, name: &str, shape: Option<ModelShape>) {
        self.cluster.models.retain(|model| model.metadata.name.as_deref() != Some(name));
        let source = ModelSource { uri: format!("hf://{SPACE}/{name}"), ..ModelSource::default() };
        let mut model = Model::new(name, ModelSpec { source, ..ModelSpec::default() });
        model.metadata.namespace = Some(SPACE.to_owned());
        model.status = Some(ModelStatus { shape, ..ModelStatus::default() });
        self.cluster.models.push(Arc::new(model));
    }

    /// Writes a deployment's spec.
    pub fn apply_spec(&mut self, name: &str, spec: ModelDeploymentSpec) {
        let uid = self.uid();
        let deployment = self.deployments.entry(name.to_owned()).or_insert_with(|| {
            let mut deployment = ModelDeployment::new(name, ModelDeploymentSpec::default());
            deployment.metadata.namespace = Some(SPACE.to_owned());
            deployment.metadata.uid = Some(uid);
            deployment
        });
        deployment.spec = spec;
    }

    /// A deployment's spec.
    pub fn spec(&self, name: &str) -> Result<ModelDeploymentSpec, LineError> {
        let deployment = self.deployments.get(name).ok_or(format!("there is no deployment {name}"))?;
        Ok(deployment.spec.clone())
    }

    /// Deletes a deployment; its objects are garbage-collected.
    pub fn remove_deployment(&mut self, name: &str) -> Result<(), LineError> {
        self.deployments.remove(name).ok_or(format!("there is no deployment {name}"))?;
        self.said.remove(name);
        Ok(())
    }

    /// The current inputs of a deployment's groups.
    pub fn group_inputs(&self, deployment: &str) -> Option<GroupInputs> {
        let spec = &self.deployments.get(deployment)?.spec;
        let strategy = |name: &str| {
            let strategies = self.cluster.strategies.iter();
            let found = strategies.clone().find(|strategy| strategy.metadata.name.as_deref() == Some(name));
            found.map(|strategy| strategy.spec.sharding.clone())
        };
        let sharding = match (&spec.strategy_ref, &spec.sharding) {
            (Some(reference), _) => strategy(&reference.name),
            (None, own) => Some(own.clone().unwrap_or_default()),
        };
        let pools = spec.pool_refs.iter().map(|pool| pool.name.clone()).collect();
        Some(GroupInputs { model: spec.model_ref.name.clone(), pools, sharding })
    }

    /// Gives a group its short name.
    pub fn name_group(&mut self, deployment: &str, new: &NewGroup) {
        let of = format!("{deployment}-{}#", new.replica);
        let number = self.labels.values().filter(|label| label.starts_with(&of)).count() + 1;
        self.labels.entry(new.name.clone()).or_insert(format!("{of}{number}"));
    }

    /// Creates a group as the operator does, `owner` being the deployment as it saw it.
    pub fn create(&mut self, owner: &ModelDeployment, pools: &[String], new: &NewGroup) {
        let taken = |group: &Arc<ShardGroup>| group.metadata.name.as_deref() == Some(&new.name);
        if self.cluster.groups.iter().any(taken) {
            return;
        }
        let deployment = owner.metadata.name.clone().unwrap_or_default();
        let spec = ShardGroupSpec {
            deployment_ref: LocalReference::new(&deployment),
            model_ref: owner.spec.model_ref.clone(),
            replica: new.replica,
            plan: new.plan.clone(),
            pool_refs: pools.iter().cloned().map(LocalReference::new).collect(),
            tier_ref: owner.spec.tier_ref.clone(),
            epoch: 1,
        };
        let mut group = ShardGroup::new(&new.name, spec);
        group.metadata.namespace = Some(SPACE.to_owned());
        let uid = self.uid();
        group.metadata.uid = Some(uid.clone());
        group.metadata.creation_timestamp = self.time();
        group.metadata.annotations = owner.metadata.uid.clone().map(|uid| [(OWNER.to_owned(), uid)].into());
        if let Some(asked) = self.group_inputs(&deployment) {
            self.asked.insert(uid, asked);
        }
        self.name_group(&deployment, new);
        self.cluster.groups.push(Arc::new(group));
    }

    /// Marks a group as being deleted.
    pub fn delete(&mut self, uid: &str) {
        let now = self.time();
        let group = self.cluster.groups.iter_mut().find(|group| group.metadata.uid.as_deref() == Some(uid));
        if let Some(group) = group.map(Arc::make_mut) {
            group.metadata.deletion_timestamp = now;
        }
    }

    /// The time in the type of objects, which this crate cannot name.
    fn time<T: serde::de::DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_value(serde_json::Value::String(self.now.to_string())).ok()
    }

    /// The groups that are not being deleted, in the order of deployment and replica.
    pub fn living(&self) -> Vec<&ShardGroup> {
        let mut groups: Vec<&ShardGroup> = self.cluster.groups.iter().map(AsRef::as_ref).collect();
        groups.retain(|group| group.metadata.deletion_timestamp.is_none());
        groups.sort_by_key(|group| (&group.spec.deployment_ref.name, group.spec.replica));
        groups
    }

    /// A text with the short names of groups.
    pub fn short(&self, text: &str) -> String {
        let names = self.labels.iter().filter(|(name, _)| text.contains(name.as_str()));
        names.fold(text.to_owned(), |text, (name, label)| text.replace(name.as_str(), label))
    }

    /// The short name of a group.
    pub fn label(&self, group: &ShardGroup) -> String {
        self.short(group.metadata.name.as_deref().unwrap_or_default())
    }
}

/// Whether a group is ready.
pub fn answers(group: &ShardGroup) -> bool {
    group.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
}
