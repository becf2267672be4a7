//! Names of derived objects, labels and finalizers: every name that one process writes and another looks up.

use kube::core::ObjectMeta;

/// Namespace of Russet's own objects: Leases, the CA.
pub const SYSTEM_NAMESPACE: &str = "russet-system";
/// Secret in [`SYSTEM_NAMESPACE`] that holds the data-plane CA (`tls.crt`, `tls.key`).
pub const CA_SECRET: &str = "russet-ca";
/// Role in a Model's namespace that lists the Secrets with credentials of model sources. A user who may read
/// those Secrets creates it. The operator binds it to a node while that node fetches, and never reads the
/// Secrets.
pub const SOURCES_ROLE: &str = "russet-sources";
/// Role in a namespace that lists the Secrets with keys of its ModelProviders, and the RoleBinding that lets gateways read
/// those. A user who may read the Secrets creates both.
pub const PROVIDERS_ROLE: &str = "russet-providers";
/// ServiceAccount of gateways that the chart installs, in [`SYSTEM_NAMESPACE`].
pub const GATEWAY_SERVICE_ACCOUNT: &str = "russet-gateway";
/// Label on AccessKeys and Namespaces, and of the header `x-russet-labels`: the [`crate::Zone`] in which requests stay.
pub const LABEL_REQUEST_ZONE: &str = "russet.dev/zone";
/// Signer of node and component certificates.
pub const NODE_SIGNER: &str = "russet.dev/node";
/// Category that lists every kind: `kubectl get russet`.
pub const CATEGORY: &str = "russet";

/// Label on objects that belong to a ModelDeployment; its name.
pub const LABEL_DEPLOYMENT: &str = "russet.dev/deployment";
/// Label on Shards; the ShardGroup's name.
pub const LABEL_GROUP: &str = "russet.dev/group";
/// Label on ModelCopies; the Model's namespace.
pub const LABEL_MODEL_NAMESPACE: &str = "russet.dev/model-namespace";
/// Label on ModelCopies; the Model's name (cut to 63 characters).
pub const LABEL_MODEL: &str = "russet.dev/model";
/// Label on Shards and ModelCopies; the node's name (cut to 63 characters).
pub const LABEL_NODE: &str = "russet.dev/node";
/// Label of an InferenceNode with its name, so that a pool can select it. Kubernetes' own.
pub const LABEL_HOSTNAME: &str = "kubernetes.io/hostname";
/// Label derived from an InferenceNode's chip.
pub const LABEL_CHIP: &str = "russet.dev/chip";
/// Label derived from an InferenceNode's memory, such as `512Gi`.
pub const LABEL_MEMORY: &str = "russet.dev/memory";
/// Label that owners set on InferenceNodes: the failure domain, unless a deployment names another label.
/// Kubernetes' own.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";

/// Label on Models, ModelDeployments, ModelRoutes and PipelineRuns that a gateway created for a client: [`MANAGED_BY_GATEWAY`].
/// A gateway deletes only objects that have it; an admission policy holds it to that.
pub const LABEL_MANAGED_BY: &str = "russet.dev/managed-by";
/// The value of [`LABEL_MANAGED_BY`] on what a gateway created.
pub const MANAGED_BY_GATEWAY: &str = "gateway";
/// Label on PipelineRuns that a gateway created for a request: the gateway, as `status.runner` names it. In its first minute no
/// other one begins the run.
pub const LABEL_GATEWAY: &str = "russet.dev/gateway";
/// Annotation on what a gateway created: the name that the client sent.
pub const REQUESTED_NAME: &str = "russet.dev/requested-name";
/// Annotation on what a gateway created: `namespace/name` of the client's AccessKey.
pub const REQUESTED_BY: &str = "russet.dev/requested-by";

/// Annotation on an AccessKey: the namespace that its secret moves to. Without it a secret stays with the namespace in
/// which it was seen first.
pub const SECRET_MOVES_TO: &str = "russet.dev/secret-moves-to";
/// Finalizer on Models: their copies are deleted first.
pub const FINALIZER_COPIES: &str = "russet.dev/copies";

