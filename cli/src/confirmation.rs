//! A question that a person answers with yes or no before something is changed.

use std::io::{BufRead as _, IsTerminal as _};

use anyhow::{Result, ensure};

use crate::stdout::out;

/// Asks `question`, unless `yes` answers it already. An error says why nothing may be changed.
pub fn confirm(question: &str, yes: bool) -> Result<()> {
    if yes {
        return Ok(());
    }
    let input = std::io::stdin();
    ensure!(
        input.is_terminal(),
        "standard input is not a terminal, so there is no confirmation; confirm with --yes"
    );
    out!("{question} [y/N] ")?;
    let mut line = String::new();
    input.lock().read_line(&mut line)?;
    ensure!(matches!(line.trim(), "y" | "Y" | "yes"), "nothing was changed");
    Ok(())
}
