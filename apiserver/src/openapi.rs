//! OpenAPI v3: one document per group and version, and the schemas of the built-in kinds.
//!
//! Not here: the index at `/openapi/v3` with its hashes. OpenAPI v2 is an empty document ([`v2`]).

mod paths;
pub mod v2;

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::schema::builtin::{self, COMPONENTS};

/// A served resource, as OpenAPI needs it.
#[derive(Debug, Clone)]
pub struct Resource<'a> {
    /// Empty for the core group.
    pub group: &'a str,
    /// `v1`.
    pub version: &'a str,
    /// `Secret`.
    pub kind: &'a str,
    /// `secrets`.
    pub plural: &'a str,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// `create`, `get`, `list`, `watch`, `update`, `patch`, `delete`, `deletecollection`.
    pub verbs: &'a [&'a str],
    /// `status`, `scale`, …
    pub subresources: &'a [&'a str],
    /// A CRD version's `openAPIV3Schema`; none for the built-in kinds.
    pub schema: Option<&'a Value>,
}

impl Resource<'_> {
    /// The component that describes one object.
    fn component(&self) -> String {
        if let Some(name) = builtin::component(self.group, self.version, self.kind) {
            return name.to_owned();
        }
        let mut labels: Vec<&str> = self.group.split('.').filter(|label| !label.is_empty()).collect();
        labels.reverse();
        labels.extend([self.version, self.kind]);
        labels.join(".")
    }

    fn identity(&self) -> Value {
        json!({"group": self.group, "version": self.version, "kind": self.kind})
    }
}

/// The OpenAPI v3 document of `group_version` (`v1`, `apps/v1`); resources of other groups and versions are
/// left out.
pub fn document(group_version: &str, resources: &[Resource<'_>]) -> Value {
    let (group, version) = group_version.split_once('/').unwrap_or(("", group_version));
    let mut all_paths = Map::new();
    let mut schemas = Map::new();
    let mut required: BTreeSet<String> = [
        "io.k8s.apimachinery.pkg.apis.meta.v1.Patch",
        "io.k8s.apimachinery.pkg.apis.meta.v1.Status",
        "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions",
        "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta",
        "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
    ]
    .map(String::from)
    .into();
    for resource in resources.iter().filter(|resource| resource.group == group && resource.version == version)
    {
        let component = resource.component();
        let object = match resource.schema {
            Some(schema) => Some(published(resource, schema)),
            None if builtin::definition(&component).is_none() => Some(published(resource, &json!({}))),
            None => None,
        };
        match object {
            Some(object) => {
                schemas.insert(component.clone(), object);
            }
            None => {
                required.insert(component.clone());
            }
        }
        if resource.verbs.contains(&"list") {
            schemas.insert(format!("{component}List"), list_of(resource, &component));
        }
        paths::add(resource, &component, &mut all_paths);
    }
    add_reachable(required, &mut schemas);
    all_paths.sort_keys();
    schemas.sort_keys();
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "unversioned"},
        "paths": all_paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"BearerToken": {
                "type": "apiKey", "name": "authorization", "in": "header", "description": "Bearer Token authentication",
            }},
        },
    })
}

/// Adds the built-in components `required` and whatever the components refer to.
fn add_reachable(mut required: BTreeSet<String>, schemas: &mut Map<String, Value>) {
    schemas.values().for_each(|schema| references(schema, &mut required));
    while let Some(name) = required.pop_first() {
        if schemas.contains_key(&name) {
            continue;
        }
        let Some(definition) = builtin::definition(&name) else { continue };
        references(definition, &mut required);
        schemas.insert(name, definition.clone());
    }
}

