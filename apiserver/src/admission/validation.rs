//! Defaults and validation of policies and bindings on writes, and the status with expressions that do not
//! match the schemas of the kinds they apply to.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::policy::Policy;
use crate::kinds::table::Table;
use crate::object;
use crate::status::Cause;

const OPERATIONS: &[&str] = &["*", "CREATE", "UPDATE", "DELETE", "CONNECT"];
const REASONS: &[&str] = &["Forbidden", "Invalid", "RequestEntityTooLarge"];
/// Kubernetes' limit on conditions.
const MAX_CONDITIONS: usize = 64;
const MAX_ANNOTATIONS: usize = 20;

/// Fills in the defaults of a policy's or a binding's spec; `matching` names its matching field.
pub fn fill_defaults(spec: &mut Value, matching: &str) {
    if matching == "matchConstraints" && spec.is_object() && spec["failurePolicy"].is_null() {
        spec["failurePolicy"] = json!("Fail");
    }
    let Some(matching) = spec.get_mut(matching).filter(|matching| matching.is_object()) else { return };
    for (field, default) in [
        ("matchPolicy", json!("Equivalent")),
        ("namespaceSelector", json!({})),
        ("objectSelector", json!({})),
    ] {
        if matching[field].is_null() {
            matching[field] = default;
        }
    }
    for field in ["resourceRules", "excludeResourceRules"] {
        let Some(rules) = matching.get_mut(field).and_then(Value::as_array_mut) else { continue };
        for rule in rules.iter_mut().filter(|rule| rule.is_object() && rule["scope"].is_null()) {
            rule["scope"] = json!("*");
        }
    }
}

/// Collects validation errors.
#[derive(Default)]
struct CauseList(Vec<Cause>);

impl CauseList {
    fn push(&mut self, reason: &str, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(Cause { reason: reason.into(), message: message.into(), field: field.into() });
    }

    fn required(&mut self, field: impl Into<String>, why: &str) {
        let message = if why.is_empty() { "Required value".into() } else { format!("Required value: {why}") };
        self.push("FieldValueRequired", field, message);
    }

    fn invalid(&mut self, field: impl Into<String>, value: &Value, why: &str) {
        self.push("FieldValueInvalid", field, format!("Invalid value: {value}: {why}"));
    }

    /// Reports a value that is not one of `known`; an absent value is fine.
    fn one_of(&mut self, field: impl Into<String>, value: &Value, known: &[&str]) {
        if value.is_null() || known.iter().any(|known| value == *known) {
            return;
        }
        let mut known: Vec<String> = known.iter().map(|known| format!("\"{known}\"")).collect();
        known.sort();
        let message = format!("Unsupported value: {value}: supported values: {}", known.join(", "));
        self.push("FieldValueNotSupported", field, message);
    }

    fn duplicate(&mut self, field: impl Into<String>, value: &Value) {
        self.push("FieldValueDuplicate", field, format!("Duplicate value: {value}"));
    }
}

fn is_blank(value: &Value) -> bool {
    value.as_str().is_none_or(|text| text.trim().is_empty())
}

fn items<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().map_or(&[], Vec::as_slice)
}

