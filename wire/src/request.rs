//! A generation request, independent of any client dialect. The gateway's dialects produce it, the
//! engine consumes it; HTTP and gRPC stay outside.

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
    /// Makes sampling reproducible for one request. The gateway draws it when a client sends none, so that
    /// another engine can resume with the same one.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: None }
    }
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
