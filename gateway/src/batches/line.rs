//! A line of a batch's input: a request for one path, and what is wrong with it before it runs. What the route itself refuses
//! is not here.

use std::borrow::Cow;
use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use twox_hash::XxHash3_64;

use crate::error::shown;

/// Longest `custom_id`.
const MAX_CUSTOM_ID_BYTES: usize = 512;
/// Invalid lines that are named.
const MAX_LINE_ERRORS: usize = 100;

/// Why a line is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LineError {
    pub(crate) code: String,
    /// The number of the line, from 1 on; none where it is about the whole file.
    pub(crate) line: Option<u64>,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
}

/// A request.
#[derive(Debug, Deserialize)]
pub(super) struct LineRequest<'a> {
    #[serde(borrow)]
    pub(super) custom_id: Cow<'a, str>,
    #[serde(borrow)]
    method: Cow<'a, str>,
    #[serde(borrow)]
    url: Cow<'a, str>,
    #[serde(borrow)]
    pub(super) body: &'a RawValue,
}

/// What of a body a batch cannot serve.
#[derive(Deserialize)]
struct BodyFields {
    #[serde(default)]
    stream: Value,
    #[serde(default)]
    background: Value,
}

/// The request of a line, which was checked.
pub(super) fn parse(line: &[u8]) -> serde_json::Result<LineRequest<'_>> {
    serde_json::from_slice(line)
}

/// Checks the lines of a file one after the other.
pub(super) struct LineChecker {
    /// The path of all requests.
    endpoint: String,
    max_lines: u64,
    pub(super) total: u64,
    pub(super) errors: Vec<LineError>,
    /// Hashes of the ids: the ids themselves may take much more.
    ids: HashSet<u64>,
}

impl LineChecker {
    pub(super) fn new(endpoint: &str, max_lines: u64) -> Self {
        let (errors, ids) = (Vec::new(), HashSet::new());
        Self { endpoint: endpoint.to_owned(), max_lines, total: 0, errors, ids }
    }

    /// Whether more of the file would say nothing new.
    pub(super) fn is_full(&self) -> bool {
        self.errors.len() >= MAX_LINE_ERRORS || self.total > self.max_lines
    }

    /// Checks the line with this number, from 0 on.
    pub(super) fn check(&mut self, number: u64, line: &[u8]) {
        self.total += 1;
        if self.total > self.max_lines {
            let message = format!("the file has more than {} requests; split it", self.max_lines);
            self.errors.push(LineError {
                code: "too_many_requests".into(),
                line: None,
                message,
                param: None,
            });
        } else if let Err((code, param, message)) = self.find_error(line) {
            let (line, param) = (Some(number + 1), param.map(str::to_owned));
            self.errors.push(LineError { code: code.to_owned(), line, message, param });
        }
    }

    /// All lines were checked.
    pub(super) fn finish(&mut self) {
        if self.total == 0 {
            let message = "the file has no requests".to_owned();
            self.errors.push(LineError { code: "empty_file".into(), line: None, message, param: None });
        }
    }

