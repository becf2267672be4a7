//! Authentication and authorization: certificates, service account tokens, bootstrap tokens, roles.

use k8s_openapi::api::authentication::v1::{SelfSubjectReview, TokenRequest, TokenRequestSpec, TokenReview};
use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::support::{TestServer, code};

fn read<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}

#[tokio::test]
async fn a_user_may_do_what_a_role_says_and_nothing_else() {
    let cluster = TestServer::start().await;
    let eve = cluster.client_as("eve", &["staff"]).await;
    let maps: Api<ConfigMap> = Api::namespaced(eve.clone(), "default");
    assert_eq!(code(maps.list(&ListParams::default()).await), 403, "eve is bound to no role");
    let roles: Api<Role> = Api::namespaced(cluster.client(), "default");
    let role = json!({"metadata": {"name": "reader"}, "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}]});
    roles.create(&PostParams::default(), &read(role)).await.unwrap();
    let bindings: Api<RoleBinding> = Api::namespaced(cluster.client(), "default");
    let binding = json!({
        "metadata": {"name": "readers"}, "subjects": [{"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "staff"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
    });
    bindings.create(&PostParams::default(), &read(binding)).await.unwrap();
    maps.list(&ListParams::default()).await.unwrap();
    assert_eq!(code(maps.delete("kube-root-ca.crt", &DeleteParams::default()).await), 403);
    let elsewhere: Api<ConfigMap> = Api::namespaced(eve.clone(), "kube-system");
    assert_eq!(code(elsewhere.list(&ListParams::default()).await), 403);

    let reviews: Api<SelfSubjectAccessReview> = Api::all(eve.clone());
    let mut allowed = Vec::new();
    for verb in ["list", "delete"] {
        let ask = json!({"spec": {"resourceAttributes": {"verb": verb, "resource": "configmaps", "namespace": "default"}}});
        allowed
            .push(reviews.create(&PostParams::default(), &read(ask)).await.unwrap().status.unwrap().allowed);
    }
    assert_eq!(allowed, [true, false]);
    let who: Api<SelfSubjectReview> = Api::all(eve);
    let me = who.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    assert_eq!(me.status.unwrap().user_info.unwrap().username.as_deref(), Some("eve"));
    cluster.stop().await;
}

#[tokio::test]
async fn users_cannot_grant_more_than_they_hold() {
    let cluster = TestServer::start().await;
    let roles: Api<ClusterRole> = Api::all(cluster.client());
    let manager = json!({"metadata": {"name": "role-manager"}, "rules": [
        {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["*"], "verbs": ["create", "get"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]},
    ]});
    roles.create(&PostParams::default(), &read(manager)).await.unwrap();
    let bindings: Api<ClusterRoleBinding> = Api::all(cluster.client());
    let bind = |name: &str, role: &str| -> ClusterRoleBinding {
        read(json!({
            "metadata": {"name": name}, "subjects": [{"kind": "User", "name": "mallory"}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        }))
    };
    bindings.create(&PostParams::default(), &bind("managers", "role-manager")).await.unwrap();
    let mallory = cluster.client_as("mallory", &[]).await;
    let her_roles: Api<ClusterRole> = Api::all(mallory.clone());
    let role = |name: &str, resource: &str| -> ClusterRole {
        read(
            json!({"metadata": {"name": name}, "rules": [{"apiGroups": [""], "resources": [resource], "verbs": ["get"]}]}),
        )
    };
    assert_eq!(code(her_roles.create(&PostParams::default(), &role("more", "secrets")).await), 403);
    her_roles.create(&PostParams::default(), &role("same", "configmaps")).await.unwrap();
    let her_bindings: Api<ClusterRoleBinding> = Api::all(mallory);
    assert_eq!(code(her_bindings.create(&PostParams::default(), &bind("admin", "cluster-admin")).await), 403);
    // Whoever makes that role later would give her its rights.
    assert_eq!(code(her_bindings.create(&PostParams::default(), &bind("later", "not-yet")).await), 404);
    // A label makes an aggregated role take over the rules of another.
    let editor = json!({"metadata": {"name": "role-editor"}, "rules": [
        {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles"], "verbs": ["get", "patch"]},
    ]});
    roles.create(&PostParams::default(), &read(editor)).await.unwrap();
    bindings.create(&PostParams::default(), &bind("editors", "role-editor")).await.unwrap();
    let label = json!({"metadata": {"labels": {"rbac.authorization.k8s.io/aggregate-to-edit": "true"}}});
    for (role, expected) in [("cluster-admin", 403), ("same", 200)] {
        let patched = her_roles.patch(role, &PatchParams::default(), &Patch::Merge(&label)).await;
        assert_eq!(patched.map_or_else(|error| code::<()>(Err(error)), |_| 200), expected, "{role}");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_token_is_for_its_audiences_and_dies_with_its_secret() {
    let cluster = TestServer::start().await;
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), "default");
    accounts.create(&PostParams::default(), &read(json!({"metadata": {"name": "robot"}}))).await.unwrap();
    let token = async |spec: serde_json::Value| {
        let request: TokenRequest = read(json!({"spec": spec}));
        let made = accounts.create_token_request("robot", &PostParams::default(), &request).await;
        made.map(|token| token.status.unwrap().token.unwrap())
    };
    let here = "https://kubernetes.default.svc.cluster.local";
    let reviews: Api<TokenReview> = Api::all(cluster.client());
    let both = token(json!({"audiences": ["vault", here]})).await.unwrap();
    let foreign = token(json!({"audiences": ["vault"]})).await.unwrap();
    for (what, token, asked, expected) in [
        ("for both", &both, json!([]), vec![here]),
        ("for both, of one", &both, json!(["vault", "other"]), vec!["vault"]),
        ("foreign", &foreign, json!([]), vec![]),
        ("foreign, of it", &foreign, json!(["vault"]), vec!["vault"]),
        ("of a third", &both, json!(["other"]), vec![]),
    ] {
        let review = read(json!({"spec": {"token": token, "audiences": asked}}));
        let status = reviews.create(&PostParams::default(), &review).await.unwrap().status.unwrap();
        assert_eq!(status.audiences.unwrap_or_default(), expected, "{what}");
        assert_eq!(status.authenticated.unwrap(), !expected.is_empty(), "{what}");
    }
    cluster.client_with_token(&both).await.apiserver_version().await.unwrap();
    assert_eq!(code(cluster.client_with_token(&foreign).await.apiserver_version().await), 401);

    let secrets: Api<Secret> = Api::namespaced(cluster.client(), "default");
    let bound =
        json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Secret", "name": "pass"}, "audiences": []});
    assert_eq!(code(token(bound.clone()).await), 404);
    secrets.create(&PostParams::default(), &read(json!({"metadata": {"name": "pass"}}))).await.unwrap();
    let pod = json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "pass"}, "audiences": []});
    assert_eq!(code(token(pod).await), 400);
    let token = cluster.client_with_token(&token(bound).await.unwrap()).await;
    token.apiserver_version().await.unwrap();
    secrets.delete("pass", &DeleteParams::default()).await.unwrap();
    secrets.create(&PostParams::default(), &read(json!({"metadata": {"name": "pass"}}))).await.unwrap();
    assert_eq!(code(token.apiserver_version().await), 401, "another Secret of the same name");
    cluster.stop().await;
}

#[tokio::test]
async fn a_service_account_token_works_until_its_account_is_gone() {
    let cluster = TestServer::start().await;
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), "default");
    accounts.create(&PostParams::default(), &read(json!({"metadata": {"name": "robot"}}))).await.unwrap();
    let request = TokenRequest { spec: Some(TokenRequestSpec::default()), ..TokenRequest::default() };
    let token = accounts.create_token_request("robot", &PostParams::default(), &request).await.unwrap();
    let token = token.status.unwrap().token.unwrap();
    let robot = cluster.client_with_token(&token).await;
    let who: Api<SelfSubjectReview> = Api::all(robot.clone());
    let me = who.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    assert_eq!(
        me.status.unwrap().user_info.unwrap().username.as_deref(),
        Some("system:serviceaccount:default:robot")
    );
    let secrets: Api<Secret> = Api::namespaced(robot.clone(), "default");
    assert_eq!(code(secrets.list(&ListParams::default()).await), 403);
    accounts.delete("robot", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(who.create(&PostParams::default(), &SelfSubjectReview::default()).await), 401);
    let nonsense = cluster.client_with_token("abcdef.0123456789abcdef").await;
    assert_eq!(code(nonsense.apiserver_version().await), 401);
    cluster.stop().await;
}

#[tokio::test]
async fn bootstrap_token_opens_the_lan_and_permits_a_csr() {
    let cluster = TestServer::start().await;
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), "kube-system");
    let secret = |expiration: &str| -> Secret {
        read(json!({
            "metadata": {"name": "bootstrap-token-abc123"}, "type": "bootstrap.kubernetes.io/token",
            "stringData": {
                "token-id": "abc123", "token-secret": "0123456789abcdef", "expiration": expiration,
                "usage-bootstrap-authentication": "true",
            },
        }))
    };
    secrets.create(&PostParams::default(), &secret("2999-01-01T00:00:00Z")).await.unwrap();
    let machine = cluster.client_with_token("abc123.0123456789abcdef").await;
    let requests: Api<CertificateSigningRequest> = Api::all(machine.clone());
    let request = json!({"metadata": {"name": "node-1"}, "spec": {
        "request": "LS0t", "signerName": "example.com/node", "usages": ["client auth"],
        "username": "russet:node:a", "uid": "another's", "groups": ["system:masters"], "extra": {"a": ["b"]},
    }});
    let made = requests.create(&PostParams::default(), &read(request)).await.unwrap().spec;
    assert_eq!(made.username.as_deref(), Some("system:bootstrap:abc123"));
    let groups = made.groups.unwrap();
    assert!(groups.contains(&"system:bootstrappers".to_string()), "{groups:?}");
    assert!(!groups.contains(&"system:masters".to_string()), "{groups:?}");
    assert_eq!((made.uid, made.extra), (None, None), "who asks is not for the body to say");
    assert_eq!(
        code(Api::<Secret>::namespaced(machine.clone(), "kube-system").list(&ListParams::default()).await),
        403
    );
    let wrong = cluster.client_with_token("abc123.0123456789abcdeX").await;
    assert_eq!(code(wrong.apiserver_version().await), 401);

    // The host's other addresses are open now, on the same port and with a certificate that names them.
    for address in russet_apiserver::server::host::host_addresses() {
        let target = std::net::SocketAddr::new(address, cluster.running().addr().port());
        cluster
            .eventually("the address is open", || async {
                tokio::net::TcpStream::connect(target).await.is_ok()
            })
            .await;
    }
    let expired = Patch::Merge(json!({"stringData": {"expiration": "2001-01-01T00:00:00Z"}}));
    secrets.patch("bootstrap-token-abc123", &PatchParams::default(), &expired).await.unwrap();
    assert_eq!(code(requests.get("node-1").await), 401, "the token has expired");
    cluster.stop().await;
}