/// Field manager of the operator.
pub const OPERATOR_MANAGER: &str = "russet-operator";
/// Field manager of the operator for the retention of copies; the manager that creates copies sets none.
pub const RETENTION_MANAGER: &str = "russet-operator-retention";
/// Field manager of the operator for the sources of copies.
pub const SUPPLY_MANAGER: &str = "russet-operator-supply";
/// Field manager of agents.
pub const AGENT_MANAGER: &str = "russet-agent";
/// Field manager of gateways.
pub const GATEWAY_MANAGER: &str = "russet-gateway";
/// Field manager of the operator for scaling; separate, as a HorizontalPodAutoscaler's would be.
pub const AUTOSCALER_MANAGER: &str = "russet-autoscaler";
/// Field manager of the operator for what the hours of the week needed: a release that does not know that writes the rest.
pub const DEMAND_HISTORY_MANAGER: &str = "russet-demand-history";

/// Whether a gateway created the object with these metadata for a client.
pub fn is_managed_by_gateway(metadata: &ObjectMeta) -> bool {
    let label = metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_MANAGED_BY));
    label.is_some_and(|label| label == MANAGED_BY_GATEWAY)
}

/// Name of the Lease in [`SYSTEM_NAMESPACE`] that is an agent's heartbeat.
pub fn node_lease(node: &str) -> String {
    format!("node-{node}")
}

/// Field manager of one gateway, for the entries that each gateway writes.
pub fn gateway_manager(gateway: &str) -> String {
    bounded(&format!("{GATEWAY_MANAGER}-{gateway}"), 128)
}

/// Name of the ShardGroup of one replica of a deployment; a new plan is a new group.
pub fn shard_group(deployment: &str, replica: i32, plan_hash: &str) -> String {
    let hash = &plan_hash[..plan_hash.len().min(8)];
    bounded(&format!("{deployment}-{replica}-{hash}"), 200)
}

/// Name of the Approval of one plan of a deployment.
pub fn approval(deployment: &str, plan_hash: &str) -> String {
    let hash = &plan_hash[..plan_hash.len().min(8)];
    bounded(&format!("{deployment}-{hash}"), 200)
}

/// Name of the Shard of one rank.
pub fn shard(group: &str, rank: u32) -> String {
    format!("{group}-{rank}")
}

/// Name of the RoleBinding that lets nodes read the Secret of a Model's source.
pub fn source_binding(model: &str) -> String {
    bounded(&format!("{SOURCES_ROLE}-{model}"), 253)
}

/// Name of the copy of a model's files on a node. Models are namespaced and copies are not, so the
/// namespace is part of the name; a dot separates what DNS labels cannot contain.
pub fn model_copy(namespace: &str, model: &str, node: &str) -> String {
    bounded(&format!("{namespace}.{model}.{node}"), 253)
}

/// The value of a label for a name of any length: labels hold 63 characters.
pub fn label_value(name: &str) -> String {
    bounded(name, 63)
}

/// A text truncated to the size of an Event's note, one kilobyte.
pub fn event_note(text: &str) -> &str {
    truncated(text, 1000)
}

/// A text truncated to at most `limit` bytes, at a character boundary.
fn truncated(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// `name` itself if it fits, else its beginning and a hash of the whole, so that two long names never
/// collide.
fn bounded(name: &str, limit: usize) -> String {
    if name.len() <= limit {
        return name.to_owned();
    }
    // FNV-1a: names need an even spread, not secrecy.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let head = truncated(name, limit - 17).trim_end_matches(['-', '.']);
    format!("{head}-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_cut_between_characters() {
        for (text, length) in [
            ("short".to_owned(), 5),
            ("a".repeat(2000), 1000),
            ("é".repeat(600), 1000),
            (format!("a{}", "é".repeat(600)), 999),
        ] {
            assert_eq!(event_note(&text).len(), length);
        }
    }

    #[test]
    fn long_names_stay_apart_and_fit() {
        let long = "m".repeat(300);
        let one = model_copy("default", &long, "node-a");
        let other = model_copy("default", &long, "node-b");
        assert_ne!(one, other);
        assert!(one.len() <= 253 && label_value(&long).len() <= 63);
        assert_eq!(model_copy("default", "smoke", "a"), "default.smoke.a");
        assert_eq!(shard(&shard_group("chat", 0, "0123456789abcdef"), 1), "chat-0-01234567-1");
    }
}
