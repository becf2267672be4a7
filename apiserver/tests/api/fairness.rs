//! Fairness: floods of connections, requests, watches and objects by one client, and what others still get. Asserted
//! on answers, never on time.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use http::{Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use russet_apiserver::ApiServerConfig;
use russet_apiserver::server::connection_limit::ConnectionLimits;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::protocol::ask;
use super::support::{DataLocation, TestServer};

const NODES: &str = "example:nodes";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
const CONFIGMAPS: &str = "/api/v1/namespaces/default/configmaps";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// One HTTP/2 connection.
struct Connection {
    requests: SendRequest<UnsyncBoxBody<Bytes, Infallible>>,
    task: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    /// Connects with a certificate of this user and groups, without one if the user is empty.
    async fn open(cluster: &TestServer, user: &str, groups: &[&str]) -> Self {
        Self::open_at(cluster, cluster.running().addr(), user, groups).await.unwrap()
    }

    async fn open_at(
        cluster: &TestServer,
        address: std::net::SocketAddr,
        user: &str,
        groups: &[&str],
    ) -> std::io::Result<Self> {
        Self::open_with(cluster, address, user, groups, &http2::Builder::new(TokioExecutor::new())).await
    }

    async fn open_with(
        cluster: &TestServer,
        address: std::net::SocketAddr,
        user: &str,
        groups: &[&str],
        builder: &http2::Builder<TokioExecutor>,
    ) -> std::io::Result<Self> {
        let running = cluster.running();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(running.ca_pem().as_bytes()).unwrap()).unwrap();
        let config =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots);
        let mut config = match user {
            "" => config.with_no_client_auth(),
            user => {
                let (cert, key) = running.authority().issue_client(user, groups, 1).unwrap();
                let cert = CertificateDer::from_pem_slice(cert.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                config.with_client_auth_cert(vec![cert], key).unwrap()
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let (requests, connection) =
            builder.handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        let task = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self { requests, task })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: UnsyncBoxBody<Bytes, Infallible>,
    ) -> hyper::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(format!("https://localhost{path}"))
            .header("content-type", "application/json")
            .body(body)
            .unwrap();
        self.requests.clone().send_request(request).await
    }

    /// The status and body of an answer; 0 if the connection is closed.
    async fn ask(&self, method: Method, path: &str, body: &Value) -> (u16, Value) {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.send(method, path, Full::new(Bytes::from(text)).boxed_unsync()).await;
        let Ok(response) = answer else { return (0, Value::Null) };
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }

    async fn get(&self, path: &str) -> u16 {
        self.ask(Method::GET, path, &Value::Null).await.0
    }

    /// A watch that stays open; the status of any other answer.
    async fn watch(&self, path: &str) -> Result<Response<Incoming>, u16> {
        let answer = self
            .send(Method::GET, &format!("{path}?watch=true"), Full::<Bytes>::default().boxed_unsync())
            .await;
        match answer {
            Ok(response) if response.status() == 200 => Ok(response),
            Ok(response) => Err(response.status().as_u16()),
            Err(_) => Err(0),
        }
    }
}

