//! Client of the root helper in the agent: reconciles the machine with its InferenceNode's spec, periodically
//! because cables come and go, and sets two conditions. Changes that the spec no longer asks for are
//! reverted.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{AfterRestart, InferenceNodeSpec, NodeNetwork, PortAddress, ServiceOrder};
use russet_plan::quantity;
use tokio::sync::watch;

use super::protocol::{
    HelperReply, HelperRequest, MachineRequest, Network, Port, RestartPolicy, UnchangedParts,
};
use super::{HelperClientError, send_request};

/// Request interval while nothing changes: a replugged port has lost its address.
const RETRY_INTERVAL: Duration = Duration::from_secs(15);

/// The part of a spec that concerns the helper.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HelperSpec {
    network: Option<NodeNetwork>,
    wired_limit: Option<String>,
    generation: Option<i64>,
}

impl HelperSpec {
    /// The helper's part of the spec of this generation.
    pub fn new(spec: &InferenceNodeSpec, generation: Option<i64>) -> Self {
        let (network, wired_limit) = (spec.network.clone(), spec.memory.wired_limit.clone());
        Self { network, wired_limit, generation }
    }
}

/// A condition to set.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HelperCondition {
    pub kind: Type,
    pub status: bool,
    pub reason: Reason,
    pub message: String,
    pub generation: Option<i64>,
}

/// Condition types that the helper's client sets.
pub(crate) const CONDITION_TYPES: [Type; 2] = [Type::NetworkApplied, Type::WiredLimitSet];

/// The machine's conditions from before the agent's start. They hold until the helper answers, which may be
/// absent.
pub(crate) fn from_status(conditions: &[Condition]) -> Vec<HelperCondition> {
    let verdict = |kind| {
        let condition = conditions::get(conditions, kind)?;
        Some(HelperCondition {
            kind,
            status: condition.status == "True",
            reason: conditions::reason(condition)?,
            message: condition.message.clone(),
            generation: condition.observed_generation,
        })
    };
    CONDITION_TYPES.into_iter().filter_map(verdict).collect()
}

/// Inputs and outputs of the client.
pub(crate) struct HelperSync {
    pub socket: PathBuf,
    pub node: String,
    /// Boot id.
    pub boot: String,
    /// `None` until the spec was read.
    pub spec: watch::Receiver<Option<HelperSpec>>,
    pub conditions: watch::Sender<Vec<HelperCondition>>,
}

/// Reconciles until the agent exits.
pub(crate) async fn run(mut asking: HelperSync) {
    loop {
        let asked = asking.spec.borrow_and_update().clone();
        if let Some(asked) = asked {
            let before = asking.conditions.borrow().clone();
            let now = reconcile(&asking.socket, &asking.node, &asking.boot, &asked, &before).await;
            asking.conditions.send_if_modified(|current| std::mem::replace(current, now.clone()) != now);
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            changed = asking.spec.changed() => if changed.is_err() { return },
        }
    }
}

/// Has the helper revert its changes for a node that was removed.
pub(crate) async fn release(socket: &Path, node: &str) {
    let request = HelperRequest::Apply(MachineRequest { node: node.to_owned(), ..MachineRequest::default() });
    match send_request(socket, &request).await {
        Ok(HelperReply::Done { changed, .. }) if changed.is_empty() => {}
        Err(HelperClientError::Absent(..)) => {}
        other => {
            tracing::info!(?other, "the machine's network and its limit of wired memory were given back")
        }
    }
}

/// Part of a request, or why there is none.
type RequestPart<T> = Result<Option<T>, (Reason, String)>;

