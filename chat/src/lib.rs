//! Conversations as text: the prompt that a model's chat template makes of one, the answer, reasoning and calls of tools in
//! what the model writes, and the grammars that make it write what a request asks for. Pure functions of a model's files
//! and a request; not here: tokenizers, weights and the dialects of clients.

pub mod grammar;
pub mod parser;
pub mod template;
