//! Server of the helper: handles requests one after another, so that the order of changes equals the order of
//! the journal. The kernel identifies the peer of the socket.
//!
//! ```text
//! request ─▶ refused, and nothing was changed
//!         └▶ undo changes it does not contain ─▶ each new change: journal ─▶ machine ─▶ done
//! another boot ─▶ Drop: forgotten    Keep: applied again
//! ```

use std::fs::Permissions;
use std::future::Future;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::MAX_MESSAGE_BYTES;
use super::change::MachineChange;
use super::check::{HelperPolicy, HelperRefusal, check};
use super::current_state::CurrentState;
use super::decide::{is_applied, is_desired, pending_changes, undo_change};
use super::journal::{Journal, JournalError};
use super::machine::{HostController, ToolError};
use super::protocol::{HelperReply, HelperRequest, MachineRequest, RestartPolicy, UnchangedParts};

/// A client must send its request within this time, because others wait for it.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the helper cannot run.
#[derive(Debug, Error)]
pub enum HelperError {
    /// Without a journal nothing is changed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The socket cannot be used.
    #[error("{path} cannot be listened at: {source}; run the helper as root, or choose another --socket")]
    Socket {
        /// Path.
        path: PathBuf,
        /// System error.
        source: io::Error,
    },
    /// A tool failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
}

/// Why a change failed.
#[derive(Debug, Error)]
enum ChangeError {
    #[error(transparent)]
    Refused(#[from] HelperRefusal),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Tool(#[from] ToolError),
}

/// Handles requests, within its bounds.
#[derive(Debug)]
pub struct Helper {
    machine: HostController,
    policy: HelperPolicy,
    journal: Journal,
    boot: String,
}

impl Helper {
    /// A helper with its journal in `state`, during this boot.
    pub fn open(
        machine: HostController,
        policy: HelperPolicy,
        state: &Path,
        boot: &str,
    ) -> Result<Self, HelperError> {
        let journal = Journal::open(state)?;
        Ok(Self { machine, policy, journal, boot: boot.to_owned() })
    }

    /// Work after a restart of the machine: dropped changes are forgotten, kept ones applied again. Does
    /// nothing during the same boot.
    pub async fn resume_after_boot(&mut self) -> Result<(), HelperError> {
        let record = self.journal.record();
        if record.is_empty() || record.boot == self.boot {
            return Ok(());
        }
        let boot = self.boot.clone();
        self.journal.write(|record| {
            // The restart has undone these.
            record.changes.retain(|change| !change.is_volatile());
            record.boot = boot;
            record.reverted = None;
        })?;
        let keeps = |request: &MachineRequest| {
            request.network.as_ref().is_some_and(|network| network.after_restart == RestartPolicy::Keep)
        };
        match self.journal.record().request.clone().filter(keeps) {
            Some(request) => {
                let answer = self.handle(HelperRequest::Apply(request)).await;
                // Cables may appear later than this process; the agent asks again.
                tracing::info!(?answer, "changes that last over restarts were made again");
            }
            None => {
                let answer = self.undo_changes(|_| true).await;
                tracing::info!(?answer, "changes that lasted until the restart are removed from the journal");
            }
        }
        Ok(())
    }

    /// Handles a request.
    pub async fn handle(&mut self, request: HelperRequest) -> HelperReply {
        let done = match request {
            HelperRequest::Apply(request) => self.apply(&request).await,
            HelperRequest::Read {} => Ok(Vec::new()),
            HelperRequest::Revert {} => self.revert_all().await,
        };
        let held = self.journal.record().changes.iter().map(MachineChange::to_string).collect();
        match done {
            Ok(changed) => HelperReply::Done { changed, held },
            Err(ChangeError::Refused(refused)) => HelperReply::Refused { why: refused.to_string() },
            Err(fault) => HelperReply::Failed { why: fault.to_string() },
        }
    }

    async fn apply(&mut self, request: &MachineRequest) -> Result<Vec<String>, ChangeError> {
        let record = self.journal.record();
        if record.boot == self.boot
            && record.reverted.as_ref().is_some_and(|reverted| repeats_reverted(request, reverted))
        {
            return Err(HelperRefusal::Reverted.into());
        }
        // A different request clears the reverted mark.
        self.journal.write(|record| record.reverted = None)?;
        let record = self.journal.record();
        let before = record.request.clone().unwrap_or_default();
        let UnchangedParts { network, wired_limit } = request.leave;
        let merged = MachineRequest {
            node: request.node.clone(),
            network: if network { before.network } else { request.network.clone() },
            wired_limit_mebibytes: if wired_limit {
                before.wired_limit_mebibytes
            } else {
                request.wired_limit_mebibytes
            },
            leave: UnchangedParts::default(),
        };
        let nothing = merged.network.is_none() && merged.wired_limit_mebibytes.is_none();
        // An empty request of a node without changes must not undo another node's.
        if nothing && record.holder() != Some(request.node.as_str()) {
            return Ok(Vec::new());
        }
        let present = self.machine.current_state().await?;
        let desired =
            check(request, &without_applied(present, &record.changes), &self.policy, record.holder())?;
        let stays = |change: &MachineChange| if change.is_network() { network } else { wired_limit };
        let mut changed = self.undo_changes(|change| !stays(change) && !is_desired(change, &desired)).await?;
        let pending = pending_changes(&self.machine.current_state().await?, &desired);
        let boot = self.boot.clone();
        self.journal.write(|record| {
            record.boot = boot;
            record.request = (!nothing).then_some(merged);
        })?;
        for change in pending {
            // A change that another program has undone since is applied again, and undone once.
            self.journal.write(|record| {
                if !record.changes.contains(&change) {
                    record.changes.push(change.clone());
                }
            })?;
            fail::fail_point!("helper-journalled");
            self.machine.apply(&change).await?;
            fail::fail_point!("helper-made");
            changed.push(change.to_string());
        }
        Ok(changed)
    }

