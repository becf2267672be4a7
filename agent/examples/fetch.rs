//! Copies one model into a directory and exits: an agent's store as a separate process, so that a test can
//! kill it. Arguments: the hub's URL, the model's URI, the directory.

use russet_agent::store::{Context, SourceSpec, Store, TransferProgress};

#[tokio::main]
async fn main() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, uri, folder] = &arguments[..] else { panic!("three arguments are needed") };
    let context = Context::new(endpoint, vec![]).expect("a hub's URL");
    let store = Store::open(folder.into(), context).expect("a folder to write to");
    let source = SourceSpec { uri: uri.clone(), ..SourceSpec::default() };
    let progress = tokio::sync::watch::Sender::new(TransferProgress::default());
    store.fetch(&source, &progress).await.expect("a whole model");
}
