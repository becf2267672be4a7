//! Two API servers on one etcd of three members with TLS: `russet up` on the near machine and a second
//! `russet serve`, which starts first and therefore leads.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tokio::process::{Child, Command};

use super::embedded::Embedded;
use crate::etcd::Etcd;
use crate::processes::{kill, processes};

/// The running control plane.
pub struct EtcdControlPlane {
    /// The first server, with its gateway and agent.
    pub(super) up: Option<Embedded>,
    /// The second server.
    second: Child,
    second_dir: PathBuf,
    second_url: String,
    etcd: Etcd,
}

impl EtcdControlPlane {
    /// Starts etcd and the second server with `command`, which is `russet` prepared for the near machine.
    pub fn start(mut command: Command, data_dir: &Path, log: std::fs::File, url: &str) -> Result<Self> {
        let etcd = Etcd::start(3, true).context("cannot start etcd")?;
        let port = url.rsplit(':').next().context("the URL of a server ends in its port")?;
        command
            .args(["serve", "--exit-with-parent", "--api-port", port, "--data-dir"])
            .arg(data_dir)
            .args(flags(&etcd))
            .stdout(log.try_clone()?)
            .stderr(log);
        let second = command.spawn().context("cannot start the second russet serve")?;
        Ok(Self { up: None, second, second_dir: data_dir.to_owned(), second_url: url.to_owned(), etcd })
    }

    /// The etcd flags of both servers.
    pub fn flags(&self) -> Vec<String> {
        flags(&self.etcd)
    }

    /// Sets the first server.
    pub fn set_up(&mut self, up: Embedded) {
        self.up = Some(up);
    }

    /// The first server.
    pub(super) fn up(&self) -> Result<&Embedded> {
        self.up.as_ref().context("russet up was not started")
    }

    /// Returns an error if a server has exited unexpectedly.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.second.try_wait()? {
            bail!("the second russet serve ended ({status})");
        }
        self.up.as_mut().map_or(Ok(()), Embedded::check)
    }

    /// Whether the second server has installed everything and responds.
    pub fn second_is_ready(&self) -> bool {
        self.second_dir.join("kubeconfig").exists()
    }

    /// URL of the second server for other machines.
    pub fn second_url(&self) -> &str {
        &self.second_url
    }

    /// The identities of the first and the second server in leader election.
    pub fn candidates(&self) -> Result<[String; 2]> {
        let read = |data_dir: &Path| {
            let path = data_dir.join("serve/operator/identity");
            std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))
        };
        Ok([read(self.up()?.data_dir())?, read(&self.second_dir)?])
    }

    /// Kill -9 of the second server, permanently.
    pub async fn kill_second(&mut self) -> Result<()> {
        if let Some(pid) = self.second.id() {
            kill(pid as i32);
        }
        self.second.wait().await?;
        Ok(())
    }

    /// Kill -9 of an etcd member, or its restart with its data.
    pub fn member(&mut self, at: usize, runs: bool) -> Result<()> {
        let done = if runs { self.etcd.restart(at) } else { self.etcd.kill(at) };
        done.with_context(|| format!("member {at} of etcd"))
    }

    /// Whether an etcd member reports that it is healthy: it has a leader and takes writes.
    pub async fn is_healthy(&self, at: usize) -> Result<bool> {
        let mut client = reqwest::Client::builder().no_proxy();
        if let Some(tls) = &self.etcd.tls {
            let identity = [std::fs::read(&tls.cert)?, std::fs::read(&tls.key)?].concat();
            client = client
                .tls_certs_only([reqwest::Certificate::from_pem(&std::fs::read(&tls.ca)?)?])
                .identity(reqwest::Identity::from_pem(&identity)?);
        }
        let endpoints = self.etcd.endpoints();
        let url = endpoints.get(at).with_context(|| format!("there is no member {at}"))?;
        match client.build()?.get(format!("{url}/health")).send().await {
            Ok(answer) => Ok(answer.status().is_success()),
            // It does not listen yet.
            Err(_) => Ok(false),
        }
    }

    /// Process ids of the members of etcd.
    pub fn members(&self) -> Vec<i32> {
        let folder = self.etcd.folder().display().to_string();
        let is_member = |arguments: &[String]| {
            // The arguments of a keeper contain the same folder; it is a shell.
            arguments.first().is_some_and(|word| !word.ends_with("sh"))
                && arguments.iter().any(|word| word.starts_with(&folder))
        };
        processes()
            .into_iter()
            .filter(|process| is_member(&process.arguments))
            .map(|process| process.pid)
            .collect()
    }

    pub(super) async fn stop(mut self) -> Result<()> {
        if let Some(up) = self.up.take() {
            up.stop().await?;
        }
        self.kill_second().await
    }
}

fn flags(etcd: &Etcd) -> Vec<String> {
    let mut flags = vec!["--etcd-endpoints".to_owned(), etcd.endpoints().join(",")];
    if let Some(tls) = &etcd.tls {
        for (flag, file) in
            [("--etcd-cafile", &tls.ca), ("--etcd-certfile", &tls.cert), ("--etcd-keyfile", &tls.key)]
        {
            flags.extend([flag.to_owned(), file.display().to_string()]);
        }
    }
    flags
}
