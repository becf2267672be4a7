//! Validates that a CRD's schema is structural.
//!
//! Not here: validation of names, versions and printer columns of a CRD; compiling a valid schema.

use serde_json::{Map, Value, json};

use super::re2::Pattern;
use super::{Issue, cel};

/// The level of a node in a schema; the messages differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Item,
    Field,
}

/// Checks the structural rules; without issues [`super::read`] loses nothing.
pub fn check(source: &Value) -> Vec<Issue> {
    let mut issues = Vec::new();
    structure(source, Level::Root, "", &mut issues);
    issues.sort_by(|a, b| (&a.path, &a.message).cmp(&(&b.path, &b.message)));
    issues
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn text<'a>(source: &'a Value, name: &str) -> &'a str {
    source[name].as_str().unwrap_or_default()
}

fn is(source: &Value, name: &str) -> bool {
    source[name] == Value::Bool(true)
}

fn structure(source: &Value, level: Level, path: &str, issues: &mut Vec<Issue>) {
    let mut say = |name: &str, message: String| {
        issues.push(Issue { path: below(path, name), message });
    };
    if !source.is_object() {
        say("", "Invalid value: a schema must be an object".into());
        return;
    }
    let kind = text(source, "type");
    let int_or_string = is(source, "x-kubernetes-int-or-string");
    let preserve = is(source, "x-kubernetes-preserve-unknown-fields");
    let embedded = is(source, "x-kubernetes-embedded-resource");
    for forbidden in ["$ref", "definitions", "dependencies", "patternProperties", "additionalItems", "id"] {
        if source.get(forbidden).is_some() {
            say(forbidden, "Forbidden: is not supported".into());
        }
    }
    if is(source, "uniqueItems") {
        say(
            "uniqueItems",
            "Forbidden: uniqueItems cannot be set to true since the runtime complexity becomes quadratic"
                .into(),
        );
    }
    if !matches!(kind, "" | "object" | "array" | "string" | "integer" | "number" | "boolean") {
        say(
            "type",
            format!(
                "Unsupported value: {kind:?}: supported values: \"array\", \"boolean\", \"integer\", \"number\", \"object\", \"string\""
            ),
        );
    }
    if source.get("x-kubernetes-preserve-unknown-fields").is_some() && !preserve {
        say("x-kubernetes-preserve-unknown-fields", "Invalid value: false: must be true or undefined".into());
    }
    if embedded && kind != "object" {
        say("type", required_or_invalid(kind, "must be object if x-kubernetes-embedded-resource is true"));
    } else if kind.is_empty() && !int_or_string && !preserve {
        let place = match level {
            Level::Root => "must not be empty at the root",
            Level::Item => "must not be empty for specified array items",
            Level::Field => "must not be empty for specified object fields",
        };
        say("type", format!("Required value: {place}"));
    }
    if level == Level::Root {
        if !kind.is_empty() && kind != "object" {
            say("type", format!("Invalid value: {kind:?}: must be object at the root"));
        }
        if is(source, "nullable") {
            say("nullable", "Forbidden: nullable cannot be true at the root".into());
        }
    }
    if int_or_string && (preserve || embedded) {
        let name =
            if preserve { "x-kubernetes-preserve-unknown-fields" } else { "x-kubernetes-embedded-resource" };
        say(name, "Invalid value: true: must be false if x-kubernetes-int-or-string is true".into());
    }
    if embedded && !preserve && source["properties"].as_object().is_none_or(Map::is_empty) {
        say(
            "properties",
            "Required value: must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields".into(),
        );
    }
    let additional = source.get("additionalProperties").filter(|value| **value != Value::Bool(false));
    if let Some(additional) = additional {
        if level == Level::Root {
            say("additionalProperties", "Forbidden: must not be used at the root".into());
        }
        if source["properties"].as_object().is_some_and(|map| !map.is_empty()) {
            say(
                "additionalProperties",
                "Forbidden: additionalProperties and properties are mutual exclusive".into(),
            );
        }
        if additional.is_object() {
            structure(additional, Level::Field, &below(path, "additionalProperties"), issues);
        }
    }
    match source.get("items") {
        Some(Value::Array(_)) => issues.push(Issue {
            path: below(path, "items"),
            message: "Forbidden: items must be a schema object and not an array".into(),
        }),
        Some(items) => structure(items, Level::Item, &below(path, "items"), issues),
        None if kind == "array" => issues
            .push(Issue { path: below(path, "items"), message: "Required value: must be specified".into() }),
        None => {}
    }
    for (name, field) in source["properties"].as_object().into_iter().flatten() {
        let place = below(path, &format!("properties[{name}]"));
        if name == "metadata" && level == Level::Root {
            root_metadata(field, &place, issues);
        } else {
            structure(field, Level::Field, &place, issues);
        }
    }
    lists_and_maps(source, kind, path, issues);
    logic(source, path, int_or_string, issues);
    issues.extend(cel::check(source, path));
}

fn required_or_invalid(kind: &str, detail: &str) -> String {
    if kind.is_empty() {
        format!("Required value: {detail}")
    } else {
        format!("Invalid value: {kind:?}: {detail}")
    }
}

