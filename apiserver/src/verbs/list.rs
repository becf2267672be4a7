//! `list`: a consistent page of objects, now or at an earlier revision.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::{Response, StatusCode};
use serde_json::{Map, Value, json};

use crate::call::Call;
use crate::output::{self, Body, Shape};
use crate::selector::Selector;
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use crate::store::{Store, StoreError, StoredObject};
use crate::table;

/// How long a read waits for a future revision.
const REVISION_TIMEOUT: Duration = Duration::from_secs(3);

/// One page.
pub struct Page {
    /// The matching objects.
    pub records: Vec<Arc<StoredObject>>,
    /// The revision the page is consistent at.
    pub revision: u64,
    /// Start key of the next page; empty at the end.
    pub next: String,
    /// How many objects follow, if known.
    pub remaining: Option<usize>,
}

/// Handles a list.
pub async fn handle(api: &ServerState, call: &Call) -> Result<Response<Body>> {
    let shape = call.shape()?;
    let page = page(api, call).await?;
    let mut metadata = Map::new();
    metadata.insert("resourceVersion".into(), json!(page.revision.to_string()));
    if !page.next.is_empty() {
        metadata.insert("continue".into(), json!(page.next));
    }
    if let Some(remaining) = page.remaining {
        metadata.insert("remainingItemCount".into(), json!(remaining));
    }
    let resource = call.resource.clone();
    let records = page.records;
    Ok(match shape {
        Shape::Object => {
            let (api_version, kind) = (resource.api_version(), resource.list_kind.clone());
            let items = records.into_iter().map(move |record| {
                if resource.serves_as_stored(&record) {
                    record.json().clone()
                } else {
                    Bytes::from(resource.view(&record).to_string())
                }
            });
            output::list(&api_version, &kind, metadata, items)
        }
        Shape::Metadata => {
            let items = records
                .into_iter()
                .map(|record| Bytes::from(output::metadata_only(record.object()).to_string()));
            output::list("meta.k8s.io/v1", "PartialObjectMetadataList", metadata, items)
        }
        Shape::Table => {
            let views: Vec<Arc<Value>> = records.iter().map(|record| resource.view(record)).collect();
            let objects: Vec<&Value> = views.iter().map(AsRef::as_ref).collect();
            let include = output::parse_include(&call.query.include_object);
            let now = jiff::Timestamp::now();
            let table =
                table::render(&resource.columns, &objects, Value::Object(metadata), include, true, now);
            output::bytes(StatusCode::OK, Bytes::from(table.to_string()))
        }
    })
}

/// The requested page.
pub async fn page(api: &ServerState, call: &Call) -> Result<Page> {
    let query = &call.query;
    let selector = Selector::parse(&query.label_selector, &query.field_selector, &call.resource)?;
    let prefix = call.resource.prefix_of(&call.namespace);
    let (at, start) = if query.continue_token.is_empty() {
        let revision = query.revision()?;
        let legacy_exact = query.resource_version_match.is_empty() && query.limit > 0;
        match revision {
            Some(revision) => {
                wait_for_revision(&*api.store, revision).await?;
                let exact = query.resource_version_match == "Exact" || legacy_exact;
                (exact.then_some(revision), None)
            }
            None => (None, None),
        }
    } else {
        let (revision, start) = parse_continue(&query.continue_token)?;
        // A negative revision continues at the current state: the client accepted an inconsistent list.
        (u64::try_from(revision).ok(), Some(format!("{prefix}{start}")))
    };
    let snapshot = api.store.range(&prefix, start.as_deref(), at).map_err(|error| match (&error, &start) {
        (StoreError::Compacted { .. }, Some(start)) => {
            let fresh = continue_token(-1, start.strip_prefix(&prefix).unwrap_or_default());
            let mut error = ApiError::expired(
                "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results.",
            );
            error.continue_token = Some(fresh);
            error
        }
        _ => storage_error(error),
    })?;
    let mut records = Vec::new();
    let mut next = String::new();
    let mut remaining = None;
    for (index, record) in snapshot.records.iter().enumerate() {
        if query.limit > 0 && records.len() == query.limit {
            let last: &Arc<StoredObject> = &snapshot.records[index - 1];
            let start = format!("{}\0", last.key.strip_prefix(prefix.as_str()).unwrap_or_default());
            next = continue_token(i64::try_from(snapshot.revision).unwrap_or(-1), &start);
            remaining = selector.is_empty().then(|| snapshot.records.len() - index);
            break;
        }
        if selector.is_empty() || selector.matches(&call.resource.view(record)) {
            records.push(record.clone());
        }
    }
    Ok(Page { records, revision: snapshot.revision, next, remaining })
}

/// Waits until a revision has been reached, up to the timeout.
pub async fn wait_for_revision(store: &dyn Store, revision: u64) -> Result<()> {
    let waiting = async {
        while store.revision() < revision {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(REVISION_TIMEOUT, waiting)
        .await
        .map_err(|_| ApiError::revision_too_large(revision, store.revision()))
}

/// Whether the store's history has reached a revision. One that it has not reached after [`Store::read_barrier`]
/// belongs to another history: the store was restored, or went back.
pub async fn has_reached(store: &dyn Store, revision: u64) -> Result<bool> {
    if store.revision() < revision {
        store.read_barrier().await.map_err(storage_error)?;
    }
    Ok(store.revision() >= revision)
}

/// A storage error as a Kubernetes error.
pub fn storage_error(error: StoreError) -> ApiError {
    match error {
        StoreError::Compacted { .. } => ApiError::expired(error.to_string()),
        StoreError::Future { asked, current } => ApiError::revision_too_large(asked, current),
        StoreError::Undecided { .. } | StoreError::Late => {
            let mut undecided = ApiError::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", error.to_string());
            undecided.retry_after = Some(1);
            undecided
        }
        StoreError::Closed
        | StoreError::Commit { .. }
        | StoreError::Full { .. }
        | StoreError::Open { .. }
        | StoreError::Settings { .. }
        | StoreError::Refused { .. }
        | StoreError::Unreachable { .. } => {
            let mut refused =
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", error.to_string());
            refused.retry_after = Some(1);
            refused
        }
    }
}

fn continue_token(revision: i64, start: &str) -> String {
    URL_SAFE_NO_PAD.encode(json!({"v": "meta.k8s.io/v1", "rv": revision, "start": start}).to_string())
}

fn parse_continue(token: &str) -> Result<(i64, String)> {
    let parsed = URL_SAFE_NO_PAD
        .decode(token.trim_end_matches('='))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok())
        .and_then(|value| Some((value["rv"].as_i64()?, value["start"].as_str()?.to_string())));
    parsed.ok_or_else(|| ApiError::bad_request("continue key is not valid: start the list again without it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiting_for_a_future_revision_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let store = crate::store::embedded::Embedded::open(&folder.path().join("store.redb")).unwrap();
        let future = store.revision() + 7;
        let error = wait_for_revision(&store, future).await.unwrap_err();
        assert_eq!((error.code.as_u16(), error.retry_after), (504, Some(1)));
        assert_eq!(error.causes[0].reason, "ResourceVersionTooLarge");
    }

    #[test]
    fn a_continue_token_carries_revision_and_place() {
        let token = continue_token(1018, "ns/name\0");
        assert_eq!(parse_continue(&token).unwrap(), (1018, "ns/name\0".to_string()));
        assert!(parse_continue("nonsense").is_err());
    }
}
