//! Hermes Agent, as `hermes chat -q`.

use std::path::Path;

use serde_json::{Value, json};

use super::{Agent, COMMAND, FILE, script};

/// Hermes Agent.
pub const AGENT: Agent = Agent {
    name: "hermes",
    program: "RUSSET_HERMES",
    arguments: &["chat", "--yolo", "-q", "TASK"],
    environment: &[],
    script: |work| script(calls(work)),
    left_out: &["its messengers"],
};

/// Its calls of tools for the task, in this folder.
pub fn calls(work: &Path) -> [(&'static str, Value); 3] {
    let file = work.join(FILE);
    let edit = json!({"mode": "replace", "path": file, "old_string": "pears", "new_string": "cherries"});
    [("read_file", json!({"path": file})), ("patch", edit), ("terminal", json!({"command": COMMAND}))]
}