    fn find_error(&mut self, line: &[u8]) -> Result<(), (&'static str, Option<&'static str>, String)> {
        const INVALID: &str = "invalid_json_line";
        if std::str::from_utf8(line).is_err() {
            return Err((INVALID, None, "the line is not UTF-8".to_owned()));
        }
        let request = parse(line).map_err(|error| {
            if !error.is_data() {
                return (INVALID, None, format!("the line is not JSON: {error}"));
            }
            let fields = "a line is an object with `custom_id`, `method`, `url` and `body`";
            ("invalid_request", None, format!("{error}; {fields}"))
        })?;
        let LineRequest { custom_id, method, url, body } = &request;
        let length = custom_id.len();
        if length == 0 || length > MAX_CUSTOM_ID_BYTES {
            let message = format!("`custom_id` has {length} bytes, not 1 to {MAX_CUSTOM_ID_BYTES}");
            return Err(("invalid_custom_id", Some("custom_id"), message));
        }
        if !self.ids.insert(XxHash3_64::oneshot(custom_id.as_bytes())) {
            let message = format!("`custom_id` {} is that of an earlier line too", shown(custom_id));
            return Err(("duplicate_custom_id", Some("custom_id"), message));
        }
        if method != "POST" {
            let message = format!("`method` must be POST, not {}", shown(method));
            return Err(("invalid_method", Some("method"), message));
        }
        if *url != self.endpoint {
            let message =
                format!("`url` must be the batch's endpoint, {}, not {}", self.endpoint, shown(url));
            return Err(("invalid_url", Some("url"), message));
        }
        let fields = serde_json::from_str(body.get()).ok();
        // A list has fields too, for serde.
        let fields = fields.filter(|_: &BodyFields| body.get().starts_with('{'));
        let Some(BodyFields { stream, background }) = fields else {
            return Err(("invalid_body", Some("body"), "`body` must be an object".to_owned()));
        };
        for (field, value) in [("body.stream", stream), ("body.background", background)] {
            if value == Value::Bool(true) {
                let message = format!("`{field}` must be false or left out: a batch has whole responses");
                return Err(("invalid_body", Some(field), message));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lines: &[&[u8]]) -> Vec<(Option<u64>, String, Option<String>)> {
        let mut checker = LineChecker::new("/v1/embeddings", 5);
        for (number, line) in (0..).zip(lines) {
            if checker.is_full() {
                break;
            }
            checker.check(number, line);
        }
        checker.finish();
        checker.errors.into_iter().map(|error| (error.line, error.code, error.param)).collect()
    }

    fn line(id: &str, method: &str, url: &str, body: &str) -> Vec<u8> {
        format!(r#"{{"custom_id":"{id}","method":"{method}","url":"{url}","body":{body}}}"#).into_bytes()
    }

    #[test]
    fn an_invalid_line_is_named_with_its_field() {
        let url = "/v1/embeddings";
        for (bad, code, param) in [
            (b"{".to_vec(), "invalid_json_line", None),
            (b"\"\xff\"".to_vec(), "invalid_json_line", None),
            (line("a", "POST", url, "\"\u{1}\""), "invalid_json_line", None),
            (b"[]".to_vec(), "invalid_request", None),
            (b"{}".to_vec(), "invalid_request", None),
            (
                br#"{"custom_id":7,"method":"POST","url":"/v1/embeddings","body":{}}"#.to_vec(),
                "invalid_request",
                None,
            ),
            (line("", "POST", url, "{}"), "invalid_custom_id", Some("custom_id")),
            (line(&"i".repeat(513), "POST", url, "{}"), "invalid_custom_id", Some("custom_id")),
            (line("good", "POST", url, "{}"), "duplicate_custom_id", Some("custom_id")),
            (line("a", "GET", url, "{}"), "invalid_method", Some("method")),
            (line("a", "POST", "/v1/messages", "{}"), "invalid_url", Some("url")),
            (line("a", "POST", url, "7"), "invalid_body", Some("body")),
            (line("a", "POST", url, "[]"), "invalid_body", Some("body")),
            (line("a", "POST", url, r#"{"stream":true}"#), "invalid_body", Some("body.stream")),
            (line("a", "POST", url, r#"{"background":true}"#), "invalid_body", Some("body.background")),
        ] {
            let good = line("good", "POST", url, r#"{"stream":false}"#);
            let expected = vec![(Some(2), code.to_owned(), param.map(str::to_owned))];
            assert_eq!(check(&[&good, &bad]), expected, "{}", String::from_utf8_lossy(&bad));
        }
        let escaped = line(r"\u00fc\n", "POST", url, r#"{"stream":null}"#);
        assert_eq!(check(&[&escaped]), []);
    }

    #[test]
    fn a_file_has_some_requests_and_not_too_many() {
        assert_eq!(check(&[]), [(None, "empty_file".to_owned(), None)]);
        let lines: Vec<Vec<u8>> =
            (0..9).map(|id| line(&id.to_string(), "POST", "/v1/embeddings", "{}")).collect();
        let lines: Vec<&[u8]> = lines.iter().map(Vec::as_slice).collect();
        assert_eq!(check(&lines[..5]), []);
        assert_eq!(check(&lines), [(None, "too_many_requests".to_owned(), None)]);
    }

    #[test]
    fn errors_and_what_they_repeat_are_bounded() {
        let mut checker = LineChecker::new("/v1/embeddings", 1000);
        let long = line("a", &"m".repeat(10_000), "/v1/embeddings", "{}");
        for number in 0..1000 {
            if !checker.is_full() {
                checker.check(number, &long);
            }
        }
        assert_eq!(checker.errors.len(), MAX_LINE_ERRORS);
        assert!(checker.errors.iter().all(|error| error.message.len() < 200));
    }
}
