//! Qwen Code, as `qwen -p`.

use serde_json::json;

use super::{Agent, COMMAND, FILE, script};

/// Qwen Code.
pub const AGENT: Agent = Agent {
    name: "qwen-code",
    program: "RUSSET_QWEN_CODE",
    arguments: &["--yolo", "-p", "TASK"],
    environment: &[("QWEN_CODE_SUPPRESS_YOLO_WARNING", "1")],
    script: |work| {
        let file = work.join(FILE);
        script([
            ("read_file", json!({"file_path": file})),
            ("edit", json!({"file_path": file, "old_string": "pears", "new_string": "cherries"})),
            (
                "run_shell_command",
                json!({"command": COMMAND, "description": "Leave a trace", "is_background": false}),
            ),
        ])
    },
    left_out: &["its window: it ran headless"],
};
