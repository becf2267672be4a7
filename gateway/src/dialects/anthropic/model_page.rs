//! Anthropic's list of models, for clients that send the header `anthropic-version`: pages of models, the cursor of which
//! is the id of a model.

use axum::Json;
use axum::response::IntoResponse as _;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::DIALECT;
use super::page_query::PageQuery;
use crate::dialects::models::ModelPages;
use crate::error::GatewayError;
use crate::serving::ModelSummary;

/// The lists of this dialect.
pub(in crate::dialects) static MODEL_PAGES: ModelPages = ModelPages {
    dialect: &DIALECT,
    is_requested: |headers| headers.contains_key("anthropic-version"),
    list: |models, uri| Ok(Json(page(models, &PageQuery::parse(uri, "models")?)?).into_response()),
    one: |model| Json(model_body(model)).into_response(),
};

/// The models after one, or the last ones before one.
fn page(models: &[ModelSummary], query: &PageQuery) -> Result<Value, GatewayError> {
    let PageQuery { limit, after_id, before_id } = query;
    let position = |field: &str, id: &String| {
        let position = models.iter().position(|model| model.id == *id);
        position.ok_or_else(|| GatewayError::field(field, format!("`{field}` is no model of the list")))
    };
    let begin = match after_id {
        Some(id) => position("after_id", id)? + 1,
        None => 0,
    };
    let end = match before_id {
        Some(id) => position("before_id", id)?,
        None => models.len(),
    };
    let found = models.get(begin..end).unwrap_or_default();
    let left = found.len().saturating_sub(*limit);
    let shown = match (after_id, before_id) {
        (None, Some(_)) => &found[left..],
        _ => &found[..found.len() - left],
    };
    Ok(json!({
        "data": shown.iter().map(model_body).collect::<Value>(),
        "has_more": left > 0,
        "first_id": shown.first().map(|model| &model.id),
        "last_id": shown.last().map(|model| &model.id),
    }))
}

fn model_body(model: &ModelSummary) -> Value {
    let ModelSummary {
        id,
        created,
        context_tokens,
        ready: _,
        message: _,
        deployments: _,
        expires: _,
        files: _,
    } = model;
    let created = Timestamp::from_second(*created).unwrap_or(Timestamp::UNIX_EPOCH);
    json!({
        "type": "model",
        "id": id,
        "display_name": id,
        "created_at": created.to_string(),
        "max_input_tokens": context_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::ServedFiles;

    fn check(query: &str) -> Result<(Vec<String>, bool), Option<String>> {
        let model = |id: &str| ModelSummary {
            id: id.into(),
            created: 1_700_000_000,
            context_tokens: 8192,
            ready: true,
            message: String::new(),
            deployments: vec![],
            expires: None,
            files: ServedFiles::default(),
        };
        let models = ["a", "n/b:x", "c"].map(model);
        let uri = format!("/v1/models{query}").parse().unwrap();
        let page = PageQuery::parse(&uri, "models").and_then(|query| page(&models, &query));
        let page = page.map_err(|error| error.param)?;
        let data = page["data"].as_array().unwrap();
        let ids: Vec<String> = data.iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect();
        assert_eq!(page["first_id"].as_str(), ids.first().map(String::as_str), "{query}");
        assert_eq!(page["last_id"].as_str(), ids.last().map(String::as_str), "{query}");
        for model in data {
            assert_eq!(
                (&model["type"], &model["created_at"], &model["display_name"]),
                (&json!("model"), &json!("2023-11-14T22:13:20Z"), &model["id"])
            );
        }
        Ok((ids, page["has_more"].as_bool().unwrap()))
    }

    #[test]
    fn pages_begin_after_or_end_before_a_model() {
        for (query, ids, has_more) in [
            ("", &["a", "n/b:x", "c"][..], false),
            ("?beta=true&limit=2", &["a", "n/b:x"], true),
            ("?after_id=a&limit=1", &["n/b:x"], true),
            ("?after_id=n%2Fb%3Ax", &["c"], false),
            ("?after_id=c", &[], false),
            ("?before_id=c&limit=1", &["n/b:x"], true),
            ("?before_id=n/b:x", &["a"], false),
            ("?after_id=a&before_id=c&limit=5", &["n/b:x"], false),
            ("?after_id=c&before_id=a", &[], false),
        ] {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            assert_eq!(check(query), Ok((ids, has_more)), "{query}");
        }
        for (query, param) in [
            ("?limit=0", "limit"),
            ("?limit=1001", "limit"),
            ("?limit=many", "limit"),
            ("?after_id=nix", "after_id"),
            ("?before_id=nix", "before_id"),
        ] {
            assert_eq!(check(query), Err(Some(param.to_owned())), "{query}");
        }
    }
}
