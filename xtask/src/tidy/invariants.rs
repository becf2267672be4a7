//! Whether every invariant has executors that exist, and whether the documents say what the table in
//! `xtask/src/invariants.rs` says.

use std::path::Path;

use super::{Findings, TidySource};
use crate::invariants::{self, INVARIANTS, Invariant, PAGE};

/// The table quotes the names of all executors, so it is no evidence that they exist.
const TABLE: &str = "xtask/src/invariants.rs";

/// The file that has an executor: the test function, the row of a table of tests, or the file itself.
fn place(sources: &[TidySource], name: &str) -> Option<String> {
    let found = |part: &str| {
        sources
            .iter()
            .filter(|source| source.path != Path::new(TABLE))
            .filter(|source| source.text.contains(part))
            .map(|source| source.path.display().to_string())
            .min()
    };
    let file = || sources.iter().find(|source| source.path == Path::new(name)).map(|_| name.to_owned());
    found(&format!("fn {name}(")).or_else(|| found(&format!("\"{name}\""))).or_else(file)
}

/// The text that `docs/invariants.md` should have.
pub fn page(sources: &[TidySource]) -> String {
    invariants::page(INVARIANTS, |name| place(sources, name))
}

/// Executors that are no test, no check and no file.
pub fn missing(sources: &[TidySource], rules: &[Invariant]) -> Findings {
    let mut findings = Vec::new();
    for (number, rule) in (1..).zip(rules) {
        for name in rule.executors.iter().filter(|name| place(sources, name).is_none()) {
            findings.push(format!("{TABLE}: I{number} names `{name}`, which is no check and no test"));
        }
        if rule.executors.is_empty() && !rule.rule.contains("yet") {
            findings.push(format!("{TABLE}: nothing executes I{number}, and its rule does not say so"));
        }
    }
    findings
}

/// Whether the page is the generated one.
pub fn stale(page: &str, written: &str) -> Findings {
    if page == written {
        return Vec::new();
    }
    vec![format!("{PAGE} is old: run `cargo xtask tidy --write` and commit")]
}

/// Lines about invariants in ARCHITECTURE.md that are missing, wrong or left over.
pub fn unlisted(architecture: &str, rules: &[Invariant]) -> Findings {
    let expected: Vec<String> =
        (1..).zip(rules).map(|(number, rule)| invariants::line(number, rule)).collect();
    let listed: Vec<&str> = architecture.lines().filter(|line| line.starts_with("- **I")).collect();
    let missing = expected
        .iter()
        .filter(|line| !listed.contains(&line.as_str()))
        .map(|line| format!("ARCHITECTURE.md lacks the line: {line}"));
    let left_over = listed
        .iter()
        .filter(|line| !expected.iter().any(|expected| expected == *line))
        .map(|line| format!("ARCHITECTURE.md has a line that {TABLE} does not know: {line}"));
    missing.chain(left_over).collect()
}

#[cfg(test)]
mod tests {
    use super::{TidySource, missing, place, stale, unlisted};
    use crate::invariants::Invariant;

    fn source(path: &str, text: &str) -> TidySource {
        TidySource { path: path.into(), text: text.to_owned() }
    }

    fn rule(executors: &'static [&'static str]) -> Invariant {
        Invariant { title: "A", rule: "A holds.", executors }
    }

    #[test]
    fn executors_are_functions_rows_or_files() {
        let sources = [
            source("xtask/src/invariants.rs", "\"only_in_the_table\""),
            source("plan/tests/a.rs", "fn a_holds() {}"),
            source("tests/e2e/main.rs", "(\"b_holds\", b)"),
        ];
        assert_eq!(place(&sources, "a_holds").as_deref(), Some("plan/tests/a.rs"));
        assert_eq!(place(&sources, "b_holds").as_deref(), Some("tests/e2e/main.rs"));
        assert_eq!(place(&sources, "plan/tests/a.rs").as_deref(), Some("plan/tests/a.rs"));
        assert_eq!(place(&sources, "only_in_the_table"), None);
    }

    #[test]
    fn missing_executors_are_found() {
        let sources = [source("plan/tests/a.rs", "fn a_holds() {}")];
        assert!(missing(&sources, &[rule(&["a_holds"])]).is_empty());
        assert_eq!(missing(&sources, &[rule(&["a_holds", "a_held"])]).len(), 1);
        assert_eq!(missing(&sources, &[rule(&[])]).len(), 1);
    }

    #[test]
    fn a_page_that_differs_is_stale() {
        assert!(stale("a", "a").is_empty());
        assert_eq!(stale("a", "b").len(), 1);
    }

    #[test]
    fn architecture_has_one_exact_line_per_rule() {
        let rules = [rule(&["a_holds"])];
        assert!(unlisted("# A\n- **I1 A.** `a_holds`\n", &rules).is_empty());
        assert_eq!(unlisted("- **I1 A.** `another`\n", &rules).len(), 2);
        assert_eq!(unlisted("", &rules).len(), 1);
    }
}