/// A server whose connections have these limits, where users `quiet`, `flood` and the nodes may do everything.
async fn cluster_with(limits: ConnectionLimits) -> TestServer {
    let place = DataLocation::create();
    let config: ApiServerConfig = place.config().connections(limits).system(&[], &[NODES]);
    let cluster = TestServer::start_with(place, config).await;
    let binding = json!({
        "metadata": {"name": "all"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [
            {"kind": "User", "name": "quiet"}, {"kind": "User", "name": "flood"}, {"kind": "Group", "name": "flood"}, {"kind": "Group", "name": NODES},
        ],
    });
    let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
    assert_eq!(ask(&cluster, Method::POST, bindings, &JSON, &binding.to_string()).await.0, 201);
    let lease = json!({"metadata": {"name": "node-a"}, "spec": {"holderIdentity": "a"}});
    assert_eq!(ask(&cluster, Method::POST, LEASES, &JSON, &lease.to_string()).await.0, 201);
    cluster
}

/// A node renews its Lease and another user lists, each on a connection of its own.
async fn others_are_answered(cluster: &TestServer) {
    let node = Connection::open(cluster, "node-a", &[NODES]).await;
    let path = format!("{LEASES}/node-a");
    let (code, mut lease) = node.ask(Method::GET, &path, &Value::Null).await;
    assert_eq!(code, 200);
    let renewals = lease["spec"]["leaseTransitions"].as_i64().unwrap_or_default() + 1;
    lease["spec"]["leaseTransitions"] = json!(renewals);
    let (code, renewed) = node.ask(Method::PUT, &path, &lease).await;
    assert_eq!((code, &renewed["spec"]["leaseTransitions"]), (200, &json!(renewals)), "{renewed}");
    let quiet = Connection::open(cluster, "quiet", &[]).await;
    assert_eq!(quiet.get(CONFIGMAPS).await, 200);
}

/// A sample of the server's metrics; 0 if there is none.
async fn metric(cluster: &TestServer, series: &str) -> i64 {
    let (_, _, text) = ask(cluster, Method::GET, "/metrics", &[], "").await;
    let sample =
        text.as_str().unwrap().lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
    sample.unwrap_or_default()
}

fn small() -> ConnectionLimits {
    ConnectionLimits { anonymous: 4, authenticated: 4, system: 4, ..ConnectionLimits::default() }
}

#[tokio::test]
async fn idle_connections_of_one_host_exclude_no_other() {
    let cluster = cluster_with(small()).await;
    let mut flood = Vec::new();
    for _ in 0..200 {
        let connection = Connection::open(&cluster, "", &[]).await;
        assert_eq!(connection.get("/livez").await, 200, "a newcomer gets in");
        flood.push(connection);
    }
    others_are_answered(&cluster).await;
    assert_eq!(metric(&cluster, "apiserver_connections{class=\"anonymous\"}").await, 4);
    assert!(metric(&cluster, "apiserver_closed_connections_total{class=\"anonymous\"}").await >= 196);
    assert_eq!(flood[0].get("/livez").await, 0, "the oldest was closed");
    assert_eq!(flood[199].get("/livez").await, 200);
    cluster.stop().await;
}

#[tokio::test]
async fn connections_of_one_user_exclude_no_other() {
    let cluster = cluster_with(small()).await;
    let (mut flood, mut refused) = (Vec::new(), 0);
    let address = cluster.running().addr();
    let connect = |user: &'static str, groups: &'static [&'static str]| {
        Connection::open_at(&cluster, address, user, groups)
    };
    for _ in 0..20 {
        // Closed in the middle of its handshake, or before its first answer.
        let Ok(connection) = connect("flood", &[]).await else {
            refused += 1;
            continue;
        };
        match connection.watch(CONFIGMAPS).await {
            Ok(watch) => flood.push((connection, watch)),
            Err(code) => {
                assert_eq!(code, 0, "its connection was closed");
                refused += 1;
            }
        }
    }
    assert_eq!((flood.len(), refused), (4, 16), "what is in use is not closed for its own user");
    others_are_answered(&cluster).await;
    // A stolen node takes none of another's connections, in use or not.
    let used = Connection::open(&cluster, "node-a", &[NODES]).await;
    let _leases = used.watch(LEASES).await.unwrap();
    let mut stolen = Vec::new();
    for _ in 0..20 {
        let Ok(connection) = connect("node-b", &[NODES]).await else { continue };
        let watch = connection.watch(LEASES).await;
        stolen.push((connection, watch));
    }
    assert!(stolen.iter().any(|(_, watch)| watch.is_ok()), "some of its own are open");
    assert_eq!(used.get(LEASES).await, 200);
    let other = Connection::open(&cluster, "node-c", &[NODES]).await;
    assert_eq!(other.get(LEASES).await, 200, "a node without a connection gets one");
    cluster.stop().await;
}

#[tokio::test]
async fn connections_that_only_answer_pings_are_closed() {
    let limits = ConnectionLimits {
        first_request_timeout: std::time::Duration::from_millis(500),
        idle_timeout: std::time::Duration::from_millis(500),
        ..ConnectionLimits::default()
    };
    let cluster = cluster_with(limits).await;
    // On a busy machine a connection may be closed before its first request arrives.
    let (used, events) = loop {
        let used = Connection::open(&cluster, "quiet", &[]).await;
        if let Ok(watch) = used.watch(CONFIGMAPS).await {
            break (used, watch);
        }
    };
    let silent = Connection::open(&cluster, "", &[]).await;
    let idle = Connection::open(&cluster, "quiet", &[]).await;
    for connection in [silent, idle] {
        cluster.eventually("an idle connection is closed", || async { connection.task.is_finished() }).await;
    }
    assert!(!used.task.is_finished(), "its watch was open all the while");
    drop(events);
    cluster.eventually("it is closed after its watch", || async { used.task.is_finished() }).await;
    cluster.stop().await;
}

#[tokio::test]
async fn clients_that_do_not_read_are_closed() {
    let limits = ConnectionLimits {
        unread_timeout: std::time::Duration::from_millis(500),
        ..ConnectionLimits::default()
    };
    let cluster = cluster_with(limits).await;
    let large = json!({"metadata": {"name": "large"}, "data": {"a": "x".repeat(1 << 20)}});
    assert_eq!(ask(&cluster, Method::POST, CONFIGMAPS, &JSON, &large.to_string()).await.0, 201);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    // Each stream may send one byte until its body is read.
    builder.initial_stream_window_size(1);
    for path in [format!("{CONFIGMAPS}/large"), format!("{CONFIGMAPS}?watch=true")] {
        let address = cluster.running().addr();
        let stalled = Connection::open_with(&cluster, address, "quiet", &[], &builder).await.unwrap();
        let empty = Full::<Bytes>::default().boxed_unsync();
        let response = stalled.send(Method::GET, &path, empty).await.unwrap();
        assert_eq!(response.status(), 200);
        cluster.eventually("it is closed", || async { stalled.task.is_finished() }).await;
        drop(response);
    }
    let reads = Connection::open(&cluster, "quiet", &[]).await;
    let (code, answer) = reads.ask(Method::GET, &format!("{CONFIGMAPS}/large"), &Value::Null).await;
    assert_eq!((code, answer["data"]["a"].as_str().map(str::len)), (200, Some(1 << 20)));
    cluster.stop().await;
}

#[tokio::test]
async fn watches_of_one_user_exclude_no_other() {
    let cluster = cluster_with(ConnectionLimits::default()).await;
    let flood = Connection::open(&cluster, "flood", &[]).await;
    let mut opened = Vec::new();
    for _ in 0..300 {
        opened.push(flood.watch(CONFIGMAPS).await);
    }
    let refused: Vec<u16> = opened.iter().filter_map(|watch| watch.as_ref().err().copied()).collect();
    assert!(refused.iter().all(|code| *code == 429), "{refused:?}");
    assert_eq!(refused.len(), 300 - 256);
    assert_eq!(flood.get(CONFIGMAPS).await, 200, "its lists are no watches");
    let quiet = Connection::open(&cluster, "quiet", &[]).await;
    let watch = quiet.watch(CONFIGMAPS).await;
    assert!(watch.is_ok(), "{watch:?}");
    others_are_answered(&cluster).await;
    drop(opened);
    cluster
        .eventually("its watches are free again", || async { flood.watch(CONFIGMAPS).await.is_ok() })
        .await;
    cluster.stop().await;
}

#[tokio::test]
async fn requests_of_a_namespace_delay_no_other() {
    let cluster = cluster_with(ConnectionLimits::default()).await;
    // Its ServiceAccounts share one part of the server.
    let accounts = join_all(["a", "b", "c"].map(|account| {
        let user = format!("system:serviceaccount:flood:{account}");
        let cluster = &cluster;
        async move { Connection::open(cluster, &user, &["flood"]).await }
    }))
    .await;
    let flood = &accounts[0];
    // Bodies that do not come before `pending` is dropped: 16 requests are handled, and 50 wait.
    let (pending, come) = watch::channel(());
    let late = || {
        let mut come = come.clone();
        let body = stream::once(async move {
            let _ = come.changed().await;
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"{}")))
        });
        StreamBody::new(body).boxed_unsync()
    };
    let mut requests: stream::FuturesUnordered<_> =
        (0..66).map(|number| accounts[number % 3].send(Method::POST, CONFIGMAPS, late())).collect();
    let level = "priority_level=\"global-default\"";
    let full = cluster.eventually("its queue is full", || async {
        metric(&cluster, &format!("apiserver_flowcontrol_current_inqueue_requests{{{level}}}")).await == 50
    });
    tokio::select! {
        () = full => {}
        answer = requests.next() => panic!("answered early: {answer:?}"),
    }
    let executing = format!("apiserver_flowcontrol_current_executing_requests{{{level}}}");
    assert_eq!(metric(&cluster, &executing).await, 16);
    let refused = flood.send(Method::GET, CONFIGMAPS, Full::<Bytes>::default().boxed_unsync()).await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    let rejected = format!("apiserver_flowcontrol_rejected_requests_total{{{level},reason=\"queue-full\"}}");
    assert_eq!(metric(&cluster, &rejected).await, 1);
    others_are_answered(&cluster).await;
    let anonymous = Connection::open(&cluster, "", &[]).await;
    assert_eq!((anonymous.get("/version").await, anonymous.get("/livez").await), (200, 200));
    // Those that waited are answered too: the object has no name, or its body came late on a busy machine.
    drop(pending);
    let codes: Vec<u16> = requests.map(|answer| answer.unwrap().status().as_u16()).collect().await;
    assert!(codes.len() == 66 && codes.iter().all(|code| [422, 408, 429].contains(code)), "{codes:?}");
    assert_eq!(metric(&cluster, &executing).await, 0);
    cluster.stop().await;
}

