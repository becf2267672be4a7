//! `x-kubernetes-validations`: CEL rules at the nodes of a schema.
//!
//! Not here: the CEL language and its Kubernetes libraries (crate `kube-cel`), cost limits.

pub mod declarations;

use std::fmt;

use kube_cel::{CompiledSchema, ErrorKind, Validator, compile_schema};
use serde_json::Value;

use super::prune::{push_field, push_index};
use super::validate::MAX_ERRORS;
use super::values::{Counterparts, shown};
use super::{Additional, FieldError, Issue, Schema, SchemaType};

/// The compiled rules of one node; nodes below have their own.
pub struct Rules {
    compiled: CompiledSchema,
    sources: Vec<RuleSource>,
}

/// The parts of a rule that its errors need.
#[derive(Debug)]
struct RuleSource {
    rule: String,
    /// `.a.b` or `['a']`, below the node.
    field_path: String,
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Rules").field(&self.sources).finish()
    }
}

thread_local! {
    /// Registering all of the libraries costs more than most rules.
    static VALIDATOR: Validator = Validator::new();
}

impl Rules {
    /// Compiles the rules at the node `source`, if it has any.
    pub fn compile(source: &Value) -> Option<Rules> {
        let rules = source["x-kubernetes-validations"].as_array().filter(|rules| !rules.is_empty())?;
        let mut node = source.clone();
        strip_below(&mut node);
        // This crate reports the field path of an error; kube-cel would join paths differently.
        for rule in node["x-kubernetes-validations"].as_array_mut().into_iter().flatten() {
            if let Some(rule) = rule.as_object_mut() {
                rule.remove("fieldPath");
            }
        }
        Some(Rules {
            compiled: compile_schema(&node),
            sources: rules
                .iter()
                .map(|rule| RuleSource {
                    rule: rule["rule"].as_str().unwrap_or_default().to_owned(),
                    field_path: rule["fieldPath"].as_str().unwrap_or_default().to_owned(),
                })
                .collect(),
        })
    }
}

/// Removes rules and defaults below a node, and keeps the types.
fn strip_below(node: &mut Value) {
    let strip = |child: &mut Value| {
        if let Some(map) = child.as_object_mut() {
            map.remove("x-kubernetes-validations");
            map.remove("default");
        }
        strip_below(child);
    };
    let Some(map) = node.as_object_mut() else { return };
    for junctor in ["allOf", "anyOf", "oneOf", "not"] {
        map.remove(junctor);
    }
    for name in ["items", "additionalProperties"] {
        if let Some(child) = map.get_mut(name) {
            strip(child);
        }
    }
    if let Some(fields) = map.get_mut("properties").and_then(Value::as_object_mut) {
        fields.values_mut().for_each(strip);
    }
}

/// Whether any node has rules.
pub fn any_rules(schema: &Schema) -> bool {
    schema.rules.is_some()
        || schema.properties.values().any(any_rules)
        || schema.items.as_deref().is_some_and(any_rules)
        || matches!(&schema.additional, Additional::Typed(child) if any_rules(child))
}

