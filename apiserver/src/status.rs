//! API errors: one type that becomes a Kubernetes `Status` object. Not here: which error a request gets; the
//! verbs decide.

use std::ops::{Deref, DerefMut};

use http::StatusCode;
use serde_json::{Map, Value, json};

/// One cause in a `Status`, for example one invalid field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Machine-readable reason, such as `FieldValueInvalid`; empty when the message is enough.
    pub reason: String,
    /// Message for people.
    pub message: String,
    /// Path of the field, such as `spec.replicas`; empty when the cause is not a field.
    pub field: String,
}

/// An error response: becomes a `Status` with `status: Failure`. Boxed, because almost every function here
/// can fail and almost no request does.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", .0.message)]
pub struct ApiError(Box<ErrorBody>);

impl Deref for ApiError {
    type Target = ErrorBody;

    fn deref(&self) -> &ErrorBody {
        &self.0
    }
}

impl DerefMut for ApiError {
    fn deref_mut(&mut self) -> &mut ErrorBody {
        &mut self.0
    }
}

/// The contents of an error.
#[derive(Clone, Debug)]
pub struct ErrorBody {
    /// HTTP status code.
    pub code: StatusCode,
    /// Kubernetes reason, such as `NotFound`.
    pub reason: &'static str,
    /// Message for people.
    pub message: String,
    /// API group of the object, for the details.
    pub group: String,
    /// Plural resource or kind of the object, for the details.
    pub kind: String,
    /// Name of the object, for the details.
    pub name: String,
    /// The causes, for the details.
    pub causes: Vec<Cause>,
    /// Seconds after which the client should retry.
    pub retry_after: Option<u64>,
    /// For an expired list: a token that continues it at the current state.
    pub continue_token: Option<String>,
}

/// The result of every handler.
pub type Result<T> = std::result::Result<T, ApiError>;

fn qualified(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_string() } else { format!("{resource}.{group}") }
}