    /// Undoes everything for the user at the machine. An agent's repeated request does not apply it again.
    async fn revert_all(&mut self) -> Result<Vec<String>, ChangeError> {
        let boot = self.boot.clone();
        self.journal.write(|record| {
            if record.request.is_some() {
                record.boot = boot;
                record.reverted.clone_from(&record.request);
            }
        })?;
        self.undo_changes(|_| true).await
    }

    /// Undoes changes, the last one first; returns those undone. A failed one does not block the others.
    async fn undo_changes(
        &mut self,
        which: impl Fn(&MachineChange) -> bool,
    ) -> Result<Vec<String>, ChangeError> {
        let (mut changed, mut failed) = (Vec::new(), None);
        let all: Vec<MachineChange> =
            self.journal.record().changes.iter().rev().filter(|change| which(change)).cloned().collect();
        for change in all {
            let present = self.machine.current_state().await?;
            if is_applied(&change, &present) {
                if let Err(trouble) = self.machine.undo(&undo_change(&change, &present)).await {
                    tracing::warn!(%change, %trouble, "it stays until it can be reverted");
                    failed.get_or_insert(trouble);
                    continue;
                }
                fail::fail_point!("helper-undone");
                changed.push(format!("reverted: {change}"));
            }
            self.journal.write(|record| record.changes.retain(|other| *other != change))?;
            fail::fail_point!("helper-forgotten");
        }
        if self.journal.record().changes.is_empty() {
            self.journal.write(|record| record.request = None)?;
        }
        failed.map_or(Ok(changed), |trouble| Err(trouble.into()))
    }

    /// Undoes everything, without a socket.
    pub async fn revert(&mut self) -> HelperReply {
        self.handle(HelperRequest::Revert {}).await
    }

    /// Serves the socket until `shutdown` completes.
    pub async fn serve(mut self, socket: HelperSocket, shutdown: impl Future<Output = ()>) {
        tokio::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                accepted = socket.listener.accept() => accepted,
                () = &mut shutdown => return,
            };
            match accepted {
                // A shutdown waits for a change in progress.
                Ok((stream, _)) => match self.serve_client(stream, &socket).await {
                    Ok(()) => {}
                    Err(error) => tracing::warn!(%error, "a client was not answered"),
                },
                Err(error) => {
                    tracing::error!(%error, "the socket accepts no connection");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    async fn serve_client(&mut self, stream: UnixStream, socket: &HelperSocket) -> io::Result<()> {
        let uid = stream.peer_cred()?.uid();
        if uid != 0 && uid != socket.user {
            return Err(io::Error::other(format!("user {uid} sent it, and only user {} may", socket.user)));
        }
        let (read, mut write) = stream.into_split();
        let mut line = Vec::new();
        let mut read = BufReader::new(read.take(MAX_MESSAGE_BYTES));
        tokio::time::timeout(CLIENT_TIMEOUT, read.read_until(b'\n', &mut line)).await??;
        let answer = match parse(&line) {
            Ok(request) => self.handle(request).await,
            Err(refused) => HelperReply::Refused { why: refused.to_string() },
        };
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        tokio::time::timeout(CLIENT_TIMEOUT, write.write_all(&line)).await?
    }
}

/// Whether a part of a request is the one that was reverted.
fn repeats_reverted(request: &MachineRequest, reverted: &MachineRequest) -> bool {
    let network = request.network.is_some() && request.network == reverted.network;
    let wired = request.wired_limit_mebibytes;
    network || (wired.is_some() && wired == reverted.wired_limit_mebibytes)
}

/// Parses a request from a line that must be complete.
fn parse(line: &[u8]) -> Result<HelperRequest, HelperRefusal> {
    let line = line.strip_suffix(b"\n").ok_or_else(|| {
        HelperRefusal::Unknown(format!(
            "the line or the connection ended before a whole request of at most {MAX_MESSAGE_BYTES} bytes"
        ))
    })?;
    serde_json::from_slice(line).map_err(|error| HelperRefusal::Unknown(error.to_string()))
}

/// The machine without the addresses that the helper added: they cause no conflict.
fn without_applied(mut present: CurrentState, changes: &[MachineChange]) -> CurrentState {
    for change in changes {
        if let MachineChange::Give { interface, address } = change {
            let own = present.interfaces.iter_mut().filter(|one| one.name == *interface);
            own.for_each(|one| one.addresses.retain(|own| own.config.ip != *address));
        }
    }
    present
}

/// Socket of the helper, and the user it accepts.
#[derive(Debug)]
pub struct HelperSocket {
    listener: UnixListener,
    path: PathBuf,
    user: u32,
}

impl Drop for HelperSocket {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).ok();
    }
}

impl HelperSocket {
    /// Listens at `path` for the user with this id, and for root.
    pub fn bind(path: &Path, user: u32) -> Result<Self, HelperError> {
        let listen = || {
            if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
                std::fs::create_dir_all(folder)?;
                std::fs::set_permissions(folder, Permissions::from_mode(0o755))?;
            }
            // The journal's lock proves that no other helper runs, so an existing socket is stale.
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(path)?;
            std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
            if rustix::process::getuid().as_raw() != user {
                std::os::unix::fs::chown(path, Some(user), None)?;
            }
            Ok(listener)
        };
        let listener = listen().map_err(|source| HelperError::Socket { path: path.to_owned(), source })?;
        Ok(Self { listener, path: path.to_owned(), user })
    }
}
