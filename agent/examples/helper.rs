//! The root helper as a program that handles one request, for tests that kill it, and a client for it.
//!
//! ```text
//! helper STATE PREFIX BOOT REQUEST     opens the journal in STATE, handles the request, prints the reply
//! helper ask SOCKET                    asks a helper for its changes, prints the reply or the error
//! ```
//!
//! Interfaces whose names begin with PREFIX simulate Thunderbolt. `RUSSET_KILL=point:count` in its
//! environment kills it when it reaches that point for that time.

#![allow(clippy::unwrap_used, reason = "a program of tests fails by panicking")]

#[path = "spread/kill.rs"]
mod kill;

use std::path::Path;

use russet_agent::helper::{Helper, HelperPolicy, HelperRequest, HostController, send_request};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    if let Ok(end) = std::env::var("RUSSET_KILL") {
        kill::signal_at(&end, rustix::process::Signal::KILL);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [_, socket] = &words[..] {
        return println!("{:?}", send_request(Path::new(socket), &HelperRequest::Read {}).await);
    }
    let [state, prefix, boot, request] = &words[..] else {
        panic!("see the head of agent/examples/helper.rs")
    };
    let machine = HostController::new(None, Some(prefix.clone()));
    let mut helper = Helper::open(machine, HelperPolicy::default(), Path::new(state), boot).unwrap();
    helper.resume_after_boot().await.unwrap();
    let answer = helper.handle(serde_json::from_str(request).unwrap()).await;
    println!("{}", serde_json::to_string(&answer).unwrap());
}