fn root_metadata(source: &Value, path: &str, issues: &mut Vec<Issue>) {
    if text(source, "type") != "object" {
        issues.push(Issue {
            path: below(path, "type"),
            message: format!("Invalid value: {:?}: must be object", text(source, "type")),
        });
    }
    let plain = source.as_object().is_some_and(|map| {
        map.iter().all(|(key, value)| match key.as_str() {
            "type" => true,
            "properties" => value
                .as_object()
                .is_some_and(|fields| fields.keys().all(|name| name == "name" || name == "generateName")),
            _ => false,
        })
    });
    if !plain {
        issues.push(Issue {
            path: path.to_owned(),
            message: "Forbidden: must not specify anything other than name and generateName, but metadata is implicitly specified".into(),
        });
    }
}

fn lists_and_maps(source: &Value, kind: &str, path: &str, issues: &mut Vec<Issue>) {
    let mut say = |name: &str, message: String| {
        issues.push(Issue { path: below(path, name), message });
    };
    if let Some(map_type) = source.get("x-kubernetes-map-type") {
        if kind != "object" {
            say("type", required_or_invalid(kind, "must be object if x-kubernetes-map-type is specified"));
        }
        if !matches!(map_type.as_str(), Some("atomic" | "granular")) {
            say(
                "x-kubernetes-map-type",
                format!("Unsupported value: {map_type}: supported values: \"atomic\", \"granular\""),
            );
        }
    }
    let keys = source["x-kubernetes-list-map-keys"].as_array().map_or(&[][..], Vec::as_slice);
    let list_type = source.get("x-kubernetes-list-type").map(|value| value.as_str().unwrap_or_default());
    if list_type.is_some() && kind != "array" {
        say("type", required_or_invalid(kind, "must be array if x-kubernetes-list-type is specified"));
    }
    match list_type {
        None | Some("atomic" | "set" | "map") => {}
        Some(other) => say(
            "x-kubernetes-list-type",
            format!("Unsupported value: {other:?}: supported values: \"atomic\", \"map\", \"set\""),
        ),
    }
    if !keys.is_empty() && list_type != Some("map") {
        let detail = "must be map if x-kubernetes-list-map-keys is non-empty";
        say("x-kubernetes-list-type", required_or_invalid(list_type.unwrap_or_default(), detail));
    }
    if list_type != Some("map") {
        return;
    }
    if keys.is_empty() {
        say(
            "x-kubernetes-list-map-keys",
            "Required value: must not be empty if x-kubernetes-list-type is map".into(),
        );
    }
    let items = &source["items"];
    if items.is_object() && text(items, "type") != "object" {
        say(
            "items.type",
            format!(
                "Invalid value: {:?}: must be object if parent array's x-kubernetes-list-type is map",
                text(items, "type")
            ),
        );
    }
    let required = items["required"].as_array().map_or(&[][..], Vec::as_slice);
    for key in keys {
        let name = key.as_str().unwrap_or_default();
        match items["properties"].get(name) {
            None => say(
                "x-kubernetes-list-map-keys",
                format!(
                    "Invalid value: {:?}: entries must all be names of item properties",
                    Value::from(keys.to_vec()).to_string()
                ),
            ),
            Some(field) => {
                if matches!(text(field, "type"), "object" | "array") {
                    say(
                        &format!("items.properties[{name}].type"),
                        format!(
                            "Invalid value: {:?}: must be a scalar type if parent array's x-kubernetes-list-type is map",
                            text(field, "type")
                        ),
                    );
                }
                if field.get("default").is_none() && !required.contains(key) {
                    say(
                        &format!("items.properties[{name}].default"),
                        "Required value: this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property".into(),
                    );
                }
                if is(field, "nullable") {
                    say(
                        &format!("items.properties[{name}].nullable"),
                        "Forbidden: this property is in x-kubernetes-list-map-keys, so it cannot be nullable"
                            .into(),
                    );
                }
            }
        }
    }
}

/// The value validations of a node: `allOf`, `anyOf`, `oneOf`, `not` and `pattern`.
fn logic(source: &Value, path: &str, int_or_string: bool, issues: &mut Vec<Issue>) {
    if let Some(pattern) = source["pattern"].as_str()
        && let Err(error) = Pattern::new(pattern)
    {
        issues.push(Issue {
            path: below(path, "pattern"),
            message: format!(
                "Invalid value: {pattern:?}: must be a valid regular expression, but isn't: {error}"
            ),
        });
    }
    // int-or-string may list its two types; this is the only place where a nested type is allowed.
    let two_types = json!([{"type": "integer"}, {"type": "string"}]);
    for name in ["allOf", "anyOf", "oneOf"] {
        if int_or_string && name == "anyOf" && source[name] == two_types {
            continue;
        }
        for (index, branch) in source[name].as_array().into_iter().flatten().enumerate() {
            if int_or_string && name == "allOf" && index == 0 && branch["anyOf"] == two_types {
                continue;
            }
            nested(branch, &below(path, &format!("{name}[{index}]")), issues);
        }
    }
    if let Some(not) = source.get("not") {
        nested(not, &below(path, "not"), issues);
    }
}

