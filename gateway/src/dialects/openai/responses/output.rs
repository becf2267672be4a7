//! The items of a response, as they grow: thinking, texts and calls of tools in the order in which the model writes them.
//! Whole and streamed responses grow in the same way, so they are the same. Not here: JSON, see `response` and `event`.

use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FinishReason, Logprobs};
use serde_json::Value;

use super::client_tools::{ClientTool, ClientTools};
use super::tools::CUSTOM_INPUT;

/// An item.
#[derive(Debug)]
pub(super) struct Item {
    /// Unique among all items of all responses.
    pub(super) id: String,
    pub(super) status: ItemStatus,
    pub(super) content: ItemContent,
}

/// How far an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemStatus {
    InProgress,
    Completed,
    /// The response ended within it.
    Incomplete,
}

/// What an item is.
#[derive(Debug, PartialEq)]
pub(super) enum ItemContent {
    /// Thinking.
    Reasoning { text: String },
    /// Text, and the log-probabilities of its tokens where the request asks for them.
    Message { text: String, logprobs: Vec<Logprobs> },
    /// A call of a function.
    FunctionCall { call_id: String, namespace: Option<String>, name: String, arguments: String },
    /// A call of a custom tool, whose input is free text.
    CustomCall { call_id: String, namespace: Option<String>, name: String, input: String },
}

/// What happens to an item.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change<'a> {
    /// It begins, without content.
    Begin,
    /// Its text, arguments or input grow by this.
    Grow(&'a str, &'a [Logprobs]),
    /// It is complete, or cut off.
    End,
}

/// Told of each change: the item's place, the item after the change, and the change.
pub(super) type Observer<'a> = dyn FnMut(usize, &Item, Change<'_>) + 'a;

