//! Load, power and temperature of this machine, for its metrics: on a Mac from the system through the crate
//! `macmon`, without root; on Linux from `/sys/class/thermal`, and from `nvidia-smi` if present. Unknown
//! values have no series. Not here: averages of its power (`machine_power`).

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use russet_crds::MeasuredPower;
use tokio::process::Command;
use tokio::sync::watch;

use crate::engine_activity::{EngineActivity, SampleWindow, SampleWindows, SampledWork};
use crate::hardware;
use crate::linux::{nvidia, thermal};
use crate::machine_power::{JouleIntegral, PowerAverages};
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

/// A sample, and what engines did since the one before it.
struct LoadSample {
    load: MachineLoad,
    window: SampleWindow,
}

/// Takes samples: for metrics, and for the power that the node reports.
pub(crate) struct LoadObserver {
    metrics: AgentMetrics,
    activity: EngineActivity,
    averages: PowerAverages,
    machine_joules: JouleIntegral,
    gpu_joules: JouleIntegral,
    reports: watch::Sender<Option<MeasuredPower>>,
}

impl LoadObserver {
    /// Goes on from the power that was reported before.
    pub fn new(
        metrics: AgentMetrics,
        activity: EngineActivity,
        reported: Option<MeasuredPower>,
        reports: watch::Sender<Option<MeasuredPower>>,
    ) -> Self {
        let averages = PowerAverages::restored(reported, Instant::now());
        let (machine_joules, gpu_joules) = Default::default();
        Self { metrics, activity, averages, machine_joules, gpu_joules, reports }
    }

    fn observe(&mut self, sample: LoadSample, now: Instant) {
        let LoadSample { load, window } = sample;
        self.metrics.load(&load);
        self.metrics.energy("machine", self.machine_joules.add(load.watts, now));
        self.metrics.energy("gpu", self.gpu_joules.add(load.gpu_watts, now));
        if let Some(watts) = load.watts {
            self.averages.add(watts, SampledWork::of(window, load.gpu), now);
        }
        self.report(now);
    }

    /// Reports what is news, also that nothing is known any more.
    fn report(&mut self, now: Instant) {
        if self.averages.has_news(now) {
            self.reports.send_replace(self.averages.reported());
        }
    }
}

