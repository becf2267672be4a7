//! Edits of YAML. Not here: which edits.

use std::str::FromStr as _;

use serde_json::Value;
use yaml_edit::{AsYaml, Document, YamlNode};

use super::{PathStep, ValueEdit};

/// The text of `setting`.
pub(super) fn render(setting: &Value) -> String {
    serde_norway::to_string(setting).unwrap_or_default()
}

/// The settings of `text`; null if there are none.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    match is_empty(text) {
        true => Ok(Value::Null),
        false => serde_norway::from_str(text).map_err(|error| error.to_string()),
    }
}

/// Whether there is nothing but comments, as in the samples that some clients install.
fn is_empty(text: &str) -> bool {
    text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
}

/// `text` after the edits.
pub(super) fn edit(text: &str, edits: &[ValueEdit]) -> Option<String> {
    if is_empty(text) {
        return Some(appended(text, edits));
    }
    let document = Document::from_str(text).ok()?;
    for ValueEdit { path, value } in edits {
        let value = Document::from_str(&render(value)).ok()?;
        let (last, parents) = path.split_last()?;
        match parents.split_first() {
            None => {
                let PathStep::Key(key) = last else { return None };
                document.as_mapping()?.set(key, value);
            }
            Some((PathStep::Index(_), _)) => return None,
            Some((PathStep::Key(first), rest)) => {
                let mut node = document.get(first)?;
                for step in rest {
                    node = child(&node, step)?;
                }
                set(&node, last, value)?;
            }
        }
    }
    let text = document.to_string();
    Some(if text.ends_with('\n') { text } else { text + "\n" })
}

/// A text of comments, with settings behind them.
fn appended(text: &str, edits: &[ValueEdit]) -> String {
    let settings = edits.iter().filter_map(|edit| match edit.path.as_slice() {
        [PathStep::Key(key)] => Some((key.clone(), edit.value.clone())),
        _ => None,
    });
    let separator = match text.is_empty() || text.ends_with('\n') {
        true => "",
        false => "\n",
    };
    format!("{text}{separator}{}", render(&Value::Object(settings.collect())))
}

fn child(node: &YamlNode, step: &PathStep) -> Option<YamlNode> {
    match step {
        PathStep::Key(key) => node.get(key),
        PathStep::Index(index) => node.get_item(*index),
    }
}

fn set(node: &YamlNode, step: &PathStep, value: impl AsYaml) -> Option<()> {
    match step {
        PathStep::Key(key) => node.as_mapping()?.set(key, value),
        PathStep::Index(index) => {
            let items = node.as_sequence()?;
            if *index >= items.len() {
                items.push(value);
            } else if !items.set(*index, value) {
                return None;
            }
        }
    }
    Some(())
}
