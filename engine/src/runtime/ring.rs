//! Joining MLX's ring: the addresses of the ranks go into the file that [`environment`] named to MLX
//! before the process began.

use std::path::PathBuf;

use russet_mlx::distributed::Group;

use super::environment;

/// Writes the addresses and joins.
pub(super) fn join(rank: u32, hosts: &[String]) -> Result<Group, String> {
    let hostfile = std::env::var_os(environment::HOSTFILE).map(PathBuf::from).ok_or_else(|| {
        format!("{} is not set; prepare the process with environment::ensure", environment::HOSTFILE)
    })?;
    let told = std::env::var(environment::RANK).ok();
    if told != Some(rank.to_string()) {
        return Err(format!("the environment says {} = {told:?}", environment::RANK));
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
