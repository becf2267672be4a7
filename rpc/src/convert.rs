//! Conversions between the protos and [`russet_wire`]; unknown enum values of a newer peer become
//! the most conservative known one.

mod conversation;
mod logprobs;
mod prompt;
mod sampling;
mod structured_output;

use russet_wire::conversation::ToolChoice;
use russet_wire::event::{
    Delta, EngineEvent, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Usage,
};
use russet_wire::request::{ContextOverflow, GenerationRequest, Sampling};

use crate::engine as pb;
use conversation::all;

impl From<GenerationRequest> for pb::GenerateRequest {
    fn from(request: GenerationRequest) -> Self {
        let GenerationRequest {
            id,
            messages,
            max_tokens,
            sampling,
            stop,
            ignore_eos,
            emitted,
            priority,
            deadline_milliseconds,
            cache_salt,
            tools,
            template_arguments,
            continue_final_message,
            single_tool_call,
            stop_token_ids,
            tool_choice,
            structured_output,
            thinking_budget,
            logprobs,
            echo,
            prompt_logprobs,
            raw_prompt,
            truncate_prompt_tokens,
            context_overflow,
            adapter,
            prefix_marks,
        } = request;
        Self {
            id,
            messages: all(messages),
            max_tokens,
            sampling: Some(sampling.into()),
            stop,
            ignore_eos,
            emitted,
            priority,
            deadline_milliseconds,
            cache_salt,
            tools: all(tools),
            template_arguments,
            continue_final_message,
            single_tool_call,
            stop_token_ids,
            tool_choice: Some(tool_choice.into()),
            structured_output: structured_output.map(pb::StructuredOutput::from),
            thinking_budget,
            logprobs,
            echo,
            prompt_logprobs,
            raw_prompt: raw_prompt.map(pb::RawPrompt::from),
            truncate_prompt_tokens,
            shift_context: context_overflow == ContextOverflow::Shift,
            adapter,
            prefix_marks: all(prefix_marks),
        }
    }
}

impl From<pb::GenerateRequest> for GenerationRequest {
    fn from(request: pb::GenerateRequest) -> Self {
        let pb::GenerateRequest {
            id,
            messages,
            max_tokens,
            sampling,
            stop,
            ignore_eos,
            emitted,
            priority,
            deadline_milliseconds,
            cache_salt,
            tools,
            template_arguments,
            continue_final_message,
            single_tool_call,
            stop_token_ids,
            tool_choice,
            structured_output,
            thinking_budget,
            logprobs,
            echo,
            prompt_logprobs,
            raw_prompt,
            truncate_prompt_tokens,
            shift_context,
            adapter,
            prefix_marks,
        } = request;
        let sampling = sampling.map(Sampling::from).unwrap_or_default();
        Self {
            id,
            messages: all(messages),
            max_tokens,
            sampling,
            stop,
            ignore_eos,
            emitted,
            priority,
            deadline_milliseconds,
            cache_salt,
            tools: all(tools),
            template_arguments,
            continue_final_message,
            single_tool_call,
            stop_token_ids,
            tool_choice: tool_choice.map(ToolChoice::from).unwrap_or_default(),
            structured_output: structured_output.and_then(structured_output::structured_output),
            thinking_budget,
            logprobs,
            echo,
            prompt_logprobs,
            raw_prompt: raw_prompt.and_then(prompt::raw_prompt),
            truncate_prompt_tokens,
            context_overflow: if shift_context { ContextOverflow::Shift } else { ContextOverflow::Refuse },
            adapter,
            prefix_marks: all(prefix_marks),
        }
    }
}

impl From<GenerationEvent> for pb::GenerateEvent {
    fn from(event: GenerationEvent) -> Self {
        use pb::generate_event::Event as E;
        let event = match event {
            GenerationEvent::Started { prompt_tokens, emitted_tokens } => {
                E::Started(pb::Started { prompt_tokens, emitted_tokens })
            }
            GenerationEvent::Prompt { tokens } => E::Prompt(pb::Prompt { tokens: all(tokens) }),
            GenerationEvent::Token { id, delta: Delta { reasoning, text, tool_calls, logprobs } } => {
                E::Token(pb::Token {
                    id,
                    text,
                    reasoning,
                    tool_calls: all(tool_calls),
                    logprobs: all(logprobs),
                })
            }
            GenerationEvent::Finished { reason, usage } => E::Finished(pb::Finished {
                reason: pb::FinishReason::from(reason) as i32,
                stop_string: match reason {
                    FinishReason::StopString(index) => Some(index),
                    _ => None,
                },
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens: usage.cached_tokens,
            }),
            GenerationEvent::Failed(failure) => E::Failed(failure.into()),
        };
        Self { event: Some(event), engine_microseconds: None }
    }
}

impl From<EngineEvent> for pb::GenerateEvent {
    fn from(EngineEvent { event, engine_microseconds }: EngineEvent) -> Self {
        Self { engine_microseconds, ..event.into() }
    }
}

