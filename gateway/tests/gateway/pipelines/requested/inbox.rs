//! Requests of the inbox whose model is a Pipeline: each finds its run again after its gateway has ended, and no other one.

use super::super::kills::{KilledGateway, until};
use super::*;

/// A call, and then a question.
fn noted() -> Value {
    json!({
        "parameters": [{"name": "topic"}],
        "steps": [
            {"name": "note", "http": {"endpointRef": {"name": "hooks"}, "path": "/notes", "body": "x"}},
            {"name": "draft", "chat": {"model": "m", "prompt": "facts on $(parameters.topic)"}},
        ],
    })
}

/// Answers all but the first question.
fn second_time() -> impl Fn(&russet_rpc::engine::GenerateRequest) -> Vec<ScriptStep> + Send + Sync + 'static {
    let is_first = AtomicBool::new(true);
    move |request| {
        if is_first.swap(false, Ordering::Relaxed) { hangs(request) } else { answer(request) }
    }
}

impl PipelineLab {
    /// Where the Pipeline does not answer, an engine does.
    fn route_with_engine(&self, pipeline: &str) {
        let targets = json!([
            {"pipelineRef": {"name": pipeline}, "parameter": "topic"}, {"deploymentRef": {"name": "m"}},
        ]);
        self.object("ModelRoute", "writer", json!({"models": ["writer"], "targets": targets}));
    }

