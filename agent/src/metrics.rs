//! Metrics of the agent. Names begin with `russet_`; objects are labels, requests never are.

use std::time::Duration;

use prometheus::{CounterVec, GaugeVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use russet_crds::conditions::Reason;
use russet_rpc::cache_status::CacheStatus;

use crate::machine_load::MachineLoad;

/// The agent's metrics. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct AgentMetrics {
    memory_total: IntGauge,
    memory_limit: IntGauge,
    memory_granted: IntGauge,
    memory_available: IntGauge,
    disk_free: IntGauge,
    copy_bytes: IntGaugeVec,
    engines: IntGaugeVec,
    starts: IntCounterVec,
    reforms: IntCounterVec,
    ends: IntCounterVec,
    kills: IntCounterVec,
    refusals: IntCounterVec,
    leases: IntCounterVec,
    certificate: IntGauge,
    gpu: GaugeVec,
    watts: GaugeVec,
    energy: CounterVec,
    celsius: GaugeVec,
    swap: GaugeVec,
    link_trip: GaugeVec,
    link_pings: IntCounterVec,
    link_bits: IntGaugeVec,
}

/// A metric whose name and labels are constants of this file.
fn registered<T>(made: prometheus::Result<T>) -> T {
    made.expect("the names and labels in this file are valid, or no test of this crate would start")
}

