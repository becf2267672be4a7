//! Handlers of requests on resources: one file per verb, and `write` for the parts that writes share.
//! Requests arrive parsed, authenticated and authorized.

pub mod create;
pub mod delete;
pub mod deletecollection;
pub mod get;
pub mod list;
pub mod metadata;
pub mod patch;
pub mod scale;
pub mod update;
pub mod watch;
pub mod write;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, header};
use serde_json::Value;
use tokio::time::Instant;

use crate::auth::{self, User};
use crate::kinds::{Backing, Resource};
use crate::object;
use crate::output::{Body, Shape};
use crate::request::Query;
use crate::state::ServerState;
use crate::status::{ApiError, Result};

/// One request on a resource.
#[derive(Clone, Debug)]
pub struct Call {
    /// The user.
    pub user: User,
    /// The resource.
    pub resource: Arc<Resource>,
    /// Empty for cluster scope or all namespaces.
    pub namespace: String,
    /// Empty for the collection.
    pub name: String,
    /// Empty for the object itself.
    pub subresource: String,
    /// The query parameters.
    pub query: Query,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// When the last of its writes must have been sent to the store.
    pub deadline: Instant,
}

/// How long a request may retry its read-modify-write when other writers conflict. Shorter than the time
/// between the end of one leader's term and the start of the next (`operator::leader`), so that no write of
/// the old leader lands among those of the new one.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(6);

impl Call {
    /// A request that the server makes itself.
    pub fn internal(resource: Arc<Resource>, namespace: &str, name: &str) -> Self {
        Self {
            user: User::server(),
            resource,
            namespace: namespace.into(),
            name: name.into(),
            subresource: String::new(),
            query: Query { field_manager: "russet-apiserver".into(), ..Query::default() },
            headers: HeaderMap::new(),
            body: Bytes::new(),
            deadline: Instant::now() + REQUEST_TIMEOUT,
        }
    }

    /// A header as text, or empty.
    pub fn header(&self, name: header::HeaderName) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The requested output format.
    pub fn shape(&self) -> Result<Shape> {
        Shape::negotiate(self.header(header::ACCEPT))
    }

    /// The storage key.
    pub fn key(&self) -> String {
        self.resource.key(&self.namespace, &self.name)
    }

    /// The field manager: the query parameter, else the first part of the user agent.
    pub fn manager(&self) -> String {
        if !self.query.field_manager.is_empty() {
            return self.query.field_manager.clone();
        }
        let agent = self.header(header::USER_AGENT).split('/').next().unwrap_or_default();
        let name: String = agent.chars().filter(|c| !c.is_control()).take(128).collect();
        if name.is_empty() { "unknown".into() } else { name }
    }

    /// 404 for this object.
    pub fn not_found(&self) -> ApiError {
        ApiError::not_found(&self.resource.group, &self.resource.plural, &self.name)
    }

    /// 422 for this object.
    pub fn invalid(&self, causes: Vec<crate::status::Cause>) -> ApiError {
        ApiError::invalid(&self.resource.group, &self.resource.kind, &self.name, causes)
    }

    /// 403 for this object.
    pub fn forbidden(&self, why: impl std::fmt::Display) -> ApiError {
        ApiError::forbidden(&self.resource.group, &self.resource.plural, &self.name, why)
    }
}

/// Dispatches a request to its handler.
pub async fn dispatch(api: &Arc<ServerState>, verb: &str, call: Call) -> Result<Response<Body>> {
    if call.resource.backing == Backing::Computed {
        if call.shape()? != Shape::Object {
            return Err(Shape::not_acceptable());
        }
        return if verb == "create" && call.name.is_empty() {
            auth::reviews::create(api, &call)
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
        ("token", "create") => auth::reviews::service_account_token(api, &call),
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

/// Rejects a write in a namespace that accepts no new objects.
fn check_namespace(api: &ServerState, call: &Call) -> Result<()> {
    if !call.resource.namespaced {
        return Ok(());
    }
    if call.namespace.is_empty() {
        return Err(ApiError::bad_request("an empty namespace may not be set during creation"));
    }
    match api.store.get(&crate::kinds::builtin_namespace_key(&call.namespace)) {
        None => Err(ApiError::not_found("", "namespaces", &call.namespace)),
        Some(record) if object::is_terminating(record.object()) => Err(call
            .forbidden(format!(
                "unable to create new content in namespace {} because it is being terminated",
                call.namespace
            ))
            .with_causes(vec![crate::status::Cause {
                reason: "NamespaceTerminating".into(),
                message: format!("namespace {} is being terminated", call.namespace),
                field: "metadata.namespace".into(),
            }])),
        Some(_) => Ok(()),
    }
}

/// A response with one object in the requested format.
fn respond(
    call: &Call,
    code: http::StatusCode,
    object: &Value,
    warnings: &[String],
) -> Result<Response<Body>> {
    let shape = call.shape()?;
    let shown = crate::output::to_shape(&call.resource, object, shape, &call.query.include_object, true);
    let mut response = crate::output::value(code, &shown);
    crate::output::warn(&mut response, warnings);
    Ok(response)
}
