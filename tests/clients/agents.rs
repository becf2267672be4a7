//! Coding agents, headless: each reads a file, edits it by a tool call, runs a command and ends, twice; the second time its
//! prompt is cached. One file and one line each. The settings are what `russet client` writes.

mod aider;
mod claude_code;
mod codex;
pub mod hermes;
mod opencode;
mod qwen_code;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::machine::{GATEWAY, Machine, TokenCounts, bounded, environment};
use crate::report::{ClientReport, version_in};

/// All of them, the quickest first.
pub const ALL: &[&Agent] =
    &[&codex::AGENT, &opencode::AGENT, &claude_code::AGENT, &qwen_code::AGENT, &aider::AGENT, &hermes::AGENT];

/// Time for one run of an agent, which reads a prompt of up to 20,000 tokens on a CPU.
pub const RUN_TIMEOUT: Duration = Duration::from_secs(300);
/// The largest share of its prompts that the second run may read again.
const MAX_READ_AGAIN: f64 = 0.1;

/// The file before and after.
pub const BEFORE: &str = "apples\npears\nplums\n";
pub const AFTER: &str = "apples\ncherries\nplums\n";
/// Its name in the agent's folder.
pub const FILE: &str = "fruit.txt";
/// The command that an agent runs, and what it leaves.
pub const COMMAND: &str = "echo traced | tee -a trace.txt";
pub const TRACE: &str = "traced\n";
/// What the person asks for. The model follows its script.
const TASK: &str = "In fruit.txt, replace pears by cherries. Then run the command that leaves a trace.";
/// The last answer.
pub const DONE: &str = "The pears are cherries: 🍒 done.";

/// An agent.
pub struct Agent {
    /// Its name at `russet client`.
    pub name: &'static str,
    /// The variable that names its program.
    pub program: &'static str,
    /// Arguments; `TASK` stands for what the person asks for.
    pub arguments: &'static [&'static str],
    /// Variables, by which it neither updates itself nor reports.
    pub environment: &'static [(&'static str, &'static str)],
    /// What its model answers, in a folder.
    pub script: fn(&Path) -> Value,
    /// What is not shown, and why.
    pub left_out: &'static [&'static str],
}

/// A script of three calls of tools and an end: the file's text is in the first result, and the command's in the third.
pub fn script(calls: [(&str, Value); 3]) -> Value {
    let texts = ["I read the file first.", "Now the edit.", "Now the command."];
    let seen = ["", "pears", "", "traced"];
    let calls = texts.iter().zip(calls).map(|(text, (name, arguments))| {
        format!("{text}\n<tool_call>\n{}\n</tool_call>", json!({"name": name, "arguments": arguments}))
    });
    let answers = calls.chain([DONE.to_owned()]);
    let steps: Vec<Value> =
        answers.zip(seen).map(|(answer, seen)| json!({"answer": answer, "seen": seen})).collect();
    json!({"steps": steps, "aside": "Cherries instead of pears"})
}

/// Runs an agent; without its program nothing is said of it.
pub async fn run(agent: &Agent, machine: &Machine) -> Option<ClientReport> {
    let program = PathBuf::from(std::env::var_os(agent.program)?);
    let left_out = agent.left_out.iter().map(|&text| text.to_owned()).collect();
    let mut report = ClientReport { name: agent.name.to_owned(), left_out, ..ClientReport::default() };
    let outcome = all_checks(agent, &program, machine, &mut report).await;
    if let Err(error) = outcome {
        report.failed.push(format!("{error:#}"));
    }
    Some(report)
}

async fn all_checks(
    agent: &Agent,
    program: &Path,
    machine: &Machine,
    report: &mut ClientReport,
) -> Result<()> {
    let Agent { name, script, .. } = agent;
    let (home, work) = (machine.folder("client")?, machine.folder("work")?);
    let mut version = Command::new(program);
    let ended = bounded(environment(version.arg("--version"), &home, &settings(agent)), RUN_TIMEOUT).await?;
    report.version = version_in(&ended.stdout).with_context(|| format!("no version in {ended:?}"))?;
    machine.deploy(name, &script(&work)).await?;
    let client = ["client", name, "--url", GATEWAY, "--model", name];
    let applied = machine.russet(&home, &[&client[..], &["--apply"]].concat()).await;
    report.record("russet client --apply", applied);
    let checked = machine.russet(&home, &[&client[..], &["--check"]].concat()).await;
    report.record("russet client --check", checked);
    let first = one_run(agent, program, machine, &home).await;
    if report.record("first run", first).is_some() {
        let second = one_run(agent, program, machine, &home).await;
        if let Some(tokens) = report.record("second run", second) {
            report.record("cached prompt", is_cached(tokens));
        }
    }
    machine.delete(name).await
}

/// One run in a new folder; the tokens of its prompts.
async fn one_run(agent: &Agent, program: &Path, machine: &Machine, home: &Path) -> Result<TokenCounts> {
    let work = machine.folder("work")?;
    std::fs::write(work.join(FILE), BEFORE)?;
    let before = machine.tokens(agent.name).await?;
    let mut command = Command::new(program);
    command
        .args(agent.arguments.iter().map(|&word| if word == "TASK" { TASK } else { word }))
        .current_dir(&work);
    let ended = bounded(environment(&mut command, home, &settings(agent)), RUN_TIMEOUT).await?;
    let said = format!("{}\n{}", ended.stdout, ended.stderr);
    ensure!(ended.code == Some(0), "it ended with {:?}:\n{said}", ended.code);
    ensure!(ended.stdout.contains(DONE), "it does not print the last answer:\n{said}");
    let file = std::fs::read_to_string(work.join(FILE))?;
    ensure!(file == AFTER, "the file is {file:?}:\n{said}");
    let trace = std::fs::read_to_string(work.join("trace.txt")).unwrap_or_default();
    ensure!(trace == TRACE, "the command left {trace:?}:\n{said}");
    let after = machine.tokens(agent.name).await?;
    Ok(TokenCounts { prompt: after.prompt - before.prompt, cached: after.cached - before.cached })
}

fn is_cached(tokens: TokenCounts) -> Result<()> {
    let TokenCounts { prompt, cached } = tokens;
    ensure!(prompt > 0, "the gateway counted no tokens");
    let read = prompt - cached.min(prompt);
    println!("  second run: {read} of {prompt} tokens of its prompts were read");
    let share = read as f64 / prompt as f64;
    ensure!(share <= MAX_READ_AGAIN, "{read} of {prompt} tokens of its prompts were read again");
    Ok(())
}

fn settings(agent: &Agent) -> BTreeMap<&'static str, &'static str> {
    agent.environment.iter().copied().collect()
}
