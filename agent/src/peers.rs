//! Protocol between agents, without the API server, over every path between their machines: HTTP/1.1 inside
//! mutual TLS, only between nodes of one cluster.
//!
//! ```text
//! GET /ping     204 at once: latency of a path
//! GET /flood    zeros for a second or two: bandwidth of a path; 503 where a machine is busy
//! GET /models/  chunks of a model on this machine, for other nodes that need it (`models.rs`)
//! ```

mod bandwidth_probe;
pub mod client;
mod listen;
pub(crate) mod models;
mod write_timeout;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full, combinators::UnsyncBoxBody};
use hyper::{Method, Request, Response, StatusCode};
use russet_rpc::tls::{self, NODE_USER_PREFIX, TlsFiles};
use rustls::pki_types::CertificateDer;
use tokio::sync::{Semaphore, watch};

pub(crate) use self::listen::{PeerListener, run};
use crate::store::Store;

/// Path of a ping.
pub(crate) const PING: &str = "/ping";
/// Path of a bandwidth probe.
pub(crate) const BANDWIDTH: &str = "/flood";

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// When this machine may be kept busy for a second.
#[derive(Clone, Debug)]
pub(crate) struct IdleGate {
    /// Bytes granted to Shards: with any, an engine is running or will be soon.
    granted: watch::Receiver<u64>,
    /// One probe at a time, in or out: two would share cores and cables, and measure each other.
    permits: Arc<Semaphore>,
}

impl IdleGate {
    pub fn new(granted: watch::Receiver<u64>) -> Self {
        Self { granted, permits: Arc::new(Semaphore::new(1)) }
    }

    /// Reserves the machine until this is dropped, if it is idle.
    pub fn try_acquire(&self) -> Option<tokio::sync::OwnedSemaphorePermit> {
        (*self.granted.borrow() == 0).then(|| self.permits.clone().try_acquire_owned().ok())?
    }

    /// Waits until the machine is no longer idle.
    pub async fn wait_busy(&mut self) {
        // The sender lives as long as the agent.
        self.granted.wait_for(|granted| *granted > 0).await.ok();
    }
}

/// State of the server for other agents.
#[derive(Clone)]
pub(crate) struct PeerServer {
    pub idle_gate: IdleGate,
    pub store: Store,
}

/// Serves a store's models to other nodes at one address, for as long as the returned future is polled: the
/// part of an agent that a bench needs.
///
/// # Errors
///
/// If listening at the address fails.
pub async fn serve(
    files: TlsFiles,
    at: SocketAddr,
    store: Store,
) -> Result<impl Future<Output = ()> + use<>, String> {
    let (_, granted) = watch::channel(0);
    listen::listen(at, &files, &PeerServer { idle_gate: IdleGate::new(granted), store }).await
}

/// The node of a certificate, if it is a node's.
fn node_name(certificate: &CertificateDer<'_>) -> Option<String> {
    tls::common_name(certificate)?.strip_prefix(NODE_USER_PREFIX).map(str::to_owned)
}

/// Handles a node's request.
async fn handle<B>(
    request: Request<B>,
    PeerServer { idle_gate: idle, store }: PeerServer,
) -> Result<Response<Body>, Infallible> {
    let bare = |status| {
        let mut response = Response::new(Empty::new().boxed_unsync());
        *response.status_mut() = status;
        response
    };
    Ok(match (request.method(), request.uri().path()) {
        (&Method::GET, PING) => bare(StatusCode::NO_CONTENT),
        (&Method::GET, BANDWIDTH) => match idle.try_acquire() {
            Some(permit) => Response::new(bandwidth_probe::body(permit, idle)),
            None => bare(StatusCode::SERVICE_UNAVAILABLE),
        },
        (&Method::GET, path) if path.starts_with(models::MODELS) => {
            match models::handle(path, &store).await {
                Ok(bytes) => Response::new(Full::new(bytes).boxed_unsync()),
                Err(status) => bare(status),
            }
        }
        (_, PING | BANDWIDTH) => bare(StatusCode::METHOD_NOT_ALLOWED),
        _ => bare(StatusCode::NOT_FOUND),
    })
}

#[cfg(test)]
pub(crate) mod tests;