#[tokio::test]
async fn anonymous_requests_see_only_health_and_version() {
    let cluster = TestServer::start().await;
    let stranger = cluster.client_with_token("").await;
    stranger.apiserver_version().await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(stranger, "default");
    assert_eq!(code(maps.list(&ListParams::default()).await), 401);
    cluster.stop().await;
}

#[tokio::test]
async fn an_aggregated_role_shows_the_rules_it_collects() {
    let cluster = TestServer::start().await;
    let roles: Api<ClusterRole> = Api::all(cluster.client());
    let part = json!({
        "metadata": {"name": "things", "labels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}},
        "rules": [{"apiGroups": ["example.com"], "resources": ["things"], "verbs": ["get"]}],
    });
    roles.create(&PostParams::default(), &read(part)).await.unwrap();
    for name in ["view", "edit", "admin"] {
        cluster
            .eventually("the rule arrives", || async {
                let rules = roles.get(name).await.unwrap().rules.unwrap_or_default();
                rules.iter().any(|rule| rule.resources == Some(vec!["things".to_string()]))
            })
            .await;
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_signing_request_is_approved_and_answered() {
    let cluster = TestServer::start().await;
    let requests: Api<CertificateSigningRequest> = Api::all(cluster.client());
    let request = json!({"metadata": {"name": "r"}, "spec": {"request": "LS0t", "signerName": "example.com/x", "usages": ["client auth"]}});
    requests.create(&PostParams::default(), &read(request)).await.unwrap();
    let approval = Patch::Merge(json!({
        "metadata": {"annotations": {"why": "known"}},
        "status": {"conditions": [{"type": "Approved", "status": "True", "reason": "Test"}], "certificate": "eA=="},
    }));
    let approved = requests.patch_approval("r", &PatchParams::default(), &approval).await.unwrap();
    assert_eq!(approved.metadata.annotations.unwrap()["why"], "known");
    let status = approved.status.unwrap();
    assert!(status.certificate.is_none(), "an approval does not sign");
    assert!(status.conditions.unwrap()[0].last_update_time.is_some());
    let signed = Patch::Merge(json!({"status": {"certificate": "eA=="}}));
    let signed = requests.patch_status("r", &PatchParams::default(), &signed).await.unwrap();
    assert!(signed.status.unwrap().certificate.is_some());
    cluster.stop().await;
}
