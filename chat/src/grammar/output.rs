//! Which grammar an output has: its thinking, then the text or the calls that the request asks for.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use russet_wire::conversation::{Tool, ToolChoice};
use russet_wire::request::StructuredOutput;
use serde_json::{Value, json};

use super::calls::CallRules;
use super::frame::{answer, framed};
use super::lark::{LarkRules, quoted};
use super::matcher::GrammarMatcher;
use super::one_of::as_unions;
use super::{GrammarError, Vocabulary};
use crate::parser::OutputFormat;

/// White space between the parts of JSON, bounded: a model that knows no better would write nothing else.
const JSON_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// What a request asks of an output.
#[derive(Clone, Copy, Debug)]
pub struct OutputRules<'a> {
    /// How the model writes.
    pub format: &'a OutputFormat,
    /// Whether the prompt ends inside a thinking block.
    pub in_reasoning: bool,
    /// Tools of the request.
    pub tools: &'a [Tool],
    /// Whether they have to be called.
    pub tool_choice: &'a ToolChoice,
    /// Whether it ends with the first call.
    pub single_tool_call: bool,
    /// What its text has to be.
    pub structured_output: Option<&'a StructuredOutput>,
}

impl<'a> OutputRules<'a> {
    /// Those of a request that asks for nothing.
    pub fn free(format: &'a OutputFormat) -> Self {
        Self {
            format,
            in_reasoning: false,
            tools: &[],
            tool_choice: &ToolChoice::Auto,
            single_tool_call: false,
            structured_output: None,
        }
    }

    /// The grammar of the output; `None` where it is free.
    ///
    /// # Errors
    /// What the request asks for is not supported, or contradicts itself.
    pub fn matcher(
        &self,
        vocabulary: impl FnOnce() -> Result<Arc<Vocabulary>, GrammarError>,
    ) -> Result<Option<GrammarMatcher>, GrammarError> {
        let calls = CallRules::of(self)?;
        if calls.is_none() && self.structured_output.is_none() {
            return Ok(None);
        }
        let vocabulary = vocabulary()?;
        let what = self.what();
        let calls = calls.map(|calls| calls.checked(&vocabulary)).transpose()?;
        let grammar = self.grammar(&vocabulary, calls.as_ref())?;
        GrammarMatcher::new(&vocabulary, grammar, what).map(Some)
    }

    /// What the request has, for errors.
    fn what(&self) -> &'static str {
        match self.structured_output {
            Some(StructuredOutput::JsonObject | StructuredOutput::JsonSchema(_)) => "the JSON Schema",
            Some(StructuredOutput::Regex(_)) => "the regular expression",
            Some(StructuredOutput::Choice(_)) => "the choice",
            Some(StructuredOutput::Grammar(_)) => "the grammar",
            None => "the schema of the tools",
        }
    }

    fn grammar(
        &self,
        vocabulary: &Vocabulary,
        calls: Option<&CallRules<'_>>,
    ) -> Result<TopLevelGrammar, GrammarError> {
        let mut rules = LarkRules::new(vocabulary);
        let text = self.structured_output.map(|output| structured(output, &mut rules)).transpose()?;
        let expression = match calls {
            None => {
                let text = answer(self.format, &text.unwrap_or_default(), &rules);
                framed(self.format, self.in_reasoning, &text, &mut rules)
            }
            Some(calls) => calls.expression(text, self, &mut rules),
        };
        rules.start(&expression, self.what())
    }
}

/// The text that a request asks for; an expression.
fn structured(output: &StructuredOutput, rules: &mut LarkRules<'_>) -> Result<String, GrammarError> {
    let refused = |what: &str, reason: String| GrammarError::Refused { what: what.to_owned(), reason };
    Ok(match output {
        StructuredOutput::JsonObject => rules.grammar(json_schema(json!({"type": "object"}))),
        StructuredOutput::JsonSchema(schema) => {
            let schema = serde_json::from_str(schema)
                .map_err(|error| refused("the JSON Schema", format!("it is no JSON: {error}")))?;
            rules.grammar(json_schema(schema))
        }
        StructuredOutput::Regex(pattern) => rules.grammar(GrammarWithLexer::from_regex(pattern)),
        StructuredOutput::Choice(texts) => {
            if texts.is_empty() || texts.iter().any(String::is_empty) {
                return Err(refused("the choice", "it needs texts, none of them empty".to_owned()));
            }
            let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
            format!("({})", texts.join(" | "))
        }
        StructuredOutput::Grammar(grammar) => rules.grammar(GrammarWithLexer::from_lark(grammar.clone())),
    })
}

/// JSON of a schema, with bounded white space.
pub(super) fn json_schema(schema: Value) -> GrammarWithLexer {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        schema => as_unions(schema),
    };
    if let Some(fields) = schema.as_object_mut() {
        fields.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
    }
    GrammarWithLexer::from_json_schema(schema)
}