/// Validates a policy.
pub fn policy(new: &Value) -> Vec<Cause> {
    let spec = &new["spec"];
    let mut blame = CauseList::default();
    blame.one_of("spec.failurePolicy", &spec["failurePolicy"], &["Fail", "Ignore"]);
    if spec["paramKind"].is_object() {
        for field in ["apiVersion", "kind"] {
            if is_blank(&spec["paramKind"][field]) {
                blame.required(format!("spec.paramKind.{field}"), "");
            }
        }
    }
    if spec["matchConstraints"].is_object() {
        matching(&spec["matchConstraints"], "spec.matchConstraints", &mut blame);
        if items(&spec["matchConstraints"], "resourceRules").is_empty() {
            blame.required("spec.matchConstraints.resourceRules", "");
        }
    } else {
        blame.required("spec.matchConstraints", "");
    }
    named(spec, "matchConditions", object::is_label_key, "must be a qualified name", &mut blame);
    if items(spec, "matchConditions").len() > MAX_CONDITIONS {
        let detail = format!(
            "Too many: {}: must have at most {MAX_CONDITIONS} items",
            items(spec, "matchConditions").len()
        );
        blame.push("FieldValueTooMany", "spec.matchConditions", detail);
    }
    named(spec, "variables", is_identifier, "must be a valid CEL identifier", &mut blame);
    let (validations, annotations) = (items(spec, "validations"), items(spec, "auditAnnotations"));
    if validations.is_empty() && annotations.is_empty() {
        for field in ["spec.validations", "spec.auditAnnotations"] {
            blame.required(field, "validations or auditAnnotations must contain at least one item");
        }
    }
    for (index, validation) in validations.iter().enumerate() {
        let at = |field: &str| format!("spec.validations[{index}].{field}");
        if is_blank(&validation["expression"]) {
            blame.required(at("expression"), "expression is not specified");
        }
        for field in ["message", "messageExpression"] {
            if !validation[field].is_null() && is_blank(&validation[field]) {
                blame.invalid(at(field), &validation[field], "must be non-empty if specified");
            }
        }
        if validation["message"].as_str().is_some_and(|text| text.trim().contains(['\n', '\r'])) {
            blame.invalid(at("message"), &validation["message"], "must not contain line breaks");
        }
        blame.one_of(at("reason"), &validation["reason"], REASONS);
    }
    if annotations.len() > MAX_ANNOTATIONS {
        let detail = format!("must not have more than {MAX_ANNOTATIONS} auditAnnotations");
        blame.invalid("spec.auditAnnotations", &json!(annotations.len()), &detail);
    }
    for (index, annotation) in annotations.iter().enumerate() {
        let at = |field: &str| format!("spec.auditAnnotations[{index}].{field}");
        let key = annotation["key"].as_str().unwrap_or_default();
        if !object::is_label_key(&format!("{}/{key}", object::name(new))) {
            blame.invalid(at("key"), &annotation["key"], "must be a qualified name after the policy's own");
        }
        if annotations[..index].iter().any(|other| other["key"] == annotation["key"]) {
            blame.duplicate(at("key"), &annotation["key"]);
        }
        if is_blank(&annotation["valueExpression"]) {
            blame.required(at("valueExpression"), "valueExpression is not specified");
        }
    }
    if blame.0.is_empty() {
        for problem in Policy::read(new, None).1 {
            blame.invalid(problem.field, &json!(problem.expression), &problem.why);
        }
    }
    blame.0
}

/// Validates the names and expressions of a list.
fn named(spec: &Value, list: &str, fits: impl Fn(&str) -> bool, detail: &str, blame: &mut CauseList) {
    let entries = items(spec, list);
    for (index, entry) in entries.iter().enumerate() {
        let at = |field: &str| format!("spec.{list}[{index}].{field}");
        if is_blank(&entry["name"]) {
            blame.required(at("name"), "");
        } else if !entry["name"].as_str().is_some_and(&fits) {
            blame.invalid(at("name"), &entry["name"], detail);
        }
        if entries[..index].iter().any(|other| other["name"] == entry["name"]) {
            blame.duplicate(at("name"), &entry["name"]);
        }
        if is_blank(&entry["expression"]) {
            blame.required(at("expression"), "");
        }
    }
}

fn is_identifier(name: &str) -> bool {
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    const RESERVED: &[&str] = &[
        "as",
        "break",
        "const",
        "continue",
        "else",
        "false",
        "for",
        "function",
        "if",
        "import",
        "in",
        "let",
        "loop",
        "namespace",
        "null",
        "package",
        "return",
        "true",
        "var",
        "void",
        "while",
    ];
    first && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !RESERVED.contains(&name)
}

/// Validates `matchConstraints` or `matchResources`.
fn matching(matching: &Value, at: &str, blame: &mut CauseList) {
    blame.one_of(format!("{at}.matchPolicy"), &matching["matchPolicy"], &["Exact", "Equivalent"]);
    for field in ["namespaceSelector", "objectSelector"] {
        selector(&matching[field], &format!("{at}.{field}"), blame);
    }
    for list in ["resourceRules", "excludeResourceRules"] {
        for (index, rule) in items(matching, list).iter().enumerate() {
            let at = |field: &str| format!("{at}.{list}[{index}].{field}");
            for field in ["operations", "apiGroups", "apiVersions", "resources"] {
                let values = items(rule, field);
                if values.is_empty() {
                    blame.required(at(field), "");
                }
                if field != "resources" && values.len() > 1 && values.iter().any(|value| value == "*") {
                    blame.invalid(
                        at(field),
                        &rule[field],
                        "if '*' is present, must not specify other values",
                    );
                }
            }
            for (index, operation) in items(rule, "operations").iter().enumerate() {
                blame.one_of(format!("{}[{index}]", at("operations")), operation, OPERATIONS);
            }
            blame.one_of(at("scope"), &rule["scope"], &["*", "Cluster", "Namespaced"]);
        }
    }
}

