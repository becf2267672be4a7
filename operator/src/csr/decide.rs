//! The decision on a certificate request. Pure: the requester is in the request, set by the API server; the
//! states of the node and of its token are arguments.
//!
//! ```text
//! requested ─▶ right subject and requester? ─yes─▶ Approved ─▶ signed ─▶ token removed
//!                └─ no ─▶ Denied                      └─ invalid ─▶ Failed
//! ```
//!
//! A node name may have several incarnations: a machine joins, leaves, and another one joins under the same
//! name. The key that a machine joins with starts an incarnation; its certificates and its InferenceNode name
//! it, and a certificate of an earlier incarnation is not renewed. With ServiceAccounts, each incarnation
//! gets a new account instead.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use russet_crds::names::NODE_SIGNER;
use russet_rpc::tls::GATEWAY_USER;

use super::sign::{self, RequestedIdentity};
use super::token::{SecretVersion, TokenState};

/// Group of machines with a join token.
const BOOTSTRAPPERS: &str = "system:bootstrappers";
/// User prefix of such a machine; the token's id follows.
const BOOTSTRAP_USER: &str = "system:bootstrap:";
/// Group (O) of nodes; the data plane checks the same names.
pub const NODES_GROUP: &str = "russet:nodes";
/// User prefix of nodes (CN).
const NODE_USER: &str = "russet:node:";
/// User prefix of nodes where the API server does not accept node certificates.
const NODE_ACCOUNT: &str = "system:serviceaccount:russet-nodes:";
/// Suffix of the DNS name in a node's certificate.
const NODE_DOMAIN: &str = ".node.russet.dev";
/// The gateway's user where the API server does not accept its certificate.
const GATEWAY_ACCOUNT: &str = "system:serviceaccount:russet-system:russet-gateway";
/// The DNS name in the gateway's certificate.
const GATEWAY_DOMAIN: &str = "gateway.russet.dev";
/// Usages of a certificate: a component is client and server.
const USAGES: [&str; 3] = ["client auth", "digital signature", "server auth"];
/// Time that a used token is kept, in case its machine has to repeat the request.
const USED_TOKEN_TTL: Duration = Duration::from_secs(600);
/// Interval of checks whether a joined machine's agent has appeared.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Subject of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrSubject {
    /// A node's.
    Node(String),
    /// The gateway's.
    Gateway,
}

impl CsrSubject {
    /// The user (CN) it acts as.
    pub fn user(&self) -> String {
        match self {
            Self::Node(node) => format!("{NODE_USER}{node}"),
            Self::Gateway => GATEWAY_USER.to_owned(),
        }
    }

    /// Its group (O).
    pub fn group(&self) -> Option<&'static str> {
        match self {
            Self::Node(_) => Some(NODES_GROUP),
            Self::Gateway => None,
        }
    }

    /// Its DNS name.
    pub fn domain(&self) -> String {
        match self {
            Self::Node(node) => format!("{node}{NODE_DOMAIN}"),
            Self::Gateway => GATEWAY_DOMAIN.to_owned(),
        }
    }
}

impl std::fmt::Display for CsrSubject {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Node(node) => write!(formatter, "node {node}"),
            Self::Gateway => formatter.write_str("the gateway"),
        }
    }
}

/// The requester.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requester {
    /// A machine with the join token of this id.
    Bootstrap(String),
    /// A node with its certificate.
    Node {
        /// Its name.
        node: String,
        /// The incarnation in its certificate; `None` for a control plane's own node and for older releases.
        incarnation: Option<String>,
    },
    /// A node as its ServiceAccount.
    Account(String),
    /// The gateway.
    Gateway,
    /// Any other user.
    Other(String),
}

/// A parsed request that is not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedRequest {
    /// Subject of the certificate.
    pub subject: CsrSubject,
    /// The requester.
    pub requester: Requester,
    /// Digest of the public key.
    pub key: String,
    usages: Vec<String>,
    stage: RequestStage,
}