#[tokio::test]
async fn heads_beyond_64_kib_are_rejected() {
    let cluster = cluster_with(ConnectionLimits::default()).await;
    let connection = Connection::open(&cluster, "quiet", &[]).await;
    // Beyond the bound the answer is 431, and far beyond it the connection ends: 0.
    for (bytes, expected) in [(32_000, &[200][..]), (200_000, &[431, 0])] {
        let request =
            Request::get(format!("https://localhost{CONFIGMAPS}")).header("x-fill", "a".repeat(bytes));
        let request = request.body(Full::<Bytes>::default().boxed_unsync()).unwrap();
        let answer = connection.requests.clone().send_request(request).await;
        let code = answer.map_or(0, |response| response.status().as_u16());
        assert!(expected.contains(&code), "{bytes}: {code}");
    }
    others_are_answered(&cluster).await;
    cluster.stop().await;
}

fn signing_request(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"request": "eA==", "signerName": "example.com/x", "usages": ["client auth"]}})
}

#[tokio::test]
async fn signing_requests_of_one_token_are_bounded() {
    let cluster = cluster_with(ConnectionLimits::default()).await;
    let token = Connection::open(&cluster, "system:bootstrap:aaaaaa", &["system:bootstrappers"]).await;
    let create = |number: usize| {
        let (token, request) = (&token, signing_request(&format!("flood-{number}")));
        async move { token.ask(Method::POST, REQUESTS, &request).await.0 }
    };
    let first: Vec<u16> = stream::iter(0..60).map(create).buffer_unordered(20).collect().await;
    assert!(first.iter().all(|code| *code == 201), "{first:?}");
    // Those that were decided count: they are kept for an hour.
    let denied = json!({"status": {"conditions": [{"type": "Denied", "status": "True", "reason": "Flood"}]}});
    for number in 0..30 {
        let path = format!("{REQUESTS}/flood-{number}/approval");
        let media = [("content-type", "application/merge-patch+json")];
        let (code, _, answer) = ask(&cluster, Method::PATCH, &path, &media, &denied.to_string()).await;
        assert_eq!(code, 200, "{answer}");
    }
    let codes: Vec<u16> = stream::iter(60..110).map(create).buffer_unordered(20).collect().await;
    let count = |code: u16| codes.iter().filter(|one| **one == code).count();
    assert_eq!((count(201), count(429)), (40, 10), "{codes:?}");
    let other = Connection::open(&cluster, "system:bootstrap:bbbbbb", &["system:bootstrappers"]).await;
    assert_eq!(other.ask(Method::POST, REQUESTS, &signing_request("other")).await.0, 201);
    others_are_answered(&cluster).await;
    cluster.stop().await;
}

