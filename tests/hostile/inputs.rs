//! The table of hostile inputs: what is sent, to which process, and what it must be answered with.

use reqwest::Method;
use serde_json::{Value, json};

use crate::floods::Flood;

/// The process whose memory is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// API server and operator.
    Serve,
    /// The gateway.
    Gateway,
    /// The node's agent.
    Agent,
    /// The engine of another namespace's deployment.
    Engine,
}

impl Subject {
    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serve => "API server",
            Self::Gateway => "gateway",
            Self::Agent => "agent",
            Self::Engine => "engine",
        }
    }
}

/// How an input arrives.
pub enum Delivery {
    /// A tenant's requests to the API server, one after the other, with the accepted status codes.
    Api {
        method: Method,
        path: &'static str,
        media: &'static str,
        bodies: fn() -> Vec<Vec<u8>>,
        accepted: &'static [u16],
    },
    /// Requests with methods that nobody knows, without a credential, to the API server.
    MadeUpMethods { count: usize },
    /// Many connections, watches or requests at the API server.
    Flood { flood: Flood, count: usize },
    /// Bodies of chat requests to the gateway, all at once, with the accepted status codes.
    Chat { bodies: fn() -> Vec<Vec<u8>>, accepted: &'static [u16] },
    /// A Model of a repository of the hub, with a deployment; the words that its conditions must have.
    Model { repository: &'static str, words: &'static [&'static str] },
}

/// One row.
pub struct HostileInput {
    /// Its name in the table.
    pub name: &'static str,
    /// The process that must not grow.
    pub subject: Subject,
    /// How it arrives.
    pub delivery: Delivery,
}

const CONFIGMAPS: &str = "/api/v1/namespaces/hostile/configmaps";
const PLAIN: &str = "/api/v1/namespaces/hostile/configmaps/plain";
const MODELS: &str = "/apis/russet.dev/v1alpha1/namespaces/hostile/models";
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const JSON: &str = "application/json";
const YAML: &str = "application/yaml";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const JSON_PATCH: &str = "application/json-patch+json";
const MERGE_PATCH: &str = "application/merge-patch+json";
/// As much as the API server reads of a body, but for a rest.
const BODY: usize = 3 * 1024 * 1024 - 4096;
/// As much as the gateway reads of a body, but for a rest.
const CHAT_BODY: usize = 16 * 1024 * 1024 - 4096;

/// A refusal of what was sent.
const REFUSED: &[u16] = &[400, 413, 422];
/// A refusal, or a write of what is allowed after all.
const ANSWERED: &[u16] = &[200, 201, 400, 409, 413, 422, 429];

/// The table.
pub fn table() -> Vec<HostileInput> {
    let mut rows = api_rows();
    rows.extend(flood_rows());
    rows.extend(chat_rows());
    rows.extend(model_rows());
    rows
}

fn api_rows() -> Vec<HostileInput> {
    let row = |name, method, path, media, bodies, accepted| HostileInput {
        name,
        subject: Subject::Serve,
        delivery: Delivery::Api { method, path, media, bodies, accepted },
    };
    vec![
        row("aliases of YAML", Method::POST, CONFIGMAPS, YAML, || vec![aliases(1000, 1000)], REFUSED),
        row("nested aliases of YAML", Method::POST, CONFIGMAPS, YAML, || vec![nested_aliases()], REFUSED),
        row(
            "aliases of YAML in an access review",
            Method::POST,
            REVIEWS,
            YAML,
            || vec![nested_aliases()],
            REFUSED,
        ),
        row(
            "aliases of YAML, applied",
            Method::PATCH,
            "/api/v1/namespaces/hostile/configmaps/x?fieldManager=t",
            "application/apply-patch+yaml",
            || vec![nested_aliases()],
            REFUSED,
        ),
        row("empty lists in JSON", Method::POST, CONFIGMAPS, JSON, || vec![lists(BODY)], REFUSED),
        row("deep lists in JSON", Method::POST, CONFIGMAPS, JSON, || vec![vec![b'['; BODY]], REFUSED),
        row("deep flow lists in YAML", Method::POST, CONFIGMAPS, YAML, || vec![vec![b'['; BODY]], REFUSED),
        row("values in YAML", Method::POST, CONFIGMAPS, YAML, || vec![b"a: x\n".repeat(BODY / 5)], REFUSED),
        row("deep blocks in YAML", Method::POST, CONFIGMAPS, YAML, || vec![deep_blocks()], REFUSED),
        row("deep managedFields", Method::POST, MODELS, JSON, || vec![deep_managed_fields()], REFUSED),
        row("deep merge patch", Method::PATCH, PLAIN, MERGE_PATCH, || vec![deep(60_000)], REFUSED),
        row(
            "many finalizers",
            Method::POST,
            CONFIGMAPS,
            JSON,
            || vec![finalizers("many", |n| format!("a/f{n}"))],
            ANSWERED,
        ),
        row(
            "one finalizer many times",
            Method::POST,
            CONFIGMAPS,
            JSON,
            || vec![finalizers("same", |_| "a/b".into())],
            ANSWERED,
        ),
        row(
            "finalizers by updates",
            Method::PUT,
            PLAIN,
            JSON,
            || vec![finalizers("plain", |n| format!("a/f{n}")); 4],
            ANSWERED,
        ),
        row("many entries of a map", Method::POST, CONFIGMAPS, JSON, || vec![entries()], ANSWERED),
        row("a long key over a long list", Method::POST, CONFIGMAPS, JSON, || vec![long_key()], ANSWERED),
        row("many unknown fields", Method::POST, MODELS, JSON, || vec![unknown_fields()], ANSWERED),
        row("many wrong values", Method::POST, MODELS, JSON, || vec![wrong_values()], ANSWERED),
        row("many inserts at the front", Method::PATCH, PLAIN, JSON_PATCH, || vec![inserts()], REFUSED),
        row("copies of copies", Method::PATCH, PLAIN, JSON_PATCH, || vec![copies()], REFUSED),
        row(
            "many entries in protobuf",
            Method::POST,
            CONFIGMAPS,
            PROTOBUF,
            || vec![protobuf_entries()],
            ANSWERED,
        ),
        row("deep protobuf", Method::POST, CONFIGMAPS, PROTOBUF, || vec![deep_protobuf()], REFUSED),
        row(
            "large objects one after the other",
            Method::PUT,
            PLAIN,
            JSON,
            || (0..24).map(large_object).collect(),
            ANSWERED,
        ),
        HostileInput {
            name: "made-up methods",
            subject: Subject::Serve,
            delivery: Delivery::MadeUpMethods { count: 1000 },
        },
    ]
}

fn flood_rows() -> Vec<HostileInput> {
    let row = |name, flood, count| HostileInput {
        name,
        subject: Subject::Serve,
        delivery: Delivery::Flood { flood, count },
    };
    vec![
        row("2,000 idle HTTP/2 connections", Flood::IdleConnections, 2000),
        row("1,000 watches of one tenant", Flood::Watches, 1000),
        row("300 signing requests of one token", Flood::SigningRequests, 300),
    ]
}

fn chat_rows() -> Vec<HostileInput> {
    let row = |name, subject, bodies, accepted| HostileInput {
        name,
        subject,
        delivery: Delivery::Chat { bodies, accepted },
    };
    vec![
        row("empty lists to the gateway", Subject::Gateway, || vec![lists(CHAT_BODY); 4], &[400, 413, 429]),
        row(
            "deep lists to the gateway",
            Subject::Gateway,
            || vec![vec![b'['; CHAT_BODY]; 4],
            &[400, 413, 429],
        ),
        row("many messages to the gateway", Subject::Gateway, || vec![messages()], &[400, 413, 429]),
        row("a prompt of 15 MB", Subject::Engine, || vec![prompt("word ")], &[400, 413]),
        row("two prompts of 15 MB of emoji", Subject::Engine, || vec![prompt("😀"); 2], &[400, 413, 429]),
        row("a prompt of 15 MB without blanks", Subject::Engine, || vec![prompt("a")], &[400, 413]),
    ]
}

fn model_rows() -> Vec<HostileInput> {
    use super::repositories as repository;
    let row = |name, subject, repository, words| HostileInput {
        name,
        subject,
        delivery: Delivery::Model { repository, words },
    };
    vec![
        row("a configuration of 100 MB", Subject::Agent, repository::LONG_CONFIG, &["CorruptModel"]),
        row("a header of 100 MB", Subject::Agent, repository::LONG_HEADER, &["CorruptModel"]),
        row("headers of 90 MB in six files", Subject::Agent, repository::MANY_HEADERS, &["CorruptModel"]),
        row("2^29 key/value heads", Subject::Serve, repository::MANY_HEADS, &["heads"]),
        row("10,000 layers", Subject::Serve, repository::MANY_LAYERS, &["layers"]),
    ]
}

fn object(name: &str, rest: Value) -> Vec<u8> {
    let mut object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    merge(&mut object, rest);
    object.to_string().into_bytes()
}

fn merge(object: &mut Value, rest: Value) {
    match (object, rest) {
        (Value::Object(object), Value::Object(rest)) => {
            for (key, value) in rest {
                merge(object.entry(key).or_insert(Value::Null), value);
            }
        }
        (object, rest) => *object = rest,
    }
}

/// `leaves` values behind an anchor, and `aliases` of it.
fn aliases(leaves: usize, aliases: usize) -> Vec<u8> {
    format!("a: &a [{}]\nb: [{}]\n", vec!["0"; leaves].join(","), vec!["*a"; aliases].join(",")).into_bytes()
}

/// Four levels of aliases: 10^8 values in some kilobytes.
fn nested_aliases() -> Vec<u8> {
    let mut text = format!("a0: &a0 [{}]\n", vec!["0"; 100].join(","));
    for level in 1..4 {
        let alias = format!("*a{}", level - 1);
        text.push_str(&format!("a{level}: &a{level} [{}]\n", vec![alias.as_str(); 100].join(",")));
    }
    text.into_bytes()
}

fn lists(bytes: usize) -> Vec<u8> {
    let mut body = b"{\"model\":\"smoke\",\"x\":[[]".to_vec();
    while body.len() + 5 < bytes {
        body.extend_from_slice(b",[]");
    }
    body.extend_from_slice(b"]}");
    body
}

fn deep_blocks() -> Vec<u8> {
    // Each level is a blank deeper than the one before: some 2,000 levels are two megabytes.
    let mut text = String::new();
    for level in 0..2000 {
        text.push_str(&" ".repeat(level));
        text.push_str("x:\n");
    }
    text.into_bytes()
}

fn deep(levels: usize) -> Vec<u8> {
    [r#"{"x":"#.repeat(levels), "1".into(), "}".repeat(levels)].concat().into_bytes()
}

fn deep_managed_fields() -> Vec<u8> {
    let fields = (0..120).fold(json!({}), |inner, _| json!({"f:x": inner}));
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Model", "metadata": {"name": "deep", "managedFields":
        [{"manager": "t", "operation": "Update", "apiVersion": "russet.dev/v1alpha1", "fieldsType": "FieldsV1",
          "time": "2026-01-01T00:00:00Z", "fieldsV1": fields}]},
        "spec": {"source": {"uri": "builtin://smoke"}}})
    .to_string()
    .into_bytes()
}

fn finalizers(object: &str, name: fn(usize) -> String) -> Vec<u8> {
    self::object(object, json!({"metadata": {"finalizers": (0..190_000).map(name).collect::<Vec<_>>()}}))
}

fn long_key() -> Vec<u8> {
    object("long", json!({"x": {"k".repeat(1 << 20): vec![0; 150_000]}}))
}

fn unknown_fields() -> Vec<u8> {
    let fields: serde_json::Map<String, Value> =
        (0..150_000).map(|number| (format!("f{number}"), Value::from(1))).collect();
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Model", "metadata": {"name": "unknown"},
        "spec": {"source": {"uri": "builtin://smoke"}, "more": fields.clone()}, "x": fields.into_iter().take(40_000).collect::<serde_json::Map<_, _>>()})
    .to_string()
    .into_bytes()
}

