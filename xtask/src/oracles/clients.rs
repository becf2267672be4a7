//! Clients of the gateway, of pinned versions: agents of the command line from npm and PyPI, and SDKs. They are not built
//! here and never shipped. `cargo xtask oracle clients` runs them (`tests/clients`).

use std::path::PathBuf;

use anyhow::Result;

use super::npm::NpmProgram;
use crate::python;

/// Variables that give tests the path of a client.
pub const CLAUDE_CODE: &str = "RUSSET_CLAUDE_CODE";
pub const CODEX: &str = "RUSSET_CODEX";
pub const OPENCODE: &str = "RUSSET_OPENCODE";
pub const QWEN_CODE: &str = "RUSSET_QWEN_CODE";
pub const AIDER: &str = "RUSSET_AIDER";
pub const HERMES: &str = "RUSSET_HERMES";
pub const PYTHON_SDKS: &str = "RUSSET_PYTHON_SDKS";
pub const NODE_SDKS: &str = "RUSSET_NODE_SDKS";

/// All of them.
pub const ALL: &[&str] = &[PYTHON_SDKS, NODE_SDKS, CODEX, OPENCODE, CLAUDE_CODE, QWEN_CODE, AIDER, HERMES];
/// Those that CI installs and runs: each other one is a download of hundreds of megabytes.
const QUICK: &[&str] = &[PYTHON_SDKS, NODE_SDKS, CODEX];

/// Agents of npm. Of some the package is a script that finds the platform's own program, as their install scripts do.
const CLAUDE_CODE_PROGRAM: NpmProgram = NpmProgram {
    name: "claude-code",
    version: "2.1.332",
    packages: &["@anthropic-ai/claude-code@2.1.332"],
    program: "@anthropic-ai/claude-code-PLATFORM/claude",
};
const CODEX_PROGRAM: NpmProgram = NpmProgram {
    name: "codex",
    version: "0.171.0",
    packages: &["@openai/codex@0.171.0"],
    program: ".bin/codex",
};
const OPENCODE_PROGRAM: NpmProgram = NpmProgram {
    name: "opencode",
    version: "1.18.33",
    packages: &["opencode-ai@1.18.33"],
    program: "opencode-PLATFORM/bin/opencode",
};
const QWEN_CODE_PROGRAM: NpmProgram = NpmProgram {
    name: "qwen-code",
    version: "0.24.4",
    packages: &["@qwen-code/qwen-code@0.24.4"],
    program: ".bin/qwen",
};
/// SDKs of npm; the "program" is one of the packages, beside which the others are.
const NODE_SDK_PACKAGES: NpmProgram = NpmProgram {
    name: "node-sdks",
    version: "1",
    packages: &[
        "openai@7.59.0",
        "@anthropic-ai/sdk@1.14.0",
        "ollama@0.6.4",
        "ai@7.0.173",
        "@ai-sdk/openai-compatible@3.0.92",
        "zod@4.6.7",
    ],
    program: "ai",
};

/// Agents and SDKs of PyPI.
const AIDER_PINS: &str = "aider-chat==0.86.2\n";
const HERMES_PINS: &str = "hermes-agent==0.19.0\n";
const PYTHON_SDK_PINS: &str = "openai==3.57.0\nanthropic==2.14.0\nollama==0.6.3\nlitellm==1.110.2\n\
                               langchain-openai==1.7.4\nlangchain-anthropic==1.7.10\nlangchain-ollama==1.1.0\n";

/// Whether CI runs it too.
pub fn is_quick(variable: &str) -> bool {
    QUICK.contains(&variable)
}

/// The program of a variable, installed if missing; `None` for one that names no client.
pub fn program(variable: &str) -> Option<Result<PathBuf>> {
    let of_python = |what, pins, program: &str| {
        python::environment(what, pins).map(|python| python.programs().join(program))
    };
    Some(match variable {
        CLAUDE_CODE => CLAUDE_CODE_PROGRAM.installed(),
        CODEX => CODEX_PROGRAM.installed(),
        OPENCODE => OPENCODE_PROGRAM.installed(),
        QWEN_CODE => QWEN_CODE_PROGRAM.installed(),
        NODE_SDKS => NODE_SDK_PACKAGES.installed(),
        AIDER => of_python("Aider", AIDER_PINS, "aider"),
        HERMES => of_python("Hermes Agent", HERMES_PINS, "hermes"),
        PYTHON_SDKS => of_python("SDKs of clients", PYTHON_SDK_PINS, "python3"),
        _ => return None,
    })
}
