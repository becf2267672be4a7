//! Bounds of documents that people read in a terminal and in diffs.

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

#[cfg(test)]
mod tests {
    use super::{MAX_BYTES, MAX_COLUMNS, too_large};

    #[test]
    fn size_and_width_are_bounded() {
        let wide = "─".repeat(MAX_COLUMNS);
        assert!(too_large("A.md", &wide).is_empty());
        assert_eq!(too_large("A.md", &format!("{wide}─\nshort\n")).len(), 1);
        assert_eq!(too_large("A.md", &"a\n".repeat(MAX_BYTES)).len(), 1);
    }
}
