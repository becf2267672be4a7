//! Completions in OpenAI's format: a complete `text_completion`, or chunks as server-sent events. Their log-probabilities
//! are lists side by side, with the place of each token in the text; where the response begins with its prompt, those of
//! the prompt are the first.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use russet_wire::event::{Delta, FinishReason, Logprobs, PromptToken, TokenLogprob, Usage};
use serde::Serialize;
use serde_json::{Map, Value};

use super::response::{STREAM_END, UsageBody, error_event};
use crate::dialects::sse::{self, KEEP_ALIVE, sse_event};
use crate::dialects::token_logprobs::{MIN_LOGPROB, PromptLogprobsBody};
use crate::error::GatewayError;
use crate::serving::ResponseWriter;

/// Writes the completions of one request.
#[derive(Debug)]
pub(super) struct CompletionWriter {
    /// `cmpl-…`.
    id: String,
    /// Seconds since 1970.
    created: u64,
    /// The model name the client used.
    model: String,
    /// Whether the client requested the usage chunk.
    include_usage: bool,
    /// How many of the most probable tokens are told of each token, and in vLLM's form of each token of the prompt; `None`
    /// where none of them are told.
    top: (Option<u32>, Option<u32>),
    choices: Vec<ChoiceState>,
}

/// How a response begins with its prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Echo {
    /// It does not, or has.
    #[default]
    None,
    /// With this text, which is known before an engine has it.
    Text(String),
    /// With the tokens that the engine tells.
    Tokens,
    /// With this text, of which the engine tells the tokens.
    TextInTokens(String),
}

/// What was written of a choice.
#[derive(Debug, Default)]
struct ChoiceState {
    /// The prompt, until it is written.
    echo: Echo,
    /// The tokens of the prompt, where the engine has told them.
    prompt: Vec<PromptToken>,
    /// Characters of the tokens so far, the prompt among them.
    characters: usize,
}

#[derive(Serialize)]
struct CompletionBody<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

#[derive(Serialize)]
struct ChoiceBody {
    text: String,
    index: usize,
    logprobs: Option<LogprobsBody>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobsBody>,
}

/// Log-probabilities of tokens, one of each list for each of them.
#[derive(Default, Serialize)]
struct LogprobsBody {
    tokens: Vec<String>,
    /// Null for the first token of a prompt, as the next.
    token_logprobs: Vec<Option<f64>>,
    /// The most probable tokens, and the one that is there.
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// The character of the text at which the token begins.
    text_offset: Vec<usize>,
}

impl LogprobsBody {
    /// Adds a token, which begins at this character.
    fn push(&mut self, bytes: &[u8], logprob: Option<f32>, top: &[TokenLogprob], offset: usize) {
        // In 64 bits in both lists: clients compare them.
        let number = |logprob: f32| f64::from(logprob.max(MIN_LOGPROB));
        let text = token_text(bytes);
        self.top_logprobs.push(logprob.map(|logprob| {
            let others = top.iter().map(|token| (token_text(&token.bytes), token.logprob));
            let mut entries = Map::new();
            for (text, logprob) in others.chain([(text.clone(), logprob)]) {
                // Of two tokens with one text the more probable comes first.
                entries.entry(text).or_insert_with(|| Value::from(number(logprob)));
            }
            entries
        }));
        self.tokens.push(text);
        self.token_logprobs.push(logprob.map(number));
        self.text_offset.push(offset);
    }
}

/// A token as text; of one that is a part of a character its bytes, as OpenAI writes them.
fn token_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let bytes = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", bytes.collect::<String>())
        }
    }
}

/// Characters that begin in these bytes: those within a character begin none.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count()
}

impl ChoiceState {
    /// Adds the log-probabilities of the next tokens.
    fn tell(&mut self, body: &mut LogprobsBody, logprobs: &[Logprobs]) {
        for Logprobs { sampled, top } in logprobs {
            body.push(&sampled.bytes, Some(sampled.logprob), top, self.characters);
            self.characters += characters(&sampled.bytes);
        }
    }

