//! Completions in OpenAI's format: a complete `text_completion`, or chunks as server-sent events. Their log-probabilities
//! are lists side by side, with the place of each token in the text.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use russet_wire::event::{Delta, FinishReason, Logprobs, TokenLogprob, Usage};
use serde::Serialize;
use serde_json::{Map, Value};

use super::response::{STREAM_END, UsageBody, error_event};
use crate::dialects::sse::{self, KEEP_ALIVE, sse_event};
use crate::dialects::token_logprobs::MIN_LOGPROB;
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
    choices: Vec<ChoiceState>,
}

/// What was written of a choice.
#[derive(Debug, Default)]
struct ChoiceState {
    /// The prompt, until it is written, where the answer begins with it.
    echo: Option<String>,
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
}

/// Log-probabilities of tokens, one of each list for each of them.
#[derive(Serialize)]
struct LogprobsBody {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// The most probable tokens, and the sampled one.
    top_logprobs: Vec<Map<String, Value>>,
    /// The character of the text at which the token begins.
    text_offset: Vec<usize>,
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

impl ChoiceState {
    /// The log-probabilities of the next tokens; `None` where the request asks for none.
    fn logprobs(&mut self, logprobs: &[Logprobs]) -> Option<LogprobsBody> {
        let mut body = LogprobsBody {
            tokens: Vec::new(),
            token_logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            text_offset: Vec::new(),
        };
        let number = |token: &TokenLogprob| token.logprob.max(MIN_LOGPROB);
        for Logprobs { sampled, top } in logprobs {
            let entries = top.iter().chain([sampled]);
            let entries = entries.map(|token| (token_text(&token.bytes), Value::from(number(token))));
            body.top_logprobs.push(entries.collect());
            body.tokens.push(token_text(&sampled.bytes));
            body.token_logprobs.push(number(sampled));
            body.text_offset.push(self.characters);
            // Bytes within a character begin none.
            self.characters += sampled.bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
        }
        (!body.tokens.is_empty()).then_some(body)
    }

    /// What is written before the text: the prompt, once.
    fn echo(&mut self) -> String {
        let echo = self.echo.take().unwrap_or_default();
        self.characters += echo.chars().count();
        echo
    }
}

impl CompletionWriter {
    /// Writes choices that begin with these texts.
    pub(super) fn new(
        id: String,
        created: u64,
        model: String,
        include_usage: bool,
        echoes: Vec<Option<String>>,
    ) -> Self {
        let choices = echoes.into_iter().map(|echo| ChoiceState { echo, characters: 0 }).collect();
        Self { id, created, model, include_usage, choices }
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
        let (mut written, mut probabilities) = (String::new(), None);
        if let Some(choice) = self.choices.get_mut(index) {
            written = choice.echo();
            probabilities = choice.logprobs(logprobs);
        }
        written.push_str(text);
        ChoiceBody {
            text: written,
            index,
            logprobs: probabilities,
            finish_reason: reason.map(FinishReason::as_str),
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
        let echoed: Vec<usize> =
            (0..self.choices.len()).filter(|&index| self.choices[index].echo.is_some()).collect();
        let mut out = Vec::new();
        for index in echoed {
            let choice = self.choice(index, &nothing, None);
            out.extend(self.event(vec![choice], None));
        }
        out.into()
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
        let echoes = vec![Some("né".to_owned()), None];
        let mut writer = CompletionWriter::new("cmpl-1".into(), 7, "m".into(), true, echoes);
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
}