#[tokio::test]
async fn quota_bounds_objects_and_says_how_many_there_are() {
    let cluster = cluster_with(ConnectionLimits::default()).await;
    let quotas = "/api/v1/namespaces/kube-public/resourcequotas";
    let configmaps = "/api/v1/namespaces/kube-public/configmaps";
    let quota = json!({"metadata": {"name": "few"}, "spec": {"hard": {
        "count/configmaps": "4", "count/leases.coordination.k8s.io": 2, "requests.cpu": "1"}}});
    assert_eq!(ask(&cluster, Method::POST, quotas, &JSON, &quota.to_string()).await.0, 201);
    let used = |key: &'static str| {
        let cluster = &cluster;
        async move {
            let (_, _, quota) = ask(cluster, Method::GET, &format!("{quotas}/few"), &[], "").await;
            quota["status"]["used"][key].as_str().map(str::to_owned)
        }
    };
    // Every namespace has the CA's.
    cluster
        .eventually("the status counts", || async { used("count/configmaps").await.as_deref() == Some("1") })
        .await;
    assert_eq!(used("requests.cpu").await.as_deref(), Some("0"));
    let quiet = Connection::open(&cluster, "quiet", &[]).await;
    let create = |number: usize| {
        let quiet = &quiet;
        async move {
            quiet.ask(Method::POST, configmaps, &json!({"metadata": {"name": format!("m{number}")}})).await
        }
    };
    let answers = join_all((0..10).map(create)).await;
    let refused: Vec<&Value> =
        answers.iter().filter(|(code, _)| *code == 403).map(|(_, body)| body).collect();
    assert_eq!(refused.len(), 7, "{answers:?}");
    let words = "exceeded quota: few, requested: count/configmaps=1, used: count/configmaps=4, limited: count/configmaps=4";
    assert!(refused[0]["message"].as_str().unwrap().contains(words), "{}", refused[0]);
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-public/leases";
    assert_eq!(quiet.ask(Method::POST, leases, &json!({"metadata": {"name": "a"}})).await.0, 201);
    assert_eq!(quiet.ask(Method::POST, CONFIGMAPS, &json!({"metadata": {"name": "elsewhere"}})).await.0, 201);
    let (_, _, list) = ask(&cluster, Method::GET, configmaps, &[], "").await;
    let mut names =
        list["items"].as_array().unwrap().iter().filter_map(|map| map["metadata"]["name"].as_str());
    let made = names.find(|name| name.starts_with('m')).unwrap();
    let (code, ..) = ask(&cluster, Method::DELETE, &format!("{configmaps}/{made}"), &[], "").await;
    assert_eq!((code, create(99).await.0), (200, 201));
    cluster
        .eventually("the status follows", || async {
            used("count/configmaps").await.as_deref() == Some("4")
                && used("count/leases.coordination.k8s.io").await.as_deref() == Some("1")
        })
        .await;
    let wrong = json!({"metadata": {"name": "wrong"}, "spec": {"hard": {"count/configmaps": "many"}}});
    assert_eq!(ask(&cluster, Method::POST, quotas, &JSON, &wrong.to_string()).await.0, 422);
    cluster.stop().await;
}

