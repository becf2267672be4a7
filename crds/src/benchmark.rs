//! Benchmark: how fast a deployment answers, measured once, as a Job runs once. People write it, the
//! gateway asks the deployment's engines and writes down what it saw.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// One measurement of a deployment. It runs once; another one is another Benchmark.
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
    /// Tokens of each prompt, as nearly as words allow.
    #[serde(default = "prompt_tokens")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub prompt_tokens: u32,
    /// Tokens of each answer; the model is not let end sooner.
    #[serde(default = "output_tokens")]
    #[schemars(range(min = 2, max = 4096))]
    pub output_tokens: u32,
    /// Streams at once.
    #[serde(default = "concurrency")]
    #[schemars(range(min = 1, max = 64))]
    pub concurrency: u32,
    /// Requests of each stream, one after the other.
    #[serde(default = "repetitions")]
    #[schemars(range(min = 1, max = 100))]
    pub repetitions: u32,
}

impl BenchmarkSpec {
    /// Requests in all, those that warm up left out.
    pub fn requests(&self) -> u32 {
        self.concurrency.saturating_mul(self.repetitions)
    }

    /// Whether another one measures the same in the same way, of whatever deployment.
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

/// What was seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BenchmarkStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The gateway that measures; another one begins anew when this one is heard of no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<String>,
    /// When that gateway last said that it is at it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<Time>,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When it ended, whatever came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// Requests answered and wanted, for people: `12/40`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<String>,
    /// The figures, once every request was answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<BenchmarkResult>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// The figures of all requests together, as the gateway saw them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BenchmarkResult {
    /// The Model that answered.
    pub model: String,
    /// Nodes of a replica.
    pub nodes: u32,
    /// Tokens of a prompt, on average, as the engine counted them.
    pub prompt_tokens: u32,
    /// Tokens of an answer, on average.
    pub output_tokens: u32,
    /// Tokens a second of each stream from its first token on, such as `41.3`.
    pub tokens_per_second: String,
    /// Tokens a second of all streams together, prompts and pauses included.
    pub total_tokens_per_second: String,
    /// Tokens of a prompt for each second until its first token, waiting for a slot included.
    pub prompt_tokens_per_second: String,
    /// From a request to its first token.
    pub ttft_milliseconds: Percentiles,
    /// From one token to the next.
    pub inter_token_milliseconds: Percentiles,
    /// What the planner expected of one stream; absent where it could not say, or where several were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_tokens_per_second: Option<String>,
    /// What was measured, in percent of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent_of_predicted: Option<u32>,
    /// Against one node; absent where no Benchmark of the same Model in this namespace measured the same there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingResult>,
}

/// Milliseconds that so many percent of what was seen did not exceed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Percentiles {
    /// Half of it.
    pub p50: String,
    /// Nine of ten.
    pub p90: String,
    /// All but one of a hundred.
    pub p99: String,
}

/// What more nodes brought.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScalingResult {
    /// The Benchmark of one node that this is compared with, the last one that finished.
    pub benchmark: String,
    /// Tokens a second of each stream as a multiple of that one's, such as `1.62`.
    pub times: String,
}
