//! Programs of `examples/spread.rs`.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

#[path = "kill.rs"]
mod kill;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use russet_agent::peer_download::{PeerDownloader, PeerPath};
use russet_agent::peers;
use russet_agent::store::{Context, SourceSpec, Store, TransferProgress};
use russet_agent::transfer_limits::TransferLimiter;
use russet_rpc::ports::{Egress, connect_from};
use russet_rpc::tls::{Protocol, TlsFiles, node_dns_name, node_user};
use rustix::process::Signal;
use tokio::sync::watch;

/// The same allocator as in `russet`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Connections per path, as in the agent.
const CONNECTIONS_PER_PATH: usize = 3;
/// Bytes per read or write.
const BLOCK_BYTES: usize = 1 << 20;

pub fn main() {
    rustls::crypto::ring::default_provider().install_default().unwrap();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    for (variable, signal) in [("RUSSET_KILL", Signal::KILL), ("RUSSET_STOP", Signal::STOP)] {
        if let Ok(step) = std::env::var(variable) {
            kill::signal_at(&step, signal);
        }
    }
    if let Ok(full) = std::env::var("RUSSET_FULL") {
        let (point, count) = full.split_once(':').unwrap();
        fail::cfg(point, &format!("{count}*off->return")).unwrap();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    match &words[..] {
        ["fetch", folder, node] => runtime.block_on(fetch(Path::new(folder), node)),
        ["collect", folder, node] => drop(store(Path::new(folder), node).collect(&BTreeSet::new()).unwrap()),
        ["make", folder, size, nodes @ ..] => {
            runtime.block_on(make(Path::new(folder), size.parse().unwrap(), nodes));
        }
        ["serve", folder, node, at @ ..] => runtime.block_on(serve(Path::new(folder), node, at)),
        ["pull", folder, node, paths @ ..] => runtime.block_on(download(Path::new(folder), node, paths)),
        ["pour", file, at @ ..] => serve_raw(Path::new(file), at),
        ["drain", size, paths @ ..] => runtime.block_on(download_raw(size.parse().unwrap(), None, paths)),
        ["keep", size, file, paths @ ..] => {
            runtime.block_on(download_raw(size.parse().unwrap(), Some(Path::new(file)), paths));
        }
        ["ranges", file, at @ ..] => runtime.block_on(ranges(Path::new(file), at)),
        _ => panic!("see the head of agent/examples/spread.rs"),
    }
}

/// CPU seconds of this process so far.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    // utime and stime, in ticks of a hundredth of a second on every Linux that matters.
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn report_usage(seconds: f64, bytes: u64) {
    println!("{}", serde_json::json!({"seconds": seconds, "cpu": cpu(), "bytes": bytes}));
}

fn store(folder: &Path, node: &str) -> Store {
    let context = Context::new("https://huggingface.co", vec![folder.to_owned()]).unwrap();
    Store::open(folder.join(format!("models-{node}")), context).unwrap()
}

fn source_spec(folder: &Path) -> SourceSpec {
    SourceSpec { uri: format!("file://{}", folder.join("source").display()), ..SourceSpec::default() }
}

async fn make(folder: &Path, mebibytes: usize, nodes: &[&str]) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    for node in nodes {
        let own = folder.join(node);
        std::fs::create_dir_all(&own).unwrap();
        let files = TlsFiles::in_dir(&own);
        let mut params = CertificateParams::new(vec![node_dns_name(node)]).unwrap();
        params.distinguished_name.push(DnType::CommonName, node_user(node));
        let key = KeyPair::generate().unwrap();
        std::fs::write(&files.cert, params.signed_by(&key, &ca).unwrap().pem()).unwrap();
        std::fs::write(&files.ca, ca.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
    }
    let source = folder.join("source");
    std::fs::create_dir_all(&source).unwrap();
    let config = r#"{"model_type":"llama","num_hidden_layers":1,"hidden_size":4,"num_attention_heads":2,"vocab_size":2}"#;
    std::fs::write(source.join("config.json"), config).unwrap();
    let data = mebibytes << 20;
    let header = serde_json::json!({
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "model.layers.0.w.weight": {"dtype": "F32", "shape": [data / 4], "data_offsets": [32, 32 + data]},
    });
    let header = header.to_string();
    let mut file = std::fs::File::create(source.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&[0; 32]).unwrap();
    // Incompressible bytes.
    let mut block = vec![0; BLOCK_BYTES];
    for _ in 0..mebibytes {
        rand::Rng::fill(&mut rand::rng(), &mut block[..]);
        file.write_all(&block).unwrap();
    }
    let progress = watch::Sender::new(TransferProgress::default());
    let published = store(folder, "seed").fetch(&source_spec(folder), &progress).await.unwrap();
    std::fs::write(folder.join("id"), &published.id).unwrap();
    println!("{}", published.path.join("model.safetensors").display());
}

/// Fetches the model like an agent with access to the source.
async fn fetch(folder: &Path, node: &str) {
    let progress = watch::Sender::new(TransferProgress::default());
    store(folder, node).fetch(&source_spec(folder), &progress).await.unwrap();
}

/// Serves models; prints its CPU seconds when its standard input closes.
async fn serve(folder: &Path, node: &str, at: &[&str]) {
    let files = TlsFiles::in_dir(&folder.join(node));
    for address in at {
        let serving =
            peers::serve(files.clone(), address.parse().unwrap(), store(folder, node)).await.unwrap();
        tokio::spawn(serving);
    }
    println!("ready");
    wait_stdin().await;
    report_usage(0.0, 0);
}

async fn wait_stdin() {
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()).ok()).await.unwrap();
}

fn parse_path(path: &str) -> (IpAddr, SocketAddr) {
    let (from, to) = path.split_once('>').unwrap();
    (from.parse().unwrap(), to.parse().unwrap())
}

