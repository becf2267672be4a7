//! A real Prometheus on loopback, configured as docs/metrics says, except for addresses and shorter
//! intervals.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::chat;
use crate::cluster::repository;
use crate::processes::{oracle, tail};

/// Prometheus and its data; both are removed on drop.
pub struct Prometheus {
    child: Child,
    base: String,
    folder: tempfile::TempDir,
}

/// The rules of the chart.
pub const RULES: &str = "charts/russet/rules/russet.yaml";

impl Prometheus {
    /// Starts it with the targets of `control_plane` and `gateway`, both `host:port`.
    pub fn start(control_plane: &str, gateway: &str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("russet-prometheus-").tempdir()?;
        let mut config = read("docs/metrics/prometheus.yml")?;
        for (documented, actual) in
            [("127.0.0.1:6444", control_plane), ("127.0.0.1:52415", gateway), ("15s", "1s")]
        {
            ensure!(config.contains(documented), "docs/metrics/prometheus.yml does not hold {documented}");
            config = config.replace(documented, actual);
        }
        std::fs::write(folder.path().join("prometheus.yml"), config)?;
        let mut rules = read(RULES)?;
        // The evaluation interval is the configuration's.
        ensure!(!rules.contains("interval:"), "{RULES} sets an interval, which would slow the tests");
        rules.push('\n');
        std::fs::write(folder.path().join("russet.yaml"), rules)?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let log = std::fs::File::create(folder.path().join("prometheus.log"))?;
        let child = Command::new(oracle("RUSSET_PROMETHEUS")?)
            .current_dir(folder.path())
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start Prometheus")?;
        Ok(Self { child, base: format!("http://127.0.0.1:{port}"), folder })
    }

    /// Whether it responds; an error if it has exited.
    pub async fn is_ready(&mut self) -> Result<bool> {
        if let Some(status) = self.child.try_wait()? {
            bail!("Prometheus ended ({status}):\n{}", tail(&self.folder.path().join("prometheus.log"), 30));
        }
        let answer = chat::client()?.get(format!("{}/-/ready", self.base)).send().await;
        Ok(answer.is_ok_and(|answer| answer.status().is_success()))
    }

    /// The `data` of a path of its API.
    pub async fn get(&self, path: &str) -> Result<Value> {
        let text = chat::client()?.get(format!("{}/api/v1/{path}", self.base)).send().await?.text().await?;
        let mut answer: Value = serde_json::from_str(&text).with_context(|| format!("{path}: {text}"))?;
        ensure!(answer["status"] == "success", "{path}: {text}");
        Ok(answer["data"].take())
    }

    /// The current value of an expression: the numbers of its series, without NaN.
    pub async fn query(&self, expression: &str) -> Result<Vec<f64>> {
        let data = self.get(&format!("query?query={}", encoded(expression))).await?;
        let series = data["result"].as_array().context("an answer without series")?;
        let values = series.iter().filter_map(|one| one["value"][1].as_str()?.parse().ok());
        Ok(values.filter(|value: &f64| !value.is_nan()).collect())
    }
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(repository().join(Path::new(path))).with_context(|| path.to_owned())
}

fn encoded(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'_' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(one).collect()
}
