//! Schemas of the built-in kinds, derived from the types of `k8s-openapi`.
//!
//! Not here: the kinds' behaviour. The table [`LISTS`] adds list types and keys, which those types lack.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::api::admissionregistration::v1 as admission;
use k8s_openapi::api::authentication::v1 as authentication;
use k8s_openapi::api::authorization::v1 as authorization;
use k8s_openapi::api::certificates::v1 as certificates;
use k8s_openapi::api::coordination::v1 as coordination;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::events::v1 as events;
use k8s_openapi::api::rbac::v1 as rbac;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as apiextensions;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{Schema, canonical, read, time};

/// Where a document keeps its components.
pub const COMPONENTS: &str = "#/components/schemas/";

/// Group, version, kind and the Rust type that describes it.
struct DocumentedKind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    component: fn() -> String,
    describe: fn(&mut SchemaGenerator),
}

macro_rules! kinds {
    ($($group:literal $version:literal: $module:ident { $($kind:ident),+ $(,)? })+) => {
        const KINDS: &[DocumentedKind] = &[$($(
            DocumentedKind {
                group: $group,
                version: $version,
                kind: stringify!($kind),
                component: || <$module::$kind as JsonSchema>::schema_name().into_owned(),
                describe: |generator| { generator.subschema_for::<$module::$kind>(); },
            },
        )+)+];
    };
}

kinds! {
    "" "v1": core { ConfigMap, Event, Namespace, ResourceQuota, Secret, ServiceAccount }
    "admissionregistration.k8s.io" "v1": admission { ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding }
    "apiextensions.k8s.io" "v1": apiextensions { CustomResourceDefinition }
    "authentication.k8s.io" "v1": authentication { SelfSubjectReview, TokenRequest, TokenReview }
    "authorization.k8s.io" "v1": authorization {
        LocalSubjectAccessReview, SelfSubjectAccessReview, SelfSubjectRulesReview, SubjectAccessReview,
    }
    "certificates.k8s.io" "v1": certificates { CertificateSigningRequest }
    "coordination.k8s.io" "v1": coordination { Lease }
    "events.k8s.io" "v1": events { Event }
    "rbac.authorization.k8s.io" "v1": rbac { ClusterRole, ClusterRoleBinding, Role, RoleBinding }
}

/// Merge behaviour of lists and maps of built-in types: the extensions of Kubernetes' published OpenAPI that
/// k8s-openapi drops.
///
/// Component, property, list type, keys. Lists that are not in the table are atomic.
const LISTS: &[(&str, &str, &str, &[&str])] = &[
    ("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", "finalizers", "set", &[]),
    ("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", "ownerReferences", "map", &["uid"]),
    ("io.k8s.api.core.v1.ServiceAccount", "secrets", "map", &["name"]),
    ("io.k8s.api.core.v1.NamespaceStatus", "conditions", "map", &["type"]),
    ("io.k8s.api.certificates.v1.CertificateSigningRequestStatus", "conditions", "map", &["type"]),
    (
        "io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicySpec",
        "matchConditions",
        "map",
        &["name"],
    ),
    ("io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicySpec", "variables", "map", &["name"]),
    ("io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicyStatus", "conditions", "map", &["type"]),
    (
        "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinitionStatus",
        "conditions",
        "map",
        &["type"],
    ),
];

/// Types that are atomic for field management.
const ATOMIC: &[&str] = &[
    "io.k8s.api.admissionregistration.v1.NamedRuleWithOperations",
    "io.k8s.api.admissionregistration.v1.ParamKind",
    "io.k8s.api.admissionregistration.v1.ParamRef",
    "io.k8s.api.admissionregistration.v1.Variable",
    "io.k8s.api.core.v1.LocalObjectReference",
    "io.k8s.api.core.v1.ObjectReference",
    "io.k8s.api.rbac.v1.RoleRef",
    "io.k8s.api.rbac.v1.Subject",
    "io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector",
    "io.k8s.apimachinery.pkg.apis.meta.v1.OwnerReference",
];