/// Looks at no change, for a response that is not streamed.
pub(super) fn unobserved(_: usize, _: &Item, _: Change<'_>) {}

/// The items of one response; the last may be in progress.
#[derive(Debug)]
pub(super) struct Output {
    /// A part of the ids of items.
    id: String,
    /// The client's names of tools.
    tools: ClientTools,
    items: Vec<Item>,
    /// Of tokens whose text has not come yet.
    withheld: Vec<Logprobs>,
    /// Tokens that told thinking.
    reasoning_tokens: u32,
}

impl Output {
    /// No items yet, of the response with this id.
    pub(super) fn new(id: String, tools: ClientTools) -> Self {
        Self { id, tools, items: Vec::new(), withheld: Vec::new(), reasoning_tokens: 0 }
    }

    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    pub(super) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Adds what a token adds.
    pub(super) fn add(&mut self, delta: &Delta, observe: &mut Observer<'_>) {
        let Delta { reasoning, text, tool_calls, logprobs } = delta;
        self.withheld.extend_from_slice(logprobs);
        if !reasoning.is_empty() {
            self.reasoning_tokens = self.reasoning_tokens.saturating_add(1);
            self.begin(ItemContent::Reasoning { text: String::new() }, observe);
            self.grow(reasoning, &[], observe);
        }
        if !text.is_empty() {
            let logprobs = std::mem::take(&mut self.withheld);
            self.begin(ItemContent::Message { text: String::new(), logprobs: Vec::new() }, observe);
            self.grow(text, &logprobs, observe);
        } else if !reasoning.is_empty() || !tool_calls.is_empty() {
            // Texts have log-probabilities; thinking and calls have no place for them.
            self.withheld.clear();
        }
        for call in tool_calls {
            self.add_call(call, observe);
        }
    }

    /// A call comes whole.
    fn add_call(&mut self, call: &ToolCall, observe: &mut Observer<'_>) {
        let ToolCall { id, name, arguments } = call;
        self.end(ItemStatus::Completed, observe);
        let call_id = id.clone();
        let ClientTool { is_custom, namespace, name } = self.tools.called(name);
        if is_custom {
            let input = custom_input(arguments);
            self.begin(ItemContent::CustomCall { call_id, namespace, name, input: String::new() }, observe);
            self.grow(&input, &[], observe);
        } else {
            let call = ItemContent::FunctionCall { call_id, namespace, name, arguments: String::new() };
            self.begin(call, observe);
            self.grow(arguments, &[], observe);
        }
        self.end(ItemStatus::Completed, observe);
    }

    /// Nothing more comes. A response that stopped has a text or a call, were it an empty text: clients look for one.
    pub(super) fn finish(&mut self, reason: FinishReason, observe: &mut Observer<'_>) {
        let stopped = reason.is_stop();
        let has_answer = self.items.iter().any(|item| !matches!(item.content, ItemContent::Reasoning { .. }));
        if stopped && !has_answer {
            self.begin(ItemContent::Message { text: String::new(), logprobs: Vec::new() }, observe);
        }
        self.end(if stopped { ItemStatus::Completed } else { ItemStatus::Incomplete }, observe);
    }

    /// An error ends the response: no item changes any more.
    pub(super) fn abandon(&mut self) {
        self.end(ItemStatus::Incomplete, &mut unobserved);
    }

    /// Begins an item, unless one of the same kind is in progress.
    fn begin(&mut self, content: ItemContent, observe: &mut Observer<'_>) {
        let is_it = |item: &Item| {
            item.status == ItemStatus::InProgress
                && std::mem::discriminant(&item.content) == std::mem::discriminant(&content)
        };
        if self.items.last().is_some_and(is_it) {
            return;
        }
        self.end(ItemStatus::Completed, observe);
        let prefix = match content {
            ItemContent::Reasoning { .. } => "rs",
            ItemContent::Message { .. } => "msg",
            ItemContent::FunctionCall { .. } => "fc",
            ItemContent::CustomCall { .. } => "ctc",
        };
        let index = self.items.len();
        let item =
            Item { id: format!("{prefix}_{}_{index}", self.id), status: ItemStatus::InProgress, content };
        observe(index, &item, Change::Begin);
        self.items.push(item);
    }

    /// The item in progress grows.
    fn grow(&mut self, by: &str, by_logprobs: &[Logprobs], observe: &mut Observer<'_>) {
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return };
        match &mut item.content {
            ItemContent::Message { text, logprobs } => {
                text.push_str(by);
                logprobs.extend_from_slice(by_logprobs);
            }
            ItemContent::Reasoning { text }
            | ItemContent::FunctionCall { arguments: text, .. }
            | ItemContent::CustomCall { input: text, .. } => text.push_str(by),
        }
        observe(index, item, Change::Grow(by, by_logprobs));
    }

    /// The item in progress ends, if there is one.
    fn end(&mut self, status: ItemStatus, observe: &mut Observer<'_>) {
        let index = self.items.len().saturating_sub(1);
        if let Some(item) = self.items.last_mut().filter(|item| item.status == ItemStatus::InProgress) {
            item.status = status;
            observe(index, item, Change::End);
        }
    }
}

/// The text that a custom tool is called with; all of the arguments where they are not what its schema says.
fn custom_input(arguments: &str) -> String {
    let input = serde_json::from_str::<Value>(arguments).ok();
    let input = input.as_ref().and_then(|arguments| arguments.get(CUSTOM_INPUT)?.as_str());
    input.unwrap_or(arguments).to_owned()
}

#[cfg(test)]
mod tests {
    use russet_wire::event::TokenLogprob;

    use super::*;

