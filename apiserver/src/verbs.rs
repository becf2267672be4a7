//! Handlers of requests on resources: one file per verb, and `write` for the parts that writes share.
//! Requests arrive parsed, authenticated and authorized.

pub mod create;
pub mod delete;
pub mod deletecollection;
pub mod get;
pub mod list;
pub mod metadata;
pub mod patch;
pub mod response;
pub mod reviews;
pub mod scale;
pub mod update;
pub mod watch;
pub mod write;

use std::sync::Arc;

use http::Response;

use crate::call::Call;
use crate::kinds::resource::Backing;
use crate::output::{Body, Shape};
use crate::state::ServerState;
use crate::status::{ApiError, Result};

/// Dispatches a request to its handler.
pub async fn dispatch(api: &Arc<ServerState>, verb: &str, call: Call) -> Result<Response<Body>> {
    if call.resource.backing == Backing::Computed {
        if call.shape()? != Shape::Object {
            return Err(Shape::not_acceptable());
        }
        return if verb == "create" && call.name.is_empty() {
            reviews::create(api, &call)
        } else {
            Err(ApiError::method_not_allowed())
        };
    }
    // A read with a resourceVersion accepts any state at least as new; all others must see everything
    // acknowledged before.
    let content = matches!(verb, "get" | "list" | "watch") && !call.query.resource_version.is_empty();
    if !content {
        api.store.read_barrier().await.map_err(list::storage_error)?;
    }
    let subresource = call.subresource.as_str();
    if !subresource.is_empty() && !call.resource.has_subresource(subresource) {
        return Err(ApiError::no_such_path());
    }
    match (subresource, verb) {
        ("token", "create") => reviews::service_account_token(api, &call),
        ("scale", _) => scale::handle(api, verb, &call).await,
        ("", "create") if !call.name.is_empty() => Err(ApiError::method_not_allowed()),
        ("", _) if !call.resource.verbs.contains(&verb) => Err(ApiError::method_not_allowed()),
        ("", "create") => create::handle(api, &call).await,
        ("", "delete") => delete::handle(api, &call).await,
        ("", "deletecollection") => deletecollection::handle(api, &call).await,
        ("", "list") => list::handle(api, &call).await,
        ("", "watch") => watch::handle(api, call).await,
        ("" | "status" | "approval", "get") => get::handle(api, &call),
        ("" | "status" | "approval" | "finalize", "update") => update::handle(api, &call).await,
        ("" | "status" | "approval", "patch") => patch::handle(api, &call).await,
        _ => Err(ApiError::method_not_allowed()),
    }
}
