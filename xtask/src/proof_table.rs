//! `cargo xtask proof hostile` and `proof attempts`: programs that print a line of a table for each thing they tried, and
//! the page in docs/evidence. A line is `AREA | cell | cell`.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tally::run_reading;
use crate::{bench, cargo, mlx, setup, suites, test_binaries};

/// A table: the program that prints it, and its page.
pub struct ProofTable {
    /// The word after `proof`, and the first cell of its lines.
    pub area: &'static str,
    title: &'static str,
    about: &'static str,
    columns: &'static [&'static str],
    program: fn(&mlx::Prepared) -> Result<Command>,
}

/// All of them.
pub const PROOF_TABLES: &[ProofTable] = &[
    ProofTable {
        area: "hostile",
        title: "Hostile inputs",
        about: "\
Each input is sent by a tenant to `russet up` on one machine (debug build, 2 cores). The process that reads it must answer, \
go on, and grow by less than 64 MiB; the agent that reads headers holds less than 500 MiB. Meanwhile another namespace asks \
one request after the other; the goal is that the slowest is answered within a second.",
        columns: &["input", "process", "answer", "grew by, MiB", "others' slowest, ms", "within 1 s"],
        program: |_| Ok(Command::new(cargo::programs().join("russet-hostile"))),
    },
    ProofTable {
        area: "attempts",
        title: "Attempts",
        about: "\
What each identity tries on Russet's own API server: its own work, which must succeed, and other actions, which must be \
refused with 403 and a message that names the action. `cargo xtask oracle attempts` tries the same on kube-apiserver. A \
tenant's rows are what it tries on another tenant of one machine: it is refused, or what both get is apart.",
        columns: &["identity", "attempt", "answer"],
        program: |prepared| test_binaries::command(prepared, "attempts"),
    },
];

impl ProofTable {
    /// Runs the program; the page is written whatever it found, and a failure is an error.
    pub fn proof(&self, arguments: &[String]) -> Result<()> {
        ensure!(
            arguments.is_empty(),
            "cargo xtask proof {} takes nothing more: its table is whole",
            self.area
        );
        let commit = bench::commit()?;
        let prepared = setup::all()?;
        suites::build_with(&prepared)?;
        let mut rows = Vec::new();
        let mut program = (self.program)(&prepared)?;
        let (tally, clean) = run_reading(&mut program, &mut |line| rows.extend(self.row(line)))?;
        let path = cargo::root().join(format!("docs/evidence/{}.md", self.area));
        fs::write(&path, self.page(&rows, &commit)).with_context(|| format!("write {}", path.display()))?;
        println!("{tally}");
        ensure!(clean && tally.failed == 0, "{} failed", self.area);
        ensure!(!rows.is_empty(), "{} printed no row", self.area);
        Ok(())
    }

    /// The cells of a line, if it is one of the table's.
    fn row(&self, line: &str) -> Option<String> {
        let (before, cells) = line.split_once(" | ")?;
        let own = before.trim_end().rsplit(' ').next() == Some(self.area);
        (own && cells.split(" | ").count() == self.columns.len()).then(|| cells.to_owned())
    }

    fn page(&self, rows: &[String], commit: &str) -> String {
        let Self { area, title, about, columns, .. } = self;
        let mut page = format!(
            "# {title}\n\n`cargo xtask proof {area}`, at {commit}. {about}\n\n| {} |\n|{}\n",
            columns.join(" | "),
            "---|".repeat(columns.len())
        );
        for row in rows {
            let _ = writeln!(page, "| {row} |");
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_areas_own_lines_with_all_cells() {
        let [hostile, attempts] = PROOF_TABLES else { panic!("two tables") };
        let line = "hostile | aliases | API server | 400 | 3 | 7 | yes";
        assert_eq!(hostile.row(line).as_deref(), Some("aliases | API server | 400 | 3 | 7 | yes"));
        assert_eq!(attempts.row(line), None);
        assert_eq!(
            attempts.row("attempts | node | read a Secret | 403"),
            Some("node | read a Secret | 403".into())
        );
        for line in ["hostile | too few", "serve hostile: a | b", "test attempts ... ok", ""] {
            assert_eq!(hostile.row(line), None, "{line}");
        }
        let page = hostile.page(&["a | b".into()], "abc");
        assert!(
            page.contains("`cargo xtask proof hostile`, at abc.") && page.ends_with("|\n| a | b |\n"),
            "{page}"
        );
    }
}
