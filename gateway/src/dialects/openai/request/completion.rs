//! Parses a request for completions: prompts that the model continues, without a conversation and its template. What else
//! it may ask for is what a chat request may.

use russet_wire::request::{GenerationRequest, RawPrompt};
use serde_json::Value;

use super::fields::completion_group_of;
use super::parameters;
use crate::dialects::field_table::{ignored, refuse_unsupported};
use crate::dialects::openai::completion_response::{CompletionWriter, Echo};
use crate::dialects::sampling;
use crate::dialects::values::{self, JsonObject, boolean, integer, token_ids, whole};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::routes::BYTES_PER_TOKEN;
use crate::serving::{ParsedRequest, RequestContext};

/// Most responses to one request, of all its prompts; OpenAI's limit is 128 for each prompt.
const MAX_RESPONSES: usize = 128;
/// Tokens of a response where the request says no number, as OpenAI has it.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Parses a request for completions within the caller's limits.
pub(in crate::dialects::openai) fn parse(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<CompletionWriter>, GatewayError> {
    let mut fields = values::fields(&mut body)?;
    let (model, fallback_models) = values::models(&fields)?;
    refuse_unsupported(&fields, completion_group_of)?;
    let choices = parameters::choices(&fields)?;
    best_of(&fields, choices)?;
    let prompts = prompts(fields.remove("prompt"))?;
    if prompts.len() * choices > MAX_RESPONSES {
        let message = format!(
            "{} prompts with n = {choices} ask for {} responses; at most {MAX_RESPONSES} fit into a request",
            prompts.len(),
            prompts.len() * choices
        );
        return Err(GatewayError::field("prompt", message));
    }
    let service_tier = parameters::service_tier(fields.get("service_tier"))?;
    let telling = PromptTelling {
        echo: boolean(&fields, "echo")?.unwrap_or(false),
        logprobs: sampling::completion_logprobs(&fields)?,
        prompt_logprobs: sampling::prompt_logprobs(&fields)?,
    };
    telling.check(&prompts, choices)?;
    let is_prompt_alone = telling.take_no_tokens(&mut fields);
    let base = GenerationRequest {
        logprobs: telling.logprobs,
        prompt_logprobs: telling.asked(),
        ..parameters::request(&fields, &body, context, service_tier)?
    };
    let max_tokens = if is_prompt_alone { 0 } else { base.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) };
    let echo = |prompt: &RawPrompt| telling.echo(prompt, &base, is_prompt_alone);
    let writer = CompletionWriter::new(
        format!("cmpl-{}", context.id.unique),
        context.unix_seconds,
        model.clone(),
        parameters::include_usage(fields.get("stream_options"))?,
        prompts.iter().flat_map(|prompt| std::iter::repeat_n(echo(prompt), choices)).collect(),
        (telling.logprobs, telling.prompt_logprobs),
    );
    let requests = prompts.into_iter().map(|prompt| GenerationRequest {
        echo: matches!(echo(&prompt), Echo::Tokens | Echo::TextInTokens(_)),
        raw_prompt: Some(prompt),
        max_tokens: Some(max_tokens),
        ..base.clone()
    });
    Ok(ParsedRequest {
        keep_alive: None,
        model,
        fallback_models,
        prompt_field: "prompt",
        requests: requests.collect(),
        left_out: sampling::left_out(&fields),
        choices,
        streamed: boolean(&fields, "stream")?.unwrap_or(false),
        ignored: ignored(&fields, completion_group_of, [].into()),
        writer,
    })
}

/// A text, a list of texts, the tokens of a prompt, or a list of such lists.
fn prompts(value: Option<Value>) -> Result<Vec<RawPrompt>, GatewayError> {
    let invalid = || {
        let message = "`prompt` must be a text, a list of texts, a list of token ids, or a list of lists of token ids; none of them empty";
        GatewayError::field("prompt", message)
    };
    let tokens = |ids: Vec<Value>| -> Result<RawPrompt, GatewayError> {
        let ids = token_ids(&ids).filter(|ids| !ids.is_empty());
        ids.map(RawPrompt::Tokens).ok_or_else(invalid)
    };
    match value {
        None => Err(GatewayError::field("prompt", "`prompt` is missing")),
        Some(Value::String(text)) => Ok(vec![RawPrompt::Text(text)]),
        Some(Value::Array(items)) => match items.first() {
            None => Err(invalid()),
            Some(Value::Number(_)) => Ok(vec![tokens(items)?]),
            Some(_) => items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(RawPrompt::Text(text)),
                    Value::Array(ids) => tokens(ids),
                    _ => Err(invalid()),
                })
                .collect(),
        },
        Some(_) => Err(invalid()),
    }
}

