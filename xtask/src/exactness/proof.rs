//! `cargo xtask proof exactness [--missing] [PART...]`: every group, whole, and the table of what was found in
//! docs/evidence.

use std::{collections::BTreeMap, fmt::Write as _, fs};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{cases::Case, matrix, prepared, support};
use crate::{bench::commit, cargo, setup, test_binaries};

const PAGE: &str = "docs/evidence/exactness.md";
const ABOUT: &str = "\
Every group of `engine/tests/exactness/variants.json` beside mlx-lm, with the same weights and the same `libmlx.so`: layers \
per stage, and members of a stage where there are several. A field is the largest difference of a log-probability, the \
tokens compared, and those that differ where the oracle's two best are as close as the rule excuses (the rule: \
`engine/tests/exactness/main.rs`). Apart: one sequence a step, as mlx-lm computes. In batches: four together. With drafts: \
several tokens a step, some of them wrong. Unread: each step begun before the token before it is read. Beside a single \
rank: a group of members and mlx-lm on one process.";
const COLUMNS: [&str; 5] = ["", "in batches ", "with drafts ", "unread ", "beside a single rank "];
const HEAD: &str = "| group | apart | in batches | with drafts | unread | beside a single rank | commit |\n\
    |---|---|---|---|---|---|---|\n";

/// Compares all groups, those that the page has no line of, or those with one of some parts in their names; lines of
/// others stay.
pub fn proof(arguments: &[String]) -> Result<()> {
    let path = cargo::root().join(PAGE);
    let former = fs::read_to_string(&path).unwrap_or_default();
    let is_wanted = |name: &str| {
        let by = |argument: &String| match argument.as_str() {
            "--missing" => !has_line(&former, name),
            part => name.contains(part),
        };
        arguments.is_empty() || arguments.iter().any(by)
    };
    let commit = commit()?;
    let (mlx, python) = setup::with_python()?;
    let matrix = matrix()?;
    let every = matrix.cases();
    let names: Vec<String> = every.iter().map(Case::name).collect();
    let cases: Vec<Case> = every.into_iter().filter(|case| is_wanted(&case.name())).collect();
    ensure!(!cases.is_empty(), "no group is meant by {arguments:?}");
    let variables = prepared(&python, &matrix, &cases)?;
    let report = std::path::absolute(cargo::programs().join("exactness-report.json"))?;
    let mut test = test_binaries::command(&mlx, "exactness")?;
    test.envs(variables).env("RUSSET_EXACTNESS_REPORT", &report);
    cargo::run(&mut test)?;
    let found = fs::read(&report).with_context(|| format!("read {}", report.display()))?;
    let found: Vec<Value> = serde_json::from_slice(&found)?;
    ensure!(found.len() == cases.len(), "{} of {} groups were reported", found.len(), cases.len());
    let page = page(&former, &names, &found, &commit);
    fs::write(&path, &page)?;
    let in_page = |case: &Case| has_line(&page, &case.name());
    let shown: Vec<Case> = matrix.cases().into_iter().filter(in_page).collect();
    let models = cargo::root().join(support::PAGE);
    let text = fs::read_to_string(&models).with_context(|| format!("read {}", models.display()))?;
    fs::write(&models, support::page(&text, &matrix, &shown)?)?;
    println!("{page}");
    Ok(())
}

/// Whether a page has a line of a group.
fn has_line(page: &str, name: &str) -> bool {
    page.contains(&format!("\n| {name} |"))
}

/// The page with new lines in place of those of the same groups; groups that are no more are left out.
fn page(former: &str, names: &[String], found: &[Value], commit: &str) -> String {
    let mut lines: BTreeMap<&str, String> = BTreeMap::new();
    let old = former.split_once(HEAD).map_or("", |(_, lines)| lines).lines();
    lines.extend(
        old.filter_map(|line| Some((line.split(" | ").next()?.strip_prefix("| ")?, line.to_owned()))),
    );
    for group in found {
        let Some(name) = group["name"].as_str() else { continue };
        let reports = group["reports"].as_array().map_or(&[][..], Vec::as_slice);
        let fields = COLUMNS.map(|column| {
            reports.iter().find(|report| report["beside"] == column).map_or(String::new(), |report| {
                let difference = report["largest_difference"].as_f64().unwrap_or(f64::NAN);
                let apart = if column == "unread " { String::new() } else { format!("{difference:.1e}, ") };
                format!("{apart}{} tokens, {} excused", report["tokens"], report["excused"])
            })
        });
        lines.insert(name, format!("| {name} | {} | {commit} |", fields.join(" | ")));
    }
    let mut text = format!("# The same tokens as mlx-lm\n\n`cargo xtask proof exactness`. {ABOUT}\n\n{HEAD}");
    for line in names.iter().filter_map(|name| lines.get(name.as_str())) {
        let _ = writeln!(text, "{line}");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_page_keeps_the_lines_of_groups_that_were_not_compared() {
        let names = ["a on [1]", "b on [2] by 2"].map(str::to_owned);
        let group = |name: &str, difference: f64| {
            let report = |beside: &str| json!({ "beside": beside, "tokens": 4, "largest_difference": difference, "close_calls": 1, "excused": 0 });
            json!({ "name": name, "reports": [report(""), report("unread ")], "seconds": 1.0 })
        };
        let first =
            page("", &names, &[group(&names[0], 0.5), group(&names[1], 0.25), group("gone", 1.0)], "one");
        let second = page(&first, &names, &[group(&names[1], 0.125)], "two");
        for (text, line) in [
            (&first, "| b on [2] by 2 | 2.5e-1, 4 tokens, 0 excused |  |  | 4 tokens, 0 excused |  | one |"),
            (&second, "| a on [1] | 5.0e-1, 4 tokens, 0 excused |  |  | 4 tokens, 0 excused |  | one |"),
            (&second, "| b on [2] by 2 | 1.2e-1, 4 tokens, 0 excused |  |  | 4 tokens, 0 excused |  | two |"),
        ] {
            assert!(text.lines().any(|other| other == line), "{text}");
        }
        assert!(!second.contains("gone"), "{second}");
    }
}
