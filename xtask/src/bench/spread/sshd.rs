//! A separate sshd for the bench, for rsync over ssh.

use std::path::Path;

use anyhow::{Result, ensure};

/// By its absolute path, as sshd requires.
pub const PROGRAM: &str = "/usr/sbin/sshd";

/// Keys and settings of an sshd that only this bench's client can use.
pub struct Sshd {
    /// Its file of settings.
    pub config: String,
    /// Options of the client.
    pub client: String,
}

impl Sshd {
    /// Whether sshd is installed. It is not installed automatically, because its package starts a server on
    /// every address of the machine.
    pub fn is_here() -> Result<()> {
        ensure!(
            Path::new(PROGRAM).exists(),
            "rsync over ssh needs {PROGRAM}: sudo apt-get install openssh-server, whose own server you can end again with sudo systemctl disable --now ssh"
        );
        Ok(())
    }

    /// Creates both keys.
    pub fn new(folder: &Path) -> Result<Self> {
        // Folder for its privilege separation.
        std::fs::create_dir_all("/run/sshd")?;
        let folder = folder.join("ssh");
        std::fs::create_dir_all(&folder)?;
        let at = |name: &str| folder.join(name).display().to_string();
        for name in ["host", "own"] {
            let mut make = std::process::Command::new("ssh-keygen");
            let output = make.args(["-q", "-t", "ed25519", "-N", "", "-f", &at(name)]).output()?;
            ensure!(output.status.success(), "ssh-keygen: {}", String::from_utf8_lossy(&output.stderr));
        }
        let text = format!(
            "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM yes\nPidFile none\n",
            at("host"),
            at("own.pub")
        );
        std::fs::write(folder.join("config"), text)?;
        // Both keys are new.
        let trust = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR";
        Ok(Self {
            config: at("config"),
            client: format!("-F none -i {} -o IdentitiesOnly=yes {trust}", at("own")),
        })
    }
}
