//! Edits of TOML. Not here: which edits.

use serde_json::Value;
use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, value};

use super::{PathStep, ValueEdit};

/// The text of `setting`.
pub(super) fn render(setting: &Value) -> String {
    match item(setting) {
        Item::Table(table) => DocumentMut::from(table).to_string(),
        _ => String::new(),
    }
}

/// The settings of `text`.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    toml_edit::de::from_str(text).map_err(|error| error.to_string().trim().to_owned())
}

/// `text` after the edits.
pub(super) fn edit(text: &str, edits: &[ValueEdit]) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    for ValueEdit { path, value } in edits {
        let (last, parents) = path.split_last()?;
        let mut node: &mut Item = document.as_item_mut();
        for step in parents {
            node = child(node, step)?;
        }
        match (last, child(node, last)) {
            (_, Some(old)) => replace(old, item(value)),
            (PathStep::Key(key), None) => {
                node.as_table_like_mut()?.insert(key, item(value));
            }
            (PathStep::Index(_), None) => match node {
                Item::ArrayOfTables(tables) => tables.push(item(value).into_table().ok()?),
                _ => node.as_array_mut()?.push(item(value).into_value().ok()?),
            },
        }
    }
    Some(document.to_string())
}

fn child<'item>(node: &'item mut Item, step: &PathStep) -> Option<&'item mut Item> {
    match step {
        PathStep::Key(key) => node.get_mut(key.as_str()),
        PathStep::Index(index) => node.get_mut(*index),
    }
}

/// Replaces a value; the comment behind it stays.
fn replace(old: &mut Item, mut new: Item) {
    if let (Some(old), Some(new)) = (old.as_value(), new.as_value_mut()) {
        *new.decor_mut() = old.decor().clone();
    }
    *old = new;
}

fn item(setting: &Value) -> Item {
    match setting {
        Value::Object(map) => {
            let mut table = Table::new();
            for (key, value) in map {
                table.insert(key, item(value));
            }
            // `[a.b]` needs no `[a]` before it.
            table.set_implicit(!map.is_empty() && map.values().all(Value::is_object));
            Item::Table(table)
        }
        other => value(scalar(other)),
    }
}

fn scalar(setting: &Value) -> toml_edit::Value {
    match setting {
        // TOML has no null.
        Value::Null => "".into(),
        Value::Bool(truth) => (*truth).into(),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => integer.into(),
            None => number.as_f64().unwrap_or_default().into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(scalar).collect::<Array>().into(),
        Value::Object(map) => {
            map.iter().map(|(key, value)| (key, scalar(value))).collect::<InlineTable>().into()
        }
    }
}
