//! Aider. It calls no tools: it puts the file into the prompt, takes the edit out of the text, and runs the command that it
//! was given as its test.

use serde_json::json;

use super::{Agent, COMMAND, DONE};

/// Aider.
pub const AGENT: Agent = Agent {
    name: "aider",
    program: "RUSSET_AIDER",
    arguments: &[
        "--yes-always",
        "--no-git",
        "--no-check-update",
        "--no-show-release-notes",
        "--analytics-disable",
        "--no-show-model-warnings",
        "--no-pretty",
        "--auto-test",
        "--test-cmd",
        COMMAND,
        "--message",
        "TASK",
        "fruit.txt",
    ],
    environment: &[("LITELLM_LOCAL_MODEL_COST_MAP", "True")],
    script: |_| {
        let answer = format!("{DONE}\n\nfruit.txt\n```\napples\ncherries\nplums\n```\n");
        json!({"steps": [{"answer": answer, "seen": "pears"}], "aside": "nothing", "without_tools": true})
    },
    left_out: &["tools, which it does not call"],
};
