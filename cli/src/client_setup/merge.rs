//! A setting that is merged into a client's own file: JSON with comments, TOML or YAML. What else is in the file stays
//! as it is, comments too. The edits are decided on plain values; an editor of each format makes them, and the result
//! is read again: what does not say what was meant is not returned. Not here: files.

mod json;
mod toml;
mod yaml;

use serde_json::{Map, Value};
use thiserror::Error;

/// Format of a client's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// JSON; comments and commas at ends are read too.
    Json,
    /// TOML.
    Toml,
    /// YAML, one document.
    Yaml,
}

impl std::fmt::Display for FileFormat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Json => "JSON",
            Self::Toml => "TOML",
            Self::Yaml => "YAML",
        })
    }
}

/// Why a setting is not merged. The text is left alone.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MergeError {
    /// The text is not of the format.
    #[error("it is no {format}: {reason}")]
    Invalid {
        /// The expected format.
        format: FileFormat,
        /// The parser's words.
        reason: String,
    },
    /// The text is a list or a scalar.
    #[error("it is no map of settings")]
    NotMap,
    /// The editor of the format did not make the edits as they were meant.
    #[error("the settings cannot be merged into it without changing others")]
    Unfaithful,
}

/// A step to a value within a document.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PathStep {
    Key(String),
    Index(usize),
}

/// One value that is set. All steps but the last one exist.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ValueEdit {
    path: Vec<PathStep>,
    value: Value,
}

/// The text of a file that has `setting` alone.
pub fn render(format: FileFormat, setting: &Value) -> String {
    match format {
        FileFormat::Json => json::render(setting),
        FileFormat::Toml => toml::render(setting),
        FileFormat::Yaml => yaml::render(setting),
    }
}

/// `text` with `setting` merged into it, and with what of `defaults` it lacks. Maps are merged, and so are members of
/// lists with the same `name`; other values are replaced.
pub fn merge(
    format: FileFormat,
    text: &str,
    defaults: &Value,
    setting: &Value,
) -> Result<String, MergeError> {
    let base = parse(format, text)?;
    // Behind what the file has, in this order: what it lacks of the defaults, and the setting.
    let target = merged(&merged(&base, &merged(defaults, &base)), setting);
    let mut edits = Vec::new();
    collect_edits(&base, &target, &mut Vec::new(), &mut edits);
    if edits.is_empty() {
        return Ok(text.to_owned());
    }
    let edited = match format {
        FileFormat::Json => json::edit(text, &edits),
        FileFormat::Toml => toml::edit(text, &edits),
        FileFormat::Yaml => yaml::edit(text, &edits),
    };
    let edited = edited.ok_or(MergeError::Unfaithful)?;
    match parse(format, &edited) {
        Ok(reread) if reread == target => Ok(edited),
        _ => Err(MergeError::Unfaithful),
    }
}

/// The settings of a new file.
pub fn with_defaults(defaults: &Value, setting: &Value) -> Value {
    merged(defaults, setting)
}

/// The settings of a file; an empty one has none.
pub fn parse(format: FileFormat, text: &str) -> Result<Value, MergeError> {
    let parsed = match format {
        FileFormat::Json => json::parse(text),
        FileFormat::Toml => toml::parse(text),
        FileFormat::Yaml => yaml::parse(text),
    };
    match parsed {
        Ok(Value::Null) => Ok(Value::Object(Map::new())),
        Ok(map @ Value::Object(_)) => Ok(map),
        Ok(_) => Err(MergeError::NotMap),
        Err(reason) => Err(MergeError::Invalid { format, reason }),
    }
}

fn merged(base: &Value, setting: &Value) -> Value {
    match (base, setting) {
        (Value::Object(base), Value::Object(setting)) => {
            let mut merged_map = base.clone();
            for (key, value) in setting {
                let value = base.get(key).map_or_else(|| value.clone(), |old| merged(old, value));
                merged_map.insert(key.clone(), value);
            }
            Value::Object(merged_map)
        }
        (Value::Array(base), Value::Array(setting)) if setting.iter().all(|item| name(item).is_some()) => {
            let mut items = base.clone();
            for item in setting {
                match items.iter().position(|old| name(old) == name(item)) {
                    Some(at) => items[at] = merged(&items[at], item),
                    None => items.push(item.clone()),
                }
            }
            Value::Array(items)
        }
        (_, setting) => setting.clone(),
    }
}

fn name(item: &Value) -> Option<&str> {
    item.get("name")?.as_str()
}

/// The edits that make `base` the `target`, which has everything that `base` has.
fn collect_edits(base: &Value, target: &Value, path: &mut Vec<PathStep>, edits: &mut Vec<ValueEdit>) {
    let mut descend = |step: PathStep, old: Option<&Value>, new: &Value, edits: &mut Vec<ValueEdit>| {
        path.push(step);
        match old {
            Some(old) => collect_edits(old, new, path, edits),
            None => edits.push(ValueEdit { path: path.clone(), value: new.clone() }),
        }
        path.pop();
    };
    match (base, target) {
        (base, target) if base == target => {}
        (Value::Object(base), Value::Object(target)) => {
            for (key, new) in target {
                descend(PathStep::Key(key.clone()), base.get(key), new, edits);
            }
        }
        (Value::Array(base), Value::Array(target)) if base.len() <= target.len() => {
            for (index, new) in target.iter().enumerate() {
                descend(PathStep::Index(index), base.get(index), new, edits);
            }
        }
        _ => edits.push(ValueEdit { path: path.clone(), value: target.clone() }),
    }
}

#[cfg(test)]
mod tests;