/// Below a logical junctor a schema may only contain value validations.
fn nested(source: &Value, path: &str, issues: &mut Vec<Issue>) {
    for (name, detail) in [
        ("type", "must be empty to be structural"),
        ("additionalProperties", "must be undefined to be structural"),
        ("default", "must be undefined to be structural"),
        ("title", "must be empty to be structural"),
        ("description", "must be empty to be structural"),
        ("nullable", "must be false to be structural"),
        ("x-kubernetes-preserve-unknown-fields", "must be false to be structural"),
        ("x-kubernetes-embedded-resource", "must be false to be structural"),
        ("x-kubernetes-int-or-string", "must be false to be structural"),
        ("x-kubernetes-list-map-keys", "must be empty to be structural"),
        ("x-kubernetes-list-type", "must be undefined to be structural"),
        ("x-kubernetes-map-type", "must be undefined to be structural"),
        ("x-kubernetes-validations", "must be empty to be structural"),
    ] {
        let empty = |value: &Value| value == "" || *value == Value::Bool(false) || *value == json!([]);
        if source.get(name).is_some_and(|value| !empty(value)) {
            issues.push(Issue { path: below(path, name), message: format!("Forbidden: {detail}") });
        }
    }
    for (name, field) in source["properties"].as_object().into_iter().flatten() {
        let place = below(path, &format!("properties[{name}]"));
        if name == "metadata" {
            issues.push(Issue {
                path: place.clone(),
                message: "Forbidden: must not be specified in a nested context".into(),
            });
        }
        nested(field, &place, issues);
    }
    if source["items"].is_object() {
        nested(&source["items"], &below(path, "items"), issues);
    }
    logic(source, path, false, issues);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::check;

    /// The schema with `field` below `spec`.
    fn with(field: Value) -> Value {
        json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"f": field}}}})
    }

    #[test]
    fn breaches_of_the_structural_rules_are_named_with_their_path() {
        let f = "properties[spec].properties[f]";
        for (name, schema, expected) in [
            ("no type", with(json!({})), format!("{f}.type: Required value: must not be empty for specified object fields")),
            ("no items", with(json!({"type": "array"})), format!("{f}.items: Required value: must be specified")),
            (
                "typeless items",
                with(json!({"type": "array", "items": {}})),
                format!("{f}.items.type: Required value: must not be empty for specified array items"),
            ),
            ("root", json!({"type": "string"}), "type: Invalid value: \"string\": must be object at the root".into()),
            ("unknown type", with(json!({"type": "float"})), format!("{f}.type: Unsupported value: \"float\": supported values: \"array\", \"boolean\", \"integer\", \"number\", \"object\", \"string\"")),
            (
                "both kinds of object",
                with(json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string"}})),
                format!("{f}.additionalProperties: Forbidden: additionalProperties and properties are mutual exclusive"),
            ),
            (
                "type below a junctor",
                with(json!({"type": "integer", "anyOf": [{"type": "integer"}]})),
                format!("{f}.anyOf[0].type: Forbidden: must be empty to be structural"),
            ),
            (
                "map without keys",
                with(json!({"type": "array", "x-kubernetes-list-type": "map", "items": {"type": "object"}})),
                format!("{f}.x-kubernetes-list-map-keys: Required value: must not be empty if x-kubernetes-list-type is map"),
            ),
            (
                "optional key",
                with(json!({"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                            "items": {"type": "object", "properties": {"k": {"type": "string"}}}})),
                format!("{f}.items.properties[k].default: Required value: this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property"),
            ),
            ("unique items", with(json!({"type": "array", "uniqueItems": true, "items": {"type": "string"}})),
             format!("{f}.uniqueItems: Forbidden: uniqueItems cannot be set to true since the runtime complexity becomes quadratic")),
            ("a reference", with(json!({"type": "object", "$ref": "#/x"})), format!("{f}.$ref: Forbidden: is not supported")),
            (
                "metadata",
                json!({"type": "object", "properties": {"metadata": {"type": "object", "properties": {"labels": {"type": "object"}}}}}),
                "properties[metadata]: Forbidden: must not specify anything other than name and generateName, but metadata is implicitly specified".into(),
            ),
        ] {
            let found: Vec<String> = check(&schema).iter().map(ToString::to_string).collect();
            assert_eq!(found, [expected], "{name}");
        }
    }

    #[test]
    fn valid_structural_schema_raises_no_issue() {
        for field in [
            json!({"x-kubernetes-int-or-string": true}),
            json!({"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}]}),
            json!({"x-kubernetes-preserve-unknown-fields": true}),
            json!({"type": "object", "additionalProperties": {"type": "string"}}),
            json!({"type": "object", "properties": {"a": {"type": "string"}}, "oneOf": [{"required": ["a"]}, {"not": {"required": ["a"]}}]}),
        ] {
            assert_eq!(check(&with(field.clone())), [], "{field}");
        }
    }
}
