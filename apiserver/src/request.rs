//! Parses method, path and query of a request. Not here: whether the request is allowed or possible.

use http::Method;

use crate::status::{ApiError, Cause, Result};

/// The resource a path addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestTarget {
    /// Empty for the core group.
    pub group: String,
    /// Such as `v1`.
    pub version: String,
    /// Empty when the path names none.
    pub namespace: String,
    /// The plural.
    pub resource: String,
    /// Empty for the collection.
    pub name: String,
    /// Empty for the object itself.
    pub subresource: String,
}

/// Parses a path under `/api/v1/` or `/apis/GROUP/VERSION/`; `None` when it addresses no resource.
pub fn target(path: &str) -> Option<RequestTarget> {
    let mut parts = path.trim_matches('/').split('/').map(decode_percent);
    let (group, version) = match parts.next()?.as_str() {
        "api" => (String::new(), parts.next()?),
        "apis" => (parts.next()?, parts.next()?),
        _ => return None,
    };
    let rest: Vec<String> = parts.collect();
    if rest.iter().any(String::is_empty) {
        return None;
    }
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    let (namespace, resource, name, subresource) = match rest.as_slice() {
        [] => return None,
        // A namespace itself, or one of its own subresources.
        ["namespaces"] => ("", "namespaces", "", ""),
        ["namespaces", name] => (*name, "namespaces", *name, ""),
        ["namespaces", name, subresource @ ("status" | "finalize")] => {
            (*name, "namespaces", *name, *subresource)
        }
        ["namespaces", namespace, resource] => (*namespace, *resource, "", ""),
        ["namespaces", namespace, resource, name] => (*namespace, *resource, *name, ""),
        ["namespaces", namespace, resource, name, subresource] => {
            (*namespace, *resource, *name, *subresource)
        }
        [resource] => ("", *resource, "", ""),
        [resource, name] => ("", *resource, *name, ""),
        [resource, name, subresource] => ("", *resource, *name, *subresource),
        _ => return None,
    };
    Some(RequestTarget {
        group,
        version,
        namespace: namespace.into(),
        resource: resource.into(),
        name: name.into(),
        subresource: subresource.into(),
    })
}

/// The RBAC verb of a request on a resource; `None` for methods that the API does not use.
pub fn verb(method: &Method, target: &RequestTarget, query: &Query) -> Option<&'static str> {
    Some(match (method.as_str(), target.name.is_empty()) {
        ("GET" | "HEAD", _) if query.watch && target.subresource.is_empty() => "watch",
        ("GET" | "HEAD", false) => "get",
        ("GET" | "HEAD", true) => "list",
        ("POST", _) => "create",
        ("PUT", false) => "update",
        ("PATCH", false) => "patch",
        ("DELETE", false) => "delete",
        ("DELETE", true) => "deletecollection",
        _ => return None,
    })
}

/// The RBAC verb of a request on a path that is no resource; `None` for methods that HTTP does not define.
pub fn non_resource_verb(method: &Method) -> Option<&'static str> {
    Some(match method.as_str() {
        "GET" | "HEAD" => "get",
        "POST" => "post",
        "PUT" => "put",
        "PATCH" => "patch",
        "DELETE" => "delete",
        "OPTIONS" => "options",
        "CONNECT" => "connect",
        "TRACE" => "trace",
        _ => return None,
    })
}

/// Handling of unknown fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldValidation {
    /// Drop them silently.
    Ignore,
    /// Drop them with a warning.
    #[default]
    Warn,
    /// Reject the request.
    Strict,
}

