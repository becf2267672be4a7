//! The vocabulary that crosses between processes: what gateways ask of engines, what comes back, and what an
//! agent tells the engine that it starts. No Kubernetes, no sockets, no clock.

pub mod conversation;
pub mod engine_config;
pub mod engine_options;
pub mod event;
pub mod prefix_mark;
pub mod request;
