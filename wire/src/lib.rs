//! The vocabulary that gateway, agents and engines share: what a request is, what comes back,
//! what a model weighs and which models are known at all. No Kubernetes, no sockets, no clock.

pub mod architecture;
pub mod event;
pub mod request;
pub mod shape;
