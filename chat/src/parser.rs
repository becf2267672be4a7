//! From a model's streamed text to answer text, reasoning and tool calls. Pure: no IO and no tokens; the
//! caller detokenizes, and keeps the special tokens that the parser reads.
//!
//! The parser reads one character after another and keeps no state that depends on where the pieces end.
//! That is why a streamed answer and a whole one give the same parts.

mod harmony;
pub(crate) mod reasoning;
mod scanner;
mod templates;
#[cfg(test)]
mod tests;
pub(crate) mod tools;

use std::sync::Arc;

use self::harmony::HarmonyScanner;
use self::reasoning::ReasoningFormat;
use self::scanner::Scanner;
use self::tools::ToolFormat;
use russet_wire::conversation::{Tool, ToolCall};

/// The syntax of a model's output: how it writes reasoning and tool calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputFormat {
    reasoning: Option<&'static ReasoningFormat>,
    tools: Option<&'static ToolFormat>,
    harmony: bool,
}

impl OutputFormat {
    /// By what the model's chat template writes. A template that shows no syntax gives the plain format,
    /// where everything is answer text.
    pub fn of_template(source: &str) -> Self {
        let (tools, reasoning) = templates::detect(source);
        Self::default().with_tools_name(tools).with_reasoning_name(reasoning)
    }

    /// With the tool calls of the parser `name` (vLLM's `--tool-call-parser` names); `None` when there is no
    /// such parser. `openai` makes it the harmony format, which has reasoning of its own.
    pub fn tools_by_name(self, name: &str) -> Option<Self> {
        if harmony::NAMES.contains(&name) {
            return Some(Self { harmony: true, tools: None, ..self });
        }
        let tools = tools::by_name(name)?;
        Some(Self { harmony: false, tools: Some(tools), ..self })
    }

    /// With the reasoning of the parser `name` (vLLM's `--reasoning-parser` names); `None` when there is no
    /// such parser.
    pub fn reasoning_by_name(self, name: &str) -> Option<Self> {
        if harmony::NAMES.contains(&name) {
            return Some(Self { harmony: true, ..self });
        }
        let reasoning = reasoning::by_name(name)?;
        Some(Self { reasoning: Some(reasoning), ..self })
    }

    /// The name of the tool format, for a status and for logs.
    pub fn tools_name(&self) -> Option<&'static str> {
        if self.harmony { Some(harmony::NAMES[0]) } else { self.tools.map(|format| format.names[0]) }
    }

    /// The name of the reasoning format, for a status and for logs.
    pub fn reasoning_name(&self) -> Option<&'static str> {
        if self.harmony { Some(harmony::NAMES[0]) } else { self.reasoning.map(|format| format.names[0]) }
    }

    /// How it marks thinking.
    pub(crate) fn reasoning(&self) -> Option<&'static ReasoningFormat> {
        self.reasoning
    }

    /// How it writes calls.
    pub(crate) fn tools(&self) -> Option<&'static ToolFormat> {
        self.tools
    }

    /// Whether its messages have channels.
    pub(crate) fn is_harmony(&self) -> bool {
        self.harmony
    }

    /// The text that ends thinking; `None` where the model marks none.
    pub fn thinking_end(&self) -> Option<&'static str> {
        if self.harmony { Some(harmony::THINKING_END) } else { self.reasoning.map(|reasoning| reasoning.end) }
    }

    /// The same where a grammar can make it write calls; else with calls in JSON between tags.
    #[must_use]
    pub fn with_enforced_calls(&self) -> Self {
        let has_syntax = self.harmony || self.tools.is_some_and(|tools| !tools.syntaxes.is_empty());
        if has_syntax { self.clone() } else { Self { tools: Some(tools::enforced()), ..self.clone() } }
    }

    /// All that it reads, with or without calls of tools: special tokens of a vocabulary, and plain text.
    pub(crate) fn markers(&self, calls: bool) -> Vec<&'static str> {
        if self.harmony {
            return harmony::MARKERS.to_vec();
        }
        let calls = self.tools.filter(|_| calls).into_iter().flat_map(ToolFormat::markers);
        self.reasoning.into_iter().flat_map(ReasoningFormat::markers).chain(calls).collect()
    }

    fn with_tools_name(self, name: Option<&str>) -> Self {
        match name {
            Some(name) => self.clone().tools_by_name(name).unwrap_or(self),
            None => self,
        }
    }

    fn with_reasoning_name(self, name: Option<&str>) -> Self {
        match name {
            Some(name) => self.clone().reasoning_by_name(name).unwrap_or(self),
            None => self,
        }
    }
}

