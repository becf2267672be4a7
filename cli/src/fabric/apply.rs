//! `russet fabric apply` and `revert`: sets or removes `spec.network` of each InferenceNode, and waits until
//! the machines' agents report the outcome. The machines' root helpers make the changes, within their bounds.
//! Not here: any change to a network.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::conditions::{Reason, Type, get, reason};
use russet_crds::{AfterRestart, GROUP, InferenceNode, NodeNetwork, PortAddress, ServiceOrder, VERSION};
use russet_plan::fabric::address_plan::{NetworkChange, changes};
use russet_plan::fabric::network_spec::{NodeNetworkState, network_specs};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client::Connection;
use crate::confirmation::confirm;
use crate::get::format_table;
use crate::stdout::{out, outln};

/// Field manager of `spec.network`.
const MANAGER: &str = "russet-fabric";
/// An agent queries its helper every 15 s, so without a write its last report may be this old.
const MAX_STATUS_AGE: Duration = Duration::from_secs(30);
/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// How to apply a change.
#[derive(clap::Args)]
pub struct ApplyOptions {
    /// Do not ask for confirmation.
    #[arg(long, short)]
    yes: bool,
    /// Seconds to wait for the machines.
    #[arg(long, default_value_t = 60)]
    timeout_seconds: u64,
    #[command(flatten)]
    pub connection: Connection,
}

/// The generation of each node's spec to wait for.
type Awaited = BTreeMap<String, Option<i64>>;

/// The outcome to wait for.
enum Goal {
    /// The settings are applied.
    Applied,
    /// The previous settings are restored. `reported` are the nodes that had reported a state of the network:
    /// these have something to revert, even if they omit it meanwhile.
    Restored { reported: BTreeSet<String> },
}

/// Applies the planned changes.
pub async fn apply(
    nodes: &[Arc<InferenceNode>],
    range: Ipv4Addr,
    keep: bool,
    asking: &ApplyOptions,
) -> Result<()> {
    let known: BTreeMap<String, NodeNetworkState> = nodes.iter().filter_map(known_node).collect();
    let asked = network_specs(&known, range, keep)?;
    if asked.is_empty() {
        outln!(
            "nothing to change: no cable lacks only an address; `russet fabric show` lists what each one lacks"
        )?;
        return Ok(());
    }
    let is_new = |name: &String| known.get(name).and_then(|node| node.network.as_ref()) != asked.get(name);
    let new: BTreeMap<&String, &NodeNetwork> = asked.iter().filter(|(name, _)| is_new(name)).collect();
    let mut awaited: Awaited = asked.keys().map(|name| (name.clone(), None)).collect();
    let client = asking.connection.client().await?;
    if new.is_empty() {
        outln!("unchanged: spec.network of every node has this already")?;
    } else {
        out!("{}", describe_changes(&known, &new, range)?)?;
        confirm("Apply this to the machines?", asking.yes)?;
        for node in nodes {
            let Some(network) = new.get(&node.name_any()) else { continue };
            let patched = write(&client, node, json!({"network": network})).await?;
            awaited.insert(node.name_any(), patched.metadata.generation);
        }
    }
    let ended = wait(&client, &awaited, asking.timeout_seconds, Goal::Applied).await?;
    out!("{}", table(&asked, &ended))?;
    require_success(&ended, "`russet fabric revert` undoes everything")
}

/// Reverts all changes.
pub async fn revert(nodes: &[Arc<InferenceNode>], asking: &ApplyOptions) -> Result<()> {
    let asked: BTreeMap<String, NodeNetwork> =
        nodes.iter().filter_map(|node| Some((node.name_any(), node.spec.network.clone()?))).collect();
    if asked.is_empty() {
        outln!("nothing to revert: spec.network is empty on every node")?;
        return Ok(());
    }
    let names: Vec<&str> = asked.keys().map(String::as_str).collect();
    outln!("The network of {} returns to its state without Russet.", names.join(", "))?;
    confirm("Revert it?", asking.yes)?;
    let client = asking.connection.client().await?;
    let mut awaited = Awaited::new();
    for node in nodes.iter().filter(|node| asked.contains_key(&node.name_any())) {
        let name = &node.name_any();
        let patched = write(&client, node, json!({})).await?;
        if patched.spec.network.is_some() {
            let managers = patched.managed_fields().iter().filter_map(|field| field.manager.clone());
            let managers: Vec<String> = managers.collect();
            bail!(
                "spec.network of node {name} stays: {MANAGER} does not own all of it; remove it with the field managers that wrote it ({})",
                managers.join(", ")
            );
        }
        awaited.insert(name.clone(), patched.metadata.generation);
    }
    let has_reported = |node: &&Arc<InferenceNode>| {
        let status = node.status.as_ref();
        status.is_some_and(|status| get(&status.conditions, Type::NetworkApplied).is_some())
    };
    let reported = nodes.iter().filter(has_reported).map(|node| node.name_any()).collect();
    let ended = wait(&client, &awaited, asking.timeout_seconds, Goal::Restored { reported }).await?;
    out!("{}", table(&asked, &ended))?;
    require_success(&ended, "the machine's owner can revert it there: `sudo russet helper --revert`")
}