impl ParsedRequest {
    /// The incarnation that the certificate is for: the current one on renewal, or a new one.
    pub fn incarnation(&self) -> Option<&str> {
        match (&self.subject, &self.requester) {
            (CsrSubject::Gateway, _) | (_, Requester::Account(_)) => None,
            (CsrSubject::Node(_), Requester::Node { incarnation: life, .. }) => life.as_deref(),
            (CsrSubject::Node(_), _) => Some(&self.key),
        }
    }
}

/// Progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestStage {
    New,
    Approved,
    Signed { at: Option<Timestamp> },
}

/// Membership of a node in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeMembership {
    /// No node of this name has joined, or it has left.
    Unknown,
    /// It was created for a machine that has not joined yet.
    Announced,
    /// It has joined and is unreachable.
    Unreachable,
    /// It has joined and its agent is reachable.
    Reachable,
    /// It is being removed.
    Leaving,
}

/// What to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrVerdict {
    /// It is for another signer, or is finished.
    Nothing,
    /// It is correct; its token, if any, is marked as used first.
    Approve {
        /// A token that has not been used yet.
        claim: Option<SecretVersion>,
    },
    /// It was approved, here or by a person.
    Sign,
    /// It is not valid.
    Deny(String),
    /// It is not valid, and is approved already, so that it can no longer be denied.
    Fail(String),
    /// Its node has appeared, or its time is over: the token is no longer needed.
    RemoveToken(SecretVersion),
    /// Its node has not appeared yet.
    Wait(Duration),
}

/// Parses a request; one that needs no evaluation gives a verdict already.
pub fn read(request: &CertificateSigningRequest) -> Result<ParsedRequest, CsrVerdict> {
    let spec = &request.spec;
    if spec.signer_name != NODE_SIGNER {
        return Err(CsrVerdict::Nothing);
    }
    let status = request.status.clone().unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default();
    let has = |kind: &str| {
        conditions.iter().find(|condition| condition.type_ == kind && condition.status == "True")
    };
    if has("Denied").is_some() || has("Failed").is_some() {
        return Err(CsrVerdict::Nothing);
    }
    let approved = has("Approved");
    let stage = if status.certificate.is_some_and(|certificate| !certificate.0.is_empty()) {
        RequestStage::Signed { at: approved.and_then(|it| it.last_update_time.as_ref()).map(|time| time.0) }
    } else if approved.is_some() {
        RequestStage::Approved
    } else {
        RequestStage::New
    };
    let requester = requester(
        spec.username.as_deref().unwrap_or_default(),
        spec.uid.as_deref().unwrap_or_default(),
        spec.groups.as_deref().unwrap_or_default(),
    );
    if matches!(stage, RequestStage::Signed { .. }) && !matches!(requester, Requester::Bootstrap(_)) {
        return Err(CsrVerdict::Nothing);
    }
    let wrong = |why| match stage {
        RequestStage::New => CsrVerdict::Deny(why),
        RequestStage::Approved => CsrVerdict::Fail(why),
        RequestStage::Signed { .. } => CsrVerdict::Nothing,
    };
    let identity = sign::read(&spec.request.0).map_err(|error| wrong(error.to_string()))?;
    let subject = subject_of(&identity).map_err(wrong)?;
    let mut usages = spec.usages.clone().unwrap_or_default();
    usages.sort_unstable();
    usages.dedup();
    Ok(ParsedRequest { subject, requester, key: identity.key, usages, stage })
}

/// Evaluates a request; `standing` and `life` are of the node it names, `token` is the one it was made with.
pub fn evaluate(
    asked: &ParsedRequest,
    standing: NodeMembership,
    life: Option<&str>,
    token: &TokenState,
    now: Timestamp,
) -> CsrVerdict {
    match asked.stage {
        RequestStage::New => match refusal(asked, standing, life, token) {
            Some(why) => CsrVerdict::Deny(why),
            None => CsrVerdict::Approve {
                claim: match token {
                    TokenState::Fresh(seen) => Some(seen.clone()),
                    TokenState::Gone | TokenState::Used { .. } => None,
                },
            },
        },
        // An approval does not excuse a wrong name, which was checked above: a person may approve the
        // requester, not the content.
        RequestStage::Approved => match outdated_reason(asked, standing, life, token) {
            Some(why) => CsrVerdict::Fail(why),
            None => CsrVerdict::Sign,
        },
        RequestStage::Signed { at } => match token {
            TokenState::Used { key, secret: seen, .. } if *key == asked.key => {
                let age = at.map_or(USED_TOKEN_TTL, |at| now.duration_since(at).unsigned_abs());
                if standing == NodeMembership::Reachable || age >= USED_TOKEN_TTL {
                    CsrVerdict::RemoveToken(seen.clone())
                } else {
                    CsrVerdict::Wait(POLL_INTERVAL)
                }
            }
            TokenState::Gone | TokenState::Fresh(_) | TokenState::Used { .. } => CsrVerdict::Nothing,
        },
    }
}

