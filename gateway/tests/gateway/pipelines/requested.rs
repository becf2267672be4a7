//! Requests that are answered by runs of a Pipeline, because their ModelRoute leads to one.

use russet_gateway::audit::AuditLog;

use super::*;

/// Two steps: a draft, and what an address makes of it.
fn brief(zone: &str) -> Value {
    json!({
        "zone": zone,
        "parameters": [{"name": "topic"}, {"name": "tone", "default": "dry"}],
        "steps": [
            {"name": "research", "chat": {"model": "m", "prompt": "facts on $(parameters.topic)"}},
            {"name": "draft", "chat": {"model": "m", "prompt": "$(parameters.tone) $(steps.research.output)"}},
            {"name": "note", "when": [{"input": "$(parameters.topic)", "operator": "In", "values": ["never"]}],
             "http": {"endpointRef": {"name": "hooks"}, "path": "/notes", "body": "x"}},
        ],
    })
}

const ANSWER: &str = "<dry <facts on green tea>>";

impl PipelineLab {
    fn route(&self, pipeline: &str) {
        let target = json!({"pipelineRef": {"name": pipeline}, "parameter": "topic"});
        self.object("ModelRoute", "writer", json!({"models": ["writer"], "targets": [target]}));
    }

    fn ask(&self, path: &str, body: Value) -> reqwest::RequestBuilder {
        let mut body = body;
        body["model"] = json!("writer");
        self.client.post(format!("http://{}{path}", self.listen)).json(&body)
    }

    /// The answer of a gateway that has seen the route and the Pipeline.
    async fn chat(&self, body: Value) -> (u16, Value) {
        let answered = async {
            loop {
                let response = self.ask("/v1/chat/completions", body.clone()).send().await;
                if let Ok(response) = response {
                    let status = response.status().as_u16();
                    let body: Value = response.json().await.unwrap();
                    let message = body["error"]["message"].as_str().unwrap_or_default();
                    let is_early = ["does not exist; ", "has not listed", "does not exist, and neither"]
                        .iter()
                        .any(|early| message.contains(early));
                    if !is_early && !message.ends_with("writer: it does not exist") {
                        return (status, body);
                    }
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, answered).await.expect("the gateway never sees the route")
    }

    fn only_run(&self) -> Value {
        let names = self.objects.names("pipelineruns");
        assert_eq!(names.len(), 1, "{names:?}");
        self.objects.get("pipelineruns", &names[0]).unwrap()
    }
}

fn says(text: &str) -> Value {
    json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]})
}

#[tokio::test]
async fn a_run_answers_requests_of_a_route() {
    let lab = PipelineLab::start(answer, accept).await;
    lab.object("Pipeline", "brief", brief("Cloud"));
    lab.route("brief");
    let (gateway, stop) = lab.gateway();
    let (status, body) = lab.chat(says("green tea")).await;
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (200, &json!(ANSWER)), "{body}");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["usage"]["completion_tokens"], 6, "of both steps");
    let run = lab.only_run();
    let spec = json!({
        "pipelineRef": {"name": "brief"}, "parameters": [{"name": "topic", "value": "green tea"}], "zone": "Local",
        "ttlSecondsAfterFinished": 3600, "attempt": 1,
    });
    assert_eq!(run["spec"], spec, "no farther than the route lets a request go");
    assert_eq!(run["metadata"]["labels"]["russet.dev/managed-by"], "gateway");
    assert_eq!(run["metadata"]["labels"]["russet.dev/gateway"], run["status"]["runner"]);
    // It stays for whoever wants to know, and its client is told which it was.
    let id = body["id"].as_str().unwrap().to_owned();
    let why = format!("http://{}/requests/{}/why", lab.listen, id.trim_start_matches("chatcmpl-"));
    let why: Value = lab.client.get(why).send().await.unwrap().json().await.unwrap();
    let name = run["metadata"]["name"].as_str().unwrap();
    let expected = json!({"name": "Pipeline default/brief", "run": format!("default/{name}")});
    assert_eq!(why["attempts"][0]["pipeline"], expected, "{why}");
    lab.objects.delete("pipelineruns", name);
    // Every dialect, streamed too.
    let mut streamed = says("green tea");
    streamed["stream"] = json!(true);
    let response = lab.ask("/v1/chat/completions", streamed).send().await.unwrap().text().await.unwrap();
    assert!(response.contains(ANSWER) && response.ends_with("data: [DONE]\n\n"), "{response}");
    let messages = json!({"messages": [{"role": "user", "content": "green tea"}], "max_tokens": 9});
    let response: Value = lab.ask("/v1/messages", messages).send().await.unwrap().json().await.unwrap();
    assert_eq!(response["content"][0]["text"], ANSWER, "{response}");
    stop.cancel();
    gateway.await.unwrap();
    // What its steps used counts once: three requests of two steps each. The log is whole once another one may have it.
    let audit = lab.folder.path().join("audit");
    drop(AuditLog::open(&audit).unwrap());
    let (period, zone) = (AuditPeriod::default(), jiff::tz::TimeZone::UTC);
    let used = usage(&audit, &period, &[UsageField::Model], &zone, None).unwrap();
    let tokens = |model: &str| {
        let total = &used.totals[&vec![model.to_owned()]];
        (total.prompt_tokens, total.completion_tokens)
    };
    assert_eq!((tokens("m"), tokens("writer")), ((7 * 6, 3 * 6), (0, 0)));
    assert_eq!(used.totals[&vec!["m".to_owned()]].requests, 6);
}

