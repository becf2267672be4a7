//! The listener for other machines: TLS, both versions of HTTP, and clients that are slow, greedy or not HTTP
//! clients at all.

use std::sync::Arc;
use std::time::Duration;

use russet_gateway::listen::{Certificate, HttpListener, ListenerLimits};
use russet_gateway::server::GatewayServer;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{GatewayLab, TEST_TIMEOUT, access_key, hello, limits};

/// What the peer sends until it closes the connection.
async fn until_closed(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Vec<u8> {
    let mut received = Vec::new();
    let read = tokio::time::timeout(TEST_TIMEOUT, stream.read_to_end(&mut received)).await;
    assert!(read.is_ok(), "the gateway did not close; it sent {:?}", String::from_utf8_lossy(&received));
    received
}

/// A TLS connection that offers these protocols, as a client opens it.
async fn handshake(lab: &GatewayLab, protocols: &[&[u8]]) -> tokio_rustls::client::TlsStream<TcpStream> {
    let mut roots = rustls::RootCertStore::empty();
    let ca = lab.certificates.ca_der();
    roots.add(ca).unwrap();
    let mut config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let stream = TcpStream::connect(lab.network).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

#[tokio::test]
async fn both_versions_of_http_are_spoken_over_tls_and_streams_arrive() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[access_key("one", "s-one", |_| {})]);
    let build = || {
        reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().tls_certs_only([lab.certificates.ca()])
    };
    for (client, version) in [
        (build().http1_only().build().unwrap(), reqwest::Version::HTTP_11),
        (build().build().unwrap(), reqwest::Version::HTTP_2),
    ] {
        let body = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]});
        let request = client.post(lab.network_url("/v1/chat/completions")).bearer_auth("s-one").json(&body);
        let response = request.send().await.unwrap();
        assert_eq!((response.status().as_u16(), response.version()), (200, version));
        assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    }
}

#[tokio::test]
async fn plain_http_and_silent_clients_are_disconnected() {
    let short = Duration::from_millis(100);
    let lab = GatewayLab::start_with(
        limits(),
        ListenerLimits { handshake_timeout: short, head_timeout: short, ..ListenerLimits::default() },
    )
    .await;
    let engine = lab.only_engine(hello());
    // Plain HTTP gets at most a TLS alert.
    let mut plain = TcpStream::connect(lab.network).await.unwrap();
    plain.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let received = until_closed(&mut plain).await;
    assert!(!received.starts_with(b"HTTP") && received.len() < 32, "{received:?}");
    // Silence before the handshake.
    let mut silent = TcpStream::connect(lab.network).await.unwrap();
    assert!(until_closed(&mut silent).await.is_empty());
    // Silence after the handshake, and a head that never ends.
    let mut silent = handshake(&lab, &[b"http/1.1"]).await;
    assert!(until_closed(&mut silent).await.is_empty());
    let mut endless = handshake(&lab, &[b"http/1.1"]).await;
    endless.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ").await.unwrap();
    until_closed(&mut endless).await;
    // Silence, and half a preface, after HTTP/2 was negotiated and while the version is still unknown.
    for prefix in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
        let mut silent = handshake(&lab, &[b"h2"]).await;
        silent.write_all(prefix).await.unwrap();
        until_closed(&mut silent).await;
        let mut silent = TcpStream::connect(lab.address).await.unwrap();
        silent.write_all(prefix).await.unwrap();
        until_closed(&mut silent).await;
    }
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn one_machine_cannot_take_every_connection() {
    let listener_limits = ListenerLimits {
        handshake_timeout: TEST_TIMEOUT * 2,
        max_connections: 8,
        reserved_connections: 2,
        ..ListenerLimits::default()
    };
    let lab = GatewayLab::start_with(limits(), listener_limits).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[access_key("one", "s-one", |_| {})]);
    let mut held = Vec::new();
    for _ in 0..6 {
        held.push(TcpStream::connect(lab.network).await.unwrap());
    }
    let mut one_more = TcpStream::connect(lab.network).await.unwrap();
    let closed = tokio::time::timeout(TEST_TIMEOUT, one_more.read(&mut [0])).await;
    assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
    // Only Linux has more than one loopback address without configuration.
    if cfg!(target_os = "linux") {
        let other = lab.client_from([127, 0, 0, 2]).get(lab.network_url("/v1/models")).bearer_auth("s-one");
        assert_eq!(other.send().await.unwrap().status(), 200);
    }
    // Programs of this machine use another listener.
    assert_eq!(lab.chat(json!({})).bearer_auth("s-one").send().await.unwrap().status(), 200);
    drop(held);
    let again = tokio::time::timeout(TEST_TIMEOUT, async {
        while lab.network_chat(json!({})).bearer_auth("s-one").send().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    again.await.expect("there is room again");
}

#[tokio::test]
async fn a_head_beyond_the_limit_is_refused() {
    let lab = GatewayLab::start(limits()).await;
    let mut stream = handshake(&lab, &[b"http/1.1"]).await;
    let head = format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "x".repeat(1_000_000));
    // The server may respond and close before it has read everything.
    let _ = stream.write_all(head.as_bytes()).await;
    let mut received = vec![0; 64];
    let read = tokio::time::timeout(TEST_TIMEOUT, stream.read(&mut received)).await.unwrap();
    // A reset is fine too: nothing beyond the limit was read.
    let received = String::from_utf8_lossy(&received[..read.unwrap_or(0)]).into_owned();
    assert!(received.is_empty() || received.starts_with("HTTP/1.1 431"), "{received}");
}

