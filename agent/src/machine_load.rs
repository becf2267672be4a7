//! Load and temperature of this machine, for its metrics: on a Mac from the system through the crate
//! `macmon`, without root; on Linux from `/sys/class/thermal`, and from `nvidia-smi` if present. Unknown
//! values have no series.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::hardware;
use crate::linux::{nvidia, thermal};
use crate::macos;
use crate::metrics::AgentMetrics;

/// Sample interval: two samples per scrape interval of most Prometheus servers.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout of a tool: a driver may hang.
const TOOL_TIMEOUT: Duration = Duration::from_secs(5);

/// Load of a machine, as far as known. Ratios are between 0 and 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MachineLoad {
    /// Utilisation of the GPU.
    pub gpu: Option<f64>,
    /// Watts of the whole machine.
    pub watts: Option<f64>,
    /// Watts of the GPU.
    pub gpu_watts: Option<f64>,
    /// Degrees Celsius, the mean of the processor's sensors.
    pub cpu_celsius: Option<f64>,
    /// Degrees Celsius, the mean of the GPU's sensors.
    pub gpu_celsius: Option<f64>,
    /// Bytes of memory in use.
    pub memory_used: Option<u64>,
    /// Bytes of swap in use.
    pub swap_used: Option<u64>,
}

/// Samples until the agent exits.
pub(crate) async fn run(tools: Option<PathBuf>, metrics: AgentMetrics) {
    #[cfg(target_os = "macos")]
    if tools.is_none() {
        return mac(metrics).await;
    }
    loop {
        metrics.load(&sample(tools.as_deref()).await);
        tokio::time::sleep(SAMPLE_INTERVAL).await;
    }
}

/// The machine's current load, or that of the Mac that the programs in `tools` simulate.
async fn sample(tools: Option<&Path>) -> MachineLoad {
    if let Some(folder) = tools {
        let printed = run_tool(&folder.join("macmon"), &[]).await;
        return printed.and_then(|printed| macos::load::load(&printed).ok()).unwrap_or_default();
    }
    let cpu_celsius = thermal::warmest(Path::new("/sys")).map(|(_, celsius)| celsius);
    let nvidia_smi = Path::new("/usr/bin/nvidia-smi");
    let printed =
        if nvidia_smi.exists() { run_tool(nvidia_smi, &nvidia::QUERY_ARGUMENTS).await } else { None };
    let gpu = printed.and_then(|printed| nvidia::load(&printed)).unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |name| hardware::linux::field(&meminfo, name).ok();
    let swap_used = bytes("SwapTotal").zip(bytes("SwapFree")).map(|(all, free)| all.saturating_sub(free));
    MachineLoad { cpu_celsius, swap_used, ..gpu }
}

async fn run_tool(program: &Path, arguments: &[&str]) -> Option<Vec<u8>> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(TOOL_TIMEOUT, command.output()).await.ok()?.ok()?;
    output.status.success().then_some(output.stdout)
}

/// The sampler is bound to one thread and blocks it while it measures.
#[cfg(target_os = "macos")]
async fn mac(metrics: AgentMetrics) {
    let (sender, mut loads) = tokio::sync::mpsc::channel(1);
    let sampling = tokio::task::spawn_blocking(move || {
        let mut sampler = macmon::Sampler::new().map_err(|error| error.to_string())?;
        loop {
            let sample = sampler.get_metrics(1000).map_err(|error| error.to_string())?;
            let load = MachineLoad {
                gpu: Some(f64::from(sample.gpu_active_ratio)),
                watts: Some(f64::from(sample.sys_power)),
                gpu_watts: Some(f64::from(sample.gpu_power)),
                cpu_celsius: sample.temp.cpu_temp_avg.map(f64::from),
                gpu_celsius: sample.temp.gpu_temp_avg.map(f64::from),
                memory_used: Some(sample.memory.ram_usage),
                swap_used: Some(sample.memory.swap_usage),
            };
            // The agent exits.
            if sender.blocking_send(load).is_err() {
                return Ok::<(), String>(());
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        }
    });
    while let Some(load) = loads.recv().await {
        metrics.load(&load);
    }
    if let Ok(Err(error)) = sampling.await {
        tracing::warn!(error, "this Mac's load and power cannot be measured");
    }
    // The load is no reason to end the agent.
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stub_mac_reports_load_only_with_its_tool() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(sample(Some(folder.path())).await, MachineLoad::default());
        let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/mac_stub/tool");
        std::os::unix::fs::symlink(tool, folder.path().join("macmon")).unwrap();
        let said = r#"{"memory":{"ram_usage":2},"gpu_active_ratio":0.5,"sys_power":31.5,"temp":{"gpu_temp_avg":61}}"#;
        std::fs::write(folder.path().join("macmon.out"), said).unwrap();
        let load = sample(Some(folder.path())).await;
        assert_eq!((load.gpu, load.watts, load.gpu_celsius), (Some(0.5), Some(31.5), Some(61.0)));
    }
}
