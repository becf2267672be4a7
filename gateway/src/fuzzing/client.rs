//! How a client reads responses, for [`super::exchange`]. Every function panics where the bytes are not what the dialect
//! says.

use std::collections::BTreeMap;

use serde_json::Value;

/// A client of one kind of request.
pub(crate) trait Client {
    /// Checks the body of an error.
    fn check_error(&self, body: &Value);
    /// Reads a whole response.
    fn whole(&self, body: &Value) -> Answer;
    /// Reads a stream from its first byte to its last.
    fn stream(&self, bytes: &[u8]) -> ReadStream;
}

/// What a client has of a response.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// The text of each choice.
    pub(crate) texts: BTreeMap<u64, String>,
    /// Calls of tools.
    pub(crate) calls: usize,
}

impl Answer {
    /// Adds to the text of a choice; a value that is no text adds none.
    pub(crate) fn add(&mut self, choice: u64, text: &Value) {
        self.texts.entry(choice).or_default().push_str(text.as_str().unwrap_or_default());
    }
}

/// How a stream ended.
#[derive(Debug, PartialEq)]
pub(crate) enum ReadStream {
    /// It is complete.
    Complete(Answer),
    /// Its last event is an error.
    Failed,
}

/// The items of a list; none where it is null.
pub(crate) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The index that a value has.
pub(crate) fn index(value: &Value) -> u64 {
    value["index"].as_u64().unwrap_or_else(|| panic!("no index: {value}"))
}

/// The JSON value that this text is.
pub(crate) fn json(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

/// The names, if they have one, and data of server-sent events, without comments.
pub(crate) fn events(stream: &[u8]) -> Vec<(Option<&str>, &str)> {
    let stream = std::str::from_utf8(stream).expect("streams are UTF-8");
    assert!(!stream.contains('\r'), "clients take it for the end of a line: {stream:?}");
    assert!(stream.ends_with("\n\n"), "an event is cut off: {stream:?}");
    let events = stream.split_terminator("\n\n").filter(|event| !event.starts_with(':'));
    events
        .map(|event| {
            let (name, rest) = match event.strip_prefix("event: ").and_then(|rest| rest.split_once('\n')) {
                Some((name, rest)) => (Some(name), rest),
                None => (None, event),
            };
            let data = rest.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event:?}"));
            assert!(!data.contains('\n'), "{event:?}");
            (name, data)
        })
        .collect()
}

/// The events of a stream in which each is named by its type.
pub(crate) fn typed_events(stream: &[u8]) -> Vec<(&str, Value)> {
    events(stream)
        .into_iter()
        .map(|(name, data)| {
            let name = name.unwrap_or_else(|| panic!("clients skip an event without a name: {data}"));
            let data = json(data.as_bytes());
            assert_eq!(data["type"], name);
            (name, data)
        })
        .collect()
}
