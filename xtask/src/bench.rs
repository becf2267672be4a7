//! `cargo xtask bench AREA`: figures with their goals, as a table, as JSON lines, or written into
//! docs/benchmarks.md; and `cargo xtask proof AREA`: the same over many rounds, written to docs/evidence. An
//! area is a file beside this one and a line in [`AREAS`].

mod control_plane;
mod engine;
mod faults;
mod gateway;
mod memory;
mod operator;
mod plan;
mod replicas;
mod soak;
mod spread;
mod store;
mod tunnel;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::proof_table::PROOF_TABLES;
use crate::{cargo, exactness, fuzz, mlx, scenarios, setup, suites};

/// Everything that can be measured.
const AREAS: &[Area] = &[
    Area { name: "faults", about: faults::ABOUT, run: faults::run },
    Area { name: "engine", about: engine::ABOUT, run: engine::run },
    Area { name: "families", about: engine::FAMILIES, run: engine::families },
    Area { name: "structured", about: engine::STRUCTURED, run: engine::structured },
    Area { name: "gateway", about: gateway::ABOUT, run: gateway::run },
    Area { name: "control-plane", about: control_plane::ABOUT, run: control_plane::run },
    Area { name: "memory", about: memory::ABOUT, run: memory::run },
    Area { name: "operator", about: operator::ABOUT, run: operator::run },
    Area { name: "plan", about: plan::ABOUT, run: plan::run },
    Area { name: "replicas", about: replicas::ABOUT, run: replicas::run },
    Area { name: "soak", about: soak::ABOUT, run: soak::run },
    Area { name: "spread", about: spread::ABOUT, run: spread::run },
    Area { name: "store", about: store::ABOUT, run: store::run },
    Area { name: "tunnel", about: tunnel::ABOUT, run: tunnel::run },
];

/// The figures that a program prints, each as JSON at the end of a line: a test prints its name before it.
fn figures(command: &mut Command, name: &str) -> Result<Vec<Value>> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot run {name}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{name} ended with {}:\n{text}", output.status);
    let printed = text.lines().filter_map(|line| line.find('{').map(|from| &line[from..]));
    let read = |line: &str| serde_json::from_str(line).with_context(|| format!("not a figure: {line}"));
    let figures: Vec<Value> = printed.map(read).collect::<Result<_>>()?;
    ensure!(!figures.is_empty(), "{name} printed no figure:\n{text}");
    Ok(figures)
}

/// One thing to measure, with everything built that it needs.
struct Area {
    name: &'static str,
    /// Method, in sentences for docs/benchmarks.md.
    about: &'static str,
    run: fn(&mlx::Prepared) -> Result<Vec<BenchRow>>,
}

/// A figure, its comparison, and its goal.
pub struct BenchRow {
    /// The area's name.
    pub area: &'static str,
    /// What was measured; the same for all rounds of one measurement.
    pub what: String,
    pub ours: f64,
    /// The figure of the program that we compare with, in the same run.
    pub peer: Option<f64>,
    /// Unit of `ours` and `peer`.
    pub unit: &'static str,
    /// Ratio of ours to the peer's; the goal applies to it if there is one, and to `ours` otherwise.
    pub ratio: Option<f64>,
    pub goal: Goal,
}

/// The goal of a figure.
#[derive(Clone, Copy)]
#[allow(dead_code, reason = "which bounds are in use changes with the areas")]
pub enum Goal {
    AtLeast(f64),
    AtMost(f64),
    /// No goal; reported only.
    None,
}

impl Goal {
    fn met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
            Self::None => true,
        }
    }

    /// Ordering with the worst last.
    fn worse(self, a: f64, b: f64) -> std::cmp::Ordering {
        match self {
            Self::AtLeast(_) => b.total_cmp(&a),
            Self::AtMost(_) | Self::None => a.total_cmp(&b),
        }
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(bound) => write!(out, "≥ {bound}"),
            Self::AtMost(bound) => write!(out, "≤ {bound}"),
            Self::None => out.write_str("none"),
        }
    }
}

impl BenchRow {
    /// The figure that the goal applies to.
    fn judged(&self) -> f64 {
        self.ratio.unwrap_or(self.ours)
    }

    fn met(&self) -> bool {
        self.goal.met(self.judged())
    }

    fn verdict(&self) -> &'static str {
        match (self.goal, self.met()) {
            (Goal::None, _) => "",
            (_, true) => "yes",
            (_, false) => "NO",
        }
    }

    fn json(&self) -> serde_json::Value {
        let goal = match self.goal {
            Goal::AtLeast(bound) | Goal::AtMost(bound) => Some(bound),
            Goal::None => None,
        };
        serde_json::json!({
            "area": self.area, "what": self.what, "ours": self.ours, "peer": self.peer, "unit": self.unit,
            "ratio": self.ratio, "goal": goal, "met": self.met(),
        })
    }
}

