//! What clients of each dialect get, byte for byte: a file for each kind of answer, with the requests that were sent.
//! `RUSSET_UPDATE_GOLDENS=1` writes the files; read them as the dialect's clients do before you commit them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use russet_gateway::dispatch::DispatchLimits;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{GatewayLab, ScriptStep, finished, limits, started, token};

/// A dialect, and how its requests ask for what a case is about.
struct DialectRequests {
    /// The folder of its files.
    folder: &'static str,
    path: &'static str,
    /// A request that asks for nothing but an answer.
    base: fn() -> Value,
    tools: fn() -> Value,
    thinking: fn() -> Value,
    structured: fn() -> Value,
}

const QUESTION: &str = "What is 17 + 25?";

fn schema() -> Value {
    json!({"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]})
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}})
}

const DIALECTS: [DialectRequests; 4] = [
    DialectRequests {
        folder: "openai_chat",
        path: "/v1/chat/completions",
        base: || json!({"messages": [{"role": "user", "content": QUESTION}]}),
        tools: || {
            let function = json!({"name": "weather", "parameters": parameters()});
            json!({"tools": [{"type": "function", "function": function}]})
        },
        thinking: || json!({"reasoning_effort": "low", "stream_options": {"include_usage": true}}),
        structured: || {
            let format = json!({"name": "answer", "strict": true, "schema": schema()});
            json!({"response_format": {"type": "json_schema", "json_schema": format}})
        },
    },
    DialectRequests {
        folder: "openai_responses",
        path: "/v1/responses",
        base: || json!({"input": QUESTION}),
        tools: || {
            json!({"tools": [
                {"type": "function", "name": "weather", "parameters": parameters()},
                {"type": "custom", "name": "patch"},
            ]})
        },
        thinking: || json!({"reasoning": {"effort": "low", "summary": "auto"}}),
        structured: || {
            let format = json!({"type": "json_schema", "name": "answer", "strict": true, "schema": schema()});
            json!({"text": {"format": format}})
        },
    },
    DialectRequests {
        folder: "anthropic",
        path: "/v1/messages",
        base: || json!({"max_tokens": 64, "messages": [{"role": "user", "content": QUESTION}]}),
        tools: || json!({"tools": [{"name": "weather", "input_schema": parameters()}]}),
        thinking: || json!({"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        structured: || json!({"output_config": {"format": {"type": "json_schema", "schema": schema()}}}),
    },
    DialectRequests {
        folder: "ollama",
        path: "/api/chat",
        base: || json!({"messages": [{"role": "user", "content": QUESTION}]}),
        tools: || {
            let function = json!({"name": "weather", "parameters": parameters()});
            json!({"tools": [{"type": "function", "function": function}]})
        },
        thinking: || json!({"think": true}),
        structured: || json!({"format": schema()}),
    },
];

fn add(delta: Delta) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Token { id: 1, delta })
}

fn thinking(reasoning: &str) -> ScriptStep {
    add(Delta { reasoning: reasoning.into(), ..Delta::default() })
}

fn call(id: &str, name: &str, arguments: &str) -> ScriptStep {
    let call = ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() };
    add(Delta { tool_calls: vec![call], ..Delta::default() })
}

fn fail(kind: FailureKind, message: &str) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message: message.into() }))
}

/// What an engine says of a prompt that is too long.
fn overflow() -> ScriptStep {
    let message = "This model's maximum context length is 64 tokens. However, your messages resulted in 70 tokens. Shorten the conversation; the answer needs room too.";
    fail(FailureKind::ContextLengthExceeded, message)
}

