//! The input of a kept response: its items as they are stored, each with an id, and the pages in which they are listed.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::unreadable;
use crate::dialects::openai::page_query::PageQuery;
use crate::error::GatewayError;

/// Items on a page that does not say how many, and at most; OpenAI's numbers.
const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;

/// The input of a request as a list of items, in JSON. Items without an id get one of this request.
pub(super) fn stored(input: Option<&Value>, request_id: &str) -> Vec<u8> {
    let text;
    let items = match input {
        Some(Value::Array(items)) => items.as_slice(),
        Some(Value::String(words)) => {
            text = [json!({"role": "user", "content": words})];
            text.as_slice()
        }
        // Parsing refuses it.
        _ => &[],
    };
    let mut out = vec![b'['];
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        // Only strings, numbers and null: serialising them into memory cannot fail.
        let _ = serde_json::to_writer(&mut out, &stored_item(item, index, request_id));
    }
    out.push(b']');
    out
}

/// An item as OpenAI lists it: with a type, an id and a status, and a text as a list of parts.
fn stored_item(item: &Value, index: usize, request_id: &str) -> Value {
    let Value::Object(fields) = item else { return item.clone() };
    let kind = fields.get("type").and_then(Value::as_str).unwrap_or("message").to_owned();
    let mut stored = Map::new();
    stored.insert("type".to_owned(), kind.as_str().into());
    stored.insert("status".to_owned(), "completed".into());
    let prefix = match kind.as_str() {
        "reasoning" => "rs",
        "function_call" => "fc",
        "function_call_output" => "fco",
        "custom_tool_call" => "ctc",
        "custom_tool_call_output" => "ctco",
        _ => "msg",
    };
    stored.insert("id".to_owned(), format!("{prefix}_{request_id}_in{index}").into());
    let given = fields.iter().filter(|(_, value)| !value.is_null());
    stored.extend(given.map(|(name, value)| (name.clone(), value.clone())));
    if let Some(Value::String(text)) = stored.get("content") {
        let part = if fields.get("role").is_some_and(|role| role == "assistant") {
            json!({"type": "output_text", "text": text, "annotations": []})
        } else {
            json!({"type": "input_text", "text": text})
        };
        stored.insert("content".to_owned(), json!([part]));
    }
    stored.into()
}

/// Which items, and in which order.
#[derive(Debug)]
pub(super) struct InputPage(PageQuery);

impl InputPage {
    /// Reads the fields of a query.
    pub(super) fn parse(fields: &[(String, String)]) -> Result<Self, GatewayError> {
        PageQuery::of(fields, DEFAULT_LIMIT, MAX_LIMIT).map(Self)
    }

    /// The page of the stored input of a response.
    pub(super) fn of(&self, response_id: &str, input: &[u8]) -> Result<Value, GatewayError> {
        #[derive(Deserialize)]
        struct ItemId {
            id: String,
        }
        let PageQuery { limit, newest_first, after, .. } = &self.0;
        let mut items: Vec<&RawValue> =
            serde_json::from_slice(input).map_err(|error| unreadable(response_id, &error))?;
        if *newest_first {
            items.reverse();
        }
        let id_of = |item: &RawValue| serde_json::from_str::<ItemId>(item.get()).map(|item| item.id).ok();
        let begin = match after {
            None => 0,
            Some(after) => {
                let found = items.iter().position(|item| id_of(item).as_deref() == Some(after));
                let unknown = || {
                    GatewayError::field("after", format!("`after` is no item of response '{response_id}'"))
                };
                found.ok_or_else(unknown)? + 1
            }
        };
        let rest = &items[begin..];
        let shown = &rest[..rest.len().min(*limit)];
        let id = |item: Option<&&RawValue>| item.and_then(|item| id_of(item));
        Ok(json!({
            "object": "list",
            "data": shown,
            "first_id": id(shown.first()),
            "last_id": id(shown.last()),
            "has_more": shown.len() < rest.len(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(input: Value) -> Value {
        serde_json::from_slice(&stored(Some(&input), "r")).unwrap()
    }

    #[test]
    fn stored_items_have_ids_types_and_parts() {
        let part = json!({"type": "input_text", "text": "hi"});
        let message = |id: &str, role: &str, content: Value| json!({"type": "message", "status": "completed", "id": id, "role": role, "content": content});
        assert_eq!(check(json!("hi")), json!([message("msg_r_in0", "user", json!([part]))]));
        let said = json!([{"type": "output_text", "text": "a", "annotations": []}]);
        assert_eq!(
            check(json!([
                {"role": "developer", "content": "hi", "name": null},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "incomplete", "content": "a"},
                {"type": "function_call_output", "call_id": "1", "output": "o"},
                {"type": "reasoning", "summary": []},
            ])),
            json!([
                message("msg_r_in0", "developer", json!([part])),
                {"type": "message", "status": "incomplete", "id": "msg_1", "role": "assistant", "content": said},
                {"type": "function_call_output", "status": "completed", "id": "fco_r_in2", "call_id": "1", "output": "o"},
                {"type": "reasoning", "status": "completed", "id": "rs_r_in3", "summary": []},
            ])
        );
    }

    #[test]
    fn pages_have_an_order_and_a_cursor() {
        let input =
            stored(Some(&json!(["a", "b", "c"].map(|text| json!({"role": "user", "content": text})))), "r");
        for (query, expected) in [
            (vec![], Ok((vec!["msg_r_in2", "msg_r_in1", "msg_r_in0"], false))),
            (vec![("limit", "2")], Ok((vec!["msg_r_in2", "msg_r_in1"], true))),
            (vec![("limit", "2"), ("after", "msg_r_in1")], Ok((vec!["msg_r_in0"], false))),
            (vec![("order", "asc"), ("limit", "1"), ("x", "y")], Ok((vec!["msg_r_in0"], true))),
            (vec![("order", "asc"), ("after", "msg_r_in0")], Ok((vec!["msg_r_in1", "msg_r_in2"], false))),
            (vec![("after", "msg_r_in0")], Ok((vec![], false))),
            (vec![("after", "nix")], Err("after")),
            (vec![("limit", "0")], Err("limit")),
            (vec![("limit", "101")], Err("limit")),
            (vec![("limit", "x")], Err("limit")),
            (vec![("order", "up")], Err("order")),
        ] {
            let query: Vec<(String, String)> =
                query.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            let page = InputPage::parse(&query).and_then(|page| page.of("resp_r", &input));
            match (page, expected) {
                (Ok(page), Ok((ids, has_more))) => {
                    let found: Vec<&str> = page["data"]
                        .as_array()
                        .unwrap()
                        .iter()
                        .map(|item| item["id"].as_str().unwrap())
                        .collect();
                    assert_eq!((found, page["has_more"] == true), (ids.clone(), has_more), "{query:?}");
                    assert_eq!(page["first_id"].as_str(), ids.first().copied());
                    assert_eq!(page["last_id"].as_str(), ids.last().copied());
                }
                (Err(error), Err(param)) => assert_eq!(error.param.as_deref(), Some(param), "{query:?}"),
                (page, _) => panic!("{query:?}: {page:?}"),
            }
        }
    }
}
