//! The agent's record of a claimed Shard, so that a restarted agent can adopt its engine: one `state.json`
//! per Shard. A process is taken for the engine only if boot id, pid and start time all match.

use std::path::{Path, PathBuf};

use russet_crds::Rendezvous;
use serde::{Deserialize, Serialize};

use crate::hardware;
use crate::join::identity::{IdentityError, write};

const STATE_FILE: &str = "state.json";

/// Linux allows 108 bytes for the path of a socket, macOS 104; both count the final zero.
const MAX_SOCKET_PATH_BYTES: usize = 100;
/// Maximum number of directories to try for a socket, in case other users own the first ones.
const MAX_SHORT_FOLDERS: u32 = 16;

/// A claimed Shard and, once started, its engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineRecord {
    /// UID of the Shard.
    pub shard: String,
    /// Namespace of the Shard.
    pub namespace: String,
    /// Name of the Shard.
    pub name: String,
    /// Deployment it is a rank of, in the same namespace.
    #[serde(default)]
    pub deployment: Option<String>,
    /// Epoch claimed for.
    pub epoch: i64,
    /// Bytes granted.
    pub reserved: u64,
    /// Addresses allocated.
    pub rendezvous: Rendezvous,
    /// Key of the model's directory in the store.
    #[serde(default)]
    pub model_key: Option<String>,
    /// Key of the draft model's directory in the store.
    #[serde(default)]
    pub draft_key: Option<String>,
    /// Keys of the adapters' directories in the store.
    #[serde(default)]
    pub adapter_keys: Vec<String>,
    /// The engine, once started.
    #[serde(default)]
    pub process: Option<ProcessIdentity>,
    /// Whether the process is of an earlier epoch and waits for the formation of this one.
    #[serde(default)]
    pub kept: bool,
    /// Why the rank cannot serve at this epoch.
    #[serde(default)]
    pub failed: Option<String>,
    /// Version of the control protocol between agent and engine ([`russet_rpc::CONTROL_VERSION`]); the first
    /// version when not recorded.
    #[serde(default)]
    pub control: Option<u32>,
}

impl EngineRecord {
    /// Why this agent cannot control the engine, which an agent of another release started.
    pub fn version_mismatch(&self) -> Option<String> {
        let (theirs, ours) = (self.control.unwrap_or(1), russet_rpc::CONTROL_VERSION);
        (theirs != ours).then(|| {
            format!(
                "the engine was started by an agent of another release and speaks version {theirs} of the control protocol, this agent version {ours}; it is ended, and the group re-forms"
            )
        })
    }

    /// Keys of the directories that the engine reads.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        [&self.model_key, &self.draft_key].into_iter().flatten().chain(&self.adapter_keys).map(String::as_str)
    }
}

/// Identity of a process that survives pid reuse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessIdentity {
    /// Process id, also its process group.
    pub pid: u32,
    /// Start time, in the system's format.
    pub start: String,
    /// Boot id.
    pub boot_id: String,
}

impl ProcessIdentity {
    /// The running process `pid`; `None` when it has exited.
    pub fn from_pid(pid: u32, boot_id: &str) -> Option<Self> {
        let start = hardware::process_start(pid)?;
        Some(Self { pid, start, boot_id: boot_id.to_owned() })
    }

    /// Whether the process is still running.
    pub fn alive(&self, boot_id: &str) -> bool {
        self.boot_id == boot_id && hardware::process_start(self.pid).as_ref() == Some(&self.start)
    }

    /// Whether a signal stopped the process (state T).
    pub fn stopped(&self) -> bool {
        hardware::process_stopped(self.pid)
    }

    /// Kills the process and its children, if it is still the same one.
    pub fn kill(&self, boot_id: &str) {
        if !self.alive(boot_id) {
            return;
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw) else { return };
        // The engine leads a process group of its own; killing the group kills its children too.
        if rustix::process::kill_process_group(pid, rustix::process::Signal::KILL).is_err() {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
        }
    }
}

/// The directory of a Shard's engine.
pub fn folder(engines: &Path, shard: &str) -> PathBuf {
    engines.join(shard)
}

/// The engine's control socket: in the Shard's directory, or, where that path is too long for a socket, under
/// the system's temporary directory.
pub fn socket(engines: &Path, shard: &str) -> PathBuf {
    short_path(&folder(engines, shard).join("control.sock"))
}

/// The path, or, where it is too long for a socket, a unique one in a directory of this user under the
/// system's temporary directory. The result is always the same.
pub fn short_path(path: &Path) -> PathBuf {
    if path.as_os_str().len() <= MAX_SOCKET_PATH_BYTES {
        return path.to_owned();
    }
    use sha2::Digest as _;
    let digest = hex::encode(&sha2::Sha256::digest(path.as_os_str().as_encoded_bytes())[..8]);
    // Every user may write there, and the first to create a known name owns it.
    let folders =
        (0..MAX_SHORT_FOLDERS).map(|number| std::env::temp_dir().join(format!("russet-{digest}-{number}")));
    let own = folders.into_iter().find(|folder| is_own(folder));
    own.map_or_else(|| path.to_owned(), |folder| folder.join("sock"))
}

/// Whether only this user can enter the directory, which is created if absent.
fn is_own(folder: &Path) -> bool {
    use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
    // An existing directory is checked like a new one.
    std::fs::DirBuilder::new().mode(0o700).create(folder).ok();
    std::fs::symlink_metadata(folder).is_ok_and(|found| {
        found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o077 == 0
    })
}

