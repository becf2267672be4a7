//! Objects of a newer release: an older release reads them, with any values and fields they have added. A
//! watch that cannot read one object would miss all others.

use russet_crds::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

const NEW: &str = "FromTheFuture";

/// The pattern of amounts of money.
const MONEY: &str = r"^[0-9]{1,9}(\.[0-9]{1,9})?$";

/// An object with every field of its schema, an unknown value in each enum, and one additional field on every
/// level.
fn newer(schema: &Value) -> Value {
    if schema["enum"].is_array() {
        return json!(NEW);
    }
    match schema["type"].as_str() {
        Some("object") => {
            let mut object = Map::new();
            for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                object.insert(name.clone(), newer(field));
            }
            match &schema["additionalProperties"] {
                Value::Object(_) => {
                    drop(object.insert("key".to_owned(), newer(&schema["additionalProperties"])))
                }
                _ => drop(object.insert("fieldOfTheFuture".to_owned(), json!({"with": ["more"]}))),
            }
            Value::Object(object)
        }
        Some("array") => json!([newer(&schema["items"])]),
        Some("integer") => json!(1),
        Some("number") => json!(0.5),
        Some("boolean") => json!(true),
        Some("string") if schema["format"] == "date-time" => json!("2026-01-01T00:00:00Z"),
        // An amount of money is a decimal in every release: one that nobody can read must not count as none.
        Some("string") if schema["pattern"] == MONEY => json!("1.5"),
        Some("string") => json!("text"),
        other => panic!("no value for the type {other:?} of {schema}"),
    }
}

/// Enums anywhere in a schema.
fn enums(schema: &Value, found: &mut Vec<Vec<String>>) {
    if let Some(words) = schema["enum"].as_array() {
        found.push(words.iter().filter_map(|word| Some(word.as_str()?.to_owned())).collect());
    }
    match schema {
        Value::Object(fields) => fields.values().for_each(|field| enums(field, found)),
        Value::Array(items) => items.iter().for_each(|item| enums(item, found)),
        _ => {}
    }
}

/// The object as this release understands it.
fn read<K: DeserializeOwned + Serialize>(object: Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(serde_json::from_value::<K>(object)?)
}

type ReadFn = fn(Value) -> Result<Value, serde_json::Error>;

/// Every kind, and how it is read.
const READERS: [(&str, ReadFn); 18] = [
    ("InferenceNode", read::<InferenceNode>),
    ("NodePool", read::<NodePool>),
    ("ShardingStrategy", read::<ShardingStrategy>),
    ("Tier", read::<Tier>),
    ("Model", read::<Model>),
    ("ModelCopy", read::<ModelCopy>),
    ("ModelDeployment", read::<ModelDeployment>),
    ("ShardGroup", read::<ShardGroup>),
    ("Shard", read::<Shard>),
    ("ModelRoute", read::<ModelRoute>),
    ("ModelProvider", read::<ModelProvider>),
    ("AccessKey", read::<AccessKey>),
    ("Budget", read::<Budget>),
    ("Approval", read::<Approval>),
    ("Benchmark", read::<Benchmark>),
    ("Pipeline", read::<Pipeline>),
    ("PipelineRun", read::<PipelineRun>),
    ("HTTPEndpoint", read::<HttpEndpoint>),
];

/// A value with no more than its schema requires.
fn least(schema: &Value) -> Value {
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    match schema["type"].as_str() {
        Some("object") => {
            required.map(|name| (name.to_owned(), least(&schema["properties"][name]))).collect()
        }
        Some("array") => json!([]),
        _ => schema["enum"].get(0).cloned().unwrap_or_else(|| newer(schema)),
    }
}

/// The value as an API server stores it: with the defaults of its schema.
fn stored(schema: &Value, mut value: Value) -> Value {
    if let Value::Object(fields) = &mut value {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let default = field.get("default").filter(|_| !fields.contains_key(name)).cloned();
            if let Some(given) = fields.remove(name).or(default) {
                fields.insert(name.clone(), stored(field, given));
            }
        }
    }
    value
}

/// Whoever writes an object and whoever reads it back mean the same by what it does not say.
#[test]
fn defaults_of_the_schema_are_those_of_the_types() {
    let mut defaults = 0;
    for definition in all() {
        let definition = serde_json::to_value(definition).unwrap();
        let kind = definition["spec"]["names"]["kind"].as_str().unwrap();
        let (_, read) = READERS.iter().find(|(name, _)| *name == kind).expect(kind);
        for version in definition["spec"]["versions"].as_array().unwrap() {
            let schema = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
            let object = |spec: Value| {
                json!({
                    "apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind, "metadata": {"name": "a"}, "spec": spec,
                })
            };
            let written = least(schema);
            let kept = stored(schema, written.clone());
            defaults += usize::from(kept != written);
            assert_eq!(read(object(written)).unwrap(), read(object(kept)).unwrap(), "{kind}");
        }
    }
    assert!(defaults > 8, "only {defaults} kinds have defaults");
}

#[test]
fn every_kind_is_read_with_words_and_fields_of_a_newer_release() {
    let mut words = Vec::new();
    for definition in all() {
        let definition = serde_json::to_value(definition).unwrap();
        let kind = definition["spec"]["names"]["kind"].as_str().unwrap();
        let (_, read) = READERS.iter().find(|(name, _)| *name == kind).expect(kind);
        for version in definition["spec"]["versions"].as_array().unwrap() {
            let schema = &version["schema"]["openAPIV3Schema"];
            enums(schema, &mut words);
            let mut object = newer(schema);
            object["apiVersion"] = json!(format!("{GROUP}/{VERSION}"));
            object["kind"] = json!(kind);
            object["metadata"] = json!({"name": "a", "fieldOfTheFuture": 1});
            let text = serde_json::to_string_pretty(&object).unwrap();
            assert!(text.contains("fieldOfTheFuture"), "{kind}: the object has nothing new");
            if let Err(error) = read(object) {
                panic!("{kind} cannot be read: {error}\n{text}");
            }
        }
    }
    assert!(words.len() >= 6, "the schemas have lost their enums: {words:?}");
    for words in words {
        assert!(!words.contains(&"Unknown".to_owned()), "nobody may write Unknown: {words:?}");
    }
}

#[test]
fn newer_enum_words_parse_as_unknown_and_known_ones_stay() {
    let sharding = |mode: &str, backend: &str| -> Sharding {
        serde_json::from_value(json!({"mode": mode, "backend": backend})).unwrap()
    };
    let newer = sharding(NEW, NEW);
    assert_eq!((newer.mode, newer.backend), (ShardingMode::Unknown, BackendChoice::Unknown));
    let known = sharding("Hybrid", "JacclRing");
    assert_eq!((known.mode, known.backend), (ShardingMode::Hybrid, BackendChoice::JacclRing));
    let link: Link = serde_json::from_value(json!({"peer": "b", "interface": "en5", "kind": NEW})).unwrap();
    assert_eq!(link.kind, LinkKind::Other);
}