fn wrong_values() -> Vec<u8> {
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Model", "metadata": {"name": "wrong", "finalizers": vec![json!({}); 150_000]},
        "spec": {"source": {"uri": vec![1; 40_000]}}})
    .to_string()
    .into_bytes()
}

fn inserts() -> Vec<u8> {
    let finalizers = vec!["a/b"; 150_000];
    let mut operations = vec![json!({"op": "add", "path": "/metadata/finalizers", "value": finalizers})];
    operations.extend(vec![json!({"op": "add", "path": "/metadata/finalizers/0", "value": "a/c"}); 9000]);
    Value::from(operations).to_string().into_bytes()
}

fn copies() -> Vec<u8> {
    let mut operations = vec![json!({"op": "add", "path": "/data/x0", "value": "x".repeat(100_000)})];
    for number in 1..1000 {
        operations.push(json!({"op": "copy", "from": "/data", "path": format!("/data/y{number}")}));
    }
    Value::from(operations).to_string().into_bytes()
}

/// A message of protobuf: a field with a length.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![(number << 3) | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        out.push((length as u8) | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend_from_slice(bytes);
    out
}

/// `runtime.Unknown` around an object.
fn unknown(raw: &[u8]) -> Vec<u8> {
    let kind = [field(1, b"v1"), field(2, b"ConfigMap")].concat();
    [b"k8s\0".to_vec(), field(1, &kind), field(2, raw)].concat()
}

