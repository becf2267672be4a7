//! The root helper: the one process of Russet that changes a machine's network and its limit of wired memory, and that
//! can always take both back. It does what is in a closed set and within its bounds ([`check`]), writes down how to
//! undo a change before it makes it ([`journal`]), and takes no command from anybody: it builds its own ([`deed`]).
//! Which addresses there should be is not its business, nor is any API server: an agent asks over a unix socket.
//!
//! ```text
//! agent ─ a line of JSON ─▶ serve ─▶ check ─▶ decide ─▶ journal ─▶ machine (ifconfig, networksetup, sysctl | ip)
//! ```

mod check;
pub(crate) mod client;
mod decide;
mod deed;
mod journal;
mod machine;
mod present;
mod protocol;
mod serve;

use std::io;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

pub use self::check::{Policy, Refused};
pub use self::machine::Machine;
pub use self::protocol::{Answer, Left, Network, Port, Request, Restart, Wanted};
pub use self::serve::{Helper, HelperError, Socket};

/// Where it listens unless somebody says otherwise.
pub const SOCKET: &str = "/var/run/russet/helper.sock";
/// Where its journal lies unless somebody says otherwise: not below an agent's folder, which is not root's.
pub const STATE: &str =
    if cfg!(target_os = "macos") { "/var/db/russet-helper" } else { "/var/lib/russet-helper" };
/// What makes it run for the agent of this user on a machine that has none. The user of Russet's services it hears
/// without being told.
fn install(user: Option<&str>) -> String {
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
const LONGEST: u64 = 64 << 10;
/// A wish of many ports takes some tools, each of which may be slow after sleep.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why the helper did not answer.
#[derive(Debug, Error)]
pub enum Silent {
    /// Nobody listens there.
    #[error("no helper answers at {0}: {1}; install it there: {install}", install = install(own_user().as_deref()))]
    Absent(String, #[source] io::Error),
    /// It does not speak to us.
    #[error(
        "the helper at {0} ended the connection: {1}; it takes requests of root and of the user after its --user alone"
    )]
    Closed(String, String),
    /// It has not said yet what became of it.
    #[error("the helper at {0} did not answer within {seconds} s; it may still be at work", seconds = PATIENCE.as_secs())]
    Slow(String),
}

/// Asks the helper at `socket`.
pub async fn ask(socket: &Path, request: &Request) -> Result<Answer, Silent> {
    let at = socket.display().to_string();
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Silent::Closed(at.clone(), error.to_string()),
        _ => Silent::Absent(at.clone(), error),
    })?;
    let speak = async {
        let (read, mut write) = stream.into_split();
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        write.write_all(&line).await?;
        let mut answer = Vec::new();
        BufReader::new(read.take(LONGEST)).read_until(b'\n', &mut answer).await?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    };
    match tokio::time::timeout(PATIENCE, speak).await {
        Ok(answer) => answer.map_err(|error| Silent::Closed(at, error.to_string())),
        Err(_) => Err(Silent::Slow(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_names_whoever_runs_the_agent_and_nothing_that_a_shell_would_run() {
        for (user, words) in [
            (None, "install helper"),
            (Some("russet"), "install helper"),
            (Some("_russet"), "install helper"),
            (Some("$(reboot)"), "install helper"),
            (Some("ana-maria"), "install --user ana-maria helper"),
        ] {
            assert!(install(user).ends_with(words), "{user:?}: {}", install(user));
        }
    }
}