fn requester(user: &str, uid: &str, groups: &[String]) -> Requester {
    let in_group = |name: &str| groups.iter().any(|group| group == name);
    if let Some(id) = user.strip_prefix(BOOTSTRAP_USER).filter(|_| in_group(BOOTSTRAPPERS)) {
        return Requester::Bootstrap(id.to_owned());
    }
    if let Some(node) = user.strip_prefix(NODE_USER) {
        let life = (!uid.is_empty()).then(|| uid.to_owned());
        return Requester::Node { node: node.to_owned(), incarnation: life };
    }
    if let Some(node) = user.strip_prefix(NODE_ACCOUNT) {
        return Requester::Account(node.to_owned());
    }
    if user == GATEWAY_USER || user == GATEWAY_ACCOUNT {
        return Requester::Gateway;
    }
    Requester::Other(user.to_owned())
}

fn subject_of(identity: &RequestedIdentity) -> Result<CsrSubject, String> {
    let RequestedIdentity { common_name, organizations, dns_names, other_names, key: _ } = identity;
    let subject = if common_name == GATEWAY_USER {
        CsrSubject::Gateway
    } else if let Some(node) = common_name.strip_prefix(NODE_USER) {
        if !is_dns_name(node) {
            return Err(format!(
                "{node:?} is not a node name; use lower-case letters, digits, '-' and '.', at most 63 of each part"
            ));
        }
        CsrSubject::Node(node.to_owned())
    } else {
        return Err(format!(
            "the common name is {common_name:?}; a node's is {NODE_USER}NAME, the gateway's {GATEWAY_USER}"
        ));
    };
    let groups: Vec<&str> = subject.group().into_iter().collect();
    if *organizations != groups {
        return Err(format!("the organisation is {organizations:?}; that of {subject} is {groups:?}"));
    }
    let domain = subject.domain();
    if dns_names.as_slice() != [domain.as_str()] || *other_names > 0 {
        return Err(format!(
            "the certificate would be for {dns_names:?} and {other_names} other names; that of {subject} is for {domain} alone"
        ));
    }
    Ok(subject)
}

fn refusal(
    asked: &ParsedRequest,
    standing: NodeMembership,
    known: Option<&str>,
    token: &TokenState,
) -> Option<String> {
    let ParsedRequest { subject, requester, key, usages, stage: _ } = asked;
    if *usages != USAGES {
        return Some(format!("the usages are {usages:?}; those of {subject} are {USAGES:?}"));
    }
    match (subject, requester) {
        (CsrSubject::Node(node), Requester::Node { node: own, .. } | Requester::Account(own))
            if node == own =>
        {
            renewal_refusal(node, requester, standing, known)
        }
        (CsrSubject::Node(node), Requester::Bootstrap(id)) => {
            join_refusal(node, id, key, standing, known, token)
        }
        (CsrSubject::Gateway, Requester::Gateway) => None,
        (CsrSubject::Node(node), _) => Some(format!(
            "{} may not ask for the certificate of node {node}; join with a token, or ask as the node itself",
            requester_text(requester)
        )),
        (CsrSubject::Gateway, _) => Some(format!(
            "{} may not ask for the gateway's certificate; ask as {GATEWAY_USER} or as the ServiceAccount russet-system/russet-gateway",
            requester_text(requester)
        )),
    }
}