/// `bench AREA [--json] [--write]`: runs one area once.
pub fn bench(arguments: &[String]) -> Result<()> {
    let area = area(arguments)?;
    let asked = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let rows = (area.run)(&prepare()?)?;
    ensure!(!rows.is_empty(), "no figure was measured");
    if asked("--json") {
        rows.iter().for_each(|row| println!("{}", row.json()));
    } else {
        print!("{}", table(&rows));
    }
    if asked("--write") {
        let path = cargo::root().join("docs/benchmarks.md");
        let page = std::fs::read_to_string(&path).unwrap_or_default();
        std::fs::write(&path, with_section(&page, area.name, &section(area, &rows)?))?;
    }
    let missed: Vec<&str> = rows.iter().filter(|row| !row.met()).map(|row| row.what.as_str()).collect();
    ensure!(missed.is_empty(), "goals were missed: {}", missed.join("; "));
    Ok(())
}

/// `proof AREA [N] [ONLY]`: runs one area many times and writes the table. `ONLY` selects faults and groups of memory by a part of
/// their names; other lines stay, with the commit they were measured at. For a soak `N` are seconds.
pub fn proof(arguments: &[String]) -> Result<()> {
    // Their tables have no rounds.
    match arguments.split_first() {
        Some((area, rest)) if area == "exactness" => return exactness::proof(rest),
        Some((area, rest)) if area == "fuzz" => return fuzz::proof(rest),
        Some((area, rest)) if area == "scenarios" => return scenarios::proof(rest),
        Some((area, rest)) => {
            if let Some(table) = PROOF_TABLES.iter().find(|table| table.area == area) {
                return table.proof(rest);
            }
        }
        None => {}
    }
    let area = area(arguments)?;
    let rounds: usize = arguments
        .get(1)
        .map_or(Ok(5), |text| text.parse())
        .context("the second word is a number of rounds")?;
    ensure!(rounds > 0, "a proof needs at least one round");
    // Later commits are not what was measured.
    let commit = commit()?;
    let prepared = prepare()?;
    let (mut measured, mut failed) = (Vec::new(), Vec::new());
    // Faults are repeated on one cluster; starting one each time would take longer than the faults.
    if area.name == "faults" {
        let proof = faults::many(&prepared, rounds, arguments.get(2).map(String::as_str));
        (measured, failed) = (proof.rows, proof.failed);
    } else if area.name == "soak" {
        measured = soak::for_seconds(&prepared, rounds)?;
    } else if area.name == "store" {
        measured = store::many(&prepared, rounds)?;
    } else {
        for round in 1..=rounds {
            println!("▸ round {round} of {rounds}");
            measured.extend(match arguments.get(2).filter(|_| area.name == "memory") {
                Some(only) => memory::some(&prepared, only)?,
                None => (area.run)(&prepared)?,
            });
        }
    }
    if area.name == "plan" {
        measured.extend(plan::proof(&prepared)?);
    }
    let folder = cargo::root().join("docs/evidence");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{}.md", area.name));
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    let text = evidence(area, &page, measured, &commit);
    std::fs::write(path, &text)?;
    println!("{text}");
    ensure!(failed.is_empty(), "scenarios failed and were not written:\n{}", failed.join("\n"));
    Ok(())
}

/// The page of an area's proof: new lines replace those of the same measurement, others are kept.
fn evidence(area: &Area, page: &str, measured: Vec<BenchRow>, commit: &str) -> String {
    // The current columns; lines of older pages are dropped.
    const HEAD: &str = "| what | rounds | median | worst | goal | commit |\n|---|---|---|---|---|---|\n";
    let existing = page.split_once(HEAD).map_or("", |(_, lines)| lines).lines();
    let what = |line: &str| line.split('|').nth(1).map(|what| what.trim().to_owned());
    let mut lines: BTreeMap<String, String> =
        existing.filter_map(|line| Some((what(line)?, line.to_owned()))).collect();
    let mut figures: BTreeMap<String, Vec<BenchRow>> = BTreeMap::new();
    for row in measured {
        figures.entry(row.what.clone()).or_default().push(row);
    }
    for (what, rows) in figures {
        let goal = rows[0].goal;
        let unit = if rows[0].ratio.is_some() { "×" } else { rows[0].unit };
        let mut values: Vec<f64> = rows.iter().map(BenchRow::judged).collect();
        values.sort_by(|a, b| goal.worse(*a, *b));
        let (median, worst) = (values[values.len() / 2], values[values.len() - 1]);
        let line = format!(
            "| {what} | {} | {median:.2} {unit} | {worst:.2} {unit} | {goal} | {commit} |",
            values.len()
        );
        faults::former(&what).iter().for_each(|former| drop(lines.remove(*former)));
        lines.insert(what, line);
    }
    let mut text = format!(
        "# {}, many times\n\n`cargo xtask proof {} N`. {}\n\n{HEAD}",
        area.name, area.name, area.about
    );
    for line in lines.values() {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn area(arguments: &[String]) -> Result<&'static Area> {
    let asked = arguments.first().map_or("", String::as_str);
    let names: Vec<&str> = AREAS.iter().map(|area| area.name).collect();
    AREAS
        .iter()
        .find(|area| area.name == asked)
        .with_context(|| format!("area {asked:?} is not known; there are: {}", names.join(", ")))
}

fn prepare() -> Result<mlx::Prepared> {
    let prepared = setup::all()?;
    suites::build(&[])?;
    Ok(prepared)
}

/// The commit, and whether anything but the pages these commands write differs from it.
pub fn commit() -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let output = Command::new("git").args(arguments).current_dir(cargo::root()).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let pages = [":!docs/evidence", ":!docs/benchmarks.md"];
    let changes =
        git(&[["status", "--porcelain", "--untracked-files=no", "--", "."].as_slice(), &pages].concat())?;
    Ok(git(&["rev-parse", "--short", "HEAD"])? + if changes.is_empty() { "" } else { "-dirty" })
}

