//! One request on a resource, as every station after authentication sees it. No logic beyond reading it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, header};
use tokio::time::Instant;

use crate::auth::user::User;
use crate::kinds::resource::Resource;
use crate::output::Shape;
use crate::request::Query;
use crate::status::{ApiError, Cause, Result};

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
    pub fn invalid(&self, causes: Vec<Cause>) -> ApiError {
        ApiError::invalid(&self.resource.group, &self.resource.kind, &self.name, causes)
    }

    /// 403 for this object.
    pub fn forbidden(&self, why: impl std::fmt::Display) -> ApiError {
        ApiError::forbidden(&self.resource.group, &self.resource.plural, &self.name, why)
    }
}
