//! `russet token create`: a token with which one more machine may join, once and within a day. The first
//! token opens an embedded API server to the network; `russet token close` closes it again.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::Api;
use kube::api::ListParams;
use kube::config::Kubeconfig;
use russet_agent::join::identity::NodeIdentity;
use russet_agent::join::pin::{self, PinError};
use russet_agent::token::JoinToken;
use russet_crds::InferenceNode;
use russet_telemetry::say;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::client::client_from;
use crate::data_dir::DataDir;
use crate::stdout::outln;

/// Token lifetime in hours: enough to walk to the other machine, and then it expires.
const LIFETIME_HOURS: u32 = 24;

/// Arguments of `russet token`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: TokenAction,
}

#[derive(clap::Subcommand)]
enum TokenAction {
    /// Print a new join token and the command that uses it.
    Create(CreateArguments),
    /// Revoke all join tokens and close this machine's API server for other machines.
    Close(CloseArguments),
}

/// Arguments of `russet token close`.
#[derive(clap::Args)]
struct CloseArguments {
    /// Data folder of the control plane.
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

/// Arguments of `russet token create`.
#[derive(clap::Args)]
struct CreateArguments {
    /// Data folder of the control plane.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Administrator's kubeconfig of any API server that Russet uses.
    #[arg(long, conflicts_with = "data_dir")]
    kubeconfig: Option<PathBuf>,
    /// Address at which the other machine reaches the API server; may repeat.
    #[arg(long = "server")]
    servers: Vec<String>,
    /// Lifetime of the token in hours.
    #[arg(long, default_value_t = LIFETIME_HOURS, value_parser = clap::value_parser!(u32).range(1..=720))]
    hours: u32,
    /// Print only the token.
    #[arg(long)]
    quiet: bool,
}

/// Creates a token, or closes the API server for other machines.
pub async fn run(arguments: Arguments) -> Result<()> {
    match arguments.action {
        TokenAction::Create(arguments) => create(arguments).await,
        TokenAction::Close(CloseArguments { data_dir }) => close(&DataDir::resolve(data_dir)?).await,
    }
}

/// Revokes the tokens first: the server opens for as long as one is valid.
async fn close(layout: &DataDir) -> Result<()> {
    let client = client_from(&layout.admin_kubeconfig()).await?;
    let revoked = russet_operator::join_tokens::revoke_all(&client).await?;
    let marker = layout.serve().join(russet_apiserver::LAN_MARKER);
    match std::fs::remove_file(&marker) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| {
                format!("cannot remove {}; remove it to close the API server", marker.display())
            });
        }
    }
    say!("{revoked} join tokens are revoked. Within seconds the API server answers this machine only.");
    let own = NodeIdentity::load(&layout.agent()).ok().flatten().map(|identity| identity.node);
    let nodes = Api::<InferenceNode>::all(client).list_metadata(&ListParams::default()).await?;
    let others: Vec<String> = nodes
        .items
        .into_iter()
        .filter_map(|node| node.metadata.name)
        .filter(|name| own.as_ref() != Some(name))
        .collect();
    if !others.is_empty() {
        say!(
            "Nodes on other machines are cut off ({}): their engines go on, and nothing changes there until `russet token create` opens the API server again.",
            others.join(", ")
        );
    }
    Ok(())
}

async fn create(arguments: CreateArguments) -> Result<()> {
    let CreateArguments { data_dir, kubeconfig, servers, hours, quiet } = arguments;
    let path = match kubeconfig {
        Some(path) => path,
        None => DataDir::resolve(data_dir)?.admin_kubeconfig(),
    };
    let client = client_from(&path).await?;
    let (server, authorities) = cluster(&path)?;
    let (ca_pin, ca) = authority(&server, &authorities).await?;
    let lifetime = jiff::SignedDuration::from_hours(i64::from(hours));
    let made = russet_operator::join_tokens::create(&client, lifetime).await?;
    let id = made.id.clone();
    let token = JoinToken { id: made.id, secret: made.secret, ca_pin, ca }.encode();
    let shown = if quiet {
        outln!("{token}")
    } else {
        let servers = if servers.is_empty() { vec![reachable(&server)] } else { servers };
        say!("One machine may join with it until {:.0}. On that machine:", made.expires);
        outln!("RUSSET_TOKEN={token} russet join {}", servers.join(" "))
    };
    if let Err(error) = shown {
        // Nobody saw it, so nobody may hold it.
        return match russet_operator::join_tokens::delete(&client, &id).await {
            Ok(()) => Err(error.into()),
            Err(deleting) => {
                Err(anyhow::Error::new(error)
                    .context(format!("token {id} stays until it expires: {deleting}")))
            }
        };
    }
    Ok(())
}

