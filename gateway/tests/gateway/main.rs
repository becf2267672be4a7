//! The gateway against engines that are real gRPC servers over mutual TLS and speak from a script.
//! No cluster: the table of deployments is published from memory,
//! or by an API server that is.

// Helpers of tests may panic as tests may.
#![allow(clippy::unwrap_used)]

mod responses;
mod cluster;
mod resume;
mod failures;
mod holding;
mod keys;
mod harness;
mod network;
mod errors;
mod sdk;
mod limits;
