//! Joining: one token per machine, its certificate, and its objects until it leaves.

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::Patch;
use kube::{Api, Client, ResourceExt as _};
use rcgen::{CertificateParams, DnType, KeyPair};
use russet_crds::InferenceNode;
use russet_crds::conditions::{Type, is_true};
use russet_operator::node_accounts::Credential;
use russet_rpc::tls;
use serde_json::json;

use crate::harness::{ClusterHarness, GIB, until};

/// Requests the certificate of `user` as `client`; returns it in PEM, or why it was denied.
async fn ask(
    client: &Client,
    user: &str,
    group: Option<&str>,
    domain: &str,
    key: &KeyPair,
) -> Result<String, String> {
    let mut params = CertificateParams::new(vec![domain.to_owned()]).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    let pem = params.serialize_request(key).unwrap().pem().unwrap();
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"generateName": "test-"},
        "spec": {"request": ByteString(pem.into_bytes()), "signerName": "russet.dev/node",
                 "usages": ["digital signature", "client auth", "server auth"]},
    });
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let made = requests.create(&Default::default(), &serde_json::from_value(request).unwrap()).await.unwrap();
    let name = made.metadata.name.unwrap();
    until("the request is answered", || async {
        let status = requests.get(&name).await.ok()?.status?;
        if let Some(certificate) = status.certificate.filter(|it| !it.0.is_empty()) {
            return Some(Ok(String::from_utf8(certificate.0).unwrap()));
        }
        let denied = status.conditions.unwrap_or_default().into_iter().find(|it| it.type_ == "Denied")?;
        Some(Err(denied.message.unwrap()))
    })
    .await
}

async fn ask_node(client: &Client, node: &str, key: &KeyPair) -> Result<String, String> {
    ask(client, &tls::node_user(node), Some(tls::NODES_GROUP), &tls::node_dns_name(node), key).await
}

fn subject(pem: &str) -> String {
    let (_, der) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
    der.parse_x509().unwrap().subject().to_string()
}

