//! Address and credentials of an MQTT broker, parsed from flags and files. Not here: the connection.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use thiserror::Error;

/// A broker.
#[derive(Clone, Debug)]
pub struct Broker {
    /// Host name or address; IPv6 in brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// User name and password.
    pub login: Option<(String, Secret)>,
    /// TLS configuration; without it nothing is encrypted.
    pub tls: Option<Trust>,
}

/// A password; hidden in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("(a password)")
    }
}

/// TLS configuration of a broker.
#[derive(Clone, Debug)]
pub struct Trust {
    /// Server name in its certificate.
    pub name: ServerName<'static>,
    /// Client configuration with the trusted CA.
    pub client: Arc<rustls::ClientConfig>,
}

/// Why a broker cannot be used.
#[derive(Debug, Error)]
pub enum BrokerError {
    /// The address is invalid.
    #[error(
        "--mqtt {0} names no broker ({1}); write for example mqtt://homeassistant.local, or mqtts://user@host:8883"
    )]
    Address(String, String),
    /// The address contains a password, which every user of the machine could see.
    #[error(
        "--mqtt holds a password, which every user of this machine can see; write it into a file of its own and name that with --mqtt-password-file"
    )]
    PasswordInUrl,
    /// Conflicting flags.
    #[error("{0}")]
    Flags(&'static str),
    /// A file cannot be read.
    #[error("{path} cannot be read: {source}; check that the agent's user may read it")]
    Read {
        /// The file.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
    /// A file does not contain a CA certificate.
    #[error("{path} holds no certificate authority that can be used: {problem}")]
    Authority {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
}

impl Broker {
    /// Parses `mqtt://[user@]host[:port]`, or `mqtts://` with the file of the CA that signed the broker's
    /// certificate.
    pub fn read(url: &str, password: Option<&Path>, authority: Option<&Path>) -> Result<Self, BrokerError> {
        let wrong = |problem: &str| BrokerError::Address(url.to_owned(), problem.to_owned());
        // First, before any error message shows the address.
        let parsed = reqwest::Url::parse(url);
        if parsed.as_ref().is_ok_and(|parsed| parsed.password().is_some()) {
            return Err(BrokerError::PasswordInUrl);
        }
        let parsed = parsed.map_err(|error| wrong(&error.to_string()))?;
        let (encrypted, usual) = match parsed.scheme() {
            "mqtt" => (false, 1883),
            "mqtts" => (true, 8883),
            other => return Err(wrong(&format!("{other}:// is neither mqtt:// nor mqtts://"))),
        };
        let host =
            parsed.host_str().filter(|host| !host.is_empty()).ok_or_else(|| wrong("it has no host"))?;
        if !matches!(parsed.path(), "" | "/") || parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(wrong("there is something behind the host and the port"));
        }
        let user = parsed.username();
        let login = match (user.is_empty(), password) {
            (true, None) => None,
            (true, Some(_)) => {
                return Err(BrokerError::Flags(
                    "--mqtt-password-file needs a user in --mqtt: mqtt://user@host",
                ));
            }
            (false, None) => Some((user.to_owned(), Secret(String::new()))),
            (false, Some(path)) => Some((user.to_owned(), Secret(read(path)?.trim_end().to_owned()))),
        };
        let tls = match (encrypted, authority) {
            (false, None) => None,
            (true, Some(path)) => Some(Trust::read(host, path)?),
            (false, Some(_)) => {
                return Err(BrokerError::Flags(
                    "--mqtt-ca-file needs an encrypted broker in --mqtt: mqtts://host",
                ));
            }
            (true, None) => {
                return Err(BrokerError::Flags(
                    "mqtts:// needs --mqtt-ca-file: the authority that signed the broker's certificate, or the system's own, such as /etc/ssl/certs/ca-certificates.crt",
                ));
            }
        };
        Ok(Self { host: host.to_owned(), port: parsed.port().unwrap_or(usual), login, tls })
    }
}

impl Trust {
    fn read(host: &str, path: &Path) -> Result<Self, BrokerError> {
        let unusable = |problem: String| BrokerError::Authority { path: path.to_owned(), problem };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(bare.to_owned()).map_err(|_| {
            BrokerError::Address(host.to_owned(), "no certificate can have that name".to_owned())
        })?;
        let mut roots = rustls::RootCertStore::empty();
        let text = read(path)?;
        for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
            let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
            roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(unusable("there is no certificate in it".to_owned()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { name, client: Arc::new(client) })
    }
}

fn read(path: &Path) -> Result<String, BrokerError> {
    std::fs::read_to_string(path).map_err(|source| BrokerError::Read { path: path.to_owned(), source })
}

impl std::fmt::Display for Broker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls.is_some() { "mqtts" } else { "mqtt" };
        write!(formatter, "{scheme}://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_is_an_address_and_its_secrets_are_files() {
        let folder = tempfile::tempdir().unwrap();
        let (password, authority) = (folder.path().join("password"), folder.path().join("ca.crt"));
        std::fs::write(&password, "with spaces \n").unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let made = rcgen::CertificateParams::new(vec!["ca".to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(&authority, made.pem()).unwrap();
        let (none, password, authority) = (None, Some(password.as_path()), Some(authority.as_path()));
        for (url, password, authority, expected) in [
            ("mqtt://homeassistant.local", none, none, Ok(("mqtt://homeassistant.local:1883", None))),
            ("mqtt://10.0.0.2:1884/", none, none, Ok(("mqtt://10.0.0.2:1884", None))),
            ("mqtt://[fd00::2]", none, none, Ok(("mqtt://[fd00::2]:1883", None))),
            ("mqtt://me@h", password, none, Ok(("mqtt://h:1883", Some(("me", "with spaces"))))),
            ("mqtt://me@h", none, none, Ok(("mqtt://h:1883", Some(("me", ""))))),
            ("mqtts://[fd00::2]:1", none, authority, Ok(("mqtts://[fd00::2]:1", None))),
            ("mqtts://h", none, authority, Ok(("mqtts://h:8883", None))),
            ("mqtt://me:secret@h", none, none, Err("--mqtt holds a password")),
            ("mqtt://h", password, none, Err("--mqtt-password-file needs a user")),
            ("mqtt://h", none, authority, Err("--mqtt-ca-file needs an encrypted")),
            ("mqtts://h", none, none, Err("mqtts:// needs --mqtt-ca-file")),
            ("mqtts://h", none, password, Err("holds no certificate authority")),
            ("mqtts://h", none, Some(Path::new("/nowhere")), Err("/nowhere cannot be read")),
            ("mqtt://h/topic", none, none, Err("there is something behind the host")),
            ("mqtt://", none, none, Err("it has no host")),
            ("h:1883", none, none, Err("h:// is neither")),
            ("homeassistant.local", none, none, Err("names no broker")),
        ] {
            match (Broker::read(url, password, authority), expected) {
                (Ok(broker), Ok((shown, login))) => {
                    assert_eq!(broker.to_string(), shown, "{url}");
                    let credentials =
                        broker.login.as_ref().map(|(user, secret)| (user.as_str(), secret.0.as_str()));
                    assert_eq!(credentials, login, "{url}");
                    assert!(!format!("{broker:?}").contains("with spaces"));
                }
                (Err(error), Err(words)) => {
                    let error = error.to_string();
                    assert!(error.contains(words), "{url}: {error}");
                    assert!(!error.contains("secret@"), "{error}");
                }
                (found, expected) => panic!("{url}: {found:?} is not {expected:?}"),
            }
        }
    }
}
