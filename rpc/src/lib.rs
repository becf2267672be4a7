//! gRPC services between gateway, agents and engines; TLS identities and their renewal; the API client and its
//! watches; kinds of networks; reserved ports; the failure detector; the timeout of writes; conversions to and from [`russet_wire`].
//! Not here: what the messages mean.

pub mod addresses;
pub mod batched_writes;
#[cfg(feature = "api")]
pub mod cache_status;
mod codec;
mod convert;
pub mod failure_detector;
#[cfg(feature = "api")]
pub mod informer;
#[cfg(feature = "api")]
pub mod kube_client;
#[cfg(feature = "api")]
pub mod kubeconfig;
#[cfg(feature = "api")]
pub mod list_item;
pub mod ports;
pub mod tls;
pub mod write_timeout;

/// Messages and services compiled from `proto/engine.proto`.
#[allow(missing_docs, clippy::all)]
pub mod engine {
    tonic::include_proto!("russet.engine.v1");
}

/// Compatibility of the engines of one group: the version of the computing engine, and the protocol between
/// ranks. The last number is raised whenever that protocol changes between two releases, so that incompatible
/// ranks refuse each other instead of waiting.
pub const ENGINE_BUILD: &str = concat!("russet-engine/", env!("CARGO_PKG_VERSION"), "+ranks.6");

/// Version of the control protocol between agent and engine. Raised only when one of two releases would
/// misread the other: an agent adopts engines of its own version and stops those of another.
pub const CONTROL_VERSION: u32 = 1;
