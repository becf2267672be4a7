//! A data-plane CA for tests, and folders of identities it signed. Used by the library's own tests and by
//! those that start real processes.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use russet_rpc::tls::{self, TlsFiles};
use tempfile::TempDir;

/// A CA and a folder for its identities.
pub struct Identities {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Identities {
    /// A fresh CA.
    pub fn new() -> Self {
        // Already installed by another test of this process: the same provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test CA");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer, dir: tempfile::tempdir().unwrap() }
    }

    /// A folder with the identity of `user`, serving under `name`.
    pub fn folder(&self, user: &str, name: &str) -> PathBuf {
        let dir = self.dir.path().join(user.replace(':', "-"));
        if dir.exists() {
            return dir;
        }
        std::fs::create_dir(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, user);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let ca = self.issuer.pem();
        for (file, text) in [("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem()), ("ca.crt", ca)]
        {
            std::fs::write(dir.join(file), text).unwrap();
        }
        dir
    }

    /// The identity of a node.
    pub fn node(&self, node: &str) -> PathBuf {
        self.folder(&tls::node_user(node), &tls::node_dns_name(node))
    }

    /// The identity of another user, as a client.
    pub fn user(&self, user: &str) -> TlsFiles {
        TlsFiles::in_dir(&self.folder(user, "client.russet.dev"))
    }
}
