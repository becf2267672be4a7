//! Conversations as text: the prompt that a model's chat template makes of one, and the answer, reasoning and calls of
//! tools in what the model writes. Pure functions of a model's files and a request; not here: tokens, weights and the
//! dialects of clients.

pub mod parser;
pub mod template;
