//! References of Pipelines: `$(steps.draft.output.title)` in a text stands for a value that an earlier step made. There is no
//! more to them than a path, so that a text is at most as long as what it names. Pure.

use serde_json::Value;
use thiserror::Error;

/// Longest text that references may make: as long as a body of a client.
pub(super) const MAX_TEXT_BYTES: usize = 4 << 20;
/// What the first part of a path may be.
const ROOTS: [&str; 6] = ["parameters", "steps", "run", "item", "index", "output"];

/// Why a text cannot be filled.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum ReferenceError {
    /// It has no end.
    #[error("a reference that begins with $( has no end; write $$( for a plain one")]
    Unclosed,
    /// It is no path.
    #[error("$({0}) is no reference; write one such as $(parameters.topic) or $(steps.draft.output)")]
    NoPath(String),
    /// There is nothing of this name.
    #[error("$({path}): there is no {missing}")]
    Missing {
        /// The reference.
        path: String,
        /// Its beginning, up to what is missing.
        missing: String,
    },
    /// It is longer than it may be.
    #[error("the text has more than {} MiB with what its references stand for", MAX_TEXT_BYTES >> 20)]
    TooLong,
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
enum TextPart<'a> {
    Text(&'a str),
    Reference(&'a str),
}

/// The parts of a text.
fn parts(text: &str) -> Result<Vec<TextPart<'_>>, ReferenceError> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find("$(") {
        let (before, reference) = rest.split_at(at);
        if let Some(before) = before.strip_suffix('$') {
            parts.extend([TextPart::Text(before), TextPart::Text("$(")]);
            rest = &reference[2..];
            continue;
        }
        let (path, after) = reference[2..].split_once(')').ok_or(ReferenceError::Unclosed)?;
        if !is_path(path) {
            return Err(ReferenceError::NoPath(path.chars().take(80).collect()));
        }
        parts.extend([TextPart::Text(before), TextPart::Reference(path)]);
        rest = after;
    }
    parts.push(TextPart::Text(rest));
    parts.retain(|part| *part != TextPart::Text(""));
    Ok(parts)
}

fn is_path(path: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && !word.contains(|c: char| c.is_whitespace() || c == '$');
    path.split('.').all(is_word) && ROOTS.contains(&path.split('.').next().unwrap_or_default())
}

/// The paths in a text.
pub(super) fn paths(text: &str) -> Result<Vec<&str>, ReferenceError> {
    let reference = |part| match part {
        TextPart::Reference(path) => Some(path),
        TextPart::Text(_) => None,
    };
    Ok(parts(text)?.into_iter().filter_map(reference).collect())
}

/// What a path leads to; places of a list are numbers. Of something that is null everything is null: a step that was skipped
/// has no output.
fn lookup<'a>(path: &str, values: &'a Value) -> Result<&'a Value, ReferenceError> {
    let (mut found, mut end) = (values, 0);
    for word in path.split('.') {
        end += word.len() + usize::from(end > 0);
        let next = match found {
            Value::Null => return Ok(found),
            Value::Array(items) => word.parse::<usize>().ok().and_then(|at| items.get(at)),
            found => found.get(word),
        };
        let missing = || path[..end].to_owned();
        found = next.ok_or_else(|| ReferenceError::Missing { path: path.to_owned(), missing: missing() })?;
    }
    Ok(found)
}

