//! The model architectures this release runs, by the `model_type` of config.json. The planner refuses others
//! before a node is asked, the engine implements these; a test of the engine holds the two together.

/// Every supported `model_type`.
pub const ARCHITECTURES: &[&str] = &["llama", "mistral", "qwen3"];
