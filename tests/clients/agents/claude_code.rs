//! Claude Code, as `claude -p`.

use serde_json::json;

use super::{Agent, COMMAND, FILE, script};

/// Claude Code.
pub const AGENT: Agent = Agent {
    name: "claude-code",
    program: "RUSSET_CLAUDE_CODE",
    // Root may not skip permissions.
    arguments: &["-p", "TASK", "--allowedTools", "Read,Edit,Bash"],
    environment: &[("DISABLE_AUTOUPDATER", "1"), ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")],
    script: |work| {
        let file = work.join(FILE);
        script([
            ("Read", json!({"file_path": file})),
            ("Edit", json!({"file_path": file, "old_string": "pears", "new_string": "cherries"})),
            ("Bash", json!({"command": COMMAND, "description": "Leave a trace"})),
        ])
    },
    left_out: &["its window: it ran headless", "web search, which Anthropic's servers do"],
};
