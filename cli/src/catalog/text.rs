//! Catalogue entries as text: a table that fits 100 columns, and the details of one entry.

use russet_plan::quantity;

use super::entry::{CatalogEntry, PackingFormat, SizeOrigin};
use crate::get::format_table;

/// The table of a search.
pub fn table(entries: &[&CatalogEntry]) -> String {
    let mut lines = vec![["NAME", "PARAMS", "SIZE", "NEEDS", "CONTEXT", "RUNS"].map(str::to_owned).to_vec()];
    lines.extend(entries.iter().map(|entry| {
        let runs =
            if entry.runs().is_ok() { "yes".to_owned() } else { format!("no: {}", entry.architecture) };
        vec![
            entry.name.clone(),
            parameters(entry).replace(", ", " A").replace(" active", ""),
            quantity::show(entry.bytes),
            machines(entry),
            tokens(entry.context),
            runs,
        ]
    }));
    format_table(&lines)
}

/// The details of an entry.
pub fn details(entry: &CatalogEntry) -> String {
    let CatalogEntry {
        name,
        repository,
        family,
        architecture,
        parameters: _,
        active: _,
        packing,
        bytes,
        origin,
        context,
        licence,
    } = entry;
    let format = match packing.format {
        PackingFormat::Affine(group) => format!("affine, in groups of {group}"),
        PackingFormat::Mxfp4 => "mxfp4".to_owned(),
    };
    let origin = match origin {
        SizeOrigin::Computed => format!("computed: parameters × {} bits", packing.bits_per_parameter()),
        SizeOrigin::Listed => "as a public list has it".to_owned(),
    };
    let runs = match entry.runs() {
        Ok(()) => format!("yes: russet run {name}"),
        Err(why) => format!("no: {why}"),
    };
    let lines = [
        ("Name", name.clone()),
        ("Source", entry.uri()),
        ("Page", format!("https://huggingface.co/{repository}")),
        ("Family", family.clone()),
        ("Architecture", architecture.clone()),
        ("Parameters", parameters(entry)),
        ("Weights", format!("{} bits, {format}", packing.bits)),
        ("Size", format!("{} ({origin}); KV cache and workspace come on top", quantity::show(*bytes))),
        (
            "Needs",
            format!(
                "{}, roughly: weights, a tenth of them for KV cache and workspace, what a machine keeps for its user",
                machines(entry)
            ),
        ),
        ("Context", format!("{context} tokens")),
        ("Licence", licence.clone()),
        ("Runs", runs),
    ];
    lines.iter().map(|(label, words)| format!("{:<14}{words}\n", format!("{label}:"))).collect()
}

/// `64G` for one machine of this memory, `2 x 512G` for two.
fn machines(entry: &CatalogEntry) -> String {
    match entry.required_machines() {
        Some((1, size)) => format!("{size}G"),
        Some((count, size)) => format!("{count} x {size}G"),
        None => "more".to_owned(),
    }
}

/// `30.5B, 3.35B active`.
fn parameters(entry: &CatalogEntry) -> String {
    let all = billions(entry.parameters);
    match entry.active < entry.parameters {
        true => format!("{all}, {} active", billions(entry.active)),
        false => all,
    }
}

fn billions(number: f64) -> String {
    if number < 1.0 { format!("{:.0}M", number * 1000.0) } else { format!("{number}B") }
}

/// `128K` for 131072 tokens.
fn tokens(count: u64) -> String {
    match count {
        count if count % (1 << 20) == 0 => format!("{}M", count >> 20),
        count if count % 1024 == 0 => format!("{}K", count >> 10),
        count => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry;
    use super::*;

    #[test]
    fn the_whole_table_fits_a_hundred_columns() {
        let entries = entry::all().unwrap();
        let text = table(&entries.iter().collect::<Vec<_>>());
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
        assert_eq!(text.lines().count(), entries.len() + 1);
    }

    #[test]
    fn an_entry_says_what_it_needs_and_whether_it_runs() {
        let entries = entry::all().unwrap();
        let shown = |name: &str| details(entry::require(&entries, name).unwrap());
        let small = shown("llama-3-2-1b-4bit");
        for words in
            ["hf://mlx-community/Llama-3.2-1B-Instruct-4bit", "1.236B", "131072 tokens", "yes: russet run"]
        {
            assert!(small.contains(words), "{small}");
        }
        let mixed = table(&[entry::require(&entries, "mixtral-8x7b-4bit").unwrap()]);
        assert!(mixed.contains("46.7B A12.9B") && mixed.contains("32K"), "{mixed}");
        let needs = |name: &str| machines(entry::require(&entries, name).unwrap());
        let needs =
            ["smollm2-135m-4bit", "llama-3-3-70b-4bit", "qwq-32b-4bit", "glm-5-8bit", "kimi-k2-thinking"]
                .map(needs);
        assert_eq!(needs, ["8G", "64G", "32G", "2 x 512G", "2 x 512G"]);
        assert_eq!(
            [tokens(10 << 20), tokens(1000), billions(0.1345)],
            ["10M", "1000", "134M"].map(str::to_owned)
        );
    }
}
