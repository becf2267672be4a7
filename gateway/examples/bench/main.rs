//! The gateway's benchmark, for `cargo xtask bench gateway`: an engine and an HTTP upstream that respond
//! immediately, the gateway, nginx and LiteLLM's proxy in front of them, and a load generator, each in its own process.
//! Prints a line of JSON per figure. `bench all NGINX [LITELLM]` runs all, `bench policy` what Budgets and the audit log cost,
//! `bench processor` the processor's time of a request, `bench chunks` what is added to chunks, beside nothing; the other words
//! are roles. `bench replicas`, for
//! `cargo xtask bench replicas`, is about the choice of a replica.

// The benchmark fails by panicking.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod arrivals;
mod chunks;
mod figure;
mod load;
mod load_request;
mod measure;
mod processes;
mod processor_time;
mod reading_engine;
mod replicas;
mod roles;
mod streams;

use figure::figure;
use russet_tests::processes::raise_file_limit;

/// As in `russet`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    // A thousand streams want more than most shells allow.
    raise_file_limit();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let _ = rustls::crypto::ring::default_provider().install_default();
    // What stands beside the gateway is to take little of the cores: one thread.
    let runtime = match words.as_slice() {
        ["gateway", ..] | ["replicas"] => tokio::runtime::Runtime::new(),
        _ => tokio::runtime::Builder::new_current_thread().enable_all().build(),
    };
    let runtime = runtime.unwrap();
    runtime.block_on(async {
        match words.as_slice() {
            ["engine", folder] => roles::engine(folder.as_ref()).await,
            ["upstream"] => roles::upstream().await,
            ["gateway", folder, engine] => roles::gateway(folder.as_ref(), engine, None).await,
            ["gateway", folder, engine, policy] => {
                roles::gateway(folder.as_ref(), engine, Some(policy.as_ref())).await;
            }
            ["policy"] => measure::run_policy().await,
            ["processor"] => measure::run_processor().await,
            ["chunks"] => measure::run_chunks().await,
            ["replicas"] => replicas::run().await,
            ["all", nginx] => measure::run(nginx, None).await,
            ["all", nginx, litellm] => measure::run(nginx, Some(litellm)).await,
            _ => panic!("bench all NGINX [LITELLM]"),
        }
    });
}
