//! Batches whose gateway ends before they do: killed, or asked to stop.

use super::*;

/// Changes the kept record of every batch, and says whether they have ended.
fn records(folder: &Path, change: impl Fn(&mut Value)) -> bool {
    let database = rusqlite::Connection::open(folder.join("responses.db")).unwrap();
    database.busy_timeout(TEST_TIMEOUT).unwrap();
    let mut rows = database.prepare("SELECT number, ended, record FROM batch").unwrap();
    let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
    let rows: Vec<(i64, bool, Vec<u8>)> = rows.map(Result::unwrap).collect();
    for (number, _, record) in &rows {
        let before: Value = serde_json::from_slice(record).unwrap();
        let mut after = before.clone();
        change(&mut after);
        if after != before {
            let change = "UPDATE batch SET record = ?2 WHERE number = ?1";
            database.execute(change, rusqlite::params![number, after.to_string().into_bytes()]).unwrap();
        }
    }
    rows.iter().all(|(_, ended, _)| *ended)
}

/// The id of a batch with one line that has its result and two that hang, when its gateway was killed.
async fn killed(folder: &Path, key: &str) -> String {
    let lab = GatewayLab::start_in(folder).await;
    let engine = engine(&lab);
    if key == "s-a" {
        lab.keys(&[access_key("a", "s-a", |_| {})]);
    }
    let id = lab.batch(key, "/v1/chat/completions", chats(&["a", "hang 1", "hang 2"]).as_bytes()).await;
    lab.until(&format!("/v1/batches/{id}"), |batch| batch["request_counts"]["completed"] == 1).await;
    engine.running(2).await;
    lab.kill().await;
    id
}

#[tokio::test]
async fn a_killed_batch_goes_on_with_lines_that_have_no_result() {
    let folder = tempfile::tempdir().unwrap();
    let id = killed(folder.path(), "any").await;
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let batch = lab.batch_is(&id, "completed").await;
    assert_eq!(received(&engine), ["hang 1", "hang 2"]);
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 3, "failed": 0}));
    let output = lab.lines(&batch["output_file_id"]).await;
    assert_eq!(ids(&output), ["a", "hang 1", "hang 2"]);
    // It ended once: the next gateway has nothing to do.
    lab.kill().await;
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    assert_eq!(lab.done(Method::GET, &format!("/v1/batches/{id}"), None).await, batch);
    assert_eq!(lab.lines(&batch["output_file_id"]).await, output);
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_gateway_that_stops_waits_for_lines_that_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut lab = GatewayLab::start_in(folder.path()).await;
    let go_on = tokio_util::sync::CancellationToken::new();
    let wait = go_on.clone();
    let engine = lab.engine("a", move |_| [vec![ScriptStep::PrepareUntil(wait.clone())], hello()].concat());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let contents: Vec<String> = (0..17).map(|number| number.to_string()).collect();
    let contents: Vec<&str> = contents.iter().map(String::as_str).collect();
    let id = lab.batch("any", "/v1/chat/completions", chats(&contents).as_bytes()).await;
    engine.running(16).await;
    lab.stops().await;
    go_on.cancel();
    lab.served.take().unwrap().await.unwrap().unwrap();
    assert_eq!(engine.requests(), 16);
    drop(lab);

    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let batch = lab.batch_is(&id, "completed").await;
    assert_eq!(received(&engine), ["16"]);
    assert_eq!(lab.lines(&batch["output_file_id"]).await.len(), 17);
}

#[tokio::test]
async fn a_batch_whose_time_is_over_expires_with_its_results() {
    let folder = tempfile::tempdir().unwrap();
    let id = killed(folder.path(), "any").await;
    records(folder.path(), |record| record["expires_at"] = json!(1_700_000_000));
    let lab = GatewayLab::start_in(folder.path()).await;
    let batch = lab.batch_is(&id, "expired").await;
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 1, "failed": 0}));
    assert_eq!(ids(&lab.lines(&batch["output_file_id"]).await), ["a"]);
    let errors = lab.lines(&batch["error_file_id"]).await;
    assert_eq!(ids(&errors), ["hang 1", "hang 2"]);
    assert_eq!(errors[1]["error"]["code"], "batch_expired");
}

#[tokio::test]
async fn lines_of_a_key_that_is_gone_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let id = killed(folder.path(), "s-a").await;
    // No key exists here.
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let ended = tokio::time::timeout(TEST_TIMEOUT, async {
        while !records(folder.path(), |_| {}) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    ended.await.unwrap();
    assert_eq!(engine.requests(), 0);
    lab.keys(&[access_key("a", "s-a", |_| {})]);
    let batch = lab.batch_is(&id, "completed").await;
    let errors = lab.lines(&batch["error_file_id"]).await;
    assert_eq!(ids(&errors), ["hang 1", "hang 2"]);
    for line in errors {
        assert_eq!(line["response"]["status_code"], 401);
        assert_eq!(line["response"]["body"]["error"]["code"], "invalid_api_key");
    }
}

#[tokio::test]
async fn a_cancelled_batch_is_cancelled_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let id = killed(folder.path(), "any").await;
    // As far as the gateway had come when the client had its answer.
    records(folder.path(), |record| {
        record["status"] = json!("cancelling");
        record["cancelling_at"] = json!(1_700_000_000);
        record["completed"] = json!(1);
    });
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(hello());
    let batch = lab.batch_is(&id, "cancelled").await;
    assert_eq!(ids(&lab.lines(&batch["error_file_id"]).await), ["hang 1", "hang 2"]);
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_store_of_an_earlier_release_gets_what_it_lacks() {
    let tables =
        ["artifact", "run", "gateway", "inbox_answer", "inbox_body", "inbox", "batch", "file_part", "file"];
    for (version, lacks) in [(1, 9), (2, 6), (3, 3)] {
        let folder = tempfile::tempdir().unwrap();
        let lab = GatewayLab::start_in(folder.path()).await;
        // It answers when it has its store.
        lab.done(Method::GET, "/v1/files", None).await;
        lab.kill().await;
        let database = rusqlite::Connection::open(folder.path().join("responses.db")).unwrap();
        database.busy_timeout(TEST_TIMEOUT).unwrap();
        let drops: String = tables[..lacks].iter().map(|table| format!("DROP TABLE {table}; ")).collect();
        database.execute_batch(&format!("{drops} PRAGMA user_version = {version};")).unwrap();
        drop(database);
        let lab = GatewayLab::start_in(folder.path()).await;
        let _engine = engine(&lab);
        let id = lab.batch("any", "/v1/chat/completions", chats(&["a"]).as_bytes()).await;
        lab.batch_is(&id, "completed").await;
        assert_eq!(lab.done(Method::GET, "/v1/inbox", None).await["data"], json!([]), "{version}");
        let artifact = lab.client.get(lab.url("/v1/artifacts/sha256:00")).send().await.unwrap();
        let code = artifact.json::<Value>().await.unwrap()["error"]["code"].take();
        assert_eq!(code, "artifact_not_found", "{version}");
    }
}
