//! The root helper: the one process of Russet that changes a machine's network and its limit of wired memory, and that
//! can always take both back. It does what is in a closed set and within its bounds ([`check`]), writes down how to
//! undo a change before it makes it ([`journal`]), and takes no command from anybody: it builds its own ([`deed`]).
//! Which addresses there should be is not its business, nor is any API server: an agent asks over a unix socket.
//!
//! ```text
//! agent ─ a line of JSON ─▶ serve ─▶ check ─▶ decide ─▶ journal ─▶ machine (ifconfig, networksetup, sysctl | ip)
//! ```

mod check;
pub(crate) mod reconcile;
mod decide;
mod change;
mod journal;
mod machine;
mod current_state;
mod protocol;
mod serve;

use std::io;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

pub use self::check::{HelperPolicy, HelperRefusal};
pub use self::machine::HostController;
pub use self::protocol::{HelperReply, UnchangedParts, Network, Port, HelperRequest, RestartPolicy, MachineRequest};
pub use self::serve::{Helper, HelperError, HelperSocket};

/// Where it listens unless somebody says otherwise.
pub const SOCKET: &str = "/var/run/russet/helper.sock";
/// Where its journal lies unless somebody says otherwise: not below an agent's folder, which is not root's.
pub const STATE: &str =
    if cfg!(target_os = "macos") { "/var/db/russet-helper" } else { "/var/lib/russet-helper" };
/// What makes it run for the agent of this user on a machine that has none. The user of Russet's services it hears
/// without being told.
fn install_command(user: Option<&str>) -> String {
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    match user.filter(|user| !matches!(*user, "" | "russet" | "_russet") && user.chars().all(letters)) {
        Some(user) => format!("sudo russet service install --user {user} helper"),
        None => "sudo russet service install helper".to_owned(),
    }
}

/// The user this runs as, as far as its environment says.
fn own_user() -> Option<String> {
    ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok())
}

/// Bytes of a request or an answer.
const MAX_MESSAGE_BYTES: u64 = 64 << 10;
/// A wish of many ports takes some tools, each of which may be slow after sleep.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Why the helper did not answer.
#[derive(Debug, Error)]
pub enum HelperClientError {
    /// Nobody listens there.
    #[error("no helper answers at {0}: {1}; install it there: {install}", install = install_command(own_user().as_deref()))]
    Absent(String, #[source] io::Error),
    /// It does not speak to us.
    #[error(
        "the helper at {0} ended the connection: {1}; it takes requests of root and of the user after its --user alone"
    )]
    Closed(String, String),
    /// It has not said yet what became of it.
    #[error("the helper at {0} did not answer within {seconds} s; it may still be at work", seconds = REPLY_TIMEOUT.as_secs())]
    Timeout(String),
}

/// Asks the helper at `socket`.
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
