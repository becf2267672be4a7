//! `application/vnd.kubernetes.protobuf` request bodies, transcoded to JSON for the kinds that clients send
//! typed.
//!
//! Not here: protobuf responses; every client that sends protobuf also accepts JSON.

mod admission;
mod definitions;
mod field;
mod messages;
mod wire;

use std::cell::Cell;

use base64::Engine as _;
use serde_json::{Map, Value};

use crate::schema::bounds::{self, BoundsError, MAX_VALUES};
use crate::schema::strict;
use field::Type;
use wire::{Fields, Payload};

/// Why a protobuf body is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ProtobufError {
    /// No `k8s\0` prefix or broken wire data (400).
    #[error("the protobuf body is malformed: {0}")]
    Malformed(String),
    /// A kind without a message definition here (415).
    #[error("this server has no protobuf encoding of {api_version} {kind}; send application/json")]
    UnknownKind {
        /// `v1`.
        api_version: String,
        /// `Pod`.
        kind: String,
    },
}

impl From<String> for ProtobufError {
    fn from(reason: String) -> Self {
        ProtobufError::Malformed(reason)
    }
}

/// Prefix of every Kubernetes protobuf body.
const MAGIC: &[u8] = b"k8s\0";

/// Decodes `k8s\0` + `runtime.Unknown` to a JSON object with apiVersion and kind.
pub fn to_json(body: &[u8]) -> Result<Value, ProtobufError> {
    let envelope = body
        .strip_prefix(MAGIC)
        .ok_or_else(|| ProtobufError::Malformed("it does not begin with k8s\\0".into()))?;
    let (mut api_version, mut kind, mut raw) = (String::new(), String::new(), &[][..]);
    for field in Fields::new(envelope) {
        match field? {
            (1, Payload::Bytes(type_meta)) => {
                for field in Fields::new(type_meta) {
                    match field? {
                        (1, Payload::Bytes(bytes)) => api_version = text(bytes)?,
                        (2, Payload::Bytes(bytes)) => kind = text(bytes)?,
                        _ => {}
                    }
                }
            }
            (2, Payload::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    let Some(message) = messages::of_kind(&api_version, &kind) else {
        return Err(ProtobufError::UnknownKind { api_version, kind });
    };
    let values = Cell::new(MAX_VALUES);
    let mut object = decode(message, raw, Budget { depth: MAX_DEPTH, values: &values })?;
    object.insert("apiVersion".into(), api_version.into());
    object.insert("kind".into(), kind.into());
    Ok(Value::Object(object))
}

fn text(bytes: &[u8]) -> Result<String, String> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|error| format!("a string is not UTF-8: {error}"))
}

fn base64(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// Maximum nesting of messages: schemas nest, and unlimited nesting would overflow the stack.
const MAX_DEPTH: usize = 100;

/// What may still be decoded: a value takes two bytes on the wire and sixty here.
#[derive(Clone, Copy)]
struct Budget<'a> {
    /// Levels of messages.
    depth: usize,
    /// Values of the whole body.
    values: &'a Cell<usize>,
}

impl Budget<'_> {
    /// The budget within one more message.
    fn message(mut self) -> Result<Self, String> {
        self.depth = self.depth.checked_sub(1).ok_or("the messages nest too deeply")?;
        self.take(1)?;
        Ok(self)
    }

    fn take(&self, values: usize) -> Result<(), String> {
        let left = self.values.get().checked_sub(values).ok_or_else(|| BoundsError::Values.to_string())?;
        self.values.set(left);
        Ok(())
    }
}

fn decode(message: &str, bytes: &[u8], budget: Budget<'_>) -> Result<Map<String, Value>, String> {
    let budget = budget.message()?;
    let known = messages::fields(message);
    let mut object = Map::new();
    for field in Fields::new(bytes) {
        let (number, payload) = field?;
        budget.take(1)?;
        let Some((_, name, kind)) = known.iter().find(|(known, _, _)| *known == number) else { continue };
        set(&mut object, name, *kind, payload, budget)
            .map_err(|reason| format!("{message}.{name}: {reason}"))?;
    }
    Ok(object)
}