fn known_node(node: &Arc<InferenceNode>) -> Option<(String, NodeNetworkState)> {
    Some((
        node.name_any(),
        NodeNetworkState { network: node.spec.network.clone(), status: node.status.clone()? },
    ))
}

/// The changes as sentences.
fn describe_changes(
    known: &BTreeMap<String, NodeNetworkState>,
    new: &BTreeMap<&String, &NodeNetwork>,
    range: Ipv4Addr,
) -> Result<String> {
    let status = known.iter().map(|(name, node)| (name.clone(), node.status.clone())).collect();
    let changes = changes(&status, range)?;
    let mut text = String::new();
    for (name, network) in new {
        let NodeNetwork { ports, service_order, after_restart, boot_id: _ } = network;
        let until = match after_restart {
            AfterRestart::Keep => "also after restarts",
            AfterRestart::Drop | AfterRestart::Unknown => "until the machine restarts",
        };
        text.push_str(&format!("on {name}, {until}:\n"));
        for change in changes.get(*name).into_iter().flatten() {
            match change {
                NetworkChange::LeaveBridge { interface, bridge } => {
                    text.push_str(&format!("  {interface} leaves {bridge}\n"));
                }
                NetworkChange::RemoveAddress { interface, address } => {
                    text.push_str(&format!("  {interface} loses {address}\n"));
                }
                NetworkChange::AddAddress { .. } => {}
            }
        }
        for PortAddress { interface, address } in ports {
            text.push_str(&format!("  {interface} has {address}\n"));
        }
        if *service_order == Some(ServiceOrder::CablesLast) {
            text.push_str("  network services of cables are ordered after all others\n");
        }
    }
    text.push_str(
        "A machine that is reached only over such a port or its bridge may become unreachable: have physical access to it.\n",
    );
    Ok(text)
}

/// Writes all fields that this program owns in a node's spec. A node deleted meanwhile is not created again.
async fn write(client: &Client, node: &InferenceNode, spec: Value) -> Result<InferenceNode> {
    let (nodes, name): (Api<InferenceNode>, _) = (Api::all(client.clone()), &node.name_any());
    let metadata = json!({"name": name, "uid": node.uid()});
    let version = format!("{GROUP}/{VERSION}");
    let patch = json!({"apiVersion": version, "kind": "InferenceNode", "metadata": metadata, "spec": spec});
    // Without force: fields of a manager that syncs from a repository would come back.
    nodes
        .patch(name, &PatchParams::apply(MANAGER), &Patch::Apply(patch))
        .await
        .with_context(|| format!("spec.network of node {name} could not be written"))
}

/// Outcome on a node: whether it succeeded, and the agent's message.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeOutcome {
    succeeded: bool,
    words: String,
}

/// The agent's report for this generation; `None` until there is one.
fn outcome(node: &InferenceNode, generation: Option<i64>, goal: &Goal) -> Option<NodeOutcome> {
    let conditions = node.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let Some(condition) = get(conditions, Type::NetworkApplied) else {
        // A node that never got settings has nothing to revert.
        let never = match goal {
            Goal::Applied => false,
            Goal::Restored { reported: condition } => {
                node.status.is_some() && !condition.contains(&node.name_any())
            }
        };
        return never.then(|| NodeOutcome { succeeded: true, words: "nothing was changed there".to_owned() });
    };
    if generation.is_some_and(|awaited| condition.observed_generation.is_none_or(|seen| seen < awaited)) {
        return None;
    }
    let well = match goal {
        Goal::Applied => condition.status == "True",
        Goal::Restored { .. } => reason(condition) == Some(Reason::Restored),
    };
    Some(NodeOutcome { succeeded: well, words: format!("{}: {}", condition.reason, condition.message) })
}

