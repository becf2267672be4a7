//! Requests of the inbox whose gateway ends before they do: killed, or asked to stop.

use super::*;

/// Changes the inbox of a gateway that does not run.
fn change(folder: &Path, sql: &str) {
    let database = rusqlite::Connection::open(folder.join("responses.db")).unwrap();
    database.busy_timeout(TEST_TIMEOUT).unwrap();
    assert_eq!(database.execute(sql, []).unwrap(), 1);
}

/// The id of a request that ran when its gateway was killed.
async fn killed(folder: &Path, request: impl FnOnce(RequestBuilder) -> RequestBuilder) -> String {
    let lab = GatewayLab::start_in(folder).await;
    let engine = lab.only_engine(vec![ScriptStep::Prepare]);
    let id = accepted(request(lab.chat(json!({}))).respond_async()).await;
    engine.running(1).await;
    lab.kill().await;
    id
}

#[tokio::test]
async fn a_request_that_ran_runs_again() {
    let folder = tempfile::tempdir().unwrap();
    let id = killed(folder.path(), |request| request.key("k")).await;
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let done = lab.inbox_is(&id, "done").await;
    assert_eq!((&done["attempts"], engine.requests()), (&json!(2), 1));
    let answer = lab.inbox_answer(&id).await;
    lab.kill().await;
    // It ended once: the next gateway has nothing to do, and knows the key.
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(vec![ScriptStep::Hang]);
    assert_eq!(answered(lab.chat(json!({})).key("k")).await, (200, true, answer));
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_client_that_waited_finds_its_answer_by_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(vec![ScriptStep::Prepare]);
    let asked = tokio::spawn(lab.chat(json!({})).key("k").send());
    engine.running(1).await;
    lab.kill().await;
    assert!(asked.await.unwrap().is_err());
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    wait_for_metric(&lab, "russet_gateway_inbox_request_total{outcome=\"done\"} 1").await;
    let answer = answered(lab.chat(json!({})).key("k")).await;
    assert!(answer.1 && answer.2.contains("Hello there"), "{answer:?}");
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn a_stream_that_a_client_read_does_not_run_again_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_in(folder.path()).await;
    let _engine = lab.only_engine(vec![started(), token("Hello"), ScriptStep::Hang]);
    let response = lab.chat(json!({"stream": true})).key("k").send().await.unwrap();
    let id = response.headers()["x-russet-inbox-id"].to_str().unwrap().to_owned();
    let mut body = response.bytes_stream();
    assert!(body.next().await.unwrap().is_ok());
    lab.kill().await;
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let failed = lab.inbox_is(&id, "failed").await;
    assert_eq!(failed["response"]["body"]["error"]["code"], "engine_lost", "{failed}");
    assert_eq!(engine.requests(), 0);
    // Its client decides.
    let again = answered(lab.chat(json!({"stream": true})).key("k")).await;
    assert!(!again.1 && again.2.contains("there") && engine.requests() == 1, "{again:?}");
}

#[tokio::test]
async fn a_request_that_ends_the_gateway_each_time_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let mut id = String::new();
    for attempt in 1..=5 {
        let lab = GatewayLab::start_in(folder.path()).await;
        let engine = lab.only_engine(vec![ScriptStep::Prepare]);
        if attempt == 1 {
            id = accepted(lab.chat(json!({})).respond_async()).await;
        }
        engine.running(1).await;
        assert_eq!(lab.inbox_is(&id, "leased").await["attempts"], attempt);
        lab.kill().await;
    }
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let failed = lab.inbox_is(&id, "failed").await;
    assert_eq!(failed["response"]["body"]["error"]["code"], "poison_request", "{failed}");
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_request_whose_time_is_over_does_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let id = killed(folder.path(), |request| request).await;
    change(folder.path(), "UPDATE inbox SET expires = 1700000000");
    let lab = GatewayLab::start_in(folder.path()).await;
    let failed = lab.inbox_is(&id, "failed").await;
    assert_eq!(failed["response"]["status_code"], 504);
}

