//! Requests of all requesters for all subjects, and the verdicts.

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequestCondition, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rcgen::{CertificateParams, DnType, KeyPair};

use super::*;

fn pem(name: &str, organization: &str, domains: &[&str]) -> Vec<u8> {
    let domains: Vec<String> = domains.iter().map(|domain| (*domain).to_owned()).collect();
    let mut params = CertificateParams::new(domains).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if !organization.is_empty() {
        params.distinguished_name.push(DnType::OrganizationName, organization);
    }
    let key = KeyPair::generate().unwrap();
    params.serialize_request(&key).unwrap().pem().unwrap().into_bytes()
}

fn node_pem(node: &str) -> Vec<u8> {
    pem(&format!("russet:node:{node}"), "russet:nodes", &[&format!("{node}.node.russet.dev")])
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

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn condition(kind: &str, second: i64) -> CertificateSigningRequestCondition {
    CertificateSigningRequestCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        last_update_time: Some(Time(at(second))),
        ..CertificateSigningRequestCondition::default()
    }
}

fn approved() -> Option<CertificateSigningRequestStatus> {
    let conditions = Some(vec![condition("Approved", 0)]);
    Some(CertificateSigningRequestStatus { conditions, certificate: None })
}

fn decide(request: &CertificateSigningRequest, standing: NodeMembership, token: &TokenState) -> CsrVerdict {
    match read(request) {
        Ok(asked) => evaluate(&asked, standing, None, token, at(0)),
        Err(verdict) => verdict,
    }
}

const TOKEN: &str = "system:bootstrap:abcdef";
const RIGHT: [&str; 3] = ["digital signature", "client auth", "server auth"];

fn fresh() -> TokenState {
    TokenState::Fresh(SecretVersion::default())
}

#[test]
fn csr_is_approved_only_when_exact_and_for_its_own_subject() {
    use NodeMembership::{Announced, Leaving, Reachable, Unknown, Unreachable};
    let gateway = || pem("russet:gateway", "", &["gateway.russet.dev"]);
    let account = "system:serviceaccount:russet-nodes:a";
    let accounts = "system:serviceaccounts:russet-nodes";
    let nodes = "russet:nodes";
    for (story, pem, user, group, usages, standing, expected) in [
        ("a joining node", node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT[..], Unknown, Ok(())),
        ("a node that is announced", node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT, Announced, Ok(())),
        (
            "the name of a silent node",
            node_pem("a"),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unreachable,
            Err("kubectl delete inferencenode a"),
        ),
        ("a node renews itself", node_pem("a"), "russet:node:a", nodes, &RIGHT, Reachable, Ok(())),
        (
            "a node renews itself as its ServiceAccount",
            node_pem("a"),
            account,
            accounts,
            &RIGHT,
            Reachable,
            Ok(()),
        ),
        (
            "a node that has left",
            node_pem("a"),
            "russet:node:a",
            nodes,
            &RIGHT,
            Unknown,
            Err("node a has left the cluster"),
        ),
        ("a node that is leaving", node_pem("a"), account, accounts, &RIGHT, Leaving, Err("new token")),
        (
            "another node",
            node_pem("a"),
            "russet:node:b",
            nodes,
            &RIGHT,
            Reachable,
            Err("node b may not ask for the certificate of node a"),
        ),
        (
            "another node's account",
            node_pem("b"),
            account,
            accounts,
            &RIGHT,
            Reachable,
            Err("node a may not ask"),
        ),
        (
            "anybody",
            node_pem("a"),
            "jane",
            "system:authenticated",
            &RIGHT,
            Unreachable,
            Err("join with a token"),
        ),
        (
            "a bootstrap name without its group",
            node_pem("a"),
            TOKEN,
            "x",
            &RIGHT,
            Unreachable,
            Err("join with a token"),
        ),
        (
            "an administrator's name",
            pem("admin", "system:masters", &[]),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("the common name is \"admin\""),
        ),
        (
            "a wrong group",
            pem("russet:node:a", "system:masters", &["a.node.russet.dev"]),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("the organisation is"),
        ),
        (
            "another's domain",
            pem("russet:node:a", nodes, &["b.node.russet.dev"]),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("is for a.node.russet.dev alone"),
        ),
        (
            "one domain too many",
            pem("russet:node:a", nodes, &["a.node.russet.dev", "bank.example"]),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("alone"),
        ),
        (
            "an address",
            pem("russet:node:a", nodes, &["a.node.russet.dev", "10.0.0.1"]),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("1 other names"),
        ),
        (
            "a strange name",
            pem("russet:node:A/b", nodes, &[]),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("is not a node name"),
        ),
        (
            "too many usages",
            node_pem("a"),
            TOKEN,
            BOOTSTRAPPERS,
            &["client auth", "cert sign"],
            Unknown,
            Err("the usages are"),
        ),
        ("noise", b"noise".to_vec(), TOKEN, BOOTSTRAPPERS, &RIGHT, Unknown, Err("not a certificate request")),
        (
            "a name that is taken",
            node_pem("a"),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Reachable,
            Err("node a is joined and alive"),
        ),
        ("a name that is going", node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT, Leaving, Err("still leaving")),
        ("the gateway", gateway(), "russet:gateway", "x", &RIGHT, Unknown, Ok(())),
        ("the gateway as its ServiceAccount", gateway(), GATEWAY_ACCOUNT, "x", &RIGHT, Unknown, Ok(())),
        (
            "a joining gateway",
            gateway(),
            TOKEN,
            BOOTSTRAPPERS,
            &RIGHT,
            Unknown,
            Err("may not ask for the gateway's certificate"),
        ),
        (
            "a node as the gateway",
            gateway(),
            "russet:node:a",
            nodes,
            &RIGHT,
            Reachable,
            Err("node a may not ask for the gateway's"),
        ),
        (
            "the gateway as a node",
            node_pem("a"),
            "russet:gateway",
            "x",
            &RIGHT,
            Reachable,
            Err("the gateway may not ask"),
        ),
        (
            "the gateway among the nodes",
            pem("russet:gateway", nodes, &["gateway.russet.dev"]),
            "russet:gateway",
            "x",
            &RIGHT,
            Unknown,
            Err("the organisation is"),
        ),
        (
            "the gateway with a node's domain",
            pem("russet:gateway", "", &["a.node.russet.dev"]),
            "russet:gateway",
            "x",
            &RIGHT,
            Unknown,
            Err("gateway.russet.dev alone"),
        ),
    ] {
        match (expected, decide(&request(pem, user, group, usages), standing, &fresh())) {
            (Ok(()), CsrVerdict::Approve { .. }) => {}
            (Err(text), CsrVerdict::Deny(why)) => assert!(why.contains(text), "{story}: {why}"),
            (_, verdict) => panic!("{story}: {verdict:?}"),
        }
    }
}

