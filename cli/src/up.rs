//! `russet up`: supervises `serve`, `gateway` and `agent` as children and restarts each separately.

mod certificate;
mod model_folders;

use std::collections::VecDeque;
use std::io::IsTerminal as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use russet_telemetry::logfile;
use russet_telemetry::say;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::agent::SourceArguments;
use crate::client;
use crate::data_dir::{self, DataDir};
use crate::etcd::EtcdArguments;
use crate::gateway::{CertificateArguments, OriginArguments};
use crate::log_rotation;
use crate::mqtt::MqttArguments;
use crate::response_store::ResponseStoreArguments;
use crate::signals::{self, StopSignal};
use crate::stdout;

/// Maximum backoff before a restart: short enough to notice a freed port.
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// Backoff before restarts; it doubles while a child keeps failing.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(200))
    .with_max_delay(MAX_BACKOFF)
    .without_max_times();
/// A child that ran this long had started well, so the backoff is reset.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);
/// Time for children to stop before they are killed: open streams get the gateway's ten seconds.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// Interval between two checks of the gateway's certificate.
const CERTIFICATE_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Arguments of `russet up`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder for everything; default ~/.russet.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Port of the API server.
    #[arg(long, default_value_t = 6443)]
    api_port: u16,
    /// Address of this machine to open for other machines once a join token exists, instead of all; may repeat.
    #[arg(long = "api-listen", value_name = "ADDRESS")]
    api_listen: Vec<IpAddr>,
    /// Port of the gateway.
    #[arg(long, default_value_t = 52415)]
    gateway_port: u16,
    /// Address for clients on other machines, with TLS and a key, such as 0.0.0.0:8443; may repeat.
    #[arg(long)]
    gateway_listen: Vec<SocketAddr>,
    #[command(flatten)]
    certificate: CertificateArguments,
    #[command(flatten)]
    origins: OriginArguments,
    /// Let holders of keys with `modelManagement: Allowed` (`russet key create --model-management`) pull, copy and delete
    /// models by Ollama's API.
    #[arg(long)]
    model_management: bool,
    /// Keep no responses of OpenAI's Responses API, no files and no batches; else they are in the folder of the gateway.
    #[arg(long)]
    no_responses_store: bool,
    #[command(flatten)]
    response_store: ResponseStoreArguments,
    /// Write no audit log; else it is in the folder of the gateway.
    #[arg(long)]
    no_audit_log: bool,
    #[command(flatten)]
    etcd: EtcdArguments,
    /// Run no node agent; this machine is only a control plane.
    #[arg(long)]
    no_agent: bool,
    /// Name of this machine's node; default the host name.
    #[arg(long)]
    node_name: Option<String>,
    /// Memory that this machine's node claims to have, such as 64Gi.
    #[arg(long)]
    memory: Option<String>,
    /// Address at which other machines reach this machine's node.
    #[arg(long)]
    address: Option<IpAddr>,
    #[command(flatten)]
    sources: SourceArguments,
    /// The engine of this machine's node; default `russet-engine` beside this program.
    #[arg(long)]
    engine_binary: Option<PathBuf>,
    /// Address that serves the control plane's `/metrics` and `/targets`, without TLS; this machine's node
    /// uses the same address and a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    metrics_listen: SocketAddr,
    #[command(flatten)]
    presence: MqttArguments,
    /// Take requests of the inbox from the broker of --mqtt: PREFIX/inbox/ID, with a key in each message.
    #[arg(long, requires = "mqtt", conflicts_with = "no_responses_store")]
    mqtt_inbox: bool,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// Exit when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// Runs until Ctrl-C.
