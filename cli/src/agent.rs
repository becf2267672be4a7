//! `russet agent`: the node agent as a process; `up` and `join` start it.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::data_dir::DataDir;
use crate::mqtt::MqttArguments;
use crate::signals::{self, StopSignal};

/// Options shared by `join` and `agent`.
#[derive(clap::Args, Clone, Debug)]
pub struct NodeArguments {
    /// Folder for models, engines and keys; default ~/.russet.
    #[arg(long)]
    pub data_dir: Option<PathBuf>,
    /// Name of the node; default the host name.
    #[arg(long)]
    pub node_name: Option<String>,
    /// Memory the node claims to have, such as 64Gi; lets a small machine simulate another size.
    #[arg(long)]
    pub memory: Option<String>,
    #[command(flatten)]
    pub sources: SourceArguments,
    /// Address at which other machines reach this node.
    #[arg(long)]
    pub address: Option<IpAddr>,
    /// Engine program; default `russet-engine` beside this program.
    #[arg(long, env = "RUSSET_ENGINE")]
    pub engine_binary: Option<PathBuf>,
    /// Address on which the agent serves its metrics.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub metrics_listen: SocketAddr,
    /// Folder of programs (`system_profiler`, `networksetup`, `ifconfig`, `netstat`, `rdma_ctl`,
    /// `ibv_devices`, `ibv_devinfo`) to query for this machine's ports instead of the system's; lets a
    /// machine simulate a Mac.
    #[arg(long, env = "RUSSET_FABRIC_TOOLS")]
    pub fabric_tools: Option<PathBuf>,
    /// Socket of this machine's root helper, which `russet fabric apply` needs.
    #[arg(long, env = "RUSSET_HELPER", default_value = russet_agent::helper::SOCKET)]
    pub helper: PathBuf,
    #[command(flatten)]
    pub presence: MqttArguments,
    /// Log as JSON.
    #[arg(long)]
    pub json_logs: bool,
    /// Exit when standard input closes.
    #[arg(long, hide = true)]
    pub exit_with_parent: bool,
}

/// What Models may name as a source beside servers on the public internet; also of `up`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct SourceArguments {
    /// Folder that `file://` models may be read from; may be given several times. `up` adds the folders in which
    /// programs keep its user's models; a joined machine reads none without this.
    #[arg(long = "allow-file-root")]
    pub allow_file_roots: Vec<PathBuf>,
    /// Addresses that sources may be at although they are not on the public internet, such as 192.168.1.0/24; may be
    /// given several times. The hub of `HF_ENDPOINT` needs none.
    #[arg(long = "allow-private-sources", value_name = "CIDR")]
    pub allow_private_sources: Vec<russet_agent::store::Cidr>,
}

impl SourceArguments {
    /// The same as arguments of another process, which may have another working folder.
    pub fn to_flags(&self) -> Result<Vec<String>> {
        let Self { allow_file_roots, allow_private_sources } = self;
        let mut flags = Vec::new();
        for root in allow_file_roots {
            let root = std::path::absolute(root).with_context(|| format!("{}", root.display()))?;
            flags.extend(["--allow-file-root".into(), root.display().to_string()]);
        }
        for range in allow_private_sources {
            flags.extend(["--allow-private-sources".into(), range.to_string()]);
        }
        Ok(flags)
    }
}

/// Arguments of `russet agent`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    node: NodeArguments,
}

impl NodeArguments {
    /// The node's name: as given, or the host name made a valid object name.
    pub fn name(&self) -> String {
        let raw = self
            .node_name
            .clone()
            .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
        let name: String = raw
            .to_lowercase()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '-' })
            .collect();
        let name = name.trim_matches(['-', '.']).to_owned();
        if name.is_empty() { "node".into() } else { name }
    }

    /// Memory in bytes, when given.
    pub fn memory_bytes(&self) -> Result<Option<u64>> {
        self.memory
            .as_deref()
            .map(|text| {
                russet_plan::quantity::parse(text)
                    .with_context(|| format!("--memory {text} is not a quantity; write for example 64Gi"))
            })
            .transpose()
    }
}

/// Runs the agent until a signal. Engines keep running when only the agent is stopped; Ctrl-C stops them.
pub async fn run(arguments: Arguments) -> Result<()> {
    let node = arguments.node;
    russet_telemetry::logs::init("agent", node.json_logs);
    run_node(node).await
}

/// Runs the agent of this machine, which has already joined.
pub async fn run_node(node: NodeArguments) -> Result<()> {
    let layout = DataDir::open(node.data_dir.clone())?;
    let config = russet_agent::AgentConfig {
        data_dir: layout.root().to_owned(),
        node_name: node.name(),
        memory: node.memory_bytes()?,
        allow_file_roots: node.sources.allow_file_roots.clone(),
        allow_private_sources: node.sources.allow_private_sources.clone(),
        address: node.address,
        engine_binary: node.engine_binary.clone(),
        metrics_listen: node.metrics_listen,
        fabric_tools: node.fabric_tools.clone(),
        mqtt: node.presence.config()?,
        helper: node.helper.clone(),
        report_interval: russet_agent::REPORT_INTERVAL,
    };
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let with_parent = node.exit_with_parent;
    tokio::spawn(async move {
        let _ = sender.send(signals::stop_signal(with_parent).await);
    });
    let interrupted = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = interrupted.clone();
    let shutdown = async move {
        let ending = receiver.await.unwrap_or(StopSignal::Terminated);
        seen.store(ending == StopSignal::Interrupted, std::sync::atomic::Ordering::SeqCst);
    };
    russet_agent::run(config, shutdown).await?;
    if interrupted.load(std::sync::atomic::Ordering::SeqCst) {
        russet_agent::stop_engines(layout.root()).await;
    }
    Ok(())
}