#[tokio::test]
async fn what_weak_users_create_has_no_finalizers_or_owners() {
    let cluster = TestServer::start().await;
    let policies = include_str!("../../../manifests/admission.yaml");
    for document in policies.split("\n---\n") {
        let object: Value = serde_norway::from_str(document).unwrap();
        let plural =
            if object["kind"] == "ValidatingAdmissionPolicy" { "policies" } else { "policybindings" };
        let path = format!("/apis/admissionregistration.k8s.io/v1/validatingadmission{plural}");
        let (code, _, answer) = ask(&cluster, Method::POST, &path, &JSON, &object.to_string()).await;
        assert_eq!(code, 201, "{answer}");
    }
    let event = json!({
        "metadata": {"name": "e"}, "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "test",
        "reportingInstance": "t", "action": "Test", "reason": "Testing", "type": "Normal", "note": "hello",
        "regarding": {"kind": "InferenceNode", "name": "a"},
    });
    let mut request = signing_request("r");
    request["spec"]["signerName"] = json!("russet.dev/node");
    let events = "/apis/events.k8s.io/v1/namespaces/default/events";
    let admin = "system:masters";
    let node: (&str, &[&str]) = ("russet:node:a", &["russet:nodes", admin]);
    let token: (&str, &[&str]) = ("system:bootstrap:aaaaaa", &["system:bootstrappers:russet", admin]);
    let gateway: (&str, &[&str]) = ("russet:gateway", &[admin]);
    let owner = json!([{"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "x"}]);
    for (user, path, object) in [
        (node, events, event),
        (node, REQUESTS, request.clone()),
        (token, REQUESTS, request.clone()),
        (gateway, REQUESTS, request),
    ] {
        let connection = Connection::open(&cluster, user.0, user.1).await;
        for (field, value) in
            [("finalizers", json!(["example.com/hold"])), ("ownerReferences", owner.clone())]
        {
            let mut object = object.clone();
            object["metadata"][field] = value;
            let (code, answer) = connection.ask(Method::POST, path, &object).await;
            assert_eq!(code, 403, "{} {path} with {field}: {answer}", user.0);
            assert!(answer["message"].as_str().unwrap().contains("finalizers or owners"), "{answer}");
        }
        let mut object = object;
        object["metadata"]["name"] = json!(format!("plain-{}", user.0.replace(':', "-")));
        let (code, answer) = connection.ask(Method::POST, path, &object).await;
        assert_eq!(code, 201, "{} {path}: {answer}", user.0);
    }
    cluster.stop().await;
}

#[tokio::test]
async fn closing_the_network_closes_its_connections_too() {
    let Some(address) = russet_apiserver::server::host::host_addresses().into_iter().next() else {
        println!("skipped: this machine has no address but loopback");
        return;
    };
    let place = DataLocation::create();
    let config = place.config().lan(vec![address]);
    let marker = config.data_dir.join(russet_apiserver::LAN_MARKER);
    let cluster = TestServer::start_with(place, config).await;
    let address = std::net::SocketAddr::new(address, cluster.running().addr().port());
    assert!(
        Connection::open_at(&cluster, address, "", &[]).await.is_err(),
        "it is closed until a token exists"
    );
    let token = json!({"metadata": {"name": "bootstrap-token-aaaaaa"}, "type": "bootstrap.kubernetes.io/token", "stringData": {
        "token-id": "aaaaaa", "token-secret": "aaaaaaaaaaaaaaaa", "usage-bootstrap-authentication": "true"}});
    let secrets = "/api/v1/namespaces/kube-system/secrets";
    assert_eq!(ask(&cluster, Method::POST, secrets, &JSON, &token.to_string()).await.0, 201);
    cluster
        .eventually("it is open", || async { Connection::open_at(&cluster, address, "", &[]).await.is_ok() })
        .await;
    let open = Connection::open_at(&cluster, address, "", &[]).await.unwrap();
    assert_eq!(open.get("/livez").await, 200);
    let local = Connection::open(&cluster, "", &[]).await;
    assert_eq!(local.get("/livez").await, 200);
    // As `russet token close` does.
    let path = format!("{secrets}/bootstrap-token-aaaaaa");
    assert_eq!(ask(&cluster, Method::DELETE, &path, &[], "").await.0, 200);
    std::fs::remove_file(&marker).unwrap();
    cluster.eventually("its connections end", || async { open.task.is_finished() }).await;
    assert!(Connection::open_at(&cluster, address, "", &[]).await.is_err());
    assert_eq!(local.get("/livez").await, 200, "loopback stays");
    assert!(!marker.exists());
    cluster.stop().await;
}
