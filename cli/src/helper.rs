//! `russet helper`: the root helper of this machine as a process. It alone changes the machine's network, for
//! agents that ask over a unix socket, and within the bounds set by its flags.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use russet_agent::hardware;
use russet_agent::helper::{
    Helper, HelperPolicy, HelperReply, HelperRequest, HelperSocket, HostController, SOCKET, STATE,
    send_request,
};

use crate::service;
use crate::signals;
use crate::stdout::outln;

/// Arguments of `russet helper`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Socket on which agents send their requests.
    #[arg(long, default_value = SOCKET)]
    socket: PathBuf,
    /// Folder of the journal, which records how to revert every change.
    #[arg(long, default_value = STATE)]
    state: PathBuf,
    /// The user whose agent may send requests, by name or number, beside root.
    #[arg(long, default_value = service::USER)]
    user: String,
    /// Allow the wired memory limit to be set, up to this percentage of the machine's memory; without it, no
    /// request may set it.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=95))]
    allow_wired_limit: Option<u8>,
    /// Revert all changes, print them, and exit.
    #[arg(long)]
    revert: bool,
    /// Treat interfaces with this name prefix as Thunderbolt, on a machine that only simulates it.
    #[arg(long, hide = true)]
    interface_prefix: Option<String>,
    /// Folder of programs to run instead of macOS's own; lets a machine simulate a Mac.
    #[arg(long, hide = true)]
    tools: Option<PathBuf>,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// Exit when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    let is_root = rustix::process::getuid().is_root();
    ensure!(
        is_root || arguments.tools.is_some(),
        "only root may change a machine's network: sudo russet helper"
    );
    if is_root && arguments.tools.is_none() {
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        service::trusted_path::check(&program)?;
    }
    if arguments.revert
        && let Ok(answer) = send_request(&arguments.socket, &HelperRequest::Revert {}).await
    {
        return print_reverted(answer);
    }
    russet_telemetry::logs::init("helper", arguments.json_logs);
    let machine = hardware::Hardware::measure().context("this machine's hardware cannot be read")?;
    let policy = HelperPolicy { wired_percent: arguments.allow_wired_limit, memory: machine.memory };
    let plays = HostController::new(arguments.tools, arguments.interface_prefix);
    let mut helper = Helper::open(plays, policy, &arguments.state, &machine.boot_id)?;
    helper.resume_after_boot().await?;
    if arguments.revert {
        return print_reverted(helper.revert().await);
    }
    let user = user_id(&arguments.user)?;
    let socket = HelperSocket::bind(&arguments.socket, user)?;
    tracing::info!(socket = %arguments.socket.display(), user = arguments.user, "the root helper answers");
    let with_parent = arguments.exit_with_parent;
    helper
        .serve(socket, async {
            signals::stop_signal(with_parent).await;
        })
        .await;
    Ok(())
}

fn print_reverted(answer: HelperReply) -> Result<()> {
    match answer {
        HelperReply::Done { changed, .. } if changed.is_empty() => outln!("there was nothing to revert")?,
        HelperReply::Done { changed, .. } => outln!("{}", changed.join("\n"))?,
        HelperReply::Refused { why } | HelperReply::Failed { why } => {
            bail!("not everything could be reverted: {why}")
        }
    }
    Ok(())
}

/// The numeric id of a user.
fn user_id(user: &str) -> Result<u32> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    ensure!(!user.starts_with('-') && user.chars().all(letters), "--user {user:?} is not the name of a user");
    // Users of directory services are in no file.
    let output = Command::new("/usr/bin/id").args(["-u", user]).env_clear().output();
    let output = output.context("/usr/bin/id could not be run; give --user a number")?;
    let printed = String::from_utf8_lossy(&output.stdout);
    printed.trim().parse().with_context(|| {
        format!("there is no user {user} here; make it, or name the one that runs the agent with --user")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_names_or_numbers() {
        assert_eq!((user_id("4321").unwrap(), user_id("root").unwrap()), (4321, 0));
        for (user, words) in [
            ("-u", "not the name of a user"),
            ("a b", "not the name of a user"),
            ("nobody-of-russet", "there is no user"),
        ] {
            let error = user_id(user).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
