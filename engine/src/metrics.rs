//! Prometheus metrics of an engine. Rank 0 uses vLLM's names and buckets, so that dashboards and routers made
//! for vLLM work unchanged; other ranks export only their own, or totals would count double.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{
    CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry,
};
use russet_wire::event::{FinishReason, Usage};

use crate::executor::{LoadProgress, MlxMemory};
use crate::prefix_cache::CACHE_STEP;
use crate::step_profiler::{COLLECTIVES, PHASES, StepTotals};
use crate::throughput::ThroughputMeter;

/// vLLM's buckets for the time to the first token.
const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's buckets for the time between tokens.
const INTER_TOKEN_BUCKETS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// vLLM's buckets for request-length durations.
const REQUEST_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// Proposers of draft tokens: prompt lookup and the draft model.
const PROPOSER_LABELS: [&str; 2] = ["lookup", "draft"];

/// Buckets for the time that the scheduler and MLX take per batch.
const BATCH_BUCKETS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 10.0,
];
/// Buckets for sequences per batch.
const BATCH_ROW_BUCKETS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
/// Buckets for prefill tokens per batch.
const PREFILL_TOKEN_BUCKETS: &[f64] = &[0.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];

/// All metrics of one engine; clones share them.
#[derive(Clone)]
pub struct EngineMetrics {
    /// Registry behind `/metrics`.
    pub registry: Registry,
    /// Requests in a slot.
    pub running: IntGauge,
    /// Requests waiting for a slot.
    pub waiting: IntGauge,
    /// Tokens of prompts of waiting and running requests that are not in a KV cache yet.
    pub unread_tokens: IntGauge,
    /// Preemptions.
    pub preemptions: IntCounter,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: Gauge,
    /// Prompt tokens prefilled.
    pub prompt_tokens: IntCounter,
    /// Prefix-cache queries and hits, in prompt tokens.
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    /// Blocks in the prefix cache, in memory and on disk.
    prefix_blocks: [Gauge; 2],
    /// Output tokens sampled.
    pub generated_tokens: IntCounter,
    /// Speculation by proposer: number of drafts, draft tokens and accepted draft tokens.
    draft_counters: [IntCounterVec; 3],
    /// Time to first token, from arrival.
    pub first_token: Histogram,
    /// Inter-token latency.
    pub inter_token: Histogram,
    /// From arrival to the last event.
    pub request: Histogram,
    /// Queue time: from arrival to a slot.
    pub queue: Histogram,
    /// Prefill time: from a slot to the first token.
    pub prefill: Histogram,
    /// Decode time: from the first token to the last.
    pub decode: Histogram,
    /// Time that this process takes to start a batch.
    pub scheduling: Histogram,
    /// From the start of a batch to its tokens.
    pub batch: Histogram,
    /// Sequences per batch.
    pub batch_rows: Histogram,
    /// Prefill tokens per batch.
    pub batch_prompt_tokens: Histogram,
    /// Seconds of batches, by whether a request is charged with them.
    engine_time: CounterVec,
    /// Steps this rank ran.
    pub steps: IntCounter,
    /// Measured throughput, for the agent.
    pub throughput: Arc<Mutex<ThroughputMeter>>,
    collective_bytes: IntCounterVec,
    phase_seconds: CounterVec,
    timed_batches: IntCounter,
    success: IntCounterVec,
    failures: IntCounterVec,
    memory: IntGauge,
    peak_memory: IntGauge,
    loaded: IntGauge,
    smoke: Gauge,
}