/// A ConfigMap of empty entries of `data`: two bytes each.
fn protobuf_entries() -> Vec<u8> {
    let metadata = field(1, &field(1, b"protobuf"));
    let entries: Vec<u8> = field(2, &[]).repeat((BODY - 200) / 2);
    unknown(&[metadata, entries].concat())
}

/// Owner references within each other, as far as lengths allow.
fn deep_protobuf() -> Vec<u8> {
    let mut inner = field(1, b"x");
    while inner.len() < 100_000 {
        inner = field(1, &inner);
    }
    unknown(&inner)
}

fn large_object(number: usize) -> Vec<u8> {
    object("plain", json!({"data": {"x": format!("{number}").repeat(400_000 / format!("{number}").len())}}))
}

/// As many fields as managers may own, of the longest names that fit.
fn entries() -> Vec<u8> {
    let data: serde_json::Map<String, Value> = (0..29_990).map(|n| (format!("{n:090}"), json!(""))).collect();
    object("entries", json!({"data": data}))
}

fn messages() -> Vec<u8> {
    let message = r#"{"role":"user","content":"x"}"#;
    let mut body = format!(r#"{{"model":"smoke","messages":[{message}"#);
    while body.len() + message.len() + 8 < CHAT_BODY {
        body.push(',');
        body.push_str(message);
    }
    body.push_str("]}");
    body.into_bytes()
}

fn prompt(word: &str) -> Vec<u8> {
    let text = word.repeat(15_000_000 / word.len());
    json!({"model": "other/smoke", "messages": [{"role": "user", "content": text}], "max_tokens": 4})
        .to_string()
        .into_bytes()
}
