//! A node's identity on disk: certificate, key, CAs, an optional token, and a kubeconfig over them. Every
//! version appears atomically ([`folder`]) and is readable by its owner alone.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kube::config::Kubeconfig;
use russet_rpc::kube_client::{self, ApiError};
use russet_rpc::tls::{NODE_USER_PREFIX, identity_dir};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;

use super::access::{self, Access};

/// Why an identity cannot be read or written.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// The file system failed.
    #[error("{path} cannot be used: {source}; check who owns the data directory")]
    Io {
        /// The file.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
    /// A file is not in the written form.
    #[error("{path} is damaged ({problem}); remove it and join again with `russet join`")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The API client cannot be built from it.
    #[error("the identity does not make a client of the API server; join again with `russet join`")]
    Client(#[from] ApiError),
}

/// Node name, API server and location of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Name of the node.
    pub node: String,
    /// URL of the API server; with several, the one that is tried first.
    pub server: String,
    /// Folder with the files that [`folder`] names.
    pub folder: PathBuf,
}

/// Contents of an identity; PEM, and the token as received.
#[derive(Clone, Debug)]
pub struct Material<'a> {
    /// The node's certificate.
    pub certificate: &'a str,
    /// Its key.
    pub key: &'a str,
    /// The data-plane CA.
    pub ca: &'a str,
    /// The API server's CA.
    pub server_ca: &'a str,
    /// A token, where the API server does not accept the certificate as a credential.
    pub token: Option<&'a str>,
}

/// Validity period, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Not valid before.
    pub begin: i64,
    /// Not valid after.
    pub end: i64,
}

impl Validity {
    /// Validity of a certificate in PEM.
    pub fn from_certificate(certificate: &str) -> Option<Self> {
        let der = CertificateDer::from_pem_slice(certificate.as_bytes()).ok()?;
        let (_, certificate) = x509_parser::parse_x509_certificate(&der).ok()?;
        let validity = certificate.validity();
        Some(Self { begin: validity.not_before.timestamp(), end: validity.not_after.timestamp() })
    }

    /// Remaining validity.
    pub fn remaining(self) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Duration::from_secs(u64::try_from(self.end).unwrap_or(0)).saturating_sub(now)
    }

    /// Time until renewal: at two thirds of the lifetime, and up to a tenth of the lifetime earlier by
    /// `jitter` (0 to 1), so that machines which joined together do not renew together.
    pub fn renew_in(self, jitter: f64) -> Duration {
        let life = (self.end - self.begin).max(1) as f64;
        self.remaining()
            .saturating_sub(Duration::from_secs_f64(life * (1.0 / 3.0 + jitter.clamp(0.0, 1.0) / 10.0)))
    }
}

impl NodeIdentity {
    /// The identity in `folder`, whichever program wrote it; `None` when there is none. The certificate
    /// contains the node name, the kubeconfig the cluster's address.
    pub fn load(folder: &Path) -> Result<Option<Self>, IdentityError> {
        let files =
            [identity_dir::CERTIFICATE, identity_dir::KEY, identity_dir::CA, identity_dir::KUBECONFIG];
        if !files.iter().all(|name| folder.join(name).is_file()) {
            return Ok(None);
        }
        let path = folder.join(identity_dir::KUBECONFIG);
        let damaged = |problem: String| IdentityError::Damaged { path: path.clone(), problem };
        let kubeconfig = Kubeconfig::read_from(&path).map_err(|error| damaged(error.to_string()))?;
        let cluster = kubeconfig.clusters.into_iter().find_map(|named| named.cluster?.server);
        let mut identity = Self {
            node: String::new(),
            server: cluster.ok_or_else(|| damaged("it names no server".into()))?,
            folder: folder.to_owned(),
        };
        let path = folder.join(identity_dir::CERTIFICATE);
        let damaged = || IdentityError::Damaged { path, problem: "it is no node's certificate".into() };
        identity.node = name_in(&identity.read(identity_dir::CERTIFICATE)?).ok_or_else(damaged)?;
        Ok(Some(identity))
    }

    /// Writes an identity atomically.
    pub fn store(
        dir: &Path,
        node: &str,
        servers: &[String],
        material: &Material<'_>,
    ) -> Result<Self, IdentityError> {
        let Material { certificate, key, ca, server_ca, token } = material;
        let access = if token.is_some() { Access::Token } else { Access::Certificate };
        let server = servers.first().cloned().unwrap_or_default();
        let kubeconfig = kubeconfig(node, &server, access);
        let lines = servers.join("\n");
        let mut files: Vec<(&str, &[u8])> = vec![
            (identity_dir::SERVERS, lines.as_bytes()),
            (identity_dir::CERTIFICATE, certificate.as_bytes()),
            (identity_dir::KEY, key.as_bytes()),
            (identity_dir::CA, ca.as_bytes()),
            (identity_dir::SERVER_CA, server_ca.as_bytes()),
            (identity_dir::KUBECONFIG, kubeconfig.as_bytes()),
        ];
        if let Some(token) = token {
            files.push((identity_dir::TOKEN, token.as_bytes()));
        }
        if token.is_none() && dir.join(identity_dir::TOKEN).exists() {
            // Files that only the earlier identity had must not stay.
            remove(dir)?;
        }
        publish(dir, &files)?;
        Ok(Self { node: node.to_owned(), server, folder: dir.to_owned() })
    }