#[test]
fn certificate_renews_only_within_its_node_incarnation() {
    let (node, account) = ("russet:node:a", "system:serviceaccount:russet-nodes:a");
    for (story, user, uid, known, standing, expected) in [
        ("the machine that joined", node, "one", Some("one"), NodeMembership::Reachable, Ok(Some("one"))),
        ("the same, silent for long", node, "one", Some("one"), NodeMembership::Unreachable, Ok(Some("one"))),
        (
            "an earlier machine of the name",
            node,
            "one",
            Some("two"),
            NodeMembership::Reachable,
            Err("another machine"),
        ),
        (
            "the same, the new one being off",
            node,
            "one",
            Some("two"),
            NodeMembership::Unreachable,
            Err("another machine"),
        ),
        (
            "an older release's, the name joined anew",
            node,
            "",
            Some("two"),
            NodeMembership::Reachable,
            Err("of an older release"),
        ),
        (
            "a joined machine, the name now a control plane's",
            node,
            "one",
            None,
            NodeMembership::Reachable,
            Err("another machine"),
        ),
        ("a control plane's own, or an older release's", node, "", None, NodeMembership::Reachable, Ok(None)),
        (
            "an earlier machine, the name being free",
            node,
            "one",
            None,
            NodeMembership::Unknown,
            Err("has left"),
        ),
        (
            "an account, whose UID is its own",
            account,
            "uid",
            Some("two"),
            NodeMembership::Reachable,
            Ok(None),
        ),
    ] {
        let mut request = request(node_pem("a"), user, "x", &RIGHT);
        request.spec.uid = Some(uid.to_owned());
        let asked = read(&request).unwrap();
        match (expected, evaluate(&asked, standing, known, &TokenState::Gone, at(0))) {
            (Ok(life), CsrVerdict::Approve { claim: None }) => {
                assert_eq!(asked.incarnation(), life, "{story}")
            }
            (Err(text), CsrVerdict::Deny(why)) => assert!(why.contains(text), "{story}: {why}"),
            (_, verdict) => panic!("{story}: {verdict:?}"),
        }
        // An incarnation may end between the approval and the signature.
        request.status = approved();
        match (expected, evaluate(&read(&request).unwrap(), standing, known, &TokenState::Gone, at(0))) {
            (Ok(_), CsrVerdict::Sign) => {}
            (Err(text), CsrVerdict::Fail(why)) => assert!(why.contains(text), "{story}, approved: {why}"),
            (_, verdict) => panic!("{story}, approved: {verdict:?}"),
        }
    }
    let joining = read(&request(node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT)).unwrap();
    assert_eq!(joining.incarnation(), Some(joining.key.as_str()), "the key of a join begins a life");
}

