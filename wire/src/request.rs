//! A generation request, independent of any client dialect. The gateway's dialects produce it, the
//! engine consumes it; HTTP and gRPC stay outside.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::conversation::{Message, Tool};

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
            min_tokens: 0,
            seed: None,
        }
    }
}

fn one() -> f32 {
    1.0
}

/// All inputs of rank 0 for one chat completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerationRequest {
    /// Unique per request; appears in logs of gateway and engine.
    pub id: String,
    /// The conversation, oldest first.
    pub messages: Vec<Message>,
    /// Tools that the model may call. Without any, the response is not searched for calls.
    #[serde(default)]
    pub tools: Vec<Tool>,
    /// Whether the response ends with its first call of a tool.
    #[serde(default)]
    pub single_tool_call: bool,
    /// JSON text of an object: variables of the chat template besides the conversation, such as `enable_thinking`. They
    /// come before those of the deployment. Empty means none.
    #[serde(default)]
    pub template_arguments: String,
    /// Whether the response continues the last message, an assistant's, in place of a new one.
    #[serde(default)]
    pub continue_final_message: bool,
    /// Maximum tokens to generate; absent means the rest of the context.
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
}
