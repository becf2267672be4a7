//! What the log keeps of a request, and its JSON. Times are milliseconds since the request arrived. No text of a prompt or
//! a response is in it: see `message` for errors that may quote one. `russet why` reads the same types, also of another
//! release, so every field may be missing.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use russet_crds::{ModelPrice, Money, Zone};
use russet_wire::event::Usage;
use serde::{Deserialize, Serialize};

use crate::energy::EngineTotal;

/// A word that is not ours alone, such as an error code: another release may have more.
pub type Word = Cow<'static, str>;

/// What happened to one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestRecord {
    /// `x-request-id`, as the client sees it.
    pub id: String,
    /// The unique id, which the engine's logs have.
    pub engine_id: String,
    /// When it arrived.
    pub received_at: String,
    /// `namespace/name` of its key; none on loopback while there is no key.
    pub caller: Option<String>,
    /// The API that it speaks.
    pub dialect: String,
    /// The model as the client named it; empty where the request was refused before its body was read.
    pub model: String,
    /// Whether its response is streamed.
    pub streamed: bool,
    /// How many responses it asks for.
    pub responses: u32,
    /// How many of them are complete.
    pub complete: u32,
    /// Limits that apply to it.
    pub limits: LimitsRecord,
    /// The ModelRoute that has its model's name.
    pub route: Option<Box<RouteRecord>>,
    /// Objects of the cluster that were created or deleted for it, such as `created Model default/m`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<String>,
    /// How old the kept answer is that it got; none where an engine answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_response_ms: Option<f64>,
    /// What it waited for in the gateway.
    pub holds: Vec<HoldRecord>,
    /// Holds that are left out of the middle.
    pub holds_left_out: u32,
    /// Providers that could have answered and were not asked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedTarget>,
    /// Engines that it was sent to.
    pub attempts: Vec<AttemptRecord>,
    /// Attempts that are left out of the middle.
    pub attempts_left_out: u32,
    /// Tokens of its prompts.
    pub prompt_tokens: u32,
    /// Tokens of them that the prefix cache had.
    pub cached_tokens: u32,
    /// Tokens of all its responses.
    pub completion_tokens: u32,
    /// When the first text came.
    pub first_token_ms: Option<f64>,
    /// How long it took, or has taken so far.
    pub total_ms: f64,
    /// How it ended; none while it runs.
    pub end: Option<RequestEnd>,
    /// The farthest zone that it went to.
    #[serde(skip)]
    pub(super) farthest: Zone,
    /// Whether its tokens were counted alone.
    #[serde(skip)]
    pub(super) is_count: bool,
    /// Answers of providers, by the number of the response.
    #[serde(skip)]
    pub(super) outside: BTreeMap<u32, OutsideAnswer>,
    /// `namespace/pipeline/step` of the step of a Pipeline that sent it.
    #[serde(skip)]
    pub(super) step: Option<Arc<str>>,
    /// What engines computed for it.
    #[serde(skip)]
    pub(super) engines: EngineTotal,
    /// Whether an engine's words may quote the request, so that an error that repeats them is left out.
    #[serde(skip)]
    pub(super) quoted: bool,
}

/// An answer of a provider that has begun.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OutsideAnswer {
    /// `namespace/name` of the ModelProvider.
    pub(super) provider: String,
    /// What its model costs; none where nobody knows.
    pub(super) price: Option<ModelPrice>,
    /// Tokens of the prompt, estimated.
    pub(super) prompt_tokens: u64,
    /// What it cost, as the provider says; that counts where nobody knows the price.
    pub(super) reported_cost: Option<Money>,
    /// What it used; none where it did not complete.
    pub(super) usage: Option<Usage>,
}

/// Limits that apply to a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitsRecord {
    /// Its priority in the engine's queue.
    pub priority: i32,
    /// Most tokens of a response.
    pub max_tokens: Option<u32>,
    /// The time it may take.
    pub timeout_ms: Option<f64>,
    /// Most tokens of a response that its key allows.
    pub key_max_tokens: Option<u32>,
    /// The time its key allows.
    pub key_max_ms: Option<f64>,
    /// Requests a minute that its key allows.
    pub requests_per_minute: Option<u32>,
    /// Requests of them that were left behind it.
    pub requests_remaining: Option<u32>,
}

/// The ModelRoute that has a model's name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouteRecord {
    /// `namespace/name` of the ModelRoute.
    pub model_route: String,
    /// The name in it, maybe with `*`.
    pub pattern: String,
    /// The targets that it chose for the request, in the order in which it tried them.
    pub targets: Vec<String>,
    /// The rule that chose them; none where no rule matched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// The rules before it, and why they did not match.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mismatches: Vec<RuleMismatch>,
    /// What the rules knew of the request; none where the route has no rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<FactsRecord>,
}

/// A rule that a request did not match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RuleMismatch {
    /// Its name.
    pub rule: String,
    /// The first thing that it names and the request is not.
    pub reason: String,
}

/// What rules know of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FactsRecord {
    /// What it is for.
    pub task: Word,
    /// How complex it is, from 0 to 1.
    pub complexity: f64,
    /// What that is made of.
    pub complexity_parts: Vec<ScorePart>,
    /// Tokens of its prompt, estimated.
    pub prompt_tokens: u64,
    /// How many tools it offers.
    pub tools: usize,
}

