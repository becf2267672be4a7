//! A generation request, independent of any client dialect. The gateway's dialects produce it, the
//! engine consumes it; HTTP and gRPC stay outside.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::conversation::{Message, Tool, ToolChoice};
use crate::prefix_mark::PrefixMark;

/// Sampling parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 means greedy: always the most probable token.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 disables it.
    pub top_p: f32,
    /// Number of most probable tokens to sample from; 0 disables it.
    pub top_k: u32,
    /// Tokens less probable than this share of the best one are dropped; 0 disables it.
    pub min_p: f32,
    /// Divides the logits of tokens that are in the prompt or the response, where they are positive, and multiplies them
    /// where not; 1 changes nothing.
    #[serde(default = "one")]
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that are in the response; 0 changes nothing.
    #[serde(default)]
    pub presence_penalty: f32,
    /// The same for each time that they are in it.
    #[serde(default)]
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    #[serde(default)]
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens that are less surprising or more surprising than the distribution's entropy are dropped, down to this mass in
    /// (0, 1]; 1 disables it.
    #[serde(default = "one")]
    pub typical_p: f32,
    /// How often the most probable tokens are dropped of those above `xtc_threshold`, all but the last of them; 0 disables
    /// it.
    #[serde(default)]
    pub xtc_probability: f32,
    /// The probability that counts as high.
    #[serde(default = "xtc_threshold")]
    pub xtc_threshold: f32,
    /// The penalty of repeated runs of tokens, if there is one.
    #[serde(default)]
    pub dry: Option<DrySampling>,
    /// Tokens of the response before an end token or a stop may end it.
    #[serde(default)]
    pub min_tokens: u32,
    /// Makes sampling reproducible for one request. The gateway draws it when a client sends none, so that
    /// another engine can resume with the same one.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: xtc_threshold(),
            dry: None,
            min_tokens: 0,
            seed: None,
        }
    }
}

fn one() -> f32 {
    1.0
}

fn xtc_threshold() -> f32 {
    0.1
}

/// DRY, "don't repeat yourself": a token that would make a run of tokens longer that was there before is penalised,
/// exponentially by the length of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrySampling {
    /// The penalty of a run of `allowed_length`.
    pub multiplier: f32,
    /// By what each further token multiplies it.
    pub base: f32,
    /// Runs of fewer tokens are free.
    pub allowed_length: u32,
    /// How many of the last tokens are looked at; 0 is all of them.
    pub last_tokens: u32,
    /// No run goes on over a token with one of these texts.
    pub sequence_breakers: Vec<String>,
}

impl Default for DrySampling {
    /// The values of llama.cpp and text-generation-webui.
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            last_tokens: 0,
            sequence_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
        }
    }
}

/// What the text of a response has to be, after its thinking.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StructuredOutput {
    /// Any JSON object.
    JsonObject,
    /// JSON text of the JSON Schema that it meets.
    JsonSchema(String),
    /// A regular expression, of all of it.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's variant of Lark.
    Grammar(String),
}

impl StructuredOutput {
    /// All its texts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (one, all): (Option<&String>, &[String]) = match self {
            Self::JsonObject => (None, &[]),
            Self::JsonSchema(text) | Self::Regex(text) | Self::Grammar(text) => (Some(text), &[]),
            Self::Choice(texts) => (None, texts),
        };
        one.into_iter().chain(all).map(String::as_str)
    }

    /// Bytes of its texts.
    pub fn bytes(&self) -> usize {
        self.texts().map(str::len).sum()
    }
}

/// A prompt that no chat template writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RawPrompt {
    /// Text, in which special tokens may be spelled.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

impl RawPrompt {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => size_of_val(tokens.as_slice()),
        }
    }
}

/// What becomes of a conversation that does not fit into the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextOverflow {
    /// It is refused.
    #[default]
    Refuse,
    /// Its oldest turns are left out, system messages excepted.
    Shift,
}

/// All inputs of rank 0 for one response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerationRequest {
    /// Unique per request; appears in logs of gateway and engine.
    pub id: String,
    /// The conversation, oldest first; empty where there is a raw prompt.
    pub messages: Vec<Message>,
    /// What the model continues, in place of a conversation.
    #[serde(default)]
    pub raw_prompt: Option<RawPrompt>,
    /// How many tokens the prompt keeps, its last ones; absent means all.
    #[serde(default)]
    pub truncate_prompt_tokens: Option<u32>,
    /// What becomes of a conversation that is too long.
    #[serde(default)]
    pub context_overflow: ContextOverflow,
    /// Tools that the model may call. Without any, the response is not searched for calls.
    #[serde(default)]
    pub tools: Vec<Tool>,
    /// Whether the response ends with its first call of a tool.
    #[serde(default)]
    pub single_tool_call: bool,
    /// Whether the model has to call tools.
    #[serde(default)]
    pub tool_choice: ToolChoice,
    /// What the text has to be.
    #[serde(default)]
    pub structured_output: Option<StructuredOutput>,
    /// Maximum tokens of thinking; absent means no limit of its own.
    #[serde(default)]
    pub thinking_budget: Option<u32>,
    /// Whether log-probabilities are told, and of how many of the most probable tokens besides the sampled one.
    #[serde(default)]
    pub logprobs: Option<u32>,
    /// Whether the tokens of the prompt are told before the response. With `logprobs`, those of an end token are told too:
    /// clients count the tokens of both.
    #[serde(default)]
    pub echo: bool,
    /// Whether they are told with log-probabilities, and with those of how many of the most probable tokens. All of the
    /// prompt is computed then, whatever is cached of it.
    #[serde(default)]
    pub prompt_logprobs: Option<u32>,
    /// JSON text of an object: variables of the chat template besides the conversation, such as `enable_thinking`. They
    /// come before those of the deployment. Empty means none.
    #[serde(default)]
    pub template_arguments: String,
    /// Whether the response continues the last message, an assistant's, in place of a new one.
    #[serde(default)]
    pub continue_final_message: bool,
    /// Maximum tokens to generate; absent means the rest of the context. 0 only where the prompt is told.
    pub max_tokens: Option<u32>,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Stop strings; they are not part of the response.
    pub stop: Vec<String>,
    /// Tokens that end the response like an end token.
    #[serde(default)]
    pub stop_token_ids: Vec<u32>,
    /// Bans the end-of-sequence tokens, so that the response runs to `max_tokens`.
    pub ignore_eos: bool,
    /// Tokens that a lost engine has emitted to the client: the response resumes after them, and all other
    /// fields apply to the whole response. Empty for a new response.
    pub emitted: Vec<u32>,
    /// Scheduling priority: higher first, default 0.
    pub priority: i32,
    /// Remaining time for the whole response; absent means unlimited.
    pub deadline_milliseconds: Option<u64>,
    /// Requests share cached prefixes only with requests of the same salt, as in vLLM. Empty is a salt too: that of
    /// gateways of a release without salts.
    #[serde(default)]
    pub cache_salt: String,
    /// Name of the adapter that answers; empty means the model itself.
    #[serde(default)]
    pub adapter: String,
    /// Points of the prompt that its gateway knows again, in order; the last one is its end. The engine tells gateways
    /// which of its cached blocks end there.
    #[serde(default)]
    pub prefix_marks: Vec<PrefixMark>,
}

impl GenerationRequest {
    /// Whether the tokens of the prompt are told.
    pub fn tells_prompt(&self) -> bool {
        self.echo || self.prompt_logprobs.is_some()
    }
}
