//! The root helper: the only process of Russet that changes a machine's network and its wired memory limit,
//! and that can always undo both. It applies a closed set of changes within its bounds ([`check`]), records
//! how to undo a change before it applies it ([`journal`]), and executes no caller's commands: it builds its
//! own ([`change`]). It does not choose addresses and does not use the API server: an agent sends requests
//! over a unix socket.
//!
//! ```text
//! agent ─ a line of JSON ─▶ serve ─▶ check ─▶ decide ─▶ journal ─▶ machine (ifconfig, networksetup, sysctl | ip)
//! ```

mod change;
mod check;
mod current_state;
mod decide;
mod journal;
mod machine;
mod protocol;
pub(crate) mod reconcile;
mod serve;

use std::io;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

pub use self::check::{HelperPolicy, HelperRefusal};
pub use self::machine::HostController;
pub use self::protocol::{
    HelperReply, HelperRequest, MachineRequest, Network, Port, RestartPolicy, UnchangedParts,
};
pub use self::serve::{Helper, HelperError, HelperSocket};

/// Default path of its socket.
pub const SOCKET: &str = "/var/run/russet/helper.sock";
/// Default directory of its journal: not below an agent's directory, which is not root's.
pub const STATE: &str =
    if cfg!(target_os = "macos") { "/var/db/russet-helper" } else { "/var/lib/russet-helper" };
/// The command that installs it for this user's agent. The helper accepts the user of Russet's services
/// without `--user`.
fn install_command(user: Option<&str>) -> String {
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    match user.filter(|user| !matches!(*user, "" | "russet" | "_russet") && user.chars().all(letters)) {
        Some(user) => format!("sudo russet service install --user {user} helper"),
        None => "sudo russet service install helper".to_owned(),
    }
}

/// The user of this process, according to its environment.
fn own_user() -> Option<String> {
    ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok())
}

/// Maximum bytes of a request or a reply.
const MAX_MESSAGE_BYTES: u64 = 64 << 10;
/// Reply timeout: a request with many ports runs several tools, each of which may be slow after sleep.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Why there is no reply from the helper.
#[derive(Debug, Error)]
pub enum HelperClientError {
    /// No process listens on the socket.
    #[error("no helper answers at {0}: {1}; install it there: {install}", install = install_command(own_user().as_deref()))]
    Absent(String, #[source] io::Error),
    /// The helper closed the connection.
    #[error(
        "the helper at {0} ended the connection: {1}; it takes requests of root and of the user after its --user alone"
    )]
    Closed(String, String),
    /// The helper has not replied in time.
    #[error("the helper at {0} did not answer within {seconds} s; it may still be at work", seconds = REPLY_TIMEOUT.as_secs())]
    Timeout(String),
}

/// Sends a request to the helper at `socket`.
pub async fn send_request(socket: &Path, request: &HelperRequest) -> Result<HelperReply, HelperClientError> {
    let at = socket.display().to_string();
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => HelperClientError::Closed(at.clone(), error.to_string()),
        _ => HelperClientError::Absent(at.clone(), error),
    })?;
    let speak = async {
        let (read, mut write) = stream.into_split();
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        write.write_all(&line).await?;
        let mut answer = Vec::new();
        BufReader::new(read.take(MAX_MESSAGE_BYTES)).read_until(b'\n', &mut answer).await?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    };
    match tokio::time::timeout(REPLY_TIMEOUT, speak).await {
        Ok(answer) => answer.map_err(|error| HelperClientError::Closed(at, error.to_string())),
        Err(_) => Err(HelperClientError::Timeout(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn install_command_names_the_agent_user_safely() {
        for (user, words) in [
            (None, "install helper"),
            (Some("russet"), "install helper"),
            (Some("_russet"), "install helper"),
            (Some("$(reboot)"), "install helper"),
            (Some("ana-maria"), "install --user ana-maria helper"),
        ] {
            assert!(install_command(user).ends_with(words), "{user:?}: {}", install_command(user));
        }
    }
}