/// Validates a label selector: an unknown operator would match nothing, and the policy would apply to
/// nothing.
fn selector(selector: &Value, at: &str, blame: &mut CauseList) {
    for (index, expression) in items(selector, "matchExpressions").iter().enumerate() {
        let at = format!("{at}.matchExpressions[{index}]");
        let values = items(expression, "values").len();
        match expression["operator"].as_str() {
            Some("In" | "NotIn") if values == 0 => {
                blame
                    .required(format!("{at}.values"), "must be specified when `operator` is 'In' or 'NotIn'");
            }
            Some("Exists" | "DoesNotExist") if values > 0 => {
                let detail = "Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                blame.push("FieldValueForbidden", format!("{at}.values"), detail);
            }
            Some("In" | "NotIn" | "Exists" | "DoesNotExist") => {}
            _ => {
                blame.invalid(
                    format!("{at}.operator"),
                    &expression["operator"],
                    "not a valid selector operator",
                );
            }
        }
    }
}

/// Validates a binding.
pub fn binding(new: &Value) -> Vec<Cause> {
    let spec = &new["spec"];
    let mut blame = CauseList::default();
    match spec["policyName"].as_str().unwrap_or_default() {
        "" => blame.required("spec.policyName", ""),
        name if !object::is_subdomain(name) => {
            blame.invalid("spec.policyName", &spec["policyName"], "must be the name of a policy");
        }
        _ => {}
    }
    let reference = &spec["paramRef"];
    if reference.is_object() {
        let (name, selected) = (!is_blank(&reference["name"]), reference["selector"].is_object());
        if name && selected {
            let detail = "Forbidden: name and selector are mutually exclusive";
            for field in ["spec.paramRef.name", "spec.paramRef.selector"] {
                blame.push("FieldValueForbidden", field, detail);
            }
        } else if !name && !selected {
            blame.required("spec.paramRef", "one of name or selector must be specified");
        }
        selector(&reference["selector"], "spec.paramRef.selector", &mut blame);
        if is_blank(&reference["parameterNotFoundAction"]) {
            blame.required("spec.paramRef.parameterNotFoundAction", "");
        }
        blame.one_of(
            "spec.paramRef.parameterNotFoundAction",
            &reference["parameterNotFoundAction"],
            &["Allow", "Deny"],
        );
    }
    if spec["matchResources"].is_object() {
        matching(&spec["matchResources"], "spec.matchResources", &mut blame);
    }
    let actions = items(spec, "validationActions");
    if actions.is_empty() {
        blame.required("spec.validationActions", "at least one validation action is required");
    }
    for (index, action) in actions.iter().enumerate() {
        let at = format!("spec.validationActions[{index}]");
        blame.one_of(at.clone(), action, &["Audit", "Deny", "Warn"]);
        if actions[..index].contains(action) {
            blame.duplicate(at, action);
        }
    }
    if actions.contains(&json!("Deny")) && actions.contains(&json!("Warn")) {
        let detail = "must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)";
        blame.invalid("spec.validationActions", &spec["validationActions"], detail);
    }
    blame.0
}

/// Computes the status of a policy: the observed generation, and expressions that do not match the schemas of
/// its kinds.
pub fn with_status(policy: &mut Value, table: &Table) {
    let mut warnings = Vec::new();
    let mut seen = BTreeSet::new();
    for rule in items(&policy["spec"]["matchConstraints"], "resourceRules") {
        for resource in table.all() {
            let names = |field: &str, value: &str| items(rule, field).iter().any(|entry| entry == value);
            let named = names("apiGroups", &resource.group)
                && names("apiVersions", &resource.version)
                && names("resources", &resource.plural);
            let Some(custom) =
                resource.custom.as_ref().filter(|_| named && seen.insert(resource.prefix.clone()))
            else {
                continue;
            };
            let schema = whole_object_schema(&custom.openapi);
            for problem in Policy::read(policy, Some(&schema)).1 {
                let detail = format!("{}, Kind={}: {}", resource.api_version(), resource.kind, problem.why);
                warnings.push(json!({"fieldRef": problem.field, "warning": detail}));
            }
        }
    }
    let mut status = policy["status"].as_object().cloned().unwrap_or_default();
    status.insert("observedGeneration".into(), policy["metadata"]["generation"].clone());
    let checking = if warnings.is_empty() { json!({}) } else { json!({"expressionWarnings": warnings}) };
    status.insert("typeChecking".into(), checking);
    policy["status"] = Value::Object(status);
}

/// The schema of a whole object: the fields of all objects, beside those in the definition.
fn whole_object_schema(openapi: &Value) -> Value {
    let mut schema = openapi.clone();
    if let Some(fields) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        fields.insert("apiVersion".into(), json!({"type": "string"}));
        fields.insert("kind".into(), json!({"type": "string"}));
        fields.insert(
            "metadata".into(),
            json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}),
        );
    }
    schema
}
