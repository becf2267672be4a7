//! The certificate authority of one control plane: its files, the certificates it issues, the kubeconfig that
//! contains them. Not here: which callers may request a certificate.

pub mod shared;

use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};

/// Validity of the CA in days. It outlives every machine it serves; a new one means joining every node again.
const CA_DAYS: i64 = 3650;
/// Validity of server certificates in days; they are reissued at every start.
pub const SERVER_DAYS: i64 = 365;

/// The subject attribute in which Kubernetes stores a user's unique id, too.
const UID: x509_parser::der_parser::Oid<'static> = x509_parser::der_parser::oid!(1.3.6.1.4.1.57683.2);

/// Why a certificate is not available.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}; check that the data directory exists and belongs to you", .path.display())]
    File {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A certificate or key is invalid.
    #[error("the {what} is unusable: {why}")]
    Unusable {
        /// The certificate or key.
        what: String,
        /// The cause.
        why: String,
    },
}

fn unusable(what: &str, why: impl ToString) -> PkiError {
    PkiError::Unusable { what: what.into(), why: why.to_string() }
}

/// A certificate authority with its key.
pub struct Authority {
    cert_pem: String,
    key_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Authority").field("pin", &self.pin().ok()).finish_non_exhaustive()
    }
}

impl Authority {
    /// Loads the CA in `dir` (`ca.crt`, `ca.key`), or creates it.
    pub fn ensure(dir: &Path) -> Result<Self, PkiError> {
        let (cert, key) = (dir.join("ca.crt"), dir.join("ca.key"));
        if cert.exists() && key.exists() {
            return Self::from_pem(&read(&cert)?, &read(&key)?);
        }
        std::fs::create_dir_all(dir).map_err(|source| PkiError::File {
            action: "create",
            path: dir.to_path_buf(),
            source,
        })?;
        let authority = Self::generate("russet-ca")?;
        // The key first: a certificate without its key would look like a CA that lost its key.
        write_private(&key, authority.key_pem.as_bytes())?;
        write_private(&cert, authority.cert_pem.as_bytes())?;
        Ok(authority)
    }

    /// Generates a CA in memory.
    pub fn generate(name: &str) -> Result<Self, PkiError> {
        let key = KeyPair::generate().map_err(|error| unusable("new CA key", error))?;
        let mut params = params(name, &[], CA_DAYS);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let cert = params.self_signed(&key).map_err(|error| unusable("new CA certificate", error))?;
        Self::from_pem(&cert.pem(), &key.serialize_pem())
    }

    /// A CA from PEM texts.
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, PkiError> {
        let key = KeyPair::from_pem(key_pem).map_err(|error| unusable("CA key", error))?;
        let first = certificate(cert_pem)?;
        let (_, parsed) =
            x509_parser::parse_x509_certificate(&first).map_err(|error| unusable("CA certificate", error))?;
        if *parsed.public_key().subject_public_key.data != *key.der_bytes() {
            let problem = "it does not match the first certificate in ca.crt; restore ca.crt and ca.key from the same backup";
            return Err(unusable("CA key", problem));
        }
        let issuer =
            Issuer::from_ca_cert_pem(cert_pem, key).map_err(|error| unusable("CA certificate", error))?;
        Ok(Self { cert_pem: cert_pem.into(), key_pem: key_pem.into(), issuer })
    }

    /// The certificate, which is public.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// The private key, for signing.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// `sha256:` and the hex digest of the CA's public key, which a joining machine compares with its token.
    pub fn pin(&self) -> Result<String, PkiError> {
        let cert = certificate(&self.cert_pem)?;
        pin(&cert)
    }

    /// Issues a client certificate: `cn` is the user, `orgs` the groups (at most two). Returns certificate
    /// and key.
    pub fn issue_client(&self, cn: &str, orgs: &[&str], days: i64) -> Result<(String, String), PkiError> {
        let mut params = params(cn, orgs, days);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(params)
    }

    /// Issues a server certificate for these names and addresses. Returns certificate and key.
    pub fn issue_server(
        &self,
        cn: &str,
        names: &[String],
        addresses: &[IpAddr],
        days: i64,
    ) -> Result<(String, String), PkiError> {
        let mut params = params(cn, &[], days);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            let name = name.clone().try_into().map_err(|_| unusable("server name", name))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        self.issue(params)
    }

    /// Issues a certificate for both sides of a connection: a component that serves under `names` and calls
    /// others as `cn`. Returns certificate and key.
    pub fn issue_peer(
        &self,
        cn: &str,
        orgs: &[&str],
        names: &[String],
        days: i64,
    ) -> Result<(String, String), PkiError> {
        let mut params = params(cn, orgs, days);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            let name = name.clone().try_into().map_err(|_| unusable("server name", name))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        self.issue(params)
    }

    fn issue(&self, mut params: CertificateParams) -> Result<(String, String), PkiError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(|error| unusable("new key", error))?;
        let cert =
            params.signed_by(&key, &self.issuer).map_err(|error| unusable("new certificate", error))?;
        Ok((cert.pem(), key.serialize_pem()))
    }
}

/// `sha256:` and the hex digest of a certificate's public key.
pub fn pin(cert: &CertificateDer<'_>) -> Result<String, PkiError> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(cert).map_err(|error| unusable("certificate", error))?;
    Ok(format!("sha256:{}", hex::encode(Sha256::digest(parsed.public_key().raw))))
}

