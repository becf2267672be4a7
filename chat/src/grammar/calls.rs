//! The grammar of a family's calls of tools.

use russet_wire::conversation::{Tool, ToolChoice};
use serde_json::{Map, Value, json};

use super::frame::{framed, harmony_answer};
use super::lark::{LarkRules, quoted, regex};
use super::matcher::GrammarMatcher;
use super::output::{OutputRules, json_schema};
use super::{GrammarError, Vocabulary};
use crate::parser::tools::BlockStart;
use crate::parser::tools::syntax::{CallSyntax, HARMONY};

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
        let in_tags = self.syntax(&LarkRules::new(vocabulary)).call.contains("$PARAMETERS");
        for (tool, schema) in &mut self.tools {
            let what = format!("the schema of tool {:?}", tool.name);
            match check(schema, in_tags, vocabulary, &what) {
                Ok(()) => {}
                Err(error) if tool.strict => return Err(error),
                Err(_) => *schema = json!({"type": "object"}),
            }
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
        let harmony = format.is_harmony();
        let body = match text {
            _ if self.required => self.calls(&syntax, 0, rules),
            Some(text) => {
                let text = if harmony { harmony_answer(&text, rules) } else { text };
                format!("({text} | {})", self.calls(&syntax, 0, rules))
            }
            None if harmony => {
                let any = harmony_answer(&rules.without(&[]), rules);
                format!("({any} | {})", self.calls(&syntax, 0, rules))
            }
            None => self.text_before_calls(&syntax, rules),
        };
        framed(format, in_reasoning, &body, rules)
    }

    fn syntax(&self, rules: &LarkRules<'_>) -> CallSyntax {
        let fits = |syntax: &&CallSyntax| syntax.needs.is_none_or(|token| rules.has_special(token));
        let first = self.syntaxes.iter().find(fits).or(self.syntaxes.last());
        first.copied().unwrap_or(HARMONY)
    }

    /// Text without a call, or calls after text.
    fn text_before_calls(&self, syntax: &CallSyntax, rules: &mut LarkRules<'_>) -> String {
        let lead = if syntax.open.is_empty() { syntax.call } else { syntax.open };
        let marker = self.begins.iter().find(|begin| lead.starts_with(begin.marker));
        match marker {
            Some(BlockStart { marker, bare: false, .. }) => {
                let markers: Vec<&str> =
                    self.begins.iter().filter(|begin| !begin.bare).map(|begin| begin.marker).collect();
                let text = rules.without(&markers);
                let before = rules.until(marker);
                let calls = self.calls(syntax, marker.len(), rules);
                format!("({text} | {before} {calls})")
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
        let CallSyntax { open, separator, close, .. } = *syntax;
        let (open, of_call) = if open.is_empty() { ("", from) } else { (&open[from..], 0) };
        let open = rules.marker(open);
        let first = self.one_of(syntax, of_call, rules);
        let more = match separator {
            Some(separator) if !self.single => {
                let any = if of_call == 0 { first.clone() } else { self.one_of(syntax, 0, rules) };
                format!("({} {any})*", places(parts(separator, &[]), rules))
            }
            Some(_) | None => String::new(),
        };
        format!("{open} {first} {more} {}", rules.marker(close))
    }

    fn one_of(&self, syntax: &CallSyntax, from: usize, rules: &mut LarkRules<'_>) -> String {
        let calls: Vec<String> =
            self.tools.iter().map(|(tool, schema)| call(syntax, from, &tool.name, schema, rules)).collect();
        rules.rule("", &calls.join(" | "))
    }
}

/// Whether a schema of arguments can be enforced.
fn check(schema: &Value, in_tags: bool, vocabulary: &Vocabulary, what: &str) -> Result<(), GrammarError> {
    let refused = |reason: String| Err(GrammarError::Refused { what: what.to_owned(), reason });
    if schema["type"] != "object" {
        return refused(format!("arguments are an object, not {}", schema["type"]));
    }
    // Text in tags is not JSON, of which the library knows the keywords.
    for (key, property) in schema["properties"].as_object().filter(|_| in_tags).into_iter().flatten() {
        let keyword = ["pattern", "format"].into_iter().find(|keyword| property.get(keyword).is_some());
        if let Some(keyword) = keyword.filter(|_| is_text(property)) {
            return refused(format!("{keyword} of {key:?}, which this model writes as text, not as JSON"));
        }
    }
    let mut rules = LarkRules::new(vocabulary);
    let expression = rules.grammar(json_schema(schema.clone()));
    GrammarMatcher::new(vocabulary, rules.start(&expression), what).map(|_| ())
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
            Part::Place("$ARGUMENTS") => rules.grammar(json_schema(schema.clone())),
            Part::Place("$PARAMETERS") => parameters_in_tags(syntax.parameter, schema, rules),
            place @ Part::Place(_) => places(vec![place], rules),
        });
    }
    written.join(" ")
}