/// Samples until the agent exits.
pub(crate) async fn run(tools: Option<PathBuf>, mut observer: LoadObserver) {
    #[cfg(target_os = "macos")]
    if tools.is_none() {
        return mac(observer).await;
    }
    let mut windows = SampleWindows::new(Instant::now(), observer.activity.totals());
    loop {
        let load = sample(tools.as_deref()).await;
        let now = Instant::now();
        let window = windows.next(now, observer.activity.totals());
        observer.observe(LoadSample { load, window }, now);
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

/// The sampler is bound to one thread and blocks it while it measures. It waits until a second has passed since its last
/// sample: after a pause it answers at once, with what it averaged over the pause.
#[cfg(target_os = "macos")]
async fn mac(mut observer: LoadObserver) {
    let (sender, mut samples) = tokio::sync::mpsc::channel(1);
    let activity = observer.activity.clone();
    let sampling = tokio::task::spawn_blocking(move || {
        let mut sampler = macmon::Sampler::new().map_err(|error| error.to_string())?;
        let mut windows = SampleWindows::new(Instant::now(), activity.totals());
        loop {
            let sample = sampler.get_metrics(1000).map_err(|error| error.to_string())?;
            let window = windows.next(Instant::now(), activity.totals());
            let load = MachineLoad {
                gpu: Some(f64::from(sample.gpu_active_ratio)),
                watts: macos::load::machine_watts(sample.sys_power.into(), Some(sample.all_power.into())),
                gpu_watts: Some(f64::from(sample.gpu_power)),
                cpu_celsius: sample.temp.cpu_temp_avg.map(f64::from),
                gpu_celsius: sample.temp.gpu_temp_avg.map(f64::from),
                memory_used: Some(sample.memory.ram_usage),
                swap_used: Some(sample.memory.swap_usage),
            };
            // The agent exits.
            if sender.blocking_send(LoadSample { load, window }).is_err() {
                return Ok::<(), String>(());
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        }
    });
    loop {
        match tokio::time::timeout(SAMPLE_INTERVAL * 2, samples.recv()).await {
            Ok(Some(sample)) => observer.observe(sample, Instant::now()),
            Ok(None) => break,
            // The sampler hangs: what was measured gets old.
            Err(_) => observer.report(Instant::now()),
        }
    }
    if let Ok(Err(error)) = sampling.await {
        tracing::warn!(error, "this Mac's load and power cannot be measured");
    }
    observer.metrics.load(&MachineLoad::default());
    // The load is no reason to end the agent.
    loop {
        tokio::time::sleep(SAMPLE_INTERVAL).await;
        observer.report(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use russet_rpc::cache_status::CacheStatus;
    use russet_rpc::engine as pb;

    use super::*;
    use crate::engine_activity::HeartbeatReader;
    use crate::machine_power::{MAX_SAMPLE_AGE, MIN_REPORT_INTERVAL};

    #[test]
    fn a_machine_that_computes_reports_what_it_draws_then() {
        let (registry, metrics) = AgentMetrics::new(&CacheStatus::default());
        let (reports, reported) = watch::channel(None);
        let (activity, start) = (EngineActivity::default(), Instant::now());
        let mut observer = LoadObserver::new(metrics, activity.clone(), None, reports);
        let at = |milliseconds: u64| start + Duration::from_millis(milliseconds);
        let mut windows = SampleWindows::new(start, activity.totals());
        let mut reader = HeartbeatReader::default();
        // A minute of waiting at 10 W, one of batches at 90 W, and a sample of both.
        let seconds = |number: u64| 10 * number;
        for number in 1..=13 {
            let (watts, first_busy) = match number {
                1..=6 => (10.0, None),
                7..=12 => (90.0, Some(0)),
                _ => (50.0, Some(20)),
            };
            for beat in 0..40 {
                let milliseconds = 1000 * seconds(number - 1) + 250 * (beat + 1);
                let is_busy = first_busy.is_some_and(|first| first <= beat);
                let state = pb::EngineState {
                    phase: pb::Phase::Serving as i32,
                    batch_estimate_seconds: if is_busy { 0.05 } else { 0.0 },
                    heartbeat_milliseconds: 250,
                    ..pb::EngineState::default()
                };
                reader.read(&state, at(milliseconds), &activity);
            }
            let now = at(1000 * seconds(number));
            let load = MachineLoad { watts: Some(watts), gpu_watts: Some(2.0), ..MachineLoad::default() };
            observer.observe(LoadSample { load, window: windows.next(now, activity.totals()) }, now);
            let expected = match number {
                1..=5 => None,
                // What is computed is reported later: a status is no telemetry.
                _ => Some(MeasuredPower { idle_watts: Some(10), busy_watts: None }),
            };
            assert_eq!(*reported.borrow(), expected, "sample {number}");
        }
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        // Five intervals at 10 W, five at 90 W, and one on the way to each of 90 W and 50 W.
        assert!(text.contains("russet_node_energy_joules_total{part=\"machine\"} 6200"), "{text}");
        assert!(text.contains("russet_node_energy_joules_total{part=\"gpu\"} 240"), "{text}");
        observer.report(at(1000 * seconds(6)) + MIN_REPORT_INTERVAL);
        let both = MeasuredPower { idle_watts: Some(10), busy_watts: Some(90) };
        assert_eq!(*reported.borrow(), Some(both));
        // The tool says nothing more.
        observer.report(at(1000 * seconds(13)) + MAX_SAMPLE_AGE + Duration::from_secs(1));
        assert_eq!(*reported.borrow(), None);
    }

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
