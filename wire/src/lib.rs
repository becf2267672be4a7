//! The vocabulary that gateway and engines share: what a request is and what comes back. No Kubernetes, no sockets, no
//! clock.

pub mod event;
pub mod request;