/// The parts of a template without arguments; an expression.
fn places(parts: Vec<Part>, rules: &LarkRules<'_>) -> String {
    let expressions = parts.into_iter().map(|part| match part {
        Part::Text(text) => rules.marker(&text),
        Part::Place("$INDEX") => regex("[0-9]{1,3}"),
        Part::Place("$LINE") => "(\"\\n\")?".to_owned(),
        Part::Place(_) => regex("[a-zA-Z0-9]{9}"),
    });
    expressions.collect::<Vec<_>>().join(" ")
}

/// Arguments in tags, in the order of the schema; those that are not required may be left out.
fn parameters_in_tags(tag: &str, schema: &Value, rules: &mut LarkRules<'_>) -> String {
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let is_required =
        |key: &str| schema["required"].as_array().is_some_and(|keys| keys.iter().any(|k| k == key));
    let mut written = Vec::new();
    for (key, property) in properties {
        let is_text = is_text(property);
        let string = if is_text { "true" } else { "false" };
        let (before, after) = tag.split_once("$VALUE").unwrap_or((tag, ""));
        let texts = [("$KEY", key.as_str()), ("$STRING", string)];
        let before = places(parts(before, &texts), rules);
        let mut after = parts(after, &texts);
        // What ends a text is the marker behind it.
        let end = match after.first_mut() {
            Some(Part::Text(end)) => std::mem::take(end),
            Some(Part::Place(_)) | None => String::new(),
        };
        let after = places(after, rules);
        let value = match (is_text, choices(property)) {
            (true, Some(texts)) => {
                let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
                format!("({}) {}", texts.join(" | "), rules.marker(&end))
            }
            (true, None) => rules.text_until(length(property), &end),
            (false, _) => {
                let value = rules.grammar(json_schema(with_definitions(property, schema)));
                format!("{value} {}", rules.marker(&end))
            }
        };
        let one = rules.rule("", &format!("{before} {value} {after}"));
        written.push(if is_required(key) { one } else { format!("({one})?") });
    }
    written.join(" ")
}

/// Whether a value of this schema is written as its text, without quotes.
fn is_text(schema: &Value) -> bool {
    match &schema["type"] {
        Value::String(kind) => kind == "string",
        Value::Array(kinds) => kinds.iter().any(|kind| kind == "string"),
        _ => match (choices(schema), schema.as_object()) {
            (Some(_), _) => true,
            (None, Some(fields)) => !["anyOf", "oneOf", "allOf", "$ref", "enum", "const"]
                .iter()
                .any(|key| fields.contains_key(*key)),
            (None, None) => true,
        },
    }
}

/// How many characters a text has.
fn length(schema: &Value) -> (u64, Option<u64>) {
    (schema["minLength"].as_u64().unwrap_or_default(), schema["maxLength"].as_u64())
}

/// The texts of an `enum` or `const` of nothing else.
fn choices(schema: &Value) -> Option<Vec<String>> {
    let values = match (&schema["enum"], &schema["const"]) {
        (Value::Array(values), _) => values.clone(),
        (_, value @ Value::String(_)) => vec![value.clone()],
        _ => return None,
    };
    let texts: Option<Vec<String>> = values.iter().map(|value| value.as_str().map(str::to_owned)).collect();
    texts.filter(|texts| !texts.is_empty() && texts.iter().all(|text| !text.is_empty()))
}

/// A part of a schema, with what its references name.
fn with_definitions(property: &Value, schema: &Value) -> Value {
    let mut property = property.clone();
    if let Some(fields) = property.as_object_mut() {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = schema.get(key) {
                fields.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    property
}

enum Part {
    Text(String),
    /// A placeholder that is no text.
    Place(&'static str),
}

/// A template in its parts, with these placeholders replaced by text.
fn parts(template: &str, texts: &[(&str, &str)]) -> Vec<Part> {
    const PLACES: [&str; 5] = ["$ARGUMENTS", "$PARAMETERS", "$INDEX", "$ID", "$LINE"];
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(first) = rest.chars().next() {
        if let Some((place, value)) = texts.iter().find(|(place, _)| rest.starts_with(place)) {
            text.push_str(value);
            rest = &rest[place.len()..];
        } else if let Some(place) = PLACES.iter().find(|place| rest.starts_with(**place)) {
            parts.push(Part::Text(std::mem::take(&mut text)));
            parts.push(Part::Place(place));
            rest = &rest[place.len()..];
        } else {
            text.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    parts.push(Part::Text(text));
    parts
}
