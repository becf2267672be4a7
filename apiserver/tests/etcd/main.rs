//! The suite of `api` once more with the objects in etcd, and what only several servers on one etcd can show. Every test
//! needs the program that `RUSSET_ETCD` names.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

#[path = "../api/main.rs"]
mod api;
mod failures;
mod two_servers;