/// OpenAI chooses the best of several responses by their log-probabilities; here all of them are returned.
fn best_of(fields: &JsonObject, choices: usize) -> Result<(), GatewayError> {
    match integer(fields, "best_of", 1, i64::MAX)? {
        Some(best_of) if best_of != choices as i64 => {
            let message = format!(
                "`best_of` is {best_of}, and n is {choices}: this release returns every response that it generates; leave `best_of` out"
            );
            Err(GatewayError::field("best_of", message))
        }
        _ => Ok(()),
    }
}

/// What responses tell of their prompts.
#[derive(Clone, Copy)]
struct PromptTelling {
    /// Whether they begin with them.
    echo: bool,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
}

impl PromptTelling {
    /// How many of the most probable tokens engines tell of each of the prompt; `None` where no log-probabilities are told.
    fn asked(self) -> Option<u32> {
        self.logprobs.filter(|_| self.echo).max(self.prompt_logprobs)
    }

    /// Refuses what is too much.
    fn check(self, prompts: &[RawPrompt], choices: usize) -> Result<(), GatewayError> {
        let field = if self.prompt_logprobs.is_some() { "prompt_logprobs" } else { "echo" };
        let tokens = |prompt: &RawPrompt| match prompt {
            RawPrompt::Text(_) if self.asked().is_none() => 0,
            RawPrompt::Text(text) => text.len() / BYTES_PER_TOKEN,
            RawPrompt::Tokens(tokens) => tokens.len(),
        };
        if !self.echo && self.prompt_logprobs.is_none() {
            return Ok(());
        }
        if self.asked().is_some() {
            sampling::check_scored_choices(choices)?;
        }
        let tokens = prompts.iter().map(tokens).sum::<usize>().saturating_mul(choices);
        sampling::check_prompt_logprobs(field, tokens, self.asked())
    }

    /// Whether a request asks for no token behind its prompt, which has sense where that is told. The field is taken out
    /// then: every other request has a response of one token at least.
    fn take_no_tokens(self, fields: &mut JsonObject) -> bool {
        let is_reported = self.echo || self.prompt_logprobs.is_some();
        let is_none = fields.get("max_tokens").and_then(whole) == Some(0);
        let is_alone = is_reported && is_none && !fields.contains_key("max_completion_tokens");
        if is_alone {
            fields.remove("max_tokens");
        }
        is_alone
    }

