//! Arguments in tags: one parameter after another, text as it is and other values as JSON.

use serde_json::{Value, json};

use super::forms::{Form, Kind, forms, json_type, length, members, with_definitions};
use super::lark::{LarkRules, quoted};
use super::template::{Part, parts, places};

/// Arguments by the template `tag`, in the order of the schema; those that are not required may be left out.
pub(super) fn in_tags(tag: &str, schema: &Value, rules: &mut LarkRules<'_>) -> String {
    let members = schema.as_object().map(members).unwrap_or_default();
    let mut written = Vec::new();
    for member in members {
        if rules.is_too_large() {
            break;
        }
        let alternatives: Vec<String> =
            alternatives(&forms(member.schema, schema), member.schema, schema, tag.contains("$TYPE"))
                .into_iter()
                .map(|alternative| parameter(tag, member.key, alternative, rules))
                .collect();
        let one = rules.rule("", &alternatives.join(" | "));
        written.push(if member.required { one } else { format!("({one})?") });
    }
    written.join(" ")
}

/// The keyword of text that tags cannot enforce; text in them is not JSON, of which the library knows the keywords.
pub(super) fn unenforced(schema: &Value, root: &Value) -> Option<&'static str> {
    let of_text = forms(schema, root);
    let mut of_text = of_text.iter().filter(|form| matches!(form.kind, Kind::Text));
    of_text
        .find_map(|form| ["pattern", "format"].into_iter().find(|keyword| form.schema.get(keyword).is_some()))
}

/// How a value is written, and the name of its type.
struct Alternative {
    kind: &'static str,
    value: Written,
}

enum Written {
    Text((u64, Option<u64>)),
    Choice(Vec<String>),
    Json(Value),
}

fn alternatives(forms: &[Form<'_>], schema: &Value, root: &Value, has_types: bool) -> Vec<Alternative> {
    let mut alternatives = Vec::new();
    let mut others = Vec::new();
    for form in forms {
        match &form.kind {
            Kind::Text => {
                alternatives.push(Alternative { kind: "string", value: Written::Text(length(&form.schema)) })
            }
            Kind::Any => alternatives.push(Alternative { kind: "string", value: Written::Text((0, None)) }),
            Kind::Values(values) => {
                let texts: Vec<String> =
                    values.iter().filter_map(|value| value.as_str()).map(str::to_owned).collect();
                if !texts.is_empty() {
                    alternatives.push(Alternative { kind: "string", value: Written::Choice(texts) });
                }
                let rest = values.iter().filter(|value| !value.is_string());
                others.extend(rest.map(|value| (json_type(value), json!({"const": value}))));
            }
            Kind::Number => others.push(("number", form.schema.clone())),
            Kind::Boolean => others.push(("boolean", form.schema.clone())),
            Kind::Null => others.push(("null", form.schema.clone())),
            Kind::List { .. } => others.push(("array", form.schema.clone())),
            Kind::Members(_) | Kind::AnyMembers => others.push(("object", form.schema.clone())),
            Kind::Other => others.push((type_name(&form.schema), form.schema.clone())),
        }
    }
    if has_types {
        alternatives.extend(others.into_iter().map(|(kind, schema)| Alternative {
            kind,
            value: Written::Json(with_definitions(&schema, root)),
        }));
    } else if !others.is_empty() {
        let all = others.into_iter().map(|(_, schema)| schema).collect::<Vec<_>>();
        // The schema as it is, where no part of it is text.
        let schema = if alternatives.is_empty() { schema.clone() } else { json!({"anyOf": all}) };
        alternatives
            .push(Alternative { kind: "object", value: Written::Json(with_definitions(&schema, root)) });
    }
    alternatives
}

fn parameter(tag: &str, key: &str, alternative: Alternative, rules: &mut LarkRules<'_>) -> String {
    let (before, after) = tag.split_once("$VALUE").unwrap_or((tag, ""));
    let string = if alternative.kind == "string" { "true" } else { "false" };
    let texts = [("$KEY", key), ("$STRING", string), ("$TYPE", alternative.kind)];
    let before = places(parts(before, &texts), rules);
    let mut after = parts(after, &texts);
    // What ends a text is the marker behind it.
    let end = match after.first_mut() {
        Some(Part::Text(end)) => std::mem::take(end),
        Some(Part::Place(_)) | None => String::new(),
    };
    let after = places(after, rules);
    let value = match alternative.value {
        Written::Text(length) => rules.text_until(length, &end),
        Written::Choice(texts) => format!("{} {}", choice(&texts), rules.marker(&end)),
        Written::Json(schema) => format!("{} {}", rules.json(schema), rules.marker(&end)),
    };
    format!("{before} {value} {after}")
}

/// One of these texts; an expression.
pub(super) fn choice(texts: &[String]) -> String {
    let some: Vec<String> = texts.iter().filter(|text| !text.is_empty()).map(|text| quoted(text)).collect();
    match (some.is_empty(), some.len() == texts.len()) {
        (true, _) => String::new(),
        (false, true) => format!("({})", some.join(" | ")),
        (false, false) => format!("({})?", some.join(" | ")),
    }
}

fn type_name(schema: &Value) -> &'static str {
    if schema["type"] == "array" { "array" } else { "object" }
}
