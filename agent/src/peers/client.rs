//! Client connection to another agent, over one path.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use russet_rpc::ports::Egress;
use russet_rpc::tls::{Connector, TlsError, server_name};
use thiserror::Error;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{BANDWIDTH, PING};

/// Timeout of a request.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Warm-up of a bandwidth probe before it is measured: TCP starts slowly.
const WARM_UP: Duration = Duration::from_millis(200);
/// Measured part of a bandwidth probe.
const MEASURE_TIME: Duration = Duration::from_millis(800);

/// Why a request to another agent failed.
#[derive(Debug, Error)]
pub enum DialError {
    /// The node's name is invalid in a certificate, or this node's identity cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The other agent cannot be reached.
    #[error("{to} cannot be reached from {from}: {source}")]
    Unreachable {
        /// Local address.
        from: IpAddr,
        /// Remote address.
        to: SocketAddr,
        /// System error.
        source: std::io::Error,
    },
    /// No reply in time.
    #[error("{to} did not answer within {} s", REQUEST_TIMEOUT.as_secs(), to = .0)]
    Timeout(SocketAddr),
    /// The connection ended.
    #[error("the connection ended")]
    Ended(#[from] hyper::Error),
    /// The reply is longer than possible.
    #[error("it sends more than {0} bytes")]
    TooLong(usize),
    /// The reply is shorter than requested.
    #[error("it omitted {0} of the requested bytes")]
    Truncated(u64),
    /// An unexpected HTTP status.
    #[error("it answered {0}")]
    Status(StatusCode),
}

/// A connection to another agent.
#[derive(Debug)]
pub struct PeerClient {
    sender: SendRequest<Empty<Bytes>>,
    to: SocketAddr,
    /// Aborts the connection when dropped.
    _connection: JoinSet<()>,
}

impl PeerClient {
    /// Connects to the agent of `node` at `to`, through this egress.
    pub async fn connect(
        connector: &Connector,
        node: &str,
        exit: &Egress,
        to: SocketAddr,
    ) -> Result<Self, DialError> {
        let connecting = connector.connect_from(server_name(node)?, exit, to);
        let stream =
            tokio::time::timeout(REQUEST_TIMEOUT, connecting).await.map_err(|_| DialError::Timeout(to))?;
        let stream = stream.map_err(|source| DialError::Unreachable { from: exit.address, to, source })?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut running = JoinSet::new();
        // The next request reports the connection's error.
        running.spawn(async move { drop(connection.await) });
        Ok(Self { sender, to, _connection: running })
    }

    /// Measures the round-trip time.
    pub async fn ping(&mut self) -> Result<Duration, DialError> {
        let began = Instant::now();
        let answer = self.request(PING).await?;
        // A reply with a body is not from an agent.
        match answer.status() {
            StatusCode::NO_CONTENT => Ok(began.elapsed()),
            other => Err(DialError::Status(other)),
        }
    }

    /// Measures the receive bandwidth in bits per second, over most of a second; `None` where one of the
    /// machines is busy. The connection cannot be used afterwards.
    pub async fn measure_bandwidth(mut self) -> Result<Option<u64>, DialError> {
        let answer = self.request(BANDWIDTH).await?;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::SERVICE_UNAVAILABLE => return Ok(None),
            other => return Err(DialError::Status(other)),
        }
        let mut body = answer.into_body();
        let (mut began, mut bytes) = (Instant::now(), 0_u64);
        let mut beginning = true;
        loop {
            let frame = tokio::time::timeout(REQUEST_TIMEOUT, body.frame()).await;
            let frame = frame.map_err(|_| DialError::Timeout(self.to))?;
            // The other machine is busy.
            let Some(frame) = frame else { return Ok(None) };
            bytes += frame?.data_ref().map_or(0, Bytes::len) as u64;
            let passed = began.elapsed();
            if beginning && passed >= WARM_UP {
                (beginning, began, bytes) = (false, Instant::now(), 0);
            } else if !beginning && passed >= MEASURE_TIME {
                return Ok(Some((bytes as f64 * 8.0 / passed.as_secs_f64()) as u64));
            }
        }
    }

    /// Reads the content of a path, of at most this many bytes, in the parts in which it arrived, so that
    /// writing it to disk needs no copy. It may take long as long as bytes flow.
    pub async fn get(&mut self, path: &str, max_bytes: usize) -> Result<Vec<Bytes>, DialError> {
        let answer = self.request(path).await?;
        if answer.status() != StatusCode::OK {
            return Err(DialError::Status(answer.status()));
        }
        let (mut body, mut parts, mut length) = (answer.into_body(), Vec::new(), 0);
        loop {
            let frame = tokio::time::timeout(REQUEST_TIMEOUT, body.frame()).await;
            let Some(frame) = frame.map_err(|_| DialError::Timeout(self.to))? else { return Ok(parts) };
            let Ok(data) = frame?.into_data() else { continue };
            length += data.len();
            if length > max_bytes {
                return Err(DialError::TooLong(max_bytes));
            }
            parts.push(data);
        }
    }

    /// A reply whose body is not read, for tests.
    #[cfg(test)]
    pub(super) async fn get_unread(mut self, path: &str) -> Result<(Self, Response<Incoming>), DialError> {
        let answer = self.request(path).await?;
        Ok((self, answer))
    }

    async fn request(&mut self, path: &str) -> Result<Response<Incoming>, DialError> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = path.parse().unwrap_or_default();
        tokio::time::timeout(REQUEST_TIMEOUT, self.sender.send_request(request))
            .await
            .map_err(|_| DialError::Timeout(self.to))?
            .map_err(DialError::from)
    }
}
