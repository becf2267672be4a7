//! What providers say of their limits, credits and costs: which of their models are left alone until when, that the next target
//! answers meanwhile, and that prices count whatever a provider reports.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use russet_crds::{ModelProviderSpec, ProviderApi, Zone};
use russet_gateway::audit::{AuditLog, AuditPeriod, UsageField, UsageTotal, usage};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, TEST_TIMEOUT, limits};
use crate::mock_provider::{MockProvider, ReceivedRequest, Reply, openai};
use crate::providers::{body, route, spec, text, why};

fn target(name: &str, model: &str) -> Value {
    json!({"providerRef": {"name": name}, "model": model})
}

const SECOND: SignedDuration = SignedDuration::from_secs(1);
const MINUTES: SignedDuration = SignedDuration::from_secs(600);

/// A time so many seconds from now.
fn in_seconds(seconds: i64) -> Timestamp {
    Timestamp::now() + SignedDuration::from_secs(seconds)
}

/// A whole answer in an API of a provider, with these headers.
fn answer(api: ProviderApi, headers: &[(&'static str, String)]) -> Reply {
    let events = match api {
        ProviderApi::Anthropic => [
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "limited"}}),
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
            json!({"type": "message_stop"}),
        ]
        .map(|event| event.to_string())
        .to_vec(),
        _ => openai(&["limited"]),
    };
    Reply::With(headers.to_vec(), Box::new(Reply::Events(events)))
}

