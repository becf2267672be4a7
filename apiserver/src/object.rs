//! Access to the metadata every object has. It knows the fields of `metadata` and no kinds.

use std::sync::LazyLock;

use bytes::Bytes;
use rand::Rng;
use regex::Regex;
use serde_json::{Map, Value, json};

/// A string field of the metadata, or the empty string.
pub fn meta<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// The bytes of an object as they are stored, its fields in alphabetical order as in every API server.
pub fn encoded(mut object: Value) -> Bytes {
    object.sort_all_objects();
    Bytes::from(object.to_string())
}

/// The name.
pub fn name(object: &Value) -> &str {
    meta(object, "name")
}

/// The namespace; empty for cluster-scoped objects.
pub fn namespace(object: &Value) -> &str {
    meta(object, "namespace")
}

/// The unique id.
pub fn uid(object: &Value) -> &str {
    meta(object, "uid")
}

/// The `resourceVersion`.
pub fn resource_version(object: &Value) -> &str {
    meta(object, "resourceVersion")
}

/// Whether the object has a deletion timestamp.
pub fn is_terminating(object: &Value) -> bool {
    !meta(object, "deletionTimestamp").is_empty()
}

/// The finalizers that block deletion.
pub fn finalizers(object: &Value) -> Vec<&str> {
    object["metadata"]["finalizers"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The owner references.
pub fn owners(object: &Value) -> &[Value] {
    object["metadata"]["ownerReferences"].as_array().map_or(&[], Vec::as_slice)
}

/// The metadata for writing; created if missing.
pub fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    let metadata = &mut object["metadata"];
    if !metadata.is_object() {
        *metadata = json!({});
    }
    metadata.as_object_mut().expect("metadata was made an object just above")
}

/// Sets a metadata field, or removes it when the value is null.
pub fn set_meta(object: &mut Value, field: &str, value: Value) {
    let metadata = metadata_mut(object);
    if value.is_null() {
        metadata.remove(field);
    } else {
        metadata.insert(field.into(), value);
    }
}

/// Copies a metadata field from another object, or removes it if that object has none.
pub fn copy_meta(object: &mut Value, from: &Value, field: &str) {
    set_meta(object, field, from["metadata"][field].clone());
}

/// Sets or replaces the finalizers; an empty list removes the field.
pub fn set_finalizers(object: &mut Value, finalizers: Vec<String>) {
    let value = if finalizers.is_empty() { Value::Null } else { json!(finalizers) };
    set_meta(object, "finalizers", value);
}

/// Removes a top-level field.
pub fn remove(object: &mut Value, field: &str) {
    if let Some(fields) = object.as_object_mut() {
        fields.remove(field);
    }
}

/// Copies a top-level field from another object, or removes it if that object has none.
pub fn copy_field(object: &mut Value, from: &Value, field: &str) {
    match from.get(field) {
        Some(value) => object[field] = value.clone(),
        None => remove(object, field),
    }
}

/// A random version 4 UUID.
pub fn new_uid() -> String {
    let mut bytes: [u8; 16] = rand::rng().random();
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let text = hex::encode(bytes);
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

/// The five characters that `generateName` appends: no vowels, so that no word appears.
pub fn name_suffix() -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut rng = rand::rng();
    (0..5).map(|_| char::from(ALPHABET[rng.random_range(0..ALPHABET.len())])).collect()
}

/// A metadata timestamp: whole seconds, UTC.
pub fn timestamp(now: jiff::Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

static SUBDOMAIN: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
        .expect("a constant pattern")
});
static LABEL: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$").expect("a constant pattern"));
static QUALIFIED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$").expect("a constant pattern"));

/// Whether this is a DNS-1123 subdomain, as most names must be.
pub fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && SUBDOMAIN.is_match(name)
}

/// Whether this is a DNS-1123 label, as namespaces must be.
pub fn is_dns_label(name: &str) -> bool {
    name.len() <= 63 && LABEL.is_match(name)
}

/// Whether this may be the value of a label.
pub fn is_label_value(value: &str) -> bool {
    value.is_empty() || (value.len() <= 63 && QUALIFIED.is_match(value))
}

/// Whether this may be the key of a label or annotation.
pub fn is_label_key(key: &str) -> bool {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    prefix.is_none_or(is_subdomain) && name.len() <= 63 && QUALIFIED.is_match(name)
}

/// Whether this may be a finalizer of a built-in kind: with a domain, or one of Kubernetes' own.
pub fn is_finalizer_of_builtin(name: &str) -> bool {
    is_label_key(name)
        && (name.contains('/') || matches!(name, "kubernetes" | "orphan" | "foregroundDeletion"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_judged_as_kubernetes_does() {
        for (good, bad) in [("a.b-c", "a..b"), ("x1", "X1"), ("a", "")] {
            assert!(is_subdomain(good), "{good}");
            assert!(!is_subdomain(bad), "{bad}");
        }
        assert!(is_label_key("example.com/Thing_1.x") && !is_label_key("a/b/c") && !is_label_key("-a"));
        assert!(is_label_value("") && is_label_value("A.b_c") && !is_label_value("no spaces"));
    }

    #[test]
    fn a_uid_is_a_version_4_uuid() {
        let uid = new_uid();
        assert_eq!(uid.len(), 36);
        assert_eq!(&uid[14..15], "4");
    }
}
