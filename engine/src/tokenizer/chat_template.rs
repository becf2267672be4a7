//! A model's chat template, rendered in a sandbox: a template is untrusted data, so it has no file access,
//! and its steps, call depth and output are limited.
//!
//! The sandbox cannot bound the memory of a single expression: a template that doubles a text in a loop can
//! make the process run out of memory. That costs the rank, which is disposable.

use std::io::{self, Write};

use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use russet_wire::request::Message;
use serde::Serialize;
use thiserror::Error as ThisError;

/// Maximum steps of a template. Real templates take some tens per message; a conversation of ten thousand
/// messages stays below.
const FUEL: u64 = 5_000_000;
/// Maximum call depth in a template; real ones call a macro within a macro.
const MAX_DEPTH: usize = 100;
/// Maximum bytes of a rendered prompt: more than the text of the longest context of any model.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// A template that cannot be used.
#[derive(Debug, ThisError, PartialEq, Eq)]
pub enum TemplateError {
    /// Invalid template syntax.
    #[error("the chat template does not parse: {0}; fix the model's chat_template")]
    Syntax(String),
    /// The template refused this conversation.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// Too many steps.
    #[error(
        "the chat template took more than {FUEL} steps; shorten the conversation, or fix the template if even a short one fails"
    )]
    TooLong,
    /// Too much output.
    #[error(
        "the chat template wrote more than {MAX_OUTPUT_BYTES} bytes; shorten the conversation, or fix the template if even a short one fails"
    )]
    TooLarge,
    /// Another failure.
    #[error("the chat template failed: {0}")]
    Failed(String),
}

/// Special tokens that a template may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of sequence.
    pub bos: Option<String>,
    /// End of sequence.
    pub eos: Option<String>,
    /// Padding.
    pub pad: Option<String>,
    /// Unknown token.
    pub unk: Option<String>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    special: SpecialTokens,
}

const TEMPLATE_NAME: &str = "chat_template";

impl Template {
    /// Parses `source`.
    pub fn new(source: &str, special: SpecialTokens) -> Result<Self, TemplateError> {
        let syntax = |error: Error| TemplateError::Syntax(error.to_string());
        let mut environment = Environment::new();
        // The whitespace settings for which the authors of these templates test.
        let blocks = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(syntax)?;
        environment.set_syntax(blocks);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_DEPTH);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        // Templates guard `tools | length` with it, and Python's None is not iterable.
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "refused by the template")
                .with_source(TemplateRefusal(message)))
        });
        environment.add_template_owned(TEMPLATE_NAME, strip_generation_tags(source)).map_err(syntax)?;
        Ok(Self { environment, special })
    }

    /// Renders the prompt of a conversation, ending where the assistant's turn begins. `now` is the date that
    /// a template sees.
    pub fn render(&self, messages: &[Message], now: &Zoned) -> Result<String, TemplateError> {
        let now = now.clone();
        let strftime_now = Value::from_function(move |format: String| -> Result<String, Error> {
            jiff::fmt::strtime::format(&format, &now)
                .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
        });
        let SpecialTokens { bos, eos, pad, unk } = &self.special;
        let context = context! {
            messages => messages.iter().map(as_value).collect::<Vec<_>>(),
            add_generation_prompt => true,
            tools => Value::from(()),
            documents => Value::from(()),
            bos_token => bos.as_deref().unwrap_or_default(),
            eos_token => eos.as_deref().unwrap_or_default(),
            pad_token => pad.as_deref().unwrap_or_default(),
            unk_token => unk.as_deref().unwrap_or_default(),
            strftime_now => strftime_now,
        };
        let failed = |error: Error| TemplateError::Failed(error.to_string());
        let template = self.environment.get_template(TEMPLATE_NAME).map_err(failed)?;
        let mut output = LimitedWriter { bytes: Vec::new(), overrun: false };
        let result = template.render_captured_to(context, &mut output).map(drop);
        match result {
            Ok(()) => {
                String::from_utf8(output.bytes).map_err(|error| TemplateError::Failed(error.to_string()))
            }
            Err(_) if output.overrun => Err(TemplateError::TooLarge),
            Err(error) => Err(explain(&error)),
        }
    }
}

fn as_value(message: &Message) -> Value {
    let Message { role, content } = message;
    Value::from_pairs([("role", role.as_str()), ("content", content.as_str())])
}

/// Classifies a template error: an error that the template raises may be wrapped by the macros that it passed through.
fn explain(error: &Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(TemplateRefusal(message)) = current.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::TooLong;
        }
        cause = current.source();
    }
    TemplateError::Failed(error.to_string())
}

/// The message of a template that refuses a conversation.
#[derive(Debug, ThisError)]
#[error("{0}")]
struct TemplateRefusal(String);