/// The recursive type of CRD schemas; [`super::structural`] validates it, not a schema of schemas.
const RECURSIVE: &str = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps";

/// The type of times with six digits of a second.
const MICRO_TIME: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime";

static DEFINITIONS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let mut settings = SchemaSettings::openapi3();
    settings.transforms.clear();
    let mut generator = settings.into_generator();
    for line in KINDS {
        (line.describe)(&mut generator);
    }
    generator.subschema_for::<meta::DeleteOptions>();
    generator.subschema_for::<meta::ListMeta>();
    generator.subschema_for::<meta::Status>();
    let mut definitions: Map<String, Value> = generator.take_definitions(false);
    definitions.insert(
        "io.k8s.apimachinery.pkg.apis.meta.v1.Patch".into(),
        json!({"type": "object", "description": "Patch is provided to give a concrete name and type to the Kubernetes PATCH request body."}),
    );
    for (name, definition) in &mut definitions {
        publish(name, definition);
    }
    for line in KINDS {
        let Some(definition) = definitions.get_mut(&(line.component)()) else { continue };
        definition["x-kubernetes-group-version-kind"] =
            json!([{"group": line.group, "version": line.version, "kind": line.kind}]);
        // The types require metadata; the API server fills it in.
        if let Some(required) = definition["required"].as_array_mut() {
            required.retain(|name| name != "metadata");
        }
        if definition["required"] == json!([])
            && let Some(map) = definition.as_object_mut()
        {
            map.remove("required");
        }
    }
    definitions
});

/// Converts schemars' output to the form that OpenAPI 3.0 and Kubernetes' clients expect.
fn publish(name: &str, definition: &mut Value) {
    wrap_references(definition);
    for (component, property, list_type, keys) in LISTS {
        if *component == name {
            let property = &mut definition["properties"][*property];
            property["x-kubernetes-list-type"] = (*list_type).into();
            if !keys.is_empty() {
                property["x-kubernetes-list-map-keys"] = json!(keys);
            }
        }
    }
    if ATOMIC.contains(&name) {
        definition["x-kubernetes-map-type"] = "atomic".into();
    }
    let shapeless = definition["type"] == "object"
        && definition.get("properties").is_none()
        && definition.get("additionalProperties").is_none();
    if shapeless || definition.get("type").is_none() && definition.get("x-kubernetes-int-or-string").is_none()
    {
        definition["x-kubernetes-preserve-unknown-fields"] = true.into();
    }
}

/// `$ref` allows no siblings in OpenAPI 3.0, so a reference with a description becomes an `allOf`.
fn wrap_references(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(wrap_references);
            // The schema of schemas has a property of this name, which is not a reference.
            if map.len() > 1
                && map.get("$ref").is_some_and(Value::is_string)
                && let Some(reference) = map.remove("$ref")
            {
                map.insert("allOf".into(), json!([{ "$ref": reference }]));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(wrap_references),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The name of the component that describes a built-in kind.
pub fn component(group: &str, version: &str, kind: &str) -> Option<&'static str> {
    static NAMES: LazyLock<Vec<(&'static DocumentedKind, String)>> =
        LazyLock::new(|| KINDS.iter().map(|line| (line, (line.component)())).collect());
    NAMES
        .iter()
        .find(|(line, _)| line.group == group && line.version == version && line.kind == kind)
        .map(|(_, name)| name.as_str())
}

/// A built-in component.
pub fn definition(name: &str) -> Option<&'static Value> {
    DEFINITIONS.get(name)
}

/// The schema of ObjectMeta, which every root schema contains.
pub fn object_meta() -> &'static Schema {
    static META: LazyLock<Schema> =
        LazyLock::new(|| read_component("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"));
    &META
}

fn read_component(component: &str) -> Schema {
    let definition = DEFINITIONS.get(component).cloned().unwrap_or_default();
    read::schema(&resolved(&definition))
}

