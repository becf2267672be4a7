//! The node's Lease: renewed while the agent runs, held by the machine's boot id. A second machine with the
//! same name finds it held and waits. A removed node does not renew it.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::InferenceNode;
use russet_crds::names::{AGENT_MANAGER, SYSTEM_NAMESPACE, node_lease};
use serde_json::json;

use crate::metrics::AgentMetrics;

/// Renew interval.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Lease duration, after which the operator considers the node unreachable: three renewals may be lost.
const DURATION_SECONDS: i32 = 20;

/// Renews the Lease of `node` until the agent exits.
pub(crate) async fn run(client: Client, node: String, boot_id: String, metrics: AgentMetrics) {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client, SYSTEM_NAMESPACE);
    let name = node_lease(&node);
    let (mut pause, mut watched) = (RENEW_INTERVAL, ObservedRenewal::default());
    loop {
        let result = renew(&nodes, &leases, &node, &boot_id, &mut watched).await;
        metrics.lease(result.as_ref().is_ok_and(Option::is_none));
        pause = match result {
            Ok(None) => RENEW_INTERVAL,
            Ok(Some(holder)) => {
                tracing::error!(
                    lease = name,
                    holder,
                    "another machine runs as this node; give one of them its own name and join it again"
                );
                RENEW_INTERVAL
            }
            Err(error) => {
                tracing::warn!(lease = name, %error, "the Lease could not be renewed; retrying");
                // Short at first, so that a restart of the control plane costs no renewal.
                (pause / 2).max(Duration::from_secs(1))
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Renews the Lease, or returns its other holder.
async fn renew(
    nodes: &Api<InferenceNode>,
    leases: &Api<Lease>,
    node: &str,
    boot_id: &str,
    watched: &mut ObservedRenewal,
) -> Result<Option<String>, kube::Error> {
    let now = Timestamp::now();
    let name = &node_lease(node);
    let found = leases.get_opt(name).await?;
    let spec = found.as_ref().and_then(|lease| lease.spec.as_ref());
    if let Some(holder) = spec.and_then(|spec| other_holder(spec, boot_id, now, watched.unchanged_for(spec)))
    {
        return Ok(Some(holder));
    }
    let version = match &found {
        // Updates exactly the observed version: a Lease deleted meanwhile is not created again.
        Some(lease) => lease.resource_version(),
        None => nodes.get(node).await.map(|_| None)?,
    };
    let patch = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": SYSTEM_NAMESPACE, "resourceVersion": version},
        "spec": {
            "holderIdentity": boot_id,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": MicroTime(now),
        },
    });
    leases.patch(name, &PatchParams::apply(AGENT_MANAGER).force(), &Patch::Apply(patch)).await?;
    Ok(None)
}

/// The other holder of the Lease, if its hold has not expired.
///
/// A hold expires by the clocks, or because no renewal was observed for as long: the clock of a machine that
/// has just started may be hours behind.
fn other_holder(spec: &LeaseSpec, own: &str, now: Timestamp, watched: Duration) -> Option<String> {
    let holder = spec.holder_identity.as_ref().filter(|holder| *holder != own)?;
    let MicroTime(renewed) = spec.renew_time.as_ref()?;
    let seconds = i64::from(spec.lease_duration_seconds.unwrap_or(DURATION_SECONDS));
    let age = now.as_second() - renewed.as_second();
    (age < seconds && (watched.as_secs() as i64) < seconds).then(|| holder.clone())
}

/// A renewal by another holder, and when it was first observed.
#[derive(Default)]
struct ObservedRenewal(Option<(MicroTime, Instant)>);

impl ObservedRenewal {
    /// How long this Lease has been unchanged.
    fn unchanged_for(&mut self, spec: &LeaseSpec) -> Duration {
        match (&self.0, &spec.renew_time) {
            (Some((time, first)), Some(now)) if time == now => first.elapsed(),
            (_, now) => {
                self.0 = now.clone().map(|time| (time, Instant::now()));
                Duration::ZERO
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unexpired_lease_of_another_boot_blocks() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let spec = |holder: &str, renewed| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(20),
            renew_time: Some(MicroTime(at(renewed))),
            ..LeaseSpec::default()
        };
        for (holder, now, watched, expected) in [
            ("me", 101, 0, None),
            ("you", 119, 0, Some("you")),
            ("you", 120, 0, None),
            // Our clock is an hour behind.
            ("you", 100 - 3_600, 19, Some("you")),
            ("you", 100 - 3_600, 20, None),
        ] {
            let holder_found = other_holder(&spec(holder, 100), "me", at(now), Duration::from_secs(watched));
            assert_eq!(holder_found.as_deref(), expected, "{holder} at {now}, watched for {watched} s");
        }
        assert_eq!(other_holder(&LeaseSpec::default(), "me", at(0), Duration::ZERO), None);
    }
}