/// Three significant digits, whatever the size.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn optional(value: Option<f64>) -> String {
    value.map(figure).unwrap_or_default()
}

/// The same table for the terminal and for the page.
fn table(rows: &[BenchRow]) -> String {
    let mut text =
        "| what | ours | peer | unit | ratio | goal | met |\n|---|---|---|---|---|---|---|\n".to_owned();
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} |",
            row.what,
            figure(row.ours),
            optional(row.peer),
            row.unit,
            optional(row.ratio),
            row.goal,
            row.verdict()
        );
    }
    text
}

fn section(area: &Area, rows: &[BenchRow]) -> Result<String> {
    let cores = std::thread::available_parallelism()?;
    Ok(format!(
        "## {}\n\n{}\n\n`cargo xtask bench {}` at commit {} on {cores} cores:\n\n{}",
        area.name,
        area.about,
        area.name,
        commit()?,
        table(rows)
    ))
}

/// The page with one area's section inserted or replaced.
fn with_section(page: &str, name: &str, section: &str) -> String {
    let (begin, end) = (format!("<!-- bench {name} -->"), format!("<!-- end of {name} -->"));
    let body = format!("{begin}\n{section}{end}\n");
    let page = if page.is_empty() { INTRODUCTION } else { page };
    match page.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1))) {
        Some((before, after)) => format!("{before}{body}{}", after.strip_prefix('\n').unwrap_or(after)),
        None => format!("{page}\n{body}"),
    }
}

const INTRODUCTION: &str = "\
# Benchmarks

Every section is written by `cargo xtask bench AREA --write` and says the commit and the machine it was \
run on. A goal that is not met stays here and says NO. The machine is small and shared; figures of a pair come from the same run.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_put_in_once_and_replaced_after_that() {
        let first = with_section("", "faults", "old\n");
        let both = with_section(&first, "engine", "other\n");
        let again = with_section(&both, "faults", "new\n");
        assert!(again.starts_with("# Benchmarks"));
        assert!(again.contains("<!-- bench faults -->\nnew\n<!-- end of faults -->\n"), "{again}");
        assert!(again.contains("<!-- bench engine -->\nother\n<!-- end of engine -->\n"), "{again}");
        assert!(!again.contains("old"));
        assert_eq!(with_section(&again, "faults", "new\n"), again);
    }

    #[test]
    fn new_measurements_replace_their_former_lines() {
        let area = area(&["faults".to_owned()]).unwrap();
        let row = |what: &str, ours| BenchRow {
            area: "faults",
            what: what.to_owned(),
            ours,
            peer: None,
            unit: "s",
            ratio: None,
            goal: Goal::AtMost(10.0),
        };
        let old =
            ["rank 0 killed, stream ended", "agent cut off, called unreachable"].map(|what| row(what, 1.0));
        let page = evidence(area, "", old.into(), "a");
        let page = evidence(area, &page, vec![row("rank 0 killed, streams stood still", 2.0)], "b");
        assert!(
            page.contains("| rank 0 killed, streams stood still | 1 | 2.00 s | 2.00 s | ≤ 10 | b |"),
            "{page}"
        );
        assert!(
            page.contains("| agent cut off, called unreachable | 1 | 1.00 s | 1.00 s | ≤ 10 | a |"),
            "{page}"
        );
        assert!(!page.contains("stream ended"), "{page}");
    }

    #[test]
    fn a_goal_is_for_the_ratio_where_there_is_one() {
        let row = |ratio, goal| BenchRow {
            area: "a",
            what: "w".into(),
            ours: 3.0,
            peer: None,
            unit: "s",
            ratio,
            goal,
        };
        for (ratio, goal, met) in [
            (None, Goal::AtMost(3.0), true),
            (None, Goal::AtLeast(3.5), false),
            (Some(0.9), Goal::AtLeast(0.97), false),
            (Some(0.98), Goal::AtLeast(0.97), true),
            (Some(0.1), Goal::None, true),
        ] {
            assert_eq!(row(ratio, goal).met(), met, "{goal}");
            assert_eq!(row(ratio, goal).json()["met"], met);
        }
    }
}
