//! Runs that cannot begin, that fail, are undone and resumed, and what may not leave.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

#[tokio::test]
async fn a_failed_run_is_undone_and_resumed_at_the_failed_step() {
    let (failing, denied) = (Arc::new(AtomicU32::new(3)), Arc::new(AtomicBool::new(true)));
    let (left, refuses) = (failing.clone(), denied.clone());
    let lab = PipelineLab::start(answer, move |call| match call.path.as_str() {
        "/hooks/flaky" if left.load(Ordering::Acquire) > 1 => {
            left.fetch_sub(1, Ordering::AcqRel);
            Reply::Status(500, None, "out of order")
        }
        "/hooks/last" if refuses.load(Ordering::Acquire) => Reply::Status(404, None, "secret words"),
        _ => Reply::Status(200, Some(("content-type", "application/json")), r#"{"id": 7}"#),
    })
    .await;
    let http = |path: &str| json!({"endpointRef": {"name": "hooks"}, "path": path});
    lab.object("Pipeline", "p", json!({"steps": [
        {"name": "keep", "chat": {"model": "m", "prompt": "keep"}},
        {"name": "book", "http": http("/book"),
         "compensate": {"endpointRef": {"name": "hooks"}, "method": "DELETE", "path": "/book/$(output.id)"}},
        {"name": "flaky", "http": http("/flaky")},
        {"name": "last", "http": http("/last")},
    ]}));
    lab.run("r", json!({"pipelineRef": {"name": "p"}}));
    let (gateway, stop) = lab.gateway();
    let status = lab.ended("r", "Failed").await;
    let message =
        "step last: HTTPEndpoint default/hooks answers 404; `russet pipeline resume r` goes on with it";
    assert_eq!(ready(&status)["message"], message);
    let states = |status: &Value| -> Vec<String> {
        status["steps"]
            .as_array()
            .unwrap()
            .iter()
            .map(|step| step["state"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(states(&status), ["Done", "Compensated", "Done", "Failed"]);
    let paths = |lab: &PipelineLab| -> Vec<String> {
        lab.endpoint.asked().iter().map(|call| call.path["/hooks".len()..].to_owned()).collect()
    };
    assert_eq!(paths(&lab), ["/book", "/flaky", "/flaky", "/flaky", "/last", "/book/7"]);
    denied.store(false, Ordering::Release);
    lab.run("r", json!({"pipelineRef": {"name": "p"}, "attempt": 2}));
    let status = lab.ended("r", "Finished").await;
    assert_eq!(states(&status), ["Done"; 4]);
    assert_eq!(paths(&lab)[6..], ["/book", "/last"]);
    // What was undone, and what follows it, is something new.
    let keys = lab.keys();
    assert_eq!(
        (keys[0].as_str(), keys[5].as_str(), keys[6].as_str()),
        ("uid-of-r/book/0/0", "uid-of-r/book/0/0/undo", "uid-of-r/book/0/1")
    );
    assert_eq!((keys[4].as_str(), keys[7].as_str()), ("uid-of-r/last/0/0", "uid-of-r/last/0/1"));
    assert_eq!(lab.engine.requests(), 1, "the answer was kept");
    // There is nothing to resume in a run that ended well.
    lab.run("r", json!({"pipelineRef": {"name": "p"}, "attempt": 5}));
    lab.ended("r", "Finished").await;
    let version = |lab: &PipelineLab| {
        lab.objects.get("pipelineruns", "r").unwrap()["metadata"]["resourceVersion"].clone()
    };
    let before = version(&lab);
    lab.run("next", json!({"pipelineRef": {"name": "p"}}));
    lab.ended("next", "Finished").await;
    assert_eq!(version(&lab), before, "nothing more is written of it");
    assert_eq!(lab.endpoint.asked().len(), 11);
    stop.cancel();
    gateway.await.unwrap();
}

#[tokio::test]
async fn runs_that_cannot_begin_say_what_to_do() {
    let lab = PipelineLab::start(answer, accept).await;
    let text = json!({"parameters": [{"name": "a"}], "steps": [{"name": "ask", "chat": {"model": "m", "prompt": "$(parameters.a)"}}]});
    lab.object("Pipeline", "p", text.clone());
    lab.object(
        "Pipeline",
        "wrong",
        json!({"steps": [{"name": "ask", "chat": {"model": "m", "prompt": "$(parameters.a)"}}]}),
    );
    let mut file = text;
    file["parameters"][0]["type"] = json!("File");
    lab.object("Pipeline", "file", file);
    let (gateway, stop) = lab.gateway();
    let given = |pipeline: &str, value: &str| json!({"pipelineRef": {"name": pipeline}, "parameters": [{"name": "a", "value": value}]});
    for (name, spec, reason, expected) in [
        (
            "lost",
            json!({"pipelineRef": {"name": "gone"}}),
            "TargetNotFound",
            "Pipeline gone does not exist in this namespace",
        ),
        ("bare", json!({"pipelineRef": {"name": "p"}}), "Failed", "the parameter a is not given"),
        (
            "wrong",
            json!({"pipelineRef": {"name": "wrong"}}),
            "Failed",
            "Pipeline wrong: step ask: $(parameters.a): there is no parameter a",
        ),
        (
            "more",
            json!({"pipelineRef": {"name": "p"}, "parameters": [{"name": "b", "value": ""}]}),
            "Failed",
            "the Pipeline has no parameter b",
        ),
        ("nofile", given("file", "file-x"), "TargetNotFound", "parameter a: there is no file file-x"),
        (
            "nokey",
            json!({"pipelineRef": {"name": "p"}, "keyRef": {"name": "k"}}),
            "TargetNotFound",
            "AccessKey k does not exist in this namespace, or is disabled or expired",
        ),
    ] {
        lab.run(name, spec);
        let status = lab.status(name, |status| !ready(status).is_null()).await;
        assert_eq!(
            (&ready(&status)["reason"], &ready(&status)["message"]),
            (&json!(reason), &json!(expected)),
            "{name}"
        );
    }
    // It begins once what it needs is there.
    lab.object(
        "Pipeline",
        "gone",
        json!({"steps": [{"name": "ask", "chat": {"model": "m", "prompt": "late"}}]}),
    );
    let status = lab.ended("lost", "Finished").await;
    assert_eq!(lab.output(&status, "ask").await, "<late>");
    // A file of another text than the run names.
    let field = |name: &str, more: &str, text: &str| {
        format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"{more}\r\n\r\n{text}\r\n")
    };
    let file = field("file", "; filename=\"a.txt\"", "some words");
    let form = format!("{}{file}--b--\r\n", field("purpose", "", "batch"));
    let upload = lab.client.post(format!("http://{}/v1/files", lab.listen)).body(form);
    let upload = upload.header("content-type", "multipart/form-data; boundary=b").send().await.unwrap();
    let id = upload.json::<Value>().await.unwrap()["id"].as_str().unwrap().to_owned();
    let mut spec = given("file", &id);
    spec["parameters"][0]["sha256"] = json!(hex::encode(sha2::Sha256::digest("some words")));
    lab.run("right", spec.clone());
    spec["parameters"][0]["sha256"] = json!("0".repeat(64));
    lab.run("other", spec);
    let status = lab.ended("right", "Finished").await;
    assert_eq!(lab.output(&status, "ask").await, "<some words>");
    let message = ready(&lab.ended("other", "Failed").await)["message"].as_str().unwrap().to_owned();
    assert!(
        message.starts_with("parameter a: the file has SHA-256 ") && message.ends_with(&"0".repeat(64)),
        "{message}"
    );
    stop.cancel();
    gateway.await.unwrap();
}

#[tokio::test]
async fn nothing_of_a_run_leaves_its_zone() {
    let lab = PipelineLab::start(answer, accept).await;
    lab.object("HTTPEndpoint", "lan", json!({"url": "http://192.168.7.7:9/hooks", "zone": "Lan"}));
    lab.object(
        "HTTPEndpoint",
        "liar",
        json!({"url": format!("http://{}/", lab.endpoint.address), "zone": "Lan"}),
    );
    let pipeline = |endpoint: &str, zone: &str| {
        let http = json!({"endpointRef": {"name": endpoint}, "body": "x"});
        json!({"zone": zone, "steps": [{"name": "send", "http": http, "retries": 0}]})
    };
    let (gateway, stop) = lab.gateway();
    for (name, endpoint, zone, expected) in [
        (
            "local",
            "lan",
            "Local",
            "the request stays in the zone Local, as spec.zone of Pipeline default/local says, and HTTPEndpoint default/lan is in the zone Lan",
        ),
        // No API server of the test has namespaces, so nobody knows their labels.
        (
            "unread",
            "lan",
            "Lan",
            "the request stays in the zone Local, as the gateway, which has not read the namespaces' labels yet, says, and HTTPEndpoint default/lan is in the zone Lan",
        ),
        ("gone", "none", "Local", "HTTPEndpoint none does not exist in this namespace"),
    ] {
        lab.object("Pipeline", name, pipeline(endpoint, zone));
        lab.run(name, json!({"pipelineRef": {"name": name}}));
        let status = lab.ended(name, "Failed").await;
        assert_eq!(step_of(&status, "send")["message"], expected, "{name}");
    }
    assert!(lab.endpoint.asked().is_empty());
    // What its address was when a person approved it is what is called, or nothing.
    let mut moved = pipeline("hooks", "Local");
    moved["steps"][0]["approval"] = json!({"message": "ok?"});
    lab.object("Pipeline", "moved", moved);
    lab.run("moved", json!({"pipelineRef": {"name": "moved"}}));
    let (approval, _) = lab.asked("moved").await;
    lab.object(
        "HTTPEndpoint",
        "hooks",
        json!({"url": format!("http://{}/elsewhere", lab.endpoint.address), "zone": "Local"}),
    );
    lab.decide(&approval, "Approved");
    let status = lab.ended("moved", "Failed").await;
    let message = step_of(&status, "send")["message"].as_str().unwrap();
    assert!(message.ends_with("/hooks any more"), "{message}");
    assert!(lab.endpoint.asked().is_empty());
    stop.cancel();
    gateway.await.unwrap();
}
