//! What was shown of a client: checks by their names, and what is left out, with the reason.

use std::fmt;

/// The report of one client.
#[derive(Debug, Default)]
pub struct ClientReport {
    /// Its name.
    pub name: String,
    /// Its version, as it says itself.
    pub version: String,
    /// Checks that passed.
    pub passed: Vec<String>,
    /// Checks that failed, with the reason.
    pub failed: Vec<String>,
    /// What is not checked, with the reason.
    pub left_out: Vec<String>,
}

impl ClientReport {
    /// Records a check; returns what it returned, if it passed.
    pub fn record<T>(&mut self, check: &str, outcome: anyhow::Result<T>) -> Option<T> {
        match outcome {
            Ok(value) => {
                self.passed.push(check.to_owned());
                Some(value)
            }
            Err(error) => {
                self.failed.push(format!("{check}: {error:#}"));
                None
            }
        }
    }
}

impl fmt::Display for ClientReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, version, passed, failed, left_out } = self;
        write!(f, "{name} {version}: {} passed, {} failed", passed.len(), failed.len())?;
        if !left_out.is_empty() {
            write!(f, "; left out: {}", left_out.join("; "))?;
        }
        for failure in failed {
            write!(f, "\n  ✗ {}", failure.replace('\n', "\n    "))?;
        }
        Ok(())
    }
}

/// The version in what a program says of itself: the first word with digits and two points.
pub fn version_in(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.split('.').count() >= 3 && word.split('.').take(2).all(|part| part.parse::<u32>().is_ok())
    };
    let words = text.split(|letter: char| letter.is_whitespace() || matches!(letter, '(' | ')' | ','));
    words.map(|word| word.trim_start_matches('v')).find(is_version).map(str::to_owned)
}