/// Whether the rendered prompt ends inside a thinking block that the template opened.
pub fn opens_reasoning(format: &OutputFormat, prompt: &str) -> bool {
    !format.harmony && format.reasoning.is_some_and(|reasoning| prompt.trim_end().ends_with(reasoning.begin))
}

/// A part of a model's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Answer text.
    Text(String),
    /// Text of a thinking block.
    Reasoning(String),
    /// One complete call of an offered tool.
    ToolCall(ToolCall),
}

/// Reads one answer of a model, piece by piece.
#[derive(Clone, Debug)]
pub struct OutputParser {
    scanner: AnyScanner,
    /// What it must see written out, in full.
    markers: Arc<[&'static str]>,
}

#[derive(Clone, Debug)]
enum AnyScanner {
    Marked(Box<Scanner>),
    Harmony(Box<HarmonyScanner>),
}

impl OutputParser {
    /// `in_reasoning`: the prompt ended inside a thinking block (see [`opens_reasoning`]). `tools`: those of
    /// the request; when there are none, calls are not parsed and the text stays text.
    pub fn new(format: &OutputFormat, tools: Arc<[Tool]>, in_reasoning: bool) -> Self {
        let OutputFormat { reasoning, tools: calls, harmony } = *format;
        let markers = format.markers(!tools.is_empty()).into();
        let scanner = if harmony {
            AnyScanner::Harmony(Box::new(HarmonyScanner::new(tools)))
        } else {
            AnyScanner::Marked(Box::new(Scanner::new(reasoning, calls, tools, in_reasoning)))
        };
        Self { scanner, markers }
    }

    /// Whether it must see a special token written out. All others are no part of the text.
    pub fn reads(&self, special_token: &str) -> bool {
        self.markers.contains(&special_token)
    }

    /// Whether the text so far ends inside a thinking block.
    pub fn in_reasoning(&self) -> bool {
        match &self.scanner {
            AnyScanner::Marked(scanner) => scanner.in_reasoning(),
            AnyScanner::Harmony(scanner) => scanner.in_reasoning(),
        }
    }

    /// Takes the next piece of text. Markers may be split anywhere between pieces.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let mut parts = PartList::default();
        match &mut self.scanner {
            AnyScanner::Marked(scanner) => text.chars().for_each(|c| scanner.step(c, &mut parts)),
            AnyScanner::Harmony(scanner) => text.chars().for_each(|c| scanner.step(c, &mut parts)),
        }
        parts.0
    }

    /// The model ended its turn, or was cut off: gives what was held back.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = PartList::default();
        match &mut self.scanner {
            AnyScanner::Marked(scanner) => scanner.finish(&mut parts),
            AnyScanner::Harmony(scanner) => scanner.finish(&mut parts),
        }
        parts.0
    }
}

/// The parts of one push; neighbours of the same kind are one part.
#[derive(Default)]
struct PartList(Vec<Part>);

impl PartList {
    fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Text(last)) => last.push_str(text),
            _ => self.0.push(Part::Text(text.to_owned())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Reasoning(last)) => last.push_str(text),
            _ => self.0.push(Part::Reasoning(text.to_owned())),
        }
    }

    fn calls(&mut self, calls: Vec<ToolCall>) {
        self.0.extend(calls.into_iter().map(Part::ToolCall));
    }
}
