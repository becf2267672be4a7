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
    /// Whether the path is one of the deprecated `/watch/` ones.
    pub watch: bool,
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
    let (watch, rest) = match rest.as_slice() {
        ["watch", rest @ ..] if !rest.is_empty() => (true, rest),
        rest => (false, rest),
    };
    let (namespace, resource, name, subresource) = match rest {
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
        watch,
    })
}

/// The RBAC verb of a request on a resource; `None` for methods that the API does not use.
pub fn verb(method: &Method, target: &RequestTarget, query: &Query) -> Option<&'static str> {
    Some(match (method.as_str(), target.name.is_empty()) {
        ("GET" | "HEAD", _) if target.watch => "watch",
        (_, _) if target.watch => return None,
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
                    // Also the empty one: a client that asks for a dry run must not get a real write.
                    other => {
                        return Err(ApiError::invalid_field(
                            "meta.k8s.io",
                            "WriteOptions",
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
                "timeoutSeconds" if value.is_empty() => {}
                "timeoutSeconds" => {
                    // A negative time is over already.
                    let seconds = match value.parse::<u64>() {
                        Err(_) if value.parse::<i64>().is_ok() => Ok(0),
                        parsed => parsed,
                    };
                    let not_number =
                        |_| ApiError::bad_request(format!("timeoutSeconds {value:?} is not a number"));
                    query.timeout_seconds = Some(seconds.map_err(not_number)?);
                }
                "propagationPolicy" => query.propagation = value,
                "gracePeriodSeconds" if value.is_empty() => {}
                "gracePeriodSeconds" => {
                    let not_number =
                        |_| ApiError::bad_request(format!("gracePeriodSeconds {value:?} is not a number"));
                    query.grace_seconds = Some(value.parse().map_err(not_number)?);
                }
                "includeObject" => query.include_object = value,
                "pretty" => query.pretty = truth(),
                // Parameters of other versions and subresources are ignored, as Kubernetes does.
                _ => {}
            }
        }
        query.check()?;
        Ok(query)
    }

    /// Rejects a field manager that Kubernetes does not record.
    fn check_manager(&self) -> Result<()> {
        let manager = &self.field_manager;
        let problem = if manager.len() > MAX_MANAGER_BYTES {
            ("FieldValueTooLong", format!("Too long: may not be more than {MAX_MANAGER_BYTES} bytes"))
        } else if manager.chars().any(|letter| !is_printable(letter)) {
            (
                "FieldValueInvalid",
                format!("Invalid value: {manager:?}: should only contain printable characters"),
            )
        } else {
            return Ok(());
        };
        let (reason, message) = problem;
        let cause = Cause { reason: reason.into(), message, field: "fieldManager".into() };
        Err(ApiError::invalid("meta.k8s.io", "WriteOptions", "", vec![cause]))
    }

    /// Rejects contradictory combinations of list and watch options.
    fn check(&self) -> Result<()> {
        self.check_manager()?;
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

/// Maximum bytes of a field manager's name, as in Kubernetes: every object that it writes holds the name.
const MAX_MANAGER_BYTES: usize = 128;

/// Whether a character shows: neither a control, nor a blank but for the space, nor one that only changes others.
fn is_printable(letter: char) -> bool {
    let formats = matches!(letter, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e000}'..='\u{f8ff}');
    letter == ' ' || !(letter.is_control() || letter.is_whitespace() || formats)
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
                    watch: false,
                });
            assert_eq!(target(path), expected, "{path}");
        }
        for path in ["namespaces", "namespaces/a/configmaps", "namespaces/a/configmaps/b", "configmaps"] {
            let plain = target(&format!("/api/v1/{path}")).unwrap();
            assert_eq!(
                target(&format!("/api/v1/watch/{path}")),
                Some(RequestTarget { watch: true, ..plain })
            );
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
            "dryRun=",
            "dryRun",
            "dryRun=All&dryRun=",
            "fieldManager=a%0Ab",
            "fieldManager=a%E2%80%8Bb",
            "timeoutSeconds=abc",
            "gracePeriodSeconds=1.5",
            "fieldValidation=Maybe",
        ] {
            assert!(Query::parse(bad).is_err(), "{bad}");
        }
        let manager = |length: usize| format!("fieldManager={}", "m".repeat(length));
        assert!(Query::parse(&manager(128)).is_ok() && Query::parse(&manager(129)).is_err());
        assert_eq!(Query::parse("fieldManager=Ä%20b&timeoutSeconds=-1").unwrap().timeout_seconds, Some(0));
        let query = Query::parse(
            "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&labelSelector=a%3Db",
        )
        .unwrap();
        assert!(query.watch && query.initial_events == Some(true) && query.label_selector == "a=b");
    }
}
