//! Bodies that no client should send, to every path with a body: each is refused in the dialect's own form, reaches no
//! engine, and the gateway answers the next request. Not here: clients that misbehave on the wire, see `bad_clients`.

use std::collections::BTreeSet;

use futures::StreamExt as _;
use serde_json::Value;

use crate::body_paths::{BodyPath, ErrorForm, PATHS};
use crate::harness::{GatewayLab, hello, limits};

/// Sends what a check says to every path. No engine receives a request of it, and then each path answers.
async fn every_path_refuses(check: impl AsyncFn(&GatewayLab, &BodyPath)) {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for path in &PATHS {
        check(&lab, path).await;
        assert_eq!(engine.requests(), 0, "{}", path.path);
    }
    for path in &PATHS {
        let (status, message, _) = path.send(&lab, path.body).await;
        assert_eq!(status, 200, "{}: {message}", path.path);
    }
}

#[tokio::test]
async fn malformed_json_is_refused_at_every_depth() {
    every_path_refuses(async |lab, path| {
        for end in 0..path.body.len() {
            path.refuses(lab, &path.body[..end], "not JSON").await;
        }
        for depth in [1, 2, 8, 62] {
            for (open, close) in [("[", "}"), (r#"{"a":"#, "]"), ("[", "]]"), (r#"{"a":"#, ""), ("[,", "]")] {
                let nested = format!("\"x\":{}{}", open.repeat(depth), close.repeat(depth));
                path.refuses(lab, path.with(&nested), "not JSON").await;
            }
        }
        for depth in [64, 65, 1000, 1_000_000] {
            for open in ["[", r#"{"a":"#] {
                path.refuses(lab, path.with(&format!("\"x\":{}", open.repeat(depth))), "64 levels").await;
            }
        }
        for (before, after) in [("", "}"), ("", " {}"), ("x", ""), ("", "\u{0}"), ("[", "]x"), ("//\n", "")] {
            path.refuses(lab, format!("{before}{}{after}", path.body), "not JSON").await;
        }
        for field in [
            r#""x":NaN"#,
            r#""x":Infinity"#,
            r#""x":01"#,
            r#""x":+1"#,
            r#""x":1."#,
            r#""x":.5"#,
            r#""x":0x1"#,
            r#""x":tru"#,
            r#""x":'a'"#,
            r#"x:1"#,
            r#""x":"\x""#,
            r#""x":"\u12""#,
            r#""x":1,"#,
            "\"x\":\"a\nb\"",
            "\"x\":\"a\u{0}b\"",
            "\"x\":\"a\u{1f}b\"",
            r#""x" 1"#,
            r#"1:1"#,
        ] {
            path.refuses(lab, path.with(field), "not JSON").await;
        }
        for body in ["[]", "\"hi\"", "7", "true", "null", "[{}]"] {
            path.refuses(lab, body, "must be a JSON object").await;
        }
    })
    .await;
}

#[tokio::test]
async fn bytes_that_are_no_utf8_are_refused_anywhere() {
    const INVALID: [&[u8]; 7] = [
        b"\xff",
        b"\x80",
        b"\xc0\xaf",
        b"\xe2\x82",
        // Half of a character outside the basic plane, beyond the last character, and a surrogate pair of CESU-8.
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xed\xa0\xbd\xed\xb8\x80",
    ];
    every_path_refuses(async |lab, path| {
        for bytes in INVALID {
            let joined = |before: &str, after: &str| [before.as_bytes(), bytes, after.as_bytes()].concat();
            let (before, after) = path.body.split_once("hi").unwrap();
            for body in [
                joined(before, after),
                joined(&path.body.replace(['}', ']'], ""), ""),
                joined("{\"", &path.body[2..]),
                joined(&path.body[..path.body.len() - 1], "}"),
                joined(&format!("{} ", path.body), ""),
            ] {
                path.refuses(lab, body, "not JSON").await;
            }
        }
    })
    .await;
}

/// The fields in the tables of docs/gateway.md that are honoured or refused, by the folder of the dialect that has them.
fn documented_fields(folder: &str) -> Vec<String> {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gateway.md");
    let page = std::fs::read_to_string(page).unwrap();
    let begin = format!("<!-- fields of gateway/src/dialects/{folder}/fields.rs;");
    let (_, rest) = page.split_once(&begin).unwrap();
    let (tables, _) = rest.split_once("<!-- end of the fields -->").unwrap();
    let rows = tables.lines().filter(|line| !line.contains("no effect, listed:"));
    let rows = rows.filter_map(|line| line.strip_prefix("| `")?.split_once(" |"));
    let names = rows.flat_map(|(names, _)| names.split(", ").map(|name| name.trim_matches('`').to_owned()));
    names.collect::<BTreeSet<String>>().into_iter().collect()
}

/// What a field may have that no dialect means by it.
fn wrong_values() -> Vec<String> {
    let long = "x".repeat(5000);
    let (text, key) = (format!("\"{long}\""), format!(r#"{{"{long}":1}}"#));
    let short = [
        "true",
        "-1.5",
        "1e300",
        "99999999999999999999",
        r#""""#,
        r#""no such word""#,
        "[]",
        "[null]",
        "[[7]]",
        "{}",
        r#"{"a":{}}"#,
    ];
    short.map(str::to_owned).into_iter().chain([format!("[{text}]"), format!("[{key}]"), text, key]).collect()
}

#[tokio::test]
async fn values_of_wrong_types_are_refused_by_the_fields_name() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let mut requests = Vec::new();
    let wrong = wrong_values();
    for path in &PATHS {
        let fields = documented_fields(path.fields);
        assert!(fields.len() >= 15, "{}: {fields:?}", path.fields);
        for field in fields {
            // The last of two values counts.
            // What is accepted asks for a model that is not there, and costs no engine anything.
            let with = |value: &String| {
                let body = path.with(&format!("\"{field}\":{value}"));
                (path, field.clone(), body.replacen(r#""model":"m""#, r#""model":"nix""#, 1))
            };
            requests.extend(wrong.iter().map(with));
        }
    }
    let lab = &lab;
    let sent = requests.into_iter().map(|(path, field, body)| async move {
        let (status, message, param) = path.send(lab, body.clone()).await;
        match status {
            404 => {}
            400 => {
                // Fields that exclude each other, or need another one, name that one beside them.
                assert!(message.contains(&field), "{} {body}: {message}", path.path);
                assert_eq!(
                    param.is_some(),
                    path.form == ErrorForm::OpenAi,
                    "{} {body}: {message}",
                    path.path
                );
            }
            _ => panic!("{} {body}: {status} {message}", path.path),
        }
        status
    });
    let statuses: Vec<u16> = futures::stream::iter(sent).buffer_unordered(8).collect().await;
    let count = |status: u16| statuses.iter().filter(|one| **one == status).count();
    println!("{} requests: {} accepted, {} refused", statuses.len(), count(404), count(400));
    assert!(count(400) > statuses.len() / 4 && count(404) > 0);
    for path in &PATHS {
        assert_eq!(path.send(lab, path.body).await.0, 200, "{}", path.path);
    }
}

#[tokio::test]
async fn the_last_of_two_values_of_a_field_counts() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for path in &PATHS {
        let twice = |first: &str, last: &str| {
            path.body.replacen(r#""model":"m""#, &format!(r#""model":{first},"model":{last}"#), 1)
        };
        for (first, last, status) in [
            (r#""nix""#, r#""m""#, 200),
            ("7", r#""m""#, 200),
            (r#""m""#, r#""nix""#, 404),
            (r#""m""#, "7", 400),
            (r#""m""#, "null", 400),
            (r#""m""#, r#"{"m":"m","m":"m"}"#, 400),
        ] {
            let (found, message, _) = path.send(&lab, twice(first, last)).await;
            assert_eq!(found, status, "{} {first} {last}: {message}", path.path);
        }
        // Schemas are read again from the text of the body.
        for field in ["tools", "format", "text", "response_format", "output_config", "guided_json"] {
            let (status, message, _) =
                path.send(&lab, path.with(&format!(r#""{field}":7,"{field}":null"#))).await;
            assert_eq!(status, 200, "{} {field}: {message}", path.path);
        }
    }
    assert!(engine.requests() > 0);
}

#[tokio::test]
async fn numbers_of_any_size_break_nothing() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let (long, tiny) = ("9".repeat(100_000), format!("0.{}1", "0".repeat(100_000)));
    for path in &PATHS {
        for (number, is_json) in [
            ("1e400", false),
            ("-1e400", false),
            (long.as_str(), false),
            ("1e-400", true),
            ("-0", true),
            ("-0.0", true),
            ("18446744073709551616", true),
            ("-9223372036854775809", true),
            ("1E+2", true),
            (tiny.as_str(), true),
            ("1e99999999999999999999", false),
            ("0e99999999999999999999", true),
        ] {
            let shown = &number[..number.len().min(40)];
            let (status, message, _) = path.send(&lab, path.with(&format!("\"x\":{number}"))).await;
            assert_eq!(status, if is_json { 200 } else { 400 }, "{} {shown}: {message}", path.path);
            for field in ["seed", "max_tokens", "top_k", "temperature", "dimensions"] {
                let (status, message, _) = path.send(&lab, path.with(&format!("\"{field}\":{number}"))).await;
                let is_expected = status == 400 || (status == 200 && is_json);
                assert!(is_expected, "{} {field} {shown}: {status} {message}", path.path);
                assert!(message.len() < 300, "{message}");
            }
        }
    }
    assert!(engine.requests() > 0);
}

#[tokio::test]
async fn hostile_names_of_models_are_unknown_models() {
    let (long, longest) = ("x".repeat(1024), "\u{1}".repeat(1_000_000));
    let names = [
        ("a\nb\r\nset-cookie: x\r\n\r\n<html>", 404),
        ("../../etc/passwd", 404),
        ("%2e%2e%2f%00", 404),
        ("m%00", 404),
        ("m\0", 404),
        ("\0", 404),
        ("default/m/x", 404),
        ("default/", 404),
        ("/", 404),
        ("//m", 404),
        ("m:", 404),
        (":", 404),
        ("m:latest:latest", 404),
        ("m ", 404),
        ("M", 404),
        ("*", 404),
        // A mark that turns the direction of text round, a wide space, half of a pair, the last character.
        ("m\u{202e}gpj.", 404),
        ("m\u{3000}", 404),
        ("m\u{fffd}", 404),
        ("\u{10ffff}", 404),
        ("${jndi:ldap://x}", 404),
        ("{{7*7}}", 404),
        ("m`; drop", 404),
        (long.as_str(), 404),
        (&"x".repeat(10_000), 400),
        (longest.as_str(), 400),
        ("", 400),
    ]
    .map(|(name, status)| (name.to_owned(), status));
    every_path_refuses(async |lab, path| {
        for (name, status) in &names {
            let body = path.body.replacen("\"m\"", &Value::from(name.as_str()).to_string(), 1);
            let shown: String = name.chars().take(40).collect();
            let (found, message, param) = path.send(lab, body).await;
            assert_eq!(found, *status, "{} {shown:?}: {message}", path.path);
            assert!(message.contains("model") && message.len() < 1500, "{} {shown:?}: {message}", path.path);
            assert!(path.form != ErrorForm::OpenAi || param.as_deref() == Some("model"), "{shown:?}");
        }
        let metrics = lab.metrics().await;
        assert!(!metrics.contains("passwd") && !metrics.contains("jndi"), "names of clients are no labels");
    })
    .await;
}

#[tokio::test]
async fn hostile_paths_of_models_are_unknown_models() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let long = "x".repeat(10_000);
    for name in [
        "..%2f..%2fetc%2fpasswd",
        "%0a%0dset-cookie:%20x",
        "%00",
        "m%00",
        "%e2%80%aem",
        "a/b/c/d/e",
        "m%2f",
        "*",
        long.as_str(),
    ] {
        for (header, form) in [("accept", ErrorForm::OpenAi), ("anthropic-version", ErrorForm::Anthropic)] {
            let request = lab.client.get(lab.url(&format!("/v1/models/{name}"))).header(header, "x");
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 404, "{name}");
            form.read(&response.bytes().await.unwrap());
        }
    }
    for (path, form) in [
        ("/v1/messages/%ff%00", ErrorForm::Anthropic),
        ("/api/%0a", ErrorForm::Ollama),
        ("/v1/%2e%2e/%2e%2e/metrics", ErrorForm::OpenAi),
        ("//v1/chat/completions", ErrorForm::OpenAi),
        ("/v1/models/%ff", ErrorForm::OpenAi),
    ] {
        let response = lab.client.post(lab.url(path)).send().await.unwrap();
        let status = response.status().as_u16();
        assert!([404, 405].contains(&status), "{path}: {status}");
        form.read(&response.bytes().await.unwrap());
    }
    let listed = lab.client.get(lab.url("/v1/models/m")).send().await.unwrap();
    assert_eq!(listed.status(), 200);
}
