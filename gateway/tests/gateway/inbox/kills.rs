//! A process with an inbox that is killed as its requests pass each transition, and a next one that finds them all.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use super::*;

/// Makes the test below the process that it kills, with an inbox in this folder.
const FOLDER: &str = "RUSSET_INBOX_OF_A_KILLED_PROCESS";
/// How often it is killed at each transition.
const KILLS: usize = 20;
/// Requests that are sent in each life, by so many clients at once.
const REQUESTS: usize = 90;
const CLIENTS: usize = 30;

/// Sends requests until it is killed, and says what became of each as soon as it knows.
async fn send_until_killed(folder: &Path) {
    let lab = GatewayLab::start_in(folder).await;
    // Long enough that each of the states is seen.
    let engine = lab.engine("a", |request| {
        let text = request.messages[0].content.clone();
        let mut steps = vec![started()];
        steps.extend((0..50).map(|_| token(&text)));
        steps.push(finished(FinishReason::Stop));
        steps
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let lab = &lab;
    let requests = futures::stream::iter(0..REQUESTS).map(|number| async move {
        let text = format!("<{number}>");
        let chat = lab.chat(json!({"messages": [{"role": "user", "content": text}]}));
        let id = accepted(chat.key(&format!("k{number}")).respond_async()).await;
        println!("pending {id} {number}");
        loop {
            let (_, request) = lab.inbox(Method::GET, &format!("/{id}")).await;
            match request["status"].as_str() {
                Some("leased") => println!("leased {id} {number}"),
                Some("done") => break println!("done {id} {number}"),
                _ => {}
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    requests.buffer_unordered(CLIENTS).collect::<Vec<()>>().await;
    println!("all are done");
    std::future::pending::<()>().await;
}

/// Runs the process in this folder and kills it once it has said so many lines that begin with `word`; what it said.
fn kill_after(folder: &Path, word: &str, count: usize) -> BTreeMap<String, (String, usize)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "inbox::kills::a_kill_at_any_transition_loses_nothing", "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (mut said, mut seen) = (BTreeMap::new(), 0);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while let Some(Ok(line)) = lines.next() {
        // What it said before it was killed counts.
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [state @ ("pending" | "leased" | "done"), id, number] => {
                said.insert(id.to_owned(), (state.to_owned(), number.parse().unwrap()));
                seen += usize::from(state == word);
            }
            ["all", ..] => seen = count,
            _ => {}
        }
        if seen >= count {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    said
}

#[test]
fn a_kill_at_any_transition_loses_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Some(folder) = std::env::var_os(FOLDER) {
        runtime.block_on(send_until_killed(Path::new(&folder)));
        return;
    }
    let (mut requests, mut cut) = (0, 0);
    for word in ["pending", "leased", "done"] {
        for kill in 0..KILLS {
            let folder = tempfile::tempdir().unwrap();
            let said = kill_after(folder.path(), word, 1 + kill * 4);
            assert!(said.len() >= kill * 4 / 50, "{word} {kill}: {said:?}");
            requests += said.len();
            cut += said.values().filter(|(state, _)| state != "done").count();
            runtime.block_on(async {
                let lab = GatewayLab::start_in(folder.path()).await;
                let engine = lab.engine("a", |request| {
                    let text = request.messages[0].content.clone();
                    vec![started(), token(&text), finished(FinishReason::Stop)]
                });
                lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
                for (id, (state, number)) in &said {
                    let ended = lab.inbox_is(id, "done").await;
                    let content = &ended["response"]["body"]["choices"][0]["message"]["content"];
                    // Of this life or of the one before, and its own.
                    let times = if ended["attempts"] == 1 && state == "done" { &[50][..] } else { &[1, 50] };
                    let texts: Vec<String> =
                        times.iter().map(|times| format!("<{number}>").repeat(*times)).collect();
                    assert!(texts.iter().any(|text| content == text), "{word} {kill} {id}: {ended}");
                }
                lab.kill().await;
            });
        }
    }
    println!("{} kills: {requests} requests were accepted, {cut} of them cut, and all are done", 3 * KILLS);
}