#[tokio::test]
async fn what_no_run_can_answer_is_refused() {
    let lab = PipelineLab::start(answer, accept).await;
    lab.object("Pipeline", "brief", brief("Local"));
    lab.route("brief");
    let (gateway, stop) = lab.gateway();
    assert_eq!(lab.chat(says("green tea")).await.0, 200);
    let runs = lab.objects.names("pipelineruns").len();
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    for (field, value, what) in [
        ("tools", tool, "tools"),
        ("response_format", json!({"type": "json_object"}), "a schema of the answer"),
        ("stop", json!(["x"]), "texts that end the answer"),
        ("logprobs", json!(true), "log-probabilities"),
    ] {
        let mut body = says("green tea");
        body[field] = value;
        let (status, body) = lab.chat(body).await;
        let message = body["error"]["message"].as_str().unwrap();
        assert!(
            status == 400 && message.contains("Pipeline default/brief: ") && message.contains(what),
            "{body}"
        );
    }
    let embedding = lab.ask("/v1/embeddings", json!({"input": "x"})).send().await.unwrap();
    assert_eq!(embedding.status(), 400);
    assert_eq!(lab.objects.names("pipelineruns").len(), runs, "nothing was started");
    // A Pipeline that asks the name that leads to it ends at once, and says why.
    let step =
        json!({"name": "ask", "retries": 0, "chat": {"model": "writer", "prompt": "$(parameters.topic)"}});
    lab.object("Pipeline", "loop", json!({"parameters": [{"name": "topic"}], "steps": [step]}));
    lab.route("loop");
    let failed = async {
        loop {
            let (status, body) = lab.chat(says("tea")).await;
            if status == 502 {
                return body;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let body = tokio::time::timeout(TEST_TIMEOUT, failed).await.expect("the circle is found");
    let message = body["error"]["message"].as_str().unwrap();
    assert_eq!(body["error"]["code"], "pipeline_failed");
    assert!(message.contains("of Pipeline default/loop failed: step ask: "), "{message}");
    assert!(message.contains("a step of a Pipeline starts no run of another one"), "{message}");
    // One that is not there, or takes something else.
    lab.route("gone");
    let gone = async {
        loop {
            let response = lab.ask("/v1/chat/completions", says("tea")).send().await.unwrap();
            let status = response.status();
            let body: Value = response.json().await.unwrap();
            if body["error"]["message"]
                .as_str()
                .unwrap_or_default()
                .contains("default/gone: it does not exist")
            {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert_eq!(tokio::time::timeout(TEST_TIMEOUT, gone).await.expect("it is missed"), 503);
    stop.cancel();
    gateway.await.unwrap();
}

#[tokio::test]
async fn a_run_goes_with_the_client_that_leaves() {
    let hangs = |_: &russet_rpc::engine::GenerateRequest| vec![started(), ScriptStep::Hang];
    let lab = PipelineLab::start(hangs, accept).await;
    lab.object("Pipeline", "brief", brief("Local"));
    lab.route("brief");
    let (gateway, stop) = lab.gateway();
    let running = async {
        loop {
            // The gateway may not have seen the route yet.
            let ask = lab.ask("/v1/chat/completions", says("tea")).send();
            if tokio::time::timeout(Duration::from_secs(1), ask).await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, running).await.expect("a request waits for its run");
    let deleted = async {
        while !lab
            .objects
            .writes
            .lock()
            .unwrap()
            .iter()
            .any(|write| write.starts_with("delete pipelineruns brief-"))
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, deleted).await.expect("the run of a client that left is deleted");
    lab.engine.running(0).await;
    assert_eq!(lab.objects.names("pipelineruns"), Vec::<String>::new());
    stop.cancel();
    gateway.await.unwrap();
}
