//! The tool formats: one table. A format is one file beside this one, and one line of `FORMATS`; its file
//! says how a block begins and ends and parses one complete block. The scan of the stream is the scanner's.

mod deepseek;
pub(crate) mod finder;
mod functionary;
mod gemma3;
mod gemma4;
mod glm45;
mod hermes;
mod invoke;
mod json;
mod kimi_k2;
mod llama3;
mod minimax_m3;
mod mistral;
mod python;
mod pythonic;
mod qwen3_coder;
mod schema;
mod solar;
mod step3;
pub(crate) mod syntax;

use self::finder::BlockEnd;
use self::syntax::CallSyntax;
use russet_wire::conversation::{Tool, ToolCall};

/// The limit of nested arrays and objects in arguments. serde_json reads 128 levels; the arguments stand in a
/// few more when they are sent on.
const MAX_NESTING: usize = 120;

/// The syntax of a family's tool calls.
#[derive(Debug)]
pub(crate) struct ToolFormat {
    /// The names of this format; the first is the one that is shown.
    pub names: &'static [&'static str],
    pub begins: &'static [BlockStart],
    /// Markers that may follow a complete call and mean nothing more.
    pub closers: &'static [&'static str],
    /// Characters that may stand between two calls.
    pub separators: &'static [char],
    /// Markers inside a block, for the list of those that must stay visible.
    pub inner: &'static [&'static str],
    /// The header of answer text in a format whose every message has one: the marker of the first block, and a
    /// name that no tool has. The prompt ends with that marker, so that an output begins behind it.
    pub text_header: Option<&'static str>,
    /// A call ends a thinking block that the model did not close.
    pub ends_reasoning: bool,
    /// How a grammar makes it write calls: the first that the vocabulary has the tokens for.
    pub syntaxes: &'static [CallSyntax],
    /// The calls of one complete block, given with its markers (the end marker may be missing). `None` when
    /// the block is not one or more valid calls of offered tools.
    pub parse: fn(&str, &[Tool]) -> Option<Vec<ToolCall>>,
}

impl PartialEq for ToolFormat {
    fn eq(&self, other: &Self) -> bool {
        self.names == other.names
    }
}

impl Eq for ToolFormat {}

/// How a block begins, and by that how it ends.
#[derive(Debug)]
pub(crate) struct BlockStart {
    pub marker: &'static str,
    /// The marker is the first character of the call itself, and counts only at the beginning of the answer.
    pub bare: bool,
    pub end: BlockEnd,
    /// The block may lack its end marker at the end of the output.
    pub open_end: bool,
}

impl BlockStart {
    const fn new(marker: &'static str, end: BlockEnd) -> Self {
        Self { marker, bare: false, end, open_end: true }
    }

    const fn bare(marker: &'static str, end: BlockEnd) -> Self {
        Self { marker, bare: true, end, open_end: false }
    }
}

/// What most formats have in common.
const BASE: ToolFormat = ToolFormat {
    names: &[],
    begins: &[],
    closers: &[],
    separators: &[],
    inner: &[],
    text_header: None,
    ends_reasoning: false,
    syntaxes: &[],
    parse: |_, _| None,
};

impl ToolFormat {
    /// What stands before answer text at the beginning of an output.
    pub(crate) fn text_name(&self) -> Option<&'static str> {
        self.text_header?.strip_prefix(self.begins.first()?.marker)
    }

    /// The markers that a detokenizer must keep.
    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let begins = self.begins.iter().filter(|begin| !begin.bare).map(|begin| begin.marker);
        let ends = self.begins.iter().filter_map(|begin| begin.end.marker());
        let mut markers: Vec<_> = begins
            .chain(ends)
            .chain(self.closers.iter().copied())
            .chain(self.inner.iter().copied())
            .collect();
        markers.sort_unstable();
        markers.dedup();
        markers.into_iter()
    }
}

/// Every format.
static FORMATS: &[&ToolFormat] = &[
    &hermes::HERMES,
    &hermes::LONGCAT,
    &hermes::INTERNLM,
    &hermes::GRANITE,
    &hermes::TOOL_CALLS,
    &hermes::NEMOTRON,
    &hermes::COHERE,
    &hermes::COMMAND_R,
    &hermes::PHI4,
    &hermes::FUNCTOOLS,
    &hermes::GIGACHAT,
    &hermes::APERTUS,
    &hermes::FUNCTIONARY,
    &functionary::FORMAT,
    &qwen3_coder::QWEN3_CODER,
    &qwen3_coder::SEED_OSS,
    &llama3::FORMAT,
    &pythonic::PYTHONIC,
    &pythonic::LFM2,
    &pythonic::OLMO3,
    &mistral::FORMAT,
    &glm45::GLM45,
    &glm45::HUNYUAN,
    &kimi_k2::FORMAT,
    &deepseek::V3,
    &deepseek::V31,
    &invoke::DEEPSEEK_V32,
    &invoke::DEEPSEEK_V4,
    &invoke::KIMI_K3,
    &invoke::MINIMAX_M2,
    &minimax_m3::FORMAT,
    &invoke::ATEM,
    &invoke::MINICPM5,
    &gemma3::FORMAT,
    &gemma4::GEMMA4,
    &gemma4::FUNCTIONGEMMA,
    &solar::FORMAT,
    &step3::FORMAT,
];

/// The format of calls that a grammar makes where the family's own cannot be.
pub(super) fn enforced() -> &'static ToolFormat {
    &hermes::HERMES
}

/// The format `name`.
pub(super) fn by_name(name: &str) -> Option<&'static ToolFormat> {
    FORMATS.iter().copied().find(|format| format.names.contains(&name))
}

#[cfg(test)]
pub(crate) fn all() -> &'static [&'static ToolFormat] {
    FORMATS
}

/// The offered tool of this name.
fn offered<'a>(tools: &'a [Tool], name: &str) -> Option<&'a Tool> {
    tools.iter().find(|tool| tool.name == name)
}

/// A block without its begin marker, and without its end marker if it has one.
fn inside<'a>(block: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let body = block.strip_prefix(begin)?;
    Some(body.strip_suffix(end).unwrap_or(body))
}

/// A name as a model writes one: not empty, one word.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| !c.is_whitespace() && !matches!(c, '<' | '>' | '"'))
}

/// The text of the JSON object in `text`, for calls outside the table (harmony).
pub(super) fn arguments_object(text: &str) -> Option<String> {
    json::object(text)
}
