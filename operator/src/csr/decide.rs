//! What becomes of a certificate request. Pure: who asks is in the request, put there by the API
//! server; what is known of the node and of the token it asks with are arguments.
//!
//! ```text
//! asked ─▶ exactly a node's or the gateway's, and theirs to ask? ─yes─▶ Approved ─▶ signed ─▶ token removed
//!                └─ no ─▶ Denied                                          └─ not what it should be ─▶ Failed
//! ```
//!
//! A name may have several lives: a machine joins, leaves, and another one joins under the same name. The
//! key that a machine joins with begins a life; its certificates and its InferenceNode say which one, and
//! a certificate of an earlier life is not renewed. A ServiceAccount is made anew for every life instead.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use russet_crds::names::NODE_SIGNER;

use super::sign::{self, RequestedIdentity};
use super::token::{SecretVersion, TokenState};

/// Group of machines that hold a join token.
const BOOTSTRAPPERS: &str = "system:bootstrappers";
/// Beginning of such a machine's user; the token's id follows.
const BOOTSTRAP_USER: &str = "system:bootstrap:";
/// Group (O) of nodes; the data plane checks the same names.
pub const NODES_GROUP: &str = "russet:nodes";
/// Beginning of a node's user (CN).
const NODE_USER: &str = "russet:node:";
/// Beginning of a node's user where its certificate is no credential of the API server.
const NODE_ACCOUNT: &str = "system:serviceaccount:russet-nodes:";
/// End of the DNS name in a node's certificate.
const NODE_DOMAIN: &str = ".node.russet.dev";
/// The gateway's user (CN).
const GATEWAY_USER: &str = "russet:gateway";
/// The gateway's user where its certificate is no credential of the API server.
const GATEWAY_ACCOUNT: &str = "system:serviceaccount:russet-system:russet-gateway";
/// The DNS name in the gateway's certificate.
const GATEWAY_DOMAIN: &str = "gateway.russet.dev";
/// Usages of a certificate: a component is both ends of a connection.
const USAGES: [&str; 3] = ["client auth", "digital signature", "server auth"];
/// A token that was used is kept for so long, should its machine have to ask again.
const USED_TOKEN_TTL: Duration = Duration::from_secs(600);
/// Between two looks whether a machine that joined has shown itself.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Whose certificate it is to be.
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

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requester {
    /// A machine with the join token of that id.
    Bootstrap(String),
    /// A node with its certificate.
    Node {
        /// Its name.
        node: String,
        /// Its life, as the certificate has it; none in those of a control plane's own node and of older
        /// releases.
        incarnation: Option<String>,
    },
    /// A node as its ServiceAccount.
    Account(String),
    /// The gateway.
    Gateway,
    /// Anybody else.
    Other(String),
}

/// A request that is not finished, as far as it can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedRequest {
    /// Whose certificate it is to be.
    pub subject: CsrSubject,
    /// Who asks.
    pub requester: Requester,
    /// Digest of the public key.
    pub key: String,
    usages: Vec<String>,
    stage: RequestStage,
}

impl ParsedRequest {
    /// The life of the node that the certificate is for: the one it is renewed in, or one that begins.
    pub fn incarnation(&self) -> Option<&str> {
        match (&self.subject, &self.requester) {
            (CsrSubject::Gateway, _) | (_, Requester::Account(_)) => None,
            (CsrSubject::Node(_), Requester::Node { incarnation: life, .. }) => life.as_deref(),
            (CsrSubject::Node(_), _) => Some(&self.key),
        }
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestStage {
    New,
    Approved,
    Signed { at: Option<Timestamp> },
}

/// How a node stands with the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeMembership {
    /// Nobody of that name has joined, or it has left.
    Unknown,
    /// It has joined and is silent.
    Unreachable,
    /// It has joined and its agent is alive.
    Reachable,
    /// It is being removed.
    Leaving,
}

/// What to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrVerdict {
    /// It is another signer's, or there is nothing left to do.
    Nothing,
    /// It is right; the token, if there is one, is written down as used first.
    Approve {
        /// A token that nobody has used yet.
        claim: Option<SecretVersion>,
    },
    /// It was approved, here or by a person.
    Sign,
    /// It is not what it should be.
    Deny(String),
    /// It is not what it should be, and is approved already, so that it cannot be denied any more.
    Fail(String),
    /// Its node has shown itself, or had its time: the token has done its work.
    RemoveToken(SecretVersion),
    /// Its node has yet to show itself.
    Wait(Duration),
}

/// Reads a request; what need not be looked into is a verdict already.
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

/// Judges a request; `standing` and `life` are of the node it names, `token` is the one it was asked with.
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
        // An approval does not excuse a wrong name, which was read above: a person may approve who,
        // not what.
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
    let in_group = |wanted: &str| groups.iter().any(|group| group == wanted);
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
                "{node:?} is no node name; use lower-case letters, digits, '-' and '.', at most 63 of each part"
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

fn refusal(asked: &ParsedRequest, standing: NodeMembership, known: Option<&str>, token: &TokenState) -> Option<String> {
    let ParsedRequest { subject, requester, key, usages, stage: _ } = asked;
    if *usages != USAGES {
        return Some(format!("the usages are {usages:?}; those of {subject} are {USAGES:?}"));
    }
    match (subject, requester) {
        (CsrSubject::Node(node), Requester::Node { node: own, .. } | Requester::Account(own)) if node == own => {
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

/// Why an approval counts no more: since then the life it was for has ended, or its token is another's.
fn outdated_reason(asked: &ParsedRequest, standing: NodeMembership, known: Option<&str>, token: &TokenState) -> Option<String> {
    let ParsedRequest { subject, requester, key, .. } = asked;
    match (subject, requester, token) {
        (CsrSubject::Node(_), Requester::Bootstrap(id), TokenState::Fresh(_)) => Some(format!(
            "nobody wrote down which machine uses the token {id}.… before this was approved; join again, and leave the approval to the operator"
        )),
        (CsrSubject::Node(node), Requester::Bootstrap(id), _) => {
            join_refusal(node, id, key, standing, known, token)
        }
        (CsrSubject::Node(node), Requester::Node { .. } | Requester::Account(_), _) => {
            renewal_refusal(node, requester, standing, known)
        }
        (CsrSubject::Node(_), Requester::Gateway | Requester::Other(_), _) | (CsrSubject::Gateway, ..) => None,
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
            "another machine has joined as node {node} since, or an API server or operator of an older release answered in between: the node has a life, and the request says none; bring the control plane to one release, then join again with a new token of `russet token create`, another machine under another --node-name"
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
        // The same machine asks again: it lost the answer, not its key. A life of another machine that has
        // begun since it ends no more easily than with a new token.
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
        NodeMembership::Unreachable | NodeMembership::Unknown => None,
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