    /// The id of a request in the inbox that waits for a run whose question hangs.
    async fn in_inbox(&self) -> String {
        self.object("Pipeline", "brief", noted());
        self.route("brief");
        let accepted = async {
            loop {
                let ask = self.ask("/v1/chat/completions", says("green tea"));
                if let Ok(response) = ask.header("prefer", "respond-async").send().await
                    && response.status() == 202
                {
                    let body: Value = response.json().await.unwrap();
                    return body["id"].as_str().unwrap().to_owned();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let id = tokio::time::timeout(TEST_TIMEOUT, accepted).await.expect("it is accepted");
        self.engine.running(1).await;
        id
    }

    /// The request in the inbox once it has ended.
    async fn inbox_end(&self, id: &str) -> Value {
        let ended = async {
            loop {
                let url = format!("http://{}/v1/inbox/{id}", self.listen);
                if let Ok(response) = self.client.get(url).send().await
                    && let Ok(body) = response.json::<Value>().await
                    && ["done", "failed"].contains(&body["status"].as_str().unwrap_or_default())
                {
                    return body;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, ended).await.expect("it ends")
    }

    /// The run and the call are those of before, and the request has what they made.
    async fn made_once(&self, id: &str, run: &Value) {
        let end = self.inbox_end(id).await;
        let answer = &end["response"]["body"]["choices"][0]["message"]["content"];
        assert_eq!((&end["status"], answer), (&json!("done"), &json!("<facts on green tea>")), "{end}");
        assert_eq!(self.only_run()["metadata"]["name"], run["metadata"]["name"]);
        assert_eq!((self.created(), self.endpoint.asked().len()), (1, 1), "the call is made once");
    }

    /// As if the gateway had been killed before it claimed the run of its only request: nothing of it is kept, and its text is
    /// with the request.
    fn unclaimed(&self) -> Value {
        let mut run = self.only_run();
        run["status"] = Value::Null;
        self.objects.apply("pipelineruns", run.clone());
        self.database().execute_batch("PRAGMA foreign_keys = ON; DELETE FROM run").unwrap();
        run
    }

    fn database(&self) -> rusqlite::Connection {
        let database = rusqlite::Connection::open(self.folder.path().join("responses.db")).unwrap();
        database.busy_timeout(TEST_TIMEOUT).unwrap();
        database
    }

    /// How many runs were ever created.
    fn created(&self) -> usize {
        let writes = self.objects.writes.lock().unwrap();
        writes.iter().filter(|write| write.starts_with("create pipelineruns")).count()
    }
}

#[tokio::test]
async fn a_request_of_the_inbox_finds_its_run_after_a_kill() {
    let lab = PipelineLab::start(second_time(), accept).await;
    let gateway = KilledGateway::start(&lab);
    let id = lab.in_inbox().await;
    let run = lab.only_run();
    drop(gateway);
    lab.engine.running(0).await;
    let gateway = KilledGateway::start(&lab);
    lab.made_once(&id, &run).await;
    drop(gateway);
    // Killed once more after the run had its end, and before the request had its answer.
    let database = lab.database();
    let forget = "UPDATE inbox SET state = 'leased', ended = NULL, head = NULL";
    assert_eq!(database.execute(forget, []).unwrap(), 1);
    drop(database);
    let asked = lab.engine.requests();
    let _gateway = KilledGateway::start(&lab);
    lab.made_once(&id, &run).await;
    assert_eq!(lab.engine.requests(), asked);
}

#[tokio::test]
async fn a_request_of_the_inbox_finds_its_run_after_a_stop() {
    let lab = PipelineLab::start(second_time(), accept).await;
    let (gateway, stop) = lab.gateway();
    let id = lab.in_inbox().await;
    let run = lab.only_run();
    stop.cancel();
    gateway.await.unwrap();
    lab.engine.running(0).await;
    let (gateway, stop) = lab.gateway();
    lab.made_once(&id, &run).await;
    stop.cancel();
    gateway.await.unwrap();
}

#[tokio::test]
async fn a_run_begun_before_a_kill_waits_for_its_text() {
    let lab = PipelineLab::start(second_time(), accept).await;
    let gateway = KilledGateway::start(&lab);
    let id = lab.in_inbox().await;
    drop(gateway);
    lab.engine.running(0).await;
    let run = lab.unclaimed();
    let _gateway = KilledGateway::start(&lab);
    let end = lab.inbox_end(&id).await;
    assert_eq!(end["status"], "done", "{end}");
    assert_eq!(lab.only_run()["metadata"]["name"], run["metadata"]["name"]);
    // The same key, so that the address knows the call.
    assert_eq!(lab.keys().iter().collect::<std::collections::BTreeSet<_>>().len(), 1);
}

#[tokio::test]
async fn a_run_of_other_terms_is_not_begun_again() {
    let lab = PipelineLab::start(second_time(), accept).await;
    let gateway = KilledGateway::start(&lab);
    let id = lab.in_inbox().await;
    drop(gateway);
    lab.engine.running(0).await;
    let mut run = lab.only_run();
    run["spec"]["zone"] = json!("Cloud");
    lab.objects.apply("pipelineruns", run.clone());
    let _gateway = KilledGateway::start(&lab);
    let end = lab.inbox_end(&id).await;
    let error = &end["response"]["body"]["error"];
    assert_eq!((&end["status"], &error["code"]), (&json!("failed"), &json!("pipeline_failed")), "{end}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("was begun for this request before the gateway ended"), "{message}");
    assert_eq!(lab.endpoint.asked().len(), 1);
    assert_eq!(lab.created(), 1, "no other one is begun");
}

#[tokio::test]
async fn a_run_of_other_terms_never_gets_the_text() {
    let lab = PipelineLab::start(second_time(), accept).await;
    let gateway = KilledGateway::start(&lab);
    let id = lab.in_inbox().await;
    drop(gateway);
    lab.engine.running(0).await;
    let mut run = lab.unclaimed();
    let name = run["metadata"]["name"].as_str().unwrap().to_owned();
    run["spec"]["zone"] = json!("Cloud");
    lab.objects.apply("pipelineruns", run);
    let step = json!({"name": "ask", "chat": {"model": "m", "prompt": "coffee"}});
    lab.object("Pipeline", "other", json!({"steps": [step]}));
    // The request waits, and does not know yet that the run has other terms.
    lab.objects.hold("get pipelineruns");
    let _gateway = KilledGateway::start(&lab);
    until("the run is found", || lab.objects.holds()).await;
    // The gateway looks at all runs between the beginning and the end of another one.
    lab.run("another", json!({"pipelineRef": {"name": "other"}}));
    lab.ended("another", "Finished").await;
    lab.objects.delete("pipelineruns", "another");
    let found =
        lab.objects.get("pipelineruns", &name).expect("the run of a request that goes on is not deleted");
    assert_eq!(found["status"], Value::Null, "nobody has claimed it");
    lab.objects.release();
    let end = lab.inbox_end(&id).await;
    assert_eq!(end["response"]["body"]["error"]["code"], "pipeline_failed", "{end}");
    no_runs(&lab).await;
    // The question of before the kill, and that of the other run.
    assert_eq!((lab.endpoint.asked().len(), lab.engine.requests()), (1, 2));
}

#[tokio::test]
async fn a_request_of_the_inbox_waits_for_the_pipelines() {
    let lab = PipelineLab::start(second_time(), accept).await;
    let gateway = KilledGateway::start(&lab);
    let id = lab.in_inbox().await;
    lab.route_with_engine("brief");
    let run = lab.only_run();
    drop(gateway);
    lab.engine.running(0).await;
    lab.objects.hold("list pipelines");
    let asked = lab.engine.requests();
    let _gateway = KilledGateway::start(&lab);
    // It was sent again, and has no answer yet.
    let sent = async {
        loop {
            if let Ok(response) = lab.client.get(format!("http://{}/metrics", lab.listen)).send().await {
                let metrics = response.text().await.unwrap();
                if metrics.lines().any(|line| line.contains("request_total{model_name=\"writer\"}")) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, sent).await.expect("it is sent again");
    assert!(lab.objects.holds());
    // Nobody waits for another one, and so the engine answers it.
    let (status, body) = lab.chat(says("coffee")).await;
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (200, &json!("<coffee>")), "{body}");
    assert_eq!(lab.engine.requests(), asked + 1);
    lab.objects.release();
    lab.made_once(&id, &run).await;
}
