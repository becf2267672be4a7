//! State shared by all handlers: the store, the table of kinds, the policies, the keys. No logic.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::admission::policies::PolicySet;
use crate::auth::rbac;
use crate::auth::signer::Signer;
use crate::flow_control::FlowControl;
use crate::kinds::table::Table;
use crate::metrics::Metrics;
use crate::object_limit::ObjectLimits;
use crate::store::Store;
use crate::store::reflector::Reflector;

/// The state of one server.
pub struct ServerState {
    /// Storage of objects.
    pub store: Arc<dyn Store>,
    /// The served kinds.
    pub kinds: Reflector<Table>,
    /// RBAC policies.
    pub policies: Reflector<rbac::Policy>,
    /// Admission policies.
    pub admission: Reflector<PolicySet>,
    /// Signs and checks the tokens of service accounts.
    pub signer: Signer,
    /// The OpenAPI documents.
    pub documents: crate::discovery::OpenApiDocuments,
    /// Limits of requests and watches.
    pub flow: FlowControl,
    /// Limits of the number of objects.
    pub limits: ObjectLimits,
    /// Metrics.
    pub metrics: Metrics,
    /// Becomes true when the server stops; watches end then.
    pub stopping: watch::Receiver<bool>,
    /// Dropped last of all fields: its receiver knows then that the store is closed.
    pub closed: mpsc::Sender<Infallible>,
}

/// Waits until the server stops.
pub async fn stopped(mut stopping: watch::Receiver<bool>) {
    // If the sender is gone, the server is gone too.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}