#[tokio::test]
async fn nothing_left_of_a_limit_holds_until_its_reset() {
    type Headers = fn() -> Vec<(&'static str, String)>;
    let openrouter: Headers = || {
        vec![
            ("x-ratelimit-limit", "20".into()),
            ("x-ratelimit-remaining", "0".into()),
            ("x-ratelimit-reset", in_seconds(600).as_millisecond().to_string()),
        ]
    };
    let openai: Headers = || {
        vec![("x-ratelimit-remaining-requests", "0".into()), ("x-ratelimit-reset-requests", "10m0s".into())]
    };
    let anthropic: Headers = || {
        vec![
            ("anthropic-ratelimit-requests-remaining", "0".into()),
            ("anthropic-ratelimit-requests-reset", in_seconds(600).to_string()),
        ]
    };
    for (api, headers, models) in [
        (ProviderApi::OpenAI, openrouter, "this model is"),
        (ProviderApi::OpenAI, openai, "this model is"),
        (ProviderApi::Anthropic, anthropic, "this model is"),
    ] {
        let lab = GatewayLab::start(limits()).await;
        let limited = MockProvider::start(move |_| answer(api, &headers())).await;
        let other = MockProvider::saying("other").await;
        let mut object = limited.object("limited", Zone::Local);
        object.spec.api = api;
        let targets = json!([target("limited", "m"), target("other", "m")]);
        route(&lab, &[object.clone(), other.object("other", Zone::Local)], spec("Local", targets.clone()));
        let begin = Timestamp::now();
        let ask = async |id: &str| {
            let chat = json!({"model": "auto", "messages": [{"role": "user", "content": "hi"}]});
            let call =
                lab.client.post(lab.url("/v1/chat/completions")).json(&chat).header("x-request-id", id);
            let (status, answer) = body(call).await;
            assert_eq!(status, 200, "{answer}");
            text(&answer).to_owned()
        };
        assert_eq!(ask("first").await, "limited");
        for id in ["second", "third"] {
            assert_eq!(ask(id).await, "other", "{models}");
        }
        assert_eq!(limited.asked().len(), 1, "{models}");
        let record = why(&lab, "third").await;
        let [skipped] = &record.skipped[..] else { panic!("{:?}", record.skipped) };
        assert_eq!((skipped.provider.as_str(), skipped.model.as_str()), ("default/limited", "m"));
        let reason = &skipped.reason;
        assert!(reason.starts_with("nothing of its rate limit remains until 20"), "{reason}");
        assert!(reason.ends_with(&format!("{models} left alone until then")), "{reason}");
        assert_eq!(record.attempts.len(), 1);
        // The end is that of the limit, which is 600 s after the answer.
        let until = reason.split_whitespace().find_map(|word| word.trim_end_matches(',').parse().ok());
        let until: Timestamp = until.unwrap();
        assert!(begin + MINUTES - SECOND <= until && until <= Timestamp::now() + MINUTES, "{reason}");
        // Whoever edits the provider, such as after its plan has changed, makes it start anew.
        object.generation = Some(2);
        route(&lab, &[object, other.object("other", Zone::Local)], spec("Local", targets));
        assert_eq!(ask("fourth").await, "limited", "{models}");
        assert_eq!(limited.asked().len(), 2, "{models}");
    }
}

#[tokio::test]
async fn credits_are_asked_in_the_wake_of_requests() {
    let key_has = |remaining: &'static str| {
        move |asked: &ReceivedRequest| match asked.path.ends_with("/key") {
            true => Reply::Status(200, None, remaining),
            false => answer(ProviderApi::OpenAI, &[]),
        }
    };
    let lab = GatewayLab::start(limits()).await;
    let spent = MockProvider::start(key_has(r#"{"data": {"limit": 5, "limit_remaining": -0.01}}"#)).await;
    let rich = MockProvider::start(key_has(r#"{"data": {"limit": 5, "limit_remaining": 4.5}}"#)).await;
    let unasked = MockProvider::saying("other").await;
    let mut objects = [spent.object("spent", Zone::Local), rich.object("rich", Zone::Local)];
    for object in &mut objects {
        object.spec.credits_interval_seconds = Some(60);
    }
    let [first, second] = objects;
    let objects = [first, second, unasked.object("unasked", Zone::Local)];
    let names = |provider: &MockProvider| {
        let keys = provider.asked().into_iter().filter(|asked| asked.path == "/v1/key");
        keys.map(|asked| (asked.headers.contains_key("authorization"), asked.body)).collect::<Vec<_>>()
    };
    let ask = async |model: &str| {
        let (status, answer) = body(lab.chat(json!({"model": "auto", "max_tokens": 9}))).await;
        assert_eq!(status, 200, "{model}: {answer}");
        text(&answer).to_owned()
    };
    route(&lab, &objects, spec("Local", json!([target("spent", "m"), target("unasked", "m")])));
    assert!(spent.asked().is_empty() && rich.asked().is_empty(), "nobody has sent a request yet");
    // Nothing is left of the key, so the next target answers as soon as the gateway knows.
    let known = async {
        while ask("spent").await != "other" {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, known).await.expect("the gateway reads the credits");
    assert_eq!(names(&spent), [(false, Value::Null)], "it is asked once");
    // Free models cost nothing.
    route(&lab, &objects, spec("Local", json!([target("spent", "m:free"), target("unasked", "m")])));
    assert_eq!(ask("free").await, "limited");
    // One that has some goes on, and who has no interval is asked nothing else.
    route(&lab, &objects, spec("Local", json!([target("rich", "m"), target("unasked", "m")])));
    let asked = async {
        while names(&rich).is_empty() {
            assert_eq!(ask("rich").await, "limited");
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, asked).await.expect("the gateway asks for the credits");
    assert_eq!(ask("rich").await, "limited");
    assert!(unasked.asked().iter().all(|asked| asked.path == "/v1/chat/completions"));
}

#[tokio::test]
async fn tokens_that_an_answer_spent_hold_nobody() {
    let lab = GatewayLab::start(limits()).await;
    let spent = || {
        let openai =
            [("x-ratelimit-remaining-tokens", "0".into()), ("x-ratelimit-reset-tokens", "10m0s".into())];
        let anthropic = [
            ("anthropic-ratelimit-output-tokens-remaining", "0".into()),
            ("anthropic-ratelimit-output-tokens-reset", in_seconds(600).to_string()),
        ];
        [openai, anthropic].concat()
    };
    let provider = MockProvider::start(move |asked| match asked.body["max_tokens"].as_u64() {
        Some(64_000) => Reply::With(spent(), Box::new(Reply::Status(429, None, "{}"))),
        _ => answer(ProviderApi::OpenAI, &spent()),
    })
    .await;
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", json!([target("p", "m")])));
    for _ in 0..3 {
        let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
        assert_eq!((status, text(&answer)), (200, "limited"), "{answer}");
    }
    // One that is refused for them does.
    for asked in [4, 4] {
        let (status, answer) = body(lab.chat(json!({"model": "auto", "max_tokens": 64_000}))).await;
        assert_eq!((status, provider.asked().len()), (429, asked), "{answer}");
    }
}

#[tokio::test]
async fn one_request_tries_a_model_after_its_pause() {
    let lab = GatewayLab::start(limits()).await;
    let count = AtomicUsize::new(0);
    let spent = [("x-ratelimit-remaining", "0".to_owned()), ("x-ratelimit-reset", "0.1".to_owned())];
    let limited = MockProvider::start(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        0 => answer(ProviderApi::OpenAI, &spent),
        // Those that try it hear nothing.
        1 | 2 => Reply::Stall(Vec::new()),
        _ => answer(ProviderApi::OpenAI, &[]),
    })
    .await;
    let other = MockProvider::saying("other").await;
    let objects = [limited.object("limited", Zone::Local), other.object("other", Zone::Local)];
    route(&lab, &objects, spec("Local", json!([target("limited", "m"), target("other", "m")])));
    let ask = |id: &str| {
        let call = body(lab.chat(json!({"model": "auto"})).header("x-request-id", id));
        async move {
            let (status, answer) = call.await;
            assert_eq!(status, 200, "{answer}");
            text(&answer).to_owned()
        }
    };
    assert_eq!(ask("first").await, "limited");
    // Until the pause ends the other one answers, and then one request tries the limited one.
    let begun = async || loop {
        let mut trial = tokio::spawn(ask("trial"));
        tokio::select! {
            answer = &mut trial => assert_eq!(answer.unwrap(), "other"),
            () = limited.running(1) => break trial,
        }
    };
    let trial = begun().await;
    let several = ["a", "b", "c", "d"].map(|id| tokio::spawn(ask(id)));
    for one in several {
        assert_eq!(one.await.unwrap(), "other");
    }
    assert_eq!(limited.asked().len(), 2, "one request tried it");
    let [skipped] = &why(&lab, "a").await.skipped[..] else { panic!("one target was left out") };
    assert_eq!(skipped.reason, "it was left alone, and one request tries whether it answers again");
    // Its client goes, and another request tries it.
    trial.abort();
    limited.running(0).await;
    let trial = begun().await;
    assert_eq!(limited.asked().len(), 3);
    // Where there is nothing else, it is better than an error. It answers: all may follow.
    route(&lab, &objects, spec("Local", json!([target("limited", "m")])));
    assert_eq!(ask("alone").await, "limited");
    route(&lab, &objects, spec("Local", json!([target("limited", "m"), target("other", "m")])));
    for id in ["e", "f"] {
        assert_eq!(ask(id).await, "limited");
    }
    trial.abort();
}

#[tokio::test]
async fn headers_that_say_nonsense_hold_nobody() {
    let lab = GatewayLab::start(limits()).await;
    for (number, headers) in [
        vec![("x-ratelimit-remaining", "0")],
        vec![("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "soon")],
        vec![("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "-1")],
        vec![("x-ratelimit-remaining", "-3"), ("x-ratelimit-reset", "60")],
        vec![("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-reset-tokens", "NaNs")],
        vec![
            ("anthropic-ratelimit-tokens-remaining", "0"),
            ("anthropic-ratelimit-tokens-reset", "2001-01-01"),
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let headers: Vec<(&'static str, String)> =
            headers.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
        let shown = format!("{headers:?}");
        let provider = MockProvider::start(move |_| answer(ProviderApi::OpenAI, &headers)).await;
        let name = format!("p{number}");
        route(&lab, &[provider.object(&name, Zone::Local)], spec("Local", json!([target(&name, "m")])));
        for _ in 0..2 {
            let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
            assert_eq!(status, 200, "{shown}: {answer}");
        }
    }
}

#[tokio::test]
async fn limits_of_free_models_hold_free_models_alone() {
    let lab = GatewayLab::start(limits()).await;
    // As OpenRouter refuses: the headers are in the body too.
    let refusal = r#"{"error": {"message": "Rate limit exceeded: free-models-per-day", "code": 429, "metadata":
        {"headers": {"X-RateLimit-Limit": "50", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "36000"}}}}"#;
    let provider = MockProvider::start(move |asked| match asked.body["model"].as_str() {
        Some(model) if model.ends_with(":free") => Reply::Status(429, None, refusal),
        _ => Reply::Events(openai(&["paid"])),
    })
    .await;
    let targets = json!([target("p", "a:free"), target("p", "b:free"), target("p", "big")]);
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", targets));
    for id in ["first", "second"] {
        let (status, answer) = body(lab.chat(json!({"model": "auto"})).header("x-request-id", id)).await;
        assert_eq!((status, text(&answer)), (200, "paid"), "{answer}");
    }
    // One free model was asked once: its limit is that of the other one too.
    let asked: Vec<Value> = provider.asked().iter().map(|asked| asked.body["model"].clone()).collect();
    assert_eq!(asked, ["a:free", "big", "big"]);
    let skipped = why(&lab, "second").await.skipped;
    let models: Vec<&str> = skipped.iter().map(|one| one.model.as_str()).collect();
    assert_eq!(models, ["a:free", "b:free"]);
    assert!(skipped.iter().all(|one| one.reason.contains("free models are left alone")), "{skipped:?}");
    // Nothing but free models: the client may try again.
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", json!([target("p", "b:free")])));
    let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 429, "{answer}");
    assert!(message.contains("nothing of its rate limit remains until"), "{message}");
    // When that may help, it is told.
    let response = lab.chat(json!({"model": "auto"})).send().await.unwrap();
    let seconds: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((35_000..=36_000).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn without_credits_free_models_are_asked_and_others_not() {
    let lab = GatewayLab::start(limits()).await;
    let provider = MockProvider::start(|asked| match asked.body["model"].as_str() {
        Some(model) if model.ends_with(":free") => Reply::Events(openai(&["free"])),
        _ => Reply::Status(402, None, r#"{"error": {"message": "Insufficient credits", "code": 402}}"#),
    })
    .await;
    let targets = json!([target("p", "big"), target("p", "bigger"), target("p", "small:free")]);
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", targets));
    for id in ["first", "second"] {
        let (status, answer) = body(lab.chat(json!({"model": "auto"})).header("x-request-id", id)).await;
        assert_eq!((status, text(&answer)), (200, "free"), "{answer}");
    }
    let asked: Vec<Value> = provider.asked().iter().map(|asked| asked.body["model"].clone()).collect();
    assert_eq!(asked, ["big", "small:free", "small:free"]);
    let skipped = why(&lab, "second").await.skipped;
    assert_eq!(skipped.len(), 2, "{skipped:?}");
    assert!(skipped.iter().all(|one| one.reason.contains("it has no credits")), "{skipped:?}");
    // Alone it says so.
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", json!([target("p", "big")])));
    let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!((status, &answer["error"]["code"]), (502, &json!("provider_failed")), "{answer}");
    assert!(
        message.contains("it has no credits, and models that are not free are left alone until"),
        "{message}"
    );
    assert_eq!(provider.asked().len(), 3);
}

#[tokio::test]
async fn a_402_of_one_request_stops_no_other() {
    const DEAR: &str = r#"{"error": {"code": 402, "message":
        "This request requires more credits, or fewer max_tokens. You requested up to 64000 tokens, but can only afford 100."}}"#;
    const RESERVED: &str = r#"{"error": {"code": 402, "message": "Try again", "metadata": {"limit_source": "openrouter_in_flight_budget"}}}"#;
    let lab = GatewayLab::start(limits()).await;
    let provider = MockProvider::start(|asked| match asked.body["max_tokens"].as_u64() {
        Some(64_000) => Reply::Status(402, None, DEAR),
        Some(1000) => Reply::Status(402, None, RESERVED),
        Some(999) => Reply::Status(402, Some(("retry-after", "1")), r#"{"error": {"message": "Later"}}"#),
        _ => Reply::Events(openai(&["paid"])),
    })
    .await;
    let targets = json!([target("p", "big"), target("p", "bigger")]);
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", targets));
    for tokens in [64_000, 1000] {
        let (status, answer) = body(lab.chat(json!({"model": "auto", "max_tokens": tokens}))).await;
        assert_eq!(status, 502, "{tokens}: {answer}");
        let (status, answer) = body(lab.chat(json!({"model": "auto", "max_tokens": 10}))).await;
        assert_eq!((status, text(&answer)), (200, "paid"), "{tokens}: {answer}");
    }
    // With a time it is as a 429.
    let (status, answer) = body(lab.chat(json!({"model": "auto", "max_tokens": 999}))).await;
    assert_eq!(status, 429, "{answer}");
}

#[tokio::test]
async fn prices_count_and_not_what_a_provider_reports() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_audited(limits(), AuditLog::open(folder.path()).unwrap()).await;
    let saying = |cost: Value| {
        MockProvider::start(move |_| {
            let mut events = openai(&["far"]);
            let at = events.len() - 2;
            let usage = json!({"prompt_tokens": 10, "completion_tokens": 2, "cost": cost});
            events[at] = json!({"choices": [], "usage": usage}).to_string();
            Reply::Events(events)
        })
    };
    // In the house the price is nothing, unless one is written.
    let (claims, priced) = (saying(json!(0.5)).await, saying(json!(-3)).await);
    let mut object = priced.object("priced", Zone::Local);
    let models = json!([{
        "name": "*", "pricePerMillionTokens": {"input": "1", "output": "10"}, "pricePerRequest": "0.01",
    }]);
    object.spec = ModelProviderSpec { models: serde_json::from_value(models).unwrap(), ..object.spec };
    for (object, name) in [(claims.object("claims", Zone::Local), "claims"), (object, "priced")] {
        route(&lab, &[object], spec("Local", json!([target(name, "m")])));
        assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "far");
    }
    let read = || {
        let (fields, zone) = ([UsageField::Provider], jiff::tz::TimeZone::UTC);
        usage(folder.path(), &AuditPeriod::default(), &fields, &zone, None).unwrap().totals
    };
    let ended = async {
        while read().values().map(|total| total.requests).sum::<u64>() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, ended).await.unwrap();
    let costs: BTreeMap<String, String> =
        read().into_iter().map(|(key, UsageTotal { cost, .. })| (key.concat(), cost.to_string())).collect();
    let expected = [("default/claims", "0.00"), ("default/priced", "0.01003")];
    assert_eq!(costs, BTreeMap::from(expected.map(|(name, cost)| (name.to_owned(), cost.to_owned()))));
}
