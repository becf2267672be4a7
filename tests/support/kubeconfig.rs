//! Clients of an API server from a kubeconfig: the administrator's, and one without a certificate.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// The clients of a server.
pub struct KubeconfigClients {
    /// The server's URL.
    pub url: String,
    /// The client with the kubeconfig's certificate, if it has one.
    pub admin: reqwest::Client,
    /// A client without a certificate, for bearer tokens.
    pub plain: reqwest::Client,
    /// The kubeconfig's token, if it has one.
    pub admin_token: Option<String>,
}

impl KubeconfigClients {
    /// Of the first cluster and user; requests end after `timeout`.
    pub fn open(kubeconfig: &Path, timeout: Duration) -> Result<Self> {
        let config: Value = serde_norway::from_str(&std::fs::read_to_string(kubeconfig)?)?;
        let (cluster, user) = (&config["clusters"][0]["cluster"], &config["users"][0]["user"]);
        let bytes = |inline: &Value, file: &Value| -> Result<Option<Vec<u8>>> {
            match (inline.as_str(), file.as_str()) {
                (Some(text), _) => Ok(Some(STANDARD.decode(text)?)),
                (None, Some(path)) => Ok(Some(std::fs::read(kubeconfig.with_file_name(path))?)),
                (None, None) => Ok(None),
            }
        };
        let builder = || -> Result<reqwest::ClientBuilder> {
            let builder = reqwest::Client::builder().timeout(timeout);
            Ok(match bytes(&cluster["certificate-authority-data"], &cluster["certificate-authority"])? {
                Some(pem) => builder.tls_certs_only([reqwest::Certificate::from_pem(&pem)?]),
                None => builder.danger_accept_invalid_certs(cluster["insecure-skip-tls-verify"] == true),
            })
        };
        let certificate = bytes(&user["client-certificate-data"], &user["client-certificate"])?;
        let key = bytes(&user["client-key-data"], &user["client-key"])?;
        let admin = match (certificate, key) {
            (Some(certificate), Some(key)) => {
                let pem = [certificate, b"\n".to_vec(), key].concat();
                builder()?.identity(reqwest::Identity::from_pem(&pem)?).build()?
            }
            _ => builder()?.build()?,
        };
        Ok(Self {
            url: cluster["server"].as_str().context("the kubeconfig names no server")?.to_owned(),
            admin,
            plain: builder()?.build()?,
            admin_token: user["token"].as_str().map(str::to_owned),
        })
    }
}
