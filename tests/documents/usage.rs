//! Commands that pages mention in their text: `russet VERB --flag` must be a verb and a flag that `--help` shows.
//! They are not executed.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{program, repository};

use crate::blocks::{self, Step};

/// Every page, and README.md.
fn pages() -> Result<Vec<String>> {
    let mut names = vec!["README.md".to_owned(), "ARCHITECTURE.md".to_owned()];
    for folder in ["docs", "docs/design"] {
        for entry in std::fs::read_dir(repository().join(folder))? {
            let name = format!("{folder}/{}", entry?.file_name().to_string_lossy());
            if name.ends_with(".md") {
                names.push(name);
            }
        }
    }
    names.sort();
    Ok(names)
}

/// Help texts by verbs, each asked for once.
#[derive(Default)]
struct Help(BTreeMap<Vec<String>, String>);

impl Help {
    fn of(&mut self, verbs: &[String]) -> Result<&str> {
        if !self.0.contains_key(verbs) {
            let output = Command::new(program("russet")?).args(verbs).arg("--help").output()?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            self.0.insert(verbs.to_vec(), if output.status.success() { text } else { String::new() });
        }
        self.0.get(verbs).map(String::as_str).context("the help was just inserted")
    }

    /// What is wrong with a command line that begins with `russet`.
    fn fault(&mut self, command: &str) -> Result<Option<String>> {
        let mut verbs: Vec<String> = Vec::new();
        for word in words(command) {
            let help = self.of(&verbs)?;
            if let Some(flag) = word.strip_prefix("--") {
                let flag = flag.split('=').next().unwrap_or(flag);
                if !help
                    .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
                    .any(|shown| shown == format!("--{flag}"))
                {
                    return Ok(Some(format!("`russet {}` has no --{flag}", verbs.join(" "))));
                }
            } else if help.contains("\nCommands:\n") && is_verb(word) {
                // Verbs of services are hidden, and have a help text all the same.
                let longer = [verbs.as_slice(), &[word.to_owned()]].concat();
                if self.of(&longer)?.is_empty() {
                    return Ok(Some(format!(
                        "`{}` has no verb {word}",
                        ["russet".to_owned()].into_iter().chain(verbs).collect::<Vec<_>>().join(" ")
                    )));
                }
                verbs.push(word.to_owned());
            }
        }
        Ok(None)
    }
}

/// The words of a command up to what belongs to another one.
fn words(command: &str) -> impl Iterator<Item = &str> {
    let end = |word: &&str| !["|", "&&", "||", ">", "#", "--"].contains(word);
    command.split_whitespace().skip(1).take_while(end).map(|word| word.trim_end_matches([',', ']', ')']))
}

fn is_verb(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-')
}

/// Every mentioned verb and flag exists.
pub fn pages_name_what_there_is() -> Result<()> {
    let (mut help, mut faults, mut checked) = (Help::default(), Vec::new(), 0);
    for name in pages()? {
        let text = std::fs::read_to_string(repository().join(&name))?;
        let mut commands = blocks::spans(&text);
        for block in blocks::blocks(&text) {
            // Only the five pages promise that every block can be executed.
            for step in blocks::steps(&block).unwrap_or_default() {
                if let Step::Command { line, text, .. } = step {
                    commands.push((line, text));
                }
            }
        }
        for (line, command) in commands.iter().filter(|(_, command)| command.starts_with("russet ")) {
            checked += 1;
            if let Some(fault) = help.fault(command)? {
                faults.push(format!("{name}:{line}: {fault}"));
            }
        }
    }
    println!("  {checked} mentioned commands");
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}
