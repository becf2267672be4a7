//! Clients that misbehave on the wire: bodies and headers that are too large, that trickle or never end, connections that
//! are half closed or idle. Each gets an answer in its dialect's form where HTTP allows one, and the gateway answers the
//! next request. Not here: clients that do not read, see `slow_readers`; TLS, see `network`.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::listen::ListenerLimits;
use russet_tests::peak_memory;
use russet_tests::processes::raise_file_limit;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::body_paths::{BodyPath, PATHS};
use crate::harness::{GatewayLab, ScriptStep, TEST_TIMEOUT, hello, limits, started, token};

const SHORT: Duration = Duration::from_millis(200);

/// A connection, on which every read and write ends or fails the test.
struct RawClient {
    stream: TcpStream,
}

impl RawClient {
    async fn connect(lab: &GatewayLab) -> Self {
        Self { stream: TcpStream::connect(lab.address).await.unwrap() }
    }

    /// Writes; the gateway may have closed the connection already.
    async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        tokio::time::timeout(TEST_TIMEOUT, self.stream.write_all(bytes)).await.expect("the gateway reads")
    }

    /// Head and body of the answer, after which the gateway closes the connection; nothing where it is closed without one.
    async fn answer(&mut self) -> (String, Vec<u8>) {
        let mut received = Vec::new();
        let read = tokio::time::timeout(TEST_TIMEOUT, self.stream.read_to_end(&mut received)).await;
        // A reset comes where the gateway has not read everything.
        let _ = read.expect("the gateway closes");
        match received.windows(4).position(|window| window == b"\r\n\r\n") {
            Some(end) => (String::from_utf8(received[..end].to_vec()).unwrap(), received.split_off(end + 4)),
            None => (String::from_utf8(received).unwrap(), Vec::new()),
        }
    }
}

/// The head of a request with a body, with these lines.
fn head(path: &str, lines: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{lines}\r\n")
}

/// Checks that an answer is an error with this status in the path's form, and has these words.
fn check_error(path: &BodyPath, (head, body): &(String, Vec<u8>), status: u16, words: &str) {
    assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{}: {head}", path.path);
    assert!(head.contains("content-type: application/json"), "{}: {head}", path.path);
    let (message, _) = path.form.read(body);
    assert!(message.contains(words), "{}: {message}", path.path);
}

/// That every path answers a valid request.
async fn check_answers(lab: &GatewayLab) {
    for path in &PATHS {
        let response = lab.client.post(lab.url(path.path)).body(path.body).send().await.unwrap();
        assert_eq!(response.status(), 200, "{}", path.path);
    }
}