/// The query parameters of the API.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// `watch`
    pub watch: bool,
    /// `dryRun=All`
    pub dry_run: bool,
    /// `force`
    pub force: bool,
    /// `fieldManager`
    pub field_manager: String,
    /// `fieldValidation`
    pub field_validation: FieldValidation,
    /// `labelSelector`
    pub label_selector: String,
    /// `fieldSelector`
    pub field_selector: String,
    /// `limit`
    pub limit: usize,
    /// `continue`
    pub continue_token: String,
    /// `resourceVersion`
    pub resource_version: String,
    /// `resourceVersionMatch`
    pub resource_version_match: String,
    /// `allowWatchBookmarks`
    pub bookmarks: bool,
    /// `sendInitialEvents`
    pub initial_events: Option<bool>,
    /// `timeoutSeconds`
    pub timeout_seconds: Option<u64>,
    /// `propagationPolicy`
    pub propagation: String,
    /// `gracePeriodSeconds`
    pub grace_seconds: Option<i64>,
    /// `includeObject` of Tables
    pub include_object: String,
    /// `pretty`
    pub pretty: bool,
}

impl Query {
    /// Parses a query string.
    pub fn parse(text: &str) -> Result<Self> {
        let mut query = Self::default();
        for (key, value) in pairs(text) {
            let truth = || value.is_empty() || !matches!(value.to_ascii_lowercase().as_str(), "false" | "0");
            match key.as_str() {
                "watch" => query.watch = truth(),
                "dryRun" => match value.as_str() {
                    "All" => query.dry_run = true,
                    "" => {}
                    other => {
                        return Err(ApiError::invalid_field(
                            "",
                            "DryRun",
                            "",
                            "dryRun",
                            format!("Unsupported value: \"{other}\": supported values: \"All\""),
                        ));
                    }
                },
                "force" => query.force = truth(),
                "fieldManager" => query.field_manager = value,
                "fieldValidation" => {
                    query.field_validation = match value.as_str() {
                        "Ignore" => FieldValidation::Ignore,
                        "Warn" | "" => FieldValidation::Warn,
                        "Strict" => FieldValidation::Strict,
                        other => {
                            return Err(ApiError::invalid_field(
                                "",
                                "FieldValidation",
                                "",
                                "fieldValidation",
                                format!(
                                    "Unsupported value: \"{other}\": supported values: \"\", \"Ignore\", \"Strict\", \"Warn\""
                                ),
                            ));
                        }
                    }
                }
                "labelSelector" => query.label_selector = value,
                "fieldSelector" => query.field_selector = value,
                "limit" => {
                    query.limit = value
                        .parse()
                        .map_err(|_| ApiError::bad_request(format!("limit {value:?} is not a number")))?;
                }
                "continue" => query.continue_token = value,
                "resourceVersion" => query.resource_version = value,
                "resourceVersionMatch" => query.resource_version_match = value,
                "allowWatchBookmarks" => query.bookmarks = truth(),
                "sendInitialEvents" => query.initial_events = Some(truth()),
                "timeoutSeconds" => query.timeout_seconds = value.parse().ok(),
                "propagationPolicy" => query.propagation = value,
                "gracePeriodSeconds" => query.grace_seconds = value.parse().ok(),
                "includeObject" => query.include_object = value,
                "pretty" => query.pretty = truth(),
                // Parameters of other versions and subresources are ignored, as Kubernetes does.
                _ => {}
            }
        }
        query.check()?;
        Ok(query)
    }

    /// Rejects contradictory combinations of list and watch options.
    fn check(&self) -> Result<()> {
        let refuse = |field: &str, message: &str| {
            Err(ApiError::invalid(
                "meta.k8s.io",
                "ListOptions",
                "",
                vec![Cause {
                    reason: "FieldValueForbidden".into(),
                    message: format!("Forbidden: {message}"),
                    field: field.into(),
                }],
            ))
        };
        let matching = self.resource_version_match.as_str();
        if !matches!(matching, "" | "Exact" | "NotOlderThan") {
            return Err(ApiError::invalid_field(
                "meta.k8s.io",
                "ListOptions",
                "",
                "resourceVersionMatch",
                format!(
                    "Unsupported value: \"{matching}\": supported values: \"Exact\", \"NotOlderThan\", \"\""
                ),
            ));
        }
        if self.watch {
            if self.initial_events.is_some() && matching != "NotOlderThan" {
                return refuse(
                    "resourceVersionMatch",
                    "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
                );
            }
            if self.initial_events.is_none() && !matching.is_empty() {
                return refuse(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
                );
            }
            return Ok(());
        }
        if self.initial_events.is_some() {
            return refuse("sendInitialEvents", "sendInitialEvents is forbidden for list");
        }
        if !matching.is_empty() {
            if !self.continue_token.is_empty() {
                return refuse(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden when continue is provided",
                );
            }
            if self.resource_version.is_empty() {
                return refuse(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden unless resourceVersion is provided",
                );
            }
            if matching == "Exact" && self.resource_version == "0" {
                return refuse(
                    "resourceVersionMatch",
                    "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
                );
            }
        }
        Ok(())
    }