    fn call(id: &str, name: &str, arguments: &str) -> Delta {
        let call = ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() };
        Delta { tool_calls: vec![call], ..Delta::default() }
    }

    fn thinking(text: &str) -> Delta {
        Delta { reasoning: text.into(), ..Delta::default() }
    }

    /// The items of these deltas, as `id: status: content`.
    fn items(deltas: &[Delta], reason: FinishReason) -> Vec<String> {
        let mut tools = ClientTools::default();
        for (is_custom, namespace, name) in
            [(true, None, "patch"), (false, Some("crm"), "find"), (true, Some("crm"), "note")]
        {
            let namespace = namespace.map(str::to_owned);
            tools.add(ClientTool { is_custom, namespace, name: name.into() });
        }
        let mut output = Output::new("r".into(), tools);
        for delta in deltas {
            output.add(delta, &mut unobserved);
        }
        output.finish(reason, &mut unobserved);
        let shown = |item: &Item| {
            let text = match &item.content {
                ItemContent::Reasoning { text } | ItemContent::Message { text, .. } => text.clone(),
                ItemContent::FunctionCall { call_id, namespace, name, arguments: text }
                | ItemContent::CustomCall { call_id, namespace, name, input: text } => {
                    let namespace = namespace.as_ref().map(|namespace| format!("{namespace}:"));
                    format!("{call_id} {}{name} {text}", namespace.unwrap_or_default())
                }
            };
            format!("{} {:?} {text}", item.id, item.status)
        };
        output.items().iter().map(shown).collect()
    }

    #[test]
    fn items_come_in_the_order_in_which_they_are_written() {
        use FinishReason::{Length, Stop};
        for (deltas, reason, expected) in [
            (vec![], Stop, vec!["msg_r_0 Completed "]),
            (vec![], Length, vec![]),
            (vec![Delta::text("a"), Delta::text("b")], Stop, vec!["msg_r_0 Completed ab"]),
            (vec![Delta::text("a")], Length, vec!["msg_r_0 Incomplete a"]),
            (vec![thinking("t")], Length, vec!["rs_r_0 Incomplete t"]),
            (vec![thinking("t")], Stop, vec!["rs_r_0 Completed t", "msg_r_1 Completed "]),
            (
                vec![Delta { reasoning: "t".into(), ..Delta::text("a") }, call("1", "f", "{}")],
                Stop,
                vec!["rs_r_0 Completed t", "msg_r_1 Completed a", "fc_r_2 Completed 1 f {}"],
            ),
            (
                vec![call("1", "f", "{}"), call("2", "f", "{}"), Delta::text("a")],
                Length,
                vec!["fc_r_0 Completed 1 f {}", "fc_r_1 Completed 2 f {}", "msg_r_2 Incomplete a"],
            ),
            (
                vec![call("1", "patch", r#"{"input": "a\nb"}"#), call("2", "patch", "[7]")],
                Stop,
                vec!["ctc_r_0 Completed 1 patch a\nb", "ctc_r_1 Completed 2 patch [7]"],
            ),
            (
                vec![
                    call("1", "crm__find", "{}"),
                    call("2", "crm__note", r#"{"input": "a"}"#),
                    call("3", "find", ""),
                ],
                Stop,
                vec![
                    "fc_r_0 Completed 1 crm:find {}",
                    "ctc_r_1 Completed 2 crm:note a",
                    "fc_r_2 Completed 3 find ",
                ],
            ),
        ] {
            assert_eq!(items(&deltas, reason), expected, "{deltas:?}");
        }
    }

    #[test]
    fn logprobs_of_texts_are_kept_and_those_of_thinking_are_not() {
        let of = |id: u32| Logprobs { sampled: TokenLogprob { id, ..TokenLogprob::default() }, top: vec![] };
        let with =
            |delta: Delta, ids: &[u32]| Delta { logprobs: ids.iter().map(|id| of(*id)).collect(), ..delta };
        let mut output = Output::new("r".into(), ClientTools::default());
        for delta in [
            with(thinking("t"), &[1]),
            // The bytes of a character come together.
            with(Delta::default(), &[2]),
            with(Delta::text("é"), &[3]),
            with(call("1", "f", "{}"), &[4, 5]),
            with(Delta::text("x"), &[6]),
        ] {
            output.add(&delta, &mut unobserved);
        }
        let ids: Vec<Vec<u32>> = output
            .items()
            .iter()
            .filter_map(|item| match &item.content {
                ItemContent::Message { logprobs, .. } => {
                    Some(logprobs.iter().map(|one| one.sampled.id).collect())
                }
                _ => None,
            })
            .collect();
        assert_eq!((ids, output.reasoning_tokens()), (vec![vec![2, 3], vec![6]], 1));
    }
}