#[test]
fn join_token_serves_one_machine_only() {
    let request = request(node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT);
    let key = read(&request).unwrap().key;
    let used = |node: &str, key: &str| TokenState::Used {
        node: node.into(),
        key: key.into(),
        secret: SecretVersion::default(),
    };
    for (story, token, standing, expected) in [
        ("nobody used it", fresh(), NodeMembership::Unknown, Ok(true)),
        ("the same machine asks again", used("a", &key), NodeMembership::Unreachable, Ok(false)),
        (
            "the same machine asks again while it already runs",
            used("a", &key),
            NodeMembership::Reachable,
            Ok(false),
        ),
        (
            "another machine of the same name",
            used("a", "sha256:other"),
            NodeMembership::Unreachable,
            Err("was used by node a"),
        ),
        ("another node", used("b", "sha256:other"), NodeMembership::Unknown, Err("was used by node b")),
        (
            "another node with the same key",
            used("b", &key),
            NodeMembership::Unknown,
            Err("was used by node b"),
        ),
        (
            "used up, or another's",
            TokenState::Gone,
            NodeMembership::Unknown,
            Err("is used up or was not made by"),
        ),
    ] {
        // A known node is in the incarnation that this key started.
        let life = (standing != NodeMembership::Unknown).then_some(key.as_str());
        match (expected, evaluate(&read(&request).unwrap(), standing, life, &token, at(0))) {
            (Ok(claims), CsrVerdict::Approve { claim }) => assert_eq!(claim.is_some(), claims, "{story}"),
            (Err(text), CsrVerdict::Deny(why)) => {
                assert!(why.contains(text) && why.contains("abcdef"), "{story}: {why}");
                assert!(why.contains("russet token create"), "{story}: {why}");
            }
            (_, verdict) => panic!("{story}: {verdict:?}"),
        }
    }
}

#[test]
fn approved_join_is_signed_only_for_the_tokens_recorded_node() {
    let mut request = request(node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT);
    request.status = approved();
    let asked = read(&request).unwrap();
    let own = asked.key.as_str();
    let used = |node: &str, key: &str| TokenState::Used {
        node: node.into(),
        key: key.into(),
        secret: SecretVersion::default(),
    };
    for (story, token, standing, life, expected) in [
        ("the first of its name", used("a", own), NodeMembership::Unknown, None, Ok(())),
        (
            "the machine itself, silent for long",
            used("a", own),
            NodeMembership::Unreachable,
            Some(own),
            Ok(()),
        ),
        (
            "a name that is silent",
            used("a", own),
            NodeMembership::Unreachable,
            Some("other"),
            Err("kubectl delete inferencenode a"),
        ),
        ("its life has begun already", used("a", own), NodeMembership::Reachable, Some(own), Ok(())),
        (
            "another joined since",
            used("a", own),
            NodeMembership::Reachable,
            Some("other"),
            Err("joined and alive"),
        ),
        ("a person was faster", fresh(), NodeMembership::Unknown, None, Err("no machine was recorded")),
        ("the token was taken back", TokenState::Gone, NodeMembership::Unknown, None, Err("is used up")),
        (
            "another key's token",
            used("a", "other"),
            NodeMembership::Unreachable,
            None,
            Err("was used by node a"),
        ),
        ("another node's token", used("b", own), NodeMembership::Unknown, None, Err("was used by node b")),
    ] {
        match (expected, evaluate(&asked, standing, life, &token, at(0))) {
            (Ok(()), CsrVerdict::Sign) => {}
            (Err(text), CsrVerdict::Fail(why)) => assert!(why.contains(text), "{story}: {why}"),
            (_, verdict) => panic!("{story}: {verdict:?}"),
        }
    }
    request.spec.username = Some("jane".to_owned());
    let verdict = evaluate(
        &read(&request).unwrap(),
        NodeMembership::Reachable,
        Some("other"),
        &TokenState::Gone,
        at(0),
    );
    assert_eq!(verdict, CsrVerdict::Sign, "a person may approve who");
}

