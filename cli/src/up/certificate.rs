//! The certificate that clients of other machines see, signed by this control plane's own CA. `up`
//! makes and renews it, so that the gateway, which the network talks to, never holds the CA's key.

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
/// Age at which it is made anew: early enough that nobody meets an expired one.
const RENEW_AFTER: Duration = Duration::from_secs(60 * 24 * 3600);
/// Which names the certificate has and who signed it, beside it.
const NAMES: &str = "names";

/// Where the certificate lies.
pub fn files(layout: &DataDir) -> ServerFiles {
    let dir = dir(layout);
    ServerFiles { cert: dir.join(identity_dir::CERTIFICATE), key: dir.join(identity_dir::KEY) }
}

fn dir(layout: &DataDir) -> PathBuf {
    layout.gateway().join("server")
}

/// Makes the certificate when there is none, when it is old, or when names or authority changed.
pub fn ensure(layout: &DataDir, listen: &[IpAddr]) -> Result<()> {
    let pki_dir = layout.serve().join("pki");
    let authority =
        Authority::from_pem(&pki::read(&pki_dir.join("ca.crt"))?, &pki::read(&pki_dir.join("ca.key"))?)?;
    let (names, addresses) = (host_names(), addresses(listen));
    let wanted = format!("{} {names:?} {addresses:?}", authority.pin()?);
    let dir = dir(layout);
    if !is_due(&dir, &wanted, SystemTime::now()) {
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
    // Last: without it the certificate is made again.
    pki::write_private(&dir.join(NAMES), wanted.as_bytes())?;
    Ok(())
}

fn is_due(dir: &Path, wanted: &str, now: SystemTime) -> bool {
    let path = dir.join(NAMES);
    let made = std::fs::metadata(&path).and_then(|metadata| metadata.modified());
    // A clock that was set back makes it look younger than now: made again, that is mended too.
    let age = made.ok().and_then(|made| now.duration_since(made).ok());
    age.is_none_or(|age| age >= RENEW_AFTER) || std::fs::read_to_string(&path).ok().as_deref() != Some(wanted)
}

/// Names by which others may know this machine.
pub fn host_names() -> Vec<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let mut names = vec!["localhost".to_owned()];
    let valid = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.')
    };
    if valid(&host) {
        // Macs and many Linux machines answer to `NAME.local` on their own network.
        names.push(format!("{}.local", host.trim_end_matches(".local")));
        names.push(host);
    }
    names.dedup();
    names
}

/// Addresses at which others may reach a gateway that listens on `listen`.
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

        let wanted = std::fs::read_to_string(dir(&layout).join(NAMES)).unwrap();
        let due = |now| is_due(&dir(&layout), &wanted, now);
        let now = SystemTime::now() + Duration::from_secs(1);
        assert!(!due(now) && due(now + RENEW_AFTER) && due(now - Duration::from_secs(3600)));
        assert!(RENEW_AFTER < Duration::from_secs(DAYS.cast_unsigned() * 24 * 3600));
        // A mode for its owner alone, as every key here.
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(files(&layout).key).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0);
    }
}
