//! The gRPC services between gateway, agents and engines, the identities with which they and the API
//! server are reached, the ports they publish before they listen, when somebody on the other side counts as lost, and
//! the conversions to and from [`russet_wire`]. What the messages mean is `wire`'s business.

#[cfg(feature = "api")]
pub mod kube_client;
mod convert;
pub mod failure_detector;
pub mod ports;
pub mod tls;

/// Messages and services compiled from `proto/engine.proto`.
#[allow(missing_docs, clippy::all)]
pub mod engine {
    tonic::include_proto!("russet.engine.v1");
}

/// What engines of one group must agree on: the version of the engine that computes, and how its ranks
/// reach each other. The last number is raised whenever the latter changes between two releases, so
/// that ranks which could only wait for each other refuse by name instead.
pub const ENGINE_BUILD: &str = concat!("russet-engine/", env!("CARGO_PKG_VERSION"), "+ranks.6");

/// What an agent and an engine tell each other over the control socket. Raised when one of two releases would misread
/// the other, and only then: an agent adopts the engines of its own number, and those of another end with it.
pub const CONTROL_VERSION: u32 = 1;
