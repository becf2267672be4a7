//! `russet serve`: the embedded API server and the operator in one process; `up` starts it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use russet_apiserver::pki;
use russet_rpc::tls;

use crate::client::client_from;
use crate::layout::{self, Layout};
use crate::signals;

/// Arguments of `russet serve`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the control plane.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Port of the API server.
    #[arg(long, default_value_t = 6443)]
    api_port: u16,
    /// Make the identity of this machine's own node, which then needs no token.
    #[arg(long)]
    local_node: Option<String>,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// End when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// Days an identity made at start is good for; every start makes new ones.
const IDENTITY_DAYS: u32 = 365;

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    russet_telemetry::logs::init("serve", arguments.json_logs);
    let layout = Layout::open(arguments.data_dir)?;
    let registry = prometheus::Registry::new();
    let config = russet_apiserver::Config {
        registry: registry.clone(),
        ..russet_apiserver::Config::new(layout.serve(), ([127, 0, 0, 1], arguments.api_port).into())
    };
    let running = russet_apiserver::start(config).await?;
    let server = format!("https://{}", running.addr());
    let ca = pki::Ca::load(&layout.serve())?;

    write_kubeconfig(&ca, &server, &layout.admin_kubeconfig(), "russet-admin", &["system:masters"])?;
    let admin = client_from(&layout.admin_kubeconfig()).await?;
    russet_operator::install::apply(&admin).await.context("cannot install Russet's kinds and roles")?;

    let operator_kubeconfig = layout.serve().join("operator.kubeconfig");
    write_kubeconfig(&ca, &server, &operator_kubeconfig, tls::OPERATOR_USER, &[])?;
    identity(&ca, &server, &layout.gateway(), tls::GATEWAY_USER, &[], &[])?;
    if let Some(node) = &arguments.local_node {
        identity(&ca, &server, &layout.agent(), &tls::node_user(node), &[tls::NODES_GROUP], &[tls::node_dns_name(node)])?;
    }

    let operator = client_from(&operator_kubeconfig).await?;
    let ready = Arc::new(AtomicBool::new(false));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let operator = tokio::spawn(russet_operator::run(operator, registry, ready, async {
        let _ = stopped.await;
    }));
    tracing::info!(%server, "the control plane serves");
    tokio::select! {
        _ = signals::ending(arguments.exit_with_parent) => {
            let _ = stop.send(());
        }
        result = operator => {
            result.context("the operator panicked")?.context("the operator ended")?;
        }
    }
    running.shutdown().await;
    Ok(())
}

/// A folder with `tls.crt`, `tls.key`, `ca.crt` and a kubeconfig of one component.
fn identity(ca: &pki::Ca, server: &str, folder: &std::path::Path, user: &str, groups: &[&str], dns: &[String]) -> Result<()> {
    layout::make_private(folder)?;
    let issued = ca.issue(user, groups, dns, IDENTITY_DAYS)?;
    layout::write_private(&folder.join("tls.crt"), issued.cert_pem.as_bytes())?;
    layout::write_private(&folder.join("tls.key"), issued.key_pem.as_bytes())?;
    layout::write_private(&folder.join("ca.crt"), ca.cert_pem().as_bytes())?;
    let kubeconfig = pki::kubeconfig(server, ca.cert_pem(), &issued, user);
    layout::write_private(&folder.join("kubeconfig"), kubeconfig.as_bytes())
}

fn write_kubeconfig(ca: &pki::Ca, server: &str, path: &std::path::Path, user: &str, groups: &[&str]) -> Result<()> {
    let issued = ca.issue(user, groups, &[], IDENTITY_DAYS)?;
    let kubeconfig = pki::kubeconfig(server, ca.cert_pem(), &issued, user);
    layout::write_private(path, kubeconfig.as_bytes())
}