/// Why an approval is no longer valid: the incarnation it was for has ended, or its token was used by another
/// machine.
fn outdated_reason(
    asked: &ParsedRequest,
    standing: NodeMembership,
    known: Option<&str>,
    token: &TokenState,
) -> Option<String> {
    let ParsedRequest { subject, requester, key, .. } = asked;
    match (subject, requester, token) {
        (CsrSubject::Node(_), Requester::Bootstrap(id), TokenState::Fresh(_)) => Some(format!(
            "no machine was recorded for the token {id}.… before this request was approved; join again, and let the operator approve the request"
        )),
        (CsrSubject::Node(node), Requester::Bootstrap(id), _) => {
            join_refusal(node, id, key, standing, known, token)
        }
        (CsrSubject::Node(node), Requester::Node { .. } | Requester::Account(_), _) => {
            renewal_refusal(node, requester, standing, known)
        }
        (CsrSubject::Node(_), Requester::Gateway | Requester::Other(_), _) | (CsrSubject::Gateway, ..) => {
            None
        }
    }
}

fn renewal_refusal(
    node: &str,
    requester: &Requester,
    standing: NodeMembership,
    known: Option<&str>,
) -> Option<String> {
    match (standing, requester) {
        (NodeMembership::Unknown | NodeMembership::Leaving, _) => Some(format!(
            "node {node} has left the cluster; join it again with a new token of `russet token create`"
        )),
        (_, Requester::Node { incarnation: None, .. }) if known.is_some() => Some(format!(
            "another machine has joined as node {node} since, or an API server or operator of an older release answered in between: the node has an annotation russet.dev/life, and the request names none; bring the control plane to one release, then join again with a new token of `russet token create`, another machine under another --node-name"
        )),
        (_, Requester::Node { incarnation: life, .. }) if life.as_deref() != known => Some(format!(
            "another machine has joined as node {node} since; join this one under another --node-name, with a new token of `russet token create`"
        )),
        _ => None,
    }
}

fn join_refusal(
    node: &str,
    id: &str,
    key: &str,
    standing: NodeMembership,
    known: Option<&str>,
    token: &TokenState,
) -> Option<String> {
    match token {
        TokenState::Gone => {
            return Some(format!(
                "the token {id}.… is used up or was not made by `russet token create`; make a new one for this machine"
            ));
        }
        // The same machine repeats its request: it lost the answer, not its key. If another machine has
        // started a new incarnation since, it cannot end that without a new token.
        TokenState::Used { node: by, key: with, .. } if by == node && with == key => {
            if known == Some(key) {
                return None;
            }
        }
        TokenState::Used { node: by, .. } => {
            return Some(format!(
                "the token {id}.… was used by node {by}, and a token is good for one machine; make another one with `russet token create`"
            ));
        }
        TokenState::Fresh(_) => {}
    }
    match standing {
        NodeMembership::Reachable => Some(format!(
            "node {node} is joined and alive; choose another --node-name, or stop the other machine first"
        )),
        NodeMembership::Leaving => Some(format!("node {node} is still leaving; join again in a few minutes")),
        // With the name come its Shards, its files and the Secrets granted to it. The machine itself has its
        // key, or an administrator says that the name is free.
        NodeMembership::Unreachable if known != Some(key) => Some(format!(
            "node {node} has joined and is silent; choose another --node-name, or free the name with `kubectl delete inferencenode {node}` and join again with a new token of `russet token create`"
        )),
        NodeMembership::Unreachable | NodeMembership::Announced | NodeMembership::Unknown => None,
    }
}

fn requester_text(requester: &Requester) -> String {
    match requester {
        Requester::Bootstrap(id) => format!("a machine with the join token {id}.…"),
        Requester::Node { node, .. } | Requester::Account(node) => format!("node {node}"),
        Requester::Gateway => "the gateway".to_owned(),
        Requester::Other(user) => format!("{user:?}"),
    }
}

fn is_dns_name(name: &str) -> bool {
    name.len() <= 253 - NODE_DOMAIN.len()
        && name.split('.').all(|part| {
            let inner =
                part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
            inner && (1..=63).contains(&part.len()) && !part.starts_with('-') && !part.ends_with('-')
        })
}

#[cfg(test)]
mod tests;
