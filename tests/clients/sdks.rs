//! SDKs of Python and npm, and requests of programs without a command line: the checks are in `sdks.py` and `sdks.mjs`,
//! which print a report as JSON.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::machine::{GATEWAY, Machine, bounded, environment};
use crate::report::ClientReport;

/// Time for all checks of one client.
const RUN_TIMEOUT: Duration = Duration::from_secs(180);
/// The model of all of them.
const MODEL: &str = "sdk";
/// The variables that name the Python, and a package of npm beside which the others are.
pub const PYTHON: &str = "RUSSET_PYTHON_SDKS";
pub const NODE: &str = "RUSSET_NODE_SDKS";

/// A client, by its name in the script.
pub struct Sdk {
    /// Its name.
    pub name: &'static str,
    /// The variable that names what runs it.
    pub program: &'static str,
    /// What is not shown, and why.
    pub left_out: &'static [&'static str],
}

const fn sdk(name: &'static str, program: &'static str, left_out: &'static [&'static str]) -> Sdk {
    Sdk { name, program, left_out }
}

/// All of them.
pub const ALL: &[Sdk] = &[
    sdk("openai-python", PYTHON, &["its own tests, which the scenario `openai_sdk` runs; images and sound"]),
    sdk("openai-node", NODE, &["its own tests, which npm does not carry"]),
    sdk(
        "open-responses",
        PYTHON,
        &["image input: no model here has eyes", "the compliance test itself, which wants bun"],
    ),
    sdk("anthropic-python", PYTHON, &[]),
    sdk("anthropic-node", NODE, &[]),
    sdk(
        "ollama-python",
        PYTHON,
        &["pull, copy and delete, which the tests of the gateway run", "push and create"],
    ),
    sdk("ollama-js", NODE, &["pull, copy and delete, which the tests of the gateway run", "push and create"]),
    sdk("ollama-integration", PYTHON, &["cases of its own library of models, of embeddings and of images"]),
    sdk("langchain-openai", PYTHON, &[]),
    sdk("langchain-anthropic", PYTHON, &[]),
    sdk("langchain-ollama", PYTHON, &[]),
    sdk("litellm", PYTHON, &["its proxy"]),
    sdk("ai-sdk", NODE, &[]),
    sdk("open-webui", PYTHON, &["itself: its requests are replayed"]),
    sdk("home-assistant", PYTHON, &["itself: its requests are replayed"]),
];

/// The model calls `add`, answers when it sees the sum, and greets where there are no tools.
fn script() -> Value {
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 17, \"b\": 25}}\n</tool_call>";
    json!({
        "steps": [{"answer": format!("I add.\n{call}")}, {"answer": "The sum is 42.", "seen": "42"}],
        "aside": "Hello, client: 日本 🙂.",
    })
}

/// Runs the checks of a client.
pub async fn run(sdk: &Sdk, machine: &mut Machine) -> Option<ClientReport> {
    let program = PathBuf::from(std::env::var_os(sdk.program)?);
    let left_out = sdk.left_out.iter().map(|&text| text.to_owned()).collect();
    let mut report = ClientReport { name: sdk.name.to_owned(), left_out, ..ClientReport::default() };
    if let Err(error) = checks(sdk, &program, machine, &mut report).await {
        report.failed.push(format!("{error:#}"));
    }
    Some(report)
}

async fn checks(sdk: &Sdk, program: &Path, machine: &mut Machine, report: &mut ClientReport) -> Result<()> {
    machine.deploy_once(MODEL, &script()).await?;
    let (home, work) = (machine.folder("client")?, machine.folder("work")?);
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients");
    let mut command = match sdk.program {
        PYTHON => {
            let mut python = Command::new(program);
            python.arg(scripts.join("sdks.py"));
            python
        }
        // Modules are found from where the script is.
        _ => {
            let packages = program.parent().context("a package is in a folder")?;
            symlink(packages, work.join("node_modules"))?;
            std::fs::copy(scripts.join("sdks.mjs"), work.join("sdks.mjs"))?;
            let mut node = Command::new("node");
            node.arg("sdks.mjs");
            node
        }
    };
    command.args([sdk.name, GATEWAY, MODEL]).current_dir(&work);
    let more = BTreeMap::from([("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("PYTHONDONTWRITEBYTECODE", "1")]);
    let ended = bounded(environment(&mut command, &home, &more), RUN_TIMEOUT).await?;
    let last = ended.stdout.lines().last().unwrap_or_default();
    let said: Value = serde_json::from_str(last).with_context(|| format!("it says no report: {ended:?}"))?;
    report.version = said["version"].as_str().unwrap_or_default().to_owned();
    let names = |field: &str| -> Vec<String> {
        let all = said[field].as_array().map(Vec::as_slice).unwrap_or_default();
        all.iter().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    report.passed.extend(names("passed"));
    report.failed.extend(names("failed"));
    ensure!(!report.passed.is_empty() || !report.failed.is_empty(), "it has no checks: {ended:?}");
    Ok(())
}
