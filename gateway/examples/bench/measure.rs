//! Starts all processes, measures the targets in turn so that other load on the machine affects all alike,
//! and prints the figures.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use russet_rpc::tls::{self, TlsFiles};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::load::{LoadResult, LoadTarget, run as load};
use crate::roles::NODE;

/// Rounds of every target.
const ROUNDS: usize = 7;
/// Duration of one measurement.
const MEASURE_TIME: Duration = Duration::from_secs(3);

/// A child process that is killed on drop, and the output it printed.
struct RoleProcess {
    _child: Child,
    output: Vec<String>,
}

impl RoleProcess {
    async fn start(arguments: &[&str], lines: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // In production the log goes to a file; here it is written and discarded.
            .stderr(std::fs::File::create("/dev/null").unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut output_lines = Vec::new();
        while output_lines.len() < lines {
            output_lines.push(output.next_line().await.unwrap().expect("the role prints its address"));
        }
        Self { _child: child, output: output_lines }
    }

    fn address(&self) -> SocketAddr {
        self.output[0].parse().unwrap()
    }
}

/// The identities of an engine and of a gateway, of one CA.
pub fn identities(folder: &Path) -> (TlsFiles, TlsFiles) {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "bench");
    let ca = params.clone().self_signed(&ca_key).unwrap().pem();
    let issuer = Issuer::new(params, ca_key);
    let identity = |user: &str, names: Vec<String>| {
        let folder = folder.join(user.replace(':', "-"));
        std::fs::create_dir(&folder).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, user);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let files = TlsFiles::in_dir(&folder);
        std::fs::write(&files.cert, params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        std::fs::write(&files.ca, &ca).unwrap();
        files
    };
    (
        identity(&tls::node_user(NODE), vec![tls::node_dns_name(NODE)]),
        identity(tls::GATEWAY_USER, vec![tls::GATEWAY_DNS_NAME.to_owned()]),
    )
}

/// nginx before `upstream`, configured as its documentation says for upstream keep-alive and for streams.
async fn nginx(program: &str, folder: &Path, upstream: SocketAddr) -> (Child, SocketAddr) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let folder_text = folder.display();
    let config = format!(
        "daemon off; pid {folder_text}/nginx.pid; error_log {folder_text}/nginx.log; worker_processes auto;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; client_body_temp_path {folder_text}/a; proxy_temp_path {folder_text}/b;\n\
         fastcgi_temp_path {folder_text}/c; uwsgi_temp_path {folder_text}/d; scgi_temp_path {folder_text}/e;\n\
         keepalive_requests 100000000;\n\
         upstream fake {{ server {upstream}; keepalive 64; keepalive_requests 100000000; }}\n\
         server {{ listen {address}; location / {{ proxy_pass http://fake; proxy_http_version 1.1;\n\
         proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n"
    );
    let path = folder.join("nginx.conf");
    std::fs::write(&path, config).unwrap();
    // Its workers may outlive it, and must not keep this process's output open.
    let mut command = Command::new(program);
    let child = command.arg("-c").arg(&path).stdout(Stdio::null()).kill_on_drop(true).spawn().unwrap();
    for _ in 0..500 {
        if tokio::net::TcpStream::connect(address).await.is_ok() {
            return (child, address);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!(
        "nginx does not listen: {}",
        std::fs::read_to_string(folder.join("nginx.log")).unwrap_or_default()
    );
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures, and prints the figures.
pub async fn run(nginx_program: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (engine_files, gateway_files) = identities(folder.path());
    let folder_of = |files: &TlsFiles| files.cert.parent().unwrap().to_str().unwrap().to_owned();
    let engine = RoleProcess::start(&["engine", &folder_of(&engine_files)], 1).await;
    let upstream = RoleProcess::start(&["upstream"], 1).await;
    let gateway = RoleProcess::start(&["gateway", &folder_of(&gateway_files), &engine.output[0]], 2).await;
    let (mut nginx, nginx_address) = nginx(nginx_program, folder.path(), upstream.address()).await;
    let key = gateway.output[1].clone();
    let http = |address| LoadTarget::Http { address, key: key.clone() };
    let through = http(gateway.address());
    let direct = LoadTarget::Grpc { address: engine.address(), files: gateway_files };
    let peer_through = http(nginx_address);
    let peer_direct = http(upstream.address());

    for (streamed, what) in [(false, "to the end of an answer"), (true, "to the first token of a stream")] {
        let (ours, its) = saturated([&through, &peer_through], streamed).await;
        if !streamed {
            print_figure("answers a second when saturated", ours, its, "1/s", false);
        }
        let rate = Some(ours / 2.0);
        let mut added: [(Vec<f64>, Vec<f64>); 2] = Default::default();
        for _ in 0..ROUNDS {
            let mut turn: Vec<LoadResult> = Vec::new();
            for target in [&direct, &through, &peer_direct, &peer_through] {
                turn.push(load(target, streamed, rate, MEASURE_TIME).await);
            }
            for (quantile, (mine, its)) in [0.5, 0.99].into_iter().zip(&mut added) {
                mine.push(turn[1].quantile(quantile) - turn[0].quantile(quantile));
                its.push(turn[3].quantile(quantile) - turn[2].quantile(quantile));
            }
        }
        let [(p50, its_p50), (p99, its_p99)] = added;
        print_figure(&format!("added {what}, p50 at half load"), median(p50), median(its_p50), "ms", false);
        print_figure(&format!("added {what}, p99 at half load"), median(p99), median(its_p99), "ms", true);
    }
    let mut stop = Command::new(nginx_program);
    stop.arg("-c").arg(folder.path().join("nginx.conf")).args(["-s", "stop"]).status().await.unwrap();
    nginx.wait().await.unwrap();
}

/// Answers per second of two targets under full load: the medians of three rounds.
async fn saturated(targets: [&LoadTarget; 2], streamed: bool) -> (f64, f64) {
    let mut rates = [vec![], vec![]];
    for _ in 0..3 {
        for (target, rates) in targets.into_iter().zip(&mut rates) {
            rates.push(load(target, streamed, None, MEASURE_TIME).await.rate);
        }
    }
    let [ours, its] = rates.map(median);
    (ours, its)
}

fn print_figure(what: &str, ours: f64, peer: f64, unit: &str, judged: bool) {
    println!(
        "{}",
        serde_json::json!({"what": what, "ours": ours, "peer": peer, "unit": unit, "judged": judged})
    );
}