/// A time during which no engine could take the request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HoldRecord {
    /// Which of several responses waited.
    #[serde(skip_serializing_if = "is_zero")]
    pub response: u32,
    /// `namespace/name` of the ModelDeployment it waited for.
    pub deployment: String,
    /// Why that could not answer.
    pub reason: String,
    /// When it began.
    pub from_ms: f64,
    /// When it ended; none while it lasts.
    pub until_ms: Option<f64>,
}

/// One engine that a request was sent to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AttemptRecord {
    /// Its number, from 1.
    pub number: u32,
    /// Which of several responses it is for.
    #[serde(skip_serializing_if = "is_zero")]
    pub response: u32,
    /// `namespace/name` of the ModelDeployment; empty where a provider was asked.
    pub deployment: String,
    /// The provider outside of the cluster that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<Box<ProviderRecord>>,
    /// The Pipeline that was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<Box<PipelineRecord>>,
    /// The adapter that answers; empty where the model itself does.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub adapter: String,
    /// The node of the engine.
    #[serde(with = "shared_text")]
    pub node: Arc<str>,
    /// `namespace/name` of its ShardGroup.
    #[serde(with = "shared_text")]
    pub group: Arc<str>,
    /// Incarnation of the group.
    pub epoch: i64,
    /// `ip:port` of the engine.
    #[serde(with = "shared_text")]
    pub address: Arc<str>,
    /// Replicas of the deployment, the chosen one first.
    pub candidates: Vec<EndpointScore>,
    /// Candidates that are left out.
    pub candidates_left_out: u32,
    /// Tokens of the response that the engine was given, to go on after them.
    pub resumed_after_tokens: u32,
    /// When it was sent.
    pub sent_ms: f64,
    /// When the engine had prepared the prompt.
    pub prepared_ms: Option<f64>,
    /// When it left the engine's queue.
    pub started_ms: Option<f64>,
    /// When its first text came.
    pub first_token_ms: Option<f64>,
    /// When it ended.
    pub ended_ms: Option<f64>,
    /// Tokens of the prompt, as this engine counts.
    pub prompt_tokens: Option<u32>,
    /// Tokens of it that its prefix cache had.
    pub cached_tokens: Option<u32>,
    /// What came of it; none while it runs.
    pub outcome: Option<AttemptOutcome>,
}

/// A provider that a request left for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProviderRecord {
    /// `namespace/name` of the ModelProvider.
    pub name: String,
    /// The model, as the provider names it.
    pub model: String,
    /// Where it is.
    pub zone: Word,
    /// How far from home the request might be answered.
    pub limit: Word,
    /// Who says so.
    pub limit_by: String,
}

/// A Pipeline that was run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelineRecord {
    /// Its kind and `namespace/name`.
    pub name: String,
    /// `namespace/name` of the PipelineRun.
    pub run: String,
}

/// A model of a provider that was not asked when its turn came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SkippedTarget {
    /// `namespace/name` of the ModelProvider.
    pub provider: String,
    /// The model, as the provider names it.
    pub model: String,
    /// Why, in the gateway's words.
    pub reason: String,
}

/// A replica that could have been chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EndpointScore {
    /// Its node.
    #[serde(with = "shared_text")]
    pub node: Arc<str>,
    /// `namespace/name` of its ShardGroup.
    #[serde(with = "shared_text")]
    pub group: Arc<str>,
    /// Whether it was chosen.
    pub chosen: bool,
    /// Whether it failed moments ago, and was not considered.
    pub backed_off: bool,
    /// Tokens of the prompt that it was thought to have cached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// The number by which it was compared; the lowest wins.
    pub score: Option<Score>,
}

/// A number by which replicas are compared, and what it is made of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Score {
    /// What is counted, such as `ms`.
    pub unit: Word,
    /// The number.
    pub total: f64,
    /// Its parts, in the same unit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<ScorePart>,
}

/// A part of a score.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScorePart {
    /// Its name, such as `queue`.
    pub name: Word,
    /// Its share.
    pub value: f64,
}

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AttemptOutcome {
    /// The engine answered, to the end.
    Answered,
    /// The engine was full.
    Busy {
        /// Its words.
        message: String,
    },
    /// The engine was lost.
    Lost {
        /// How.
        message: String,
        /// Tokens of the response that the client had by then.
        after_tokens: u32,
    },
    /// No engine would do better.
    Rejected {
        /// The error's class.
        code: Word,
    },
    /// The client left.
    Cancelled,
    /// Another engine, which got the request too, sent its first text before.
    Overtaken,
    /// An outcome that this release does not know.
    #[serde(other)]
    Other,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RequestEnd {
    /// The response is complete.
    Finished {
        /// OpenAI's finish reason; none where nothing was generated.
        reason: Option<Word>,
    },
    /// An error.
    Failed {
        /// Its class.
        code: Word,
        /// Its message, unless it may quote the request.
        message: Option<String>,
        /// The field that it is about.
        param: Option<String>,
    },
    /// The client disconnected, or did not read.
    ClientLeft,
    /// An outcome that this release does not know.
    #[serde(other)]
    Other,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A text that many records share.
mod shared_text {
    use std::sync::Arc;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(text: &Arc<str>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(from).map(Arc::from)
    }
}