impl AgentMetrics {
    /// A registry with them, and with those of the caches.
    pub fn new(caches: &CacheStatus) -> (Registry, Self) {
        let registry = Registry::new();
        let gauge = |name: &str, help: &str| registered(IntGauge::new(name, help));
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            registered(IntGaugeVec::new(Opts::new(name, help), labels))
        };
        let floats = |name: &str, help: &str, labels: &[&str]| {
            registered(GaugeVec::new(Opts::new(name, help), labels))
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            registered(IntCounterVec::new(Opts::new(name, help), labels))
        };
        let metrics = Self {
            memory_total: gauge(
                "russet_node_memory_total_bytes",
                "Memory of the node, or the size it plays.",
            ),
            memory_limit: gauge(
                "russet_node_memory_serving_limit_bytes",
                "Memory all models together may take.",
            ),
            memory_granted: gauge("russet_node_memory_granted_bytes", "Memory granted to Shards."),
            memory_available: gauge(
                "russet_node_memory_available_bytes",
                "Memory the system could hand out now.",
            ),
            disk_free: gauge("russet_node_disk_free_bytes", "Free disk under the model store."),
            copy_bytes: gauges(
                "russet_modelcopy_bytes",
                "Bytes of a model on this node.",
                &["copy", "state"],
            ),
            engines: gauges("russet_node_engines", "Engines of this node by what they do.", &["state"]),
            starts: counters("russet_engine_starts_total", "Engines started.", &["shard"]),
            reforms: counters(
                "russet_engine_reforms_total",
                "Engines that formed their group anew with the weights they had.",
                &["shard"],
            ),
            ends: counters(
                "russet_engine_ends_total",
                "Engines that ended, and whether the agent wanted it.",
                &["shard", "wanted"],
            ),
            kills: counters(
                "russet_engine_kills_total",
                "Engines killed by their agent, by reason: EngineSilent, EngineHung, MemoryExceeded or MemoryShort.",
                &["shard", "reason"],
            ),
            refusals: counters(
                "russet_shard_refusals_total",
                "Claims refused for want of memory.",
                &["shard"],
            ),
            leases: counters(
                "russet_lease_renewals_total",
                "Attempts to renew the node's Lease.",
                &["result"],
            ),
            certificate: gauge(
                "russet_node_certificate_expiry_timestamp_seconds",
                "When the node's certificate ends, in seconds since 1970; it is renewed at two thirds of its life.",
            ),
            gpu: floats("russet_node_gpu_active_ratio", "Share of the time in which the GPU works.", &[]),
            watts: floats(
                "russet_node_power_watts",
                "Power of the whole machine, or of its GPU: part machine or gpu.",
                &["part"],
            ),
            energy: registered(CounterVec::new(
                Opts::new(
                    "russet_node_energy_joules_total",
                    "Joules of the whole machine, or of its GPU, from samples of their power: part machine or gpu.",
                ),
                &["part"],
            )),
            celsius: floats(
                "russet_node_temperature_celsius",
                "Warmth of the processor, or of the GPU: part cpu or gpu.",
                &["part"],
            ),
            swap: floats(
                "russet_node_swap_used_bytes",
                "Memory that the system has written out to disk.",
                &[],
            ),
            link_trip: floats(
                "russet_node_link_round_trip_seconds",
                "Time to the agent at the other end of a cable and back, over it, when it was last asked.",
                &["peer", "interface"],
            ),
            link_pings: counters(
                "russet_node_link_pings_total",
                "Questions to the agent at the other end of a cable, one a second, by result: answered or lost.",
                &["peer", "interface", "result"],
            ),
            link_bits: gauges(
                "russet_node_link_measured_bits_per_second",
                "What came from the other end of a cable over TLS when it was last tried with as much as it carries.",
                &["peer", "interface"],
            ),
        };
        let Self {
            memory_total,
            memory_limit,
            memory_granted,
            memory_available,
            disk_free,
            copy_bytes,
            engines,
            starts,
            reforms,
            ends,
            kills,
            refusals,
            leases,
            certificate,
            gpu,
            watts,
            energy,
            celsius,
            swap,
            link_trip,
            link_pings,
            link_bits,
        } = metrics.clone();
        let collectors: Vec<Box<dyn prometheus::core::Collector>> = vec![
            Box::new(memory_total),
            Box::new(memory_limit),
            Box::new(memory_granted),
            Box::new(memory_available),
            Box::new(disk_free),
            Box::new(copy_bytes),
            Box::new(engines),
            Box::new(starts),
            Box::new(reforms),
            Box::new(ends),
            Box::new(kills),
            Box::new(refusals),
            Box::new(leases),
            Box::new(certificate),
            Box::new(gpu),
            Box::new(watts),
            Box::new(energy),
            Box::new(celsius),
            Box::new(swap),
            Box::new(link_trip),
            Box::new(link_pings),
            Box::new(link_bits),
        ];
        for collector in collectors {
            registered(registry.register(collector));
        }
        registered(registry.register(Box::new(registered(caches.collector()))));
        (registry, metrics)
    }

    pub fn memory(&self, total: u64, limit: u64, granted: u64) {
        self.memory_total.set(total as i64);
        self.memory_limit.set(limit as i64);
        self.memory_granted.set(granted as i64);
    }

    pub fn free_resources(&self, available: u64, disk_free: u64) {
        self.memory_available.set(available as i64);
        self.disk_free.set(disk_free as i64);
    }

    pub fn copy(&self, copy: &str, done: u64, total: u64) {
        self.copy_bytes.with_label_values(&[copy, "done"]).set(done as i64);
        self.copy_bytes.with_label_values(&[copy, "wanted"]).set(total as i64);
    }

    pub fn remove_copy(&self, copy: &str) {
        for state in ["done", "wanted"] {
            // The series may not exist.
            self.copy_bytes.remove_label_values(&[copy, state]).ok();
        }
    }

    /// Sets the number of engines in each state.
    pub fn engines<'a>(&self, words: impl Iterator<Item = &'a str>) {
        for word in ["starting", "loading", "loaded", "serving", "failed"] {
            self.engines.with_label_values(&[word]).set(0);
        }
        for word in words.filter(|word| *word != "gone") {
            self.engines.with_label_values(&[word]).inc();
        }
    }

    pub fn started(&self, shard: &str) {
        self.starts.with_label_values(&[shard]).inc();
    }

    pub fn reformed(&self, shard: &str) {
        self.reforms.with_label_values(&[shard]).inc();
    }

    pub fn ended(&self, shard: &str, expected: bool) {
        self.ends.with_label_values(&[shard, if expected { "true" } else { "false" }]).inc();
    }

    pub fn killed(&self, shard: &str, reason: Reason) {
        self.kills.with_label_values(&[shard, &format!("{reason:?}")]).inc();
    }

    pub fn refused(&self, shard: &str) {
        self.refusals.with_label_values(&[shard]).inc();
    }

    /// Sets the expiry of the node's certificate, in seconds since 1970.
    pub fn certificate(&self, end: i64) {
        self.certificate.set(end);
    }

    /// Sets load and temperature of the machine; unknown values have no series.
    pub fn load(&self, load: &MachineLoad) {
        let MachineLoad { gpu, watts, gpu_watts, cpu_celsius, gpu_celsius, memory_used: _, swap_used } =
            *load;
        let values: [(&GaugeVec, &[&str], Option<f64>); 6] = [
            (&self.gpu, &[], gpu),
            (&self.watts, &["machine"], watts),
            (&self.watts, &["gpu"], gpu_watts),
            (&self.celsius, &["cpu"], cpu_celsius),
            (&self.celsius, &["gpu"], gpu_celsius),
            (&self.swap, &[], swap_used.map(|bytes| bytes as f64)),
        ];
        for (family, labels, value) in values {
            match value {
                Some(value) => family.with_label_values(labels).set(value),
                // The series may not exist.
                None => drop(family.remove_label_values(labels)),
            }
        }
    }

    /// Counts joules of a part of the machine. One without a figure has no series.
    pub fn energy(&self, part: &str, joules: f64) {
        if joules > 0.0 {
            self.energy.with_label_values(&[part]).inc_by(joules);
        }
    }

    /// Counts a ping of a link: its round-trip time, or a loss.
    pub fn link_pinged(&self, peer: &str, interface: &str, took: Option<Duration>) {
        let result = if took.is_some() { "answered" } else { "lost" };
        self.link_pings.with_label_values(&[peer, interface, result]).inc();
        if let Some(took) = took {
            self.link_trip.with_label_values(&[peer, interface]).set(took.as_secs_f64());
        }
    }

    pub fn link_bandwidth(&self, peer: &str, interface: &str, bits_per_second: u64) {
        self.link_bits.with_label_values(&[peer, interface]).set(bits_per_second as i64);
    }

    /// Removes the series of a removed link. The latency series may not exist.
    pub fn remove_link(&self, peer: &str, interface: &str) {
        self.link_trip.remove_label_values(&[peer, interface]).ok();
        self.link_bits.remove_label_values(&[peer, interface]).ok();
        for result in ["answered", "lost"] {
            self.link_pings.remove_label_values(&[peer, interface, result]).ok();
        }
    }

    pub fn lease(&self, renewed: bool) {
        self.leases.with_label_values(&[if renewed { "ok" } else { "failed" }]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_load_values_have_no_series() {
        let (registry, metrics) = AgentMetrics::new(&CacheStatus::default());
        let text = || prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        metrics.load(&MachineLoad { gpu: Some(0.5), watts: Some(31.5), ..MachineLoad::default() });
        assert!(text().contains("russet_node_gpu_active_ratio 0.5"), "{}", text());
        assert!(text().contains("russet_node_power_watts{part=\"machine\"} 31.5"), "{}", text());
        assert!(!text().contains("celsius{") && !text().contains("swap_used_bytes "), "{}", text());
        metrics.load(&MachineLoad::default());
        assert!(!text().contains("gpu_active_ratio ") && !text().contains("watts{"), "{}", text());
    }

    #[test]
    fn engines_are_counted_by_state_without_exited_ones() {
        let (registry, metrics) = AgentMetrics::new(&CacheStatus::default());
        metrics.engines(["serving", "serving", "gone", "loading"].into_iter());
        metrics.engines(["serving"].into_iter());
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        assert!(text.contains("russet_node_engines{state=\"serving\"} 1"), "{text}");
        assert!(text.contains("russet_node_engines{state=\"loading\"} 0"), "{text}");
        assert!(!text.contains("gone"), "{text}");
    }
}