/// The subject of a certificate, as Kubernetes reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateSubject {
    /// The common name: the user.
    pub name: String,
    /// The organizations: the groups.
    pub orgs: Vec<String>,
    /// The unique id, which distinguishes users with the same name; empty in most certificates.
    pub uid: String,
}

/// The subject of a certificate.
pub fn subject(cert: &CertificateDer<'_>) -> Result<CertificateSubject, PkiError> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(cert).map_err(|error| unusable("certificate", error))?;
    let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        attribute.as_str().ok().map(str::to_string)
    };
    let subject = parsed.subject();
    Ok(CertificateSubject {
        name: subject.iter_common_name().find_map(text).unwrap_or_default(),
        orgs: subject.iter_organization().filter_map(text).collect(),
        uid: subject.iter_by_oid(&UID).find_map(text).unwrap_or_default(),
    })
}

/// The first certificate of a PEM text.
pub fn certificate(pem: &str) -> Result<CertificateDer<'static>, PkiError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| unusable("certificate", error))
}

/// All certificates of a PEM text.
pub fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    let found: Result<_, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    found.map_err(|error| unusable("certificate", error))
}

/// The private key of a PEM text.
pub fn private_key(pem: &str) -> Result<PrivateKeyDer<'static>, PkiError> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|error| unusable("private key", error))
}

/// Writes a kubeconfig with one cluster, one user and one context, readable by its owner only.
pub fn write_kubeconfig(
    path: &Path,
    server: &str,
    ca_pem: &str,
    cert_pem: &str,
    key_pem: &str,
) -> Result<(), PkiError> {
    let [ca, cert, key] = [ca_pem, cert_pem, key_pem].map(|pem| STANDARD.encode(pem));
    let text = format!(
        "apiVersion: v1
kind: Config
clusters:
- name: russet
  cluster:
    server: {server}
    certificate-authority-data: {ca}
users:
- name: russet-admin
  user:
    client-certificate-data: {cert}
    client-key-data: {key}
contexts:
- name: russet
  context:
    cluster: russet
    user: russet-admin
current-context: russet
"
    );
    write_private(path, text.as_bytes())
}

/// Reads a text file.
pub fn read(path: &Path) -> Result<String, PkiError> {
    std::fs::read_to_string(path).map_err(|source| PkiError::File {
        action: "read",
        path: path.to_path_buf(),
        source,
    })
}

/// Writes a file that only its owner may read, replacing it atomically.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), PkiError> {
    let failed = |source| PkiError::File { action: "write", path: path.to_path_buf(), source };
    let draft = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&draft).map_err(failed)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.and_then(|()| std::fs::rename(&draft, path)).map_err(|source| {
        // On a full disk a process that is started again and again would leave one draft each.
        let _ = std::fs::remove_file(&draft);
        failed(source)
    })
}

/// Sets the validity period of a certificate.
fn set_validity(params: &mut CertificateParams, days: i64) {
    let today = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date();
    let day = |date: jiff::civil::Date| {
        rcgen::date_time_ymd(i32::from(date.year()), date.month().unsigned_abs(), date.day().unsigned_abs())
    };
    let span = |days: i64| jiff::Span::new().try_days(days).unwrap_or_default();
    // A day early, because clocks differ.
    params.not_before = day(today.checked_sub(span(1)).unwrap_or(today));
    params.not_after = day(today.checked_add(span(days.max(1))).unwrap_or(today));
}

fn params(cn: &str, orgs: &[&str], days: i64) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    // A name holds one attribute of each type; the second organization is written with its bare object
    // identifier.
    for (index, org) in orgs.iter().take(2).enumerate() {
        let kind =
            if index == 0 { DnType::OrganizationName } else { DnType::CustomDnType(vec![2, 5, 4, 10]) };
        name.push(kind, *org);
    }
    name.push(DnType::CommonName, cn);
    params.distinguished_name = name;
    set_validity(&mut params, days);
    params
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_certificate_carries_user_and_groups() {
        let authority = Authority::generate("test-ca").unwrap();
        let (cert, _) = authority.issue_client("alice", &["system:masters", "other"], 1).unwrap();
        let CertificateSubject { name, orgs, uid } = subject(&certificate(&cert).unwrap()).unwrap();
        assert_eq!((name.as_str(), uid.as_str()), ("alice", ""));
        assert_eq!(orgs, ["system:masters", "other"]);
    }

    #[test]
    fn a_certificate_tells_users_of_one_name_apart() {
        let mut params = params("alice", &[], 1);
        params.distinguished_name.push(DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]), "second");
        let cert = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(subject(cert.der()).unwrap().uid, "second");
    }

    #[test]
    fn authority_key_must_match_its_first_certificate() {
        let [first, second] = ["a", "b"].map(|name| Authority::generate(name).unwrap());
        let both = format!("{}{}", first.cert_pem(), second.cert_pem());
        Authority::from_pem(&both, first.key_pem()).unwrap();
        let error = Authority::from_pem(&both, second.key_pem()).unwrap_err();
        assert!(error.to_string().contains("does not match the first certificate"), "{error}");
    }

    #[test]
    fn an_authority_is_found_again_with_the_same_pin() {
        let folder = tempfile::tempdir().unwrap();
        let first = Authority::ensure(folder.path()).unwrap();
        let second = Authority::ensure(folder.path()).unwrap();
        assert_eq!(first.pin().unwrap(), second.pin().unwrap());
        assert!(first.pin().unwrap().starts_with("sha256:"));
    }
}