/// Sets one field in the JSON object of its message.
///
/// Typed clients send non-pointer fields even when they are empty; JSON omits those, and so does this
/// function.
fn set(
    object: &mut Map<String, Value>,
    name: &str,
    kind: Type,
    payload: Payload<'_>,
    budget: Budget<'_>,
) -> Result<(), String> {
    let value = match (kind, payload) {
        (Type::Text, Payload::Bytes(bytes)) => {
            Some(text(bytes)?).filter(|text| !text.is_empty()).map(Value::from)
        }
        (Type::MaybeText, Payload::Bytes(bytes)) => Some(text(bytes)?.into()),
        (Type::Bool, Payload::Varint(number)) => (number != 0).then(|| true.into()),
        (Type::MaybeBool, Payload::Varint(number)) => Some((number != 0).into()),
        (Type::Int, Payload::Varint(number)) => (number != 0).then(|| signed(number).into()),
        (Type::MaybeInt, Payload::Varint(number)) => Some(signed(number).into()),
        (Type::Bytes, Payload::Bytes(bytes)) => (!bytes.is_empty()).then(|| base64(bytes).into()),
        (Type::Time, Payload::Bytes(bytes)) => time(bytes, "%Y-%m-%dT%H:%M:%SZ")?,
        (Type::MicroTime, Payload::Bytes(bytes)) => time(bytes, "%Y-%m-%dT%H:%M:%S.%6fZ")?,
        (Type::Json, Payload::Bytes(bytes)) => json(bytes, budget)?,
        (Type::Message(message), Payload::Bytes(bytes)) => {
            let inner = decode(message, bytes, budget)?;
            let shown = !inner.is_empty() || matches!(name, "metadata" | "spec");
            shown.then_some(Value::Object(inner))
        }
        (Type::Inline(message), Payload::Bytes(bytes)) => {
            object.append(&mut decode(message, bytes, budget)?);
            return Ok(());
        }
        (Type::Texts, Payload::Bytes(bytes)) => return append(object, name, text(bytes)?.into()),
        (Type::Messages(message), Payload::Bytes(bytes)) => {
            return append(object, name, Value::Object(decode(message, bytes, budget)?));
        }
        (Type::TextMap | Type::BytesMap | Type::TextsMap, Payload::Bytes(bytes)) => {
            let (key, value) = entry(kind, bytes)?;
            let map = object.entry(name).or_insert_with(|| Value::Object(Map::new()));
            map[key] = value;
            return Ok(());
        }
        (Type::Double, Payload::Fixed(bytes)) => Some(double(bytes)?),
        (Type::Jsons, Payload::Bytes(bytes)) => match json(bytes, budget)? {
            Some(value) => return append(object, name, value),
            None => None,
        },
        (Type::Present(message), Payload::Bytes(bytes)) => {
            Some(Value::Object(decode(message, bytes, budget)?))
        }
        (Type::MessageMap(message), Payload::Bytes(bytes)) => {
            let (key, raw) = raw_entry(bytes)?;
            let map = object.entry(name).or_insert_with(|| Value::Object(Map::new()));
            map[key] = Value::Object(decode(message, raw, budget)?);
            return Ok(());
        }
        (Type::Either(message) | Type::SchemaOrBool(message), Payload::Bytes(bytes)) => {
            Some(union(kind, message, bytes, budget)?)
        }
        (kind, payload) => return Err(format!("expected {kind:?}, got {payload:?}")),
    };
    if let Some(value) = value {
        object.insert(name.to_owned(), value);
    }
    Ok(())
}

fn append(object: &mut Map<String, Value>, name: &str, item: Value) -> Result<(), String> {
    if let Value::Array(items) = object.entry(name).or_insert_with(|| Value::Array(Vec::new())) {
        items.push(item);
    }
    Ok(())
}

