//! Compiles a structural schema from its OpenAPI form.
//!
//! Not here: rejecting a schema; [`super::structural`] does that first.

use std::sync::Arc;

use serde_json::Value;

use super::re2::Pattern;
use super::{Additional, Checks, ListKind, Schema, SchemaType, SizeRange, builtin, cel};

fn text<'a>(source: &'a Value, name: &str) -> &'a str {
    source[name].as_str().unwrap_or_default()
}

fn is(source: &Value, name: &str) -> bool {
    source[name] == Value::Bool(true)
}

/// Compiles a schema, including nested value validations; unknown keywords are ignored.
pub fn schema(source: &Value) -> Schema {
    let int_or_string = is(source, "x-kubernetes-int-or-string") || text(source, "format") == "int-or-string";
    let mut read = Schema {
        kind: match text(source, "type") {
            _ if int_or_string => SchemaType::IntOrString,
            "object" => SchemaType::Object,
            "array" => SchemaType::Array,
            "string" => SchemaType::String,
            "integer" => SchemaType::Integer,
            "number" => SchemaType::Number,
            "boolean" => SchemaType::Boolean,
            _ => SchemaType::Any,
        },
        nullable: is(source, "nullable"),
        properties: source["properties"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, field)| (name.clone(), schema(field)))
            .collect(),
        additional: match source.get("additionalProperties") {
            None | Some(Value::Bool(false)) => Additional::Denied,
            Some(Value::Bool(true)) => Additional::Anything,
            Some(values) => Additional::Typed(Box::new(schema(values))),
        },
        items: source.get("items").map(|items| Box::new(schema(items))),
        default: source.get("default").cloned(),
        preserve_unknown: is(source, "x-kubernetes-preserve-unknown-fields"),
        embedded_resource: is(source, "x-kubernetes-embedded-resource"),
        list: match text(source, "x-kubernetes-list-type") {
            "set" => ListKind::Set,
            "map" => ListKind::Map(strings(&source["x-kubernetes-list-map-keys"])),
            _ => ListKind::Atomic,
        },
        atomic_map: text(source, "x-kubernetes-map-type") == "atomic",
        checks: read_checks(source, int_or_string),
        rules: cel::Rules::compile(source).map(Arc::new),
    };
    if read.embedded_resource {
        complete(&mut read);
    }
    read
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

fn read_checks(source: &Value, int_or_string: bool) -> Checks {
    let branches = |name: &str| -> Vec<Schema> {
        if int_or_string && name == "anyOf" {
            return Vec::new();
        }
        source[name].as_array().into_iter().flatten().map(schema).collect()
    };
    let limit =
        |name: &str, exclusive: &str| source[name].as_f64().map(|bound| (bound, is(source, exclusive)));
    let bounds =
        |least: &str, most: &str| SizeRange { min: source[least].as_u64(), most: source[most].as_u64() };
    Checks {
        format: text(source, "format").to_owned(),
        one_value_of: source["enum"].as_array().cloned(),
        pattern: source["pattern"].as_str().and_then(|pattern| Pattern::new(pattern).ok()),
        minimum: limit("minimum", "exclusiveMinimum"),
        maximum: limit("maximum", "exclusiveMaximum"),
        multiple_of: source["multipleOf"].as_f64(),
        length: bounds("minLength", "maxLength"),
        items: bounds("minItems", "maxItems"),
        properties: bounds("minProperties", "maxProperties"),
        required: strings(&source["required"]),
        all_of: branches("allOf"),
        any_of: branches("anyOf"),
        one_of: branches("oneOf"),
        not: source.get("not").map(|not| Box::new(schema(not))),
    }
}

/// Adds apiVersion, kind and metadata to a root schema.
pub fn complete_root(schema: &mut Schema) {
    schema.embedded_resource = true;
    complete(schema);
}

fn complete(schema: &mut Schema) {
    for name in ["apiVersion", "kind"] {
        schema
            .properties
            .entry(name.into())
            .or_insert_with(|| Schema { kind: SchemaType::String, ..Default::default() });
    }
    let mut metadata = builtin::object_meta().clone();
    // A CRD may restrict the name; all other metadata is Kubernetes' own.
    if let Some(declared) = schema.properties.get("metadata") {
        for name in ["name", "generateName"] {
            if let (Some(field), Some(declared)) =
                (metadata.properties.get_mut(name), declared.properties.get(name))
            {
                field.checks = declared.checks.clone();
            }
        }
    }
    schema.properties.insert("metadata".into(), metadata);
}
