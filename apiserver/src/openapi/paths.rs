//! The paths of one resource: its operations and their query parameters.
//!
//! Not here: the handlers of the operations.

use serde_json::{Map, Value, json};

use super::Resource;
use crate::schema::builtin::COMPONENTS;

const PATCH_TYPES: &[&str] = &[
    "application/apply-patch+yaml",
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
];

/// An operation: HTTP method, verb, word in its id, and action.
struct Operation {
    method: &'static str,
    verb: &'static str,
    word: &'static str,
    action: &'static str,
}

const ON_LISTS: &[Operation] = &[
    Operation { method: "get", verb: "list", word: "list", action: "list" },
    Operation { method: "post", verb: "create", word: "create", action: "post" },
    Operation {
        method: "delete",
        verb: "deletecollection",
        word: "deleteCollection",
        action: "deletecollection",
    },
];

const ON_OBJECTS: &[Operation] = &[
    Operation { method: "get", verb: "get", word: "read", action: "get" },
    Operation { method: "put", verb: "update", word: "replace", action: "put" },
    Operation { method: "patch", verb: "patch", word: "patch", action: "patch" },
    Operation { method: "delete", verb: "delete", word: "delete", action: "delete" },
];

/// Adds the paths of `resource` to the document.
pub fn add(resource: &Resource<'_>, component: &str, paths: &mut Map<String, Value>) {
    let Resource { group, version, plural, namespaced, subresources, .. } = resource;
    let root = if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
    let list = if *namespaced {
        format!("{root}/namespaces/{{namespace}}/{plural}")
    } else {
        format!("{root}/{plural}")
    };
    paths.insert(list.clone(), item(resource, component, ON_LISTS, "", *namespaced));
    if *namespaced && resource.verbs.contains(&"list") {
        paths.insert(
            format!("{root}/{plural}"),
            item(resource, component, &ON_LISTS[..1], "ForAllNamespaces", false),
        );
    }
    if resource.verbs.iter().any(|verb| ["get", "update", "patch", "delete"].contains(verb)) {
        paths.insert(format!("{list}/{{name}}"), item(resource, component, ON_OBJECTS, "", *namespaced));
    }
    for subresource in *subresources {
        let mut suffix = subresource.to_string();
        if let Some(first) = suffix.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        let operations = if *subresource == "token" { &ON_LISTS[1..2] } else { &ON_OBJECTS[..3] };
        let path = format!("{list}/{{name}}/{subresource}");
        paths.insert(path, item(resource, component, operations, &suffix, *namespaced));
    }
}

fn item(
    resource: &Resource<'_>,
    component: &str,
    operations: &[Operation],
    suffix: &str,
    namespaced: bool,
) -> Value {
    let mut item = Map::new();
    // Subresources are served independent of the verbs of their resource.
    let subresource = !suffix.is_empty() && suffix != "ForAllNamespaces";
    for operation in operations {
        if subresource || resource.verbs.contains(&operation.verb) {
            item.insert(operation.method.into(), describe(resource, component, operation, suffix));
        }
    }
    let mut parameters = Vec::new();
    if operations.iter().any(|operation| operation.verb == "get") || subresource {
        parameters.push(in_path("name", &format!("name of the {}", resource.kind)));
    }
    if namespaced {
        parameters.push(in_path("namespace", "object name and auth scope, such as for teams and projects"));
    }
    parameters.push(in_query("pretty", "string", "If 'true', then the output is pretty printed."));
    item.insert("parameters".into(), parameters.into());
    Value::Object(item)
}

