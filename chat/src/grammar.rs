//! Grammars of outputs: which tokens may follow, so that a response is the JSON, the calls of tools or the text that a
//! request asks for. A grammar is of the whole output, its thinking included, and knows its vocabulary's bytes. The
//! parser of `llguidance` computes the masks; what stands here says which grammar. Not here: tokenizers and sampling.

mod calls;
mod elements;
mod forms;
mod frame;
mod lark;
mod literals;
mod matcher;
mod one_of;
mod output;
mod parameters;
mod template;
mod vocabulary;

#[cfg(test)]
mod tests;

use thiserror::Error;

pub use matcher::{GrammarMatcher, TokenMask};
pub use output::OutputRules;
pub use vocabulary::{TokenText, Vocabulary};

/// Why an output cannot be constrained.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GrammarError {
    /// The schema, expression or grammar of the request is refused.
    #[error("{what} is not supported: {reason}")]
    Refused {
        /// What the request has.
        what: String,
        /// Why, by `llguidance`.
        reason: String,
    },
    /// No tool has the name that the request chooses.
    #[error("tool_choice names {name:?}, but the request has no such tool; its tools are {tools}")]
    NoSuchTool {
        /// The name.
        name: String,
        /// The names that there are.
        tools: String,
    },
    /// Calls are asked for, and there are no tools.
    #[error("tool_choice asks for calls, but the request has no tools")]
    NoTools,
    /// The way in which this family writes calls cannot be enforced.
    #[error(
        "this model writes calls as {format}, which no grammar is written for: leave out {field}; the calls that it makes are parsed all the same"
    )]
    NoCallSyntax {
        /// Name of the format.
        format: &'static str,
        /// What asks for it.
        field: &'static str,
    },
    /// The vocabulary has no bytes to constrain.
    #[error("the tokenizer of this model is of a kind whose tokens have no bytes of their own")]
    NoBytes,
    /// A token of the output is none that the grammar allows.
    #[error("the response left its grammar at token {index}: {reason}")]
    Left {
        /// Tokens before it.
        index: usize,
        /// What was expected.
        reason: String,
    },
    /// The state of the grammar became too large.
    #[error("the grammar of the response is too complex: {reason}; ask for a simpler one")]
    TooComplex {
        /// The limit that was met.
        reason: String,
    },
}
