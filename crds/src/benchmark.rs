//! Benchmark: one measurement of a deployment's performance; it runs to completion once, like a Job. The
//! gateway sends the requests to the deployment's engines and writes the results.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// One measurement of a deployment. It runs once; to measure again, create another Benchmark.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Benchmark",
    namespaced,
    status = "BenchmarkStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "bench",
    category = "russet",
    printcolumn(name = "Deployment", type_ = "string", json_path = ".spec.deploymentRef.name"),
    printcolumn(name = "Tok/s", type_ = "string", json_path = ".status.result.tokensPerSecond"),
    printcolumn(name = "TTFT p50", type_ = "string", json_path = ".status.result.ttftMilliseconds.p50"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Requests", type_ = "string", json_path = ".status.requests", priority = 1),
    printcolumn(
        name = "Total",
        type_ = "string",
        json_path = ".status.result.totalTokensPerSecond",
        priority = 1
    ),
    printcolumn(
        name = "Predicted",
        type_ = "string",
        json_path = ".status.result.predictedTokensPerSecond",
        priority = 1
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "self == oldSelf", "message": "a Benchmark runs once as it was written; create another one"},
    {"rule": "self.concurrency * self.repetitions <= 1000",
     "message": "concurrency × repetitions is more than 1000 requests; ask for fewer"},
]))]
pub struct BenchmarkSpec {
    /// The ModelDeployment to measure, in the same namespace.
    pub deployment_ref: LocalReference,
    /// Tokens of each prompt, approximately.
    #[serde(default = "prompt_tokens")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub prompt_tokens: u32,
    /// Output tokens of each request; the model cannot stop earlier.
    #[serde(default = "output_tokens")]
    #[schemars(range(min = 2, max = 4096))]
    pub output_tokens: u32,
    /// Number of concurrent streams.
    #[serde(default = "concurrency")]
    #[schemars(range(min = 1, max = 64))]
    pub concurrency: u32,
    /// Requests of each stream, one after the other.
    #[serde(default = "repetitions")]
    #[schemars(range(min = 1, max = 100))]
    pub repetitions: u32,
}

impl BenchmarkSpec {
    /// Total number of requests, without the warm-up ones.
    pub fn requests(&self) -> u32 {
        self.concurrency.saturating_mul(self.repetitions)
    }

    /// Whether another Benchmark has the same prompt length, output length and concurrency, for any
    /// deployment.
    pub fn measures_same(&self, other: &Self) -> bool {
        let Self { deployment_ref: _, prompt_tokens, output_tokens, concurrency, repetitions: _ } = self;
        (*prompt_tokens, *output_tokens, *concurrency)
            == (other.prompt_tokens, other.output_tokens, other.concurrency)
    }
}

fn prompt_tokens() -> u32 {
    512
}

fn output_tokens() -> u32 {
    256
}

fn concurrency() -> u32 {
    1
}

fn repetitions() -> u32 {
    10
}

/// Progress and results of a Benchmark.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BenchmarkStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The gateway that runs the Benchmark. Another gateway restarts it when this one no longer renews
    /// `renewedAt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<String>,
    /// When that gateway last renewed its claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<Time>,
    /// When the run started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When the run ended, successful or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// Completed and total requests, for display: `12/40`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<String>,
    /// The results, once every request has completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<BenchmarkResult>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Results over all requests, as measured by the gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BenchmarkResult {
    /// The Model that was measured.
    pub model: String,
    /// Nodes of one replica.
    pub nodes: u32,
    /// Average prompt tokens, as counted by the engine.
    pub prompt_tokens: u32,
    /// Average output tokens.
    pub output_tokens: u32,
    /// Decode tokens per second of each stream, from its first token on, such as `41.3`.
    pub tokens_per_second: String,
    /// Output tokens per second of all streams together, prefill and pauses included.
    pub total_tokens_per_second: String,
    /// Prompt tokens divided by the time to the first token, queueing included.
    pub prompt_tokens_per_second: String,
    /// Time to first token.
    pub ttft_milliseconds: Percentiles,
    /// Time between consecutive tokens.
    pub inter_token_milliseconds: Percentiles,
    /// The planner's prediction for one stream. Absent if there is no prediction, or if several streams ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_tokens_per_second: Option<String>,
    /// The measured rate in percent of the prediction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent_of_predicted: Option<u32>,
    /// Comparison with one node. Absent if no Benchmark of the same Model in this namespace measured the same
    /// there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingResult>,
}

/// Percentiles of a duration, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Percentiles {
    /// The median.
    pub p50: String,
    /// The 90th percentile.
    pub p90: String,
    /// The 99th percentile.
    pub p99: String,
}

/// Speed-up by more nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScalingResult {
    /// The Benchmark on one node that this one is compared with: the last one that finished.
    pub benchmark: String,
    /// Decode tokens per second of each stream as a multiple of that Benchmark's, such as `1.62`.
    pub times: String,
}
