//! Sources on the agent's own networks, by address, name, redirect and login, against servers of this machine that count
//! who connects.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use russet_crds::conditions::Reason;

use super::*;
use crate::store::{Context, Credentials, SourceSpec, Store};

/// A server that nothing may connect to.
async fn closed_port() -> (u16, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, count) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok(_stream) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    (port, count)
}

/// A server that answers every request as `answer` does.
async fn server(answer: impl Fn() -> axum::response::Response + Clone + Send + Sync + 'static) -> String {
    let router = axum::Router::new().fallback(move || std::future::ready(answer()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

fn store(folder: &tempfile::TempDir, hub: &str, allowed: &[&str]) -> Store {
    rustls::crypto::ring::default_provider().install_default().ok();
    let allowed: Vec<Cidr> = allowed.iter().map(|range| range.parse().unwrap()).collect();
    let context = Context::new(hub, vec![]).unwrap().with_private_sources(&allowed).unwrap();
    Store::open(folder.path().join("models"), context).unwrap()
}

fn source_spec(uri: &str, secret: &[(&str, &str)]) -> SourceSpec {
    let secret = secret.iter().map(|(key, value)| ((*key).to_owned(), (*value).into()));
    SourceSpec { uri: uri.to_owned(), credentials: Credentials::new(secret), ..SourceSpec::default() }
}

#[test]
fn proxies_are_read_with_and_without_a_scheme() {
    for (text, host) in [
        ("http://proxy.lan:3128", Some("proxy.lan")),
        ("Proxy.lan.:3128", Some("proxy.lan")),
        ("socks5://me:secret@proxy.lan", Some("proxy.lan")),
        ("", None),
    ] {
        assert_eq!(proxy_host(text).as_deref(), host, "{text}");
    }
}

#[tokio::test]
async fn own_networks_are_refused_before_a_connection_is_opened() {
    let (port, connections) = closed_port().await;
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, "https://huggingface.co", &[]);
    let endpoint = format!("http://127.0.0.1:{port}");
    let service = format!("http://localhost:{port}");
    for (uri, secret) in [
        (format!("https://127.0.0.1:{port}/m"), vec![]),
        (format!("https://2130706433:{port}/m"), vec![]),
        (format!("https://localhost:{port}/m"), vec![]),
        (format!("https://[::ffff:127.0.0.1]:{port}/m"), vec![]),
        ("https://169.254.169.254/latest/meta-data".to_owned(), vec![]),
        ("https://10.0.0.1/m".to_owned(), vec![]),
        ("https://192.168.1.1/m".to_owned(), vec![]),
        ("https://[fe80::1]/m".to_owned(), vec![]),
        (format!("oci://127.0.0.1:{port}/a/b:v"), vec![]),
        (format!("oci://localhost:{port}/a/b:v"), vec![]),
        ("s3://models/tiny".to_owned(), vec![("AWS_ENDPOINT_URL", endpoint.as_str())]),
        ("s3://models/tiny".to_owned(), vec![("AWS_ENDPOINT_URL", service.as_str())]),
        ("s3://models/tiny".to_owned(), vec![("AWS_ENDPOINT_URL", "http://169.254.169.254")]),
        ("gs://models/tiny".to_owned(), vec![("STORAGE_EMULATOR_HOST", endpoint.as_str())]),
        (
            "az://models/tiny".to_owned(),
            vec![("AZURE_STORAGE_ACCOUNT_NAME", "a"), ("AZURE_STORAGE_ENDPOINT", endpoint.as_str())],
        ),
    ] {
        let error = store.headers(&source_spec(&uri, &secret)).await.unwrap_err();
        assert!(matches!(error, StoreError::PrivateAddress { .. }), "{uri}: {}", error.chain());
        assert_eq!(error.reason(), Reason::SourceNotAllowed);
        // One message, whatever is there and however it was found out.
        let StoreError::PrivateAddress { what } = &error else { continue };
        let rest = error.to_string().replacen(what, "", 1);
        let expected = StoreError::PrivateAddress { what: String::new() }.to_string();
        assert_eq!(rest, expected, "{uri}");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0);
    // Refusals need no time for anything to be opened late: an allowed one is.
    let allowed = self::store(&folder, "https://huggingface.co", &["127.0.0.1", "::1"]);
    let error = allowed.headers(&source_spec(&format!("https://127.0.0.1:{port}/m"), &[])).await.unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{}", error.chain());
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn hub_of_the_owner_leads_to_no_other_private_server() {
    let (port, connections) = closed_port().await;
    let hub = server(move || {
        let place = format!("http://localhost:{port}/api/models/a/b/revision/main");
        (StatusCode::TEMPORARY_REDIRECT, [("location", place)]).into_response()
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let hub = format!("http://{hub}");
    let asked = source_spec("hf://a/b", &[]);
    let error = store(&folder, &hub, &[]).headers(&asked).await.unwrap_err();
    assert!(matches!(error, StoreError::PrivateAddress { .. }), "{}", error.chain());
    // Authors of Models may not name the hub's machine by themselves.
    let named = source_spec(&format!("{}/m", hub.replace("http", "https")), &[]);
    let error = store(&folder, &hub, &[]).headers(&named).await.unwrap_err();
    assert!(matches!(error, StoreError::PrivateAddress { .. }), "{}", error.chain());
    assert_eq!(connections.load(Ordering::SeqCst), 0);
    let error = store(&folder, &hub, &["127.0.0.0/8", "::1"]).headers(&asked).await.unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{}", error.chain());
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn realm_of_a_registry_is_no_way_into_own_networks() {
    let (port, connections) = closed_port().await;
    for realm in [format!("http://localhost:{port}/token"), "https://169.254.169.254/token".to_owned()] {
        let challenge = format!("Bearer realm=\"{realm}\",service=\"s\"");
        let registry = server(move || {
            (StatusCode::UNAUTHORIZED, [("www-authenticate", challenge.clone())]).into_response()
        })
        .await;
        let folder = tempfile::tempdir().unwrap();
        // The registry itself is allowed; `localhost` is ::1 as well, and 127.0.0.1 is left out of it.
        let port_of = registry.rsplit_once(':').unwrap().1.to_owned();
        let hub = format!("http://{registry}");
        let store = store(&folder, &hub, &[]);
        let error =
            store.headers(&source_spec(&format!("oci://127.0.0.1:{port_of}/a/b:v"), &[])).await.unwrap_err();
        assert!(matches!(error, StoreError::PrivateAddress { .. }), "{realm}: {}", error.chain());
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0);
}
