//! A connection to another agent, over one way.

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

/// A way answers within this or not at all.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// So long a flood is let run before it is measured: TCP begins slowly.
const WARM_UP: Duration = Duration::from_millis(200);
/// So long it is measured.
const MEASURE_TIME: Duration = Duration::from_millis(800);

/// Why another agent could not be asked.
#[derive(Debug, Error)]
pub enum DialError {
    /// Its node has no name for a certificate, or this one's own cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// It was not to be reached.
    #[error("{to} is not to be reached from {from}: {source}")]
    Unreachable {
        /// Own address.
        from: IpAddr,
        /// The other agent's.
        to: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// It was asked in vain.
    #[error("{to} did not answer within {} s", REQUEST_TIMEOUT.as_secs(), to = .0)]
    Timeout(SocketAddr),
    /// The connection ended.
    #[error("the connection ended")]
    Ended(#[from] hyper::Error),
    /// More came than there can be.
    #[error("it sends more than {0} bytes")]
    TooLong(usize),
    /// Less came than was asked for.
    #[error("it left out {0} of the bytes that were asked for")]
    Truncated(u64),
    /// It does not know what was asked.
    #[error("it answered {0}")]
    Status(StatusCode),
}

/// Another agent.
#[derive(Debug)]
pub struct PeerClient {
    sender: SendRequest<Empty<Bytes>>,
    to: SocketAddr,
    /// Ends with this.
    _connection: JoinSet<()>,
}

impl PeerClient {
    /// Connects to the agent of `node` at `to`, by this way out of the machine.
    pub async fn connect(
        connector: &Connector,
        node: &str,
        exit: &Egress,
        to: SocketAddr,
    ) -> Result<Self, DialError> {
        let connecting = connector.connect_from(server_name(node)?, exit, to);
        let stream = tokio::time::timeout(REQUEST_TIMEOUT, connecting).await.map_err(|_| DialError::Timeout(to))?;
        let stream = stream.map_err(|source| DialError::Unreachable { from: exit.address, to, source })?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut running = JoinSet::new();
        // Its error is that of whatever is asked next.
        running.spawn(async move { drop(connection.await) });
        Ok(Self { sender, to, _connection: running })
    }

    /// How long it takes there and back.
    pub async fn ping(&mut self) -> Result<Duration, DialError> {
        let began = Instant::now();
        let answer = self.request(PING).await?;
        // It has no body, or is none of ours.
        match answer.status() {
            StatusCode::NO_CONTENT => Ok(began.elapsed()),
            other => Err(DialError::Status(other)),
        }
    }

    /// Bits a second that come from there, measured over most of a second; nothing where one of both machines is needed
    /// otherwise. The connection is of no use afterwards.
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
            // The other machine is needed.
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

    /// What is at a path, of at most so many bytes, in the parts in which it came: who writes it to a disk needs no
    /// other copy. Where bytes flow it may take its time.
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

    /// An answer whose body nobody reads, for tests.
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
