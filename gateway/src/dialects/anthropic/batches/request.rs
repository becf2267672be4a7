//! The body of `POST /v1/messages/batches`: its requests become lines of a file. What the route of a request refuses is not
//! here: it is the result of that request.

use std::borrow::Cow;
use std::collections::HashSet;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{ENDPOINT, MAX_REQUESTS};
use crate::batches::{LineSplitter, MAX_LINE_BYTES};
use crate::error::{ErrorKind, GatewayError};
use crate::response_store::FilePart;

/// Longest `custom_id`; Anthropic's number.
const MAX_CUSTOM_ID_CHARS: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchFields<'a> {
    #[serde(borrow)]
    requests: Requests<'a>,
}

/// At most so many requests: what is not there takes no memory.
struct Requests<'a>(Vec<RequestFields<'a>>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestFields<'a> {
    #[serde(borrow)]
    custom_id: Cow<'a, str>,
    #[serde(borrow)]
    params: &'a RawValue,
}

/// What of a request a batch cannot serve.
#[derive(Deserialize)]
struct Params {
    #[serde(default)]
    stream: Value,
}

impl<'de: 'a, 'a> Deserialize<'de> for Requests<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<'a>(std::marker::PhantomData<&'a ()>);

        impl<'de: 'a, 'a> serde::de::Visitor<'de> for Visitor<'a> {
            type Value = Requests<'a>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a list of requests")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut requests = Vec::new();
                while let Some(request) = list.next_element()? {
                    if requests.len() as u64 >= MAX_REQUESTS {
                        let message = format!("`requests` has more than {MAX_REQUESTS} requests");
                        return Err(serde::de::Error::custom(message));
                    }
                    requests.push(request);
                }
                Ok(Requests(requests))
            }
        }

        deserializer.deserialize_seq(Visitor(std::marker::PhantomData))
    }
}

/// The requests as lines of a file, and how many there are.
pub(super) fn parse(body: &[u8]) -> Result<(Vec<FilePart>, u64), GatewayError> {
    let fields: BatchFields<'_> = serde_json::from_slice(body).map_err(|error| {
        let what = if error.is_data() { "has another form" } else { "is not JSON" };
        let message = format!(
            "the body {what}: {error}; it has `requests`, each of which has `custom_id` and `params`"
        );
        GatewayError::new(ErrorKind::InvalidRequest, message)
    })?;
    let Requests(requests) = fields.requests;
    if requests.is_empty() {
        return Err(GatewayError::field("requests", "`requests` must have at least one request"));
    }
    let mut ids = HashSet::new();
    let (mut splitter, mut parts) = (LineSplitter::default(), Vec::new());
    for (index, RequestFields { custom_id, params }) in requests.iter().enumerate() {
        let invalid = |field: &str, message: &str| {
            let field = format!("requests.{index}.{field}");
            GatewayError::field(field.clone(), format!("{field}: {message}"))
        };
        let is_of_id = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if custom_id.is_empty() || custom_id.len() > MAX_CUSTOM_ID_CHARS || !custom_id.bytes().all(is_of_id) {
            let message = format!("it must have 1 to {MAX_CUSTOM_ID_CHARS} letters, digits, `-` and `_`");
            return Err(invalid("custom_id", &message));
        }
        if !ids.insert(custom_id.as_ref()) {
            return Err(invalid("custom_id", "an earlier request has it too"));
        }
        match serde_json::from_str::<Params>(params.get()) {
            // A list has fields too, for serde.
            _ if !params.get().starts_with('{') => return Err(invalid("params", "it must be an object")),
            Err(_) => return Err(invalid("params", "it must be an object")),
            Ok(Params { stream: Value::Bool(true) }) => {
                return Err(invalid(
                    "params.stream",
                    "it must be false or left out: a batch has whole messages",
                ));
            }
            Ok(_) => {}
        }
        // In JSON line breaks stand between values alone.
        let params = params.get().replace(['\n', '\r'], " ");
        let head = json!({"custom_id": custom_id, "method": "POST", "url": ENDPOINT}).to_string();
        let line = format!("{},\"body\":{params}}}\n", head.strip_suffix('}').unwrap_or_default());
        let part = splitter.push(line.as_bytes());
        let long = |_| invalid("params", &format!("it is longer than {} MiB", MAX_LINE_BYTES >> 20));
        parts.extend(part.map_err(long)?);
    }
    parts.extend(splitter.finish());
    Ok((parts, requests.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_become_lines() {
        let body = br#"{"requests": [
            {"custom_id": "a-1", "params": {"model": "m",
                "z": "x\ny"}},
            {"params": {}, "custom_id": "B_2"}
        ]}"#;
        let (parts, total) = parse(body).unwrap();
        assert_eq!((parts.len(), total, parts[0].first), (1, 2, 0));
        let text = std::str::from_utf8(&parts[0].text).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let line = |id: &str, body: Value| json!({"custom_id": id, "method": "POST", "url": "/v1/messages", "body": body});
        assert_eq!(lines, [line("a-1", json!({"model": "m", "z": "x\ny"})), line("B_2", json!({}))]);
    }

    #[test]
    fn a_request_is_refused_by_its_number_and_field() {
        let request = |id: &str, params: Value| json!({"custom_id": id, "params": params});
        for (second, field) in [
            (request("", json!({})), Some("requests.1.custom_id")),
            (request("a b", json!({})), Some("requests.1.custom_id")),
            (request(&"i".repeat(65), json!({})), Some("requests.1.custom_id")),
            (request("a", json!({})), Some("requests.1.custom_id")),
            (request("b", json!([])), Some("requests.1.params")),
            (request("b", json!({"stream": true})), Some("requests.1.params.stream")),
            (json!({"custom_id": "b"}), None),
            (json!({"custom_id": "b", "params": {}, "x": 1}), None),
            (json!({"custom_id": 7, "params": {}}), None),
        ] {
            let body = json!({"requests": [request("a", json!({"stream": false})), second]}).to_string();
            let error = parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::InvalidRequest, field), "{body}");
        }
        for body in
            ["", "{", "[]", "{}", r#"{"requests": []}"#, r#"{"requests": 7}"#, r#"{"requests": [], "x": 1}"#]
        {
            assert_eq!(parse(body.as_bytes()).unwrap_err().kind, ErrorKind::InvalidRequest, "{body}");
        }
    }

    #[test]
    fn no_more_requests_are_decoded_than_there_may_be() {
        let request = |id: u64| format!(r#"{{"custom_id":"{id}","params":{{}}}}"#);
        let body = |count: u64| {
            let requests: Vec<String> = (0..count).map(request).collect();
            format!(r#"{{"requests":[{}]}}"#, requests.join(","))
        };
        assert_eq!(parse(body(MAX_REQUESTS).as_bytes()).unwrap().1, MAX_REQUESTS);
        let error = parse(body(MAX_REQUESTS + 1).as_bytes()).unwrap_err();
        assert!(error.message.contains("more than 100000"), "{error}");
    }
}