/// The API server of a kubeconfig's current context, and the certificates it is verified with.
fn cluster(path: &Path) -> Result<(String, Vec<CertificateDer<'static>>)> {
    let kubeconfig = Kubeconfig::read_from(path)
        .with_context(|| format!("{} is not a usable kubeconfig", path.display()))?;
    let current = kubeconfig.current_context.clone().unwrap_or_default();
    let context = kubeconfig.contexts.iter().find(|it| it.name == current).and_then(|it| it.context.as_ref());
    let named =
        kubeconfig.clusters.iter().find(|it| context.is_some_and(|context| context.cluster == it.name));
    let cluster = named
        .or(kubeconfig.clusters.first())
        .and_then(|it| it.cluster.as_ref())
        .with_context(|| format!("{} names no cluster", path.display()))?;
    let server = cluster.server.clone().with_context(|| format!("{} names no server", path.display()))?;
    let pem = match (&cluster.certificate_authority_data, &cluster.certificate_authority) {
        (Some(data), _) => STANDARD.decode(data).context("the kubeconfig's CA is not Base64")?,
        (None, Some(file)) => std::fs::read(file).with_context(|| format!("cannot read the CA {file}"))?,
        (None, None) => bail!(
            "{} names no certificate authority, so machines that join could not verify the server; add certificate-authority to its cluster",
            path.display()
        ),
    };
    let authorities: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .context("the kubeconfig's CA is not a certificate")?;
    Ok((server, authorities))
}

/// The pin of the CA that signed the server's certificate; with the CA itself if the server does not send it,
/// as most do not.
async fn authority(
    server: &str,
    authorities: &[CertificateDer<'static>],
) -> Result<(String, Option<String>)> {
    let mut last = None;
    for ca in authorities {
        let Some(pin) = pin::of_der(ca) else { continue };
        match pin::fetch(server, &pin, None).await {
            Ok(_) => return Ok((pin, None)),
            // The server does not send its CA, or sends another one.
            Err(PinError::Mismatch { .. }) => {}
            Err(error) => return Err(error).context("the kubeconfig's server cannot be pinned"),
        }
        match pin::fetch(server, &pin, Some(ca)).await {
            Ok(_) => return Ok((pin, Some(STANDARD.encode(ca)))),
            Err(error) => last = Some(error),
        }
    }
    match last {
        Some(error) => Err(error).context("the kubeconfig's CA did not sign its server's certificate"),
        None => bail!("the kubeconfig's CA holds no certificate"),
    }
}

/// The server's address for other machines: a loopback address is replaced by this machine's.
fn reachable(server: &str) -> String {
    let Ok(url) = server.parse::<http::Uri>() else { return server.to_owned() };
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    let local =
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if !local {
        return server.to_owned();
    }
    let port = url.port_u16().unwrap_or(6443);
    let addresses = russet_agent::hardware::interface_addresses();
    match addresses.iter().find(|address| !address.is_loopback()) {
        Some(std::net::IpAddr::V6(address)) => format!("https://[{address}]:{port}"),
        Some(address) => format!("https://{address}:{port}"),
        None => format!("https://THIS-MACHINE:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loopback_address_is_replaced() {
        for server in ["https://10.0.0.5:6443", "https://kube.example:443/prefix"] {
            assert_eq!(reachable(server), server);
        }
        for server in ["https://127.0.0.1:7443", "https://localhost:7443", "https://[::1]:7443"] {
            let replaced = reachable(server);
            assert!(replaced != server && replaced.ends_with(":7443"), "{replaced}");
        }
    }
}
