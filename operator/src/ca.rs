//! The CA of the data plane: its Secret, created once if there is none, and its certificate in a ConfigMap
//! for all verifiers. The embedded server brings its own CA, so there the Secret is found. During a CA
//! rotation the Secret holds the certificates of both: the first one signs, with the key beside it, and all
//! are published.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::PostParams;
use kube::{Api, Client};
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose};
use russet_crds::names::{CA_SECRET, SYSTEM_NAMESPACE};
use serde_json::json;
use thiserror::Error;

use crate::ssa;

/// The CA outlives every machine it serves; another one means that every node has to join again.
const CA_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Allowance for clock differences between machines.
const CLOCK_SKEW: Duration = Duration::from_secs(300);
/// Interval after which a deleted ConfigMap is restored, and a new CA published.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);
/// Retry interval while the server returns errors.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Why there is no CA.
#[derive(Debug, Error)]
pub enum Error {
    /// The Secret was not read or written.
    #[error("Secret {SYSTEM_NAMESPACE}/{CA_SECRET} with the CA could not be read or made")]
    Secret(#[source] kube::Error),
    /// The Secret holds no certificate.
    #[error(
        "Secret {SYSTEM_NAMESPACE}/{CA_SECRET} holds no tls.crt; restore it, or delete it and join every node again"
    )]
    Incomplete,
    /// The ConfigMap was not written.
    #[error("ConfigMap {SYSTEM_NAMESPACE}/{CA_SECRET} with the CA's certificate could not be written")]
    ConfigMap(#[source] kube::Error),
    /// No key could be made.
    #[error("a new CA could not be made")]
    Make(#[source] rcgen::Error),
}

/// Maintains the CA and its certificate for as long as this process leads.
pub async fn run(client: Client) {
    loop {
        let pause = match ensure(&client).await {
            Ok(()) => RESYNC_INTERVAL,
            Err(error) => {
                let error = russet_telemetry::errors::chain(&error);
                tracing::warn!(error, "nodes cannot join yet; it is tried again");
                RETRY_INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Creates what is missing.
pub async fn ensure(client: &Client) -> Result<(), Error> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let secret = match secrets.get_opt(CA_SECRET).await.map_err(Error::Secret)? {
        Some(secret) => secret,
        None => match secrets.create(&PostParams::default(), &generate().map_err(Error::Make)?).await {
            Ok(made) => {
                tracing::info!("a new CA was made for the data plane");
                made
            }
            // A concurrent writer was faster; its CA counts.
            Err(error) if ssa::is_code(&error, 409) => secrets.get(CA_SECRET).await.map_err(Error::Secret)?,
            Err(error) => return Err(Error::Secret(error)),
        },
    };
    let certificate = secret.data.as_ref().and_then(|data| data.get("tls.crt"));
    let certificate = certificate.and_then(|bytes| std::str::from_utf8(&bytes.0).ok());
    let certificate = certificate.filter(|text| !text.is_empty()).ok_or(Error::Incomplete)?;

    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let existing = maps.get_opt(CA_SECRET).await.map_err(Error::ConfigMap)?;
    let published = existing.and_then(|map| map.data?.get("ca.crt").cloned());
    if published.as_deref() == Some(certificate) {
        return Ok(());
    }
    let map: ConfigMap = serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": CA_SECRET, "namespace": SYSTEM_NAMESPACE},
        "data": {"ca.crt": certificate},
    }))
    .map_err(|error| Error::ConfigMap(kube::Error::SerdeError(error)))?;
    ssa::apply(&maps, &map).await.map(drop).map_err(Error::ConfigMap)
}

/// A new CA as its Secret.
fn generate() -> Result<Secret, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, CA_SECRET);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let now = std::time::SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + CA_LIFETIME).into();
    let certificate = params.self_signed(&key)?.pem();
    let entry = |text: String| ByteString(text.into_bytes());
    let mut secret = Secret {
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(
            [("tls.crt", entry(certificate)), ("tls.key", entry(key.serialize_pem()))]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        ),
        ..Secret::default()
    };
    secret.metadata.name = Some(CA_SECRET.to_owned());
    Ok(secret)
}
