//! Pipeline: steps that a gateway does one after the other, each with what the steps before it made: calls of models, of
//! listed addresses, and vectors, some of them only once a person approved. A PipelineRun runs it.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{LocalReference, Zone};

/// Most steps of a Pipeline.
pub const MAX_PIPELINE_STEPS: usize = 64;
/// Most values that a step is done for.
pub const MAX_STEP_ITEMS: usize = 100;

/// Steps that are done one after the other. Texts may refer to what is there: `$(parameters.NAME)`,
/// `$(steps.NAME.output)` and what is in it, such as `$(steps.review.output.score)`, with `forEach` also `$(item)` and
/// `$(index)`, and `$(run.name)`. `$$(` is a plain `$(`.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Pipeline",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    shortname = "ppl",
    category = "russet",
    printcolumn(name = "Steps", type_ = "string", json_path = ".spec.steps[*].name"),
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.zone"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct PipelineSpec {
    /// What a run is given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub parameters: Vec<PipelineParameter>,
    /// The steps, in their order.
    #[schemars(length(min = 1, max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub steps: Vec<PipelineStep>,
    /// How far from home anything of a run may go. Labels `russet.dev/zone` of the AccessKey and of its namespace, and the
    /// ModelRoutes of its models can only narrow it.
    #[serde(default)]
    pub zone: Zone,
}

/// Something that a run is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PipelineParameter {
    /// Its name.
    #[schemars(length(max = 63), regex(pattern = r"^[a-z][a-z0-9_]{0,62}$"))]
    pub name: String,
    /// What it is.
    #[serde(default, rename = "type")]
    pub kind: ParameterType,
    /// Its value in runs that give none. Absent: every run must.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65536))]
    pub default: Option<String>,
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ParameterType {
    /// A text.
    #[default]
    Text,
    /// The id of a file that the run's AccessKey keeps at the gateway (`/v1/files`); the text of the file takes its place.
    File,
    /// A value from a newer release; such a Pipeline does not run.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// One step. It does one thing, of `chat`, `embed` and `http`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "[has(self.chat), has(self.embed), has(self.http)].exists_one(does, does)",
     "message": "a step does one thing: set one of chat, embed and http"},
]))]
pub struct PipelineStep {
    /// Its name, by which later steps refer to its output.
    #[schemars(length(max = 63), regex(pattern = r"^[a-z][a-z0-9_]{0,62}$"))]
    pub name: String,
    /// Conditions that must all hold; the step is skipped otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub when: Vec<StepCondition>,
    /// A reference to a list, such as `$(steps.plan.output.chapters)`: the step is done for each of its values, of which there
    /// may be 100, and its output is the list of their outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub for_each: Option<String>,
    /// How many of them are done at once.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 32))]
    pub parallel: u32,
    /// A model answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<ChatStep>,
    /// A model makes vectors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embed: Option<EmbedStep>,
    /// An address is called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpStep>,
    /// JSON Schema of the output, which is a JSON value then: a model of this cluster can write nothing else, that of a provider is tried again, and an address fails the
    /// step.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "free_object")]
    pub schema: Map<String, Value>,
    /// A person must approve what the step is about to do, to the letter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<StepApproval>,
    /// How often it is tried again where that may help: where an address is out of order or an output has not its schema.
    #[serde(default = "retries")]
    #[schemars(range(min = 0, max = 10))]
    pub retries: u32,
    /// How long it may take for one value, with all its tries and while it waits for a model. Waiting for an approval does not
    /// count.
    #[serde(default = "timeout_seconds")]
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_seconds: u32,
    /// What is called to undo the step where a later one fails for good, last step first; `$(item)` and its output,
    /// `$(output)`, are there. Only what was done is undone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compensate: Option<HttpStep>,
}

/// Two numbers, or a text and those that it may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepCondition {
    /// What is looked at, such as `$(steps.review.output.score)`.
    #[schemars(length(min = 1, max = 512))]
    pub input: String,
    /// How it is compared.
    pub operator: ConditionOperator,
    /// With what; `Gt` and `Lt` take one number.
    #[schemars(length(min = 1, max = 64), inner(length(max = 512)))]
    pub values: Vec<String>,
}

/// A comparison, as in node affinities of Kubernetes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionOperator {
    /// It is one of the values.
    #[default]
    In,
    /// It is none of them.
    NotIn,
    /// It is a number greater than the value.
    Gt,
    /// It is a number less than the value.
    Lt,
    /// A value from a newer release; such a Pipeline does not run.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A question to a model. Its answer is the output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChatStep {
    /// The model's name, as clients write it.
    #[schemars(length(min = 1, max = 253))]
    pub model: String,
    /// What the model is told first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65536))]
    pub system: Option<String>,
    /// The question.
    #[schemars(length(min = 1, max = 65536))]
    pub prompt: String,
    /// Most tokens of the answer. Absent: as many as the AccessKey and the context allow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub max_tokens: Option<u32>,
    /// The temperature in hundredths. Absent: the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 200))]
    pub temperature_percent: Option<u32>,
    /// Seed of the sampling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub seed: Option<u32>,
}

/// Texts for which a model makes vectors. The output is a list of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EmbedStep {
    /// The model's name, as clients write it.
    #[schemars(length(min = 1, max = 253))]
    pub model: String,
    /// A text, or a reference to a list of texts.
    #[schemars(length(min = 1, max = 65536))]
    pub input: String,
}

/// A call of a listed address. Its output is the body of the response; a status of 4xx fails the step. It has the header
/// `Idempotency-Key`, the same at each try, so that the address can tell a second one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpStep {
    /// The HTTPEndpoint, in the same namespace.
    pub endpoint_ref: LocalReference,
    /// What follows its URL, such as `/messages?list=home`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub path: String,
    /// The method.
    #[serde(default)]
    pub method: HttpMethod,
    /// Further headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub headers: BTreeMap<String, String>,
    /// The body as a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65536))]
    pub body: Option<String>,
    /// The body as a JSON object. References are replaced in its texts; a text that is one reference becomes the value itself.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "free_object")]
    pub json: Map<String, Value>,
}

/// A method of HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HttpMethod {
    /// POST.
    #[default]
    #[serde(rename = "POST")]
    Post,
    /// GET.
    #[serde(rename = "GET")]
    Get,
    /// PUT.
    #[serde(rename = "PUT")]
    Put,
    /// PATCH.
    #[serde(rename = "PATCH")]
    Patch,
    /// DELETE.
    #[serde(rename = "DELETE")]
    Delete,
    /// A value from a newer release; such a Pipeline does not run.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl HttpMethod {
    /// Its name in HTTP; none of a newer release's.
    pub fn as_str(self) -> Option<&'static str> {
        match self {
            Self::Post => Some("POST"),
            Self::Get => Some("GET"),
            Self::Put => Some("PUT"),
            Self::Patch => Some("PATCH"),
            Self::Delete => Some("DELETE"),
            Self::Unknown => None,
        }
    }
}

/// An approval that a step waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepApproval {
    /// The question to the person, as it is: nothing that a model wrote is in it.
    #[schemars(length(min = 1, max = 1024))]
    pub message: String,
    /// How long the person has; the run fails then, and can be resumed.
    #[serde(default = "week_seconds")]
    #[schemars(range(min = 60, max = 2_592_000))]
    pub expires_seconds: u32,
}

fn free_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

fn one() -> u32 {
    1
}

fn retries() -> u32 {
    2
}

fn timeout_seconds() -> u32 {
    3600
}

fn week_seconds() -> u32 {
    7 * 86_400
}
