//! Structured output, log-probabilities and budgets of thinking, of real engines with random weights: a model that knows
//! no schema writes JSON of it all the same, the same on every split, and resumed after any token.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;
#[path = "support/share.rs"]
mod share;

use futures::stream::{self, StreamExt as _};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_wire::engine_options::Speculation;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, Logprobs};
use russet_wire::request::{GenerationRequest, Sampling, StructuredOutput};
use serde_json::{Map, Value, json};

use engines::{EngineHarness, ask, collect, next, say};

/// Random schemas; a run of CI has a tenth.
const SCHEMAS: usize = 1000;
/// Requests at the same time.
const STREAMS: usize = 8;

fn asks(output: StructuredOutput, temperature: f32, seed: u64) -> GenerationRequest {
    GenerationRequest {
        structured_output: Some(output),
        max_tokens: Some(2000),
        sampling: Sampling { temperature, seed: Some(seed), ..Sampling::default() },
        ..say("a form, please")
    }
}

fn schema(schema: &Value) -> StructuredOutput {
    StructuredOutput::JsonSchema(schema.to_string())
}

/// A schema of bounded size, whose instances are bounded too.
fn random_schema(random: &mut StdRng, depth: u32) -> Value {
    match random.random_range(0..if depth == 0 { 7 } else { 11 }) {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 => {
            let least = random.random_range(-50..50);
            json!({"type": "integer", "minimum": least, "maximum": least + random.random_range(0..2000)})
        }
        3 => {
            let least = random.random_range(0..4);
            json!({"type": "string", "minLength": least, "maxLength": least + random.random_range(0..8)})
        }
        4 => {
            let values = [json!("a"), json!(1), Value::Null, json!("é\n\""), json!([true])];
            json!({"enum": values[..random.random_range(1..6)]})
        }
        5 => json!({"type": "string", "pattern": "^[a-z]{1,3}-[0-9]{2}$"}),
        6 => json!({"const": random.random_range(0..99)}),
        7 => {
            let least = random.random_range(0..3);
            json!({"type": "array", "items": random_schema(random, depth - 1), "minItems": least,
                   "maxItems": least + random.random_range(0..3)})
        }
        8 => json!({"anyOf": [random_schema(random, depth - 1), random_schema(random, depth - 1)]}),
        _ => {
            let names: Vec<String> = (0..random.random_range(0..5))
                .map(|at| format!("p{at}{}", ["", "é", " \""][at % 3]))
                .collect();
            let properties: Map<String, Value> =
                names.iter().map(|name| (name.clone(), random_schema(random, depth - 1))).collect();
            let required: Vec<&String> = names.iter().filter(|_| random.random_bool(0.6)).collect();
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    }
}

/// Whether a value is one of a random schema: each keyword by itself, and none passed over.
fn is_valid(value: &Value, schema: &Value) -> bool {
    schema.as_object().unwrap().iter().all(|(keyword, wanted)| {
        let number = |value: &Value| value.as_i64().unwrap();
        match (keyword.as_str(), value) {
            ("type", value) => match wanted.as_str().unwrap() {
                "null" => value.is_null(),
                "boolean" => value.is_boolean(),
                "integer" => value.is_i64(),
                "string" => value.is_string(),
                "array" => value.is_array(),
                "object" => value.is_object(),
                other => panic!("type {other}"),
            },
            ("const", value) => value == wanted,
            ("enum", value) => wanted.as_array().unwrap().contains(value),
            ("anyOf", value) => wanted.as_array().unwrap().iter().any(|one| is_valid(value, one)),
            ("minimum", value) => number(value) >= number(wanted),
            ("maximum", value) => number(value) <= number(wanted),
            ("minLength", Value::String(text)) => text.chars().count() as i64 >= number(wanted),
            ("maxLength", Value::String(text)) => text.chars().count() as i64 <= number(wanted),
            ("pattern", Value::String(text)) => {
                let (letters, digits) = text.split_once('-').unwrap_or_default();
                (1..=3).contains(&letters.len())
                    && letters.bytes().all(|byte| byte.is_ascii_lowercase())
                    && digits.len() == 2
                    && digits.bytes().all(|byte| byte.is_ascii_digit())
            }
            ("items", Value::Array(items)) => items.iter().all(|item| is_valid(item, wanted)),
            ("minItems", Value::Array(items)) => items.len() as i64 >= number(wanted),
            ("maxItems", Value::Array(items)) => items.len() as i64 <= number(wanted),
            ("properties", Value::Object(fields)) => fields
                .iter()
                .all(|(name, value)| wanted.get(name).is_some_and(|schema| is_valid(value, schema))),
            ("required", Value::Object(fields)) => {
                wanted.as_array().unwrap().iter().all(|name| fields.contains_key(name.as_str().unwrap()))
            }
            ("additionalProperties", Value::Object(_)) => wanted == false,
            // Of another type, which `type` finds.
            _ => false,
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_weights_write_json_of_any_schema() {
    let model = model::random_model_dir();
    let mut lab = EngineHarness::new();
    lab.config.max_sequences = STREAMS as u32;
    let engines = lab.start(model.path(), &[model::LAYERS]);
    let client = lab.client(&engines[0]).await;
    let mut random = StdRng::seed_from_u64(30);
    let schemas: Vec<(usize, Value)> =
        (0..SCHEMAS).map(|_| random_schema(&mut random, 3)).enumerate().collect();
    let schemas = share::of_this_run(schemas, 10);
    let count = schemas.len();
    let answered = stream::iter(schemas).map(|(at, wanted)| {
        let mut client = client.clone();
        async move {
            // Half of them greedy: such a model repeats what it may.
            let temperature = if at % 2 == 0 { 0.0 } else { 1.0 };
            let mut events = ask(&mut client, asks(schema(&wanted), temperature, at as u64)).await;
            let (ids, text, end) = collect(&mut events).await;
            let stopped = matches!(end, GenerationEvent::Finished { reason: FinishReason::Stop, .. });
            assert!(stopped, "{at}: {end:?} after {text:?} of {wanted}");
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{at}: {error}: {text:?} of {wanted}"));
            assert!(is_valid(&value, &wanted), "{at}: {text} is none of {wanted}");
            ids.len()
        }
    });
    let tokens: usize = answered.buffer_unordered(STREAMS).fold(0, async |sum, count| sum + count).await;
    println!("{count} schemas, {tokens} tokens, each response valid JSON of its schema");
    assert!(count >= SCHEMAS / 10);
}

/// One of each constraint, with and without temperature.
fn questions() -> Vec<GenerationRequest> {
    let form = json!({"type": "object", "additionalProperties": false, "required": ["name", "tags"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3}}});
    let choice = StructuredOutput::Choice(vec!["yes".into(), "no".into(), "perhaps".into()]);
    let lark = StructuredOutput::Grammar("start: \"the \" NAME \" the \" NAME\nNAME: /[a-z]{1,9}/".into());
    let regex = StructuredOutput::Regex("(la ){6}[0-9]{2,4}".into());
    [schema(&form), choice, lark, regex]
        .into_iter()
        .flat_map(|output| [asks(output.clone(), 0.0, 1), asks(output, 0.9, 2)])
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn structured_output_is_the_same_on_every_split() {
    let model = model::random_model_dir();
    let mut lab = EngineHarness::new();
    let mut answers: Vec<Vec<(Vec<u32>, String)>> = Vec::new();
    for (layers, members, speculation) in [
        (&[model::LAYERS][..], 1, Speculation::Off),
        (&[model::LAYERS], 1, Speculation::PromptLookup),
        (&[1, 3], 1, Speculation::PromptLookup),
        (&[model::LAYERS], 2, Speculation::PromptLookup),
        (&[3, 1], 2, Speculation::Off),
    ] {
        lab.config.options.speculation = speculation;
        let engines = lab.start_stages(model.path(), layers, members);
        let mut client = lab.client(&engines[0]).await;
        let mut streams = Vec::new();
        for question in questions() {
            streams.push(ask(&mut client, question).await);
        }
        let mut group = Vec::new();
        for mut events in streams {
            let (ids, text, end) = collect(&mut events).await;
            assert!(
                matches!(end, GenerationEvent::Finished { reason: FinishReason::Stop, .. }),
                "{end:?}: {text}"
            );
            group.push((ids, text));
        }
        if answers.is_empty() {
            // Resumed after any token; those of one response alone are not many.
            for (question, (ids, text)) in questions().into_iter().zip(&group).step_by(3) {
                for cut in (1..ids.len()).step_by(9) {
                    let emitted = ids[..cut].to_vec();
                    let mut events =
                        ask(&mut client, GenerationRequest { emitted, ..question.clone() }).await;
                    let (rest, _, end) = collect(&mut events).await;
                    assert_eq!(rest, ids[cut..], "{text:?} after {cut} tokens: {end:?}");
                }
            }
        }
        answers.push(group);
    }
    for (number, group) in answers.iter().enumerate() {
        assert_eq!(group, &answers[0], "group {number}");
    }
    let texts: Vec<&str> = answers[0].iter().map(|(_, text)| text.as_str()).collect();
    println!("{texts:#?}");
    assert!(["yes", "no", "perhaps"].contains(&texts[2]), "{texts:?}");
    assert!(texts[4].starts_with("the ") && texts[6].starts_with("la la la "), "{texts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_enforced_is_refused_before_it_runs() {
    let model = model::random_model_dir();
    let lab = EngineHarness::new();
    let engines = lab.start(model.path(), &[model::LAYERS]);
    let mut client = lab.client(&engines[0]).await;
    for (output, expected) in [
        (schema(&json!({"not": {}})), "Unimplemented keys: [\"not\"]"),
        (StructuredOutput::Regex("[".into()), "the regular expression is not supported"),
        (StructuredOutput::Choice(Vec::new()), "the choice is not supported"),
    ] {
        let mut events = ask(&mut client, asks(output, 0.0, 1)).await;
        match next(&mut events).await {
            Some(GenerationEvent::Failed(failure)) => {
                assert_eq!(failure.kind, FailureKind::InvalidRequest);
                assert!(failure.message.contains(expected), "{}", failure.message);
            }
            other => panic!("{other:?}"),
        }
    }
    // A response that left its grammar is none of this request's.
    let emitted = "yex".bytes().map(u32::from).collect();
    let choice = asks(StructuredOutput::Choice(vec!["yes".into(), "no".into()]), 0.0, 1);
    let mut events = ask(&mut client, GenerationRequest { emitted, ..choice }).await;
    let Some(GenerationEvent::Failed(failure)) = next(&mut events).await else { panic!("it goes on") };
    assert!(failure.message.contains("left its grammar at token 2"), "{}", failure.message);
}

/// The log-probabilities of each token of a response.
async fn logprobs(
    lab: &EngineHarness,
    engine: &engines::TestEngine,
    request: GenerationRequest,
) -> Vec<Logprobs> {
    let mut client = lab.client(engine).await;
    let mut events = ask(&mut client, request).await;
    let mut all = Vec::new();
    while let Some(event) = next(&mut events).await {
        match event {
            GenerationEvent::Token { id, delta } => {
                assert_eq!(delta.logprobs.len(), 1, "of one token");
                assert_eq!(delta.logprobs[0].sampled.id, id);
                all.extend(delta.logprobs);
            }
            GenerationEvent::Failed(failure) => panic!("{failure:?}"),
            GenerationEvent::Started { .. }
            | GenerationEvent::Prompt { .. }
            | GenerationEvent::Finished { .. } => {}
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_are_of_the_model_whatever_is_sampled() {
    let model = model::random_model_dir();
    let lab = EngineHarness::new();
    let ask = |sampling: Sampling, top: u32| GenerationRequest {
        logprobs: Some(top),
        ignore_eos: true,
        sampling,
        ..say("hello")
    };
    let (greedy, penalised) =
        (Sampling::default(), Sampling { repetition_penalty: 2.0, ..Sampling::default() });
    let biased = Sampling { logit_bias: [(77, 100.0)].into(), ..Sampling::default() };
    let mut groups = Vec::new();
    for layers in [&[model::LAYERS][..], &[2, 2]] {
        let engines = lab.start(model.path(), layers);
        let plain = logprobs(&lab, &engines[0], ask(greedy.clone(), 260)).await;
        assert_eq!(plain.len(), 32);
        for Logprobs { sampled, top } in &plain {
            let mass: f64 = top.iter().map(|token| f64::from(token.logprob).exp()).sum();
            assert!((mass - 1.0).abs() < 1e-4, "all tokens together are {mass}");
            assert!(top.is_sorted_by(|a, b| a.logprob >= b.logprob), "the most probable first");
            // The end token is banned here, and may be the most probable one.
            let best = top.iter().find(|token| token.id != model::END).unwrap();
            assert_eq!((best.id, best.logprob), (sampled.id, sampled.logprob));
            let byte = u8::try_from(sampled.id).ok();
            assert!(byte.is_none_or(|byte| sampled.bytes == [byte]), "{sampled:?}");
        }
        // Other rows of the batch ask for other numbers, and a bias changes what is sampled alone.
        let few = logprobs(&lab, &engines[0], ask(penalised.clone(), 3)).await;
        assert!(few.iter().all(|one| one.top.len() == 3));
        assert_eq!(few[0].top[..], plain[0].top[..3], "before the penalty");
        let none = logprobs(&lab, &engines[0], ask(biased.clone(), 0)).await;
        assert!(none.iter().all(|one| one.top.is_empty() && one.sampled.id == 77));
        let of_biased = plain[0].top.iter().find(|token| token.id == 77).unwrap();
        assert_eq!(&none[0].sampled, of_biased, "of the model, not of the bias");
        groups.push((plain, few, none));
    }
    let [one, pipeline] = &groups[..] else { panic!("two groups") };
    for (ours, theirs) in [(&one.0, &pipeline.0), (&one.1, &pipeline.1), (&one.2, &pipeline.2)] {
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            let differ = (ours.sampled.logprob - theirs.sampled.logprob).abs();
            assert!(ours.sampled.id == theirs.sampled.id && differ < 1e-4, "{ours:?} {theirs:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thinking_ends_at_its_budget_and_structured_output_follows() {
    let model = model::random_model_dir();
    let template = "<|begin|>{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|><think>\n{# </think> #}";
    std::fs::write(model.path().join("chat_template.jinja"), template).unwrap();
    let lab = EngineHarness::new();
    let engines = lab.start(model.path(), &[model::LAYERS]);
    let mut client = lab.client(&engines[0]).await;
    for (budget, output) in [
        (0, None),
        (1, None),
        (20, None),
        (5, Some(StructuredOutput::Choice(vec!["yes".into(), "no".into()]))),
        (0, Some(schema(&json!({"type": "boolean"})))),
    ] {
        let is_structured = output.is_some();
        let request = GenerationRequest {
            thinking_budget: Some(budget),
            structured_output: output,
            max_tokens: Some(60),
            ..say("think")
        };
        let mut whole: Option<Vec<u32>> = None;
        // Alone, then resumed after some tokens, in the middle of the forced ones too.
        for cut in [0, budget / 2, budget, budget + 3, budget + 9] {
            let emitted = whole.as_ref().map(|ids| ids[..(cut as usize).min(ids.len() - 1)].to_vec());
            let emitted = emitted.unwrap_or_default();
            let resumed = emitted.len();
            let mut events =
                ask(&mut client, GenerationRequest { emitted: emitted.clone(), ..request.clone() }).await;
            let (mut ids, mut reasoning, mut text) = (emitted, String::new(), String::new());
            while let Some(event) = next(&mut events).await {
                match event {
                    GenerationEvent::Token { id, delta } => {
                        ids.push(id);
                        reasoning.push_str(&delta.reasoning);
                        text.push_str(&delta.text);
                    }
                    GenerationEvent::Failed(failure) => panic!("{failure:?}"),
                    GenerationEvent::Started { .. }
                    | GenerationEvent::Prompt { .. }
                    | GenerationEvent::Finished { .. } => {}
                }
            }
            let begin = budget as usize;
            let marker: Vec<u32> = "</think>".bytes().map(u32::from).collect();
            assert_eq!(ids[begin..begin + marker.len()], marker, "after {budget} tokens of thinking");
            if resumed == 0 {
                assert!(reasoning.len() <= 3 * begin, "{reasoning:?}");
                assert!(
                    !is_structured || ["yes", "no", "true", "false"].contains(&text.as_str()),
                    "{text:?}"
                );
            }
            assert_eq!(whole.get_or_insert_with(|| ids.clone()), &ids, "resumed after {resumed}");
        }
    }
}
