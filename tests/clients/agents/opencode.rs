//! OpenCode, as `opencode run`.

use serde_json::json;

use super::{Agent, COMMAND, FILE, script};

/// OpenCode.
pub const AGENT: Agent = Agent {
    name: "opencode",
    program: "RUSSET_OPENCODE",
    arguments: &["run", "TASK"],
    environment: &[
        ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
        ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
        ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1"),
    ],
    script: |work| {
        let file = work.join(FILE);
        script([
            ("read", json!({"filePath": file})),
            ("edit", json!({"filePath": file, "oldString": "pears", "newString": "cherries"})),
            ("bash", json!({"command": COMMAND, "description": "Leave a trace"})),
        ])
    },
    left_out: &["its window: it ran headless"],
};