pub async fn run(arguments: Arguments) -> Result<()> {
    let layout = DataDir::open(arguments.data_dir.clone())?;
    data_dir::make_private(&layout.logs())?;
    let _lock = lock(&layout)?;
    let names = crate::agent::NodeArguments {
        data_dir: None,
        node_name: arguments.node_name.clone(),
        memory: arguments.memory.clone(),
        sources: SourceArguments::default(),
        address: arguments.address,
        engine_binary: None,
        metrics_listen: arguments.metrics_listen,
        fabric_tools: None,
        helper: russet_agent::helper::SOCKET.into(),
        presence: arguments.presence.clone(),
        json_logs: false,
        exit_with_parent: false,
    };
    names.memory_bytes()?;
    // Check here: a child would report the error only in its log.
    names.presence.config()?;
    let node = names.name();

    let mut common: Vec<String> =
        vec!["--data-dir".into(), layout.root().display().to_string(), "--exit-with-parent".into()];
    if arguments.json_logs {
        common.push("--json-logs".into());
    }
    let mut serve = ChildProcess::new("serve", &layout, &common);
    serve.arguments.extend(["--api-port".into(), arguments.api_port.to_string()]);
    for address in &arguments.api_listen {
        serve.arguments.extend(["--api-listen".into(), address.to_string()]);
    }
    serve.arguments.extend(["--metrics-listen".into(), arguments.metrics_listen.to_string()]);
    serve.arguments.extend(arguments.etcd.to_flags());
    if !arguments.no_agent {
        serve.arguments.extend(["--local-node".into(), node.clone()]);
    }
    let mut gateway = ChildProcess::new("gateway", &layout, &common);
    gateway.arguments.extend(["--listen".into(), format!("127.0.0.1:{}", arguments.gateway_port)]);
    gateway.arguments.extend(arguments.origins.to_flags());
    if !arguments.no_responses_store {
        gateway.arguments.extend(arguments.response_store.to_flags(&layout.gateway_responses()));
    }
    if arguments.mqtt_inbox {
        gateway.arguments.extend(arguments.presence.broker.to_flags());
    }
    if !arguments.no_audit_log {
        gateway.arguments.extend(["--audit-log".into(), layout.gateway_audit().display().to_string()]);
    }
    if arguments.model_management {
        // The API server gives the right, and the gateway uses it.
        serve.arguments.push("--model-management".into());
        gateway.arguments.push("--model-management".into());
    }
    let answers = layout.gateway_answers();
    gateway.arguments.extend(["--answers-file".into(), answers.display().to_string()]);
    gateway.answers = Some(answers);
    let own_certificate = open_gateway(&mut gateway, &layout, &arguments);
    let mut agent = ChildProcess::new("agent", &layout, &common);
    agent.arguments.extend(["--node-name".into(), node]);
    // Authors of Models may be other people than the user of `up`: models of that user, and nothing else.
    let home = std::env::home_dir();
    let mut sources = arguments.sources.clone();
    sources.allow_file_roots.extend(model_folders::of_owner(home.as_deref(), |name| std::env::var_os(name)));
    agent.arguments.extend(sources.to_flags()?);
    agent.arguments.extend(arguments.presence.to_flags());
    let beside = SocketAddr::new(arguments.metrics_listen.ip(), 0);
    for (flag, value) in [
        ("--metrics-listen", Some(beside.to_string())),
        ("--memory", arguments.memory.clone()),
        ("--address", arguments.address.map(|address| address.to_string())),
        ("--engine-binary", arguments.engine_binary.as_ref().map(|path| path.display().to_string())),
    ] {
        if let Some(value) = value {
            agent.arguments.extend([flag.into(), value]);
        }
    }

    let ending = signals::stop_signal(arguments.exit_with_parent);
    tokio::pin!(ending);
    // The file of an earlier run would be taken for this one's.
    remove_if_there(&layout.metrics_address())?;
    serve.start()?;
    tokio::select! {
        result = wait_ready(&mut serve, &layout) => result?,
        _ = &mut ending => {
            serve.stop(StopSignal::Interrupted).await;
            return Ok(());
        }
    }
    if own_certificate {
        certificate::ensure(&layout, &listen_addresses(&arguments))?;
    }
    let mut children = vec![serve, gateway];
    if !arguments.no_agent {
        children.push(agent);
    }
    for child in children.iter_mut().skip(1) {
        child.start()?;
    }
    let address = format!("http://127.0.0.1:{}\n", arguments.gateway_port);
    std::fs::write(layout.gateway_address(), address)
        .with_context(|| format!("cannot write {}", layout.gateway_address().display()))?;
    // A daemon goes on without the reader of its standard output.
    let _ = stdout::write(announcement(&layout, &arguments));
    let (mut announced, answers) = (false, layout.gateway_answers());
    let ending = loop {
        tokio::select! {
            ending = &mut ending => break ending,
            () = supervise(&mut children) => {}
            () = until_there(&answers), if !announced => {
                announced = true;
                let _ = stdout::write(gateway_announcement(&layout, &arguments));
            }
            () = renew_certificate(&layout, &arguments), if own_certificate => {}
        }
    };
    say!("stopping …");
    // The agent stops first, so that it can still report; the store stops last.
    for child in children.iter_mut().rev() {
        child.stop(ending).await;
    }
    Ok(())
}

