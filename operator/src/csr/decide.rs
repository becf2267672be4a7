//! What becomes of a certificate request. Pure: who asks is in the request, put there by the API
//! server, and whether a node of that name is alive is an argument.
//!
//! ```text
//! asked ─▶ exactly a node's? ─yes─▶ Approved ─▶ signed
//!                └─ no ─▶ Denied
//! ```

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use russet_crds::names::NODE_SIGNER;

use super::sign::{self, Identity};

/// Group of machines that hold a join token.
const BOOTSTRAPPERS: &str = "system:bootstrappers";
/// Group (O) of nodes; the data plane checks the same names.
pub const NODES_GROUP: &str = "russet:nodes";
/// Beginning of a node's user (CN).
const NODE_USER: &str = "russet:node:";
/// End of the DNS name in a node's certificate.
const NODE_DOMAIN: &str = ".node.russet.dev";
/// Usages a node may have: it is both ends of a connection.
const USAGES: [&str; 3] = ["client auth", "digital signature", "server auth"];

/// What to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is another signer's, or answered.
    Nothing,
    /// It is a node's and right.
    Approve {
        /// The node.
        node: String,
    },
    /// It was approved, here or by a person.
    Sign {
        /// The node.
        node: String,
    },
    /// It is not what it should be.
    Deny(String),
}

/// The user a node acts as.
pub fn user_of(node: &str) -> String {
    format!("{NODE_USER}{node}")
}

/// The DNS name of a node's certificate.
pub fn domain_of(node: &str) -> String {
    format!("{node}{NODE_DOMAIN}")
}

/// Judges a request; `alive` tells whether a node of that name is joined and reachable.
pub fn decide(request: &CertificateSigningRequest, alive: impl Fn(&str) -> bool) -> Verdict {
    if request.spec.signer_name != NODE_SIGNER {
        return Verdict::Nothing;
    }
    let status = request.status.clone().unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default();
    let has =
        |kind: &str| conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True");
    if status.certificate.is_some_and(|certificate| !certificate.0.is_empty())
        || has("Denied")
        || has("Failed")
    {
        return Verdict::Nothing;
    }
    let identity = match sign::read(&request.spec.request.0) {
        Ok(identity) => identity,
        Err(error) => return Verdict::Deny(error.to_string()),
    };
    let node = match node_of(&identity) {
        Ok(node) => node,
        Err(why) => return Verdict::Deny(why),
    };
    // An approval does not excuse a wrong name: a person may approve who, not what.
    if has("Approved") {
        return Verdict::Sign { node };
    }
    match refusal(request, &node, alive) {
        Some(why) => Verdict::Deny(why),
        None => Verdict::Approve { node },
    }
}

fn node_of(identity: &Identity) -> Result<String, String> {
    let Identity { common_name, organizations, dns_names, other_names } = identity;
    let Some(node) = common_name.strip_prefix(NODE_USER) else {
        return Err(format!("the common name is {common_name:?}; a node's is {NODE_USER}NAME"));
    };
    if !is_dns_name(node) {
        return Err(format!(
            "{node:?} is no node name; use lower-case letters, digits, '-' and '.', at most 63 of each part"
        ));
    }
    if organizations.as_slice() != [NODES_GROUP] {
        return Err(format!("the organisation is {organizations:?}; a node's is {NODES_GROUP}"));
    }
    let domain = domain_of(node);
    if dns_names.as_slice() != [domain.as_str()] || *other_names > 0 {
        return Err(format!(
            "the certificate would be for {dns_names:?} and {other_names} other names; a node's is for {domain} alone"
        ));
    }
    Ok(node.to_owned())
}

