//! Identities of the control plane's own components, issued by `serve` with its CA: the operator's, the
//! gateway's, the administrator's, and initially that of the node on the same machine. They are reissued at
//! every start and long before they expire; their users reload them.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use russet_agent::Access;
use russet_agent::join::identity::{Material, NodeIdentity, kubeconfig};
use russet_apiserver::auth::user::MASTERS;
use russet_apiserver::pki;
use russet_rpc::tls::{self, identity_dir};

use crate::data_dir;

/// Lifetime of an identity in days, as for nodes.
const DAYS: i64 = 30;
/// Lifetime of the administrator's kubeconfig in days: people copy it.
const ADMIN_DAYS: i64 = 365;
/// Interval between two checks of their age.
const POLL_INTERVAL: Duration = Duration::from_secs(3600);
/// Two thirds of an identity's lifetime.
const RENEW_AFTER: Duration = Duration::from_secs(20 * 24 * 3600);
/// Retry interval, for example when the disk is full.
const RETRY_INTERVAL: Duration = Duration::from_secs(600);

/// The identities to issue, and where they are stored.
pub struct Identities {
    /// The CA.
    pub authority: pki::Authority,
    /// URL of the API server.
    pub server: String,
    /// Folder of the operator.
    pub operator: PathBuf,
    /// Folder of the gateway.
    pub gateway: PathBuf,
    /// The administrator's kubeconfig.
    pub admin: PathBuf,
}

impl Identities {
    /// Issues all of them; the administrator's last.
    pub fn issue(&self) -> Result<()> {
        let Self { authority, server, operator, gateway, admin } = self;
        self.component(operator, tls::OPERATOR_USER, &[])?;
        self.component(gateway, tls::GATEWAY_USER, &[tls::GATEWAY_DNS_NAME.to_owned()])?;
        let (cert, key) = authority.issue_client("russet-admin", &[MASTERS], ADMIN_DAYS)?;
        Ok(pki::write_kubeconfig(admin, server, authority.cert_pem(), &cert, &key)?)
    }

    /// Reissues them in time, for ever.
    pub async fn run(self) {
        let mut made = SystemTime::now();
        loop {
            // By the wall clock: the monotonic clock stops while a machine sleeps.
            tokio::time::sleep(POLL_INTERVAL).await;
            if made.elapsed().is_ok_and(|age| age < RENEW_AFTER) {
                continue;
            }
            while let Err(error) = self.issue() {
                tracing::warn!(error = format!("{error:#}"), "identities could not be renewed; retrying");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            made = SystemTime::now();
            tracing::info!("the identities of operator and gateway were renewed");
        }
    }

    /// The identity of this machine's node, unless it has a valid one: from then on its agent renews it. An
    /// identity from a join carries a node incarnation; that of a control plane's own node carries none.
    pub fn local_node(&self, dir: &Path, node: &str) -> Result<()> {
        data_dir::make_private(dir)?;
        let servers = [self.server.clone()];
        let ca = self.authority.cert_pem();
        if let Ok(Some(existing)) = NodeIdentity::load(dir)
            && existing.node == node
            && existing.is_valid().unwrap_or(false)
            && existing.server_ca_pem().is_ok_and(|pem| pem == ca)
            && !is_from_join(&existing)
        {
            existing.with_servers(&servers)?;
            return Ok(());
        }
        let names = [tls::node_dns_name(node)];
        let (certificate, key) =
            self.authority.issue_peer(&tls::node_user(node), &[tls::NODES_GROUP], &names, DAYS)?;
        let material = Material { certificate: &certificate, key: &key, ca, server_ca: ca, token: None };
        NodeIdentity::store(dir, node, &servers, &material)?;
        Ok(())
    }

    fn component(&self, dir: &Path, user: &str, names: &[String]) -> Result<()> {
        data_dir::make_private(dir)?;
        let (certificate, key) = self.authority.issue_peer(user, &[], names, DAYS)?;
        let kubeconfig = kubeconfig("russet", &self.server, Access::Certificate);
        let files: [(&str, &[u8]); 5] = [
            (identity_dir::CERTIFICATE, certificate.as_bytes()),
            (identity_dir::KEY, key.as_bytes()),
            (identity_dir::CA, self.authority.cert_pem().as_bytes()),
            (identity_dir::SERVER_CA, self.authority.cert_pem().as_bytes()),
            (identity_dir::KUBECONFIG, kubeconfig.as_bytes()),
        ];
        identity_dir::publish(dir, &files)
            .with_context(|| format!("cannot write the identity in {}", dir.display()))
    }
}

fn is_from_join(identity: &NodeIdentity) -> bool {
    std::fs::read_to_string(identity.folder.join(identity_dir::CERTIFICATE)).is_ok_and(|pem| {
        pki::certificate(&pem).and_then(|it| pki::subject(&it)).is_ok_and(|it| !it.uid.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, Issuer, KeyPair};

    use super::*;

    #[test]
    fn a_node_keeps_its_certificate_unless_it_joined_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let authority = pki::Authority::generate("test-ca").unwrap();
        let identities = Identities {
            authority: pki::Authority::from_pem(authority.cert_pem(), authority.key_pem()).unwrap(),
            server: "https://127.0.0.1:6443".to_owned(),
            operator: dir.path().join("operator"),
            gateway: dir.path().join("gateway"),
            admin: dir.path().join("admin"),
        };
        let agent = dir.path().join("agent");
        let made = || {
            identities.local_node(&agent, "a").unwrap();
            std::fs::read_to_string(agent.join(identity_dir::CERTIFICATE)).unwrap()
        };
        let first = made();
        assert_eq!(made(), first, "it is kept");

        let issuer = KeyPair::from_pem(authority.key_pem()).unwrap();
        let issuer = Issuer::from_ca_cert_pem(authority.cert_pem(), issuer).unwrap();
        let mut params = CertificateParams::new(vec![tls::node_dns_name("a")]).unwrap();
        params.distinguished_name.push(DnType::CommonName, tls::node_user("a"));
        params.distinguished_name.push(DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]), "life");
        let key = KeyPair::generate().unwrap();
        let joined = params.signed_by(&key, &issuer).unwrap().pem();
        let (key, ca) = (key.serialize_pem(), authority.cert_pem());
        let material = Material { certificate: &joined, key: &key, ca, server_ca: ca, token: None };
        NodeIdentity::store(&agent, "a", std::slice::from_ref(&identities.server), &material).unwrap();
        assert!(is_from_join(&NodeIdentity::load(&agent).unwrap().unwrap()));
        let anew = made();
        assert_ne!(anew, joined);
        assert_eq!(pki::subject(&pki::certificate(&anew).unwrap()).unwrap().uid, "");
    }
}