/// The alternatives to a schema that a schema field allows: a list of schemas, or a boolean.
fn union(kind: Type, message: &str, bytes: &[u8], budget: Budget<'_>) -> Result<Value, String> {
    let (mut schema, mut many, mut allows) = (None, Vec::new(), false);
    for field in Fields::new(bytes) {
        match (kind, field?) {
            (Type::SchemaOrBool(_), (1, Payload::Varint(number))) => allows = number != 0,
            (Type::SchemaOrBool(_), (2, Payload::Bytes(raw)))
            | (Type::Either(_), (1, Payload::Bytes(raw))) => {
                schema = Some(Value::Object(decode(message, raw, budget)?));
            }
            (Type::Either(_), (2, Payload::Bytes(raw))) => {
                many.push(Value::Object(decode(message, raw, budget)?))
            }
            _ => {}
        }
    }
    Ok(match (schema, kind) {
        (Some(schema), _) => schema,
        (None, Type::SchemaOrBool(_)) => allows.into(),
        (None, _) => many.into(),
    })
}

/// Whole numbers become JSON integers, as in JSON written by a person.
fn double(bytes: &[u8]) -> Result<Value, String> {
    let bytes: [u8; 8] = bytes.try_into().map_err(|_| "a number is not eight bytes long".to_owned())?;
    let number = f64::from_le_bytes(bytes);
    if number.fract() == 0.0 && number.abs() < 9.0e15 {
        return Ok((number as i64).into());
    }
    serde_json::Number::from_f64(number)
        .map(Value::Number)
        .ok_or_else(|| format!("{number} is not a JSON number"))
}

/// Varints encode negative numbers in two's complement.
fn signed(number: u64) -> i64 {
    number as i64
}

