//! Arguments as elements, those of objects and lists too, each tag behind a token of the family (MiniMax M3).

use std::collections::HashMap;

use serde_json::{Value, json};

use super::forms::{Form, Kind, forms, length, members, with_definitions};
use super::lark::LarkRules;
use super::parameters::choice;

/// The arguments of a call, in the order of the schema; those that are not required may be left out.
pub(super) fn arguments(token: &'static str, schema: &Value, rules: &mut LarkRules<'_>) -> String {
    let mut elements = Elements { rules, root: schema, token, named: HashMap::new() };
    elements.row(schema.as_object().map(members).unwrap_or_default())
}

/// The keyword of a text that elements cannot enforce, and the text's key.
pub(super) fn unenforced(schema: &Value, key: &str) -> Option<(&'static str, String)> {
    match schema {
        Value::Object(fields) => {
            // A property may have such a name; then its value is a schema.
            let keyword = ["pattern", "format"].into_iter().find(|keyword| schema[*keyword].is_string());
            let is_text =
                matches!(fields.get("type"), None | Some(Value::Array(_))) || schema["type"] == "string";
            if let Some(keyword) = keyword.filter(|_| is_text) {
                return Some((keyword, key.to_owned()));
            }
            let says_nothing =
                |key: &str| matches!(key, "default" | "examples" | "example" | "const" | "enum");
            let parts = fields.iter().filter(|(key, _)| !says_nothing(key));
            parts.into_iter().find_map(|(key, part)| unenforced(part, key))
        }
        Value::Array(parts) => parts.iter().find_map(|part| unenforced(part, key)),
        _ => None,
    }
}

struct Elements<'a, 'r, 'v> {
    rules: &'r mut LarkRules<'v>,
    root: &'a Value,
    token: &'static str,
    /// The rules of elements, by the places of their schemas: parts may refer to each other in a circle.
    named: HashMap<(*const Value, String), String>,
}

impl<'a> Elements<'a, '_, '_> {
    fn row(&mut self, members: Vec<super::forms::Member<'a>>) -> String {
        let elements = members.into_iter().map(|member| {
            let element = self.element(member.key, member.schema);
            if member.required { element } else { format!("({element})?") }
        });
        elements.collect::<Vec<_>>().join(" ")
    }

    fn element(&mut self, name: &str, schema: &'a Value) -> String {
        let place = (std::ptr::from_ref(schema), name.to_owned());
        if let Some(rule) = self.named.get(&place) {
            return rule.clone();
        }
        if self.rules.is_too_large() {
            return String::new();
        }
        let rule = self.rules.reserve();
        self.named.insert(place, rule.clone());
        let token = self.token;
        let (begin, end) = (format!("{token}<{name}>"), format!("{token}</{name}>"));
        let forms = forms(schema, self.root);
        let is_list = |form: &Form<'_>| form.schema["type"] == "array";
        let is_object = |form: &Form<'_>| form.schema["type"] == "object";
        // Nothing in an empty element says which of both it is.
        let in_json = forms.iter().any(is_list) && forms.iter().any(is_object);
        let alternatives: Vec<String> =
            forms.into_iter().map(|form| self.content(form, in_json, &end)).collect();
        let begin = self.rules.marker(&begin);
        self.rules.define(&rule, &format!("{begin} ({})", alternatives.join(" | ")));
        rule
    }

    /// What stands in an element, and its end; an expression.
    fn content(&mut self, form: Form<'a>, in_json: bool, end: &str) -> String {
        let close = self.rules.marker(end);
        match form.kind {
            Kind::Text => self.rules.text_until(length(&form.schema), end),
            Kind::Any => self.rules.until(end),
            Kind::Values(values) => {
                let (texts, others): (Vec<&Value>, Vec<&Value>) =
                    values.into_iter().partition(|value| value.is_string());
                let mut alternatives = Vec::new();
                if !texts.is_empty() {
                    let texts: Vec<String> =
                        texts.into_iter().filter_map(Value::as_str).map(str::to_owned).collect();
                    alternatives.push(format!("{} {close}", choice(&texts)));
                }
                if !others.is_empty() {
                    alternatives.push(format!("{} {close}", self.rules.json(json!({"enum": others}))));
                }
                alternatives.join(" | ")
            }
            Kind::Members(all) if !in_json => format!("{} {close}", self.row(all)),
            Kind::List { items, least, most } if !in_json => {
                let item = self.element("item", items);
                let items = match (least, most) {
                    (_, Some(0)) => String::new(),
                    (0, None) => format!("{item}*"),
                    (least, None) => format!("{item}{{{least},}}"),
                    (least, Some(most)) => format!("{item}{{{least},{most}}}"),
                };
                format!("{items} {close}")
            }
            _ => format!("{} {close}", self.rules.json(with_definitions(&form.schema, self.root))),
        }
    }
}