    /// The same identity with other addresses of the cluster.
    pub fn with_servers(self, servers: &[String]) -> Result<Self, IdentityError> {
        let lines = servers.join("\n");
        let Some(server) = servers.first() else { return Ok(self) };
        let stored = self.read(identity_dir::SERVERS).unwrap_or_default();
        let (mut before, mut after): (Vec<&str>, Vec<&str>) =
            (stored.lines().collect(), lines.lines().collect());
        // The order may differ: the server that answered is kept first.
        before.sort_unstable();
        after.sort_unstable();
        if before == after {
            return Ok(self);
        }
        let kubeconfig = kubeconfig(&self.node, server, self.access());
        let ca = self.server_ca_pem()?;
        let files = [
            (identity_dir::KUBECONFIG, kubeconfig.as_bytes()),
            (identity_dir::SERVER_CA, ca.as_bytes()),
            (identity_dir::SERVERS, lines.as_bytes()),
        ];
        publish(&self.folder, &files)?;
        Ok(Self { server: server.clone(), ..self })
    }

    /// Replaces the certificate with a renewed one.
    pub(crate) fn renew(&self, certificate: &str, key: &str, ca: &str) -> Result<(), IdentityError> {
        let files =
            [(identity_dir::CERTIFICATE, certificate), (identity_dir::KEY, key), (identity_dir::CA, ca)];
        publish(&self.folder, &files.map(|(name, text)| (name, text.as_bytes())))
    }

    /// Replaces the CA certificates. The embedded server has one CA for the data plane and for itself;
    /// elsewhere the API server's CA is not touched.
    pub(crate) fn trust(&self, ca: &str) -> Result<(), IdentityError> {
        let one_for_both = self.server_ca_pem()? == self.ca_pem()?;
        let names =
            [identity_dir::CA, identity_dir::SERVER_CA].into_iter().take(if one_for_both { 2 } else { 1 });
        let files: Vec<(&str, &[u8])> = names.map(|name| (name, ca.as_bytes())).collect();
        publish(&self.folder, &files)
    }

    /// Replaces the token with a renewed one.
    pub(crate) fn renew_token(&self, token: &str) -> Result<(), IdentityError> {
        publish(&self.folder, &[(identity_dir::TOKEN, token.as_bytes())])
    }

    /// Which credential this node uses at the API server.
    pub fn access(&self) -> Access {
        if self.folder.join(identity_dir::TOKEN).is_file() { Access::Token } else { Access::Certificate }
    }

    fn read(&self, name: &str) -> Result<String, IdentityError> {
        let path = self.folder.join(name);
        std::fs::read_to_string(&path).map_err(|source| IdentityError::Io { path, source })
    }

    /// The data-plane CA's certificate.
    pub fn ca_pem(&self) -> Result<String, IdentityError> {
        self.read(identity_dir::CA)
    }

    /// The API server's CA; an identity of an older release has one CA for both.
    pub fn server_ca_pem(&self) -> Result<String, IdentityError> {
        let separate = self.folder.join(identity_dir::SERVER_CA).is_file();
        self.read(if separate { identity_dir::SERVER_CA } else { identity_dir::CA })
    }

    /// The node's certificate.
    pub fn certificate_pem(&self) -> Result<String, IdentityError> {
        self.read(identity_dir::CERTIFICATE)
    }

    /// Validity of the certificate.
    pub fn validity(&self) -> Result<Validity, IdentityError> {
        let path = self.folder.join(identity_dir::CERTIFICATE);
        let damaged = || IdentityError::Damaged { path, problem: "it is no certificate".into() };
        Validity::from_certificate(&self.read(identity_dir::CERTIFICATE)?).ok_or_else(damaged)
    }

    /// Validity of the token; `None` without a token, or when the token does not contain it.
    pub fn token_validity(&self) -> Result<Option<Validity>, IdentityError> {
        if self.access() == Access::Certificate {
            return Ok(None);
        }
        let token = self.read(identity_dir::TOKEN)?;
        Ok(access::validity(&token).map(|(begin, end)| Validity { begin, end }))
    }