    /// How the response to a prompt begins with it. Where tokens alone say what the model has read of it, or each of them
    /// has numbers, the engine tells them.
    fn echo(self, prompt: &RawPrompt, request: &GenerationRequest, is_prompt_alone: bool) -> Echo {
        match prompt {
            _ if !self.echo => Echo::None,
            RawPrompt::Tokens(_) => Echo::Tokens,
            RawPrompt::Text(_) if request.truncate_prompt_tokens.is_some() => Echo::Tokens,
            RawPrompt::Text(text) if self.logprobs.is_some() || is_prompt_alone => {
                Echo::TextInTokens(text.clone())
            }
            RawPrompt::Text(text) => Echo::Text(text.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::ErrorKind;
    use crate::json_body::JsonScan;
    use crate::request_id::RequestId;
    use crate::request_limits::RequestLimits;

    fn parse(extra: &Value) -> Result<ParsedRequest<CompletionWriter>, GatewayError> {
        let mut body = json!({"model": "m", "prompt": "Once"});
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        let (id, body) = (RequestId { unique: "id".into(), shown: "req_id".into() }, body.to_string());
        let context =
            RequestContext { id: &id, unix_seconds: 17, limits: RequestLimits::default(), kept: None };
        super::parse(JsonScan::new(body.as_bytes())?.decode(body.as_bytes())?, &context)
    }

    #[test]
    fn prompts_are_read_in_every_form() {
        let text = |text: &str| RawPrompt::Text(text.into());
        for (prompt, expected) in [
            (json!("Once"), vec![text("Once")]),
            (json!(""), vec![text("")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2.0]), vec![RawPrompt::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![RawPrompt::Tokens(vec![1]), RawPrompt::Tokens(vec![2, 3])]),
            (json!(["a", [7]]), vec![text("a"), RawPrompt::Tokens(vec![7])]),
        ] {
            let parsed = parse(&json!({"prompt": prompt, "temperature": 0})).unwrap();
            assert_eq!((parsed.choices, parsed.streamed), (1, false));
            assert!(!parsed.left_out.temperature && parsed.left_out.top_p);
            let found: Vec<RawPrompt> =
                parsed.requests.iter().map(|request| request.raw_prompt.clone().unwrap()).collect();
            assert_eq!(found, expected, "{prompt}");
            assert!(parsed.requests.iter().all(|one| one.messages.is_empty() && one.max_tokens == Some(16)));
        }
    }

    #[test]
    fn what_a_completion_cannot_have_is_refused_by_name() {
        for (extra, param) in [
            (json!({"prompt": null}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": [[]]}), "prompt"),
            (json!({"prompt": [1, "a"]}), "prompt"),
            (json!({"prompt": [-1]}), "prompt"),
            (json!({"prompt": {"text": "a"}}), "prompt"),
            (json!({"prompt": vec!["a"; 129]}), "prompt"),
            (json!({"prompt": vec!["a"; 65], "n": 2}), "prompt"),
            (json!({"suffix": "end"}), "suffix"),
            (json!({"best_of": 3}), "best_of"),
            (json!({"echo": 1}), "echo"),
            (json!({"echo": true, "logprobs": 20, "prompt": "x".repeat(60_000)}), "echo"),
            (json!({"echo": true, "logprobs": 1, "prompt": vec![vec![7; 2000]; 70]}), "echo"),
            (json!({"echo": true, "n": 10, "prompt": vec![7; 30_000]}), "echo"),
            (json!({"echo": true, "logprobs": 1, "n": 2}), "n"),
            (json!({"prompt_logprobs": 1, "n": 2}), "n"),
            (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
            (json!({"prompt_logprobs": -1}), "prompt_logprobs"),
            (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
            (json!({"prompt_logprobs": 3, "prompt": vec![7; 70_000]}), "prompt_logprobs"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": 0, "logprobs": 1, "echo": false}), "max_tokens"),
            (json!({"logprobs": 21}), "logprobs"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"messages": [{"role": "user", "content": "hi"}]}), "messages"),
            (json!({"tools": [{"function": {"name": "f"}}]}), "tools"),
            (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
            (json!({"context_overflow": "shift"}), "context_overflow"),
            (json!({"add_special_tokens": false}), "add_special_tokens"),
        ] {
            let Err(error) = parse(&extra) else { panic!("{extra} is accepted") };
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (ErrorKind::InvalidRequest, Some(param)),
                "{extra}"
            );
            assert!(error.message.contains(param), "{extra}: {error}");
        }
        // What changes nothing is no reason to refuse.
        let nothing = json!({
            "suffix": "", "best_of": 2, "n": 2, "echo": false, "logprobs": false, "tools": [], "messages": [],
            "tool_choice": "none", "add_special_tokens": true, "user": "eve", "enable_thinking": false,
            "context_overflow": "refuse",
        });
        let parsed = parse(&nothing).unwrap();
        assert_eq!(
            (parsed.choices, parsed.ignored.as_slice()),
            (2, &["enable_thinking", "user"].map(str::to_owned)[..])
        );
    }

    #[test]
    fn what_is_reported_of_prompts_is_asked_of_engines() {
        // Of the request for the engine: echo, prompt_logprobs, logprobs and max_tokens.
        for (extra, expected) in [
            (json!({"echo": true}), (false, None, None, 16)),
            (json!({"echo": true, "logprobs": 2}), (true, Some(2), Some(2), 16)),
            (json!({"echo": true, "logprobs": 0, "max_tokens": 1}), (true, Some(0), Some(0), 1)),
            (json!({"echo": true, "max_tokens": 0}), (true, None, None, 0)),
            (json!({"echo": true, "prompt": [5, 6]}), (true, None, None, 16)),
            (json!({"echo": true, "truncate_prompt_tokens": 9}), (true, None, None, 16)),
            (json!({"prompt_logprobs": 3, "max_tokens": 0.0}), (false, Some(3), None, 0)),
            (json!({"prompt_logprobs": 3, "logprobs": 5}), (false, Some(3), Some(5), 16)),
            (json!({"prompt_logprobs": 3, "logprobs": 5, "echo": true}), (true, Some(5), Some(5), 16)),
            (json!({"prompt_logprobs": false, "logprobs": 5}), (false, None, Some(5), 16)),
        ] {
            let request = parse(&extra).unwrap().requests.remove(0);
            let found =
                (request.echo, request.prompt_logprobs, request.logprobs, request.max_tokens.unwrap());
            assert_eq!(found, expected, "{extra}");
        }
        // As many as a model of 131,072 tokens holds, with one log-probability beside each.
        let long = json!({"echo": true, "logprobs": 1, "prompt": vec![7; 131_072]});
        assert!(parse(&long).is_ok());
    }

    #[test]
    fn limits_of_prompts_and_logprobs_arrive() {
        let extra =
            json!({"logprobs": 5, "truncate_prompt_tokens": -1, "max_tokens": 3, "regex": "a+", "stop": "x"});
        let request = parse(&extra).unwrap().requests.remove(0);
        assert_eq!((request.logprobs, request.truncate_prompt_tokens), (Some(5), Some(u32::MAX)));
        assert_eq!((request.max_tokens, request.stop.len()), (Some(3), 1));
        assert!(request.structured_output.is_some());
        assert_eq!(
            parse(&json!({"truncate_prompt_tokens": 7})).unwrap().requests[0].truncate_prompt_tokens,
            Some(7)
        );
    }
}