/// Validates the rules of one node when a schema is registered.
pub fn check(source: &Value, path: &str) -> Vec<Issue> {
    let mut issues = Vec::new();
    for (index, rule) in source["x-kubernetes-validations"].as_array().into_iter().flatten().enumerate() {
        let place = if path.is_empty() { String::new() } else { format!("{path}.") };
        let place = format!("{place}x-kubernetes-validations[{index}]");
        let mut say = |name: &str, message: String| {
            issues.push(Issue { path: format!("{place}.{name}"), message });
        };
        let text = rule["rule"].as_str().unwrap_or_default();
        if text.trim().is_empty() {
            say("rule", "Required value: rule is not specified".into());
            continue;
        }
        for name in ["message", "messageExpression", "fieldPath"] {
            if rule.get(name).is_some_and(|value| value.as_str().unwrap_or_default().trim().is_empty()) {
                say(name, "Invalid value: \"\": must be non-empty if specified".into());
            }
        }
        let message = rule["message"].as_str();
        if message.is_some_and(|message| message.contains('\n')) {
            say("message", format!("Invalid value: {}: must not contain line breaks", rule["message"]));
        }
        if message.is_none() && text.contains('\n') && rule.get("messageExpression").is_none() {
            say("message", "Required value: message must be specified if rule contains line breaks".into());
        }
        let node = serde_json::json!({ "x-kubernetes-validations": [rule] });
        for error in compile_schema(&node).compilation_errors() {
            say("rule", format!("Invalid value: {}: compilation failed: {error}", rule["rule"]));
        }
        for (name, expression) in [("rule", &rule["rule"]), ("messageExpression", &rule["messageExpression"])]
        {
            let text = expression.as_str().unwrap_or_default();
            for problem in declarations::undeclared(text, source, path.is_empty()) {
                say(name, format!("Invalid value: {expression}: compilation failed: {problem}"));
            }
        }
    }
    issues
}