    /// Whether certificate and token are both still valid.
    pub fn is_valid(&self) -> Result<bool, IdentityError> {
        let token = self.token_validity()?.is_none_or(|token| !token.remaining().is_zero());
        Ok(token && !self.validity()?.remaining().is_zero())
    }

    /// A client that acts as this node and follows renewals of its files.
    pub async fn client(
        &self,
        tune: impl Fn(&mut kube::Config) + Send + Sync + 'static,
    ) -> Result<kube::Client, IdentityError> {
        Ok(kube_client::client(&self.folder.join(identity_dir::KUBECONFIG), tune).await?)
    }
}

/// The node name in a certificate.
fn name_in(certificate: &str) -> Option<String> {
    let der = CertificateDer::from_pem_slice(certificate.as_bytes()).ok()?;
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).ok()?;
    let name = certificate.subject().iter_common_name().next()?.as_str().ok()?;
    name.strip_prefix(NODE_USER_PREFIX).map(str::to_owned)
}

/// A kubeconfig that refers to the files of the identity beside it.
pub fn kubeconfig(user: &str, server: &str, access: Access) -> String {
    let credentials = match access {
        Access::Certificate => serde_json::json!({
            "client-certificate": identity_dir::CERTIFICATE, "client-key": identity_dir::KEY,
        }),
        Access::Token => serde_json::json!({"tokenFile": identity_dir::TOKEN}),
    };
    // Relative names are resolved against the kubeconfig's own folder. JSON is YAML.
    let kubeconfig = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "russet",
        "clusters": [{"name": "russet", "cluster": {"server": server, "certificate-authority": identity_dir::SERVER_CA}}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "russet", "context": {"cluster": "russet", "user": user}}],
    });
    format!("{kubeconfig:#}\n")
}

fn publish(dir: &Path, files: &[(&str, &[u8])]) -> Result<(), IdentityError> {
    identity_dir::publish(dir, files).map_err(|source| IdentityError::Io { path: dir.to_owned(), source })
}

/// Removes the identity in `dir`, if there is one.
pub(crate) fn remove(dir: &Path) -> Result<(), IdentityError> {
    identity_dir::remove(dir).map_err(|source| IdentityError::Io { path: dir.to_owned(), source })
}

/// Writes a file atomically, readable by its owner alone.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), IdentityError> {
    identity_dir::write(path, text.as_bytes())
        .map_err(|source| IdentityError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn identity_is_stored_atomically_and_may_move() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let folder = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, "russet:node:a");
        let (certificate, key) = (params.self_signed(&key).unwrap().pem(), key.serialize_pem());
        let ca = certificate.as_str();
        let material = Material { certificate: ca, key: &key, ca, server_ca: ca, token: None };
        assert_eq!(NodeIdentity::load(folder.path()).unwrap(), None);
        let server = |port: u16| vec![format!("https://127.0.0.1:{port}")];
        let stored = NodeIdentity::store(folder.path(), "a", &server(6443), &material).unwrap();
        assert_eq!(NodeIdentity::load(folder.path()).unwrap(), Some(stored.clone()));
        assert!(stored.is_valid().unwrap());
        assert_eq!((stored.access(), stored.token_validity().unwrap()), (Access::Certificate, None));

        let moved = stored.with_servers(&server(7443)).unwrap();
        assert_eq!(NodeIdentity::load(folder.path()).unwrap(), Some(moved.clone()));
        moved.client(|_| {}).await.unwrap();

        let material = Material { token: Some("e30.eyJpYXQiOjEsImV4cCI6Mn0.x"), ..material };
        let token = NodeIdentity::store(folder.path(), "a", &server(7443), &material).unwrap();
        assert_eq!(token.token_validity().unwrap(), Some(Validity { begin: 1, end: 2 }));
        assert!(!token.is_valid().unwrap(), "its token has ended");
        token.client(|_| {}).await.unwrap();
        let material = Material { token: None, ..material };
        let certified = NodeIdentity::store(folder.path(), "a", &server(7443), &material).unwrap();
        assert_eq!(certified.access(), Access::Certificate, "the token went with its identity");

        std::fs::remove_file(folder.path().join("tls.key")).unwrap();
        assert_eq!(NodeIdentity::load(folder.path()).unwrap(), None);
    }

    #[test]
    fn renewal_is_due_at_two_thirds_of_lifetime_minus_jitter() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
        let validity = Validity { begin: now, end: now + 30_000 };
        for (jitter, least, most) in [(0.0, 19_900.0, 20_000.0), (1.0, 16_900.0, 17_000.0)] {
            let due = validity.renew_in(jitter).as_secs_f64();
            assert!(least < due && due <= most, "{jitter}: {due}");
        }
        assert_eq!(Validity { begin: now - 20, end: now - 10 }.renew_in(0.5), Duration::ZERO);
    }
}