#[tokio::test]
async fn bodies_over_the_limit_are_refused_on_every_path() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for path in &PATHS {
        let mut announced = RawClient::connect(&lab).await;
        announced.write(head(path.path, "content-length: 99999999\r\n").as_bytes()).await.unwrap();
        announced.write(b"{").await.unwrap();
        check_error(path, &announced.answer().await, 413, "16 MiB");
        // Sent in chunks nobody knows how long it gets; what is too much is not waited for.
        let mut chunked = RawClient::connect(&lab).await;
        chunked.write(head(path.path, "transfer-encoding: chunked\r\n").as_bytes()).await.unwrap();
        let chunk = [b"100000\r\n".as_slice(), &[b' '; 0x10_0000], b"\r\n"].concat();
        for _ in 0..16 {
            chunked.write(&chunk).await.unwrap();
        }
        chunked.write(b"1\r\n \r\n").await.unwrap();
        check_error(path, &chunked.answer().await, 413, "16 MiB");
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

#[tokio::test]
async fn chunks_that_are_none_are_a_bad_request() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for path in &PATHS {
        for chunks in ["zz\r\n", "ffffffffffffffffff\r\n", "2\r\n{}x", "-1\r\n"] {
            let mut client = RawClient::connect(&lab).await;
            client.write(head(path.path, "transfer-encoding: chunked\r\n").as_bytes()).await.unwrap();
            client.write(chunks.as_bytes()).await.unwrap();
            check_error(path, &client.answer().await, 400, "ended before it was complete");
        }
        // Two lengths are how one request is smuggled behind another.
        for lines in [
            "content-length: 2\r\ncontent-length: 3\r\n",
            "content-length: 2\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked, identity\r\n",
            "content-length: -1\r\n",
            "content-length: 1e3\r\n",
        ] {
            let mut client = RawClient::connect(&lab).await;
            client.write(head(path.path, lines).as_bytes()).await.unwrap();
            let _ = client.write(b"0\r\n\r\n").await;
            let (head, _) = client.answer().await;
            assert!(head.starts_with("HTTP/1.1 400 "), "{} {lines:?}: {head}", path.path);
        }
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

#[tokio::test]
async fn floods_of_headers_are_refused() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let lines = |count: usize, bytes: usize| -> String {
        (0..count).map(|number| format!("x-{number}: {}\r\n", "x".repeat(bytes))).collect()
    };
    for path in &PATHS {
        let length = format!("content-length: {}\r\n", path.body.len());
        let send = async |lines: String| {
            let mut client = RawClient::connect(&lab).await;
            // The gateway may answer before it has read all.
            let _ = client.write(head(path.path, &(length.clone() + &lines)).as_bytes()).await;
            let _ = client.write(path.body.as_bytes()).await;
            client.answer().await
        };
        check_error(path, &send(lines(70, 1000)).await, 431, "at most 65536");
        check_error(path, &send(lines(1, 66_000)).await, 431, "at most 65536");
        // So many that the HTTP library answers by itself, or ends the connection.
        for (count, bytes) in [(200, 1), (10_000, 0), (1, 1_000_000), (1000, 1000)] {
            let (head, body) = send(lines(count, bytes)).await;
            assert!(head.is_empty() || head.starts_with("HTTP/1.1 431 "), "{count} × {bytes}: {head}");
            assert!(body.is_empty(), "{count} × {bytes}");
        }
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

#[tokio::test]
async fn floods_of_headers_over_http2_are_refused() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let client = reqwest::Client::builder().http2_prior_knowledge().no_proxy().timeout(TEST_TIMEOUT);
    let client = client.build().unwrap();
    for path in &PATHS {
        let send = async |count: usize, bytes: usize| {
            let headers = (0..count).map(|number| {
                let name: reqwest::header::HeaderName = format!("x-{number}").parse().unwrap();
                (name, "x".repeat(bytes).parse().unwrap())
            });
            let request = client.post(lab.url(path.path)).body(path.body).headers(headers.collect());
            let response = request.send().await.ok()?;
            Some((response.status().as_u16(), response.bytes().await.unwrap()))
        };
        for (count, bytes) in [(70, 1000), (1, 66_000)] {
            let (status, body) = send(count, bytes).await.unwrap();
            assert_eq!(status, 431, "{}", path.path);
            assert!(path.form.read(&body).0.contains("at most 65536"), "{}", path.path);
        }
        // So many that the HTTP library answers by itself, or ends the stream.
        for (count, bytes) in [(20_000, 1), (1, 1_000_000)] {
            let answer = send(count, bytes).await;
            assert!(answer.is_none_or(|(status, body)| status == 431 && body.is_empty()), "{}", path.path);
        }
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

#[tokio::test]
async fn a_trickle_of_headers_ends_at_the_timeout() {
    let listener_limits = ListenerLimits { head_timeout: SHORT, ..ListenerLimits::default() };
    let lab = GatewayLab::start_with(limits(), listener_limits).await;
    let engine = lab.only_engine(hello());
    for begin in ["", "P", "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: "] {
        let mut client = RawClient::connect(&lab).await;
        client.write(begin.as_bytes()).await.unwrap();
        let trickle = async {
            while client.write(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = tokio::time::timeout(TEST_TIMEOUT, trickle).await;
        assert!(ended.is_ok(), "bytes that keep coming do not keep the connection: {begin:?}");
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

#[tokio::test]
async fn a_trickle_of_a_body_ends_at_the_timeout() {
    let lab = GatewayLab::start(DispatchLimits { body_timeout: SHORT, ..limits() }).await;
    let engine = lab.only_engine(hello());
    for path in &PATHS {
        for lines in ["content-length: 1000\r\n", "transfer-encoding: chunked\r\n"] {
            let mut client = RawClient::connect(&lab).await;
            client.write(head(path.path, lines).as_bytes()).await.unwrap();
            let part = if lines.contains("chunked") { "1\r\n \r\n" } else { " " };
            let (mut reader, mut writer) = client.stream.into_split();
            let trickle = async {
                while writer.write_all(part.as_bytes()).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                std::future::pending().await
            };
            let mut received = Vec::new();
            let answer = async {
                // Its head and body come at once, or one behind the other.
                while !received.ends_with(b"}") && reader.read_buf(&mut received).await.unwrap() > 0 {}
            };
            let answered = tokio::time::timeout(TEST_TIMEOUT, async {
                tokio::select! {
                    () = answer => {}
                    () = trickle => {}
                }
            });
            answered.await.expect("the gateway answers");
            let text = String::from_utf8(received).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            check_error(path, &(head.to_owned(), body.into()), 408, "did not arrive within 200ms");
        }
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

/// TCP has no way to tell a client that has shut down its writing half from one that has left, and a slot of an engine
/// is worth more than such a client, which no HTTP library is.
#[tokio::test]
async fn a_client_that_shuts_its_writing_half_has_left() {
    let lab = GatewayLab::start(limits()).await;
    for path in PATHS.iter().filter(|path| !path.path.ends_with("count_tokens")) {
        let engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
        let mut client = RawClient::connect(&lab).await;
        let lines = format!("content-length: {}\r\n", path.body.len());
        client.write((head(path.path, &lines) + path.body).as_bytes()).await.unwrap();
        engine.running(1).await;
        client.stream.shutdown().await.unwrap();
        engine.running(0).await;
        let (head, body) = client.answer().await;
        assert!(head.is_empty() && body.is_empty(), "{}: {head}", path.path);
    }
    let _engine = lab.only_engine(hello());
    check_answers(&lab).await;
}

#[tokio::test]
async fn a_body_that_is_cut_off_reaches_no_engine() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for path in &PATHS {
        for lines in ["content-length: 1000\r\n", "transfer-encoding: chunked\r\n"] {
            let mut client = RawClient::connect(&lab).await;
            client.write((head(path.path, lines) + "2").as_bytes()).await.unwrap();
            client.stream.shutdown().await.unwrap();
            let (head, _) = client.answer().await;
            assert!(head.is_empty() || head.starts_with("HTTP/1.1 400 "), "{}: {head}", path.path);
        }
    }
    assert_eq!(engine.requests(), 0);
    check_answers(&lab).await;
}

#[tokio::test]
async fn idle_connections_make_way_for_requests() {
    /// Twice what is accepted at once; the others wait.
    const CONNECTIONS: usize = 1024;
    let listener_limits = ListenerLimits { head_timeout: SHORT, ..ListenerLimits::default() };
    let lab = GatewayLab::start_with(limits(), listener_limits).await;
    let _engine = lab.only_engine(hello());
    let mut idle = Vec::new();
    for _ in 0..CONNECTIONS {
        idle.push(RawClient::connect(&lab).await);
    }
    check_answers(&lab).await;
    for mut client in idle {
        assert_eq!(client.answer().await, (String::new(), Vec::new()));
    }
}

/// Most bytes that the gateway and this client take for an idle connection, on which requests were answered.
const MAX_IDLE_BYTES: u64 = 64 << 10;

/// As many idle connections as this process may open both ends of, 10,000 at most.
fn idle_connections() -> usize {
    let files = raise_file_limit();
    usize::try_from(files.saturating_sub(300) / 2).unwrap_or(usize::MAX).min(10_000)
}

#[test]
fn ten_thousand_idle_connections_take_little_memory() {
    let connections = idle_connections();
    let grown = peak_memory::growth("bad_clients::ten_thousand_idle_connections_take_little_memory", || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let limits_of_listener = ListenerLimits {
            max_connections: connections + 8,
            head_timeout: TEST_TIMEOUT * 10,
            ..ListenerLimits::default()
        };
        let lab = runtime.block_on(GatewayLab::start_with(limits(), limits_of_listener));
        let _engine = lab.only_engine(hello());
        let mut idle = Vec::with_capacity(connections);
        for _ in 0..connections {
            let mut client = std::net::TcpStream::connect(lab.address).unwrap();
            client.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            client.write_all(b"GET /api/version HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
            let mut answer = [0; 512];
            let mut length = 0;
            while !answer[..length].ends_with(b"}") {
                length += client.read(&mut answer[length..]).unwrap();
            }
            idle.push(client);
        }
        runtime.block_on(check_answers(&lab));
    });
    println!("{connections} idle connections: {} bytes each", grown / connections as u64);
    assert!(grown < MAX_IDLE_BYTES * connections as u64, "{connections}: {grown} bytes");
}
