//! The choice among replicas: a conversation goes on where its beginning is cached, also when another gateway began it.

use russet_gateway::routes::DeploymentState;
use russet_gateway::strip_patterns::StripPatterns;
use russet_rpc::engine as pb;
use russet_wire::event::{Delta, FinishReason, GenerationEvent, Usage};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, limits};

/// A short answer.
fn answer() -> Vec<ScriptStep> {
    let usage = Usage { prompt_tokens: 9, completion_tokens: 1, cached_tokens: 0 };
    vec![
        ScriptStep::Say(GenerationEvent::Started { prompt_tokens: 9, emitted_tokens: 0 }),
        ScriptStep::Say(GenerationEvent::Token { id: 1, delta: Delta::text("yes") }),
        ScriptStep::Say(GenerationEvent::Finished { reason: FinishReason::Stop, usage }),
    ]
}

/// A conversation of an agent: a long text of the system, and so many turns.
fn conversation(agent: &str, turns: usize) -> Value {
    let system =
        [json!({"role": "system", "content": format!("You are {agent}. ") + &"Be brief. ".repeat(2000)})];
    let turn = |number: usize| {
        let content = format!("Question {number} of {agent}?");
        [json!({"role": "user", "content": content}), json!({"role": "assistant", "content": "yes"})]
    };
    let turns = (0..turns).flat_map(turn);
    let question = json!({"role": "user", "content": "And now?"});
    Value::from(system.into_iter().chain(turns).chain([question]).collect::<Vec<_>>())
}

async fn ask(lab: &GatewayLab, agent: &str, turns: usize) {
    let response = lab.chat(json!({"messages": conversation(agent, turns)})).send().await.unwrap();
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
}

fn counts<const N: usize>(engines: [&ScriptedEngine; N]) -> [usize; N] {
    engines.map(ScriptedEngine::requests)
}

/// Sends first turns until one shows that the gateway follows: the engine that has the beginning of this agent gets it twice
/// in a row, which it does not by turns.
async fn followed(lab: &GatewayLab, engine: &ScriptedEngine, agent: &str) {
    let followed = tokio::time::timeout(TEST_TIMEOUT, async {
        let mut in_a_row = 0;
        while in_a_row < 3 {
            let before = engine.requests();
            ask(lab, agent, 0).await;
            in_a_row = if engine.requests() > before { in_a_row + 1 } else { 0 };
        }
    });
    assert!(followed.await.is_ok(), "the gateway does not follow what the engine has cached");
}

#[tokio::test]
async fn a_conversation_goes_on_where_its_beginning_is() {
    let lab = GatewayLab::start(limits()).await;
    let engines = ["a", "b", "c"].map(|node| lab.engine(node, |_| answer()));
    let [a, b, c] = &engines;
    // It has other prompts.
    a.has_cached(&[pb::PrefixMark { key: 1, bytes: 1 }]);
    c.has_cached(&[pb::PrefixMark { key: 2, bytes: 1 }]);
    lab.publish(&[("m", DeploymentState::Ready, &[a, b, c])]);
    ask(&lab, "one", 0).await;
    ask(&lab, "two", 0).await;
    ask(&lab, "three", 0).await;
    assert_eq!(counts([a, b, c]), [1, 1, 1], "by turns, while nothing is known");
    let marks = b.marks.lock().unwrap()[0].clone();
    assert!(marks.len() > 5, "within the long text and at the end: {marks:?}");
    b.has_cached(&marks);
    followed(&lab, b, "two").await;
    let before = counts([a, b, c]);
    for turns in 1..5 {
        ask(&lab, "two", turns).await;
    }
    let after = counts([a, b, c]);
    assert_eq!([after[0] - before[0], after[1] - before[1], after[2] - before[2]], [0, 4, 0]);
    // What is evicted is no reason any more.
    let blocks = marks.iter().map(|mark| mark.key.to_le_bytes().to_vec()).collect();
    b.prefixes.send_modify(|events| {
        events.push(pb::PrefixesEvent { evicted: blocks, ..pb::PrefixesEvent::default() });
    });
    let spread = tokio::time::timeout(TEST_TIMEOUT, async {
        let before = counts([a, c]);
        while counts([a, c]) == before {
            ask(&lab, "two", 5).await;
        }
    });
    assert!(spread.await.is_ok(), "it still goes where nothing is left");
}

#[tokio::test]
async fn a_second_gateway_knows_where_a_beginning_is() {
    let (first, second) = (GatewayLab::start(limits()).await, GatewayLab::start(limits()).await);
    let engines = ["a", "b"].map(|node| first.engine(node, |_| answer()));
    let [a, b] = &engines;
    let same = ["a", "b"].map(|node| second.engine(node, |_| answer()));
    first.publish(&[("m", DeploymentState::Ready, &[a, b])]);
    second.publish(&[("m", DeploymentState::Ready, &[&same[0], &same[1]])]);
    ask(&first, "one", 0).await;
    let marks = a.marks.lock().unwrap()[0].clone();
    // An engine tells every gateway what was read for any of them.
    same[1].has_cached(&marks);
    followed(&second, &same[1], "one").await;
    let before = counts([&same[0], &same[1]]);
    ask(&second, "one", 3).await;
    assert_eq!(counts([&same[0], &same[1]]), [before[0], before[1] + 1]);
}

#[tokio::test]
async fn what_a_deployment_strips_is_in_no_prompt() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(answer());
    let ask = async |date: &str| {
        let system = format!("Be brief.\nToday is {date}.\nYou are an agent.");
        let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": "hi"}]);
        let response = lab.chat(json!({"messages": messages})).send().await.unwrap();
        assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
        let request = engine.received.lock().unwrap().pop().unwrap();
        (request.messages[0].content.clone(), engine.marks.lock().unwrap().pop().unwrap())
    };
    let (whole, before) = ask("Monday").await;
    assert!(whole.contains("Monday"), "{whole}");
    assert_ne!(ask("Tuesday").await.1, before);
    // An edit acts at once.
    lab.change(|table| {
        let patterns = [r"(?m)^Today is .*\n".to_owned()];
        table.deployments[0].defaults.strip_patterns = StripPatterns::new(&patterns);
    });
    let (stripped, marks) = ask("Wednesday").await;
    assert_eq!(stripped, "Be brief.\nYou are an agent.");
    assert_eq!(ask("Thursday").await, (stripped, marks));
}