async fn wait(
    client: &Client,
    awaited: &Awaited,
    seconds: u64,
    goal: Goal,
) -> Result<BTreeMap<String, NodeOutcome>> {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let (now, longest) = (Instant::now(), Duration::from_secs(seconds));
    let mut all = BTreeMap::new();
    for (name, generation) in awaited {
        let deadline = now + if generation.is_some() { longest } else { longest.min(MAX_STATUS_AGE) };
        let end = loop {
            // A control plane that is unreachable for a moment, perhaps over such a cable, is waited for as
            // well.
            let found = nodes.get(name).await;
            if let Some(end) = found.as_ref().ok().and_then(|node| outcome(node, *generation, &goal))
                && (end.succeeded || generation.is_some() || Instant::now() >= deadline)
            {
                break end;
            }
            if Instant::now() >= deadline {
                let why = found.err().map_or_else(
                    || "its agent has not reported a result; check that it runs".to_owned(),
                    |error| error.to_string(),
                );
                break NodeOutcome { succeeded: false, words: format!("not known after {seconds} s: {why}") };
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        all.insert(name.clone(), end);
    }
    Ok(all)
}

/// Each requested port, and the outcome on its node.
fn table(asked: &BTreeMap<String, NodeNetwork>, ended: &BTreeMap<String, NodeOutcome>) -> String {
    let mut lines = vec![["NODE", "PORT", "ADDRESS", "RESULT"].map(str::to_owned).to_vec()];
    for (name, network) in asked {
        let words = ended.get(name).map_or("-", |end| &end.words);
        let row = |port: &str, address: &str| {
            let cells = [name.as_str(), port, address, words];
            cells.map(|cell| cell.replace(char::is_control, "?")).to_vec()
        };
        lines.extend(network.ports.iter().map(|port| row(&port.interface, &port.address)));
        if network.service_order.is_some() {
            lines.push(row("services", "-"));
        }
    }
    format_table(&lines)
}

fn require_success(ended: &BTreeMap<String, NodeOutcome>, remedy: &str) -> Result<()> {
    let ill: Vec<&str> =
        ended.iter().filter(|(_, end)| !end.succeeded).map(|(name, _)| name.as_str()).collect();
    ensure!(ill.is_empty(), "not every requested change was made on {}; {remedy}", ill.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use russet_crds::conditions;
    use russet_crds::{InferenceNodeSpec, InferenceNodeStatus};

    use super::*;

    #[test]
    fn status_of_an_older_generation_does_not_count_as_applied() {
        let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
        let (applied, restored) = (Goal::Applied, Goal::Restored { reported: BTreeSet::new() });
        assert_eq!(outcome(&node, Some(2), &applied), None);
        node.status = Some(InferenceNodeStatus::default());
        assert_eq!(outcome(&node, Some(2), &applied), None);
        assert!(outcome(&node, Some(2), &restored).is_some_and(|end| end.succeeded), "it was never asked");
        let had_reported = Goal::Restored { reported: ["a".to_owned()].into() };
        assert_eq!(outcome(&node, Some(2), &had_reported), None, "its agent begins anew");
        let mut tell = |status, reason, generation| {
            let conditions = &mut node.status.as_mut().unwrap().conditions;
            let at = Timestamp::UNIX_EPOCH;
            conditions::set(conditions, Type::NetworkApplied, status, reason, "words", generation, at);
            [outcome(&node, Some(2), &applied), outcome(&node, Some(2), &restored)]
                .map(|end| end.map(|end| end.succeeded))
        };
        for (status, reason, generation, applied, reverted) in [
            (true, Reason::Applied, Some(1), None, None),
            (true, Reason::Applied, None, None, None),
            (true, Reason::Applied, Some(2), Some(true), Some(false)),
            (false, Reason::HelperAbsent, Some(2), Some(false), Some(false)),
            (false, Reason::Restored, Some(3), Some(false), Some(true)),
        ] {
            assert_eq!(tell(status, reason, generation), [applied, reverted], "{reason:?} {generation:?}");
        }
    }

    #[test]
    fn every_port_has_one_line_without_control_characters() {
        let port = |interface: &str| PortAddress {
            interface: interface.to_owned(),
            address: "10.0.0.1/30".to_owned(),
        };
        let network = NodeNetwork {
            ports: vec![port("en4"), port("en5")],
            service_order: Some(ServiceOrder::CablesLast),
            ..NodeNetwork::default()
        };
        let ended = NodeOutcome { succeeded: false, words: "HelperAbsent: a\x1b[31mb".to_owned() };
        let shown = table(&[("a".to_owned(), network)].into(), &[("a".to_owned(), ended.clone())].into());
        assert_eq!(shown.lines().count(), 4, "{shown}");
        assert!(shown.contains("a?[31mb") && !shown.contains('\x1b'), "{shown}");
        let error = require_success(&[("a".to_owned(), ended)].into(), "do this").unwrap_err().to_string();
        assert_eq!(error, "not every requested change was made on a; do this");
    }
}
