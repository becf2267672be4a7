//! The embedded Kubernetes-style API server.
//!
//! Not here: any kind of ours; they arrive as custom resource definitions.

pub mod openapi;
pub mod patch;
pub mod protobuf;
pub mod schema;
pub mod table;
