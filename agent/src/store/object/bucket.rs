//! Object store providers, and the Secret keys each uses. The machine's own credentials are never used:
//! without a key in the Secret, requests are unsigned.

use std::sync::Arc;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder};
use object_store::{BackoffConfig, RetryConfig, StaticCredentialProvider};
use reqwest::Url;

use super::http_client::ObjectHttpClient;
use super::{Bucket, BucketPrefix};
use crate::store::web::loopback;
use crate::store::{Context, Credentials, StoreError};

/// Provider of an object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Provider {
    S3,
    Google,
    Azure,
}

impl Provider {
    pub fn from_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "s3" => Some(Self::S3),
            "gs" => Some(Self::Google),
            "az" => Some(Self::Azure),
            _ => None,
        }
    }

    /// Secret keys that are read: the environment variable names of the providers' own tools.
    pub const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::S3 => &[
                "AWS_ACCESS_KEY_ID",
                "AWS_SECRET_ACCESS_KEY",
                "AWS_SESSION_TOKEN",
                "AWS_REGION",
                "AWS_ENDPOINT_URL",
            ],
            Self::Google => &["GOOGLE_SERVICE_ACCOUNT", "STORAGE_EMULATOR_HOST"],
            Self::Azure => &[
                "AZURE_STORAGE_ACCOUNT_NAME",
                "AZURE_STORAGE_ACCOUNT_KEY",
                "AZURE_STORAGE_SAS_TOKEN",
                "AZURE_STORAGE_ENDPOINT",
            ],
        }
    }

    /// Those of the keys that say whose bucket is meant.
    pub const fn account(self) -> &'static [&'static str] {
        match self {
            Self::S3 => &["AWS_ENDPOINT_URL"],
            Self::Google => &["STORAGE_EMULATOR_HOST"],
            Self::Azure => &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"],
        }
    }

    /// Whether to retry in another region: none was configured and none was tried.
    pub fn may_change_region(self, credentials: &Credentials, tried: Option<&str>) -> bool {
        self == Self::S3 && tried.is_none() && credentials.get("AWS_REGION").is_none()
    }

    /// A client for the bucket of `folder`.
    pub fn open(
        self,
        context: &Context,
        folder: &BucketPrefix<'_>,
        credentials: &Credentials,
        region: Option<&str>,
    ) -> Result<Arc<dyn Bucket>, StoreError> {
        let bad = |problem: String| StoreError::BadUri { uri: folder.uri.to_owned(), problem };
        // Errors here are about the Secret's values; no request is sent yet.
        let refused = |error: object_store::Error| {
            bad(format!(
                "it cannot be opened with what its Secret says: {}",
                super::http_client::error_text(&error)
            ))
        };
        let endpoint = |key: &str| endpoint(credentials, key).map_err(bad);
        Ok(match self {
            Self::S3 => {
                let endpoint = endpoint("AWS_ENDPOINT_URL")?;
                // Signed S3 requests reveal no key, and few home-hosted stores have a certificate.
                let door = ObjectHttpClient::new(
                    context,
                    endpoint.as_ref().is_some_and(|url| url.scheme() == "http"),
                );
                let mut builder = AmazonS3Builder::new()
                    .with_bucket_name(folder.bucket)
                    .with_http_connector(door)
                    .with_retry(no_retries());
                if let Some(region) = credentials.get("AWS_REGION").or(region) {
                    builder = builder.with_region(region);
                }
                if let Some(endpoint) = endpoint {
                    builder = builder.with_endpoint(text(&endpoint));
                }
                builder = match (
                    credentials.get("AWS_ACCESS_KEY_ID"),
                    credentials.get("AWS_SECRET_ACCESS_KEY"),
                ) {
                    (Some(id), Some(secret)) => builder.with_access_key_id(id).with_secret_access_key(secret),
                    (None, None) => builder.with_skip_signature(true),
                    _ => {
                        return Err(bad(
                            "its Secret has one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; add the other".into(),
                        ));
                    }
                };
                if let Some(token) = credentials.get("AWS_SESSION_TOKEN") {
                    builder = builder.with_token(token);
                }
                Arc::new(builder.build().map_err(refused)?)
            }
            Self::Google => {
                let mut builder = GoogleCloudStorageBuilder::new()
                    .with_bucket_name(folder.bucket)
                    .with_http_connector(ObjectHttpClient::new(context, false))
                    .with_retry(no_retries());
                if let Some(endpoint) = endpoint("STORAGE_EMULATOR_HOST")? {
                    builder = builder.with_base_url(&text(&endpoint));
                }
                builder = match credentials.get("GOOGLE_SERVICE_ACCOUNT") {
                    Some(key) => builder.with_service_account_key(key),
                    None => {
                        // Without this empty credential the client would look for a file of the machine's
                        // owner.
                        let nobody = GcpCredential { bearer: String::new() };
                        let nobody = Arc::new(StaticCredentialProvider::new(nobody));
                        builder.with_credentials(nobody).with_skip_signature(true)
                    }
                };
                Arc::new(builder.build().map_err(refused)?)
            }
            Self::Azure => {
                let account = credentials.get("AZURE_STORAGE_ACCOUNT_NAME").ok_or_else(|| {
                    bad("name its account in a Secret under AZURE_STORAGE_ACCOUNT_NAME, and that in source.secretRef"
                        .into())
                })?;
                let mut builder = MicrosoftAzureBuilder::new()
                    .with_account(account)
                    .with_container_name(folder.bucket)
                    .with_http_connector(ObjectHttpClient::new(context, false))
                    .with_retry(no_retries());
                if let Some(endpoint) = endpoint("AZURE_STORAGE_ENDPOINT")? {
                    builder = builder.with_endpoint(text(&endpoint));
                }
                let sas = credentials.get("AZURE_STORAGE_SAS_TOKEN");
                builder = match (credentials.get("AZURE_STORAGE_ACCOUNT_KEY"), sas) {
                    (Some(key), _) => builder.with_access_key(key),
                    (None, Some(sas)) => {
                        let pairs =
                            reqwest::Url::parse(&format!("https://sas/?{}", sas.trim_start_matches('?')));
                        let pairs =
                            pairs.map_err(|error| bad(format!("AZURE_STORAGE_SAS_TOKEN: {error}")))?;
                        builder.with_sas_authorization(pairs.query_pairs().into_owned().collect::<Vec<_>>())
                    }
                    (None, None) => builder.with_skip_signature(true),
                };
                Arc::new(builder.build().map_err(refused)?)
            }
        })
    }
}

/// No retries: the store's own backoff handles them, for all sources alike.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, backoff: BackoffConfig::default(), ..RetryConfig::default() }
}

/// Endpoint from the Secret; plain HTTP only on this machine, except for S3.
fn endpoint(credentials: &Credentials, key: &str) -> Result<Option<Url>, String> {
    let Some(text) = credentials.get(key) else { return Ok(None) };
    let url = Url::parse(text).ok().filter(|url| url.has_host() && url.query().is_none());
    let url =
        url.ok_or_else(|| format!("{key} in its Secret must be a URL such as https://store.example:9000"))?;
    match url.scheme() {
        "https" => Ok(Some(url)),
        "http" if key == "AWS_ENDPOINT_URL" || loopback(&url) => Ok(Some(url)),
        scheme => Err(format!("{key} in its Secret is a URL of the scheme {scheme}; write https://…")),
    }
}

fn text(url: &Url) -> String {
    url.as_str().trim_end_matches('/').to_owned()
}
