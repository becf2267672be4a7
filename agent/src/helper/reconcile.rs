//! The agent's side: has the root helper make the machine be as its InferenceNode's spec says, again and again, because
//! cables come and go, and says in two conditions what became of it. What nobody asks for is taken back.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{AfterRestart, InferenceNodeSpec, NodeNetwork, PortAddress, ServiceOrder};
use russet_plan::quantity;
use tokio::sync::watch;

use super::protocol::{HelperReply, UnchangedParts, Network, Port, HelperRequest, RestartPolicy, MachineRequest};
use super::{HelperClientError, send_request};

/// Between two requests while nothing changes: a port that was plugged in again has lost its address.
const RETRY_INTERVAL: Duration = Duration::from_secs(15);

/// What a spec asks of the helper.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HelperSpec {
    network: Option<NodeNetwork>,
    wired_limit: Option<String>,
    generation: Option<i64>,
}

impl HelperSpec {
    /// Out of the spec of this generation.
    pub fn new(spec: &InferenceNodeSpec, generation: Option<i64>) -> Self {
        let (network, wired_limit) = (spec.network.clone(), spec.memory.wired_limit.clone());
        Self { network, wired_limit, generation }
    }
}

/// A condition to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HelperCondition {
    pub kind: Type,
    pub status: bool,
    pub reason: Reason,
    pub message: String,
    pub generation: Option<i64>,
}

/// The condition types of verdicts.
pub(crate) const CONDITION_TYPES: [Type; 2] = [Type::NetworkApplied, Type::WiredLimitSet];

/// What was said of this machine before its agent began: it holds until the helper was asked, which may not be there.
pub(crate) fn from_status(told: &[Condition]) -> Vec<HelperCondition> {
    let verdict = |kind| {
        let condition = conditions::get(told, kind)?;
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

/// Who asks, and who is told.
pub(crate) struct HelperSync {
    pub socket: PathBuf,
    pub node: String,
    /// Identity of this boot.
    pub boot: String,
    /// Nothing until the spec was read.
    pub spec: watch::Receiver<Option<HelperSpec>>,
    pub conditions: watch::Sender<Vec<HelperCondition>>,
}

/// Asks for ever.
pub(crate) async fn run(mut asking: HelperSync) {
    loop {
        let asked = asking.spec.borrow_and_update().clone();
        if let Some(asked) = asked {
            let before = asking.conditions.borrow().clone();
            let now = reconcile(&asking.socket, &asking.node, &asking.boot, &asked, &before).await;
            asking.conditions.send_if_modified(|told| std::mem::replace(told, now.clone()) != now);
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            changed = asking.spec.changed() => if changed.is_err() { return },
        }
    }
}

/// Has the helper take back what it did for this node, which is no node any more.
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

/// A wish for the machine, or why there is none.
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
        let words = "the machine has started anew since this was asked for, and it was for until then; `russet fabric apply` asks again, with --keep for every start";
        return Err((Reason::DroppedAtRestart, words.to_owned()));
    }
    if *service_order == Some(ServiceOrder::Unknown) {
        let words = "spec.network.serviceOrder is a word of a newer release than this agent's";
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

/// Whether this agent does not understand what is asked.
fn is_unsupported<T>(part: &RequestPart<T>) -> bool {
    matches!(part, Err((Reason::NewerRelease | Reason::InvalidSpec, _)))
}

/// What became of a wish: what is held and whether anything was changed for it just now, or why it is not so.
type HelperOutcome = Result<(String, bool), (Reason, String)>;

async fn reconcile(socket: &Path, node: &str, boot: &str, asked: &HelperSpec, before: &[HelperCondition]) -> Vec<HelperCondition> {
    let (network, wired) = (network(asked, boot), wired_limit(asked));
    // What this agent cannot read stays as it is: a newer release may have asked for it.
    let leave = UnchangedParts { network: is_unsupported(&network), wired_limit: is_unsupported(&wired) };
    let whole = MachineRequest {
        node: node.to_owned(),
        network: network.clone().unwrap_or_default(),
        wired_limit_mebibytes: wired.clone().unwrap_or_default(),
        leave,
    };
    let request = async |wanted| outcome(send_request(socket, &HelperRequest::Apply(wanted)).await);
    let two = whole.network.is_some() && whole.wired_limit_mebibytes.is_some();
    let done = request(whole.clone()).await;
    // One part that is refused keeps nobody from the other, and stays as it was.
    let network_alone =
        MachineRequest { wired_limit_mebibytes: None, leave: UnchangedParts { wired_limit: true, ..leave }, ..whole.clone() };
    let wired_alone = MachineRequest { network: None, leave: UnchangedParts { network: true, ..leave }, ..whole };
    let (of_network, of_wired) = match &done {
        Err((Reason::HelperRefused, _)) if two => match request(network_alone).await {
            Ok(held) => (Ok(held), done.clone()),
            refused => (refused, request(wired_alone).await),
        },
        _ => (done.clone(), done.clone()),
    };
    let network = part_condition(network.map(|wish| wish.is_some()), of_network);
    let wired = part_condition(wired.map(|wish| wish.is_some()), of_wired);
    let verdict = |(kind, said): (Type, PartCondition)| {
        let PartCondition { is_shown: speaks, status, reason, message } = said;
        // What nobody ever asked for is nothing to speak of.
        let speaks = speaks || before.iter().any(|verdict| verdict.kind == kind);
        speaks.then_some(HelperCondition { kind, status, reason, message, generation: asked.generation })
    };
    CONDITION_TYPES.into_iter().zip([network, wired]).filter_map(verdict).collect()
}

/// What is to be said of a part, and whether it has to be.
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
            say(changed, false, Reason::Restored, "it is as it is without Russet".to_owned())
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
            let wish = NodeNetwork { after_restart, boot_id, ..NodeNetwork::default() };
            let found = network(&spec(Some(wish), None), "one");
            let found = found.map(|wish| wish.unwrap().after_restart).map_err(|(reason, _)| reason);
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
        let told = reconcile(&socket, "a", "one", &some, &[]).await;
        assert_eq!(
            (told.len(), told[0].kind, told[0].reason, told[0].generation),
            (1, Type::NetworkApplied, Reason::HelperAbsent, Some(3))
        );
        assert!(told[0].message.contains("install it there: sudo russet service install"), "{told:?}");
        // Who has been told that something is changed is not left to think so.
        assert_eq!(reconcile(&socket, "a", "one", &nothing, &told).await[0].reason, Reason::HelperAbsent);
    }
}