impl From<pb::GenerateEvent> for EngineEvent {
    fn from(event: pb::GenerateEvent) -> Self {
        Self { engine_microseconds: event.engine_microseconds, event: event.into() }
    }
}

impl From<pb::GenerateEvent> for GenerationEvent {
    fn from(event: pb::GenerateEvent) -> Self {
        use pb::generate_event::Event as E;
        match event.event {
            Some(E::Started(pb::Started { prompt_tokens, emitted_tokens })) => {
                GenerationEvent::Started { prompt_tokens, emitted_tokens }
            }
            Some(E::Prompt(pb::Prompt { tokens })) => GenerationEvent::Prompt { tokens: all(tokens) },
            Some(E::Token(pb::Token { id, text, reasoning, tool_calls, logprobs })) => {
                let (tool_calls, logprobs) = (all(tool_calls), all(logprobs));
                GenerationEvent::Token { id, delta: Delta { reasoning, text, tool_calls, logprobs } }
            }
            Some(E::Finished(finished)) => GenerationEvent::Finished {
                reason: match (finished.reason().into(), finished.stop_string) {
                    (FinishReason::Stop, Some(index)) => FinishReason::StopString(index),
                    (reason, _) => reason,
                },
                usage: Usage {
                    prompt_tokens: finished.prompt_tokens,
                    completion_tokens: finished.completion_tokens,
                    cached_tokens: finished.cached_tokens,
                },
            },
            Some(E::Failed(failed)) => GenerationEvent::Failed(failed.into()),
            None => GenerationEvent::Failed(GenerationFailure {
                kind: FailureKind::Internal,
                message: "the engine sent an event this gateway does not know; upgrade the older of the two"
                    .into(),
            }),
        }
    }
}

impl From<GenerationFailure> for pb::Failed {
    fn from(failure: GenerationFailure) -> Self {
        let GenerationFailure { kind, message } = failure;
        let reason = match kind {
            FailureKind::ContextLengthExceeded => pb::FailureReason::ContextLengthExceeded,
            _ => pb::FailureReason::Unspecified,
        };
        let kind = match kind {
            FailureKind::InvalidRequest | FailureKind::ContextLengthExceeded => {
                pb::FailureKind::InvalidRequest
            }
            FailureKind::Overloaded => pb::FailureKind::Overloaded,
            FailureKind::Unavailable => pb::FailureKind::Unavailable,
            FailureKind::DeadlineExceeded => pb::FailureKind::DeadlineExceeded,
            FailureKind::Internal => pb::FailureKind::Internal,
        };
        Self { kind: kind as i32, message, reason: reason as i32 }
    }
}

impl From<pb::Failed> for GenerationFailure {
    fn from(failed: pb::Failed) -> Self {
        let kind = match failed.kind() {
            pb::FailureKind::InvalidRequest
                if failed.reason() == pb::FailureReason::ContextLengthExceeded =>
            {
                FailureKind::ContextLengthExceeded
            }
            pb::FailureKind::InvalidRequest => FailureKind::InvalidRequest,
            pb::FailureKind::Overloaded => FailureKind::Overloaded,
            pb::FailureKind::Unavailable => FailureKind::Unavailable,
            pb::FailureKind::DeadlineExceeded => FailureKind::DeadlineExceeded,
            pb::FailureKind::Internal | pb::FailureKind::Unspecified => FailureKind::Internal,
        };
        Self { kind, message: failed.message }
    }
}

impl From<FinishReason> for pb::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop | FinishReason::StopString(_) => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
        }
    }
}

