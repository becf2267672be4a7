//! Tests of the log: which requests it has, and what of them.

use russet_crds::{ModelProviderSpec, ProviderModel, Zone};
use russet_wire::event::Usage;

use super::*;
use crate::routes::Provider;
use crate::zones::ZoneLimit;

fn id(shown: &str, unique: u32) -> RequestId {
    RequestId { unique: format!("{unique:024x}").into(), shown: shown.into() }
}

fn found(log: &RequestLog, id: &str) -> Option<String> {
    log.find(id, &Caller::Anonymous).map(|record| record.engine_id)
}

#[test]
fn a_record_of_one_attempt_has_room_for_no_more() {
    let log = RequestLog::default();
    let mut recorder = log.begin(&id("r", 1), &Caller::Anonymous, "openai");
    recorder.ran("Pipeline home/p", "home/run-1");
    let entry = log.slots[0].lock().clone().unwrap();
    // Ten thousand records are kept.
    assert_eq!(entry.record.lock().attempts.capacity(), 1);
    let bytes = size_of::<LogEntry>() + size_of::<AttemptRecord>();
    assert!(bytes <= 1024, "a record has {bytes} bytes without its texts");
    recorder.ran("Pipeline home/p", "home/run-2");
    assert_eq!(entry.record.lock().attempts.len(), 2);
}

#[test]
fn a_reported_cost_counts_where_nobody_knows_the_price() {
    let log = RequestLog::default();
    let spec = |price: &str| {
        let prices = format!(r#"{{"input": "{price}", "output": "0"}}"#);
        let models = vec![ProviderModel {
            name: "priced".into(),
            price_per_million_tokens: serde_json::from_str(&prices).ok(),
            ..ProviderModel::default()
        }];
        ModelProviderSpec { models, zone: Zone::Cloud, ..ModelProviderSpec::default() }
    };
    let provider = Provider { spec: spec("2"), ..Provider::default() };
    let limit = ZoneLimit::of_route(Zone::Cloud, "the route".into());
    let usage = Usage { prompt_tokens: 1_000_000, completion_tokens: 0, cached_tokens: 0 };
    for (number, (model, reported, expected)) in
        [("priced", Some("7"), Some("2")), ("other", Some("7"), Some("7")), ("other", None, None)]
            .into_iter()
            .enumerate()
    {
        let id = id("r", number as u32);
        let mut recorder = log.begin(&id, &Caller::Anonymous, "openai");
        recorder.left(&provider, model, &limit, 5);
        recorder.first_token();
        recorder.reported_cost(reported.map(|text| text.parse().unwrap()));
        recorder.finished(None, usage);
        let slot = log.slots[number].lock().clone().unwrap();
        let used = slot.completed().usage.unwrap();
        assert_eq!(used.cost, expected.map(|text| text.parse().unwrap()), "{model} {reported:?}");
    }
}

#[test]
fn ten_thousand_requests_are_kept_and_not_one_more() {
    let log = RequestLog::default();
    for number in 0..=MAX_REQUESTS as u32 {
        drop(log.begin(&id(&format!("r{number}"), number), &Caller::Anonymous, "openai"));
    }
    let kept = log.slots.iter().filter(|slot| slot.lock().is_some()).count();
    assert_eq!(kept, MAX_REQUESTS);
    assert_eq!((found(&log, "r0"), found(&log, "r1").is_some()), (None, true));
}

#[test]
fn a_request_is_found_by_every_id_that_its_client_sees() {
    let log = RequestLog::with_slots(4);
    let first = id("mine", 1);
    drop(log.begin(&first, &Caller::Anonymous, "openai"));
    drop(log.begin(&id("mine", 2), &Caller::Anonymous, "openai"));
    assert_eq!(found(&log, "mine"), Some(format!("{:024x}", 2)), "the newest");
    for word in ["", "req_", "chatcmpl-", "msg_"] {
        assert_eq!(found(&log, &format!("{word}{}", first.unique)), Some(first.unique.to_string()), "{word}");
    }
    for other in ["min", "", "x0", &first.unique[1..], &format!("a{}", first.unique)] {
        assert_eq!(found(&log, other), None, "{other}");
    }
}

#[test]
fn threads_that_begin_at_once_lose_no_request() {
    let log = RequestLog::with_slots(1000);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let log = &log;
            scope.spawn(move || {
                for number in 0..250 {
                    let id = id(&format!("{thread}-{number}"), thread * 250 + number);
                    drop(log.begin(&id, &Caller::Anonymous, "openai"));
                }
            });
        }
    });
    let all = (0..4).flat_map(|thread| (0..250).map(move |number| format!("{thread}-{number}")));
    assert_eq!(all.filter(|id| found(&log, id).is_none()).count(), 0);
}
