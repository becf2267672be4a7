//! The gateway's certificate for clients on other machines, signed by this control plane's own CA. `up`
//! issues and renews it, so that the gateway, which is exposed to the network, never holds the CA's key.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use russet_apiserver::pki::{self, Authority};
use russet_gateway::listen::ServerFiles;
use russet_rpc::tls::identity_dir;

use crate::data_dir::DataDir;

/// Lifetime of the certificate, days.
const DAYS: i64 = 90;
/// Age at which it is renewed: early enough that no client sees an expired one.
const RENEW_AFTER: Duration = Duration::from_secs(60 * 24 * 3600);
/// File with the certificate's names and its CA.
const NAMES: &str = "names";

/// Paths of the certificate and its key.
pub fn files(layout: &DataDir) -> ServerFiles {
    let dir = dir(layout);
    ServerFiles { cert: dir.join(identity_dir::CERTIFICATE), key: dir.join(identity_dir::KEY) }
}

fn dir(layout: &DataDir) -> PathBuf {
    layout.gateway().join("server")
}

/// Issues the certificate if there is none, if it is old, or if names or CA changed.
pub fn ensure(layout: &DataDir, listen: &[IpAddr]) -> Result<()> {
    let pki_dir = layout.serve().join("pki");
    let authority =
        Authority::from_pem(&pki::read(&pki_dir.join("ca.crt"))?, &pki::read(&pki_dir.join("ca.key"))?)?;
    let (names, addresses) = (host_names(), addresses(listen));
    let expected = format!("{} {names:?} {addresses:?}", authority.pin()?);
    let dir = dir(layout);
    if !is_due(&dir, &expected, SystemTime::now()) {
        return Ok(());
    }
    let (cert, key) = authority.issue_server("russet-gateway", &names, &addresses, DAYS)?;
    let published = identity_dir::publish(
        &dir,
        &[
            (identity_dir::CERTIFICATE, cert.as_bytes()),
            (identity_dir::KEY, key.as_bytes()),
            (identity_dir::CA, authority.cert_pem().as_bytes()),
        ],
    );
    published.with_context(|| format!("cannot keep the gateway's certificate in {}", dir.display()))?;
    // Last: without this file the certificate is issued again.
    pki::write_private(&dir.join(NAMES), expected.as_bytes())?;
    Ok(())
}

fn is_due(dir: &Path, expected: &str, now: SystemTime) -> bool {
    let path = dir.join(NAMES);
    let made = std::fs::metadata(&path).and_then(|metadata| metadata.modified());
    // After a clock was set back it seems to be from the future; it is issued again.
    let age = made.ok().and_then(|made| now.duration_since(made).ok());
    age.is_none_or(|age| age >= RENEW_AFTER)
        || std::fs::read_to_string(&path).ok().as_deref() != Some(expected)
}

/// Host names of this machine.
pub fn host_names() -> Vec<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let mut names = vec!["localhost".to_owned()];
    let valid = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.')
    };
    if valid(&host) {
        // Macs and many Linux machines are `NAME.local` on their own network.
        names.push(format!("{}.local", host.trim_end_matches(".local")));
        names.push(host);
    }
    names.dedup();
    names
}

/// Addresses of a gateway that listens on `listen`.
pub fn addresses(listen: &[IpAddr]) -> Vec<IpAddr> {
    let own = russet_agent::hardware::interface_addresses();
    let named = listen.iter().copied().filter(|address| !address.is_unspecified());
    let loopback = [IpAddr::from([127, 0, 0, 1]), std::net::Ipv6Addr::LOCALHOST.into()];
    let mut all: Vec<IpAddr> = loopback.into_iter().chain(own).chain(named).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_is_remade_when_old_or_when_addresses_change() {
        let folder = tempfile::tempdir().unwrap();
        let layout = DataDir::resolve(Some(folder.path().to_owned())).unwrap();
        Authority::ensure(&layout.serve().join("pki")).unwrap();
        let listen = ["10.1.2.3".parse().unwrap()];
        ensure(&layout, &listen).unwrap();
        let read = || std::fs::read_to_string(files(&layout).cert).unwrap();
        let first = read();
        ensure(&layout, &listen).unwrap();
        assert_eq!(read(), first);
        ensure(&layout, &[]).unwrap();
        assert_ne!(read(), first, "another address wants another certificate");

        let expected = std::fs::read_to_string(dir(&layout).join(NAMES)).unwrap();
        let due = |now| is_due(&dir(&layout), &expected, now);
        let now = SystemTime::now() + Duration::from_secs(1);
        assert!(!due(now) && due(now + RENEW_AFTER) && due(now - Duration::from_secs(3600)));
        assert!(RENEW_AFTER < Duration::from_secs(DAYS.cast_unsigned() * 24 * 3600));
        // A mode for the owner only, as for every key.
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(files(&layout).key).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0);
    }
}
