//! The gateway's own certificate where `serve` does not issue it: requested from the cluster by CSR, stored
//! in the gateway's folder, and renewed at two thirds of its lifetime, or at once when the CA changes. Its
//! users reload it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use kube::Client;
use russet_agent::join::identity::Validity;
use russet_agent::join::request::{self, CertificateRequest};
use russet_rpc::tls::identity_dir;

/// Maximum sleep: clocks jump, and the CA may change.
const MAX_SLEEP: Duration = Duration::from_secs(600);
/// Retry interval while the cluster does not sign.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum retry interval while another CA signs than the one published first: every attempt is one more CSR.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(300);
/// Backoff after certificates not signed by the CA published first; it doubles.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(RETRY_INTERVAL)
    .with_max_delay(MAX_RETRY_INTERVAL)
    .without_max_times();

/// Ensures that `dir` holds a gateway certificate that is not about to expire.
pub async fn ensure(client: &Client, dir: &Path) -> Result<()> {
    renew(client, dir, 0.0).await
}

/// Renews the certificate if due; `jitter` (0 to 1) says how much earlier than necessary.
async fn renew(client: &Client, dir: &Path, jitter: f64) -> Result<()> {
    if let Ok(stored) = std::fs::read_to_string(dir.join(identity_dir::CA))
        && let Some(ca) = request::changed_authority(client, &stored).await
    {
        publish(dir, &[(identity_dir::CA, ca.as_bytes())])?;
        tracing::info!("the cluster's CA has changed and is trusted as it is published now");
    }
    if renewal_due(dir, jitter).is_some_and(|due| !due.is_zero()) {
        return Ok(());
    }
    let key = rcgen::KeyPair::generate().context("cannot make a key for the gateway")?;
    let certificate_request = CertificateRequest::gateway();
    let certificate = request::certificate(client, &certificate_request, &key).await?;
    let known = std::fs::read_to_string(dir.join(identity_dir::CA)).ok();
    let ca = request::authority(client, &certificate_request, &certificate, known.as_deref()).await?;
    let key = key.serialize_pem();
    publish(
        dir,
        &[
            (identity_dir::CERTIFICATE, certificate.as_bytes()),
            (identity_dir::KEY, key.as_bytes()),
            (identity_dir::CA, ca.as_bytes()),
        ],
    )?;
    tracing::info!("the gateway has a new certificate");
    if !request::is_signed_by_first(&ca, &certificate) {
        tracing::warn!("the first published CA is not the one that signs; requesting another certificate");
    }
    Ok(())
}

fn publish(dir: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    identity_dir::publish(dir, files)
        .with_context(|| format!("cannot keep the gateway's certificate in {}", dir.display()))
}

/// Renews the certificate for ever.
pub async fn run(client: Client, dir: PathBuf) {
    // Jitter: gateways renew a little early and at different times, so that they do not all ask at once.
    let jitter: f64 = rand::random();
    let mut delays = BACKOFF.build();
    loop {
        let pause = match renew(&client, &dir, jitter).await {
            Ok(()) => next_wait(renewal_due(&dir, jitter), &mut delays),
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "the gateway's certificate could not be renewed"
                );
                RETRY_INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Time until the next check: the next delay while another CA signs than the one published first.
fn next_wait(due: Option<Duration>, delays: &mut ExponentialBackoff) -> Duration {
    if let Some(due) = due {
        *delays = BACKOFF.build();
        return due.clamp(Duration::from_millis(100), MAX_SLEEP);
    }
    delays.next().unwrap_or(MAX_RETRY_INTERVAL)
}

/// Time until the certificate in `dir` has to be renewed; `None` without one, or if the current CA did not
/// sign it.
fn renewal_due(dir: &Path, jitter: f64) -> Option<Duration> {
    let read = |name| std::fs::read_to_string(dir.join(name)).ok();
    let certificate = read(identity_dir::CERTIFICATE)?;
    request::is_signed_by_first(&read(identity_dir::CA)?, &certificate).then_some(())?;
    Some(Validity::from_certificate(&certificate)?.renew_in(jitter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_of_another_ca_are_requested_with_backoff() {
        let mut delays = BACKOFF.build();
        let seconds: Vec<u64> = (0..40).map(|_| next_wait(None, &mut delays).as_secs()).collect();
        assert_eq!(seconds[..8], [5, 10, 20, 40, 80, 160, 300, 300]);
        assert!(seconds[8..].iter().all(|it| *it == 300), "{seconds:?}");
        let hour = Duration::from_secs(3600);
        assert_eq!(next_wait(Some(hour), &mut delays), MAX_SLEEP);
        assert_eq!(next_wait(None, &mut delays), RETRY_INTERVAL, "a good one begins anew");
    }
}