/// A value as text: a text as it is, and anything else as JSON; null is nothing.
pub(super) fn text_of(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// The text with what its references stand for, each passed through `encode`.
pub(super) fn fill_with(
    text: &str,
    values: &Value,
    encode: impl Fn(String) -> String,
) -> Result<String, ReferenceError> {
    let mut filled = String::new();
    for part in parts(text)? {
        match part {
            TextPart::Text(text) => filled.push_str(text),
            TextPart::Reference(path) => filled.push_str(&encode(text_of(lookup(path, values)?))),
        }
        if filled.len() > MAX_TEXT_BYTES {
            return Err(ReferenceError::TooLong);
        }
    }
    Ok(filled)
}

/// The text with what its references stand for.
pub(super) fn fill(text: &str, values: &Value) -> Result<String, ReferenceError> {
    fill_with(text, values, |text| text)
}

/// The value that a text stands for: what it refers to, where it is one reference and no more.
pub(super) fn value_of(text: &str, values: &Value) -> Result<Value, ReferenceError> {
    match parts(text)?.as_slice() {
        [TextPart::Reference(path)] => lookup(path, values).cloned(),
        _ => fill(text, values).map(Value::String),
    }
}

/// A JSON value in which each text is the value that it stands for. Names of fields stay.
pub(super) fn fill_json(json: &Value, values: &Value) -> Result<Value, ReferenceError> {
    fill_within(json, values, &mut MAX_TEXT_BYTES.clone())
}

/// The same with at most so many bytes in its texts, of which these are left.
fn fill_within(json: &Value, values: &Value, left: &mut usize) -> Result<Value, ReferenceError> {
    Ok(match json {
        Value::String(text) => {
            let value = value_of(text, values)?;
            *left = left.checked_sub(text_of(&value).len()).ok_or(ReferenceError::TooLong)?;
            value
        }
        Value::Array(items) => {
            let filled = items.iter().map(|item| fill_within(item, values, left));
            filled.collect::<Result<_, _>>()?
        }
        Value::Object(fields) => {
            let filled =
                fields.iter().map(|(name, value)| Ok((name.clone(), fill_within(value, values, left)?)));
            Value::Object(filled.collect::<Result<_, ReferenceError>>()?)
        }
        plain => plain.clone(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn values() -> Value {
        json!({
            "parameters": {"topic": "tea"},
            "steps": {
                "plan": {"output": {"chapters": ["a $(item)", "b"], "score": 7}},
                "skipped": {"output": null},
            },
            "item": "x",
        })
    }

    #[test]
    fn references_stand_for_what_they_lead_to() {
        for (text, expected) in [
            ("no reference, $5 and (x)", "no reference, $5 and (x)"),
            ("on $(parameters.topic)!", "on tea!"),
            ("$(parameters.topic)$(item)", "teax"),
            ("$(steps.plan.output.score)", "7"),
            // What a step wrote is text, never a reference.
            ("1: $(steps.plan.output.chapters.0)", "1: a $(item)"),
            ("$(steps.plan.output.chapters)", r#"["a $(item)","b"]"#),
            ("$$(parameters.topic) $(parameters.topic)", "$(parameters.topic) tea"),
            ("<$(steps.skipped.output.anything)>", "<>"),
        ] {
            assert_eq!(fill(text, &values()).as_deref(), Ok(expected), "{text}");
        }
        for (text, expected) in [
            ("$(parameters.topic", "a reference that begins with $( has no end; write $$( for a plain one"),
            (
                "$(topic)",
                "$(topic) is no reference; write one such as $(parameters.topic) or $(steps.draft.output)",
            ),
            ("$(parameters.x.y)", "$(parameters.x.y): there is no parameters.x"),
            (
                "$(steps.plan.output.chapters.2)",
                "$(steps.plan.output.chapters.2): there is no steps.plan.output.chapters.2",
            ),
        ] {
            assert_eq!(fill(text, &values()).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_reference_alone_is_the_value_itself() {
        let template = json!({"a": "$(steps.plan.output.chapters)", "b": ["<$(item)>", 1], "$(item)": null});
        let filled = fill_json(&template, &values()).unwrap();
        assert_eq!(filled, json!({"a": ["a $(item)", "b"], "b": ["<x>", 1], "$(item)": null}));
    }

    #[test]
    fn texts_are_bounded_however_often_they_refer() {
        let values = json!({"item": "x".repeat(1 << 20)});
        assert_eq!(fill(&"$(item)".repeat(4), &values).map(|text| text.len()), Ok(4 << 20));
        assert_eq!(fill(&"$(item)".repeat(9000), &values), Err(ReferenceError::TooLong));
        let many = Value::Array(vec!["$(item)".into(); 9000]);
        assert_eq!(fill_json(&many, &values), Err(ReferenceError::TooLong));
    }
}