/// Templates mark the assistant's part for training with `{% generation %}`, which has no effect when
/// rendering; the marks become blocks that always hold, with their whitespace control kept.
fn strip_generation_tags(source: &str) -> String {
    let mut rest = source;
    let mut result = String::with_capacity(source.len());
    while let Some(start) = rest.find("{%") {
        let (text, tag) = rest.split_at(start);
        result.push_str(text);
        // The end is no part of the start, as it seems in `{%}`.
        let Some(end) = tag[2..].find("%}") else {
            result.push_str(tag);
            return result;
        };
        let (tag, after) = tag.split_at(2 + end + 2);
        let inner = &tag[2..tag.len() - 2];
        match inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
            "generation" => result.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => result.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    result
}

/// JSON as Python's `json.dumps` writes it, which models were trained on; the built-in filter escapes for
/// HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Part of the Python filter's signature; text is written unescaped either way.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    match indent {
        Some(width) => {
            let indent = vec![b' '; width.min(16)];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
                .map_err(failed)?;
        }
        None => {
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, PythonFormatter))
                .map_err(failed)?;
        }
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// `{"a": 1, "b": [1, 2]}`: a space after every comma and colon.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Refuses to grow beyond [`MAX_OUTPUT_BYTES`].
struct LimitedWriter {
    bytes: Vec<u8>,
    overrun: bool,
}

impl Write for LimitedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.overrun = true;
            return Err(io::Error::other("the output is too large"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    fn render(source: &str, messages: &[Message]) -> Result<String, TemplateError> {
        let special =
            SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), ..Default::default() };
        let now: Zoned = "2026-11-21T08:00:00+00:00[UTC]".parse().unwrap();
        Template::new(source, special)?.render(messages, &now)
    }

    #[test]
    fn real_chat_templates_render_as_intended() {
        let talk = [say("system", "Be brief."), say("user", " Hi <b>\"you\"</b> ")];
        for (source, expected) in [
            // Python methods, filters, loop variables, whitespace rules of blocks.
            (
                "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'].strip() + eos_token }}{% endfor %}",
                "<s>[system]Be brief.</s>[user]Hi <b>\"you\"</b></s>",
            ),
            (
                "{%- if messages[0]['role'] == 'system' %}\n    {%- set rest = messages[1:] %}\n{%- endif %}\n{{ rest | length }}",
                "1",
            ),
            (
                "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\nA:\n{% endif %}",
                "U\nA:\n",
            ),
            ("{{ messages[1] | tojson }}", "{\"role\": \"user\", \"content\": \" Hi <b>\\\"you\\\"</b> \"}"),
            ("{{ [1, {'a': none}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"a\": null\n  }\n]"),
            ("{{ strftime_now('%d %b %Y') }}", "21 Nov 2026"),
            ("{% if tools is not none %}tools{% else %}none{% endif %}", "none"),
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% generation %}{{ m.role }}{%- endgeneration %}{% endfor %}",
                "user",
            ),
            ("{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}", "none"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            ("{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{{ turn(messages[0]) }}", "<system>"),
            (
                "{{ messages[0].content.split(' ')[-1].upper() }}{{ 'x' if messages[0].content.startswith('Be') }}",
                "BRIEF.x",
            ),
        ] {
            assert_eq!(render(source, &talk).as_deref(), Ok(expected), "{source}");
        }
    }

    #[test]
    fn hostile_and_broken_templates_end_with_an_error() {
        let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
        for (source, check) in [
            (
                "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
                (|error| matches!(error, TemplateError::TooLong)) as fn(&TemplateError) -> bool,
            ),
            ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", |error| {
                matches!(error, TemplateError::TooLarge)
            }),
            ("{{ 'x' * 99999999999 }}", |error| matches!(error, TemplateError::Failed(_))),
            (deep, |error| matches!(error, TemplateError::Failed(_) | TemplateError::TooLong)),
            ("{% include '/etc/passwd' %}", |error| matches!(error, TemplateError::Failed(_))),
            ("{{ ''.__class__.__mro__ }}", |error| matches!(error, TemplateError::Failed(_))),
            ("{{ messages[0].nothing.more }}", |error| matches!(error, TemplateError::Failed(_))),
            ("{% for m in messages %}", |error| matches!(error, TemplateError::Syntax(_))),
            ("{%}", |error| matches!(error, TemplateError::Syntax(_))),
            ("{{ 'a' }}{%}{% generation %}", |error| matches!(error, TemplateError::Syntax(_))),
        ] {
            let error = render(source, &[say("user", "hi")]).unwrap_err();
            assert!(check(&error), "{source}: {error:?}");
        }
    }

    #[test]
    fn template_refusal_carries_its_own_message() {
        let source = "{% macro check(m) %}{% if m.role not in ['user'] %}{{ raise_exception('Unknown role: ' + m.role) }}{% endif %}{% endmacro %}{{ check(messages[0]) }}";
        assert_eq!(render(source, &[say("user", "hi")]).as_deref(), Ok(""));
        assert_eq!(
            render(source, &[say("wizard", "hi")]),
            Err(TemplateError::Refused("Unknown role: wizard".into()))
        );
    }
}
