//! Requests that end engines: they end two at most, and others do not pay for them.

use std::sync::atomic::{AtomicUsize, Ordering};

use russet_gateway::routes::DeploymentState;
use russet_rpc::engine::GenerateRequest;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::harness::{GatewayLab, ScriptStep, hello, limits, started, wait_for_metric};

/// The steps of an engine that ends while it prepares, or prefills, the prompt `poison`.
fn victim(poisoned: Vec<ScriptStep>) -> impl Fn(&GenerateRequest) -> Vec<ScriptStep> + Send + Sync {
    move |request| if request.messages[0].content == "poison" { poisoned.clone() } else { hello() }
}

fn ask(lab: &GatewayLab, content: &str) -> reqwest::RequestBuilder {
    lab.chat(json!({"messages": [{"role": "user", "content": content}]}))
}

async fn assert_stopped(response: reqwest::Response) {
    assert_eq!(response.status(), 500);
    assert_eq!(response.headers()["x-should-retry"], "false");
    assert!(!response.headers().contains_key("retry-after"));
    let error = response.json::<Value>().await.unwrap()["error"].take();
    assert_eq!(error["code"], "poison_request", "{error}");
}

#[tokio::test]
async fn poison_request_ends_two_engines_however_often_it_is_sent() {
    let dies = ScriptStep::Break(tonic::Code::Unavailable, "it died");
    for (poisoned, kill) in [(vec![ScriptStep::Prepare], true), (vec![started(), dies], false)] {
        let lab = GatewayLab::start(limits()).await;
        let engines = ["a", "b", "c"].map(|node| lab.engine(node, victim(poisoned.clone())));
        let [mut first, mut second, third] = engines;
        lab.publish(&[("m", DeploymentState::Ready, &[&first, &second, &third])]);
        let response = tokio::spawn(ask(&lab, "poison").send());
        for engine in [&mut first, &mut second].into_iter().filter(|_| kill) {
            engine.running(1).await;
            engine.kill();
        }
        assert_stopped(response.await.unwrap().unwrap()).await;
        assert_stopped(ask(&lab, "poison").send().await.unwrap()).await;
        assert_eq!(third.requests(), 0);
        assert_eq!(ask(&lab, "hi").send().await.unwrap().status(), 200, "another request is served");
    }
}

#[tokio::test]
async fn a_client_that_gave_up_ends_one_more_engine_at_most() {
    let lab = GatewayLab::start(limits()).await;
    let mut first = lab.engine("a", victim(vec![ScriptStep::Prepare]));
    lab.publish(&[("m", DeploymentState::Ready, &[&first])]);
    let response = tokio::spawn(ask(&lab, "poison").send());
    first.running(1).await;
    first.kill();
    // Held for the next engine, the client leaves.
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 1\n").await;
    response.abort();
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 0\n").await;
    let mut second = lab.engine("b", victim(vec![ScriptStep::Prepare]));
    let third = lab.engine("c", victim(vec![ScriptStep::Prepare]));
    lab.publish(&[("m", DeploymentState::Ready, &[&second, &third])]);
    let response = tokio::spawn(ask(&lab, "poison").send());
    second.running(1).await;
    second.kill();
    assert_stopped(response.await.unwrap().unwrap()).await;
    assert_eq!(third.requests(), 0);
}

#[tokio::test]
async fn requests_beside_a_poison_request_are_answered() {
    let lab = GatewayLab::start(limits()).await;
    let mut first = lab.engine("a", |_| vec![ScriptStep::Prepare]);
    lab.publish(&[("m", DeploymentState::Ready, &[&first])]);
    let contents = ["one", "poison", "two", "three"];
    let responses = contents.map(|content| tokio::spawn(ask(&lab, content).send()));
    first.running(contents.len()).await;
    let mut second = lab.engine("b", victim(vec![ScriptStep::Prepare]));
    // The connections break before the cluster knows that the engine is gone.
    first.kill();
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 4\n").await;
    lab.publish(&[("m", DeploymentState::Ready, &[&second])]);
    second.received("poison").await;
    second.kill();
    wait_for_metric(&lab, "error_code=\"poison_request\",model_name=\"m\"} 1\n").await;
    let third = lab.engine("c", victim(vec![ScriptStep::Prepare]));
    lab.publish(&[("m", DeploymentState::Ready, &[&third])]);
    for (content, response) in contents.into_iter().zip(responses) {
        let response = response.await.unwrap().unwrap();
        match content {
            "poison" => assert_stopped(response).await,
            _ => assert_eq!(response.status(), 200, "{content}"),
        }
    }
    let received = third.received.lock().unwrap();
    assert!(received.iter().all(|request| request.messages[0].content != "poison"));
}

/// The way to an engine, which breaks and is whole again at once.
struct Cable {
    address: std::net::SocketAddr,
    /// How often it broke.
    breaks: watch::Sender<u32>,
}

impl Cable {
    async fn to(engine: std::net::SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, breaks) = (listener.local_addr().unwrap(), watch::Sender::new(0));
        let broken = breaks.subscribe();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut broken = broken.clone();
                broken.mark_unchanged();
                tokio::spawn(async move {
                    let mut far = TcpStream::connect(engine).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = broken.changed() => {}
                    }
                });
            }
        });
        Self { address, breaks }
    }

    fn cut(&self) {
        self.breaks.send_modify(|breaks| *breaks += 1);
    }
}

#[tokio::test]
async fn a_request_that_a_lost_engine_may_not_have_got_is_sent_on() {
    let lab = GatewayLab::start(limits()).await;
    let mut first = lab.engine("a", |_| vec![ScriptStep::Prepare]);
    lab.publish(&[("m", DeploymentState::Ready, &[&first])]);
    let responses = ["one", "two"].map(|content| tokio::spawn(ask(&lab, content).send()));
    first.running(2).await;
    first.kill();
    let sent = AtomicUsize::new(0);
    let mut second = lab.engine("b", move |_| match sent.fetch_add(1, Ordering::Relaxed) {
        0 | 1 => vec![ScriptStep::Prepare],
        _ => hello(),
    });
    let cable = Cable::to(second.address).await;
    second.address = cable.address;
    lab.publish(&[("m", DeploymentState::Ready, &[&second])]);
    // The one is alone there, and convicted. Of the other one this engine says no word, so it may not have got it.
    for sent in [1, 2] {
        second.requested(sent).await;
        cable.cut();
    }
    let mut answered = Vec::new();
    for response in responses {
        let response = response.await.unwrap().unwrap();
        answered.push(response.status().as_u16());
        if response.status() != 200 {
            assert_stopped(response).await;
        }
    }
    answered.sort_unstable();
    assert_eq!(answered, [200, 500]);
}
