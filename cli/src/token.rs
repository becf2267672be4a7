//! `russet token create`: a token with which one more machine may join for a day. Making the first
//! one opens the API server to the network.

use std::path::PathBuf;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use rand::Rng as _;
use russet_agent::token::JoinToken;

use crate::client::client_from;
use crate::layout::Layout;

/// Lifetime of a token: long enough to walk to the other machines, short enough to forget about.
const LIFETIME: jiff::SignedDuration = jiff::SignedDuration::from_hours(24);

/// Arguments of `russet token`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Print a new join token and the command that uses it.
    Create {
        /// Folder of the control plane.
        #[arg(long)]
        data_dir: Option<PathBuf>,
        /// Print the token alone.
        #[arg(long)]
        quiet: bool,
    },
}

/// Makes the token.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Action::Create { data_dir, quiet } = arguments.action;
    let layout = Layout::at(data_dir)?;
    let client = client_from(&layout.admin_kubeconfig()).await?;
    let ca = std::fs::read_to_string(layout.gateway().join("ca.crt")).with_context(|| {
        format!("cannot read the CA under {}; is `russet up` running?", layout.root().display())
    })?;
    let token = JoinToken {
        id: random(6),
        secret: random(16),
        ca_pin: russet_apiserver::pki::pin(&russet_apiserver::pki::certificate(&ca)?)?,
    };
    let expiration = jiff::Timestamp::now().checked_add(LIFETIME).context("the clock is out of range")?;
    let entry = |value: &str| ByteString(value.as_bytes().to_vec());
    let mut secret = Secret {
        type_: Some("bootstrap.kubernetes.io/token".into()),
        data: Some(
            [
                ("token-id", entry(&token.id)),
                ("token-secret", entry(&token.secret)),
                ("expiration", entry(&format!("{expiration:.0}"))),
                ("usage-bootstrap-authentication", entry("true")),
                ("description", entry("russet join token")),
            ]
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
        ),
        ..Secret::default()
    };
    secret.metadata.name = Some(format!("bootstrap-token-{}", token.id));
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "kube-system");
    let made = secrets.create(&PostParams::default(), &secret).await.context("cannot store the token")?;
    let encoded = token.encode();
    if quiet {
        println!("{encoded}");
        return Ok(());
    }
    eprintln!("Token {} is good until {expiration:.0}. On the other machine:", made.name_any());
    let port = server_port(&layout.admin_kubeconfig()).unwrap_or(6443);
    let addresses = russet_agent::hardware::interface_addresses();
    let address = addresses.iter().find(|address| !address.is_loopback());
    let address = address.map_or("THIS-MACHINE".to_owned(), ToString::to_string);
    println!("russet join https://{address}:{port} --token {encoded}");
    Ok(())
}

fn random(length: usize) -> String {
    const ALPHABET: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut random = rand::rng();
    (0..length).map(|_| ALPHABET[random.random_range(0..ALPHABET.len())] as char).collect()
}

/// The port in the kubeconfig's server URL.
fn server_port(kubeconfig: &std::path::Path) -> Option<u16> {
    let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig).ok()?;
    let server = kubeconfig.clusters.first()?.cluster.as_ref()?.server.clone()?;
    server.rsplit(':').next()?.parse().ok()
}