#[tokio::test]
async fn over_the_network_pages_need_a_key_like_others() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[access_key("one", "s-one", |_| {})]);
    for origin in ["http://localhost:3000", "https://chat.example", "null"] {
        let ask = || lab.network_chat(json!({})).header("origin", origin);
        for (request, status) in
            [(ask().bearer_auth("s-one"), 200), (ask().bearer_auth("s-two"), 401), (ask(), 401)]
        {
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), status, "{origin}");
            assert_eq!(response.headers()["access-control-allow-origin"], origin);
        }
        let probe = lab.client.get(lab.network_url("/healthz")).header("origin", origin);
        let status = if origin.contains("localhost") { 200 } else { 403 };
        assert_eq!(probe.send().await.unwrap().status(), status, "{origin}");
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_without_a_restart() {
    let lab = GatewayLab::start(limits()).await;
    let files = lab.certificates.server();
    let certificate = Certificate::read(files.clone()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_table, table) = tokio::sync::watch::channel(Arc::default());
    let (_keyring, keyring) = tokio::sync::watch::channel(Arc::default());
    let gateway = GatewayServer::new(
        vec![HttpListener::network(listener, &certificate)],
        table,
        keyring,
        lab.certificates.gateway(),
        limits(),
        ListenerLimits::default(),
    );
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async {
        let _ = gateway.serve(std::future::pending()).await;
    });
    tasks.spawn(certificate.follow());
    let shown = || async {
        let mut config = rustls::ClientConfig::builder()
            .with_root_certificates({
                let mut roots = rustls::RootCertStore::empty();
                roots.add(lab.certificates.ca_der()).unwrap();
                roots
            })
            .with_no_client_auth();
        config.resumption = rustls::client::Resumption::disabled();
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    let first = shown().await;
    assert_eq!(shown().await, first);
    // An unusable certificate is not shown.
    std::fs::write(&files.cert, "no certificate").unwrap();
    assert_eq!(shown().await, first);
    lab.certificates.server();
    let changed = tokio::time::timeout(TEST_TIMEOUT, async {
        while shown().await == first {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    changed.await.expect("the new certificate is shown");
}

#[tokio::test]
async fn a_refused_upload_gets_its_answer_and_not_a_broken_connection() {
    let lab = GatewayLab::start(limits()).await;
    // The body comes after the head, long after the request was rejected.
    let mut slow = handshake(&lab, &[b"http/1.1"]).await;
    slow.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100000\r\n\r\n").await.unwrap();
    for _ in 0..10 {
        slow.write_all(&[b' '; 10_000]).await.unwrap();
        slow.flush().await.unwrap();
        tokio::task::yield_now().await;
    }
    let received = until_closed(&mut slow).await;
    assert!(received.starts_with(b"HTTP/1.1 401"), "{}", String::from_utf8_lossy(&received));
    // Over HTTP/2 as well, many at once.
    let body = "x".repeat(100_000);
    let requests =
        (0..50).map(|_| lab.client.post(lab.network_url("/v1/chat/completions")).body(body.clone()).send());
    for response in futures::future::join_all(requests).await {
        assert_eq!(response.unwrap().status(), 401);
    }
}
