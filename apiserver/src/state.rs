//! What every handler shares: the store, the table of kinds, the policies, the keys. It only holds them.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::admission::Admission;
use crate::auth::Policies;
use crate::auth::tokens::Signer;
use crate::kinds::Kinds;
use crate::metrics::Metrics;
use crate::store::Store;

/// The state of one server.
pub struct ServerState {
    /// Where objects live.
    pub store: Arc<dyn Store>,
    /// What is served.
    pub kinds: Kinds,
    /// Who may do what.
    pub policies: Policies,
    /// What is admitted beyond that.
    pub admission: Admission,
    /// Signs and checks the tokens of service accounts.
    pub signer: Signer,
    /// The OpenAPI documents.
    pub documents: crate::discovery::OpenApiDocuments,
    /// What is counted.
    pub metrics: Metrics,
    /// Turns true when the server stops; watches end then.
    pub stopping: watch::Receiver<bool>,
    /// The last to be dropped of all this: whoever listens knows then that the store is closed.
    pub closed: mpsc::Sender<Infallible>,
}

/// Waits until the server stops.
pub async fn stopped(mut stopping: watch::Receiver<bool>) {
    // The sender gone means the server is gone, too.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}
