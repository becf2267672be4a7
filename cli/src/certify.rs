//! The gateway's own certificate, where no `serve` makes it: asked of the cluster by CSR, kept in the
//! gateway's folder, and renewed at two thirds of its life. Whoever uses it reads it again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use russet_agent::join::identity::Validity;
use russet_agent::join::request::{self, Wanted};
use russet_rpc::tls::folder;

/// The longest sleep: clocks jump.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// Between two tries while the cluster does not sign.
const PAUSE: Duration = Duration::from_secs(5);

/// Makes sure that `dir` holds a certificate of the gateway that is not about to end.
pub async fn ensure(client: &Client, dir: &Path) -> Result<()> {
    renew(client, dir, 0.0).await
}

/// Renews what is due; `jitter` (0 to 1) says how much earlier than it must be.
async fn renew(client: &Client, dir: &Path, jitter: f64) -> Result<()> {
    if due(dir, jitter).is_some_and(|due| !due.is_zero()) {
        return Ok(());
    }
    let key = rcgen::KeyPair::generate().context("cannot make a key for the gateway")?;
    let wanted = Wanted::gateway();
    let certificate = request::certificate(client, &wanted, &key).await?;
    let known = std::fs::read_to_string(dir.join(folder::CA)).ok();
    let ca = request::authority(client, &wanted, &certificate, known.as_deref()).await?;
    let files = [
        (folder::CERTIFICATE, certificate.as_bytes()),
        (folder::KEY, key.serialize_pem().as_bytes()),
        (folder::CA, ca.as_bytes()),
    ]
    .map(|(name, bytes)| (name, bytes.to_vec()));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    folder::publish(dir, &files)
        .with_context(|| format!("cannot keep the gateway's certificate in {}", dir.display()))?;
    tracing::info!("the gateway has a new certificate");
    Ok(())
}

/// Renews for ever.
pub async fn keep(client: Client, dir: PathBuf) {
    // Renewed a little earlier than it must be, each gateway at a moment of its own, so that several do not
    // ask together.
    let jitter: f64 = rand::random();
    loop {
        let pause = match renew(&client, &dir, jitter).await {
            Ok(()) => due(&dir, jitter).unwrap_or(PAUSE).clamp(Duration::from_millis(100), LONGEST_SLEEP),
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "the gateway's certificate could not be renewed"
                );
                PAUSE
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// How long until the certificate in `dir` is to be renewed; `None` without one.
fn due(dir: &Path, jitter: f64) -> Option<Duration> {
    let certificate = std::fs::read_to_string(dir.join(folder::CERTIFICATE)).ok()?;
    Some(Validity::of(&certificate)?.due(jitter))
}