impl EngineMetrics {
    /// The metrics of rank `rank` of a group serving `model`, with a KV cache of `kv_tokens` tokens for
    /// sequences of at most `context_tokens` each.
    pub fn new(
        model: &str,
        rank: u32,
        context_tokens: u32,
        kv_tokens: u64,
    ) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let labels = |opts: Opts| opts.const_label("model_name", model).const_label("engine", "0");
        let request = |name: &str, help: &str| labels(Opts::new(format!("vllm:{name}"), help));
        let time = |name: &str, help: &str, buckets: &[f64]| {
            let mut opts = HistogramOpts::from(request(name, help));
            opts.buckets = buckets.to_vec();
            Histogram::with_opts(opts)
        };
        let own = |name: &str, help: &str| {
            Opts::new(format!("russet_engine_{name}"), help).const_label("model_name", model)
        };
        let of_batches = |name: &str, help: &str, buckets: &[f64]| {
            let mut opts = HistogramOpts::from(own(name, help));
            opts.buckets = buckets.to_vec();
            Histogram::with_opts(opts)
        };
        let tier = |tier: &str| {
            let blocks = own("prefix_cache_blocks", "Blocks of the prefix cache, by where they are.");
            Gauge::with_opts(blocks.const_label("tier", tier))
        };
        let draft_counter = |name: &str, help: &str| {
            IntCounterVec::new(request(&format!("spec_decode_num_{name}_total"), help), &["source"])
        };
        let metrics = Self {
            running: IntGauge::with_opts(request("num_requests_running", "Requests being answered."))?,
            waiting: IntGauge::with_opts(request("num_requests_waiting", "Requests waiting for a slot."))?,
            unread_tokens: IntGauge::with_opts(own(
                "unread_prompt_tokens",
                "Tokens of prompts of waiting and running requests that are not in a KV cache yet.",
            ))?,
            preemptions: IntCounter::with_opts(request(
                "num_preemptions_total",
                "Times a request left its slot for others.",
            ))?,
            kv_usage: Gauge::with_opts(request(
                "kv_cache_usage_perc",
                "Share of the KV cache in use; 1 is all of it.",
            ))?,
            prompt_tokens: IntCounter::with_opts(request("prompt_tokens_total", "Prompt tokens read."))?,
            prefix_queries: IntCounter::with_opts(request(
                "prefix_cache_queries_total",
                "Prompt tokens looked for in the prefix cache.",
            ))?,
            prefix_hits: IntCounter::with_opts(request(
                "prefix_cache_hits_total",
                "Prompt tokens found in the prefix cache, and not read again.",
            ))?,
            prefix_blocks: [tier("memory")?, tier("disk")?],
            generated_tokens: IntCounter::with_opts(request(
                "generation_tokens_total",
                "Tokens generated, without end tokens, as in the usage of responses.",
            ))?,
            draft_counters: [
                draft_counter("drafts", "Times the next tokens of an answer were drafted.")?,
                draft_counter("draft_tokens", "Draft tokens proposed.")?,
                draft_counter("accepted_tokens", "Draft tokens accepted, which cost no step of their own.")?,
            ],
            first_token: time(
                "time_to_first_token_seconds",
                "From arrival to the first token.",
                FIRST_TOKEN_BUCKETS,
            )?,
            inter_token: time(
                "inter_token_latency_seconds",
                "From one token to the next.",
                INTER_TOKEN_BUCKETS,
            )?,
            request: time(
                "e2e_request_latency_seconds",
                "From arrival to the end of the answer.",
                REQUEST_BUCKETS,
            )?,
            queue: time("request_queue_time_seconds", "From arrival to a slot.", REQUEST_BUCKETS)?,
            prefill: time(
                "request_prefill_time_seconds",
                "From a slot to the first token.",
                REQUEST_BUCKETS,
            )?,
            decode: time(
                "request_decode_time_seconds",
                "From the first token to the last.",
                REQUEST_BUCKETS,
            )?,
            success: IntCounterVec::new(
                request("request_success_total", "Answers completed, by the reason they ended."),
                &["finished_reason"],
            )?,
            failures: IntCounterVec::new(
                own("request_failures_total", "Requests that ended with a typed failure."),
                &["kind"],
            )?,
            scheduling: of_batches("schedule_seconds", "What rank 0 took to begin a batch.", BATCH_BUCKETS)?,
            batch: of_batches(
                "batch_seconds",
                "From the beginning of a batch to its tokens.",
                BATCH_BUCKETS,
            )?,
            batch_rows: of_batches("batch_sequences", "Sequences of a batch.", BATCH_ROW_BUCKETS)?,
            batch_prompt_tokens: of_batches(
                "batch_prompt_tokens",
                "Tokens a batch reads.",
                PREFILL_TOKEN_BUCKETS,
            )?,
            engine_time: CounterVec::new(
                own(
                    "compute_seconds_total",
                    "Seconds in which the group computed, without overlap, by whether a request is charged with them.",
                ),
                &["charged"],
            )?,
            steps: IntCounter::with_opts(own("steps_total", "Steps this rank ran."))?,
            collective_bytes: IntCounterVec::new(
                own("collective_bytes_total", "Bytes between this rank and others, by operation."),
                &["collective"],
            )?,
            phase_seconds: CounterVec::new(
                own(
                    "batch_phase_seconds_total",
                    "Seconds of the batches that were timed, by phase; waiting for other ranks counts as collective.",
                ),
                &["phase"],
            )?,
            timed_batches: IntCounter::with_opts(own(
                "timed_batches_total",
                "Batches that were timed by phase.",
            ))?,
            memory: IntGauge::with_opts(own("memory_bytes", "Bytes MLX holds."))?,
            peak_memory: IntGauge::with_opts(own("peak_memory_bytes", "Most bytes MLX held."))?,
            loaded: IntGauge::with_opts(own("loaded_bytes", "Bytes of weights in memory."))?,
            smoke: Gauge::with_opts(own(
                "smoke_seconds",
                "Seconds the group took for the smoke prompt; 0 until it is answered.",
            ))?,
            throughput: Arc::default(),
            registry,
        };
        metrics.register(rank, context_tokens, kv_tokens, labels)?;
        Ok(metrics)
    }

    fn register(
        &self,
        rank: u32,
        context_tokens: u32,
        kv_tokens: u64,
        labels: impl Fn(Opts) -> Opts,
    ) -> Result<(), prometheus::Error> {
        // Destructured, so that a metric cannot be created and then not registered.
        let Self {
            registry,
            running,
            waiting,
            unread_tokens,
            preemptions,
            kv_usage,
            prompt_tokens,
            prefix_queries,
            prefix_hits,
            prefix_blocks,
            generated_tokens,
            draft_counters,
            first_token,
            inter_token: between_tokens,
            request,
            queue,
            prefill,
            decode,
            scheduling: schedule,
            batch,
            batch_rows,
            batch_prompt_tokens,
            engine_time,
            steps,
            throughput: _,
            collective_bytes,
            phase_seconds,
            timed_batches,
            success,
            failures,
            memory,
            peak_memory,
            loaded,
            smoke,
        } = self;
        for own in [memory, peak_memory, loaded] {
            registry.register(Box::new(own.clone()))?;
        }
        for counter in [steps, timed_batches] {
            registry.register(Box::new(counter.clone()))?;
        }
        registry.register(Box::new(collective_bytes.clone()))?;
        registry.register(Box::new(phase_seconds.clone()))?;
        if rank > 0 {
            return Ok(());
        }
        registry.register(Box::new(engine_time.clone()))?;
        // Both series are there from the beginning: an average over replicas then divides by all of them.
        for charged in ["true", "false"] {
            engine_time.with_label_values(&[charged]);
        }
        for gauge in [running, waiting, unread_tokens] {
            registry.register(Box::new(gauge.clone()))?;
        }
        for gauge in [kv_usage, smoke].into_iter().chain(prefix_blocks) {
            registry.register(Box::new(gauge.clone()))?;
        }
        let counters = [prompt_tokens, prefix_queries, prefix_hits, generated_tokens, preemptions];
        for counter in counters {
            registry.register(Box::new(counter.clone()))?;
        }
        for counter in draft_counters {
            PROPOSER_LABELS.iter().for_each(|source| drop(counter.with_label_values(&[source])));
            registry.register(Box::new(counter.clone()))?;
        }
        for histogram in [
            first_token,
            between_tokens,
            request,
            queue,
            prefill,
            decode,
            schedule,
            batch,
            batch_rows,
            batch_prompt_tokens,
        ] {
            registry.register(Box::new(histogram.clone()))?;
        }
        for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Cancelled] {
            success.with_label_values(&[reason.as_str()]);
        }
        registry.register(Box::new(success.clone()))?;
        registry.register(Box::new(failures.clone()))?;
        // The block size is the allocation unit of a sequence: no two sequences share a part of a block.
        let geometry = GaugeVec::new(
            labels(Opts::new("vllm:cache_config_info", "Tokens of a block of the KV cache, and blocks.")),
            &["block_size", "num_gpu_blocks"],
        )?;
        let block = context_tokens.min(CACHE_STEP);
        let blocks = kv_tokens / u64::from(block.max(1));
        geometry.with_label_values(&[&block.to_string(), &blocks.to_string()]).set(1.0);
        registry.register(Box::new(geometry))
    }

    /// Records a prompt of `tokens` tokens, `cached` of which were in the prefix cache.
    pub fn record_prefix_lookup(&self, tokens: u32, cached: u32) {
        self.prefix_queries.inc_by(u64::from(tokens));
        self.prefix_hits.inc_by(u64::from(cached));
    }

    /// Records a draft of `tokens` draft tokens by the draft model or by prompt lookup, `right` of them
    /// accepted.
    pub fn record_draft_tokens(&self, drafted: bool, tokens: usize, right: usize) {
        let source = PROPOSER_LABELS[usize::from(drafted)];
        for (counter, count) in self.draft_counters.iter().zip([1, tokens, right]) {
            counter.with_label_values(&[source]).inc_by(count as u64);
        }
    }

    /// Accepted draft tokens.
    #[cfg(test)]
    pub fn accepted_draft_tokens(&self) -> u64 {
        PROPOSER_LABELS.iter().map(|source| self.draft_counters[2].with_label_values(&[source]).get()).sum()
    }

    /// Sets the number of cached blocks in memory and on disk.
    pub fn set_prefix_blocks(&self, (memory, disk): (usize, usize)) {
        let [in_memory, on_disk] = &self.prefix_blocks;
        in_memory.set(memory as f64);
        on_disk.set(disk as f64);
    }

    /// Records a completed request.
    pub fn record_finished(&self, reason: FinishReason, usage: Usage, elapsed: Duration) {
        tracing::debug!(reason = reason.as_str(), ?usage, ?elapsed, "answer complete");
        self.success.with_label_values(&[reason.as_str()]).inc();
        self.request.observe(elapsed.as_secs_f64());
    }

    /// Records time in which the group computed, and whether a request is charged with it.
    pub fn record_engine_time(&self, microseconds: u64, is_charged: bool) {
        let charged = if is_charged { "true" } else { "false" };
        self.engine_time.with_label_values(&[charged]).inc_by(microseconds as f64 / 1e6);
    }

    /// Microseconds in which the group computed: those that requests are charged with, and the others.
    #[cfg(test)]
    pub fn engine_microseconds(&self) -> (u64, u64) {
        let of = |charged| (self.engine_time.with_label_values(&[charged]).get() * 1e6).round() as u64;
        (of("true"), of("false"))
    }

    /// Records the smoke prompt. It counts only as steps, because no client asked for it.
    pub fn record_smoke_test(&self, elapsed: Duration) {
        self.smoke.set(elapsed.as_secs_f64());
    }

    /// Records a request that failed with this kind.
    pub fn record_failure(&self, kind: &str) {
        self.failures.with_label_values(&[kind]).inc();
    }

    /// Updates gauges that are polled rather than counted here.
    pub fn observe(&self, memory: MlxMemory, progress: LoadProgress, totals: StepTotals) {
        for (name, bytes) in COLLECTIVES.iter().zip(totals.bytes) {
            let counter = self.collective_bytes.with_label_values(&[name]);
            counter.inc_by(bytes.saturating_sub(counter.get()));
        }
        for (name, seconds) in PHASES.iter().zip(totals.seconds) {
            let counter = self.phase_seconds.with_label_values(&[name]);
            counter.inc_by((seconds - counter.get()).max(0.0));
        }
        self.timed_batches.inc_by(totals.timed_batches.saturating_sub(self.timed_batches.get()));
        self.memory.set(memory.bytes as i64);
        self.peak_memory.set(memory.peak_bytes as i64);
        self.loaded.set(progress.loaded_bytes as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(rank: u32) -> Vec<String> {
        let metrics = EngineMetrics::new("m", rank, 4096, 16_384).unwrap();
        metrics.record_finished(FinishReason::Stop, Usage::default(), Duration::from_secs(1));
        metrics.record_failure("overloaded");
        metrics.registry.gather().iter().map(|family| family.name().to_owned()).collect()
    }

    #[test]
    fn rank_zero_exposes_the_metrics_of_vllm_dashboards() {
        let names = names(0);
        for name in [
            "num_requests_waiting",
            "num_requests_running",
            "num_preemptions_total",
            "kv_cache_usage_perc",
            "cache_config_info",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "prompt_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "generation_tokens_total",
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "request_success_total",
        ] {
            assert!(names.contains(&format!("vllm:{name}")), "{name} is missing from {names:?}");
        }
    }

    #[test]
    fn rank_zero_exposes_batch_histograms() {
        let names = names(0);
        for name in ["schedule_seconds", "batch_seconds", "batch_sequences", "batch_prompt_tokens"] {
            assert!(names.contains(&format!("russet_engine_{name}")), "{name} is missing from {names:?}");
        }
        assert!(self::names(1).iter().all(|name| !name.contains("batch_sequences")));
    }

    #[test]
    fn every_rank_exposes_phase_and_collective_totals() {
        let metrics = EngineMetrics::new("m", 1, 4096, 16_384).unwrap();
        let observe = |bytes, seconds, timed| {
            metrics.observe(
                MlxMemory::default(),
                LoadProgress::default(),
                StepTotals { bytes, seconds, timed_batches: timed },
            );
        };
        observe([1, 2, 3], [0.5, 0.25, 0.0], 1);
        observe([10, 2, 3], [1.5, 0.25, 2.0], 2);
        let text = prometheus::TextEncoder::new().encode_to_string(&metrics.registry.gather()).unwrap();
        for line in [
            "russet_engine_collective_bytes_total{collective=\"all_sum\",model_name=\"m\"} 10",
            "russet_engine_collective_bytes_total{collective=\"receive\",model_name=\"m\"} 3",
            "russet_engine_batch_phase_seconds_total{model_name=\"m\",phase=\"forward\"} 1.5",
            "russet_engine_batch_phase_seconds_total{model_name=\"m\",phase=\"sample\"} 2",
            "russet_engine_timed_batches_total{model_name=\"m\"} 2",
        ] {
            assert!(text.contains(line), "{line} is missing from {text}");
        }
    }

    #[test]
    fn cache_config_metric_counts_growth_blocks() {
        for (context, tokens, block, blocks) in
            [(4096, 16_384, 256, 64), (128, 512, 128, 4), (4096, 1000, 256, 3)]
        {
            let shown = EngineMetrics::new("m", 0, context, tokens).unwrap().registry.gather();
            let shown = shown.iter().find(|family| family.name() == "vllm:cache_config_info").unwrap();
            let labels: Vec<(&str, &str)> =
                shown.get_metric()[0].get_label().iter().map(|label| (label.name(), label.value())).collect();
            assert!(labels.contains(&("block_size", block.to_string().as_str())), "{labels:?}");
            assert!(labels.contains(&("num_gpu_blocks", blocks.to_string().as_str())), "{labels:?}");
        }
    }

    #[test]
    fn higher_ranks_expose_no_request_metrics() {
        assert!(names(1).iter().all(|name| name.starts_with("russet_engine_")), "{:?}", names(1));
    }
}
