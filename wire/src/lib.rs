//! The vocabulary that gateway, agents and engines share: what a request is, what comes back,
//! what a model weighs and which rank holds what. No Kubernetes, no sockets, no clock.

pub mod event;
pub mod partition;
pub mod request;
pub mod shape;
