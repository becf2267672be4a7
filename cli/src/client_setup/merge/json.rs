//! Edits of JSON with comments. Not here: which edits.

use jsonc_parser::cst::{CstInputValue, CstNode, CstRootNode};
use jsonc_parser::{ParseOptions, parse_to_serde_value};
use serde_json::Value;

use super::{PathStep, ValueEdit};

/// What editors with comments in their settings read: comments, and commas at the end of lists.
fn options() -> ParseOptions {
    ParseOptions {
        allow_comments: true,
        allow_trailing_commas: true,
        allow_loose_object_property_names: false,
        allow_missing_commas: false,
        allow_single_quoted_strings: false,
        allow_hexadecimal_numbers: false,
        allow_unary_plus_numbers: false,
        allow_bare_decimal_point_numbers: false,
        allow_non_finite_numbers: false,
        allow_extended_string_escapes: false,
    }
}

/// The text of `setting`.
pub(super) fn render(setting: &Value) -> String {
    format!("{setting:#}\n")
}

/// The settings of `text`; null if there are none.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    parse_to_serde_value::<Option<Value>>(text, &options())
        .map(Option::unwrap_or_default)
        .map_err(|error| error.to_string())
}

/// `text` after the edits.
pub(super) fn edit(text: &str, edits: &[ValueEdit]) -> Option<String> {
    let root = CstRootNode::parse(text, &options()).ok()?;
    // An empty file, or one of comments, gets an object.
    let top = root.object_value_or_create()?;
    for ValueEdit { path, value } in edits {
        let (last, parents) = path.split_last()?;
        let mut node: CstNode = top.clone().into();
        for step in parents {
            node = child(&node, step)?;
        }
        set(&node, last, input(value));
    }
    let text = root.to_string();
    Some(if text.ends_with('\n') { text } else { text + "\n" })
}

fn child(node: &CstNode, step: &PathStep) -> Option<CstNode> {
    match step {
        PathStep::Key(key) => node.as_object()?.get(key)?.value(),
        PathStep::Index(index) => node.as_array()?.elements().into_iter().nth(*index),
    }
}

/// Sets a member; what does not fit is found when the text is read again.
fn set(node: &CstNode, step: &PathStep, value: CstInputValue) {
    match (step, node.as_object(), node.as_array()) {
        (PathStep::Key(key), Some(object), _) => match object.get(key) {
            Some(property) => property.set_value(value),
            None => drop(object.append(key, value)),
        },
        (PathStep::Index(index), _, Some(array)) => match array.elements().into_iter().nth(*index) {
            Some(element) => drop(replace(element, value)),
            None => drop(array.append(value)),
        },
        _ => {}
    }
}

fn replace(element: CstNode, value: CstInputValue) -> Option<CstNode> {
    if let Some(object) = element.as_object() {
        return object.replace_with(value);
    }
    if let Some(array) = element.as_array() {
        return array.replace_with(value);
    }
    element.as_string_lit()?.replace_with(value)
}

fn input(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(truth) => CstInputValue::Bool(*truth),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(items) => CstInputValue::Array(items.iter().map(input).collect()),
        Value::Object(map) => {
            CstInputValue::Object(map.iter().map(|(key, value)| (key.clone(), input(value))).collect())
        }
    }
}
