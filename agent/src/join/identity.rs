//! A node's identity on disk: certificate, key, CA and a kubeconfig over them. Every file appears
//! whole, and the key is readable by its owner alone from its first byte on.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kube::config::{KubeConfigOptions, Kubeconfig};
use russet_rpc::tls::NODE_USER_PREFIX;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;
use x509_parser::certificate::X509Certificate;

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

/// The file that is written last and removed first: without it there is no identity.
const KUBECONFIG: &str = "kubeconfig";

impl Identity {
    /// The identity in `folder`, whoever wrote it; `None` when there is none. The certificate says
    /// who it is and the kubeconfig where the cluster is.
    pub fn load(folder: &Path) -> Result<Option<Self>, IdentityError> {
        let files = ["tls.crt", "tls.key", "ca.crt", KUBECONFIG];
        if !files.iter().all(|name| folder.join(name).is_file()) {
            return Ok(None);
        }
        let path = folder.join(KUBECONFIG);
        let damaged = |problem: String| IdentityError::Damaged { path: path.clone(), problem };
        let kubeconfig = Kubeconfig::read_from(&path).map_err(|error| damaged(error.to_string()))?;
        let cluster = kubeconfig.clusters.into_iter().find_map(|named| named.cluster?.server);
        let mut identity = Self {
            node: String::new(),
            server: cluster.ok_or_else(|| damaged("it names no server".into()))?,
            folder: folder.to_owned(),
        };
        identity.node = identity.certificate(|certificate| {
            let name = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
            name.and_then(|name| name.strip_prefix(NODE_USER_PREFIX)).map(str::to_owned)
        })?;
        Ok(Some(identity))
    }

    /// Writes an identity; half of one is none.
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
        let last = folder.join(KUBECONFIG);
        if let Err(source) = std::fs::remove_file(&last)
            && source.kind() != std::io::ErrorKind::NotFound
        {
            return Err(IdentityError::Io { path: last, source });
        }
        write(&folder.join("ca.crt"), ca, 0o644)?;
        write(&folder.join("tls.key"), key, 0o600)?;
        write(&folder.join("tls.crt"), certificate, 0o644)?;
        let identity = Self { node: node.to_owned(), server: server.to_owned(), folder: folder.to_owned() };
        identity.write_kubeconfig()?;
        Ok(identity)
    }

    /// The same identity at another address of the cluster.
    pub(super) fn with_server(mut self, server: &str) -> Result<Self, IdentityError> {
        if self.server != server {
            self.server = server.to_owned();
            self.write_kubeconfig()?;
        }
        Ok(self)
    }

    fn write_kubeconfig(&self) -> Result<(), IdentityError> {
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
        write(&folder.join(KUBECONFIG), &format!("{kubeconfig:#}\n"), 0o600)
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
        self.certificate(|certificate| {
            let validity = certificate.validity();
            Some((validity.not_before.timestamp(), validity.not_after.timestamp()))
        })
    }

    /// Reads something out of the node's certificate.
    fn certificate<T>(
        &self,
        read: impl FnOnce(&X509Certificate<'_>) -> Option<T>,
    ) -> Result<T, IdentityError> {
        let path = self.folder.join("tls.crt");
        let damaged = |problem: String| IdentityError::Damaged { path: path.clone(), problem };
        let pem = std::fs::read(&path).map_err(|source| IdentityError::Io { path: path.clone(), source })?;
        let der = CertificateDer::from_pem_slice(&pem).map_err(|error| damaged(error.to_string()))?;
        let (_, certificate) =
            x509_parser::parse_x509_certificate(&der).map_err(|error| damaged(error.to_string()))?;
        read(&certificate).ok_or_else(|| damaged("it is no node's certificate".into()))
    }

    /// The configuration of a client that acts as this node.
    pub async fn client_config(&self) -> Result<kube::Config, IdentityError> {
        let path = self.folder.join(KUBECONFIG);
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
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, "russet:node:a");
        let (certificate, key) = (params.self_signed(&key).unwrap().pem(), key.serialize_pem());
        assert_eq!(Identity::load(folder.path()).unwrap(), None);
        let stored =
            Identity::store(folder.path(), "a", "https://127.0.0.1:6443", &certificate, &key, &certificate)
                .unwrap();
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
