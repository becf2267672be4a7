//! The bench of the gateway, for `cargo xtask bench gateway`: an engine and an HTTP upstream that
//! answer at once, the gateway and nginx in front of them, and a load generator, each a process of
//! its own. Prints a line of JSON for each figure. `bench NGINX` runs all; the other words are roles.

// What a bench cannot do it may say by ending.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod load;
mod roles;
mod measure;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        match words.as_slice() {
            ["engine", folder] => roles::engine(folder.as_ref()).await,
            ["upstream"] => roles::upstream().await,
            ["gateway", folder, engine] => roles::gateway(folder.as_ref(), engine).await,
            [nginx] => measure::run(nginx).await,
            _ => panic!("bench NGINX"),
        }
    });
}
