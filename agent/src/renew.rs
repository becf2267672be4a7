//! Renewal of the node's credentials: its certificate and, if the API server requires one, its ServiceAccount
//! token, both at two thirds of their lifetime; the certificate also as soon as another CA signs. Users of
//! the files read them again.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use rcgen::KeyPair;
use russet_crds::names::{CA_SECRET, SYSTEM_NAMESPACE};
use thiserror::Error;

use crate::join::access;
use crate::join::identity::{IdentityError, NodeIdentity};
use crate::join::request::{self, CertificateRequest, RequestError};
use crate::metrics::AgentMetrics;

/// Maximum sleep: clocks jump, laptops are suspended, and the CA may be rotated.
const MAX_SLEEP: Duration = Duration::from_secs(600);
/// Maximum backoff after a failure.
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// Backoff after failures; it doubles.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(500))
    .with_max_delay(MAX_BACKOFF)
    .without_max_times();

/// Why a renewal failed.
#[derive(Debug, Error)]
enum RenewError {
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("no key could be made")]
    Key(#[source] rcgen::Error),
    #[error("the API server gives no new token")]
    Token(#[source] kube::Error),
    #[error(
        "the first certificate in ConfigMap {SYSTEM_NAMESPACE}/{CA_SECRET} is not of the CA that signs; check whether Secret {SYSTEM_NAMESPACE}/{CA_SECRET} holds that one first, and its key"
    )]
    Authority,
}

/// Renews credentials until the agent exits.
pub(crate) async fn run(identity: NodeIdentity, metrics: AgentMetrics) {
    let mut delays = BACKOFF.build();
    let mut jitter: f64 = rand::random();
    loop {
        if let Ok(validity) = identity.validity() {
            metrics.certificate(validity.end);
        }
        match renew(&identity, jitter).await {
            Ok(None) => {
                jitter = rand::random();
                delays = BACKOFF.build();
            }
            Ok(Some(due)) => {
                delays = BACKOFF.build();
                tokio::time::sleep(due.min(MAX_SLEEP)).await;
            }
            Err(error) => {
                let error = russet_telemetry::errors::chain(&error);
                tracing::warn!(error, "this node's identity could not be renewed; retrying");
                tokio::time::sleep(delays.next().unwrap_or(MAX_BACKOFF)).await;
            }
        }
    }
}

/// Renews what is due; otherwise returns the time until the next renewal.
async fn renew(identity: &NodeIdentity, jitter: f64) -> Result<Option<Duration>, RenewError> {
    let client = identity
        .client(|config| {
            config.connect_timeout = Some(Duration::from_secs(5));
            config.read_timeout = Some(Duration::from_secs(20));
        })
        .await?;
    if let Some(ca) = request::changed_authority(&client, &identity.ca_pem()?).await {
        identity.trust(&ca)?;
        tracing::info!("the cluster's CA has changed and is trusted as it is published now");
    }
    let certificate = if request::is_signed_by_first(&identity.ca_pem()?, &identity.certificate_pem()?) {
        identity.validity()?.renew_in(jitter)
    } else {
        Duration::ZERO
    };
    let token = identity.token_validity()?.map(|validity| validity.renew_in(jitter));
    let due = token.into_iter().fold(certificate, Duration::min);
    if !due.is_zero() {
        return Ok(Some(due));
    }
    if token.is_some_and(|due| due.is_zero()) {
        let token = access::token(&client, &identity.node).await.map_err(RenewError::Token)?;
        identity.renew_token(&token)?;
        tracing::info!("the node's token was renewed");
    }
    if certificate.is_zero() {
        let key = KeyPair::generate().map_err(RenewError::Key)?;
        let certificate_request = CertificateRequest::node(&identity.node);
        let fresh = request::certificate(&client, &certificate_request, &key).await?;
        let ca = request::authority(&client, &certificate_request, &fresh, Some(&identity.ca_pem()?)).await?;
        identity.renew(&fresh, &key.serialize_pem(), &ca)?;
        tracing::info!("the node's certificate was renewed");
        if !request::is_signed_by_first(&ca, &fresh) {
            return Err(RenewError::Authority);
        }
    }
    Ok(None)
}
