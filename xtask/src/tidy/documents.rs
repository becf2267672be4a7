//! Documents for people: bounds of those that are read in a terminal and in diffs, and the files they name.

use super::Findings;

/// ARCHITECTURE.md is read whole by every newcomer: about ten minutes.
const MAX_BYTES: usize = 14_000;

/// What a terminal and a diff show without wrapping.
const MAX_COLUMNS: usize = 120;

/// Whether a document is larger than [`MAX_BYTES`] or has lines wider than [`MAX_COLUMNS`].
pub fn too_large(name: &str, text: &str) -> Findings {
    let mut findings = Vec::new();
    if text.len() > MAX_BYTES {
        findings.push(format!("{name} has {} bytes; at most {MAX_BYTES}", text.len()));
    }
    for (number, line) in (1..).zip(text.lines()) {
        let columns = line.chars().count();
        if columns > MAX_COLUMNS {
            findings.push(format!("{name}:{number} has {columns} columns; at most {MAX_COLUMNS}"));
        }
    }
    findings
}

/// Source files that a page names, from the root of the workspace, and that do not exist.
pub fn dead_paths(name: &str, text: &str, exists: impl Fn(&str) -> bool) -> Findings {
    (1..)
        .zip(text.lines())
        .flat_map(|(number, line)| line.split('`').skip(1).step_by(2).map(move |path| (number, path)))
        .filter(|(_, path)| path.ends_with(".rs") && is_rooted(path) && !exists(path))
        .map(|(number, path)| format!("{name}:{number} names `{path}`, which does not exist"))
        .collect()
}

/// Whether a path begins in a folder of a crate; `store/<scheme>.rs` and command lines do not.
fn is_rooted(path: &str) -> bool {
    let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "/_.-".contains(c));
    plain && ["/src/", "/tests/", "/benches/", "/examples/"].iter().any(|folder| path.contains(folder))
}

#[cfg(test)]
mod tests {
    use super::{MAX_BYTES, MAX_COLUMNS, dead_paths, too_large};

    #[test]
    fn paths_that_lead_nowhere_are_found() {
        let text = "`plan/src/a.rs`, `plan/src/b.rs` and\n`plan/src/<kind>.rs` or `a.rs`\n";
        assert_eq!(
            dead_paths("A.md", text, |path| path == "plan/src/a.rs"),
            ["A.md:1 names `plan/src/b.rs`, which does not exist"]
        );
    }

    #[test]
    fn size_and_width_are_bounded() {
        let wide = "─".repeat(MAX_COLUMNS);
        assert!(too_large("A.md", &wide).is_empty());
        assert_eq!(too_large("A.md", &format!("{wide}─\nshort\n")).len(), 1);
        assert_eq!(too_large("A.md", &"a\n".repeat(MAX_BYTES)).len(), 1);
    }
}
