//! Fenced blocks of a page, and what is done with each: commands are executed, YAML is applied, Python runs. Nothing
//! here knows a command.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// A fenced block.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// Line of its first content in the page, from 1.
    pub line: usize,
    /// The word after the fence; empty without one.
    pub language: String,
    /// Its content without the indentation of the fence.
    pub text: String,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A shell command, with the output that the page shows under it.
    Command { line: usize, text: String, shown: Option<String> },
    /// YAML documents.
    Yaml { line: usize, text: String },
    /// A Python program.
    Python { line: usize, text: String },
}

/// Programs that begin a command; a block without a language that begins with one is a mistake of the page.
const PROGRAMS: [&str; 6] = ["russet", "kubectl", "curl", "cargo", "helm", "export"];

/// The fenced blocks of a page, in order.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for (number, line) in (1..).zip(page.lines()) {
        let indent = line.len() - line.trim_start().len();
        let fence = line.trim_start().strip_prefix("```");
        open = match (open.take(), fence) {
            (None, None) => None,
            (None, Some(language)) => {
                let language = language.trim().to_owned();
                Some((indent, Block { line: number + 1, language, text: String::new() }))
            }
            (Some((_, block)), Some(_)) => {
                blocks.push(block);
                None
            }
            (Some((indent, mut block)), None) => {
                let content = line.char_indices().nth(indent).map_or("", |(at, _)| &line[at..]);
                block.text += if line.trim().is_empty() { "" } else { content };
                block.text.push('\n');
                Some((indent, block))
            }
        };
    }
    blocks
}

/// What a block asks for. A language that is not known here is an error, so that no block is passed over silently.
pub fn steps(block: &Block) -> Result<Vec<Step>> {
    let Block { line, language, text } = block;
    Ok(match language.as_str() {
        "sh" | "bash" | "shell" => commands(*line, text)?,
        "console" => session(*line, text),
        "" if text.starts_with("$ ") => session(*line, text),
        "" => match text.lines().find(|line| PROGRAMS.contains(&line.split(' ').next().unwrap_or(""))) {
            Some(command) => bail!("line {line}: {command:?} is in a block without a language; write ```sh"),
            None => Vec::new(),
        },
        "yaml" => vec![Step::Yaml { line: *line, text: text.clone() }],
        "python" => vec![Step::Python { line: *line, text: text.clone() }],
        "json" | "toml" | "text" => Vec::new(),
        other => bail!(
            "line {line}: blocks in {other:?} are not executed yet; tests/documents/blocks.rs says which are"
        ),
    })
}

/// Commands of a script, each with all its lines: bash says where one ends.
fn commands(line: usize, script: &str) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut text = String::new();
    let mut begin = line;
    for (number, content) in (line..).zip(script.lines()) {
        if text.is_empty() {
            begin = number;
            if content.trim().is_empty() || content.starts_with('#') {
                continue;
            }
        }
        text += content;
        text.push('\n');
        if is_complete(&text)? {
            steps.push(Step::Command { line: begin, text: std::mem::take(&mut text), shown: None });
        }
    }
    match text.is_empty() {
        true => Ok(steps),
        false => bail!("line {begin}: bash does not accept this command:\n{text}"),
    }
}

/// Whether bash would execute this text instead of asking for another line.
fn is_complete(text: &str) -> Result<bool> {
    if text.ends_with("\\\n") {
        return Ok(false);
    }
    let output = Command::new("bash").args(["-n", "-c", text]).output().context("cannot run bash")?;
    // A here-document without its end is only a warning.
    Ok(output.status.success() && output.stderr.is_empty())
}

/// Commands after `$ `, each with the output under it.
fn session(line: usize, text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for (number, content) in (line..).zip(text.lines()) {
        if let Some(command) = content.strip_prefix("$ ") {
            let text = format!("{command}\n");
            steps.push(Step::Command { line: number, text, shown: Some(String::new()) });
        } else if let Some(Step::Command { shown: Some(shown), .. }) = steps.last_mut() {
            shown.push_str(content);
            shown.push('\n');
        }
    }
    steps
}

/// Code spans outside fenced blocks, with their lines.
pub fn spans(page: &str) -> Vec<(usize, String)> {
    let mut spans = Vec::new();
    let mut fenced = false;
    for (number, line) in (1..).zip(page.lines()) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            spans.extend(line.split('`').skip(1).step_by(2).map(|span| (number, span.to_owned())));
        }
    }
    spans
}
