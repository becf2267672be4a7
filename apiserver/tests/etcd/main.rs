//! The suite of `api` again with the objects in etcd, and tests of several servers on one etcd. Every test
//! needs the program that `RUSSET_ETCD` names.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

#[path = "../api/main.rs"]
mod api;
mod failures;
mod two_servers;
