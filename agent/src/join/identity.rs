//! A node's identity on disk: certificate, key, CA and a kubeconfig over them. Every file appears
//! whole, and the key is readable by its owner alone from its first byte on.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kube::config::{KubeConfigOptions, Kubeconfig};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why an identity cannot be read or written.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// The file system failed.
    #[error("{path} cannot be used: {source}; check who owns the data directory")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what was written.
    #[error("{path} is damaged ({problem}); remove it and join again with `russet join`")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Who this node is, and where its files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Name of the node.
    pub node: String,
    /// URL of the API server.
    pub server: String,
    /// Folder with `tls.crt`, `tls.key`, `ca.crt` and `kubeconfig`.
    pub folder: PathBuf,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    node_name: String,
    server: String,
}

const RECORD: &str = "node.json";

impl Identity {
    /// The identity in `folder`; `None` when there is none.
    pub fn load(folder: &Path) -> Result<Option<Self>, IdentityError> {
        let path = folder.join(RECORD);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(IdentityError::Io { path, source }),
        };
        let record: Record = serde_json::from_slice(&text)
            .map_err(|error| IdentityError::Damaged { path, problem: error.to_string() })?;
        let Record { node_name: node, server } = record;
        let files = ["tls.crt", "tls.key", "ca.crt", "kubeconfig"];
        let whole = files.iter().all(|name| folder.join(name).is_file());
        Ok(whole.then(|| Self { node, server, folder: folder.to_owned() }))
    }

    /// Writes an identity; the record comes last, so half an identity is none.
    pub fn store(
        folder: &Path,
        node: &str,
        server: &str,
        certificate: &str,
        key: &str,
        ca: &str,
    ) -> Result<Self, IdentityError> {
        std::fs::create_dir_all(folder)
            .map_err(|source| IdentityError::Io { path: folder.to_owned(), source })?;
        let record = folder.join(RECORD);
        if let Err(source) = std::fs::remove_file(&record)
            && source.kind() != std::io::ErrorKind::NotFound
        {
            return Err(IdentityError::Io { path: record, source });
        }
        write(&folder.join("ca.crt"), ca, 0o644)?;
        write(&folder.join("tls.key"), key, 0o600)?;
        write(&folder.join("tls.crt"), certificate, 0o644)?;
        let identity = Self { node: node.to_owned(), server: server.to_owned(), folder: folder.to_owned() };
        identity.write_record()?;
        Ok(identity)
    }

    /// The same identity at another address of the cluster.
    pub(super) fn with_server(mut self, server: &str) -> Result<Self, IdentityError> {
        if self.server != server {
            self.server = server.to_owned();
            self.write_record()?;
        }
        Ok(self)
    }

    fn write_record(&self) -> Result<(), IdentityError> {
        let Self { node, server, folder } = self;
        // Relative names are resolved against the kubeconfig's own folder. JSON is YAML.
        let kubeconfig = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "russet",
            "clusters": [{"name": "russet", "cluster": {"server": server, "certificate-authority": "ca.crt"}}],
            "users": [{"name": node, "user": {"client-certificate": "tls.crt", "client-key": "tls.key"}}],
            "contexts": [{"name": "russet", "context": {"cluster": "russet", "user": node}}],
        });
        write(&folder.join("kubeconfig"), &format!("{kubeconfig:#}\n"), 0o600)?;
        let record = serde_json::json!(Record { node_name: node.clone(), server: server.clone() });
        write(&folder.join(RECORD), &format!("{record:#}\n"), 0o644)
    }

    /// The CA's certificate.
    pub fn ca_pem(&self) -> Result<String, IdentityError> {
        let path = self.folder.join("ca.crt");
        std::fs::read_to_string(&path).map_err(|source| IdentityError::Io { path, source })
    }

    /// How long the certificate is good for.
    pub fn remaining(&self) -> Result<Duration, IdentityError> {
        let (_, end) = self.validity()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
        Ok(Duration::from_secs(u64::try_from(end - now).unwrap_or(0)))
    }

    /// The fraction of the certificate's life that is left, 0 to 1.
    pub fn life_left(&self) -> Result<f64, IdentityError> {
        let (begin, end) = self.validity()?;
        Ok(self.remaining()?.as_secs_f64() / ((end - begin).max(1) as f64))
    }

    fn validity(&self) -> Result<(i64, i64), IdentityError> {
        let path = self.folder.join("tls.crt");
        let damaged = |problem: String| IdentityError::Damaged { path: path.clone(), problem };
        let pem = std::fs::read(&path).map_err(|source| IdentityError::Io { path: path.clone(), source })?;
        let der = CertificateDer::from_pem_slice(&pem).map_err(|error| damaged(error.to_string()))?;
        let (_, certificate) =
            x509_parser::parse_x509_certificate(&der).map_err(|error| damaged(error.to_string()))?;
        let validity = certificate.validity();
        Ok((validity.not_before.timestamp(), validity.not_after.timestamp()))
    }

    /// The configuration of a client that acts as this node.
    pub async fn client_config(&self) -> Result<kube::Config, IdentityError> {
        let path = self.folder.join("kubeconfig");
        let damaged = |error: kube::config::KubeconfigError| IdentityError::Damaged {
            path: path.clone(),
            problem: error.to_string(),
        };
        let kubeconfig = Kubeconfig::read_from(&path).map_err(damaged)?;
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(damaged)
    }
}

/// Writes a file in one step, with its mode set before its content.
pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<(), IdentityError> {
    let fresh = path.with_extension("fresh");
    let io = |source| IdentityError::Io { path: path.to_owned(), source };
    std::fs::remove_file(&fresh).ok();
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh).map_err(io)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(io)?;
    std::fs::rename(&fresh, path).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[tokio::test]
    async fn an_identity_is_there_whole_or_not_at_all_and_its_key_is_private() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let folder = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
        let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        assert_eq!(Identity::load(folder.path()).unwrap(), None);
        let stored =
            Identity::store(folder.path(), "a", "https://127.0.0.1:6443", &certificate, &key, &certificate).unwrap();
        assert_eq!(Identity::load(folder.path()).unwrap(), Some(stored.clone()));
        let mode = std::fs::metadata(folder.path().join("tls.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(stored.remaining().unwrap() > Duration::from_secs(3600));
        assert!(stored.life_left().unwrap() > 0.5);

        let moved = stored.with_server("https://127.0.0.1:7443").unwrap();
        let config = moved.client_config().await.unwrap();
        assert_eq!(config.cluster_url.to_string(), "https://127.0.0.1:7443/");
        kube::Client::try_from(config).unwrap();

        std::fs::remove_file(folder.path().join("tls.key")).unwrap();
        assert_eq!(Identity::load(folder.path()).unwrap(), None);
    }
}
