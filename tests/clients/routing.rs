//! Hermes Agent against a cluster of two tiers, a daily one and one for reasoning, behind one name: which of them answers which
//! of its requests, by the gateway's own log, and that no conversation changes between them. Both models follow scripts; what
//! they answer says which of them did.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::agents::{AFTER, BEFORE, FILE, RUN_TIMEOUT, TRACE, hermes, script};
use crate::machine::{EndedRequest, GATEWAY, Machine, ProgramOutput, bounded, environment};
use crate::report::{ClientReport, version_in};

/// The name of the trial.
pub const NAME: &str = "hermes routing";
/// The variable that names Hermes Agent's program.
pub const PROGRAM: &str = hermes::AGENT.program;

/// The tiers: deployments, and what each answers to questions and to requests without tools.
const DAILY: &str = "daily";
const REASONING: &str = "reasoning";
/// The name that Hermes knows.
const AUTO: &str = "auto";
/// The last deployment of a conversation may end its request after the program has.
const LOG_TIMEOUT: Duration = Duration::from_secs(30);

/// Hermes offers its tools with every request, and with tools that edit files and run commands each is `Code`, unless the user
/// asks for reasoning. So it is the complexity that tells work from talk.
const ROUTE: &str = "apiVersion: russet.dev/v1alpha1
kind: ModelRoute
metadata: {name: auto}
spec:
  models: [auto]
  rules:
  - name: think
    match: {tasks: [Reasoning]}
    targets: [{deploymentRef: {name: reasoning}}, {deploymentRef: {name: daily}}]
  - name: work
    match: {tasks: [Code], tools: Present, complexityAbovePercent: 20}
    pick: Fastest
    targets: [{deploymentRef: {name: reasoning}}, {deploymentRef: {name: daily}}]
  targets: [{deploymentRef: {name: daily}}, {deploymentRef: {name: reasoning}}]
";

/// An everyday question.
const QUESTION: &str = "What is a good name for a cat?";
/// One that takes thinking.
const PROBLEM: &str = "Prove step by step that there are infinitely many primes. Compare the proof with Euclid's, and say why \
                       it needs no contradiction.";
/// Work on a file, with its conditions and a piece of a program.
const WORK: &str = "In fruit.txt, replace pears by cherries as this does:\n```\nsed -i s/pears/cherries/ fruit.txt\n```\n\
                    Change only that word, exactly once, and never the others. Then run the command that leaves a trace.";

/// A run of `hermes chat`, and what is expected of it.
struct Scenario {
    /// The name of its check.
    check: &'static str,
    /// The model that it is told to use.
    model: &'static str,
    /// What the person says.
    prompt: &'static str,
    /// The rule that decides; none where none matches.
    rule: Option<&'static str>,
    /// The deployment that answers; none where the fastest does, whichever that is.
    deployment: Option<&'static str>,
    /// Requests with tools that a whole conversation has.
    requests: usize,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario {
        check: "an everyday question goes to the daily tier",
        model: AUTO,
        prompt: QUESTION,
        rule: None,
        deployment: Some(DAILY),
        requests: 1,
    },
    Scenario {
        check: "a problem goes to the reasoning tier",
        model: AUTO,
        prompt: PROBLEM,
        rule: Some("think"),
        deployment: Some(REASONING),
        requests: 1,
    },
    Scenario {
        check: "a task in the model's name decides",
        model: "auto:reasoning",
        prompt: QUESTION,
        rule: Some("think"),
        deployment: Some(REASONING),
        requests: 1,
    },
    Scenario {
        check: "work with tools goes to the fastest tier",
        model: AUTO,
        prompt: WORK,
        rule: Some("work"),
        deployment: None,
        requests: 4,
    },
];

/// What a tier says to a question.
fn answer(tier: &str) -> String {
    format!("Mia 🐈, says the {tier} tier.")
}

/// What it says to requests without tools.
fn aside(tier: &str) -> String {
    format!("A helper of the house, by the {tier} tier")
}

