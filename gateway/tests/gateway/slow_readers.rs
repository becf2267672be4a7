//! Clients that stop reading their response: the engine's slot and the gateway's place are freed.

use std::time::Duration;

use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::listen::ListenerLimits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::harness::{GatewayLab, ScriptStep, TEST_TIMEOUT, limits, started, token, wait_for_metric};

const SHORT: Duration = Duration::from_millis(200);

/// A response of 16 MiB, far more than sockets buffer, that then waits.
fn long_response() -> Vec<ScriptStep> {
    let text = "x".repeat(16 * 1024);
    [vec![started()], vec![token(&text); 1024], vec![ScriptStep::Hang]].concat()
}

/// Sends a request for a stream, with this header line, and reads its first byte.
async fn stalled_client(lab: &GatewayLab, header: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(lab.address).await.unwrap();
    let body = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{header}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'H');
    stream
}

#[tokio::test]
async fn a_reader_that_stalls_frees_its_engine() {
    for (read_timeout, header) in [(SHORT, ""), (TEST_TIMEOUT, "x-request-timeout: 2\r\n")] {
        let lab = GatewayLab::start(DispatchLimits { read_timeout, ..limits() }).await;
        let engine = lab.only_engine(long_response());
        let _client = stalled_client(&lab, header).await;
        engine.running(0).await;
        wait_for_metric(&lab, "russet_gateway_request_cancelled_total{model_name=\"m\"} 1\n").await;
    }
}

#[tokio::test]
async fn a_connection_that_is_not_read_is_closed() {
    let listener_limits = ListenerLimits { write_timeout: SHORT, ..ListenerLimits::default() };
    let lab = GatewayLab::start_with(limits(), listener_limits).await;
    let engine = lab.only_engine(long_response());
    let mut client = stalled_client(&lab, "").await;
    engine.running(0).await;
    let mut rest = Vec::new();
    let read = tokio::time::timeout(TEST_TIMEOUT, client.read_to_end(&mut rest)).await;
    assert!(read.is_ok(), "the gateway does not close");
    assert!(!rest.ends_with(b"0\r\n\r\n"), "the response does not look complete");
}
