//! The grammar of a family's calls of tools.

use russet_wire::conversation::{Tool, ToolChoice};
use serde_json::{Value, json};

use super::frame::{answer, answer_end, framed};
use super::lark::LarkRules;
use super::matcher::GrammarMatcher;
use super::one_of::as_unions;
use super::output::OutputRules;
use super::template::{Part, parts, places};
use super::{GrammarError, Vocabulary, elements, literals, parameters};
use crate::parser::OutputFormat;
use crate::parser::tools::syntax::{ArgumentNotation, CallSyntax, HARMONY};
use crate::parser::tools::{BlockStart, ToolFormat};

/// The calls that an output may have, or has to have.
pub(super) struct CallRules<'a> {
    syntaxes: &'static [CallSyntax],
    begins: &'static [BlockStart],
    tools: Vec<(&'a Tool, Value)>,
    required: bool,
    single: bool,
}

impl<'a> CallRules<'a> {
    /// Of what a request asks for; `None` where its calls are free.
    pub(super) fn of(rules: &OutputRules<'a>) -> Result<Option<Self>, GrammarError> {
        let OutputRules { format, tools, tool_choice, single_tool_call, structured_output, .. } = *rules;
        let names = || tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>().join(", ");
        let chosen: Vec<&Tool> = match tool_choice {
            ToolChoice::Auto if tools.is_empty() => return Ok(None),
            ToolChoice::Auto if structured_output.is_none() && !tools.iter().any(|tool| tool.strict) => {
                return Ok(None);
            }
            _ if tools.is_empty() => return Err(GrammarError::NoTools),
            ToolChoice::Auto | ToolChoice::Required => tools.iter().collect(),
            ToolChoice::Named(name) => {
                let chosen: Vec<&Tool> = tools.iter().filter(|tool| tool.name == *name).collect();
                if chosen.is_empty() {
                    return Err(GrammarError::NoSuchTool { name: name.clone(), tools: names() });
                }
                chosen
            }
        };
        let (syntaxes, begins) = match format.tools() {
            _ if format.is_harmony() => (std::slice::from_ref(&HARMONY), &[][..]),
            Some(tools) if !tools.syntaxes.is_empty() => (tools.syntaxes, tools.begins),
            Some(_) | None => {
                let field = if structured_output.is_some() { "response_format" } else { "strict" };
                let format = format.tools_name().unwrap_or("plain text");
                return Err(GrammarError::NoCallSyntax { format, field });
            }
        };
        let tools = chosen.into_iter().map(|tool| (tool, parameters(tool))).collect();
        let required = *tool_choice != ToolChoice::Auto;
        Ok(Some(Self { syntaxes, begins, tools, required, single: single_tool_call }))
    }

    /// The same, where schemas that cannot be enforced and need not be are any object.
    pub(super) fn checked(mut self, vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        let syntax = self.syntax(&LarkRules::new(vocabulary));
        for (tool, schema) in &mut self.tools {
            let what = format!("the schema of tool {:?}", tool.name);
            match check(schema, &syntax, vocabulary, &what) {
                Ok(()) => {}
                Err(error) if tool.strict => return Err(error),
                Err(_) => *schema = json!({"type": "object"}),
            }
            *schema = as_unions(schema.take());
        }
        Ok(self)
    }

