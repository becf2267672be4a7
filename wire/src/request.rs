//! A generation request, free of any client dialect. The gateway's dialects produce it, the
//! engine consumes it; HTTP and gRPC stay outside.

use serde::{Deserialize, Serialize};

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; the chat template decides what it knows.
    pub role: String,
    /// The text of the turn; dialects join text parts before they come here.
    pub content: String,
}

/// How the next token is chosen from the logits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 means greedy: always the most probable token.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 keeps everything.
    pub top_p: f32,
    /// Number of most probable tokens kept; 0 keeps everything.
    pub top_k: u32,
    /// Tokens less probable than this share of the best one are dropped; 0 keeps everything.
    pub min_p: f32,
    /// Makes sampling repeatable for one request; drawn by the gateway when a client names none, so that another
    /// engine can go on with the same one.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: None }
    }
}

/// Everything rank 0 needs to answer one chat turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerationRequest {
    /// Unique per request; appears in logs of gateway and engine.
    pub id: String,
    /// The conversation, oldest first.
    pub messages: Vec<Message>,
    /// Most tokens to generate; absent means whatever the context still holds.
    pub max_tokens: Option<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Bans the end-of-sequence tokens, so that the answer runs to `max_tokens`.
    pub ignore_eos: bool,
    /// Tokens of the answer that its caller was told already, by an engine that was lost: the answer goes on after
    /// them, and everything else here means the whole of it. Empty for an answer that begins.
    pub emitted: Vec<u32>,
    /// Who is answered first where not all can be: higher first, 0 as a rule.
    pub priority: i32,
    /// How long the caller still waits for the whole answer; absent means as long as it takes.
    pub deadline_milliseconds: Option<u64>,
}
