//! Machines that join, leave, and get renewed credentials.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use russet_agent::join::identity::{Material, NodeIdentity};
use russet_agent::join::request::is_signed_by_first;
use russet_agent::leave::{LeaveConfig, LeaveError, leave};
use russet_agent::token::JoinToken;
use russet_agent::{Access, JoinConfig};
use russet_crds::InferenceNode;
use russet_crds::conditions::{Type, is_true};

use crate::plane::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_joins_only_with_its_own_token_of_that_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let token = plane.token().await;
    let join = |text: String, name: &str, machine: &str| {
        russet_agent::join(JoinConfig {
            // The first server is absent: nothing listens on the discard port.
            servers: vec!["https://127.0.0.1:9".into(), plane.url()],
            token: text,
            data_dir: folder.path().join(machine),
            node_name: name.into(),
            access: None,
        })
    };
    let pin = JoinToken { ca_pin: format!("sha256:{}", "00".repeat(32)), ..token.clone() };
    let secret = JoinToken { secret: "fedcba9876543210".into(), ..token.clone() };
    let unknown = JoinToken { id: "zzzzzz".into(), ..token.clone() };
    let expired = russet_operator::join_tokens::create(&plane.client, jiff::SignedDuration::from_secs(-1));
    let expired = expired.await.unwrap();
    let expired = JoinToken { id: expired.id, secret: expired.secret, ..token.clone() };
    for (story, text, name, words) in [
        ("no token", "abcdef.0123456789abcdef".to_owned(), "a", "not a join token"),
        ("another CA", pin.encode(), "a", "is not the server this token is for"),
        ("a wrong secret", secret.encode(), "a", "does not accept the token"),
        ("an unknown token", unknown.encode(), "a", "does not accept the token zzzzzz"),
        ("an expired token", expired.encode(), "a", "russet token create"),
        ("no name", token.encode(), "A!", "cannot be a node's name"),
    ] {
        let error = join(text, name, "m1").await.unwrap_err().to_string();
        assert!(error.contains(words), "{story}: {error}");
    }

    let identity = join(token.encode(), "a", "m1").await.unwrap();
    let key = std::fs::read(identity.folder.join("tls.key")).unwrap();
    assert_eq!(join(token.encode(), "a", "m1").await.unwrap(), identity, "joining again changes nothing");
    assert_eq!(std::fs::read(identity.folder.join("tls.key")).unwrap(), key);

    // The same token on another machine, under any name.
    for name in ["a", "b"] {
        let error = join(token.encode(), name, "m2").await.unwrap_err().to_string();
        assert!(error.contains("was used by node a"), "{error}");
    }
    // The first machine lost its certificate but kept its key: it may finish the join.
    russet_rpc::tls::identity_dir::remove(&identity.folder).unwrap();
    std::fs::write(identity.folder.join("joining.key"), &key).unwrap();
    assert_eq!(join(token.encode(), "a", "m1").await.unwrap(), identity);
    assert!(!identity.folder.join("joining.key").exists());
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_client_reloads_renewed_credentials() {
    use k8s_openapi::api::authentication::v1::SelfSubjectReview;
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let authority = plane.running.as_ref().unwrap().authority();
    let ca = authority.cert_pem();
    let issue = |node: &str| {
        let (user, names) = (format!("russet:node:{node}"), [format!("{node}.node.russet.dev")]);
        authority.issue_peer(&user, &["russet:nodes"], &names, 1).unwrap()
    };
    let store = |node: &str, token: Option<&str>| {
        let (certificate, key) = issue(node);
        let material = Material { certificate: &certificate, key: &key, ca, server_ca: ca, token };
        NodeIdentity::store(&folder.path().join("agent"), node, &[plane.url()], &material).unwrap()
    };
    let client = store("a", None).client(|_| {}).await.unwrap();
    let who = || async {
        let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
        let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
        review.status.unwrap().user_info.unwrap().username.unwrap()
    };
    assert_eq!(who().await, "russet:node:a");
    store("b", None);
    assert_eq!(who().await, "russet:node:b");
    russet_operator::node_accounts::create_account(&plane.client, "c", None).await.unwrap();
    let token = russet_agent::join::access::token(&plane.client, "c").await.unwrap();
    store("c", Some(&token));
    assert_eq!(who().await, "system:serviceaccount:russet-nodes:c");
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ca_rotation_needs_no_node_to_rejoin() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut agents = [
        TestAgent::join(&plane, folder.path(), "one", None).await,
        TestAgent::join(&plane, folder.path(), "two", Some(Access::Token)).await,
    ];
    let pki = plane.folder.join("pki");
    let (old, old_key) = {
        let authority = plane.running.as_ref().unwrap().authority();
        (authority.cert_pem().to_owned(), authority.key_pem().to_owned())
    };
    let next = russet_apiserver::pki::Authority::generate("russet-ca").unwrap();
    let (new, new_key) = (next.cert_pem().to_owned(), next.key_pem().to_owned());
    // The new CA is trusted before it signs, and the old one until none of its certificates is left.
    for (story, authorities, key) in [
        ("the new one is trusted", old.clone() + &new, &old_key),
        ("the new one signs", new.clone() + &old, &new_key),
        ("the old one is gone", new.clone(), &new_key),
    ] {
        for agent in &mut agents {
            agent.stop().await;
        }
        plane.stop().await;
        std::fs::write(pki.join("ca.crt"), &authorities).unwrap();
        std::fs::write(pki.join("ca.key"), key).unwrap();
        plane.restart().await;
        let maps: Api<ConfigMap> = Api::namespaced(plane.client.clone(), "russet-system");
        wait_until("it is published", || async {
            (maps.get("russet-ca").await.ok()?.data?.get("ca.crt")? == &authorities).then_some(())
        })
        .await;
        for agent in &mut agents {
            agent.start();
            let identity = NodeIdentity::load(&agent.config.data_dir.join("agent")).unwrap().unwrap();
            wait_until(story, || async {
                let certificate = identity.certificate_pem().ok()?;
                let follows = identity.ca_pem().ok()? == authorities
                    && identity.server_ca_pem().ok()? == authorities
                    && is_signed_by_first(&authorities, &certificate);
                follows.then_some(())
            })
            .await;
            // The current certificate is accepted.
            let client = identity.client(|_| {}).await.unwrap();
            Api::<InferenceNode>::all(client).get(&identity.node).await.unwrap();
        }
    }
    for agent in &mut agents {
        agent.stop().await;
    }
    plane.stop().await;
}