    /// The requested revision; `None` when unset or "0".
    pub fn revision(&self) -> Result<Option<u64>> {
        match self.resource_version.as_str() {
            "" | "0" => Ok(None),
            text => text.parse().map(Some).map_err(|_| {
                ApiError::bad_request(format!(
                    "invalid resource version {text:?}: it must be a number from this server"
                ))
            }),
        }
    }
}

fn pairs(text: &str) -> impl Iterator<Item = (String, String)> {
    text.split('&').filter(|part| !part.is_empty()).map(|part| {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        (decode_percent(&key.replace('+', " ")), decode_percent(&value.replace('+', " ")))
    })
}

/// `%41` to `A`; invalid escapes stay unchanged.
pub fn decode_percent(text: &str) -> String {
    if !text.contains('%') {
        return text.to_string();
    }
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let escaped = (bytes[index] == b'%')
            .then(|| bytes.get(index + 1..index + 3))
            .flatten()
            .and_then(|digits| hex::decode(digits).ok());
        match escaped {
            Some(byte) => {
                decoded.extend(byte);
                index += 3;
            }
            None => {
                decoded.push(bytes[index]);
                index += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_of_path_is_read() {
        for (path, expected) in [
            ("/api/v1/namespaces", Some(("", "v1", "", "namespaces", "", ""))),
            ("/api/v1/namespaces/a", Some(("", "v1", "a", "namespaces", "a", ""))),
            ("/api/v1/namespaces/a/finalize", Some(("", "v1", "a", "namespaces", "a", "finalize"))),
            ("/api/v1/namespaces/a/secrets", Some(("", "v1", "a", "secrets", "", ""))),
            (
                "/apis/g.io/v1/namespaces/a/things/b/status",
                Some(("g.io", "v1", "a", "things", "b", "status")),
            ),
            ("/apis/g.io/v1/things/b", Some(("g.io", "v1", "", "things", "b", ""))),
            (
                "/apis/rbac/v1/clusterroles/system%3Aadmin",
                Some(("rbac", "v1", "", "clusterroles", "system:admin", "")),
            ),
            ("/apis/g.io/v1", None),
            ("/healthz", None),
        ] {
            let expected =
                expected.map(|(group, version, namespace, resource, name, subresource)| RequestTarget {
                    group: group.into(),
                    version: version.into(),
                    namespace: namespace.into(),
                    resource: resource.into(),
                    name: name.into(),
                    subresource: subresource.into(),
                });
            assert_eq!(target(path), expected, "{path}");
        }
    }

    #[test]
    fn contradicting_list_options_are_refused() {
        for bad in [
            "resourceVersionMatch=Exact&resourceVersion=0",
            "sendInitialEvents=true",
            "watch=1&sendInitialEvents=true",
            "continue=x&resourceVersionMatch=Exact&resourceVersion=3",
            "dryRun=Some",
            "fieldValidation=Maybe",
        ] {
            assert!(Query::parse(bad).is_err(), "{bad}");
        }
        let query = Query::parse(
            "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&labelSelector=a%3Db",
        )
        .unwrap();
        assert!(query.watch && query.initial_events == Some(true) && query.label_selector == "a=b");
    }
}
