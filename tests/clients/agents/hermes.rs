//! Hermes Agent, as `hermes chat -q`.

use serde_json::json;

use super::{Agent, COMMAND, FILE, script};

/// Hermes Agent.
pub const AGENT: Agent = Agent {
    name: "hermes",
    program: "RUSSET_HERMES",
    arguments: &["chat", "--yolo", "-q", "TASK"],
    environment: &[],
    script: |work| {
        let file = work.join(FILE);
        script([
            ("read_file", json!({"path": file})),
            (
                "patch",
                json!({"mode": "replace", "path": file, "old_string": "pears", "new_string": "cherries"}),
            ),
            ("terminal", json!({"command": COMMAND})),
        ])
    },
    left_out: &["its messengers"],
};
