//! ModelProvider: a server outside of this cluster that answers requests, where a ModelRoute says so.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LocalReference, Money, Zone};

/// A server outside of this cluster that answers requests of ModelRoutes which name it as a target.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "ModelProvider",
    namespaced,
    status = "ModelProviderStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "mprovider",
    category = "russet",
    printcolumn(name = "API", type_ = "string", json_path = ".spec.api"),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".spec.endpoint"),
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.zone"),
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
    printcolumn(name = "Answered", type_ = "date", json_path = ".status.lastAnswered"),
    printcolumn(name = "Credits", type_ = "string", json_path = ".status.credits.remaining", priority = 1),
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
    {"rule": "self.zone != 'Cloud' || self.endpoint.startsWith('https://')",
     "message": "a provider of the zone Cloud needs an endpoint with https://, or its key and all prompts could be read on the way"},
]))]
pub struct ModelProviderSpec {
    /// The API that it speaks. llama.cpp, LM Studio, Ollama, OpenRouter, vLLM and another Russet speak OpenAI's.
    #[serde(default)]
    pub api: ProviderApi,
    /// Where its API begins: what comes before `/chat/completions`, such as `https://openrouter.ai/api/v1`; with
    /// `api: Anthropic` what comes before `/messages`, such as `https://api.anthropic.com/v1`.
    #[schemars(length(min = 1, max = 1024), regex(pattern = r"^https?://[^/?#@\s]+(/[^?#\s]*)?$"))]
    pub endpoint: String,
    /// Where it is. Gateways hold it to that: with `Local` they connect to loopback addresses alone, with `Lan` to private
    /// ones, whatever its name resolves to.
    #[serde(default = "cloud")]
    pub zone: Zone,
    /// A Secret of the same namespace that has its key as `token`; the Role `russet-providers` must name it, as
    /// `russet credentials add NAME --for providers` sees to. Absent: it wants no key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalReference>,
    /// Requests that each gateway sends to it at once; the others go on to the next target.
    #[serde(default = "max_concurrent_requests")]
    #[schemars(range(min = 1, max = 10_000))]
    pub max_concurrent_requests: u32,
    /// How long it may take to begin an answer, and to go on with it.
    #[serde(default = "timeout_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: u32,
    /// How often a gateway asks what is left of the credits of its key, in the wake of requests that went there; OpenRouter
    /// says. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 86_400))]
    pub credits_interval_seconds: Option<u32>,
    /// What is known of its models; the first that matches a name counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub models: Vec<ProviderModel>,
}

impl Default for ModelProviderSpec {
    fn default() -> Self {
        Self {
            api: ProviderApi::default(),
            endpoint: String::new(),
            zone: cloud(),
            secret_ref: None,
            max_concurrent_requests: max_concurrent_requests(),
            timeout_seconds: timeout_seconds(),
            credits_interval_seconds: None,
            models: Vec::new(),
        }
    }
}

/// What is known of models of a provider.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderModel {
    /// The model, as the provider names it; `*` matches any run of characters.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Tokens that prompt and answer may have together; longer requests go on to the next target. Absent: the provider says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub context_tokens: Option<u32>,
    /// What a million tokens cost. Absent: nothing in the zones Local and Lan; in the zone Cloud nobody knows, so that no request
    /// goes there whose Budget counts money.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_million_tokens: Option<TokenPrice>,
    /// What each answer costs beside its tokens, such as `"0.005"`. Absent: nothing. In the zone Cloud it is no price without
    /// that of the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_request: Option<Money>,
}

/// What a million tokens cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TokenPrice {
    /// Tokens of prompts, such as `"0.15"`.
    pub input: Money,
    /// Of these, those that the provider had cached. Absent: as much as all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_input: Option<Money>,
    /// Tokens of answers.
    pub output: Money,
}

impl TokenPrice {
    /// What a request costs that has so many tokens in its prompt, of which so many were cached, and so many in its answer.
    pub fn of(&self, prompt: u64, cached: u64, answer: u64) -> Money {
        let cached = cached.min(prompt);
        self.input
            .for_tokens(prompt - cached)
            .plus(self.cached_input.unwrap_or(self.input).for_tokens(cached))
            .plus(self.output.for_tokens(answer))
    }
}

/// What answers of a model cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelPrice {
    /// What a million tokens cost.
    pub tokens: TokenPrice,
    /// What each answer costs beside its tokens.
    pub request: Money,
}

impl ModelPrice {
    /// What an answer costs that has so many tokens in its prompt, of which so many were cached, and so many of its own.
    pub fn of(&self, prompt: u64, cached: u64, answer: u64) -> Money {
        self.request.plus(self.tokens.of(prompt, cached, answer))
    }
}

impl From<TokenPrice> for ModelPrice {
    fn from(tokens: TokenPrice) -> Self {
        Self { tokens, request: Money::ZERO }
    }
}

fn cloud() -> Zone {
    Zone::Cloud
}

fn max_concurrent_requests() -> u32 {
    32
}

/// Half of what clients wait for a first byte.
fn timeout_seconds() -> u32 {
    120
}

/// The API of a provider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ProviderApi {
    /// OpenAI's Chat Completions.
    #[default]
    OpenAI,
    /// Anthropic's Messages.
    Anthropic,
    /// A value from a newer release; such a provider gets no requests.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether a provider answers, as gateways saw it with real requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelProviderStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When it last answered a request, to the minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_answered: Option<Time>,
    /// Models that gateways leave alone until a time that the provider named, or until it may have credits again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub pauses: Vec<ProviderPause>,
    /// What was left of the credits of its key, where a gateway asks for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credits: Option<ProviderCredits>,
    /// Ready: the last request was answered, or none has gone there yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Credits of a key at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderCredits {
    /// What was left. Absent: the key has no limit of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining: Option<Money>,
    /// The limit of the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Money>,
    /// When the provider said so.
    pub read_at: Time,
}

/// Models of a provider that are not asked until a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderPause {
    /// Which models.
    pub scope: PauseScope,
    /// The model, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub model: Option<String>,
    /// Why.
    pub reason: PauseReason,
    /// Until when.
    pub until: Time,
}

impl ProviderPause {
    /// Whether it is about this model, as the provider names it.
    pub fn is_about(&self, model: &str) -> bool {
        let is_free = model.ends_with(FREE_SUFFIX);
        match self.scope {
            PauseScope::Model => self.model.as_deref() == Some(model),
            PauseScope::Free => is_free,
            PauseScope::Paid => !is_free,
            PauseScope::All => true,
            PauseScope::Unknown => false,
        }
    }
}

/// The end of the names of models that cost nothing, as OpenRouter has it: such as `qwen/qwen3-8b:free`.
pub const FREE_SUFFIX: &str = ":free";

/// Which models of a provider are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PauseScope {
    /// One.
    Model,
    /// Those whose names end with `:free`.
    Free,
    /// Those whose names do not.
    Paid,
    /// All.
    All,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Why models of a provider are not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PauseReason {
    /// The provider said that nothing of its rate limit remains.
    RateLimited,
    /// The provider wants to be paid first.
    NoCredits,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}
