//! The agent's side: has the root helper make the machine be as its InferenceNode's spec says, again and again, because
//! cables come and go, and says in two conditions what became of it. What nobody asks for is taken back.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{AfterRestart, InferenceNodeSpec, NodeNetwork, PortAddress, ServiceOrder};
use russet_plan::quantity;
use tokio::sync::watch;

use super::protocol::{Answer, Left, Network, Port, Request, Restart, Wanted};
use super::{Silent, ask};

/// Between two requests while nothing changes: a port that was plugged in again has lost its address.
const PERIOD: Duration = Duration::from_secs(15);

/// What a spec asks of the helper.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Asked {
    network: Option<NodeNetwork>,
    wired_limit: Option<String>,
    generation: Option<i64>,
}

impl Asked {
    /// Out of the spec of this generation.
    pub fn new(spec: &InferenceNodeSpec, generation: Option<i64>) -> Self {
        let (network, wired_limit) = (spec.network.clone(), spec.memory.wired_limit.clone());
        Self { network, wired_limit, generation }
    }
}

/// A condition to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    pub kind: Type,
    pub status: bool,
    pub reason: Reason,
    pub message: String,
    pub generation: Option<i64>,
}

/// The condition types of verdicts.
pub(crate) const KINDS: [Type; 2] = [Type::NetworkApplied, Type::WiredLimitSet];

/// What was said of this machine before its agent began: it holds until the helper was asked, which may not be there.
pub(crate) fn before(told: &[Condition]) -> Vec<Verdict> {
    let verdict = |kind| {
        let condition = conditions::get(told, kind)?;
        Some(Verdict {
            kind,
            status: condition.status == "True",
            reason: conditions::reason(condition)?,
            message: condition.message.clone(),
            generation: condition.observed_generation,
        })
    };
    KINDS.into_iter().filter_map(verdict).collect()
}

/// Who asks, and who is told.
pub(crate) struct Asking {
    pub socket: PathBuf,
    pub node: String,
    /// Identity of this boot.
    pub boot: String,
    /// Nothing until the spec was read.
    pub asked: watch::Receiver<Option<Asked>>,
    pub told: watch::Sender<Vec<Verdict>>,
}

/// Asks for ever.
pub(crate) async fn keep(mut asking: Asking) {
    loop {
        let asked = asking.asked.borrow_and_update().clone();
        if let Some(asked) = asked {
            let before = asking.told.borrow().clone();
            let now = look(&asking.socket, &asking.node, &asking.boot, &asked, &before).await;
            asking.told.send_if_modified(|told| std::mem::replace(told, now.clone()) != now);
        }
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            changed = asking.asked.changed() => if changed.is_err() { return },
        }
    }
}

/// Has the helper take back what it did for this node, which is no node any more.
pub(crate) async fn give_back(socket: &Path, node: &str) {
    let request = Request::Apply(Wanted { node: node.to_owned(), ..Wanted::default() });
    match ask(socket, &request).await {
        Ok(Answer::Done { changed, .. }) if changed.is_empty() => {}
        Err(Silent::Absent(..)) => {}
        other => {
            tracing::info!(?other, "the machine's network and its limit of wired memory were given back")
        }
    }
}

/// A wish for the machine, or why there is none.
type Part<T> = Result<Option<T>, (Reason, String)>;

