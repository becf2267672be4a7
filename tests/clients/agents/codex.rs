//! Codex. For a model that it does not know it has no tool for edits: it takes patches out of commands.

use serde_json::json;

use super::{Agent, COMMAND, script};

/// Codex.
pub const AGENT: Agent = Agent {
    name: "codex",
    program: "RUSSET_CODEX",
    // The sandbox needs user namespaces, which not every machine allows.
    arguments: &["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "TASK"],
    environment: &[],
    script: |_| {
        let patch = "apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: fruit.txt\n@@\n apples\n-pears\n+cherries\n \
                     plums\n*** End Patch\nEOF\n";
        script([
            ("exec_command", json!({"cmd": "cat fruit.txt"})),
            ("exec_command", json!({"cmd": patch})),
            ("exec_command", json!({"cmd": COMMAND})),
        ])
    },
    left_out: &[
        "its sandbox, which needs user namespaces",
        "web search and OpenAI's own tools, which no server here has",
    ],
};