/// How a client takes the answer.
enum Client {
    /// Until its end.
    Reads,
    /// Until this text has come; then it leaves, and the engine's slot is free.
    LeavesAfter(&'static str),
    /// Until its end, and the engine goes on when the answer has begun.
    LetsGo(CancellationToken),
}

/// A request, and the engine that answers it.
struct Exchange {
    fields: Value,
    streamed: bool,
    steps: Vec<ScriptStep>,
    client: Client,
}

fn exchange(fields: Value, streamed: bool, steps: Vec<ScriptStep>) -> Exchange {
    Exchange { fields, streamed, steps, client: Client::Reads }
}

/// The exchanges of each case of a dialect.
fn cases(dialect: &DialectRequests) -> Vec<(&'static str, Vec<Exchange>)> {
    let stop = || finished(FinishReason::Stop);
    let text = |end: FinishReason| vec![started(), token("It is"), token(" 42."), finished(end)];
    let both = |fields: fn() -> Value, steps: Vec<ScriptStep>| {
        [false, true].map(|streamed| exchange(fields(), streamed, steps.clone())).into()
    };
    let nothing: fn() -> Value = || json!({});
    let calls = vec![
        started(),
        token("Let me look."),
        call("c1", "weather", r#"{"city": "Zürich"}"#),
        call("c2", "patch", r#"{"input": "*** x\n"}"#),
        stop(),
    ];
    let thoughts = vec![started(), thinking("17 + 25"), thinking(" is 42."), token("42"), stop()];
    let go = CancellationToken::new();
    let late = Exchange {
        client: Client::LetsGo(go.clone()),
        ..exchange(json!({}), true, vec![started(), ScriptStep::Until(go), overflow()])
    };
    let broken = || fail(FailureKind::Internal, "a rank diverged");
    vec![
        ("plain", vec![exchange(json!({}), false, text(FinishReason::Stop))]),
        ("streamed", vec![exchange(json!({}), true, text(FinishReason::Stop))]),
        ("empty", both(nothing, vec![started(), stop()])),
        ("length", both(nothing, text(FinishReason::Length))),
        ("tools", both(dialect.tools, calls)),
        ("thinking", both(dialect.thinking, thoughts)),
        (
            "structured",
            both(dialect.structured, vec![started(), token("{\"answer\":"), token(" 42}"), stop()]),
        ),
        (
            "error",
            vec![
                exchange(json!({"model": "nix"}), false, vec![]),
                exchange(json!({"stream": "yes"}), false, vec![]),
                exchange(json!({}), false, vec![started(), token("It is"), broken()]),
                exchange(json!({}), true, vec![started(), token("It is"), broken()]),
            ],
        ),
        (
            "cancel",
            vec![Exchange {
                client: Client::LeavesAfter("It is"),
                ..exchange(json!({}), true, vec![started(), token("It is"), ScriptStep::Hang])
            }],
        ),
        (
            "overflow",
            vec![
                exchange(json!({}), false, vec![overflow()]),
                exchange(json!({}), true, vec![overflow()]),
                late,
            ],
        ),
    ]
}

/// Headers that clients read.
const HEADERS: [&str; 9] = [
    "content-type",
    "cache-control",
    "x-accel-buffering",
    "request-id",
    "x-request-id",
    "x-russet-ignored-parameters",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
];

/// Sends the request of an exchange, and writes what is sent and what comes.
async fn converse(dialect: &DialectRequests, exchange: Exchange) -> String {
    let Exchange { fields, streamed, steps, client } = exchange;
    let mut limits = limits();
    if matches!(client, Client::LetsGo(_)) {
        // The headers are sent before the engine begins.
        limits = DispatchLimits { headers_timeout: Duration::from_millis(1), ..limits };
    }
    let lab = GatewayLab::start(limits).await;
    let engine = lab.only_engine(steps);
    let mut body = json!({"model": "m"});
    for more in [(dialect.base)(), json!({"stream": streamed}), fields] {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    }
    let request = lab.client.post(lab.url(dialect.path)).json(&body).header("x-request-id", "req_golden");
    let mut response = request.send().await.unwrap();
    let mut written = format!("POST {}\n\n{body}\n\n{}\n", dialect.path, response.status().as_u16());
    for name in HEADERS {
        if let Some(value) = response.headers().get(name) {
            writeln!(written, "{name}: {}", value.to_str().unwrap()).unwrap();
        }
    }
    written.push('\n');
    if let Client::LetsGo(go) = &client {
        go.cancel();
    }
    let mut answer = Vec::new();
    let mut is_left = false;
    while !is_left && let Some(part) = response.chunk().await.unwrap() {
        answer.extend_from_slice(&part);
        let has = |marker: &str| answer.windows(marker.len()).any(|window| window == marker.as_bytes());
        is_left = matches!(client, Client::LeavesAfter(marker) if has(marker) && answer.ends_with(b"\n"));
    }
    written.push_str(&normalized(std::str::from_utf8(&answer).unwrap()));
    written.push('\n');
    if is_left {
        drop(response);
        engine.running(0).await;
        written.push_str("(the client leaves; the engine's slot is free)\n");
    }
    written
}

/// The text with ids and times replaced, each of which is checked.
fn normalized(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let hex = rest.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(rest.len());
        if hex == 24 && !out.ends_with(|c: char| c.is_ascii_alphanumeric()) {
            out.push_str("ID");
            rest = &rest[hex..];
        } else if let Some(value) = TIMES.iter().find_map(|key| rest.strip_prefix(key)) {
            out.push_str(&rest[..rest.len() - value.len()]);
            let (shown, after) = time(value);
            out.push_str(shown);
            rest = after;
        } else {
            // A run of hexadecimal digits is looked at once.
            let length = hex.max(first.len_utf8());
            out.push_str(&rest[..length]);
            rest = &rest[length..];
        }
    }
    out
}

/// Fields with a time or a duration.
const TIMES: [&str; 7] = [
    "\"created\":",
    "\"created_at\":",
    "\"completed_at\":",
    "\"total_duration\":",
    "\"prompt_eval_duration\":",
    "\"eval_duration\":",
    "\"load_duration\":",
];

/// What stands for the time at the beginning of this text, and the text behind it.
fn time(text: &str) -> (&'static str, &str) {
    if let Some(date) = text.strip_prefix('"') {
        let (date, after) = date.split_once('"').unwrap();
        date.parse::<jiff::Timestamp>().unwrap();
        return ("\"TIME\"", after);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap();
    (if digits == 0 { "" } else { "0" }, &text[digits..])
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/transcripts")
}

#[tokio::test]
async fn answers_of_every_dialect_are_those_of_the_transcripts() {
    let is_update = std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some();
    let mut wrong = Vec::new();
    let mut files = BTreeSet::new();
    for dialect in &DIALECTS {
        for (case, exchanges) in cases(dialect) {
            let mut written = Vec::new();
            for exchange in exchanges {
                written.push(converse(dialect, exchange).await);
            }
            let found = written.join("\n----\n\n");
            let path = folder().join(dialect.folder).join(format!("{case}.txt"));
            if is_update {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, &found).unwrap();
            }
            let expected = std::fs::read_to_string(&path).unwrap_or_default();
            if found != expected {
                wrong.push(format!("{}: expected\n{expected}\nfound\n{found}", path.display()));
            }
            files.insert(path);
        }
    }
    assert!(wrong.is_empty(), "{}\nif this is meant, run with RUSSET_UPDATE_GOLDENS=1", wrong.join("\n"));
    let list = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let all: BTreeSet<PathBuf> = list(&folder()).flat_map(|folder| list(&folder)).collect();
    assert_eq!(all, files, "no file is of a case that is no more");
}