fn network(spec: &HelperSpec, boot: &str) -> RequestPart<Network> {
    let Some(NodeNetwork { ports, service_order, after_restart, boot_id }) = &spec.network else {
        return Ok(None);
    };
    let after_restart = match after_restart {
        AfterRestart::Keep => RestartPolicy::Keep,
        AfterRestart::Drop | AfterRestart::Unknown => RestartPolicy::Drop,
    };
    if after_restart == RestartPolicy::Drop && boot_id.as_deref().is_some_and(|asked| asked != boot) {
        let words = "the machine has restarted, and this was requested until then only; run `russet fabric apply` again, with --keep for every start";
        return Err((Reason::DroppedAtRestart, words.to_owned()));
    }
    if *service_order == Some(ServiceOrder::Unknown) {
        let words = "spec.network.serviceOrder has a value of a newer release than this agent's";
        return Err((Reason::NewerRelease, words.to_owned()));
    }
    let port = |PortAddress { interface, address }: &PortAddress| Port {
        interface: interface.clone(),
        address: address.clone(),
    };
    Ok(Some(Network {
        ports: ports.iter().map(port).collect(),
        cables_last: *service_order == Some(ServiceOrder::CablesLast),
        after_restart,
    }))
}

fn wired_limit(spec: &HelperSpec) -> RequestPart<u64> {
    let Some(text) = &spec.wired_limit else { return Ok(None) };
    match quantity::parse(text) {
        Ok(bytes) => Ok(Some(bytes >> 20)),
        Err(_) => {
            let words = format!("spec.memory.wiredLimit {text:?} is no quantity; write for example 56Gi");
            Err((Reason::InvalidSpec, words))
        }
    }
}

/// Whether this agent cannot interpret the spec.
fn is_unsupported<T>(part: &RequestPart<T>) -> bool {
    matches!(part, Err((Reason::NewerRelease | Reason::InvalidSpec, _)))
}

/// Result of a request: what is applied and whether anything was changed just now, or the reason of a
/// failure.
type HelperOutcome = Result<(String, bool), (Reason, String)>;

async fn reconcile(
    socket: &Path,
    node: &str,
    boot: &str,
    asked: &HelperSpec,
    before: &[HelperCondition],
) -> Vec<HelperCondition> {
    let (network, wired) = (network(asked, boot), wired_limit(asked));
    // Parts that this agent cannot interpret stay unchanged: a newer release may have requested them.
    let leave = UnchangedParts { network: is_unsupported(&network), wired_limit: is_unsupported(&wired) };
    let whole = MachineRequest {
        node: node.to_owned(),
        network: network.clone().unwrap_or_default(),
        wired_limit_mebibytes: wired.clone().unwrap_or_default(),
        leave,
    };
    let request = async |requested| outcome(send_request(socket, &HelperRequest::Apply(requested)).await);
    let two = whole.network.is_some() && whole.wired_limit_mebibytes.is_some();
    let done = request(whole.clone()).await;
    // A refused part does not block the other one, and stays as it was.
    let network_alone = MachineRequest {
        wired_limit_mebibytes: None,
        leave: UnchangedParts { wired_limit: true, ..leave },
        ..whole.clone()
    };
    let wired_alone =
        MachineRequest { network: None, leave: UnchangedParts { network: true, ..leave }, ..whole };
    let (of_network, of_wired) = match &done {
        Err((Reason::HelperRefused, _)) if two => match request(network_alone).await {
            Ok(held) => (Ok(held), done.clone()),
            refused => (refused, request(wired_alone).await),
        },
        _ => (done.clone(), done.clone()),
    };
    let network = part_condition(network.map(|desired| desired.is_some()), of_network);
    let wired = part_condition(wired.map(|desired| desired.is_some()), of_wired);
    let verdict = |(kind, said): (Type, PartCondition)| {
        let PartCondition { is_shown: speaks, status, reason, message } = said;
        // A part that was never requested has no condition.
        let speaks = speaks || before.iter().any(|verdict| verdict.kind == kind);
        speaks.then_some(HelperCondition { kind, status, reason, message, generation: asked.generation })
    };
    CONDITION_TYPES.into_iter().zip([network, wired]).filter_map(verdict).collect()
}

/// The condition of a part, and whether it is shown.
struct PartCondition {
    is_shown: bool,
    status: bool,
    reason: Reason,
    message: String,
}