#[test]
fn finished_or_foreign_csrs_are_ignored_and_approved_are_signed() {
    let base = request(node_pem("a"), TOKEN, BOOTSTRAPPERS, &RIGHT);
    let key = read(&base).unwrap().key;
    let with = |kind: &str, certificate: Option<&str>, second: i64| {
        let mut request = base.clone();
        request.status = Some(CertificateSigningRequestStatus {
            conditions: Some(vec![condition(kind, second)]),
            certificate: certificate.map(|text| ByteString(text.as_bytes().to_vec())),
        });
        request
    };
    let used = TokenState::Used { node: "a".into(), key, secret: SecretVersion::default() };
    let other = TokenState::Used { node: "a".into(), key: "other".into(), secret: SecretVersion::default() };
    for (story, request, standing, token, expected) in [
        ("approved", with("Approved", None, 0), NodeMembership::Unknown, &used, CsrVerdict::Sign),
        (
            "signed, the node is not there yet",
            with("Approved", Some("x"), -5),
            NodeMembership::Unreachable,
            &used,
            CsrVerdict::Wait(POLL_INTERVAL),
        ),
        (
            "signed, the node is there",
            with("Approved", Some("x"), -5),
            NodeMembership::Reachable,
            &used,
            CsrVerdict::RemoveToken(SecretVersion::default()),
        ),
        (
            "signed, the node never came",
            with("Approved", Some("x"), -600),
            NodeMembership::Unreachable,
            &used,
            CsrVerdict::RemoveToken(SecretVersion::default()),
        ),
        (
            "signed, the token is gone",
            with("Approved", Some("x"), 0),
            NodeMembership::Reachable,
            &TokenState::Gone,
            CsrVerdict::Nothing,
        ),
        (
            "signed, the token is another's",
            with("Approved", Some("x"), 0),
            NodeMembership::Reachable,
            &other,
            CsrVerdict::Nothing,
        ),
        ("denied", with("Denied", None, 0), NodeMembership::Unknown, &fresh(), CsrVerdict::Nothing),
        ("failed", with("Failed", None, 0), NodeMembership::Unknown, &fresh(), CsrVerdict::Nothing),
    ] {
        assert_eq!(decide(&request, standing, token), expected, "{story}");
    }
    let mut other = base.clone();
    other.spec.signer_name = "kubernetes.io/kubelet-serving".to_owned();
    assert_eq!(decide(&other, NodeMembership::Unknown, &fresh()), CsrVerdict::Nothing);
    let mut wrong = with("Approved", None, 0);
    wrong.spec.request = ByteString(pem("admin", "system:masters", &[]));
    assert!(
        matches!(decide(&wrong, NodeMembership::Reachable, &used), CsrVerdict::Fail(_)),
        "a person may approve who, not what; and what is approved can only fail"
    );
    let mut wrong = with("Approved", Some("x"), 0);
    wrong.spec.request = ByteString(pem("admin", "system:masters", &[]));
    assert_eq!(
        decide(&wrong, NodeMembership::Reachable, &used),
        CsrVerdict::Nothing,
        "another signer was faster"
    );
}

#[test]
fn names_are_those_the_data_plane_checks() {
    use russet_rpc::tls;
    assert_eq!(NODES_GROUP, tls::NODES_GROUP);
    let node = CsrSubject::Node("a".into());
    assert_eq!((node.user(), node.domain()), (tls::node_user("a"), tls::node_dns_name("a")));
    let gateway = (tls::GATEWAY_USER.to_owned(), tls::GATEWAY_DNS_NAME.to_owned());
    assert_eq!((CsrSubject::Gateway.user(), CsrSubject::Gateway.domain()), gateway);
}