impl ApiError {
    /// An error with a code, a reason and a message, and no details.
    pub fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorBody {
            code,
            reason,
            message: message.into(),
            group: String::new(),
            kind: String::new(),
            name: String::new(),
            causes: Vec::new(),
            retry_after: None,
            continue_token: None,
        }))
    }

    /// Adds the object the error is about.
    #[must_use]
    pub fn about(mut self, group: &str, kind: &str, name: &str) -> Self {
        self.group = group.to_string();
        self.kind = kind.to_string();
        self.name = name.to_string();
        self
    }

    /// Adds causes.
    #[must_use]
    pub fn with_causes(mut self, causes: Vec<Cause>) -> Self {
        self.causes = causes;
        self
    }

    /// 404: no such object.
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "NotFound",
            format!("{} \"{name}\" not found", qualified(group, resource)),
        )
        .about(group, resource, name)
    }

    /// 404: no such path or resource type.
    pub fn no_such_path() -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource")
    }

    /// 409: an object of this name exists.
    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            "AlreadyExists",
            format!("{} \"{name}\" already exists", qualified(group, resource)),
        )
        .about(group, resource, name)
    }

    /// 409: the object changed since it was read, or the operation conflicts with its state.
    pub fn conflict(group: &str, resource: &str, name: &str, why: &str) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            "Conflict",
            format!("Operation cannot be fulfilled on {} \"{name}\": {why}", qualified(group, resource)),
        )
        .about(group, resource, name)
    }

    /// 409 with the message that clients know for an optimistic-concurrency conflict.
    pub fn modified(group: &str, resource: &str, name: &str) -> Self {
        Self::conflict(
            group,
            resource,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    /// 422: the object violates its schema or a rule.
    pub fn invalid(group: &str, kind: &str, name: &str, causes: Vec<Cause>) -> Self {
        let problem: Vec<String> = causes
            .iter()
            .map(|cause| {
                if cause.field.is_empty() {
                    cause.message.clone()
                } else {
                    format!("{}: {}", cause.field, cause.message)
                }
            })
            .collect();
        let problem = match problem.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        Self::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "Invalid",
            format!("{} \"{name}\" is invalid: {problem}", qualified(group, kind)),
        )
        .about(group, kind, name)
        .with_causes(causes)
    }

    /// 422 for one field.
    pub fn invalid_field(
        group: &str,
        kind: &str,
        name: &str,
        field: &str,
        message: impl Into<String>,
    ) -> Self {
        Self::invalid(
            group,
            kind,
            name,
            vec![Cause { reason: "FieldValueInvalid".into(), message: message.into(), field: field.into() }],
        )
    }

    /// 400: the request is malformed.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// 401: the user is not authenticated.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", message)
    }

    /// 403: the user is authenticated but not authorized.
    pub fn forbidden(group: &str, resource: &str, name: &str, why: impl std::fmt::Display) -> Self {
        let what = qualified(group, resource);
        let message = if name.is_empty() {
            format!("{what} is forbidden: {why}")
        } else {
            format!("{what} \"{name}\" is forbidden: {why}")
        };
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message).about(group, resource, name)
    }

    /// 405: the resource does not have the verb.
    pub fn method_not_allowed() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    /// 410: the requested revision is no longer available.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GONE, "Expired", message)
    }

    /// 415: an unsupported body or patch type.
    pub fn unsupported_media_type(given: &str, supported: &str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedMediaType",
            format!(
                "the body of the request was in an unknown format ({given}) - accepted media types include: {supported}"
            ),
        )
    }

    /// 413: the body exceeds the limit.
    pub fn too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "RequestEntityTooLarge",
            format!("the request body is larger than the {limit} bytes this server reads; split the object"),
        )
    }

    /// 504: the requested revision is in the future.
    pub fn revision_too_large(asked: u64, current: u64) -> Self {
        let mut error = Self::new(
            StatusCode::GATEWAY_TIMEOUT,
            "Timeout",
            format!("Too large resource version: {asked}, current: {current}"),
        )
        .with_causes(vec![Cause {
            reason: "ResourceVersionTooLarge".into(),
            message: "Too large resource version".into(),
            field: String::new(),
        }]);
        error.retry_after = Some(1);
        error
    }

    /// 500: an internal error.
    pub fn internal(message: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "InternalError",
            format!("Internal error occurred: {message}"),
        )
    }

    /// The `Status` object.
    pub fn to_value(&self) -> Value {
        let mut details = Map::new();
        for (field, value) in [("name", &self.name), ("group", &self.group), ("kind", &self.kind)] {
            if !value.is_empty() {
                details.insert(field.into(), json!(value));
            }
        }
        if !self.causes.is_empty() {
            let causes: Vec<Value> = self
                .causes
                .iter()
                .map(|cause| {
                    let mut entry = Map::new();
                    if !cause.reason.is_empty() {
                        entry.insert("reason".into(), json!(cause.reason));
                    }
                    entry.insert("message".into(), json!(cause.message));
                    if !cause.field.is_empty() {
                        entry.insert("field".into(), json!(cause.field));
                    }
                    Value::Object(entry)
                })
                .collect();
            details.insert("causes".into(), Value::Array(causes));
        }
        if let Some(seconds) = self.retry_after {
            details.insert("retryAfterSeconds".into(), json!(seconds));
        }
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Failure", "message": self.message, "reason": self.reason, "code": self.code.as_u16(),
        });
        if let Some(token) = &self.continue_token {
            status["metadata"] = json!({"continue": token});
        }
        if !details.is_empty() {
            status["details"] = Value::Object(details);
        }
        status
    }
}

/// The `Status` of a completed deletion.
pub fn deleted(group: &str, resource: &str, name: &str, uid: &str) -> Value {
    let mut details = json!({"name": name, "kind": resource, "uid": uid});
    if !group.is_empty() {
        details["group"] = json!(group);
    }
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_object_lists_every_cause_and_its_code() {
        let error = ApiError::invalid(
            "russet.dev",
            "Model",
            "m",
            vec![Cause {
                reason: "FieldValueRequired".into(),
                message: "Required value".into(),
                field: "spec.uri".into(),
            }],
        );
        let status = error.to_value();
        assert_eq!(status["code"], 422);
        assert_eq!(status["message"], "Model.russet.dev \"m\" is invalid: spec.uri: Required value");
        assert_eq!(status["details"]["causes"][0]["field"], "spec.uri");
    }
}