/// Evaluates all rules of `schema` and adds the failures to `errors`.
pub fn evaluate(
    schema: &Schema,
    new: &Value,
    old: Option<&Value>,
    path: &mut String,
    errors: &mut Vec<FieldError>,
) {
    if errors.len() >= MAX_ERRORS {
        return;
    }
    if let Some(rules) = &schema.rules
        && !new.is_null()
    {
        run(rules, schema.kind, new, old, path, errors);
    }
    let length = path.len();
    match new {
        Value::Object(map) => {
            for (name, child) in map {
                let old = old.and_then(|old| old.get(name));
                if let Some(field) = schema.properties.get(name) {
                    push_field(path, name);
                    evaluate(field, child, old, path, errors);
                } else if let Additional::Typed(field) = &schema.additional {
                    path.push_str(&format!("[{name}]"));
                    evaluate(field, child, old, path, errors);
                }
                path.truncate(length);
            }
        }
        Value::Array(items) => {
            let Some(field) = &schema.items else { return };
            let before = Counterparts::new(schema, old);
            for (index, item) in items.iter().enumerate() {
                push_index(path, index);
                evaluate(field, item, before.of(item), path, errors);
                path.truncate(length);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn run(
    rules: &Rules,
    kind: SchemaType,
    new: &Value,
    old: Option<&Value>,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let outcome = VALIDATOR.with(|validator| validator.validate_compiled(&rules.compiled, new, old));
    let Err(failures) = outcome else { return };
    for failure in failures.into_vec() {
        // A rule without `oldSelf` does not apply to unchanged values (ratcheting).
        let source = rules.sources.iter().find(|source| source.rule == failure.rule);
        let looks_back = failure.rule.contains("oldSelf");
        if !looks_back && old == Some(new) {
            continue;
        }
        let mut field = path.to_owned();
        if let Some(source) = source.filter(|source| !source.field_path.is_empty()) {
            field.push_str(&source.field_path);
            field = field.trim_start_matches('.').replace("['", "[").replace("']", "]");
        }
        let detail = match failure.kind {
            ErrorKind::ValidationFailure => failure.message,
            _ => format!("{} evaluating rule: {}", failure.message, failure.rule),
        };
        let structured = matches!(kind, SchemaType::Object | SchemaType::Array);
        let (reason, message) = match failure.reason.as_deref() {
            Some("FieldValueForbidden") => ("FieldValueForbidden", format!("Forbidden: {detail}")),
            Some("FieldValueRequired") => ("FieldValueRequired", format!("Required value: {detail}")),
            Some("FieldValueDuplicate") => {
                ("FieldValueDuplicate", format!("Duplicate value: {}", shown(new)))
            }
            _ if structured => ("FieldValueInvalid", format!("Invalid value: {detail}")),
            _ => ("FieldValueInvalid", format!("Invalid value: {}: {detail}", shown(new))),
        };
        errors.push(FieldError { reason, field, message });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::schema::Schema;

    fn schema() -> Schema {
        Schema::from_openapi(&json!({"type": "object", "properties": {"spec": {
            "type": "object",
            "x-kubernetes-validations": [
                {"rule": "self.min <= self.max", "message": "min must not exceed max"},
                {"rule": "has(self.file) != has(self.url)", "message": "exactly one of file and url", "fieldPath": ".file", "reason": "FieldValueRequired"},
                {"rule": "self.max < 100", "messageExpression": "'max is ' + string(self.max) + ', over 99'"},
            ],
            "properties": {
                "min": {"type": "integer"}, "max": {"type": "integer"}, "file": {"type": "string"}, "url": {"type": "string"},
                "mode": {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "mode is immutable"}]},
                "nodes": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                    "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "zone": {"type": "string",
                        "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "zone is immutable"}]}}}},
                "limits": {"type": "object", "additionalProperties": {"type": "integer", "x-kubernetes-validations": [{"rule": "self > 0", "message": "must be positive"}]}},
            },
        }}}))
        .expect("structural")
    }

    #[test]
    fn rules_see_their_node_its_past_and_say_where_they_fail() {
        let good = json!({"min": 1, "max": 2, "file": "f", "mode": "a", "nodes": [{"name": "a", "zone": "1"}, {"name": "b", "zone": "2"}], "limits": {"x": 1}});
        let with = |name: &str, value: Value| {
            let mut changed = good.clone();
            changed[name] = value;
            changed
        };
        for (name, spec, old, expected) in [
            ("all hold", good.clone(), None, vec![]),
            (
                "an object rule",
                with("min", json!(3)),
                None,
                vec!["spec: Invalid value: min must not exceed max"],
            ),
            (
                "path and reason",
                with("url", json!("u")),
                None,
                vec!["spec.file: Required value: exactly one of file and url"],
            ),
            (
                "a computed message",
                with("max", json!(100)),
                None,
                vec!["spec: Invalid value: max is 100, over 99"],
            ),
            ("a transition without a past", with("mode", json!("b")), None, vec![]),
            (
                "a transition",
                with("mode", json!("b")),
                Some(good.clone()),
                vec![r#"spec.mode: Invalid value: "b": mode is immutable"#],
            ),
            (
                "a map value",
                with("limits", json!({"x": 0})),
                None,
                vec!["spec.limits[x]: Invalid value: 0: must be positive"],
            ),
            (
                "list items pair up by key",
                with("nodes", json!([{"name": "b", "zone": "2"}, {"name": "a", "zone": "9"}])),
                Some(good.clone()),
                vec![r#"spec.nodes[1].zone: Invalid value: "9": zone is immutable"#],
            ),
        ] {
            let old = old.map(|spec| json!({ "spec": spec }));
            let found: Vec<String> = schema()
                .validate(&json!({ "spec": spec }), old.as_ref())
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn failures_of_rules_are_as_many_as_other_errors_at_most() {
        let limits: serde_json::Map<String, Value> =
            (0..2000).map(|number| (format!("x{number}"), json!(0))).collect();
        let found =
            schema().validate(&json!({"spec": {"min": 1, "max": 2, "file": "f", "limits": limits}}), None);
        assert_eq!(found.len(), super::MAX_ERRORS);
    }

    #[test]
    fn a_rule_that_does_not_compile_is_refused_at_registration() {
        let issues =
            Schema::from_openapi(&json!({"type": "object", "properties": {"spec": {"type": "object",
            "x-kubernetes-validations": [{"rule": "self.a ==", "message": "m"}]}}}))
            .expect_err("the rule is broken");
        assert_eq!(issues.len(), 1);
        assert_eq!(issues[0].path, "properties[spec].x-kubernetes-validations[0].rule");
        assert!(issues[0].message.contains("compilation failed"), "{}", issues[0].message);
    }

    #[test]
    fn a_broken_object_says_that_its_rules_were_not_checked() {
        let found = schema().validate(&json!({"spec": {"min": "x", "max": 1}}), None);
        assert_eq!(found.len(), 2);
        assert!(found[1].message.contains("some validation rules were not checked"));
    }
}