/// Makes the gateway listen for other machines, if configured; returns whether the certificate for that is
/// Russet's own.
fn open_gateway(gateway: &mut ChildProcess, layout: &DataDir, arguments: &Arguments) -> bool {
    for address in &arguments.gateway_listen {
        gateway.arguments.extend(["--listen".into(), address.to_string()]);
    }
    let named = arguments.certificate.files();
    let own = named.is_none() && !arguments.gateway_listen.is_empty();
    if let Some(files) = named.or_else(|| own.then(|| certificate::files(layout))) {
        gateway.arguments.extend(["--tls-cert".into(), files.cert.display().to_string()]);
        gateway.arguments.extend(["--tls-key".into(), files.key.display().to_string()]);
    }
    own
}

fn listen_addresses(arguments: &Arguments) -> Vec<IpAddr> {
    arguments.gateway_listen.iter().map(SocketAddr::ip).collect()
}

/// Renews the gateway's certificate for ever: it ages, and the machine's addresses change.
async fn renew_certificate(layout: &DataDir, arguments: &Arguments) {
    loop {
        tokio::time::sleep(CERTIFICATE_CHECK_INTERVAL).await;
        if let Err(error) = certificate::ensure(layout, &listen_addresses(arguments)) {
            say!("the gateway's certificate could not be renewed: {error:#}");
        }
    }
}

/// One control plane per folder: two would corrupt the store.
fn lock(layout: &DataDir) -> Result<std::fs::File> {
    let path = layout.root().join("up.lock");
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => bail!(
            "another `russet up` runs on {}; stop it, or name another --data-dir",
            layout.root().display()
        ),
        Err(std::fs::TryLockError::Error(error)) => {
            Err(error).context(format!("cannot lock {}", path.display()))
        }
    }
}

