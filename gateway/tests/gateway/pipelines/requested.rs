//! Requests that are answered by runs of a Pipeline, because their ModelRoute leads to one.

mod inbox;

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
        "pipelineRef": {"name": "brief"}, "zone": "Local",
        "parameters": [{"name": "topic", "value": "", "sha256": hex::encode(sha2::Sha256::digest("green tea"))}],
        "ttlSecondsAfterFinished": 600, "attempt": 1,
    });
    assert_eq!(run["spec"], spec, "no farther than the route lets a request go, and without its text");
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
    let log = std::fs::read_to_string(audit.join("audit-00000001.log")).unwrap();
    assert!(log.contains(&format!(r#""run":"default/{name}""#)), "the entry of a request names its run");
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
        ("n", json!(2), "the request asks for several"),
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

/// A gateway at which a request waits for a run whose first step hangs: the request, and the name of the run.
async fn waiting(lab: &PipelineLab) -> (tokio::task::JoinHandle<reqwest::Result<reqwest::Response>>, String) {
    lab.object("Pipeline", "brief", brief("Local"));
    lab.route("brief");
    let begun = async {
        loop {
            let ask = tokio::spawn(lab.ask("/v1/chat/completions", says("tea")).send());
            while !ask.is_finished() {
                if let Some(name) = lab.objects.names("pipelineruns").first() {
                    return (ask, name.clone());
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // The gateway has not seen the route yet.
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, begun).await.expect("a request waits for its run")
}

fn hangs(_: &russet_rpc::engine::GenerateRequest) -> Vec<ScriptStep> {
    vec![started(), ScriptStep::Hang]
}

async fn no_runs(lab: &PipelineLab) {
    let gone = async {
        while !lab.objects.names("pipelineruns").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, gone).await.expect("a run that nobody waits for is deleted");
    lab.engine.running(0).await;
}

#[tokio::test]
async fn a_run_goes_with_the_client_that_leaves() {
    let lab = PipelineLab::start(hangs, accept).await;
    let (gateway, stop) = lab.gateway();
    let (ask, _) = waiting(&lab).await;
    ask.abort();
    no_runs(&lab).await;
    stop.cancel();
    gateway.await.unwrap();
}

#[tokio::test]
async fn a_run_that_is_gone_ends_its_request() {
    let lab = PipelineLab::start(hangs, accept).await;
    let (gateway, stop) = lab.gateway();
    let said = async |ask: tokio::task::JoinHandle<reqwest::Result<reqwest::Response>>| {
        let response = tokio::time::timeout(TEST_TIMEOUT, ask).await.expect("it is told").unwrap().unwrap();
        let status = response.status();
        let body: Value = response.json().await.unwrap();
        (status.as_u16(), body["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    // Somebody deletes it.
    let (ask, name) = waiting(&lab).await;
    lab.status(&name, |status| status["runner"].is_string()).await;
    lab.objects.delete("pipelineruns", &name);
    let (status, message) = said(ask).await;
    assert!(status == 502 && message.ends_with("failed: it was deleted"), "{message}");
    lab.engine.running(0).await;
    // Another gateway takes it over.
    let (ask, name) = waiting(&lab).await;
    lab.status(&name, |status| status["runner"].is_string()).await;
    let mut run = lab.objects.get("pipelineruns", &name).unwrap();
    run["status"]["runner"] = json!("another");
    run["metadata"]["resourceVersion"] = json!("1000");
    lab.objects.apply("pipelineruns", run);
    let (status, message) = said(ask).await;
    assert!(status == 502 && message.ends_with("failed: another gateway runs it now"), "{message}");
    lab.objects.delete("pipelineruns", &name);
    lab.engine.running(0).await;
    // The gateway ends, and one that starts again does not go on with what nobody waits for.
    let (ask, name) = waiting(&lab).await;
    lab.status(&name, |status| status["runner"].is_string()).await;
    stop.cancel();
    let (status, message) = said(ask).await;
    assert!(status >= 500 && message.contains("shut"), "{status} {message}");
    gateway.await.unwrap();
    let (gateway, stop) = lab.gateway();
    no_runs(&lab).await;
    stop.cancel();
    gateway.await.unwrap();
}