async fn gone<K>(what: &str, api: Api<K>, name: &str)
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    until(what, || async { matches!(api.get_opt(name).await, Ok(None)).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_joins_with_its_own_token_and_leaves_no_objects() {
    let mut cluster = ClusterHarness::start(&[("a", GIB)]).await;
    let admin = cluster.admin.clone();
    let lifetime = jiff::SignedDuration::from_hours(1);
    let token = russet_operator::join_tokens::create(&admin, lifetime).await.unwrap();
    let user = format!("system:bootstrap:{}", token.id);
    let joiner = cluster.client(&user, "system:bootstrappers").await;
    let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());

    // A reachable node's name is not given away, and the token is not spent on it.
    let nodes: Api<InferenceNode> = Api::all(admin.clone());
    until("node a is reachable", || async {
        let status = nodes.get("a").await.ok()?.status?;
        is_true(&status.conditions, Type::Reachable).then_some(())
    })
    .await;
    assert!(ask_node(&joiner, "a", &other).await.unwrap_err().contains("node a is joined and alive"));
    let wrong = ask(&joiner, "russet:node:new", Some("system:masters"), "new.node.russet.dev", &key).await;
    assert!(wrong.unwrap_err().contains("the organisation is"));

    // The correct request, twice: the response to the first was lost.
    let mut certificate = ask_node(&joiner, "new", &key).await.unwrap();
    let life = subject(&certificate);
    assert!(
        life.starts_with("O=russet:nodes, CN=russet:node:new, OID(1.3.6.1.4.1.57683.2)=sha256:"),
        "{life}"
    );
    certificate = ask_node(&joiner, "new", &key).await.unwrap();
    assert_eq!(subject(&certificate), life);
    // The same token for another key or another name.
    for (node, key) in [("new", &other), ("third", &other), ("third", &key)] {
        let why = ask_node(&joiner, node, key).await.unwrap_err();
        assert!(why.contains("was used by node new"), "{why}");
    }
    assert!(nodes.get_opt("third").await.unwrap().is_none());
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), "russet-nodes");
    let bindings: Api<RoleBinding> = Api::namespaced(admin.clone(), "russet-nodes");
    accounts.get("new").await.unwrap();
    let subjects = |binding: RoleBinding| -> Vec<String> {
        binding.subjects.unwrap_or_default().into_iter().map(|subject| subject.name).collect()
    };
    assert_eq!(subjects(bindings.get("new").await.unwrap()), ["new".to_owned(), user]);
    // A token grants nothing else.
    assert!(Api::<InferenceNode>::all(joiner).list(&Default::default()).await.is_err());

    // The node's agent appears, and the token is deleted with everything that it owns.
    cluster.start_agent("new", GIB).await;
    let name = format!("bootstrap-token-{}", token.id);
    gone("the token is removed", Api::<Secret>::namespaced(admin.clone(), "kube-system"), &name).await;
    gone("so is what it let the operator see", Api::<Role>::namespaced(admin.clone(), "kube-system"), &name)
        .await;
    assert_eq!(subjects(bindings.get("new").await.unwrap()), ["new"]);

    // It renews its certificate while it exists; another user with only its name cannot.
    let namesake = cluster.client(&tls::node_user("new"), tls::NODES_GROUP).await;
    let why = ask_node(&namesake, "new", &other).await.unwrap_err();
    assert!(why.contains("another machine has joined as node new"), "{why}");
    let node = cluster.certified(&certificate, &key.serialize_pem()).await;
    let renewed = ask_node(&node, "new", &other).await.unwrap();
    assert_eq!(subject(&renewed), life, "it goes on with the same life");
    let own: Api<InferenceNode> = Api::all(node.clone());
    assert!(own.create(&Default::default(), &InferenceNode::new("more", Default::default())).await.is_err());
    own.delete("new", &Default::default()).await.unwrap();
    gone("the node has left", nodes.clone(), "new").await;
    cluster.stop_agent("new");
    gone("its ServiceAccount is gone", accounts, "new").await;
    gone("its right to tokens is gone", bindings, "new").await;
    let why = ask_node(&node, "new", &other).await.unwrap_err();
    assert!(why.contains("node new has left the cluster"), "{why}");

    // Another machine takes the name: the certificate of the first one is still valid, and not renewed.
    let token = russet_operator::join_tokens::create(&admin, lifetime).await.unwrap();
    let joiner = cluster.client(&format!("system:bootstrap:{}", token.id), "system:bootstrappers").await;
    let second = KeyPair::generate().unwrap();
    let certificate = ask_node(&joiner, "new", &second).await.unwrap();
    assert_ne!(subject(&certificate), life);
    let why = ask_node(&node, "new", &other).await.unwrap_err();
    assert!(why.contains("another machine has joined as node new"), "{why}");
    let node = cluster.certified(&certificate, &second.serialize_pem()).await;
    ask_node(&node, "new", &other).await.unwrap();
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_join_creates_no_account_or_role_binding() {
    let cluster = ClusterHarness::start_with(Credential::Certificate, &[]).await;
    let admin = cluster.admin.clone();
    let token =
        russet_operator::join_tokens::create(&admin, jiff::SignedDuration::from_hours(1)).await.unwrap();
    let joiner = cluster.client(&format!("system:bootstrap:{}", token.id), "system:bootstrappers").await;
    ask_node(&joiner, "new", &KeyPair::generate().unwrap()).await.unwrap();
    Api::<InferenceNode>::all(admin.clone()).get("new").await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), "russet-nodes");
    assert!(accounts.get_opt("new").await.unwrap().is_none());
    let bindings: Api<RoleBinding> = Api::namespaced(admin, "russet-nodes");
    assert!(bindings.list(&Default::default()).await.unwrap().items.iter().all(|it| it.name_any() != "new"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_but_approved_csr_fails_and_keeps_its_approval() {
    let cluster = ClusterHarness::start(&[]).await;
    let requests: Api<CertificateSigningRequest> = Api::all(cluster.admin.clone());
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": {"name": "wrong"},
        "spec": {"request": ByteString(b"noise".to_vec()), "signerName": "russet.dev/node",
                 "usages": ["digital signature", "client auth", "server auth"]},
    });
    let approval = json!({"status": {"conditions": [
        {"type": "Approved", "status": "True", "reason": "Person", "message": "looks good"},
    ]}});
    let (cluster, ()) = cluster
        .unobserved(async {
            requests.create(&Default::default(), &serde_json::from_value(request).unwrap()).await.unwrap();
            let approval = Patch::Merge(approval);
            requests.patch_approval("wrong", &Default::default(), &approval).await.unwrap();
        })
        .await;
    let found = until("it fails", || async {
        let conditions = requests.get("wrong").await.ok()?.status?.conditions?;
        conditions.iter().any(|it| it.type_ == "Failed").then_some(conditions)
    })
    .await;
    let kinds: Vec<&str> = found.iter().map(|it| it.type_.as_str()).collect();
    assert_eq!(kinds, ["Approved", "Failed"]);
    let why = found[1].message.as_deref().unwrap_or_default();
    assert!(why.contains("not a certificate request"), "{why}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway_gets_its_certificate_and_all_may_read_the_ca() {
    let cluster = ClusterHarness::start(&[]).await;
    let key = KeyPair::generate().unwrap();
    let gateway = cluster.client(tls::GATEWAY_USER, "x").await;
    let certificate = ask(&gateway, tls::GATEWAY_USER, None, tls::GATEWAY_DNS_NAME, &key).await.unwrap();
    assert_eq!(subject(&certificate), "CN=russet:gateway");
    let node = cluster.client(&tls::node_user("a"), tls::NODES_GROUP).await;
    let why = ask(&node, tls::GATEWAY_USER, None, tls::GATEWAY_DNS_NAME, &key).await.unwrap_err();
    assert!(why.contains("may not ask for the gateway's certificate"), "{why}");

    let joiner = cluster.client("system:bootstrap:abcdef", "system:bootstrappers:russet").await;
    for client in [gateway, node, joiner] {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "russet-system");
        let ca = until("the CA is published", || async { maps.get_opt("russet-ca").await.ok()? }).await;
        assert!(ca.data.unwrap()["ca.crt"].contains("BEGIN CERTIFICATE"));
        let secrets: Api<Secret> = Api::namespaced(client, "russet-system");
        assert!(secrets.get("russet-ca").await.is_err(), "its key is the operator's alone");
    }
    cluster.stop().await;
}
