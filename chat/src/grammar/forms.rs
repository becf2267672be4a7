//! The kinds of values that a JSON Schema allows, for notations of values that are not JSON's. Where a schema says more
//! than its kind can, the value is left to JSON. Not a validator: `llguidance` has checked the schema before.

use serde_json::{Map, Value, json};

/// References and unions within each other that are followed for one value.
const MAX_DEPTH: usize = 16;

/// Schemas that are looked at for one value: unions of references to unions are as many as somebody likes.
const MAX_VISITS: usize = 256;

/// Keywords that say nothing about the value.
const ANNOTATIONS: [&str; 13] = [
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
];

/// Of a member that the schema requires and does not describe.
static ANY: Value = Value::Bool(true);

/// Values of one kind.
pub(super) struct Form<'a> {
    pub kind: Kind<'a>,
    /// The schema of this kind alone, without annotations.
    pub schema: Value,
}

pub(super) enum Kind<'a> {
    /// One of these.
    Values(Vec<&'a Value>),
    Text,
    Number,
    Boolean,
    Null,
    List {
        items: &'a Value,
        least: u64,
        most: Option<u64>,
    },
    Members(Vec<Member<'a>>),
    /// An object of any members.
    AnyMembers,
    Any,
    /// None of these.
    Other,
}

pub(super) struct Member<'a> {
    pub key: &'a str,
    pub schema: &'a Value,
    pub required: bool,
}

/// The kinds of values of a schema in the document `root`, in which `oneOf` is `anyOf` already.
pub(super) fn forms<'a>(schema: &'a Value, root: &'a Value) -> Vec<Form<'a>> {
    let mut collected = Collected { root, forms: Vec::new(), visits: 0 };
    collected.add(schema, 0);
    if collected.visits > MAX_VISITS {
        return vec![Form { kind: Kind::Other, schema: schema.clone() }];
    }
    collected.forms
}

/// The members of an object, in the order of its schema.
pub(super) fn members(fields: &Map<String, Value>) -> Vec<Member<'_>> {
    let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let properties = fields.get("properties").and_then(Value::as_object);
    let described = properties.into_iter().flatten().map(|(key, schema)| Member {
        key,
        schema,
        required: required.contains(&key.as_str()),
    });
    let undescribed = required.iter().filter(|key| properties.is_none_or(|all| !all.contains_key(**key)));
    described.chain(undescribed.map(|key| Member { key, schema: &ANY, required: true })).collect()
}

/// The least and the largest length of a text.
pub(super) fn length(schema: &Value) -> (u64, Option<u64>) {
    (schema["minLength"].as_u64().unwrap_or_default(), schema["maxLength"].as_u64())
}

/// A part of a schema, with what its references name.
pub(super) fn with_definitions(part: &Value, root: &Value) -> Value {
    let mut part = part.clone();
    if let Some(fields) = part.as_object_mut() {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = root.get(key) {
                fields.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    part
}

/// The forms of a value so far.
struct Collected<'a> {
    root: &'a Value,
    forms: Vec<Form<'a>>,
    visits: usize,
}

impl<'a> Collected<'a> {
    fn add(&mut self, schema: &'a Value, depth: usize) {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return;
        }
        let root = self.root;
        let forms = &mut self.forms;
        let Value::Object(fields) = schema else {
            let kind = if *schema == ANY { Kind::Any } else { Kind::Other };
            return forms.push(Form { kind, schema: schema.clone() });
        };
        let rules: Map<String, Value> = fields
            .iter()
            .filter(|(key, _)| !ANNOTATIONS.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let only = |key: &str| fields.get(key).filter(|_| rules.len() == 1 && depth < MAX_DEPTH);
        let target =
            only("$ref").and_then(Value::as_str).and_then(|name| root.pointer(name.strip_prefix('#')?));
        let alternatives = only("anyOf").and_then(Value::as_array);
        let single = only("allOf").and_then(Value::as_array).filter(|all| all.len() == 1);
        if let Some(target) = target {
            return self.add(target, depth + 1);
        }
        if let Some(alternatives) = alternatives.or(single) {
            return alternatives.iter().for_each(|one| self.add(one, depth + 1));
        }
        let schema = Value::Object(rules);
        let kind_of_type = |name: &str| kind_of_type(name, fields, &schema);
        match (&fields.get("type"), fields.get("enum"), fields.get("const")) {
            (kind, Some(Value::Array(values)), None) => {
                let of_type = |value: &&Value| kind.is_none_or(|kind| has_type(value, kind));
                forms.push(Form { kind: Kind::Values(values.iter().filter(of_type).collect()), schema });
            }
            (_, None, Some(value)) => forms.push(Form { kind: Kind::Values(vec![value]), schema }),
            (Some(Value::String(name)), None, None) => forms.push(Form { kind: kind_of_type(name), schema }),
            (Some(Value::Array(names)), None, None) => {
                for name in names.iter().filter_map(Value::as_str) {
                    let mut schema = schema.clone();
                    schema["type"] = name.into();
                    forms.push(Form { kind: kind_of_type(name), schema });
                }
            }
            (None, None, None) if is_within(&schema, &[]) => forms.push(Form { kind: Kind::Any, schema }),
            (None, None, None) if is_within(&schema, &["minLength", "maxLength", "pattern", "format"]) => {
                forms.push(Form { kind: Kind::Text, schema: with_type(&schema, "string") });
            }
            _ => forms.push(Form { kind: Kind::Other, schema }),
        }
    }
}

fn kind_of_type<'a>(name: &str, fields: &'a Map<String, Value>, rules: &Value) -> Kind<'a> {
    // Keywords of other types say nothing, and those of several types are not sorted here.
    match name {
        "string" => Kind::Text,
        "integer" | "number" => Kind::Number,
        "boolean" => Kind::Boolean,
        "null" => Kind::Null,
        "array" if is_within(rules, &["type", "items", "minItems", "maxItems"]) => {
            match fields.get("items") {
                None => list(&ANY, fields),
                Some(items) if items.is_object() || *items == ANY => list(items, fields),
                Some(_) => Kind::Other,
            }
        }
        "object" if is_within(rules, &["type", "properties", "required", "additionalProperties"]) => {
            match fields.get("additionalProperties") {
                Some(Value::Object(schema)) if !schema.is_empty() => Kind::Other,
                Some(Value::Bool(false)) => Kind::Members(members(fields)),
                _ => match members(fields) {
                    all if all.is_empty() => Kind::AnyMembers,
                    all => Kind::Members(all),
                },
            }
        }
        _ => Kind::Other,
    }
}

fn list<'a>(items: &'a Value, fields: &'a Map<String, Value>) -> Kind<'a> {
    let number = |key: &str| fields.get(key).and_then(Value::as_u64);
    Kind::List { items, least: number("minItems").unwrap_or_default(), most: number("maxItems") }
}

fn is_within(rules: &Value, keys: &[&str]) -> bool {
    rules.as_object().is_some_and(|rules| rules.keys().all(|key| keys.contains(&key.as_str())))
}

fn with_type(schema: &Value, name: &str) -> Value {
    let mut schema = schema.clone();
    schema["type"] = json!(name);
    schema
}

/// The type of a value by JSON Schema, of which an integer is a number.
pub(super) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn has_type(value: &Value, kind: &Value) -> bool {
    let is = |name: &str| json_type(value) == if name == "integer" { "number" } else { name };
    match kind {
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is),
        _ => kind.as_str().is_none_or(is),
    }
}