    /// What is written before the text: the prompt, once. Its log-probabilities are added where they are told, with so many
    /// of the most probable tokens.
    fn echo(&mut self, body: &mut LogprobsBody, top: Option<u32>) -> String {
        let tokens = || self.prompt.iter().flat_map(|token| token.bytes.iter().copied()).collect();
        let bytes: Vec<u8> = match std::mem::take(&mut self.echo) {
            Echo::None => return String::new(),
            Echo::Text(text) => {
                self.characters += text.chars().count();
                return text;
            }
            Echo::Tokens => tokens(),
            Echo::TextInTokens(text) => text.into_bytes(),
        };
        if let Some(top) = top {
            let (mut rest, mut begin) = (bytes.as_slice(), 0);
            for PromptToken { id: _, bytes: token, logprobs } in &self.prompt {
                let others = logprobs.as_ref().map_or(&[][..], |logprobs| &logprobs.top);
                let others = &others[..others.len().min(top as usize)];
                let logprob = logprobs.as_ref().map(|logprobs| logprobs.logprob);
                body.push(token, logprob, others, begin);
                // A token that begins every prompt of the model is none of the text, nor is a space before the first word.
                let own = token.strip_prefix(b" ").unwrap_or(token);
                let after =
                    rest.strip_prefix(token.as_slice()).or_else(|| rest.strip_prefix(own)).unwrap_or(rest);
                begin += characters(&rest[..rest.len() - after.len()]);
                rest = after;
            }
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        self.characters += text.chars().count();
        text
    }
}

impl CompletionWriter {
    /// Writes choices that begin with these texts.
    pub(super) fn new(
        id: String,
        created: u64,
        model: String,
        include_usage: bool,
        echoes: Vec<Echo>,
        top: (Option<u32>, Option<u32>),
    ) -> Self {
        let state = |echo| ChoiceState { echo, ..ChoiceState::default() };
        let choices = echoes.into_iter().map(state).collect();
        Self { id, created, model, include_usage, top, choices }
    }

    fn body(&self, choices: Vec<ChoiceBody>, usage: Option<Option<UsageBody>>) -> CompletionBody<'_> {
        let Self { id, created, model, .. } = self;
        CompletionBody { id, object: "text_completion", created: *created, model, choices, usage }
    }

    fn event(&self, choices: Vec<ChoiceBody>, usage: Option<Usage>) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        let usage = self.include_usage.then(|| usage.map(UsageBody::from));
        sse_event(&mut out, &self.body(choices, usage));
        out
    }

    /// The next text of a choice.
    fn choice(&mut self, index: usize, delta: &Delta, reason: Option<FinishReason>) -> ChoiceBody {
        let Delta { reasoning: _, text, tool_calls: _, logprobs } = delta;
        let (mut written, mut body) = (String::new(), LogprobsBody::default());
        let mut in_vllms_form = None;
        let (top, prompt_top) = self.top;
        if let Some(choice) = self.choices.get_mut(index) {
            written = choice.echo(&mut body, top);
            choice.tell(&mut body, logprobs);
            // It is told once, in a response that is not streamed.
            let prompt = std::mem::take(&mut choice.prompt);
            in_vllms_form = prompt_top.map(|top| PromptLogprobsBody { tokens: prompt, most: top as usize });
        }
        written.push_str(text);
        ChoiceBody {
            text: written,
            index,
            logprobs: (!body.tokens.is_empty()).then_some(body),
            finish_reason: reason.map(FinishReason::as_str),
            prompt_logprobs: in_vllms_form,
        }
    }
}

impl ResponseWriter for CompletionWriter {
    const STREAM_TYPE: &'static str = sse::STREAM_TYPE;