fn network(asked: &Asked, boot: &str) -> Part<Network> {
    let Some(NodeNetwork { ports, service_order, after_restart, boot_id }) = &asked.network else {
        return Ok(None);
    };
    let after_restart = match after_restart {
        AfterRestart::Keep => Restart::Keep,
        AfterRestart::Drop | AfterRestart::Unknown => Restart::Drop,
    };
    if after_restart == Restart::Drop && boot_id.as_deref().is_some_and(|asked| asked != boot) {
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

fn wired(asked: &Asked) -> Part<u64> {
    let Some(text) = &asked.wired_limit else { return Ok(None) };
    match quantity::parse(text) {
        Ok(bytes) => Ok(Some(bytes >> 20)),
        Err(_) => {
            let words = format!("spec.memory.wiredLimit {text:?} is no quantity; write for example 56Gi");
            Err((Reason::InvalidSpec, words))
        }
    }
}

/// Whether this agent does not understand what is asked.
fn is_unread<T>(part: &Part<T>) -> bool {
    matches!(part, Err((Reason::NewerRelease | Reason::InvalidSpec, _)))
}

/// What became of a wish: what is held and whether anything was changed for it just now, or why it is not so.
type Outcome = Result<(String, bool), (Reason, String)>;

async fn look(socket: &Path, node: &str, boot: &str, asked: &Asked, before: &[Verdict]) -> Vec<Verdict> {
    let (network, wired) = (network(asked, boot), wired(asked));
    // What this agent cannot read stays as it is: a newer release may have asked for it.
    let leave = Left { network: is_unread(&network), wired_limit: is_unread(&wired) };
    let whole = Wanted {
        node: node.to_owned(),
        network: network.clone().unwrap_or_default(),
        wired_limit_mebibytes: wired.clone().unwrap_or_default(),
        leave,
    };
    let request = async |wanted| outcome(ask(socket, &Request::Apply(wanted)).await);
    let two = whole.network.is_some() && whole.wired_limit_mebibytes.is_some();
    let done = request(whole.clone()).await;
    // One part that is refused keeps nobody from the other, and stays as it was.
    let network_alone =
        Wanted { wired_limit_mebibytes: None, leave: Left { wired_limit: true, ..leave }, ..whole.clone() };
    let wired_alone = Wanted { network: None, leave: Left { network: true, ..leave }, ..whole };
    let (of_network, of_wired) = match &done {
        Err((Reason::HelperRefused, _)) if two => match request(network_alone).await {
            Ok(held) => (Ok(held), done.clone()),
            refused => (refused, request(wired_alone).await),
        },
        _ => (done.clone(), done.clone()),
    };
    let network = said(network.map(|wish| wish.is_some()), of_network);
    let wired = said(wired.map(|wish| wish.is_some()), of_wired);
    let verdict = |(kind, said): (Type, Said)| {
        let Said { speaks, status, reason, message } = said;
        // What nobody ever asked for is nothing to speak of.
        let speaks = speaks || before.iter().any(|verdict| verdict.kind == kind);
        speaks.then_some(Verdict { kind, status, reason, message, generation: asked.generation })
    };
    KINDS.into_iter().zip([network, wired]).filter_map(verdict).collect()
}

/// What is to be said of a part, and whether it has to be.
struct Said {
    speaks: bool,
    status: bool,
    reason: Reason,
    message: String,
}

fn said(asked: Result<bool, (Reason, String)>, outcome: Outcome) -> Said {
    let say = |speaks, status, reason, message| Said { speaks, status, reason, message };
    match (asked, outcome) {
        (Err((reason, message)), _) => say(true, false, reason, message),
        (Ok(asked), Err((reason, message))) => say(asked, false, reason, message),
        (Ok(true), Ok((held, _))) => say(true, true, Reason::Applied, held),
        (Ok(false), Ok((_, changed))) => {
            say(changed, false, Reason::Restored, "it is as it is without Russet".to_owned())
        }
    }
}

fn outcome(answer: Result<Answer, Silent>) -> Outcome {
    match answer {
        Ok(Answer::Done { held, changed }) => {
            let held = if held.is_empty() { "nothing had to be changed".to_owned() } else { held.join("; ") };
            Ok((held, !changed.is_empty()))
        }
        Ok(Answer::Refused { why }) => Err((Reason::HelperRefused, why)),
        Ok(Answer::Failed { why }) => Err((Reason::Failed, why)),
        Err(silent @ Silent::Absent(..)) => Err((Reason::HelperAbsent, silent.to_string())),
        Err(silent @ Silent::Slow(..)) => Err((Reason::Failed, silent.to_string())),
        Err(silent @ Silent::Closed(..)) => Err((Reason::HelperRefused, silent.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(network: Option<NodeNetwork>, wired_limit: Option<&str>) -> Asked {
        Asked { network, wired_limit: wired_limit.map(str::to_owned), generation: Some(3) }
    }

    #[test]
    fn what_was_for_one_boot_is_not_asked_for_in_another() {
        for (after_restart, boot_id, is) in [
            (AfterRestart::Drop, Some("one"), Ok(Restart::Drop)),
            (AfterRestart::Drop, Some("two"), Err(Reason::DroppedAtRestart)),
            (AfterRestart::Unknown, Some("two"), Err(Reason::DroppedAtRestart)),
            (AfterRestart::Drop, None, Ok(Restart::Drop)),
            (AfterRestart::Keep, Some("two"), Ok(Restart::Keep)),
        ] {
            let boot_id = boot_id.map(str::to_owned);
            let wish = NodeNetwork { after_restart, boot_id, ..NodeNetwork::default() };
            let found = network(&asked(Some(wish), None), "one");
            let found = found.map(|wish| wish.unwrap().after_restart).map_err(|(reason, _)| reason);
            assert_eq!(found, is);
        }
        let newer = NodeNetwork { service_order: Some(ServiceOrder::Unknown), ..NodeNetwork::default() };
        assert_eq!(network(&asked(Some(newer), None), "one").unwrap_err().0, Reason::NewerRelease);
        assert_eq!(wired(&asked(None, Some("20Gi"))), Ok(Some(20 << 10)));
        assert_eq!(wired(&asked(None, Some("much"))).unwrap_err().0, Reason::InvalidSpec);
    }

    #[tokio::test]
    async fn a_machine_without_a_helper_says_how_to_install_it_once_it_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("helper.sock");
        let nothing = asked(None, None);
        assert_eq!(look(&socket, "a", "one", &nothing, &[]).await, []);
        let some = asked(Some(NodeNetwork::default()), None);
        let told = look(&socket, "a", "one", &some, &[]).await;
        assert_eq!(
            (told.len(), told[0].kind, told[0].reason, told[0].generation),
            (1, Type::NetworkApplied, Reason::HelperAbsent, Some(3))
        );
        assert!(told[0].message.contains("install it there: sudo russet service install"), "{told:?}");
        // Who has been told that something is changed is not left to think so.
        assert_eq!(look(&socket, "a", "one", &nothing, &told).await[0].reason, Reason::HelperAbsent);
    }
}