fn describe(resource: &Resource<'_>, component: &str, operation: &Operation, suffix: &str) -> Value {
    let Operation { method, verb, word, action } = operation;
    let Resource { kind, version, group, .. } = resource;
    let reference = |name: &str| json!({"$ref": format!("{COMPONENTS}{name}")});
    let answer = match *verb {
        "list" => reference(&format!("{component}List")),
        "delete" | "deletecollection" => reference("io.k8s.apimachinery.pkg.apis.meta.v1.Status"),
        _ => reference(component),
    };
    let scope = if resource.namespaced && suffix != "ForAllNamespaces" { "Namespaced" } else { "" };
    let tag: String =
        format!("{}_{version}", if group.is_empty() { "core" } else { group }).replace('.', "_");
    let mut described = json!({
        "tags": [tag],
        "description": format!("{word} the specified {kind}"),
        "operationId": format!("{word}{tag}{scope}{kind}{suffix}"),
        "parameters": query(verb),
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": answer}}},
            "401": {"description": "Unauthorized"},
        },
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": resource.identity(),
    });
    let body = match *method {
        "patch" => {
            let patch = reference("io.k8s.apimachinery.pkg.apis.meta.v1.Patch");
            let content: Map<String, Value> = PATCH_TYPES
                .iter()
                // Custom resources have no merge keys.
                .filter(|name| resource.schema.is_none() || !name.contains("strategic"))
                .map(|name| (name.to_string(), json!({ "schema": patch })))
                .collect();
            Some((content.into(), true))
        }
        "post" | "put" => Some((json!({"*/*": {"schema": reference(component)}}), true)),
        "delete" => {
            let options = reference("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions");
            Some((json!({"*/*": {"schema": options}}), false))
        }
        _ => None,
    };
    if let Some((content, required)) = body {
        let mut body: Value = json!({ "content": content });
        if required {
            body["required"] = true.into();
        }
        described["requestBody"] = body;
    }
    described
}

fn query(verb: &str) -> Vec<Value> {
    let dry_run = || {
        in_query("dryRun", "string", "When present, modifications are not persisted; the valid value is All.")
    };
    let manager = || {
        in_query(
            "fieldManager",
            "string",
            "The name of the actor or entity that makes these changes, at most 128 characters.",
        )
    };
    let validation = || {
        in_query(
            "fieldValidation",
            "string",
            "What to do about unknown or duplicate fields: Ignore, Warn (the default) or Strict.",
        )
    };
    let selectors = || {
        [
            ("allowWatchBookmarks", "boolean", "Requests watch events of type BOOKMARK."),
            ("continue", "string", "The continue token of the previous chunk of this list."),
            ("fieldSelector", "string", "Restricts the returned objects by their fields."),
            ("labelSelector", "string", "Restricts the returned objects by their labels."),
            ("limit", "integer", "The most objects in one answer."),
            ("resourceVersion", "string", "Constrains which resource versions a request may be served from."),
            ("resourceVersionMatch", "string", "How resourceVersion is applied to list calls."),
            ("sendInitialEvents", "boolean", "Begins a watch with synthetic events for the current objects."),
            ("timeoutSeconds", "integer", "Ends the call after this time, regardless of activity."),
            ("watch", "boolean", "Watches for changes instead of listing."),
        ]
        .map(|(name, kind, description)| in_query(name, kind, description))
    };
    let deletion = || {
        [
            ("gracePeriodSeconds", "integer", "The duration in seconds before the object should be deleted."),
            ("orphanDependents", "boolean", "Deprecated: use propagationPolicy."),
            (
                "propagationPolicy",
                "string",
                "Whether and how garbage collection is performed: Orphan, Background or Foreground.",
            ),
        ]
        .map(|(name, kind, description)| in_query(name, kind, description))
    };
    let mut parameters = Vec::new();
    match verb {
        "list" => parameters.extend(selectors()),
        "create" | "update" => parameters.extend([dry_run(), manager(), validation()]),
        "patch" => parameters.extend([
            dry_run(),
            manager(),
            validation(),
            in_query(
                "force",
                "boolean",
                "Takes over the conflicting fields of other managers; for apply patches only.",
            ),
        ]),
        "delete" => {
            parameters.push(dry_run());
            parameters.extend(deletion());
        }
        "deletecollection" => {
            parameters.push(dry_run());
            parameters.extend(selectors());
            parameters.extend(deletion());
        }
        _ => {}
    }
    parameters
}

fn in_query(name: &str, kind: &str, description: &str) -> Value {
    json!({"name": name, "in": "query", "description": description, "schema": {"type": kind, "uniqueItems": true}})
}

fn in_path(name: &str, description: &str) -> Value {
    json!({"name": name, "in": "path", "required": true, "description": description, "schema": {"type": "string", "uniqueItems": true}})
}
