//! The root helper as a program of its own that answers one request, for tests that kill it, and one that asks.
//!
//! ```text
//! helper STATE PREFIX BOOT REQUEST     begins with the journal in STATE, answers, and prints the answer
//! helper ask SOCKET                    asks a helper what it holds, and prints the answer or why there is none
//! ```
//!
//! Interfaces whose names begin with PREFIX play Thunderbolt. With `RUSSET_KILL=point:count` in its environment it is
//! killed when it comes to that point for that time.

#![allow(clippy::unwrap_used, reason = "a program of tests fails by panicking")]

#[path = "spread/kill.rs"]
mod kill;

use std::path::Path;

use russet_agent::helper::{Helper, HostController, HelperPolicy, HelperRequest, send_request};

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
