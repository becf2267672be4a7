//! A proxy between two agents that flips one bit of each connection at a random place: every flip is
//! detected, and costs no more than a piece or two.
//!
//! `RUSSET_FLIPS` bits, by default a hundred.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use russet_agent::peer_download::{PeerDownloader, PeerPath};
use russet_agent::peers;
use russet_agent::store::{Context, SourceSpec, Store, TransferProgress};
use russet_agent::transfer_limits::TransferLimiter;
use russet_rpc::tls::{Protocol, TlsFiles};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Size of the model, in MiB.
const MODEL_MIB: u64 = 40;
/// The flip is within this many bytes of a connection: sometimes during the TLS handshake.
const FLIP_INTERVAL_BYTES: u64 = 4 << 20;
/// Maximum bytes received twice: a piece, and another one requested twice in the endgame; less than their
/// chunk.
const MAX_REPEATED_BYTES: u64 = 2 << 20;

/// Counters of the proxy.
#[derive(Default)]
struct FlipCount {
    bits: AtomicU64,
    bytes: AtomicU64,
}

async fn proxy(listener: TcpListener, to: SocketAddr, flipped: Arc<FlipCount>) {
    loop {
        let (near, _) = listener.accept().await.unwrap();
        let flipped = flipped.clone();
        tokio::spawn(async move {
            let Ok(far) = TcpStream::connect(to).await else { return };
            let ((mut asks, mut gets), (mut answers, mut takes)) = (near.into_split(), far.into_split());
            let asking = async move { drop(tokio::io::copy(&mut asks, &mut takes).await) };
            tokio::join!(asking, async move {
                let (mut left, mut block) = (rand::random_range(0..FLIP_INTERVAL_BYTES), vec![0; 64 << 10]);
                let mut done = false;
                while let Ok(count @ 1..) = answers.read(&mut block).await {
                    if !done && left < count as u64 {
                        block[left as usize] ^= 1 << rand::random_range(0..8);
                        flipped.bits.fetch_add(1, Ordering::SeqCst);
                        done = true;
                    }
                    left = left.saturating_sub(count as u64);
                    flipped.bytes.fetch_add(count as u64, Ordering::SeqCst);
                    if gets.write_all(&block[..count]).await.is_err() {
                        return;
                    }
                }
            });
        });
    }
}

fn store(folder: &Path) -> Store {
    Store::open(folder.to_owned(), Context::new("https://huggingface.co", Vec::new()).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_bit_flip_in_transit_is_detected() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let required_bits = std::env::var("RUSSET_FLIPS").map_or(100, |bits| bits.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().parent().unwrap().join("examples/spread");
    let path = folder.path();
    let made =
        Command::new(program).arg("make").arg(path).args([&MODEL_MIB.to_string(), "seed", "one"]).output();
    assert!(made.unwrap().status.success());
    let source = std::fs::read(path.join("source/model.safetensors")).unwrap();
    let id = std::fs::read_to_string(path.join("id")).unwrap();

    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
    let seed = store(&path.join("models-seed"));
    tokio::spawn(peers::serve(TlsFiles::in_dir(&path.join("seed")), at, seed).await.unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (to, flipped) = (listener.local_addr().unwrap(), Arc::new(FlipCount::default()));
    tokio::spawn(proxy(listener, at, flipped.clone()));
    let peer_path = |last| PeerPath {
        peer: "seed".into(),
        egress: IpAddr::from([127, 0, 0, last]).into(),
        to,
        fallback: false,
    };
    let paths: BTreeSet<PeerPath> = (1..=4).map(peer_path).collect();

    let (mut rounds, mut refused) = (0, 0);
    while flipped.bits.load(Ordering::SeqCst) < required_bits {
        let models = path.join("models-one");
        std::fs::remove_dir_all(&models).ok();
        let connector = TlsFiles::in_dir(&path.join("one")).connector(Protocol::Agents).unwrap();
        let puller = PeerDownloader { store: store(&models), connector, limiter: TransferLimiter::default() };
        let spec = SourceSpec { uri: "https://models.example/big".into(), ..SourceSpec::default() };
        let progress = watch::Sender::new(TransferProgress::default());
        let published = loop {
            match puller.download(&spec, &id, || paths.clone(), &progress).await {
                Ok(published) => break published,
                // The manifest is requested once over each path, and all of these may have been flipped.
                Err(error) => {
                    refused += 1;
                    assert!(refused < 10 * (rounds + 1), "{error}");
                }
            }
        };
        assert!(std::fs::read(published.path.join("model.safetensors")).unwrap() == source);
        rounds += 1;
    }
    let (bits, bytes) = (flipped.bits.load(Ordering::SeqCst), flipped.bytes.load(Ordering::SeqCst));
    let once = rounds * (source.len() as u64);
    let again = bytes.saturating_sub(once) as f64 / bits as f64 / f64::from(1 << 20);
    let tell = |what: &str, ours: f64, unit: &str| {
        println!("{}", serde_json::json!({"what": what, "ours": ours, "unit": unit}));
    };
    tell("bits that changed between two machines, each caught", bits as f64, "bits");
    tell("came again for each of them", again, "MiB");
    assert!(bytes <= once + once / 50 + bits * MAX_REPEATED_BYTES, "{bytes} bytes for {once}, {bits} bits");
}
