//! Collector of gauges from the caches, computed at each scrape.

use jiff::Timestamp;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot};
use super::{approvals, copies, deployments, groups, nodes, tiers};
use crate::leader_caches::LeaderCaches;

const LEADER: GaugeFamily<0> = GaugeFamily {
    name: "russet_operator_leader",
    help: "1 while this operator acts, 0 while it stands by or waits for its caches.",
    labels: [],
};

/// The collector.
pub struct ClusterCollector {
    caches: LeaderCaches,
    descs: Vec<Desc>,
}

impl ClusterCollector {
    /// A collector over these caches.
    pub fn new(leader_caches: LeaderCaches) -> Result<Self, prometheus::Error> {
        let mut descs = vec![LEADER.desc()?];
        for more in [
            deployments::descs()?,
            groups::descs()?,
            nodes::descs()?,
            tiers::descs()?,
            copies::descs()?,
            approvals::descs()?,
        ] {
            descs.extend(more);
        }
        Ok(Self { caches: leader_caches, descs })
    }
}

impl Collector for ClusterCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut snapshot = GaugeSnapshot::default();
        let stores = self.caches.stores();
        snapshot.set(&LEADER, [], f64::from(u8::from(stores.is_some())));
        if let Some(stores) = stores {
            let now = Timestamp::now();
            deployments::write(&mut snapshot, &stores.deployments.state());
            groups::write(&mut snapshot, &stores.groups.state());
            nodes::write(&mut snapshot, &stores, now);
            tiers::write(&mut snapshot, &stores.pools.state(), &stores.tiers.state());
            copies::write(&mut snapshot, &stores.copies.state());
            approvals::write(&mut snapshot, &stores.approvals.state(), now);
        }
        snapshot.families()
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{Registry, TextEncoder};
    use russet_crds::conditions::{Reason, Type, set};
    use russet_crds::{
        Approval, ApprovalDecision, ApprovalSpec, CopyMode, GroupMember, GroupPlan, InferenceNode,
        InferenceNodeStatus, Link, LocalReference, ModelCopy, ModelCopySpec, ModelDeployment,
        ModelDeploymentSpec, NodeMemory, NodePool, NodePoolStatus, PlacementReport, PredictedThroughput,
        ShardGroup, ShardGroupSpec, Tier, TierMode, TierSpec, TierStatus, WorkloadGroup,
    };

    use super::*;
    use crate::metrics::tests::filled;

    #[test]
    fn every_object_is_in_the_numbers_and_every_family_in_the_docs() {
        let stores = filled(|objects| {
            let now = Timestamp::UNIX_EPOCH;
            let mut node = InferenceNode::new("a", Default::default());
            let memory =
                NodeMemory { serving_limit_bytes: 1000, granted_bytes: 300, ..NodeMemory::default() };
            let link = Link {
                peer: "b".to_owned(),
                interface: "en3".to_owned(),
                bits_per_second: Some(80_000_000_000),
                ..Link::default()
            };
            let mut status =
                InferenceNodeStatus { memory: Some(memory), links: vec![link], ..Default::default() };
            let reason = Reason::PortInBridge;
            set(&mut status.conditions, Type::FabricHealthy, false, reason, "", None, now);
            objects.nodes = vec![InferenceNode { status: Some(status), ..node.clone() }, {
                node.metadata.name = Some("new".to_owned());
                node
            }];

            let spec = ModelDeploymentSpec {
                model_ref: LocalReference::new("m"),
                tier_ref: Some(LocalReference::new("daily")),
                workload_group: Some("chat".to_owned()),
                replicas: 2,
                ..ModelDeploymentSpec::default()
            };
            let mut chat = ModelDeployment::new("chat", spec);
            chat.metadata.namespace = Some("team".to_owned());
            let status = chat.status.get_or_insert_default();
            status.ready_replicas = 1;
            let why = Reason::NothingFits;
            set(&mut status.conditions, Type::Placed, false, why, "", None, now);
            set(&mut status.conditions, Type::Ready, false, why, "", None, now);
            let predicted = PredictedThroughput {
                tokens_per_second: "41.5".to_owned(),
                total_tokens_per_second: "120".to_owned(),
                ttft_milliseconds: 1500,
                kv_tokens: 1,
            };
            status.placement = Some(PlacementReport { predicted: Some(predicted), ..Default::default() });
            objects.deployments = vec![chat];

            let member =
                GroupMember { node_name: "a".to_owned(), weight_bytes: 250, ..GroupMember::default() };
            let plan = GroupPlan { members: vec![member], ..GroupPlan::default() };
            let deployment_ref = LocalReference::new("chat");
            let spec = ShardGroupSpec { deployment_ref, plan, epoch: 3, ..ShardGroupSpec::default() };
            let mut group = ShardGroup::new("chat-0", spec);
            group.metadata.namespace = Some("team".to_owned());
            group.metadata.uid = Some("u".to_owned());
            objects.groups = vec![group];

            let mut tier = Tier::new(
                "daily",
                TierSpec { mode: TierMode::Dedicated, priority: 7, ..TierSpec::default() },
            );
            let own =
                WorkloadGroup { name: "chat".to_owned(), nodes: vec!["a".to_owned()], ..Default::default() };
            tier.status =
                Some(TierStatus { workload_groups: vec![own], deployments: 1, ..TierStatus::default() });
            objects.tiers = vec![tier];
            let mut pool = NodePool::new("far", Default::default());
            pool.status = Some(NodePoolStatus { nodes: 4, ready_nodes: 3, ..NodePoolStatus::default() });
            objects.pools = vec![pool];

            objects.approvals = [None, None, Some(ApprovalDecision::Denied)]
                .iter()
                .enumerate()
                .map(|(number, decision)| {
                    let spec = ApprovalSpec { decision: *decision, ..ApprovalSpec::default() };
                    let mut approval = Approval::new(&format!("q{number}"), spec);
                    approval.metadata.namespace = Some("team".to_owned());
                    approval
                })
                .collect();

            objects.copies = ["m", "headers"]
                .map(|model| {
                    let mut spec = ModelCopySpec { node_name: "a".to_owned(), ..ModelCopySpec::default() };
                    spec.model_ref.namespace = "team".to_owned();
                    spec.model_ref.name = model.to_owned();
                    spec.want = if model == "m" { CopyMode::Files } else { CopyMode::Headers };
                    let mut copy = ModelCopy::new(model, spec);
                    copy.status.get_or_insert_default().bytes_done = 5;
                    copy
                })
                .to_vec();
        });
        let leader_caches = LeaderCaches::default();
        let _shown = leader_caches.publish(&stores);
        let registry = Registry::new();
        let state = ClusterCollector::new(leader_caches).unwrap();
        let page = include_str!("../../../docs/metrics.md");
        for desc in state.desc() {
            let row = format!(
                "| `{}` | gauge | {} | {} |",
                desc.fq_name,
                desc.variable_labels.join(", "),
                desc.help
            );
            assert!(page.contains(&row), "docs/metrics.md lacks\n{row}");
        }
        registry.register(Box::new(state)).unwrap();
        let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            "russet_operator_leader 1",
            "russet_modeldeployment_info{deployment=\"chat\",model=\"m\",namespace=\"team\",tier=\"daily\",workload_group=\"chat\"} 1",
            "russet_modeldeployment_ready{deployment=\"chat\",namespace=\"team\",reason=\"NothingFits\",tier=\"daily\"} 0",
            "russet_modeldeployment_placed{deployment=\"chat\",namespace=\"team\",reason=\"NothingFits\",tier=\"daily\"} 0",
            "russet_modeldeployment_replicas_wanted{deployment=\"chat\",namespace=\"team\",tier=\"daily\"} 2",
            "russet_modeldeployment_replicas_ready{deployment=\"chat\",namespace=\"team\",tier=\"daily\"} 1",
            "russet_modeldeployment_predicted_tokens_per_second{deployment=\"chat\",namespace=\"team\",tier=\"daily\"} 41.5",
            "russet_modeldeployment_predicted_total_tokens_per_second{deployment=\"chat\",namespace=\"team\",tier=\"daily\"} 120",
            "russet_modeldeployment_predicted_ttft_seconds{deployment=\"chat\",namespace=\"team\",tier=\"daily\"} 1.5",
            "russet_shardgroups{state=\"forming\"} 1",
            "russet_shardgroups{state=\"ready\"} 0",
            "russet_shardgroup_epoch{deployment=\"chat\",group=\"chat-0\",namespace=\"team\"} 3",
            "russet_inferencenode_availability{node=\"a\",state=\"unreachable\"} 1",
            "russet_inferencenode_availability{node=\"a\",state=\"open\"} 0",
            "russet_inferencenode_fabric_healthy{node=\"a\",reason=\"PortInBridge\"} 0",
            "russet_inferencenode_link_bits_per_second{interface=\"en3\",node=\"a\",peer=\"b\",rdma=\"no\"} 80000000000",
            "russet_inferencenode_memory_limit_bytes{node=\"a\"} 1000",
            // 250 reserved, and 300 granted without a claimed Shard.
            "russet_inferencenode_memory_committed_bytes{node=\"a\"} 550",
            "russet_inferencenode_memory_committed_bytes{node=\"new\"} 0",
            "russet_approvals{state=\"waiting\"} 2",
            "russet_approvals{state=\"denied\"} 1",
            "russet_approvals{state=\"expired\"} 0",
            "russet_nodepool_nodes_ready{pool=\"far\"} 3",
            "russet_tier_info{mode=\"Dedicated\",tier=\"daily\"} 1",
            "russet_tier_priority{tier=\"daily\"} 7",
            "russet_tier_nodes{tier=\"daily\",workload_group=\"chat\"} 1",
            "russet_modelcopy_done_bytes{model=\"m\",namespace=\"team\",node=\"a\"} 5",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is missing in\n{text}");
        }
        for absent in ["headers", "memory_limit_bytes{node=\"new\"}", "russet_modelcopy_wanted_bytes"] {
            assert!(!text.contains(absent), "{absent} is in\n{text}");
        }
    }
}
