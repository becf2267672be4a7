//! The events of a streamed response, numbered from 0. Each is named by its type, which says what it has.

use serde::Serialize;

use super::output::{Change, Item, ItemContent};
use super::response::{ItemBody, PartBody, logprobs_body};
use crate::dialects::sse::named_event;
use crate::dialects::token_logprobs::TokenBody;

/// An event about the response itself.
#[derive(Serialize)]
struct ResponseEvent<'a, R> {
    r#type: &'static str,
    sequence_number: u64,
    response: &'a R,
}

/// What an event about an item has, besides its type and number.
#[derive(Serialize)]
#[serde(untagged)]
enum EventBody<'a> {
    Item {
        output_index: usize,
        item: ItemBody<'a>,
    },
    /// Something within an item.
    Within {
        output_index: usize,
        item_id: &'a str,
        #[serde(flatten)]
        part_index: PartIndex,
        #[serde(flatten)]
        content: Content<'a>,
    },
}

/// Which part of the item; calls have none.
#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
enum PartIndex {
    Summary { summary_index: usize },
    Text { content_index: usize },
    Call {},
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Part(PartBody<'a>),
    Delta(&'a str),
    /// The whole of it.
    Text(&'a str),
    Arguments(&'a str),
    Input(&'a str),
}

#[derive(Serialize)]
struct Event<'a> {
    r#type: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    body: EventBody<'a>,
    /// Of texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenBody>>,
}

/// The names of the events within an item.
struct EventNames {
    part_added: Option<&'static str>,
    delta: &'static str,
    done: &'static str,
    part_done: Option<&'static str>,
}

impl EventNames {
    fn of(content: &ItemContent) -> (Self, PartIndex) {
        match content {
            ItemContent::Reasoning { .. } => (
                Self {
                    part_added: Some("response.reasoning_summary_part.added"),
                    delta: "response.reasoning_summary_text.delta",
                    done: "response.reasoning_summary_text.done",
                    part_done: Some("response.reasoning_summary_part.done"),
                },
                PartIndex::Summary { summary_index: 0 },
            ),
            ItemContent::Message { .. } => (
                Self {
                    part_added: Some("response.content_part.added"),
                    delta: "response.output_text.delta",
                    done: "response.output_text.done",
                    part_done: Some("response.content_part.done"),
                },
                PartIndex::Text { content_index: 0 },
            ),
            ItemContent::FunctionCall { .. } => (
                Self {
                    part_added: None,
                    delta: "response.function_call_arguments.delta",
                    done: "response.function_call_arguments.done",
                    part_done: None,
                },
                PartIndex::Call {},
            ),
            ItemContent::CustomCall { .. } => (
                Self {
                    part_added: None,
                    delta: "response.custom_tool_call_input.delta",
                    done: "response.custom_tool_call_input.done",
                    part_done: None,
                },
                PartIndex::Call {},
            ),
        }
    }
}

/// Writes events, each with the next number.
#[derive(Debug, Default)]
pub(super) struct EventSequence {
    next: u64,
}

impl EventSequence {
    /// An event about the response itself, which has the body of a response.
    pub(super) fn response(&mut self, out: &mut Vec<u8>, name: &'static str, response: &impl Serialize) {
        let sequence_number = self.number();
        named_event(out, name, &ResponseEvent { r#type: name, sequence_number, response });
    }

    /// The events of a change of an item.
    pub(super) fn item(&mut self, out: &mut Vec<u8>, index: usize, item: &Item, change: Change<'_>) {
        let (names, part_index) = EventNames::of(&item.content);
        let within =
            |content| EventBody::Within { output_index: index, item_id: &item.id, part_index, content };
        let whole = || EventBody::Item { output_index: index, item: item.into() };
        let part = || PartBody::new(&item.content).map(|part| within(Content::Part(part)));
        match change {
            Change::Begin => {
                self.write(out, "response.output_item.added", whole(), None);
                if let (Some(name), Some(part)) = (names.part_added, part()) {
                    self.write(out, name, part, None);
                }
            }
            Change::Grow(by, logprobs) => {
                let is_text = matches!(item.content, ItemContent::Message { .. });
                let logprobs = is_text.then(|| logprobs_body(logprobs));
                self.write(out, names.delta, within(Content::Delta(by)), logprobs);
            }
            Change::End => {
                let (content, logprobs) = match &item.content {
                    ItemContent::Reasoning { text } => (Content::Text(text), None),
                    ItemContent::Message { text, logprobs } => {
                        (Content::Text(text), Some(logprobs_body(logprobs)))
                    }
                    ItemContent::FunctionCall { arguments, .. } => (Content::Arguments(arguments), None),
                    ItemContent::CustomCall { input, .. } => (Content::Input(input), None),
                };
                self.write(out, names.done, within(content), logprobs);
                if let (Some(name), Some(part)) = (names.part_done, part()) {
                    self.write(out, name, part, None);
                }
                self.write(out, "response.output_item.done", whole(), None);
            }
        }
    }

    fn write(
        &mut self,
        out: &mut Vec<u8>,
        r#type: &'static str,
        body: EventBody<'_>,
        logprobs: Option<Vec<TokenBody>>,
    ) {
        let event = Event { r#type, sequence_number: self.number(), body, logprobs };
        named_event(out, r#type, &event);
    }

    /// The number of the next event.
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }
}
