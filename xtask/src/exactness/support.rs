//! The table of what is shown to run, in docs/models.md: each family on each kind of group, in each packing, by the lines
//! of the evidence.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};

use super::cases::{Case, Matrix};

/// The page that has the table, between the marks.
pub const PAGE: &str = "docs/models.md";
const BEGIN: &str = "<!-- printed by cargo xtask proof exactness -->\n";
const END: &str = "<!-- end -->";
const HEAD: &str = "| `model_type` | one rank | pipeline of | tensor group of | both | weights |\n|---|---|---|---|---|---|\n";

/// What is shown of a family.
#[derive(Default)]
struct Support {
    alone: bool,
    stages: BTreeSet<usize>,
    members: BTreeSet<u64>,
    both: BTreeSet<String>,
    weights: BTreeSet<String>,
}

/// The page with the table of these groups, which are in the evidence.
pub fn page(text: &str, matrix: &Matrix, shown: &[Case]) -> Result<String> {
    let mut families: BTreeMap<String, Support> = BTreeMap::new();
    for case in shown {
        let spec = matrix.spec(&case.variant)?;
        let family = spec["config"]["model_type"].as_str().unwrap_or_default().to_owned();
        let support = families.entry(family).or_default();
        match (case.split.len(), case.members) {
            (1, 1) => support.alone = true,
            (stages, 1) => drop(support.stages.insert(stages)),
            (1, members) => drop(support.members.insert(members)),
            (stages, members) => drop(support.both.insert(format!("{stages} by {members}"))),
        }
        let how = &spec["quantise"];
        let packing = match (how["mode"].as_str(), how["bits"].as_u64()) {
            (Some(mode), _) => mode.to_owned(),
            (None, Some(bits)) => format!("{bits} bits"),
            (None, None) => spec["dtype"].as_str().unwrap_or("float32").to_owned(),
        };
        support.weights.insert(packing);
        if let Some(bits) = spec["convert"]["bits"].as_u64() {
            support.weights.insert(format!("{bits} bits on loading"));
        }
        if spec["original"].as_bool() == Some(true) {
            support.weights.insert("original export".to_owned());
        }
    }
    let listed = |items: Vec<String>| if items.is_empty() { "-".to_owned() } else { items.join(", ") };
    let rows = families.into_iter().map(|(family, support)| {
        let Support { alone, stages, members, both, weights } = support;
        let alone = if alone { "yes" } else { "-" };
        let stages = listed(stages.iter().map(usize::to_string).collect());
        let members = listed(members.iter().map(u64::to_string).collect());
        let (both, weights) = (listed(both.into_iter().collect()), listed(weights.into_iter().collect()));
        format!("| `{family}` | {alone} | {stages} | {members} | {both} | {weights} |\n")
    });
    let table: String = rows.collect();
    let begin = text.find(BEGIN).with_context(|| format!("{PAGE} has no {BEGIN:?}"))? + BEGIN.len();
    let end = text[begin..].find(END).with_context(|| format!("{PAGE} has no {END:?}"))? + begin;
    Ok(format!("{}{HEAD}{table}{}", &text[..begin], &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_what_was_shown_and_no_more() -> Result<()> {
        let matrix = Matrix::read(include_str!("../../../engine/tests/exactness/variants.json"))?;
        let cases = [
            Case::new("qwen2", &[4], 1),
            Case::new("qwen2", &[3, 1], 1),
            Case::new("qwen2", &[4], 2),
            Case::new("gpt-oss-original", &[2, 2], 1),
        ];
        let text = format!("before\n{BEGIN}old\n{END}\nafter\n");
        let page = page(&text, &matrix, &cases)?;
        assert!(page.starts_with("before\n") && page.ends_with("\nafter\n") && !page.contains("old"));
        assert!(page.contains("| `qwen2` | yes | 2 | 2 | - | float32 |\n"), "{page}");
        assert!(page.contains("| `gpt_oss` | - | 2 | - | - | mxfp4, original export |\n"), "{page}");
        Ok(())
    }
}