fn refusal(request: &CertificateSigningRequest, node: &str, alive: impl Fn(&str) -> bool) -> Option<String> {
    let spec = &request.spec;
    let mut usages = spec.usages.clone().unwrap_or_default();
    usages.sort_unstable();
    usages.dedup();
    if usages != USAGES {
        return Some(format!("the usages are {usages:?}; a node's are {USAGES:?}"));
    }
    let user = spec.username.as_deref().unwrap_or_default();
    if user == user_of(node) {
        return None;
    }
    let groups = spec.groups.clone().unwrap_or_default();
    if !groups.iter().any(|group| group == BOOTSTRAPPERS) {
        return Some(format!(
            "{user:?} may not ask for the certificate of node {node}; join with a token, or ask as the node itself"
        ));
    }
    if alive(node) {
        return Some(format!(
            "node {node} is joined and alive; choose another --node-name, or stop the other machine first"
        ));
    }
    None
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
mod tests {
    use k8s_openapi::ByteString;
    use k8s_openapi::api::certificates::v1::{
        CertificateSigningRequestCondition, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
    };
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn pem(name: &str, organization: &str, domains: &[&str]) -> Vec<u8> {
        let domains: Vec<String> = domains.iter().map(|domain| (*domain).to_owned()).collect();
        let mut params = CertificateParams::new(domains).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.distinguished_name.push(DnType::OrganizationName, organization);
        let key = KeyPair::generate().unwrap();
        params.serialize_request(&key).unwrap().pem().unwrap().into_bytes()
    }

    fn request(pem: Vec<u8>, user: &str, group: &str, usages: &[&str]) -> CertificateSigningRequest {
        CertificateSigningRequest {
            spec: CertificateSigningRequestSpec {
                request: ByteString(pem),
                signer_name: NODE_SIGNER.to_owned(),
                username: Some(user.to_owned()),
                groups: Some(vec![group.to_owned(), "system:authenticated".to_owned()]),
                usages: Some(usages.iter().map(|usage| (*usage).to_owned()).collect()),
                ..CertificateSigningRequestSpec::default()
            },
            ..CertificateSigningRequest::default()
        }
    }

    const TOKEN: &str = "system:bootstrap:abcdef";
    const RIGHT: [&str; 3] = ["digital signature", "client auth", "server auth"];

    #[test]
    fn only_a_request_that_is_exactly_a_nodes_is_approved() {
        let right = || pem("russet:node:a", "russet:nodes", &["a.node.russet.dev"]);
        for (story, pem, user, group, usages, want) in [
            ("a joining node", right(), TOKEN, BOOTSTRAPPERS, &RIGHT[..], Ok("a")),
            ("a node renewing itself", right(), "russet:node:a", "russet:nodes", &RIGHT, Ok("a")),
            (
                "another node",
                right(),
                "russet:node:b",
                "russet:nodes",
                &RIGHT,
                Err("may not ask for the certificate of node a"),
            ),
            ("anybody", right(), "jane", "system:authenticated", &RIGHT, Err("join with a token")),
            (
                "an administrator",
                pem("admin", "system:masters", &[]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("the common name is \"admin\""),
            ),
            (
                "a node in a wrong group",
                pem("russet:node:a", "system:masters", &["a.node.russet.dev"]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("the organisation is"),
            ),
            (
                "a node with another's domain",
                pem("russet:node:a", "russet:nodes", &["b.node.russet.dev"]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("a node's is for a.node.russet.dev alone"),
            ),
            (
                "a node with one domain too many",
                pem("russet:node:a", "russet:nodes", &["a.node.russet.dev", "bank.example"]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("alone"),
            ),
            (
                "a node with an address",
                pem("russet:node:a", "russet:nodes", &["a.node.russet.dev", "10.0.0.1"]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("1 other names"),
            ),
            (
                "a strange name",
                pem("russet:node:A/b", "russet:nodes", &[]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("is no node name"),
            ),
            (
                "too many usages",
                right(),
                TOKEN,
                BOOTSTRAPPERS,
                &["client auth", "cert sign"],
                Err("the usages are"),
            ),
            ("noise", b"noise".to_vec(), TOKEN, BOOTSTRAPPERS, &RIGHT, Err("not a certificate request")),
            (
                "a name that is taken",
                pem("russet:node:taken", "russet:nodes", &["taken.node.russet.dev"]),
                TOKEN,
                BOOTSTRAPPERS,
                &RIGHT,
                Err("node taken is joined and alive"),
            ),
        ] {
            let verdict = decide(&request(pem, user, group, usages), |node| node == "taken");
            match (want, verdict) {
                (Ok(node), Verdict::Approve { node: got }) => assert_eq!(got, node),
                (Err(text), Verdict::Deny(why)) => assert!(why.contains(text), "{story}: {why}"),
                (_, verdict) => panic!("{story}: {verdict:?}"),
            }
        }
    }

    #[test]
    fn what_is_answered_or_anothers_is_left_alone_and_what_is_approved_is_signed() {
        let pem = pem("russet:node:a", "russet:nodes", &["a.node.russet.dev"]);
        let base = request(pem, TOKEN, BOOTSTRAPPERS, &RIGHT);
        let with = |kind: &str, certificate: Option<&str>| {
            let mut request = base.clone();
            let condition = CertificateSigningRequestCondition {
                type_: kind.to_owned(),
                status: "True".to_owned(),
                ..CertificateSigningRequestCondition::default()
            };
            request.status = Some(CertificateSigningRequestStatus {
                conditions: Some(vec![condition]),
                certificate: certificate.map(|text| ByteString(text.as_bytes().to_vec())),
            });
            request
        };
        assert_eq!(decide(&with("Approved", None), |_| true), Verdict::Sign { node: "a".to_owned() });
        assert_eq!(decide(&with("Approved", Some("done")), |_| false), Verdict::Nothing);
        assert_eq!(decide(&with("Denied", None), |_| false), Verdict::Nothing);
        let mut other = base.clone();
        other.spec.signer_name = "kubernetes.io/kubelet-serving".to_owned();
        assert_eq!(decide(&other, |_| false), Verdict::Nothing);
    }

    #[test]
    fn names_are_those_the_data_plane_checks() {
        assert_eq!(NODES_GROUP, russet_rpc::tls::NODES_GROUP);
        assert_eq!(user_of("a"), russet_rpc::tls::node_user("a"));
        assert_eq!(domain_of("a"), russet_rpc::tls::node_dns_name("a"));
    }
}
