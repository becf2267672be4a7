//! What MLX's ring needs around it: the addresses of the ranks in a file that two environment variables
//! name. MLX reads them when a group is joined, and changing the environment of a process with threads is
//! not sound, so the variables are set before the process begins: by whoever starts it, or by
//! [`ensure_environment`].

use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
};

use russet_mlx::distributed::Group;

/// MLX's name for the rank.
pub const RANK: &str = "MLX_RANK";
/// MLX's name for the file of addresses.
pub const HOSTFILE: &str = "MLX_HOSTFILE";

/// Makes sure that this process has MLX's variables for `rank`, with the file of addresses at
/// `hostfile`; if not, replaces the process by itself with them set (same pid, same arguments). Call it
/// first thing in main. It returns only with the variables in place or with an error.
pub fn ensure_environment(rank: u32, hostfile: &Path) -> io::Result<()> {
    let set = |name| std::env::var_os(name);
    if set(RANK).is_some_and(|value| value == *rank.to_string())
        && set(HOSTFILE).is_some_and(|value| value == hostfile)
    {
        return Ok(());
    }
    use std::os::unix::process::CommandExt;
    Err(Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(RANK, rank.to_string())
        .env(HOSTFILE, hostfile)
        .exec())
}

/// Writes the addresses and joins.
pub(super) fn join(rank: u32, hosts: &[String]) -> Result<Group, String> {
    let hostfile = std::env::var_os(HOSTFILE).map(PathBuf::from).ok_or_else(|| {
        format!("{HOSTFILE} is not set; start the process through ring::ensure_environment")
    })?;
    if std::env::var(RANK).ok() != Some(rank.to_string()) {
        return Err(format!("{RANK} is {:?} in the environment", std::env::var(RANK).ok()));
    }
    std::fs::write(&hostfile, hostfile_text(hosts))
        .map_err(|error| format!("cannot write {}: {error}", hostfile.display()))?;
    let group = Group::join("ring").map_err(|error| error.to_string())?;
    if group.rank() != rank as usize || group.size() != hosts.len() {
        return Err(format!("MLX made it rank {} of {}", group.rank(), group.size()));
    }
    Ok(group)
}

/// One list of addresses per rank; more than one address would mean parallel connections.
fn hostfile_text(hosts: &[String]) -> String {
    let lists: Vec<[&String; 1]> = hosts.iter().map(|host| [host]).collect();
    serde_json::json!(lists).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hostfile_is_a_list_of_lists() {
        let hosts = ["10.0.0.1:4000".to_owned(), "10.0.0.2:4000".to_owned()];
        assert_eq!(hostfile_text(&hosts), r#"[["10.0.0.1:4000"],["10.0.0.2:4000"]]"#);
    }
}