impl From<pb::FinishReason> for FinishReason {
    fn from(reason: pb::FinishReason) -> Self {
        match reason {
            pb::FinishReason::Length => Self::Length,
            pb::FinishReason::Cancelled => Self::Cancelled,
            pb::FinishReason::Stop | pb::FinishReason::Unspecified => Self::Stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::{Message, Tool, ToolCall};
    use russet_wire::event::{Logprobs, PromptLogprobs, PromptToken, TokenLogprob};
    use russet_wire::prefix_mark::PrefixMark;
    use russet_wire::request::{DrySampling, RawPrompt, StructuredOutput};

    use super::*;

    #[test]
    fn every_event_survives_the_round_trip() {
        let failure = |kind| GenerationEvent::Failed(GenerationFailure { kind, message: "m".into() });
        for event in [
            GenerationEvent::Started { prompt_tokens: 7, emitted_tokens: 2 },
            GenerationEvent::Prompt {
                tokens: vec![
                    PromptToken { id: 1, bytes: vec![0xC3], logprobs: None },
                    PromptToken {
                        id: 2,
                        bytes: Vec::new(),
                        logprobs: Some(PromptLogprobs {
                            logprob: -1.5,
                            rank: 3,
                            top: vec![TokenLogprob { id: 5, bytes: vec![b'a'], logprob: -0.25 }],
                        }),
                    },
                ],
            },
            GenerationEvent::Token { id: 3, delta: Delta::text("é") },
            GenerationEvent::Token {
                id: 4,
                delta: Delta {
                    reasoning: "hm".into(),
                    text: "a".into(),
                    tool_calls: vec![ToolCall { id: "c1".into(), name: "f".into(), arguments: "{}".into() }],
                    logprobs: vec![Logprobs {
                        sampled: TokenLogprob { id: 4, bytes: vec![0xC3], logprob: -0.5 },
                        top: vec![TokenLogprob { id: 5, bytes: Vec::new(), logprob: -0.25 }],
                    }],
                },
            },
            GenerationEvent::Finished {
                reason: FinishReason::Length,
                usage: Usage { prompt_tokens: 7, completion_tokens: 9, cached_tokens: 5 },
            },
            GenerationEvent::Finished { reason: FinishReason::Stop, usage: Usage::default() },
            GenerationEvent::Finished { reason: FinishReason::StopString(0), usage: Usage::default() },
            GenerationEvent::Finished { reason: FinishReason::StopString(31), usage: Usage::default() },
            GenerationEvent::Finished { reason: FinishReason::Cancelled, usage: Usage::default() },
            failure(FailureKind::InvalidRequest),
            failure(FailureKind::ContextLengthExceeded),
            failure(FailureKind::Overloaded),
            failure(FailureKind::Unavailable),
            failure(FailureKind::DeadlineExceeded),
            failure(FailureKind::Internal),
        ] {
            assert_eq!(GenerationEvent::from(pb::GenerateEvent::from(event.clone())), event);
            for engine_microseconds in [None, Some(0), Some(u64::MAX)] {
                let event = EngineEvent { event: event.clone(), engine_microseconds };
                assert_eq!(EngineEvent::from(pb::GenerateEvent::from(event.clone())), event);
            }
        }
    }

    #[test]
    fn a_request_survives_the_round_trip() {
        let request = GenerationRequest {
            id: "r1".into(),
            messages: vec![Message {
                role: "assistant".into(),
                content: "hi".into(),
                reasoning: "hm".into(),
                tool_calls: vec![ToolCall { id: "c1".into(), name: "f".into(), arguments: "{}".into() }],
                tool_call_id: "c0".into(),
                name: "eve".into(),
            }],
            max_tokens: Some(5),
            sampling: Sampling {
                temperature: 0.5,
                top_p: 0.9,
                top_k: 4,
                min_p: 0.1,
                repetition_penalty: 1.1,
                presence_penalty: 0.2,
                frequency_penalty: -0.3,
                logit_bias: [(7, -100.0), (8, 0.5)].into(),
                typical_p: 0.9,
                xtc_probability: 0.5,
                xtc_threshold: 0.2,
                dry: Some(DrySampling {
                    multiplier: 0.8,
                    base: 1.5,
                    allowed_length: 3,
                    last_tokens: 64,
                    sequence_breakers: vec![";".into()],
                }),
                min_tokens: 3,
                seed: Some(1),
            },
            stop: vec!["\n".into()],
            ignore_eos: true,
            emitted: vec![4, 0, 4],
            priority: -3,
            deadline_milliseconds: Some(250),
            cache_salt: "team".into(),
            adapter: "pirate".into(),
            prefix_marks: vec![PrefixMark { key: u64::MAX, bytes: 9 }],
            tools: vec![Tool {
                name: "f".into(),
                description: Some(String::new()),
                parameters: Some(r#"{"type":"object"}"#.into()),
                strict: true,
            }],
            template_arguments: r#"{"enable_thinking":false}"#.into(),
            continue_final_message: true,
            single_tool_call: true,
            stop_token_ids: vec![9],
            tool_choice: ToolChoice::Named("f".into()),
            structured_output: Some(StructuredOutput::JsonObject),
            thinking_budget: Some(0),
            logprobs: Some(0),
            echo: true,
            prompt_logprobs: Some(0),
            raw_prompt: Some(RawPrompt::Text(String::new())),
            truncate_prompt_tokens: Some(7),
            context_overflow: ContextOverflow::Shift,
        };
        let returned = |request: &GenerationRequest| -> GenerationRequest {
            pb::GenerateRequest::from(request.clone()).into()
        };
        assert_eq!(returned(&request), request);
        for output in [
            StructuredOutput::JsonSchema("{}".into()),
            StructuredOutput::Regex("a".into()),
            StructuredOutput::Choice(vec!["a".into(), String::new()]),
            StructuredOutput::Grammar("start: \"a\"".into()),
        ] {
            let request = GenerationRequest {
                structured_output: Some(output),
                tool_choice: ToolChoice::Required,
                raw_prompt: Some(RawPrompt::Tokens(vec![0, 5])),
                context_overflow: ContextOverflow::Refuse,
                ..request.clone()
            };
            assert_eq!(returned(&request), request);
        }
    }
}
