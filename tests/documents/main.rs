//! The documents as a reader uses them: every command of the pages in `rules.rs` is executed in order, against a
//! cluster of its own and with the smoke model, and must end as the page says. A new command of a page is executed
//! without a change here. The test has a network of its own, with loopback and nothing else. `RUSSET_KUBECTL` and
//! `RUSSET_JQ` name programs of others; `cargo xtask oracle documents` sets them, and without them only the checks
//! without a cluster run.

mod blocks;
mod reader;
mod rules;
mod shape;
mod usage;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use blocks::Step;
use libtest_mimic::{Arguments, Trial};
use reader::Reader;
use rules::{EXCEPTIONS, Given, Page, READERS, SUBSTITUTIONS, excepts};
use russet_tests::apart;
use russet_tests::cluster::repository;

fn page(name: &str) -> Result<String> {
    std::fs::read_to_string(repository().join(name)).with_context(|| format!("cannot read {name}"))
}

/// The steps of a page.
fn steps_of(name: &str) -> Result<Vec<Step>> {
    let blocks = blocks::blocks(&page(name)?);
    let mut steps = Vec::new();
    for block in &blocks {
        steps.extend(blocks::steps(block).with_context(|| name.to_owned())?);
    }
    Ok(steps)
}

/// Executes the pages of a reader.
fn execute(given: Given, pages: &[Page], kubectl: &Path, jq: &Path) -> Result<()> {
    let mut reader = Reader::new(given, kubectl, jq).context("before the first page")?;
    for Page { name, before } in pages {
        let begin = Instant::now();
        let steps = steps_of(name)?;
        for command in *before {
            reader.own(command).with_context(|| format!("before {name}"))?;
        }
        let (executed, mut excepted) = (reader.executed, 0);
        for (number, step) in steps.iter().enumerate() {
            if let Step::Command { text, .. } = step
                && EXCEPTIONS.iter().any(|exception| excepts(exception, text))
            {
                excepted += 1;
                continue;
            }
            let (line, text) = match step {
                Step::Command { line, text, .. } => (line, text.trim()),
                Step::Yaml { line, .. } => (line, "the YAML"),
                Step::Python { line, .. } => (line, "the Python program"),
            };
            reader.execute(step, steps.get(number + 1)).with_context(|| format!("{name}:{line}: {text}"))?;
        }
        let (executed, seconds) = (reader.executed - executed, begin.elapsed().as_secs_f64());
        ensure!(
            executed > 0,
            "{name} has no command that is executed; are its fences still those of a shell?"
        );
        println!("  {name}: {executed} executed, {excepted} excepted, {seconds:.1} s");
    }
    Ok(())
}

/// Every exception and substitution is about something that is in a page.
fn rules_are_needed() -> Result<()> {
    let mut texts = Vec::new();
    for page in READERS.iter().flat_map(|(_, _, pages)| *pages) {
        for step in steps_of(page.name)? {
            let (Step::Command { text, .. } | Step::Yaml { text, .. } | Step::Python { text, .. }) = step;
            texts.push(text);
        }
    }
    for exception in EXCEPTIONS {
        ensure!(!exception.why.is_empty(), "the exception {:?} has no reason", exception.command);
        ensure!(
            texts.iter().any(|text| excepts(exception, text)),
            "no page has a command that begins with {:?} any more; delete the exception",
            exception.command
        );
    }
    for rule in SUBSTITUTIONS {
        ensure!(
            texts.iter().any(|text| text.contains(rule.text)),
            "no page has {:?} any more; delete the substitution",
            rule.text
        );
    }
    Ok(())
}

/// Fences of every kind, commands over several lines, shown output.
fn blocks_are_read_whole() -> Result<()> {
    let page = "text\n- item\n  ```sh\n  # a comment\n  a 'x\n    y'\n  b <<END\n  one\n  END\n  ```\n```\n$ c d\nout …\n```\n";
    let blocks = blocks::blocks(page);
    let steps: Vec<Step> = blocks.iter().map(blocks::steps).collect::<Result<Vec<_>>>()?.concat();
    let command = |line, text: &str, shown: Option<&str>| Step::Command {
        line,
        text: text.to_owned(),
        shown: shown.map(str::to_owned),
    };
    let expected = [
        command(5, "a 'x\n  y'\n", None),
        command(7, "b <<END\none\nEND\n", None),
        command(12, "c d\n", Some("out …\n")),
    ];
    ensure!(steps == expected, "{steps:#?}");
    for (shown, actual, same) in [
        ("a  1.5 GiB\n", "a 27.25 GiB\n", true),
        ("waiting: x\nname-0-f44002c8: on\n", "name-0-00c0ffee: on\n", true),
        ("name-1 7\n", "name-2 7\n", false),
        ("error: no: …\n", "error: no: connection\nrefused\n", true),
        ("one\n", "one\ntwo\n", false),
        ("one\ntwo\n", "one\n", false),
        ("one\n", "other\n", false),
    ] {
        let difference = shape::difference(shown, actual);
        ensure!(difference.is_none() == same, "{shown:?} beside {actual:?}: {difference:?}");
    }
    Ok(())
}

fn trial(name: &str, run: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::test(name, move || run().map_err(|error| format!("{error:#}").into()))
}

/// A test for each reader, or why they cannot read here.
fn readers() -> std::result::Result<Vec<Trial>, String> {
    let program = |variable: &str| {
        let path = std::env::var_os(variable).map(PathBuf::from);
        path.ok_or_else(|| format!("{variable} names no program; `cargo xtask oracle documents` sets it"))
    };
    let (kubectl, jq) = match (program("RUSSET_KUBECTL"), program("RUSSET_JQ")) {
        (Ok(kubectl), Ok(jq)) => (kubectl, jq),
        (Err(why), _) | (_, Err(why)) => {
            assert!(std::env::var_os("RUSSET_ORACLES").is_none(), "{why}");
            return Err(why);
        }
    };
    if !apart::is_apart() {
        return Err("network namespaces are not allowed here".to_owned());
    }
    Ok(Vec::from(READERS.map(|(name, given, pages)| {
        let (kubectl, jq) = (kubectl.clone(), jq.clone());
        trial(name, move || execute(given, pages, &kubectl, &jq))
    })))
}

fn main() {
    if let Err(error) = apart::move_apart() {
        println!("{error:#}");
    }
    let mut arguments = Arguments::from_args();
    // Readers have the same ports.
    arguments.test_threads = Some(1);
    let mut trials = vec![
        trial("blocks_are_read_whole", blocks_are_read_whole),
        trial("rules_are_needed_by_a_page", rules_are_needed),
        trial("commands_of_all_pages_name_verbs_and_flags_there_are", usage::pages_name_what_there_is),
    ];
    match readers() {
        Ok(readers) => trials.extend(readers),
        Err(why) => trials.extend(READERS.map(|(name, _, _)| {
            let why = why.clone();
            trial(name, move || {
                println!("skipped: {why}");
                Ok(())
            })
        })),
    }
    libtest_mimic::run(&arguments, trials).exit();
}