/// A node that leaves, joins again and is removed by an administrator.
async fn leave_and_rejoin(name: &str, access: Option<Access>) {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let leases: Api<Lease> = Api::namespaced(plane.client.clone(), "russet-system");
    let agent = TestAgent::join(&plane, folder.path(), name, access).await;
    let data_dir = agent.config.data_dir.clone();
    let ready = || async {
        let status = nodes.get(name).await.ok()?.status?;
        is_true(&status.conditions, Type::Ready).then_some(())
    };
    wait_until("the node is ready", ready).await;
    let models = data_dir.join("agent/models");
    std::fs::write(models.join("kept"), "a model").unwrap();
    let helper = data_dir.join("no-helper.sock");
    let config = LeaveConfig { data_dir: data_dir.clone(), force: false, purge: false, helper };
    assert_eq!(leave(config.clone()).await.unwrap(), name);
    assert!(nodes.get_opt(name).await.unwrap().is_none());
    wait_until("its Lease goes with it", || async {
        matches!(leases.get_opt(&format!("node-{name}")).await, Ok(None)).then_some(())
    })
    .await;
    agent.wait_exit().await;
    let left: Vec<String> = std::fs::read_dir(data_dir.join("agent"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "lock")
        .collect();
    assert_eq!(left, ["models"]);
    assert!(models.join("kept").exists());
    assert!(matches!(leave(config).await, Err(LeaveError::NotJoined(_))));

    let again = TestAgent::join(&plane, folder.path(), name, access).await;
    wait_until("the node is ready again", ready).await;
    // Removed by an administrator: the agent exits with that error.
    nodes.delete(name, &DeleteParams::default()).await.unwrap();
    let error = again.wait_removed().await;
    assert!(error.contains("was removed from the cluster"), "{error}");
    plane.stop().await;
}

// Each removal drains for 12 s: two tests, so that they do it at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_node_is_cleared_and_rejoins_with_a_new_token() {
    leave_and_rejoin("one", None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_without_a_certificate_leaves_and_rejoins_the_same() {
    leave_and_rejoin("two", Some(Access::Token)).await;
}
