//! JSON Schema's own test suite, as PyPI's `jsonschema` carries it: what a grammar allows is valid, and a keyword that it
//! does not know is refused by name. `cargo xtask test` fetches it and names it in `RUSSET_JSON_SCHEMA_SUITE`.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use russet_chat::grammar::{GrammarMatcher, OutputRules, Vocabulary};
use russet_chat::parser::OutputFormat;
use russet_tests::provided;
use russet_wire::request::StructuredOutput;
use serde_json::Value;

/// A group of the suite.
#[derive(serde::Deserialize)]
struct Group {
    description: String,
    schema: Box<serde_json::value::RawValue>,
    tests: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    description: String,
    data: Box<serde_json::value::RawValue>,
    valid: bool,
}

/// What became of a file's groups. A grammar may be narrower than its schema: a model writes keys in one order.
#[derive(Default)]
struct Tally {
    groups: usize,
    refused: BTreeMap<String, usize>,
    equal: usize,
    narrower: Vec<String>,
    wider: Vec<String>,
}

fn matcher(schema: &str, vocabulary: &Arc<Vocabulary>) -> Result<GrammarMatcher, String> {
    let output = StructuredOutput::JsonSchema(schema.to_owned());
    let format = OutputFormat::default();
    let rules = OutputRules { structured_output: Some(&output), ..OutputRules::free(&format) };
    rules.matcher(|| Ok(vocabulary.clone())).map(Option::unwrap).map_err(|error| error.to_string())
}

/// Whether a grammar allows a text, byte for byte, and its end.
fn allows(schema: &str, vocabulary: &Arc<Vocabulary>, text: &str) -> bool {
    let mut matcher = matcher(schema, vocabulary).unwrap();
    text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok()) && matcher.may_end()
}

#[test]
fn what_a_grammar_allows_meets_its_schema() {
    let Some(folder) = provided::path("RUSSET_JSON_SCHEMA_SUITE") else { return };
    let vocabulary = Arc::new(Vocabulary::of_bytes());
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder.join("draft2020-12"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect();
    files.sort();
    assert!(files.len() > 40, "{} files", files.len());
    let (mut wider, mut equal, mut narrower, mut refused, mut groups) = (Vec::new(), 0, 0, 0, 0);
    println!("| keyword | schemas | refused | instances alike | narrower |\n|---|---|---|---|---|");
    for file in files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let all: Vec<Group> = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let mut tally = Tally { groups: all.len(), ..Tally::default() };
        for Group { description, schema, tests } in all {
            if let Err(reason) = matcher(schema.get(), &vocabulary) {
                *tally.refused.entry(reason).or_default() += 1;
                continue;
            }
            for case in tests {
                let data: Value = serde_json::from_str(case.data.get()).unwrap();
                let allowed = allows(schema.get(), &vocabulary, &data.to_string());
                let place = format!("{name}: {description}: {}", case.description);
                match (case.valid, allowed) {
                    (true, true) | (false, false) => tally.equal += 1,
                    (true, false) => tally.narrower.push(place),
                    (false, true) => tally.wider.push(place),
                }
            }
        }
        let refusals: usize = tally.refused.values().sum();
        println!("| {name} | {} | {refusals} | {} | {} |", tally.groups, tally.equal, tally.narrower.len());
        if std::env::var_os("RUSSET_VERBOSE").is_some() {
            tally.refused.iter().for_each(|(reason, count)| println!("    refused {count}: {reason}"));
            tally.narrower.iter().for_each(|place| println!("    narrower: {place}"));
            tally.wider.iter().for_each(|place| println!("    WIDER: {place}"));
        }
        groups += tally.groups;
        refused += refusals;
        equal += tally.equal;
        narrower += tally.narrower.len();
        wider.extend(tally.wider);
    }
    println!(
        "{groups} schemas, {refused} refused; {equal} instances alike, {narrower} valid ones not allowed"
    );
    assert!(wider.is_empty(), "invalid, and allowed: {wider:#?}");
    assert!(equal > 500, "{equal} instances alike");
}