fn part_condition(asked: Result<bool, (Reason, String)>, outcome: HelperOutcome) -> PartCondition {
    let say = |speaks, status, reason, message| PartCondition { is_shown: speaks, status, reason, message };
    match (asked, outcome) {
        (Err((reason, message)), _) => say(true, false, reason, message),
        (Ok(asked), Err((reason, message))) => say(asked, false, reason, message),
        (Ok(true), Ok((held, _))) => say(true, true, Reason::Applied, held),
        (Ok(false), Ok((_, changed))) => {
            say(changed, false, Reason::Restored, "the network is as it is without Russet".to_owned())
        }
    }
}

fn outcome(answer: Result<HelperReply, HelperClientError>) -> HelperOutcome {
    match answer {
        Ok(HelperReply::Done { held, changed }) => {
            let held = if held.is_empty() { "nothing had to be changed".to_owned() } else { held.join("; ") };
            Ok((held, !changed.is_empty()))
        }
        Ok(HelperReply::Refused { why }) => Err((Reason::HelperRefused, why)),
        Ok(HelperReply::Failed { why }) => Err((Reason::Failed, why)),
        Err(silent @ HelperClientError::Absent(..)) => Err((Reason::HelperAbsent, silent.to_string())),
        Err(silent @ HelperClientError::Timeout(..)) => Err((Reason::Failed, silent.to_string())),
        Err(silent @ HelperClientError::Closed(..)) => Err((Reason::HelperRefused, silent.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(network: Option<NodeNetwork>, wired_limit: Option<&str>) -> HelperSpec {
        HelperSpec { network, wired_limit: wired_limit.map(str::to_owned), generation: Some(3) }
    }

    #[test]
    fn network_of_one_boot_is_not_requested_in_another() {
        for (after_restart, boot_id, is) in [
            (AfterRestart::Drop, Some("one"), Ok(RestartPolicy::Drop)),
            (AfterRestart::Drop, Some("two"), Err(Reason::DroppedAtRestart)),
            (AfterRestart::Unknown, Some("two"), Err(Reason::DroppedAtRestart)),
            (AfterRestart::Drop, None, Ok(RestartPolicy::Drop)),
            (AfterRestart::Keep, Some("two"), Ok(RestartPolicy::Keep)),
        ] {
            let boot_id = boot_id.map(str::to_owned);
            let desired = NodeNetwork { after_restart, boot_id, ..NodeNetwork::default() };
            let found = network(&spec(Some(desired), None), "one");
            let found = found.map(|desired| desired.unwrap().after_restart).map_err(|(reason, _)| reason);
            assert_eq!(found, is);
        }
        let newer = NodeNetwork { service_order: Some(ServiceOrder::Unknown), ..NodeNetwork::default() };
        assert_eq!(network(&spec(Some(newer), None), "one").unwrap_err().0, Reason::NewerRelease);
        assert_eq!(wired_limit(&spec(None, Some("20Gi"))), Ok(Some(20 << 10)));
        assert_eq!(wired_limit(&spec(None, Some("much"))).unwrap_err().0, Reason::InvalidSpec);
    }

    #[tokio::test]
    async fn missing_helper_is_reported_with_install_command() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("helper.sock");
        let nothing = spec(None, None);
        assert_eq!(reconcile(&socket, "a", "one", &nothing, &[]).await, []);
        let some = spec(Some(NodeNetwork::default()), None);
        let reported = reconcile(&socket, "a", "one", &some, &[]).await;
        assert_eq!(
            (reported.len(), reported[0].kind, reported[0].reason, reported[0].generation),
            (1, Type::NetworkApplied, Reason::HelperAbsent, Some(3))
        );
        assert!(
            reported[0].message.contains("install it there: sudo russet service install"),
            "{reported:?}"
        );
        // A condition that reported a change is updated, not left stale.
        assert_eq!(reconcile(&socket, "a", "one", &nothing, &reported).await[0].reason, Reason::HelperAbsent);
    }
}