/// Downloads the model, and serves it meanwhile at the addresses given as `@ip:port`.
async fn download(folder: &Path, node: &str, paths: &[&str]) {
    let files = TlsFiles::in_dir(&folder.join(node));
    let store = store(folder, node);
    for address in paths.iter().filter_map(|path| path.strip_prefix('@')) {
        let serving = peers::serve(files.clone(), address.parse().unwrap(), store.clone()).await.unwrap();
        tokio::spawn(serving);
    }
    let puller = PeerDownloader {
        store,
        connector: files.connector(Protocol::Agents).unwrap(),
        limiter: TransferLimiter::default(),
    };
    let paths: BTreeSet<PeerPath> = paths
        .iter()
        .filter_map(|path| path.split_once('='))
        .map(|(peer, path)| {
            let (from, to) = parse_path(path);
            PeerPath { peer: peer.to_owned(), egress: egress(from), to, fallback: false }
        })
        .collect();
    let id = std::fs::read_to_string(folder.join("id")).unwrap();
    let progress = watch::Sender::new(TransferProgress::default());
    println!("ready");
    let began = Instant::now();
    puller.download(&source_spec(folder), &id, || paths.clone(), &progress).await.unwrap();
    let state = progress.borrow().clone();
    report_usage(began.elapsed().as_secs_f64(), state.total);
    // Other nodes may still request chunks.
    wait_stdin().await;
}

fn serve_raw(file: &Path, at: &[&str]) {
    let file = Arc::new(std::fs::File::open(file).unwrap());
    let size = file.metadata().unwrap().len();
    for address in at {
        let (listener, file) = (std::net::TcpListener::bind(address).unwrap(), file.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, file) = (stream.unwrap(), file.clone());
                std::thread::spawn(move || {
                    let mut offset = 0;
                    // Until the client closes.
                    while rustix::fs::sendfile(&stream, &*file, Some(&mut offset), BLOCK_BYTES).is_ok() {
                        if offset >= size {
                            offset = 0;
                        }
                    }
                });
            }
        });
    }
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    report_usage(0.0, 0);
}

/// The egress through the interface that has this address.
fn egress(from: IpAddr) -> Egress {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let found = interfaces.into_iter().find(|interface| interface.ip() == from);
    Egress { address: from, interface: found.map(|interface| interface.name) }
}

/// Discards the bytes, or writes them into a file, one block of each stream after the other.
async fn download_raw(mebibytes: u64, into: Option<&Path>, paths: &[&str]) {
    let total = mebibytes << 20;
    let [read, written]: [Arc<AtomicU64>; 2] = Default::default();
    // One write at a time, like the agent: on a locked file, waiting writers would burn a core.
    let into = into.map(|path| Arc::new(Mutex::new(std::fs::File::create(path).unwrap())));
    let mut streams = Vec::new();
    for path in paths {
        let (from, to) = parse_path(path);
        for _ in 0..CONNECTIONS_PER_PATH {
            let stream = connect_from(&egress(from), to).await.unwrap().into_std().unwrap();
            stream.set_nonblocking(false).unwrap();
            // A path that dies in the middle must not block the others.
            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            streams.push(stream);
        }
    }
    println!("ready");
    let began = Instant::now();
    let readers: Vec<_> = streams
        .into_iter()
        .map(|mut stream| {
            let (read, written, into) = (read.clone(), written.clone(), into.clone());
            std::thread::spawn(move || {
                let (mut block, mut filled) = (vec![0; BLOCK_BYTES], 0);
                while read.load(Ordering::Relaxed) < total {
                    let Ok(count) = stream.read(&mut block[filled..]) else { return };
                    read.fetch_add(count as u64, Ordering::Relaxed);
                    let Some(file) = &into else { continue };
                    filled += count;
                    if filled == BLOCK_BYTES {
                        let at = written.fetch_add(BLOCK_BYTES as u64, Ordering::Relaxed);
                        file.lock().unwrap().write_all_at(&block, at).unwrap();
                        filled = 0;
                    }
                }
            })
        })
        .collect();
    while read.load(Ordering::Relaxed) < total {
        std::thread::sleep(Duration::from_millis(1));
    }
    report_usage(began.elapsed().as_secs_f64(), total);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

async fn ranges(file: &Path, at: &[&str]) {
    let path: Arc<Path> = file.into();
    for address in at {
        let path = path.clone();
        let answer = move |headers: axum::http::HeaderMap| {
            let path = path.clone();
            async move { part(&path, headers.get("range").and_then(|range| range.to_str().ok())).await }
        };
        let router = axum::Router::new().route("/model.safetensors", axum::routing::get(answer));
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    }
    println!("ready");
    wait_stdin().await;
    report_usage(0.0, 0);
}

async fn part(path: &Path, range: Option<&str>) -> axum::response::Response {
    use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
    let mut file = tokio::fs::File::open(path).await.unwrap();
    let size = file.metadata().await.unwrap().len();
    let (first, last) =
        range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')).unwrap_or_default();
    let (first, last) =
        (first.parse().unwrap_or(0), last.parse().map_or(size, |last: u64| size.min(last + 1)));
    file.seek(std::io::SeekFrom::Start(first)).await.unwrap();
    let stream = tokio_util::io::ReaderStream::with_capacity(file.take(last - first), BLOCK_BYTES);
    let answer = axum::response::Response::builder()
        .status(if range.is_some() { 206 } else { 200 })
        .header("accept-ranges", "bytes")
        .header("content-length", last - first)
        .header("content-range", format!("bytes {first}-{}/{size}", last - 1));
    answer.body(axum::body::Body::from_stream(stream)).unwrap()
}