/// Runs Hermes Agent; without its program nothing is said of it.
pub async fn run(machine: &Machine) -> Option<ClientReport> {
    let program = PathBuf::from(std::env::var_os(PROGRAM)?);
    let mut report = ClientReport { name: hermes::AGENT.name.to_owned(), ..ClientReport::default() };
    if let Err(error) = all_checks(&program, machine, &mut report).await {
        report.failed.push(format!("{error:#}"));
    }
    Some(report)
}

async fn all_checks(program: &Path, machine: &Machine, report: &mut ClientReport) -> Result<()> {
    let (home, work) = (machine.folder("client")?, machine.folder("work")?);
    let ended = hermes(program, &home, &work, &["--version"]).await?;
    let version = version_in(&ended.stdout).with_context(|| format!("no version in {ended:?}"))?;
    report.version = format!("{version} routing");
    for tier in [DAILY, REASONING] {
        let mut steps = script(hermes::calls(&work));
        steps["question"] = json!({"unless": FILE, "answer": answer(tier)});
        steps["aside"] = aside(tier).into();
        machine.deploy(tier, &steps).await?;
    }
    machine.apply(ROUTE).await?;
    machine.russet(&home, &["client", "hermes", "--url", GATEWAY, "--model", AUTO, "--apply"]).await?;
    let settings = home.join(".hermes/config.yaml");
    let written = std::fs::read_to_string(&settings)?;
    std::fs::write(&settings, format!("{}\n{}", written.trim_end(), auxiliary()))?;
    for scenario in &SCENARIOS {
        let outcome = one_run(scenario, program, machine, &home).await;
        if let Some(answered) = report.record(scenario.check, outcome) {
            println!("  {}: {answered}", scenario.check);
        }
    }
    report
        .record("what it asks for itself goes to the daily tier", own_request(program, machine, &home).await);
    machine.delete_object("modelroutes/auto").await?;
    for tier in [DAILY, REASONING] {
        machine.delete(tier).await?;
    }
    Ok(())
}

/// Hermes' own requests, for titles and descriptions, go to the daily tier by its name.
fn auxiliary() -> String {
    let one = |task: &str| {
        format!("  {task}: {{provider: custom, base_url: '{GATEWAY}/v1', model: {DAILY}, api_key: none}}\n")
    };
    format!("auxiliary:\n{}{}", one("title_generation"), one("profile_describer"))
}

async fn hermes(program: &Path, home: &Path, work: &Path, arguments: &[&str]) -> Result<ProgramOutput> {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(work);
    bounded(environment(&mut command, home, &Default::default()), RUN_TIMEOUT).await
}

/// Runs a conversation; says who answered it.
async fn one_run(scenario: &Scenario, program: &Path, machine: &Machine, home: &Path) -> Result<String> {
    let Scenario { check: _, model, prompt, rule, deployment, requests } = scenario;
    let work = machine.folder("work")?;
    std::fs::write(work.join(FILE), BEFORE)?;
    let before = machine.ended_requests()?.len();
    let ended = hermes(program, home, &work, &["chat", "--yolo", "-m", model, "-q", prompt]).await?;
    let said = format!("{}\n{}", ended.stdout, ended.stderr);
    ensure!(ended.code == Some(0), "it ended with {:?}:\n{said}", ended.code);
    let is_work = prompt.contains(FILE);
    if is_work {
        let file = std::fs::read_to_string(work.join(FILE))?;
        ensure!(file == AFTER, "the file is {file:?}:\n{said}");
        let trace = std::fs::read_to_string(work.join("trace.txt")).unwrap_or_default();
        ensure!(trace == TRACE, "the command left {trace:?}:\n{said}");
    }
    let asked = |ended: &EndedRequest| ended.model == *model;
    let records = records(machine, before, *requests, asked).await?;
    ensure!(records.len() == *requests, "{requests} requests were expected, and {} ended", records.len());
    let mut by = BTreeSet::new();
    for record in &records {
        let by_rule = record["route"]["rule"].as_str();
        ensure!(by_rule == *rule, "{by_rule:?} decided, not {rule:?}: {record}");
        by.insert(answered_by(record)?);
        ensure!(*rule != Some("work") || is_fastest(record), "another replica had a lower score: {record}");
    }
    let by: Vec<String> = by.into_iter().collect();
    let [one] = &by[..] else { anyhow::bail!("the conversation changed between {}", by.join(" and ")) };
    if let Some(expected) = deployment {
        ensure!(one == expected, "{one} answered, not {expected}");
        ensure!(is_work || said.contains(&answer(expected)), "it does not print the answer:\n{said}");
    }
    let facts = &records.first().context("no request")?["route"]["request"];
    Ok(format!(
        "{} of {} requests by {one}; task {}, complexity {}, {} tools",
        records.len(),
        records.len(),
        facts["task"],
        facts["complexity"],
        facts["tools"]
    ))
}