/// Waits for the first start of the API server. A child that exits before that ends `up` with its last log
/// lines, because a wrong port or folder needs a person.
async fn wait_ready(serve: &mut ChildProcess, layout: &DataDir) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = serve.exited() {
            bail!("the control plane ended at once ({status}):\n{}", serve.log_tail(10));
        }
        let written = [layout.gateway().join("kubeconfig"), layout.metrics_address()];
        if written.iter().all(|file| file.exists()) && is_serving(layout).await {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("the control plane is not ready after 60 s; its log:\n{}", serve.log_tail(10));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the API server responds to the administrator and has Russet's kinds.
async fn is_serving(layout: &DataDir) -> bool {
    let Ok(client) = client::client_from(&layout.admin_kubeconfig()).await else { return false };
    let Ok(request) = http::Request::get("/apis/russet.dev/v1alpha1").body(Vec::new()) else { return false };
    client.request_text(request).await.is_ok()
}

/// What runs once the control plane answers.
fn announcement(layout: &DataDir, arguments: &Arguments) -> String {
    let mut lines = vec!["Russet is up.".to_owned()];
    lines.push(format!(
        "  API        https://127.0.0.1:{}   KUBECONFIG={}",
        arguments.api_port,
        layout.admin_kubeconfig().display()
    ));
    if let Ok(address) = std::fs::read_to_string(layout.metrics_address()) {
        lines.push(format!("  Metrics    http://{address}/metrics (control plane)"));
    }
    lines.push(format!("  Logs       {}", layout.logs().display()));
    let place = match DataDir::resolve(None) {
        Ok(default) if default.root() == layout.root() => String::new(),
        _ => format!(" --data-dir {}", layout.root().display()),
    };
    // A service has no keyboard.
    let stop = if std::io::stdout().is_terminal() { "; stop with Ctrl-C." } else { "" };
    lines.push(format!("  Add a machine: russet token create{place}{stop}\n"));
    lines.join("\n")
}

/// The gateway's addresses, once it answers: its port may be taken.
fn gateway_announcement(layout: &DataDir, arguments: &Arguments) -> String {
    let port = arguments.gateway_port;
    let mut lines = vec![format!("  Gateway    http://127.0.0.1:{port}/v1   (OpenAI's API)")];
    for address in &arguments.gateway_listen {
        lines.extend(network_announcement(layout, arguments, *address));
    }
    lines.push(format!("             http://127.0.0.1:{port}/metrics (metrics)\n"));
    lines.join("\n")
}

/// How clients on other machines reach and verify the gateway.
fn network_announcement(layout: &DataDir, arguments: &Arguments, address: SocketAddr) -> Vec<String> {
    if address.ip().to_canonical().is_loopback() {
        return vec![format!("             http://{address}/v1   (this machine alone)")];
    }
    let host = match address.ip() {
        ip if !ip.is_unspecified() => SocketAddr::new(ip, address.port()).to_string(),
        _ => {
            let own = russet_agent::hardware::interface_addresses();
            let host = own.first().map_or_else(|| "THIS-MACHINE".to_owned(), ToString::to_string);
            format!("{host}:{}", address.port())
        }
    };
    let mut lines = vec![format!(
        "             https://{host}/v1   (other machines; a key is needed: russet key create NAME)"
    )];
    if arguments.certificate.files().is_none() {
        let ca = layout.gateway().join("ca.crt");
        lines.push(format!(
            "             They trust {}: curl --cacert, SSL_CERT_FILE (Python),",
            ca.display()
        ));
        lines.push("             NODE_EXTRA_CA_CERTS (Node); copy it there, it is no secret.".to_owned());
    }
    lines
}

/// Waits until a file exists.
async fn until_there(path: &Path) {
    while !path.exists() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Removes a file that a child writes.
fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Waits until a child has exited and restarts it after its backoff.
async fn supervise(children: &mut [ChildProcess]) {
    loop {
        for child in children.iter_mut() {
            child.check();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A child process and its restart history.
struct ChildProcess {
    name: &'static str,
    arguments: Vec<String>,
    log: PathBuf,
    /// File that it writes once it answers; removed whenever it does not.
    answers: Option<PathBuf>,
    child: Option<Child>,
    started: Instant,
    delays: ExponentialBackoff,
    restart_at: Option<Instant>,
}

impl ChildProcess {
    fn new(name: &'static str, layout: &DataDir, common: &[String]) -> Self {
        let mut arguments = vec![name.to_owned()];
        arguments.extend(common.iter().cloned());
        Self {
            name,
            arguments,
            log: layout.logs().join(format!("{name}.log")),
            answers: None,
            child: None,
            started: Instant::now(),
            delays: BACKOFF.build(),
            restart_at: None,
        }
    }

    fn start(&mut self) -> Result<()> {
        self.forget_answers()?;
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        let log = logfile::open(&self.log)
            .with_context(|| format!("cannot open the log {}", self.log.display()))?;
        let child = Command::new(program)
            .args(&self.arguments)
            // That file belongs to this process only.
            .env_remove(log_rotation::LOG_FILE_VARIABLE)
            // Closing this pipe stops the child, also when `up` is killed.
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            // A terminal's Ctrl-C goes to `up` only, which stops its children in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", self.name))?;
        tracing::info!(name = self.name, pid = child.id(), "started");
        self.child = Some(child);
        self.started = Instant::now();
        Ok(())
    }

    fn exited(&mut self) -> Option<std::process::ExitStatus> {
        self.child.as_mut().and_then(|child| child.try_wait().ok().flatten())
    }

    fn check(&mut self) {
        logfile::rotate(&self.log, logfile::MAX_LOG_BYTES);
        if let Some(at) = self.restart_at {
            if Instant::now() >= at {
                self.restart_at = None;
                if let Err(error) = self.start() {
                    say!("{}: {error:#}", self.name);
                    self.restart_at = Some(Instant::now() + MAX_BACKOFF);
                }
            }
            return;
        }
        let Some(status) = self.exited() else { return };
        self.child = None;
        if let Err(error) = self.forget_answers() {
            say!("{}: {error:#}", self.name);
        }
        if self.started.elapsed() >= HEALTHY_AFTER {
            self.delays = BACKOFF.build();
        }
        let delay = self.delays.next().unwrap_or(MAX_BACKOFF);
        say!(
            "{} ended ({status}) and starts again in {} ms; its log {} ends with:\n{}",
            self.name,
            delay.as_millis(),
            self.log.display(),
            self.log_tail(1)
        );
        self.restart_at = Some(Instant::now() + delay);
    }

    fn forget_answers(&self) -> Result<()> {
        self.answers.as_deref().map_or(Ok(()), remove_if_there)
    }

    fn log_tail(&self, lines: usize) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let last: VecDeque<&str> = text.lines().rev().take(lines).collect();
        last.into_iter().rev().map(|line| format!("  {line}\n")).collect()
    }

    async fn stop(&mut self, ending: StopSignal) {
        self.restart_at = None;
        let Some(mut child) = self.child.take() else { return };
        // Waiting would close the pipe, which tells the child that its supervisor died: not the same as the
        // signal that follows.
        let _input = child.stdin.take();
        let signal = match ending {
            StopSignal::Interrupted => rustix::process::Signal::INT,
            StopSignal::Terminated => rustix::process::Signal::TERM,
        };
        if let Some(pid) = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed())) {
            let _ = rustix::process::kill_process(pid, signal);
        }
        // Whether it answers while it ends is nobody's concern.
        let _ = self.forget_answers();
        if tokio::time::timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
            say!("{} did not end within {} s and is killed", self.name, STOP_TIMEOUT.as_secs());
            let _ = child.kill().await;
        }
    }
}
