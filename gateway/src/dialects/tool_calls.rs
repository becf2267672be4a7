//! The calls of tools in a history: what an assistant called in an earlier turn.

use std::fmt::Arguments;

use russet_wire::conversation::ToolCall;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::values::invalid;
use crate::error::GatewayError;

/// Longest name of a tool in bytes: each result of a call repeats it. OpenAI's limit is 64, Anthropic's 128.
pub(super) const MAX_NAME_BYTES: usize = 256;

/// A call with its arguments as the client wrote them: a model reads the keys in their order.
#[derive(Deserialize)]
pub(super) struct RawCall<'a> {
    #[serde(borrow, default)]
    function: Option<RawFunction<'a>>,
}

#[derive(Deserialize)]
struct RawFunction<'a> {
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
}

impl RawCall<'_> {
    fn arguments(&self) -> Option<&str> {
        Some(self.function.as_ref()?.arguments?.get())
    }
}

/// The calls; `raw` has them once more as they were written, where they were read so.
pub(super) fn parse(
    at: Arguments<'_>,
    value: Option<Value>,
    raw: &[RawCall<'_>],
) -> Result<Vec<ToolCall>, GatewayError> {
    let calls = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(invalid(at, "a list of calls")),
    };
    let call = |(index, call): (usize, Value)| {
        let at = format_args!("{at}[{index}]");
        let Value::Object(mut call) = call else { return Err(invalid(at, "an object with a function")) };
        let Some(Value::Object(mut function)) = call.remove("function") else {
            return Err(invalid(format_args!("{at}.function"), "an object with a name and arguments"));
        };
        let Some(Value::String(name)) = function.remove("name") else {
            return Err(invalid(format_args!("{at}.function.name"), "a string"));
        };
        if name.len() > MAX_NAME_BYTES {
            let what = format!("a name of at most {MAX_NAME_BYTES} bytes, not {}", name.len());
            return Err(invalid(format_args!("{at}.function.name"), &what));
        }
        let written = raw.get(index).and_then(RawCall::arguments);
        let arguments =
            arguments(format_args!("{at}.function.arguments"), function.remove("arguments"), written)?;
        let id = match call.remove("id") {
            Some(Value::String(id)) => id,
            None | Some(Value::Null) => String::new(),
            Some(_) => return Err(invalid(format_args!("{at}.id"), "a string")),
        };
        Ok(ToolCall { id, name, arguments })
    };
    calls.into_iter().enumerate().map(call).collect()
}

/// JSON text of a call's arguments; of an object the text that the client has `written`.
pub(super) fn arguments(
    at: Arguments<'_>,
    value: Option<Value>,
    written: Option<&str>,
) -> Result<String, GatewayError> {
    match value {
        Some(Value::String(text)) if !text.trim().is_empty() => Ok(text),
        // OpenAI writes them as text; Ollama and other servers as an object.
        Some(object @ Value::Object(_)) => Ok(written.map_or_else(|| object.to_string(), str::to_owned)),
        None | Some(Value::Null | Value::String(_)) => Ok("{}".to_owned()),
        Some(_) => Err(invalid(at, "an object, or its JSON text")),
    }
}
