//! A pod without a kubelet: the first container of a Deployment that a chart installed, read back from the
//! API server and run as a process. It gets what the kubelet would provide: the token of its ServiceAccount
//! at the path of in-cluster clients, the API server's address in its environment, and its volumes. The
//! network is the near machine's, and the image is the folder of built programs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::process::Command;

/// Path at which in-cluster clients look for their identity.
const IDENTITY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Gives the process its own `/var` with links to the folders of its volumes: `LINK FOLDER …` up to `--`,
/// then the command.
const ENTER: &str = r#"set -e
mount -t tmpfs -o mode=755 tmpfs /var
while [ "$1" != -- ]; do mkdir -p "$(dirname "$1")"; ln -s "$2" "$1"; shift 2; done
shift
exec "$@""#;

/// One pod of a Deployment.
#[derive(Clone)]
pub struct Pod {
    /// Folder of its volumes; `identity` is that of the ServiceAccount.
    folder: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    /// Path in the pod and the folder that is linked there.
    links: Vec<(String, PathBuf)>,
}

impl Pod {
    /// The pod of a Deployment as the server has it. `server` is the API server's host and port.
    pub fn new(deployment: &Value, name: &str, folder: &Path, server: (&str, u16)) -> Result<Self> {
        let spec = &deployment["spec"]["template"]["spec"];
        let container = &spec["containers"][0];
        let words = |value: &Value| -> Vec<String> {
            value.as_array().into_iter().flatten().filter_map(|word| word.as_str()).map(Into::into).collect()
        };
        let mut arguments = words(&container["command"]);
        anyhow::ensure!(!arguments.is_empty(), "the Deployment of {name} names no command");
        arguments.extend(words(&container["args"]));
        let mut environment = vec![
            ("KUBERNETES_SERVICE_HOST".to_owned(), server.0.to_owned()),
            ("KUBERNETES_SERVICE_PORT".to_owned(), server.1.to_string()),
        ];
        for variable in container["env"].as_array().into_iter().flatten() {
            let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some("metadata.name") => name,
                Some(other) => anyhow::bail!("this kubelet does not know the field {other}"),
                None => variable["value"].as_str().unwrap_or_default(),
            };
            let key = variable["name"].as_str().context("a variable without a name")?;
            environment.push((key.to_owned(), value.to_owned()));
        }
        let mut links = vec![(IDENTITY.to_owned(), folder.join("identity"))];
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let (volume, path) = (mount["name"].as_str(), mount["mountPath"].as_str());
            let (volume, path) =
                (volume.context("a mount without a name")?, path.context("a mount without a path")?);
            links.push((path.to_owned(), folder.join("volumes").join(volume)));
        }
        for (_, target) in &links {
            std::fs::create_dir_all(target)?;
        }
        Ok(Self { folder: folder.to_owned(), arguments, environment, links })
    }

    /// Writes the ServiceAccount's token, as the kubelet does repeatedly.
    pub fn identify(&self, token: &str, ca: &str) -> Result<()> {
        let folder = self.folder.join("identity");
        for (name, text) in [("ca.crt", ca), ("namespace", "russet-system"), ("token", token)] {
            std::fs::write(folder.join(name), text)?;
        }
        Ok(())
    }

    /// The process; `programs` is the folder with `russet`.
    pub fn command(&self, programs: &Path) -> Command {
        // The process ends with this one, however this one ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount"]);
        if !rustix::process::geteuid().is_root() {
            command.arg("--map-root-user");
        }
        command.args(["sh", "-c", ENTER, "pod"]);
        for (path, folder) in &self.links {
            command.arg(path).arg(folder);
        }
        command.arg("--").args(&self.arguments);
        command.env_clear().envs(self.environment.iter().cloned());
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", programs.display()));
        command
    }
}
