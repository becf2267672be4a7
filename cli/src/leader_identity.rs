//! Identity of this process in the operators' leader election.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rand::Rng as _;

/// An identity and, if it is stored in a file, the lock that makes it exclusive to this process.
pub struct LeaderIdentity {
    /// The holder identity in the Lease.
    pub identity: String,
    _lock: Option<File>,
}

impl LeaderIdentity {
    /// Loads the identity stored in `folder`, or creates one. A restarted process gets the same identity and
    /// need not wait for its own old Lease to expire. Two processes with one identity would both believe that
    /// they lead, so the second one is refused.
    pub fn load_or_create(folder: &Path) -> Result<Self> {
        let path = folder.join("identity");
        let open = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let lock = open.with_context(|| format!("cannot open {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => bail!(
                "another control plane runs on {}; stop it, or name another --data-dir",
                folder.display()
            ),
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(error).context(format!("cannot lock {}", path.display()));
            }
        }
        let stored =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut identity = stored.trim().to_owned();
        if identity.is_empty() {
            identity = generate();
            std::fs::write(&path, &identity).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Self { identity, _lock: Some(lock) })
    }

    /// An identity for the lifetime of this process.
    pub fn ephemeral() -> Self {
        Self { identity: generate(), _lock: None }
    }
}

/// A new identity: the host name, for people, and a random part.
fn generate() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{host}_{:08x}", rand::rng().random::<u32>())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]
    use super::*;

    #[test]
    fn leader_identity_survives_restarts_and_is_exclusive() {
        let folder = std::env::temp_dir().join(format!("russet-candidate-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let first = LeaderIdentity::load_or_create(&folder).unwrap();
        assert!(LeaderIdentity::load_or_create(&folder).is_err(), "it is in use");
        let name = first.identity.clone();
        drop(first);
        assert_eq!(LeaderIdentity::load_or_create(&folder).unwrap().identity, name);
        assert_ne!(LeaderIdentity::ephemeral().identity, name);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