    fn whole(mut self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response {
        let choices = choices.iter().enumerate();
        let choices =
            choices.map(|(index, (response, reason))| self.choice(index, response, Some(*reason))).collect();
        Json(self.body(choices, Some(Some(usage.into())))).into_response()
    }

    fn start(&mut self, _: Option<u32>) -> Bytes {
        let nothing = Delta::default();
        let is_known = |index: &usize| matches!(self.choices[*index].echo, Echo::Text(_));
        let echoed: Vec<usize> = (0..self.choices.len()).filter(is_known).collect();
        let mut out = Vec::new();
        for index in echoed {
            let choice = self.choice(index, &nothing, None);
            out.extend(self.event(vec![choice], None));
        }
        out.into()
    }

    fn observe_prompt(&mut self, choice: usize, tokens: Vec<PromptToken>) {
        if let Some(choice) = self.choices.get_mut(choice) {
            choice.prompt = tokens;
        }
    }

    fn prompt(&mut self, choice: usize) -> Bytes {
        match self.choices.get(choice) {
            Some(ChoiceState { echo: Echo::Tokens | Echo::TextInTokens(_), .. }) => {
                let choice = self.choice(choice, &Delta::default(), None);
                self.event(vec![choice], None).into()
            }
            Some(_) | None => Bytes::new(),
        }
    }

    fn delta(&mut self, choice: usize, delta: &Delta) -> Bytes {
        let choice = self.choice(choice, delta, None);
        self.event(vec![choice], None).into()
    }

    fn keep_alive(&mut self) -> Bytes {
        Bytes::from_static(KEEP_ALIVE)
    }

    fn finish(&mut self, choice: usize, reason: FinishReason, usage: Option<Usage>) -> Bytes {
        let choice = self.choice(choice, &Delta::default(), Some(reason));
        let mut out = self.event(vec![choice], None);
        if let Some(usage) = usage {
            if self.include_usage {
                out.extend(self.event(Vec::new(), Some(usage)));
            }
            out.extend_from_slice(STREAM_END);
        }
        out.into()
    }

    fn error(&mut self, error: &GatewayError) -> Bytes {
        error_event(error)
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::event::PromptLogprobs;

    use super::*;

    fn token(bytes: &[u8], logprob: f32) -> TokenLogprob {
        TokenLogprob { id: 0, bytes: bytes.to_vec(), logprob }
    }

    fn events(bytes: &Bytes) -> Vec<Value> {
        let text = std::str::from_utf8(bytes).unwrap();
        let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    #[test]
    fn a_stream_has_the_prompt_once_and_offsets_behind_it() {
        let echoes = vec![Echo::Text("né".to_owned()), Echo::None];
        let mut writer = CompletionWriter::new("cmpl-1".into(), 7, "m".into(), true, echoes, (Some(1), None));
        let start = events(&writer.start(None));
        assert_eq!(start.len(), 1);
        assert_eq!(start[0]["choices"][0]["text"], "né");
        let logprobs = vec![
            Logprobs { sampled: token(b"a", -0.5), top: vec![token(b"b", -0.25), token(b"a", -0.5)] },
            Logprobs { sampled: token(&[0xC3], f32::NEG_INFINITY), top: vec![] },
            Logprobs { sampled: token(&[0xA9], -1.0), top: vec![] },
            Logprobs { sampled: token(b"!", -1.0), top: vec![] },
        ];
        let delta = Delta { logprobs, ..Delta::text("aé!") };
        let [event] = events(&writer.delta(0, &delta)).try_into().unwrap();
        assert_eq!(event["object"], "text_completion");
        assert_eq!(event["usage"], Value::Null);
        let choice = &event["choices"][0];
        assert_eq!((&choice["text"], &choice["index"]), (&"aé!".into(), &0.into()));
        assert_eq!(choice["logprobs"]["tokens"], serde_json::json!(["a", "bytes:\\xc3", "bytes:\\xa9", "!"]));
        assert_eq!(choice["logprobs"]["text_offset"], serde_json::json!([2, 3, 4, 4]));
        assert_eq!(choice["logprobs"]["token_logprobs"], serde_json::json!([-0.5, -9999.0, -1.0, -1.0]));
        assert_eq!(choice["logprobs"]["top_logprobs"][0], serde_json::json!({"b": -0.25, "a": -0.5}));
        let plain = events(&writer.delta(1, &Delta::text("x")));
        assert_eq!(plain[0]["choices"][0]["logprobs"], Value::Null);
        assert_eq!(
            events(&writer.finish(1, FinishReason::Length, None))[0]["choices"][0]["finish_reason"],
            "length"
        );
        let usage = Usage { prompt_tokens: 2, completion_tokens: 5, cached_tokens: 0 };
        let end = writer.finish(0, FinishReason::Stop, Some(usage));
        assert!(end.ends_with(b"data: [DONE]\n\n"));
        let end = events(&end);
        assert_eq!(
            (&end[0]["choices"][0]["finish_reason"], &end[1]["usage"]["total_tokens"]),
            (&"stop".into(), &7.into())
        );
    }

    fn scored(bytes: &[u8], logprob: f32, top: Vec<TokenLogprob>) -> PromptToken {
        let logprobs = Some(PromptLogprobs { logprob, rank: 2, top });
        PromptToken { id: 7, bytes: bytes.to_vec(), logprobs }
    }

    /// `<s>né!`, in pieces of characters.
    fn prompt() -> Vec<PromptToken> {
        vec![
            PromptToken { id: 1, bytes: b"<s>".to_vec(), logprobs: None },
            scored(b" n", -0.1, vec![token(b"a", -0.05), token(b"b", -3.0)]),
            scored(&[0xC3], f32::NEG_INFINITY, vec![token(b"n", -0.5)]),
            scored(&[0xA9], -1.0, vec![token(&[0xA9], -1.0)]),
            scored(b"!", -2.5, vec![]),
        ]
    }

    #[test]
    fn a_prompt_comes_in_tokens_before_the_response() {
        for (echo, text, offsets) in [
            (Echo::TextInTokens("né!".into()), "né!", [0, 0, 1, 2, 2, 3]),
            (Echo::Tokens, "<s> né!", [0, 3, 5, 6, 6, 7]),
        ] {
            let new = || {
                let mut writer = CompletionWriter::new(
                    "cmpl-1".into(),
                    7,
                    "m".into(),
                    false,
                    vec![echo.clone()],
                    (Some(1), None),
                );
                assert!(events(&writer.start(None)).is_empty(), "the engine has to tell it");
                writer.observe_prompt(0, prompt());
                writer
            };
            let logprobs = vec![Logprobs { sampled: token(b" x", -0.3), top: vec![] }];
            let delta = Delta { logprobs, ..Delta::text(" x") };
            let mut streamed = new();
            let [begin] = events(&streamed.prompt(0)).try_into().unwrap();
            assert_eq!(begin["choices"][0]["text"], text);
            let logprobs = begin["choices"][0]["logprobs"].clone();
            assert_eq!(
                logprobs["tokens"],
                serde_json::json!(["<s>", " n", "bytes:\\xc3", "bytes:\\xa9", "!"])
            );
            assert_eq!(logprobs["text_offset"], serde_json::json!(offsets[..5]));
            assert_eq!(logprobs["token_logprobs"][0], Value::Null);
            assert_eq!(logprobs["top_logprobs"][0], Value::Null);
            assert_eq!(logprobs["token_logprobs"][2], -9999.0);
            // One number in both lists, as clients compare them; and no more than were asked for.
            let number = |value: f32| Value::from(f64::from(value));
            assert_eq!(logprobs["token_logprobs"][1], number(-0.1));
            assert_eq!(
                logprobs["top_logprobs"][1],
                serde_json::json!({" n": number(-0.1), "a": number(-0.05)})
            );
            let [next] = events(&streamed.delta(0, &delta)).try_into().unwrap();
            assert_eq!(next["choices"][0]["text"], " x");
            assert_eq!(next["choices"][0]["logprobs"]["text_offset"], serde_json::json!([offsets[5]]));
            // Whole it is the same, in one list.
            let whole = new().choice(0, &delta, Some(FinishReason::Length));
            let whole = serde_json::to_value(whole).unwrap();
            assert_eq!(whole["text"], format!("{text} x"));
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let parts =
                    [&logprobs, &next["choices"][0]["logprobs"]].map(|part| part[list].as_array().unwrap());
                assert_eq!(whole["logprobs"][list], Value::from(parts.map(Vec::as_slice).concat()), "{list}");
            }
        }
    }

    #[test]
    fn vllms_form_has_ids_and_ranks_beside_the_other() {
        let top = (None, Some(1));
        let mut writer = CompletionWriter::new("cmpl-1".into(), 7, "m".into(), false, vec![Echo::None], top);
        writer.observe_prompt(0, prompt());
        let body =
            serde_json::to_value(writer.choice(0, &Delta::text("x"), Some(FinishReason::Stop))).unwrap();
        assert_eq!((&body["text"], &body["logprobs"]), (&"x".into(), &Value::Null));
        let prompt = body["prompt_logprobs"].as_array().unwrap();
        assert_eq!((prompt.len(), &prompt[0]), (5, &Value::Null));
        let number = |value: f32| Value::from(f64::from(value));
        assert_eq!(
            prompt[1],
            serde_json::json!({
                "7": {"logprob": number(-0.1), "rank": 2, "decoded_token": " n"},
                "0": {"logprob": number(-0.05), "rank": 1, "decoded_token": "a"},
            })
        );
        assert_eq!(prompt[2]["7"]["decoded_token"], "\u{FFFD}");
        assert_eq!(prompt[4], serde_json::json!({"7": {"logprob": -2.5, "rank": 2, "decoded_token": "!"}}));
    }
}