/// A schema without references.
fn resolved(schema: &Value) -> Value {
    match schema {
        Value::Object(map) => {
            let reference = map.get("$ref").or_else(|| map.get("allOf").and_then(|all| all[0].get("$ref")));
            if let Some(name) =
                reference.and_then(Value::as_str).and_then(|name| name.strip_prefix(COMPONENTS))
            {
                if name == RECURSIVE {
                    return json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
                }
                let mut schema = resolved(DEFINITIONS.get(name).unwrap_or(&Value::Null));
                if name == MICRO_TIME {
                    schema["format"] = time::MICRO_TIME.into();
                }
                return schema;
            }
            let field = |(key, value): (&String, &Value)| match value.as_str() {
                Some("byte") if key == "format" => (key.clone(), canonical::BYTES.into()),
                _ => (key.clone(), resolved(value)),
            };
            map.iter().map(field).collect::<Map<_, _>>().into()
        }
        Value::Array(items) => items.iter().map(resolved).collect(),
        other => other.clone(),
    }
}

/// The schema of a built-in kind; `None` for unknown kinds.
pub fn builtin_schema(group: &str, version: &str, kind: &str) -> Option<&'static Schema> {
    static SCHEMAS: LazyLock<BTreeMap<&str, Schema>> = LazyLock::new(|| {
        KINDS
            .iter()
            .filter_map(|line| component(line.group, line.version, line.kind))
            .map(|name| {
                let mut schema = read_component(name);
                read::complete_root(&mut schema);
                (name, schema)
            })
            .collect()
    });
    SCHEMAS.get(component(group, version, kind)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{KINDS, LISTS, builtin_schema, definition, object_meta};
    use crate::schema::ListKind;

    #[test]
    fn every_kind_and_every_line_of_the_list_table_is_there() {
        for line in KINDS {
            let schema = builtin_schema(line.group, line.version, line.kind).expect(line.kind);
            assert!(schema.properties.contains_key("metadata"), "{}", line.kind);
        }
        for (component, property, ..) in LISTS {
            let definition = definition(component).expect(component);
            assert_eq!(definition["properties"][*property]["type"], "array", "{component} {property}");
        }
        for name in super::ATOMIC {
            assert!(definition(name).is_some(), "{name}");
        }
        assert_eq!(object_meta().properties["ownerReferences"].list, ListKind::Map(vec!["uid".into()]));
    }

    #[test]
    fn builtin_schemas_accept_valid_objects_and_name_odd_fields() {
        let schema = |group, kind| builtin_schema(group, "v1", kind).expect(kind);
        let mut secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "creationTimestamp": null,
            "managedFields": [{"manager": "m", "operation": "Apply", "fieldsV1": {"f:data": {"f:a": {}}}}]},
            "data": {"a": "aGk="}, "stringData": {"b": "hi"}, "type": "Opaque"});
        assert_eq!(schema("", "Secret").prune(&mut secret), [""; 0]);
        schema("", "Secret").default(&mut secret);
        assert_eq!(schema("", "Secret").validate(&secret, None), []);
        assert_eq!(secret["metadata"].get("creationTimestamp"), None);

        let mut crd = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "ms.e.c"},
            "spec": {"group": "e.c", "scope": "Namespaced", "names": {"plural": "ms", "kind": "M"}, "versions": [{
                "name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object"}}}},
                "subresources": {"status": {}}}]}});
        let crds = schema("apiextensions.k8s.io", "CustomResourceDefinition");
        let before = crd.clone();
        assert_eq!(crds.prune(&mut crd), [""; 0]);
        assert_eq!(crd, before);
        assert_eq!(crds.validate(&crd, None), []);

        let mut odd = json!({"metadata": {"name": "l", "label": {}}, "spec": {"holder": "x", "leaseDurationSeconds": "15"}});
        let leases = schema("coordination.k8s.io", "Lease");
        assert_eq!(leases.prune(&mut odd), ["metadata.label", "spec.holder"]);
        assert_eq!(leases.validate(&odd, None).len(), 1);
    }
}