/// The log's records of the requests after the first `before` ones that are meant, once there are so many at least.
async fn records(
    machine: &Machine,
    before: usize,
    count: usize,
    is_meant: impl Fn(&EndedRequest) -> bool,
) -> Result<Vec<Value>> {
    let begin = Instant::now();
    let ended = loop {
        let ended = machine.ended_requests()?;
        let meant: Vec<EndedRequest> =
            ended.iter().skip(before).filter(|one| is_meant(one)).cloned().collect();
        if meant.len() >= count {
            break meant;
        }
        ensure!(
            begin.elapsed() < LOG_TIMEOUT,
            "{} of {count} requests ended: {:?}",
            meant.len(),
            ended.get(before..)
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let mut records = Vec::new();
    for EndedRequest { id, .. } in &ended {
        records.push(machine.why(id).await?);
    }
    Ok(records)
}

/// The name of the deployment that answered.
fn answered_by(record: &Value) -> Result<String> {
    let attempt = record["attempts"].as_array().and_then(|attempts| attempts.last());
    let attempt = attempt.with_context(|| format!("no engine was asked: {record}"))?;
    ensure!(attempt["outcome"]["kind"] == "answered", "it was not answered: {record}");
    let deployment = attempt["deployment"].as_str().context("no deployment")?;
    Ok(deployment.trim_start_matches("default/").to_owned())
}

/// Whether another replica has a score too, and that of the chosen one is no higher, as far as they are not equals
/// (docs/gateway.md, "Choice of a replica").
fn is_fastest(record: &Value) -> bool {
    const EQUAL_SHARE: f64 = 0.02;
    const EQUAL_MILLISECONDS: f64 = 1.0;
    let attempt = record["attempts"].as_array().and_then(|attempts| attempts.last());
    let candidates = attempt.and_then(|attempt| attempt["candidates"].as_array());
    let score = |one: &Value| one["score"]["total"].as_f64();
    let of = |chosen: bool| {
        candidates.into_iter().flatten().filter(move |one| one["chosen"] == chosen).filter_map(score)
    };
    let (Some(chosen), Some(other)) = (of(true).next(), of(false).reduce(f64::min)) else { return false };
    chosen <= (other * (1.0 + EQUAL_SHARE)).max(other + EQUAL_MILLISECONDS)
}

/// Has Hermes describe its profile, which is a request of its own.
async fn own_request(program: &Path, machine: &Machine, home: &Path) -> Result<()> {
    let (work, before) = (machine.folder("work")?, machine.ended_requests()?.len());
    let ended = hermes(program, home, &work, &["profile", "describe", "default", "--auto"]).await?;
    let said = format!("{}\n{}", ended.stdout, ended.stderr);
    ensure!(ended.code == Some(0), "it ended with {:?}:\n{said}", ended.code);
    ensure!(said.contains(&aside(DAILY)), "it does not print the description:\n{said}");
    // A title of a conversation before may have ended in the meantime, by the same name.
    let records = records(machine, before, 1, |ended| ended.model == DAILY).await?;
    let finished = records.iter().filter(|record| record["end"]["kind"] == "finished");
    let by: Vec<String> = finished.map(answered_by).collect::<Result<_>>()?;
    ensure!(!by.is_empty() && by.iter().all(|by| by == DAILY), "{by:?} answered");
    Ok(())
}