#[tokio::test]
async fn a_request_whose_key_is_gone_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    {
        let lab = GatewayLab::start_in(folder.path()).await;
        lab.keys(&[access_key("a", "s-a", |_| {}), access_key("gone", "s-gone", |_| {})]);
        let engine = lab.only_engine(vec![ScriptStep::Prepare]);
        accepted(lab.chat(json!({})).bearer_auth("s-gone").respond_async()).await;
        engine.running(1).await;
        lab.kill().await;
    }
    // Whoever is asked now sees it: it has another owner.
    change(folder.path(), "UPDATE inbox SET request_id = 'theirs'");
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    wait_for_metric(&lab, "russet_gateway_inbox_request_total{outcome=\"failed\"} 1").await;
    assert_eq!(engine.requests(), 0);
    lab.kill().await;
    let database = rusqlite::Connection::open(folder.path().join("responses.db")).unwrap();
    let head: String = database.query_row("SELECT head FROM inbox", [], |row| row.get(0)).unwrap();
    assert!(head.contains("\"status\":401"), "{head}");
    let secrets: i64 = database
        .query_row("SELECT count(*) FROM inbox_body WHERE headers LIKE '%s-gone%'", [], |row| row.get(0))
        .unwrap();
    assert_eq!(secrets, 0, "no key is kept");
}

#[tokio::test]
async fn a_gateway_that_stops_keeps_what_waits() {
    let folder = tempfile::tempdir().unwrap();
    let mut lab = GatewayLab::start_in(folder.path()).await;
    let go_on = CancellationToken::new();
    let wait = go_on.clone();
    let engine = lab.engine("a", move |_| [vec![ScriptStep::PrepareUntil(wait.clone())], hello()].concat());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    // One more than run at once for one owner.
    let ids = join_all((0..33).map(|_| accepted(lab.chat(json!({})).respond_async()))).await;
    engine.running(32).await;
    lab.stops().await;
    go_on.cancel();
    lab.served.take().unwrap().await.unwrap().unwrap();
    assert_eq!(engine.requests(), 32);
    drop(lab);
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    for id in ids {
        lab.inbox_is(&id, "done").await;
    }
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn a_request_that_nobody_runs_is_adopted_by_its_key() {
    let (folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = lab.only_engine(hello());
    assert_eq!(answered(lab.chat(json!({})).key("k")).await.0, 200);
    // As it is left where whoever ran it was lost.
    let lost = "UPDATE inbox SET state = 'leased', head = NULL, ended = NULL";
    change(folder.path(), lost);
    let engine = lab.only_engine(hello());
    let again = answered(lab.chat(json!({})).key("k")).await;
    assert!(again.0 == 200 && !again.1 && engine.requests() == 1, "{again:?}");
}

#[tokio::test]
async fn a_client_that_leaves_at_once_has_asked_or_not() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = lab.only_engine(hello());
    // They leave before, while and after their requests are kept.
    for micros in (0..4000).step_by(100) {
        let asked = lab.chat(json!({})).key(&format!("k{micros}")).respond_async().send();
        let _ = tokio::time::timeout(Duration::from_micros(micros), asked).await;
    }
    // Whoever comes back is answered.
    for micros in (0..4000).step_by(100) {
        assert_eq!(answered(lab.chat(json!({})).key(&format!("k{micros}"))).await.0, 200, "{micros}");
    }
    assert_eq!(engine.requests(), 40);
}

#[tokio::test]
async fn thirty_writers_and_twenty_kills_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = BTreeSet::new();
    for round in 0..20 {
        let lab = GatewayLab::start_in(folder.path()).await;
        // Some end in this life of the gateway, and some only in a later one.
        let engine = lab.engine("a", move |request| match request.messages[0].content.len() % 3 {
            0 => vec![ScriptStep::Prepare],
            _ => hello(),
        });
        lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
        let ask = |number: usize| {
            let text = "x".repeat(number + 1);
            let chat = lab.chat(json!({"messages": [{"role": "user", "content": text}]}));
            accepted(chat.key(&format!("{round}-{number}")).respond_async())
        };
        all.extend(join_all((0..30).map(ask)).await);
        // At another point of their lives each time.
        engine.requested(round).await;
        lab.kill().await;
    }
    assert_eq!(all.len(), 600);
    let lab = GatewayLab::start_in(folder.path()).await;
    let _engine = lab.only_engine(hello());
    let mut states = std::collections::BTreeMap::new();
    for id in &all {
        let ended = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let (code, request) = lab.inbox(Method::GET, &format!("/{id}")).await;
                assert_eq!(code, 200, "{request}");
                if ["done", "failed"].contains(&request["status"].as_str().unwrap()) {
                    return request;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let ended = ended.await.unwrap();
        *states.entry(ended["status"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        if ended["status"] == "failed" {
            assert_eq!(ended["response"]["body"]["error"]["code"], "poison_request", "{ended}");
        }
    }
    println!("600 requests over 20 kills: {states:?}");
    assert_eq!(states.values().sum::<i32>(), 600);
}