/// A map entry: the key is field 1, the value field 2; either is omitted when empty.
fn raw_entry(bytes: &[u8]) -> Result<(String, &[u8]), String> {
    let (mut key, mut raw) = (String::new(), &[][..]);
    for field in Fields::new(bytes) {
        match field? {
            (1, Payload::Bytes(bytes)) => key = text(bytes)?,
            (2, Payload::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    Ok((key, raw))
}

/// A map entry whose value is text, bytes or texts.
fn entry(kind: Type, bytes: &[u8]) -> Result<(String, Value), String> {
    let (key, raw) = raw_entry(bytes)?;
    let value = match kind {
        Type::BytesMap => base64(raw).into(),
        Type::TextsMap => {
            let items: Result<Vec<Value>, String> = Fields::new(raw)
                .filter_map(|field| match field {
                    Ok((1, Payload::Bytes(bytes))) => Some(text(bytes).map(Value::from)),
                    Ok(_) => None,
                    Err(error) => Some(Err(error)),
                })
                .collect();
            items?.into()
        }
        _ => text(raw)?.into(),
    };
    Ok((key, value))
}

/// Seconds and nanoseconds; an empty message is no time.
fn time(bytes: &[u8], format: &str) -> Result<Option<Value>, String> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let (mut seconds, mut nanoseconds) = (0, 0);
    for field in Fields::new(bytes) {
        match field? {
            (1, Payload::Varint(number)) => seconds = signed(number),
            (2, Payload::Varint(number)) => nanoseconds = i32::try_from(signed(number)).unwrap_or_default(),
            _ => {}
        }
    }
    let time = jiff::Timestamp::new(seconds, nanoseconds).map_err(|error| error.to_string())?;
    Ok(Some(time.strftime(format).to_string().into()))
}

fn json(bytes: &[u8], budget: Budget<'_>) -> Result<Option<Value>, String> {
    for field in Fields::new(bytes) {
        if let (1, Payload::Bytes(raw)) = field? {
            let (value, _) = strict::json(raw).map_err(|error| error.to_string())?;
            budget.take(bounds::values(&value))?;
            return Ok(Some(value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{ProtobufError, to_json};

    /// A length-delimited field.
    fn bytes(number: u8, payload: &[u8]) -> Vec<u8> {
        let mut field = vec![number << 3 | 2];
        let mut length = payload.len();
        while length > 0x7f {
            field.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        field.push(length as u8);
        field.extend_from_slice(payload);
        field
    }

    fn number(field: u8, value: u8) -> Vec<u8> {
        vec![field << 3, value]
    }

    fn body(api_version: &str, kind: &str, object: &[Vec<u8>]) -> Vec<u8> {
        let type_meta = [bytes(1, api_version.as_bytes()), bytes(2, kind.as_bytes())].concat();
        [b"k8s\0".to_vec(), bytes(1, &type_meta), bytes(2, &object.concat()), bytes(3, b""), bytes(4, b"")]
            .concat()
    }

    #[test]
    fn values_are_bounded_while_they_are_decoded() {
        let field = |tag: u8, bytes: &[u8]| {
            let mut length = bytes.len();
            let mut field = vec![tag];
            while length >= 0x80 {
                field.push((length & 0x7f) as u8 | 0x80);
                length >>= 7;
            }
            field.push(length as u8);
            field.extend(bytes);
            field
        };
        for (finalizers, expected) in [(100_000, true), (250_000, false)] {
            // Empty finalizers, two bytes each.
            let metadata = field(0x0a, &[0x72, 0].repeat(finalizers));
            let mut body = b"k8s\0".to_vec();
            body.extend(field(0x0a, &[field(0x0a, b"v1"), field(0x12, b"Namespace")].concat()));
            body.extend(field(0x12, &metadata));
            let decoded = to_json(&body);
            assert_eq!(decoded.is_ok(), expected, "{finalizers}");
            assert!(decoded.is_ok() || matches!(decoded, Err(ProtobufError::Malformed(_))));
        }
    }

    #[test]
    fn a_typed_secret_reads_as_its_json() {
        let meta = [
            bytes(1, b"s"),
            bytes(3, b"default"),
            bytes(5, b""),
            number(7, 0),
            bytes(8, b""),
            bytes(11, &[bytes(1, b"owner"), bytes(2, b"helm")].concat()),
            bytes(
                13,
                &[bytes(1, b"K"), bytes(3, b"o"), bytes(4, b"u"), bytes(5, b"v1"), number(6, 0)].concat(),
            ),
        ];
        let object = [
            bytes(1, &meta.concat()),
            bytes(2, &[bytes(1, b"release"), bytes(2, b"hi")].concat()),
            bytes(2, &[bytes(1, b"empty")].concat()),
            bytes(3, b"helm.sh/release.v1"),
            number(5, 0),
        ];
        let long = [bytes(4, &[bytes(1, b"long"), bytes(2, "x".repeat(300).as_bytes())].concat())];
        assert_eq!(
            to_json(&body("v1", "Secret", &[&object[..], &long].concat())).expect("a Secret"),
            json!({"apiVersion": "v1", "kind": "Secret",
                "metadata": {"name": "s", "namespace": "default", "labels": {"owner": "helm"},
                    "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "o", "uid": "u", "controller": false}]},
                "data": {"release": "aGk=", "empty": ""}, "stringData": {"long": "x".repeat(300)},
                "type": "helm.sh/release.v1", "immutable": false})
        );
    }

    #[test]
    fn a_typed_policy_reads_as_its_json() {
        let rule = [bytes(1, b""), bytes(2, b"v1"), bytes(3, b"configmaps"), bytes(4, b"*")].concat();
        let rules = [bytes(1, b"name"), bytes(2, &[bytes(1, b"CREATE"), bytes(2, &rule)].concat())].concat();
        let spec = [
            bytes(2, &[bytes(1, b""), bytes(3, &rules), bytes(7, b"Exact")].concat()),
            bytes(3, &[bytes(1, b"false"), bytes(2, b"")].concat()),
            bytes(4, b"Fail"),
        ];
        let object = [bytes(1, &bytes(1, b"p")), bytes(2, &spec.concat())];
        let policy = body("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", &object);
        assert_eq!(
            to_json(&policy).expect("a policy"),
            json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
                "metadata": {"name": "p"},
                "spec": {
                    "matchConstraints": {"matchPolicy": "Exact", "resourceRules": [{
                        "resourceNames": ["name"], "operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"],
                        "resources": ["configmaps"], "scope": "*"}]},
                    "validations": [{"expression": "false"}], "failurePolicy": "Fail"}})
        );
    }

    #[test]
    fn reviews_and_options_read_as_their_json() {
        let attributes = [bytes(1, b"ns"), bytes(2, b"get"), bytes(3, b""), bytes(5, b"secrets")].concat();
        let review = body(
            "authorization.k8s.io/v1",
            "SelfSubjectAccessReview",
            &[
                bytes(1, b""),
                bytes(2, &bytes(1, &attributes)),
                bytes(3, &[number(1, 0), bytes(2, b"")].concat()),
            ],
        );
        assert_eq!(
            to_json(&review).expect("a review"),
            json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {},
                "spec": {"resourceAttributes": {"namespace": "ns", "verb": "get", "resource": "secrets"}}})
        );
        let options =
            body("apps/v1", "DeleteOptions", &[number(1, 0), bytes(4, b"Background"), bytes(5, b"All")]);
        assert_eq!(
            to_json(&options).expect("options"),
            json!({"apiVersion": "apps/v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
                "propagationPolicy": "Background", "dryRun": ["All"]})
        );
    }

    #[test]
    fn times_are_written_as_their_kind_is() {
        let at = [number(1, 60), number(2, 0)].concat();
        let spec = [bytes(1, b"me"), number(2, 15), bytes(3, &at), bytes(4, b"")].concat();
        let lease = body("coordination.k8s.io/v1", "Lease", &[bytes(1, &bytes(8, &at)), bytes(2, &spec)]);
        assert_eq!(
            to_json(&lease).expect("a Lease"),
            json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"creationTimestamp": "1970-01-01T00:01:00Z"},
                "spec": {"holderIdentity": "me", "leaseDurationSeconds": 15, "acquireTime": "1970-01-01T00:01:00.000000Z"}})
        );
    }

    #[test]
    fn a_definition_reads_with_its_schema_and_nests_only_so_far() {
        let size =
            [bytes(5, b"integer"), [vec![11 << 3 | 1], 1.0_f64.to_le_bytes().to_vec()].concat()].concat();
        let entry = [bytes(1, b"size"), bytes(2, &size)].concat();
        // Field numbers from 16 on take two bytes of tag; all of these are short.
        let properties = [vec![0xea, 0x01, entry.len() as u8], entry].concat();
        let schema = [bytes(5, b"object"), properties].concat();
        let version = [bytes(1, b"v1"), number(2, 1), number(3, 0), bytes(4, &bytes(1, &schema))];
        let subresources = bytes(5, &bytes(1, b""));
        let spec = bytes(7, &[version.concat(), subresources].concat());
        let object =
            to_json(&body("apiextensions.k8s.io/v1", "CustomResourceDefinition", &[bytes(2, &spec)]));
        assert_eq!(
            object.expect("a definition")["spec"]["versions"],
            json!([{"name": "v1", "served": true, "storage": false, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"size": {"type": "integer", "minimum": 1}}}}}])
        );
        let mut nested = Vec::new();
        for _ in 0..10_000 {
            let mut length = nested.len();
            let mut head = vec![0xe2, 0x01];
            while length > 0x7f {
                head.push((length & 0x7f) as u8 | 0x80);
                length >>= 7;
            }
            head.push(length as u8);
            nested.splice(..0, head);
        }
        let spec = bytes(7, &bytes(4, &bytes(1, &nested)));
        let deep = to_json(&body("apiextensions.k8s.io/v1", "CustomResourceDefinition", &[bytes(2, &spec)]));
        assert!(deep.expect_err("too deep").to_string().contains("nest too deeply"));
    }

    #[test]
    fn malformed_protobuf_bodies_are_refused_with_the_reason() {
        assert!(matches!(to_json(b"{}"), Err(ProtobufError::Malformed(_))));
        let pod = to_json(&body("v1", "Pod", &[])).expect_err("no Pods here");
        assert_eq!(pod.to_string(), "this server has no protobuf encoding of v1 Pod; send application/json");
        let broken = to_json(&body("v1", "Secret", &[number(1, 0)])).expect_err("metadata is a message");
        assert!(broken.to_string().contains("Secret.metadata"), "{broken}");
        let cut = body("v1", "Secret", &[vec![0x0a, 0x7f]]);
        assert!(to_json(&cut).is_err());
    }
}