/// Writes a record atomically.
pub fn save(engines: &Path, record: &EngineRecord) -> Result<(), IdentityError> {
    let folder = folder(engines, &record.shard);
    std::fs::create_dir_all(&folder).map_err(|source| IdentityError::Io { path: folder.clone(), source })?;
    write(&folder.join(STATE_FILE), &format!("{:#}\n", serde_json::json!(record)))
}

/// All records; damaged ones are skipped with a warning, and their Shards are claimed again.
pub fn load(engines: &Path) -> Vec<EngineRecord> {
    let entries = std::fs::read_dir(engines).into_iter().flatten().flatten();
    let records = entries.filter_map(|entry| {
        let path = entry.path().join(STATE_FILE);
        let text = std::fs::read(&path).ok()?;
        match serde_json::from_slice::<EngineRecord>(&text) {
            Ok(record) if entry.file_name().to_str() == Some(&record.shard) => Some(record),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "damaged engine record; its Shard is claimed again");
                None
            }
        }
    });
    records.collect()
}

/// When a record was last written.
pub fn recorded_at(engines: &Path, shard: &str) -> Option<std::time::SystemTime> {
    std::fs::metadata(folder(engines, shard).join(STATE_FILE)).ok()?.modified().ok()
}

/// Removes the record and the socket of a Shard.
pub fn remove(engines: &Path, shard: &str) {
    let (socket, folder) = (socket(engines, shard), folder(engines, shard));
    std::fs::remove_file(&socket).ok();
    if let Some(elsewhere) = socket.parent().filter(|parent| *parent != folder) {
        std::fs::remove_dir(elsewhere).ok();
    }
    if let Err(error) = std::fs::remove_dir_all(&folder) {
        tracing::debug!(shard, %error, "the engine's folder could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_of_another_control_version_is_not_adopted() {
        let ours = russet_rpc::CONTROL_VERSION;
        for (control, foreign) in [(None, ours != 1), (Some(ours), false), (Some(ours + 1), true)] {
            let record = EngineRecord { control, ..EngineRecord::default() };
            assert_eq!(record.version_mismatch().is_some(), foreign, "{control:?}");
        }
        let written: EngineRecord = serde_json::from_str(r#"{"shard": "s", "namespace": "n", "name": "m", "epoch": 1, "reserved": 0, "rendezvous": {"rpc": "", "ring": "", "tensor": ""}}"#).unwrap();
        assert_eq!(written.control, None);
    }

    #[test]
    fn process_identity_includes_its_start_time() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = ProcessIdentity::from_pid(child.id(), "boot").unwrap();
        assert!(process.alive("boot") && !process.alive("another boot"));
        let impostor = ProcessIdentity { start: "1".into(), ..process.clone() };
        assert!(!impostor.alive("boot"));
        impostor.kill("boot");
        assert!(process.alive("boot"), "a process with another start time was killed");
        process.kill("boot");
        child.wait().unwrap();
        assert!(!process.alive("boot"));
    }

    #[test]
    fn engine_records_reload_and_damaged_ones_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let record = EngineRecord {
            shard: "uid-1".into(),
            namespace: "default".into(),
            name: "chat-0".into(),
            deployment: Some("chat".into()),
            epoch: 3,
            reserved: 7,
            rendezvous: Rendezvous {
                rpc: "10.0.0.1:1".into(),
                ring: "10.0.0.1:2".into(),
                tensor: "10.0.0.1:3".into(),
            },
            model_key: Some("m".into()),
            draft_key: Some("d".into()),
            adapter_keys: vec!["a".into()],
            process: None,
            kept: false,
            failed: None,
            control: Some(russet_rpc::CONTROL_VERSION),
        };
        save(folder.path(), &record).unwrap();
        std::fs::create_dir(folder.path().join("uid-2")).unwrap();
        std::fs::write(folder.path().join("uid-2/state.json"), "{").unwrap();
        assert_eq!(record.files().collect::<Vec<_>>(), ["m", "d", "a"], "nothing that it reads goes");
        assert_eq!(load(folder.path()), vec![record]);
        remove(folder.path(), "uid-1");
        assert_eq!(load(folder.path()), vec![]);
        assert_eq!(load(&folder.path().join("absent")), vec![]);
    }

    #[test]
    fn a_deep_data_directory_still_has_a_socket() {
        use std::os::unix::fs::PermissionsExt as _;
        let deep = tempfile::tempdir().unwrap().path().join("d".repeat(150));
        let (one, other) = (socket(&deep, "uid"), socket(&deep, "uid2"));
        assert!(one.as_os_str().len() <= MAX_SOCKET_PATH_BYTES);
        assert_ne!(one, other);
        assert_eq!(socket(Path::new("/e"), "uid"), Path::new("/e/uid/control.sock"));
        // A directory that others may enter is not used, whichever user created it first.
        let (first, second) = (one.parent().unwrap(), other.parent().unwrap());
        assert_eq!(socket(&deep, "uid"), one, "the same one each time");
        std::fs::set_permissions(first, std::fs::Permissions::from_mode(0o777)).unwrap();
        let next = socket(&deep, "uid");
        assert_ne!(next, one);
        for folder in [first, second, next.parent().unwrap()] {
            std::fs::remove_dir(folder).unwrap();
        }
    }
}