fn references(schema: &Value, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(name) =
                map.get("$ref").and_then(Value::as_str).and_then(|name| name.strip_prefix(COMPONENTS))
            {
                found.insert(name.to_owned());
            }
            map.values().for_each(|child| references(child, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// A `$ref` with sibling fields, which OpenAPI 3.0 only allows beside `allOf`.
fn refer(component: &str, description: &str) -> Value {
    json!({"allOf": [{"$ref": format!("{COMPONENTS}{component}")}], "description": description, "default": {}})
}

const API_VERSION: &str = "APIVersion defines the versioned schema of this representation of an object.";
const KIND: &str =
    "Kind is the REST resource that this object represents, in CamelCase; it cannot be updated.";

/// The published schema of a CRD: with apiVersion, kind and metadata.
fn published(resource: &Resource<'_>, schema: &Value) -> Value {
    let mut schema = schema.clone();
    if !schema.is_object() {
        schema = json!({});
    }
    schema["type"] = "object".into();
    if !schema["properties"].is_object() {
        schema["properties"] = json!({});
        // The schema is unknown, so no field may be reported as unknown.
        if resource.schema.is_none() {
            schema["x-kubernetes-preserve-unknown-fields"] = true.into();
        }
    }
    schema["properties"]["apiVersion"] = json!({"type": "string", "description": API_VERSION});
    schema["properties"]["kind"] = json!({"type": "string", "description": KIND});
    schema["properties"]["metadata"] = refer(
        "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
        "Standard object metadata: name, namespace, labels, annotations.",
    );
    schema["x-kubernetes-group-version-kind"] = json!([resource.identity()]);
    schema
}

fn list_of(resource: &Resource<'_>, component: &str) -> Value {
    let Resource { group, version, kind, plural, .. } = resource;
    json!({
        "type": "object",
        "description": format!("{kind}List is a list of {kind}"),
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string", "description": API_VERSION},
            "kind": {"type": "string", "description": KIND},
            "metadata": refer("io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta", "Standard list metadata."),
            "items": {
                "type": "array",
                "description": format!("List of {plural}."),
                "items": {"$ref": format!("{COMPONENTS}{component}")},
            },
        },
        "x-kubernetes-group-version-kind": [{"group": group, "version": version, "kind": format!("{kind}List")}],
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Resource, document, references};

    const ALL: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

    fn secrets() -> Resource<'static> {
        Resource {
            group: "",
            version: "v1",
            kind: "Secret",
            plural: "secrets",
            namespaced: true,
            verbs: ALL,
            subresources: &[],
            schema: None,
        }
    }

    /// kubectl's check before it validates an apply: finds the PATCH of a kind and looks for
    /// `fieldValidation` in the query parameters.
    fn patch_takes(document: &Value, kind: &str, parameter: &str) -> bool {
        document["paths"].as_object().expect("paths").values().any(|path| {
            path["patch"]["x-kubernetes-group-version-kind"]["kind"] == kind
                && path["patch"]["parameters"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .any(|found| found["name"] == parameter && found["in"] == "query")
        })
    }

    fn every_reference_resolves(document: &Value) {
        let mut found = Default::default();
        references(document, &mut found);
        for name in found {
            assert!(document["components"]["schemas"].get(&name).is_some(), "{name} is not in the document");
        }
    }

    #[test]
    fn the_core_document_has_what_kubectl_looks_for() {
        let document = document("v1", &[secrets()]);
        assert!(patch_takes(&document, "Secret", "fieldValidation"));
        assert!(patch_takes(&document, "Secret", "dryRun"));
        assert!(patch_takes(&document, "Secret", "force"));
        every_reference_resolves(&document);
        let secret = &document["components"]["schemas"]["io.k8s.api.core.v1.Secret"];
        assert_eq!(
            secret["x-kubernetes-group-version-kind"],
            json!([{"group": "", "version": "v1", "kind": "Secret"}])
        );
        assert_eq!(secret["properties"]["data"]["additionalProperties"]["format"], "byte");
        assert!(secret["properties"]["metadata"]["description"].is_string());
        assert_eq!(
            document["paths"]["/api/v1/namespaces/{namespace}/secrets"]["get"]["x-kubernetes-action"],
            "list"
        );
    }

    #[test]
    fn a_custom_resource_shows_its_own_schema_and_subresources() {
        let schema = json!({"type": "object", "description": "A model.", "properties": {
            "spec": {"type": "object", "properties": {"replicas": {"type": "integer", "description": "How many."}}}}});
        let resource = Resource {
            group: "example.com",
            version: "v1",
            kind: "Model",
            plural: "models",
            namespaced: false,
            verbs: ALL,
            subresources: &["status", "scale"],
            schema: Some(&schema),
        };
        let document = document("example.com/v1", &[resource, secrets()]);
        every_reference_resolves(&document);
        let component = &document["components"]["schemas"]["com.example.v1.Model"];
        assert_eq!(component["properties"]["spec"]["properties"]["replicas"]["description"], "How many.");
        assert_eq!(component["description"], "A model.");
        let paths: Vec<&str> =
            document["paths"].as_object().expect("paths").keys().map(String::as_str).collect();
        assert_eq!(
            paths,
            [
                "/apis/example.com/v1/models",
                "/apis/example.com/v1/models/{name}",
                "/apis/example.com/v1/models/{name}/scale",
                "/apis/example.com/v1/models/{name}/status",
            ]
        );
        assert!(patch_takes(&document, "Model", "fieldValidation"));
        assert!(document["components"]["schemas"].get("io.k8s.api.core.v1.Secret").is_none());
    }
}