    /// The output: thinking, then calls, or the text that is asked for, or any text before calls; an expression.
    pub(super) fn expression(
        &self,
        text: Option<String>,
        request: &OutputRules<'_>,
        rules: &mut LarkRules<'_>,
    ) -> String {
        let OutputRules { format, in_reasoning, .. } = *request;
        let syntax = self.syntax(rules);
        let calls = |rules: &mut LarkRules<'_>| {
            let end = answer_end(format).map(|end| format!("({})?", rules.marker(end))).unwrap_or_default();
            format!("{end} {}", self.calls(&syntax, 0, rules))
        };
        let body = match text {
            _ if self.required => calls(rules),
            Some(text) => format!("({} | {})", answer(format, &text, rules), calls(rules)),
            None if format.is_harmony() => {
                let any = answer(format, &rules.without(&[]), rules);
                format!("({any} | {})", calls(rules))
            }
            None => match format.tools().and_then(ToolFormat::text_name) {
                Some(_) => self.messages(format, &syntax, rules),
                None => self.text_before_calls(&syntax, answer_end(format), rules),
            },
        };
        framed(format, in_reasoning, &body, rules)
    }

    fn syntax(&self, rules: &LarkRules<'_>) -> CallSyntax {
        let fits = |syntax: &&CallSyntax| syntax.needs.is_none_or(|token| rules.has_special(token));
        let first = self.syntaxes.iter().find(fits).or(self.syntaxes.last());
        first.copied().unwrap_or(HARMONY)
    }

    /// Messages with a header each: text without a call, calls after text, or calls.
    fn messages(&self, format: &OutputFormat, syntax: &CallSyntax, rules: &mut LarkRules<'_>) -> String {
        let marker = self.begins.first().map_or("", |begin| begin.marker);
        // Such a marker is plain text, as `>>>` is in Python's examples: only a tool's name behind it makes it a call.
        let header = |tool: &Tool| format!("{marker}{}\n", tool.name);
        let headers: Vec<String> = self.tools.iter().map(|(tool, _)| header(tool)).collect();
        let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
        let text = answer(format, &rules.without(&headers), rules);
        let arguments = syntax.call.find("$ARGUMENTS").unwrap_or_default();
        let after_text = self.tools.iter().zip(headers).map(|((tool, schema), header)| {
            format!("{} {}", rules.until(header), call(syntax, arguments, &tool.name, schema, rules))
        });
        let after_text = after_text.collect::<Vec<_>>().join(" | ");
        let after_text = rules.rule("", &after_text);
        let after_text =
            answer(format, &format!("{after_text} {}", self.further_calls(syntax, None, rules)), rules);
        format!("({text} | {after_text} | {})", self.calls(syntax, 0, rules))
    }

    /// Text without a call, or calls after text, which `end` may close.
    fn text_before_calls(&self, syntax: &CallSyntax, end: Option<&str>, rules: &mut LarkRules<'_>) -> String {
        let lead = if syntax.open.is_empty() { syntax.call } else { syntax.open };
        let marker = self.begins.iter().find(|begin| lead.starts_with(begin.marker));
        match marker {
            Some(BlockStart { marker, bare: false, .. }) => {
                let markers: Vec<&str> =
                    self.begins.iter().filter(|begin| !begin.bare).map(|begin| begin.marker).collect();
                let text = rules.without(&markers);
                let before = rules.until(marker);
                let calls = self.calls(syntax, marker.len(), rules);
                let closed = match end {
                    Some(end) => format!("| {} {}", rules.until(end), self.calls(syntax, 0, rules)),
                    None => String::new(),
                };
                format!("({text} | {before} {calls} {closed})")
            }
            // Such a call is the whole output, so it is told from text by its first character.
            _ => {
                let calls = self.calls(syntax, 0, rules);
                format!("(/[^{{\\[\\s](?s:.*)/? | {calls})")
            }
        }
    }

    /// The calls, one or more, from a byte of the first on; an expression.
    fn calls(&self, syntax: &CallSyntax, from: usize, rules: &mut LarkRules<'_>) -> String {
        let CallSyntax { open, close, .. } = *syntax;
        let (open, of_call) = if open.is_empty() { ("", from) } else { (&open[from..], 0) };
        let open = rules.marker(open);
        let first = self.one_of(syntax, of_call, rules);
        let any = if of_call == 0 { Some(first.clone()) } else { None };
        format!("{open} {first} {} {}", self.further_calls(syntax, any, rules), rules.marker(close))
    }

    /// The calls behind the first, by the rule of `any` call if there is one; an expression.
    fn further_calls(&self, syntax: &CallSyntax, any: Option<String>, rules: &mut LarkRules<'_>) -> String {
        match syntax.separator {
            Some(separator) if !self.single => {
                let any = any.unwrap_or_else(|| self.one_of(syntax, 0, rules));
                format!("({} {any})*", places(parts(separator, &[]), rules))
            }
            Some(_) | None => String::new(),
        }
    }

    fn one_of(&self, syntax: &CallSyntax, from: usize, rules: &mut LarkRules<'_>) -> String {
        let calls: Vec<String> =
            self.tools.iter().map(|(tool, schema)| call(syntax, from, &tool.name, schema, rules)).collect();
        rules.rule("", &calls.join(" | "))
    }
}

/// Whether a schema of arguments can be enforced.
fn check(
    schema: &Value,
    syntax: &CallSyntax,
    vocabulary: &Vocabulary,
    what: &str,
) -> Result<(), GrammarError> {
    let refused = |reason: String| Err(GrammarError::Refused { what: what.to_owned(), reason });
    if schema["type"] != "object" {
        return refused(format!("arguments are an object, not {}", schema["type"]));
    }
    let unwritten =
        |keyword, key| format!("{keyword} of {key:?}, which this model writes as text, not as JSON");
    match syntax.notation {
        _ if !syntax.call.contains("$PARAMETERS") => {}
        ArgumentNotation::Tags => {
            for (key, property) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(keyword) = parameters::unenforced(property, schema) {
                    return refused(unwritten(keyword, key));
                }
            }
        }
        ArgumentNotation::Elements(_) => {
            if let Some((keyword, key)) = elements::unenforced(schema, "") {
                return refused(unwritten(keyword, &key));
            }
        }
        ArgumentNotation::Literals(notation) => {
            if let Some(key) = literals::unwritable(notation, schema) {
                return refused(format!("{key:?} is no name of an argument in this model's calls"));
            }
        }
    }
    let mut rules = LarkRules::new(vocabulary);
    let expression = rules.json(schema.clone());
    GrammarMatcher::new(vocabulary, rules.start(&expression, what)?, what).map(|_| ())
}

/// The schema of a tool's arguments, always of an object.
fn parameters(tool: &Tool) -> Value {
    let schema = tool.parameters.as_deref().and_then(|text| serde_json::from_str(text).ok());
    let Some(Value::Object(mut schema)) = schema else { return json!({"type": "object"}) };
    schema.entry("type").or_insert_with(|| "object".into());
    Value::Object(schema)
}

fn call(syntax: &CallSyntax, from: usize, name: &str, schema: &Value, rules: &mut LarkRules<'_>) -> String {
    let mut written = Vec::new();
    for part in parts(&syntax.call[from..], &[("$NAME", name)]) {
        written.push(match part {
            Part::Text(text) => rules.marker(&text),
            Part::Place("$ARGUMENTS") => rules.json(schema.clone()),
            Part::Place("$PARAMETERS") => match syntax.notation {
                ArgumentNotation::Tags => parameters::in_tags(syntax.parameter, schema, rules),
                ArgumentNotation::Elements(token) => elements::arguments(token, schema, rules),
                ArgumentNotation::Literals(notation) => literals::arguments(notation, schema, rules),
            },
            place @ Part::Place(_) => places(vec![place], rules),
        });
    }
    written.join(" ")
}
