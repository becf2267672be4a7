//! The clients that Russet can set up: one file each, and one line in `ALL`. Each is a plain description of what the
//! client reads and sends. Not here: how files are written and requests sent.

mod aider;
mod claude_code;
mod codex;
mod continue_dev;
mod hermes;
mod home_assistant;
mod open_webui;
mod opencode;
mod qwen_code;
mod xcode;
mod zed;

use super::setup::ClientProgram;

/// All of them, in the order of `--help`.
pub const ALL: &[&ClientProgram] = &[
    &claude_code::CLIENT,
    &codex::CLIENT,
    &opencode::CLIENT,
    &qwen_code::CLIENT,
    &hermes::CLIENT,
    &aider::CLIENT,
    &continue_dev::CLIENT,
    &zed::CLIENT,
    &xcode::CLIENT,
    &open_webui::CLIENT,
    &home_assistant::CLIENT,
];

/// The client of a name.
pub fn find(name: &str) -> Option<&'static ClientProgram> {
    ALL.iter().copied().find(|client| client.name == name)
}

#[cfg(test)]
mod tests;
