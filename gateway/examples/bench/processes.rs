//! The processes that are measured: roles of this program in processes of their own, and the peers nginx and LiteLLM.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use russet_rpc::tls::{self, TlsFiles};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::processor_time;
use crate::roles::NODE;

/// A child process that is killed on drop, and the output it printed.
pub struct RoleProcess {
    child: Child,
    pub output: Vec<String>,
}

impl RoleProcess {
    pub async fn start(arguments: &[&str], lines: usize) -> Self {
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
        Self { child, output: output_lines }
    }

    pub fn address(&self) -> SocketAddr {
        self.output[0].parse().unwrap()
    }

    /// What it has had of the processor.
    pub fn processor_time(&self) -> Duration {
        processor_time::of(self.child.id().expect("it runs"))
    }

    /// Its resident memory, in bytes.
    pub fn memory(&self) -> u64 {
        let status = format!("/proc/{}/status", self.child.id().expect("it runs"));
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

/// A program of others, which ends with all that it started when this is dropped.
pub struct PeerProcess {
    child: Child,
    pub address: SocketAddr,
}

impl PeerProcess {
    /// What it and its workers have had of the processor.
    pub fn processor_time(&self) -> Duration {
        processor_time::of_group(self.child.id().expect("it runs"))
    }

    /// Starts it, and waits until it listens.
    async fn start(name: &str, command: &mut Command, address: SocketAddr, log: &Path) -> Self {
        // Its workers may outlive it, and must not keep this process's output open.
        let output = || std::fs::File::options().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(output()).stderr(output()).process_group(0);
        let peer = Self { child: command.spawn().unwrap(), address };
        listens(name, address, log).await;
        peer
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let group = self.child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32));
        if let Some(group) = group {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
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
pub async fn nginx(program: &str, folder: &Path, upstream: SocketAddr) -> PeerProcess {
    let address = free_address();
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
    let mut command = Command::new(program);
    PeerProcess::start("nginx", command.arg("-c").arg(&path), address, &folder.join("nginx.log")).await
}

/// LiteLLM's proxy before `upstream`, with one model and a key, as many workers as cores.
pub async fn litellm(program: &str, folder: &Path, upstream: SocketAddr) -> PeerProcess {
    let address = free_address();
    let config = folder.join("litellm.yaml");
    std::fs::write(
        &config,
        format!(
            "model_list: [{{model_name: m, litellm_params: {{model: openai/m, api_base: \"http://{upstream}/v1\", api_key: none}}}}]\n\
             general_settings: {{master_key: {LITELLM_KEY}}}\n"
        ),
    )
    .unwrap();
    let mut command = Command::new(program);
    command
        .args(["--host", "127.0.0.1", "--port", &address.port().to_string(), "--telemetry", "False"])
        .args(["--num_workers", &std::thread::available_parallelism().unwrap().to_string()])
        .arg("--config")
        .arg(&config)
        .envs([("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("LITELLM_LOG", "ERROR"), ("NO_PROXY", "*")]);
    PeerProcess::start("LiteLLM", &mut command, address, &folder.join("litellm.log")).await
}

/// The key of LiteLLM's proxy.
pub const LITELLM_KEY: &str = "sk-bench";

fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Waits until a program listens.
async fn listens(what: &str, address: SocketAddr, log: &Path) {
    for _ in 0..12_000 {
        if tokio::net::TcpStream::connect(address).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} does not listen: {}", std::fs::read_to_string(log).unwrap_or_default());
}
