//! The invariants that a machine can check without running Russet: what may depend on what, where
//! unsafe code may be, how files begin, what names and documents must keep, and that every invariant is
//! executed.

mod board;
mod documents;
mod invariants;
mod names;
mod vocabulary;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::invariants::{INVARIANTS, PAGE};
use crate::{cargo, charts};

/// The overview that every newcomer reads.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// A finding, in one line.
type Findings = Vec<String>;

/// One check.
type Check = fn(&[TidySource]) -> Result<Findings>;

/// Every check; `xtask/src/invariants.rs` refers to these names.
const CHECKS: &[(&str, Check)] = &[
    ("files_say_what_they_are", files_say_what_they_are),
    ("unsafe_stays_in_engine_mlx", unsafe_stays_in_engine_mlx),
    ("plan_is_pure", plan_is_pure),
    ("wire_and_crds_have_no_client", wire_and_crds_have_no_client),
    ("the_api_server_knows_none_of_our_kinds", the_api_server_knows_none_of_our_kinds),
    ("crates_depend_as_drawn", crates_depend_as_drawn),
    ("only_the_engine_links_mlx", only_the_engine_links_mlx),
    ("one_tls_provider", one_tls_provider),
    ("every_crate_obeys_the_workspace_lints", every_crate_obeys_the_workspace_lints),
    ("charts_are_what_the_manifests_say", charts_are_what_the_manifests_say),
    ("panels_of_the_board_are_apart", board::panels_of_the_board_are_apart),
    ("no_work_is_left_in_comments", no_work_is_left_in_comments),
    ("every_invariant_is_executed", every_invariant_is_executed),
    ("invariants_page_is_generated", invariants_page_is_generated),
    ("architecture_lists_every_invariant", architecture_lists_every_invariant),
    ("architecture_is_short", architecture_is_short),
    ("pages_name_files_that_exist", pages_name_files_that_exist),
    ("names_are_the_fields_own", names_are_the_fields_own),
    ("no_type_is_defined_in_three_crates", no_type_is_defined_in_three_crates),
    ("limits_are_max_or_min", limits_are_max_or_min),
    ("test_names_are_short", test_names_are_short),
];

/// Allowed dependencies between our crates. A dependency that is missing here is first a decision in
/// ARCHITECTURE.md.
const GRAPH: &[(&str, &[&str])] = &[
    ("russet-wire", &[]),
    ("russet-model", &[]),
    ("russet-chat", &["russet-wire"]),
    ("russet-crds", &["russet-wire", "russet-model"]),
    ("russet-plan", &["russet-wire", "russet-model", "russet-crds"]),
    ("russet-rpc", &["russet-wire"]),
    ("russet-telemetry", &[]),
    ("russet-mqtt", &["russet-telemetry"]),
    ("russet-apiserver", &["russet-telemetry"]),
    (
        "russet-operator",
        &["russet-wire", "russet-model", "russet-crds", "russet-plan", "russet-rpc", "russet-telemetry"],
    ),
    (
        "russet-agent",
        &[
            "russet-wire",
            "russet-model",
            "russet-chat",
            "russet-crds",
            "russet-plan",
            "russet-rpc",
            "russet-telemetry",
            "russet-mqtt",
        ],
    ),
    (
        "russet-gateway",
        &["russet-wire", "russet-model", "russet-crds", "russet-rpc", "russet-telemetry", "russet-mqtt"],
    ),
    ("russet-mlx", &[]),
    (
        "russet-engine",
        &["russet-wire", "russet-model", "russet-chat", "russet-rpc", "russet-telemetry", "russet-mlx"],
    ),
    (
        "russet-cli",
        &[
            "russet-wire",
            "russet-model",
            "russet-chat",
            "russet-crds",
            "russet-plan",
            "russet-rpc",
            "russet-telemetry",
            "russet-mqtt",
            "russet-apiserver",
            "russet-operator",
            "russet-agent",
            "russet-gateway",
        ],
    ),
    ("russet-xtask", &[]),
    ("russet-tests", &[]),
];

/// One source file.
pub struct TidySource {
    path: PathBuf,
    /// What it says.
    pub text: String,
}

/// Runs every check and prints what it found; with `--write` it writes the generated page first.
pub fn run(arguments: &[String]) -> Result<()> {
    match arguments {
        [] => {}
        [flag] if flag == "--write" => write()?,
        _ => anyhow::bail!("tidy takes --write and nothing else"),
    }
    let sources = sources()?;
    ensure!(
        sources.len() > 50,
        "only {} source files were found: tidy looks in the wrong place",
        sources.len()
    );
    let mut bad = 0;
    for (name, check) in CHECKS {
        let findings = check(&sources).with_context(|| format!("tidy check {name}"))?;
        println!("{} {name}", if findings.is_empty() { "ok  " } else { "FAIL" });
        for finding in &findings {
            println!("       {finding}");
        }
        bad += findings.len();
    }
    for source in &sources {
        let lines = code_lines(&source.text);
        if lines > 400 {
            println!(
                "note: {} has {lines} lines of code; beyond about 400 a file wants splitting",
                source.path.display()
            );
        }
    }
    ensure!(bad == 0, "tidy found {bad} breaches");
    Ok(())
}

/// Files of the workspace that match.
fn files(patterns: &[&str]) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-co", "--exclude-standard"])
        .args(patterns)
        .current_dir(cargo::root())
        .output()?;
    let names = String::from_utf8(output.stdout)?;
    Ok(names.lines().filter(|name| cargo::root().join(name).is_file()).map(str::to_owned).collect())
}

/// The Rust sources of the workspace.
pub fn sources() -> Result<Vec<TidySource>> {
    let mut found = Vec::new();
    for name in files(&["*.rs"])? {
        let path = PathBuf::from(name);
        if let Ok(text) = std::fs::read_to_string(cargo::root().join(&path)) {
            found.push(TidySource { path, text });
        }
    }
    Ok(found)
}

/// Number of lines that are neither blank, comment nor test.
fn code_lines(text: &str) -> usize {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    code.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

fn in_folder(source: &TidySource, folder: &str) -> bool {
    source.path.starts_with(folder)
}

fn files_say_what_they_are(sources: &[TidySource]) -> Result<Findings> {
    Ok(sources
        .iter()
        .filter(|source| !source.text.starts_with("//!") || source.path.ends_with("mod.rs"))
        .map(|source| format!("{} does not open with //! (or is a mod.rs)", source.path.display()))
        .collect())
}

fn unsafe_stays_in_engine_mlx(sources: &[TidySource]) -> Result<Findings> {
    let mut findings = Vec::new();
    for source in
        sources.iter().filter(|source| !in_folder(source, "engine/mlx") && !in_folder(source, "xtask"))
    {
        for (number, line) in source.text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            if code.contains("unsafe {")
                || code.contains("unsafe fn")
                || code.contains("unsafe impl")
                || code.contains("allow(unsafe_code)")
            {
                findings.push(format!("{}:{} has unsafe code", source.path.display(), number + 1));
            }
        }
    }
    Ok(findings)
}

/// Names of a package's normal dependencies, its own included.
fn tree(package: &str) -> Result<BTreeSet<String>> {
    let output = Command::new("cargo")
        .args(["tree", "--package", package, "--edges", "normal", "--prefix", "none", "--format", "{lib}"])
        .current_dir(cargo::root())
        .output()?;
    ensure!(output.status.success(), "cargo tree failed: {}", String::from_utf8_lossy(&output.stderr));
    // A repeated package is marked with ` (*)`.
    let name = |line: &str| line.split_whitespace().next().unwrap_or("").replace('_', "-");
    let names: BTreeSet<String> = String::from_utf8(output.stdout)?.lines().map(name).collect();
    ensure!(names.len() > 1 || package == "russet-telemetry", "cargo tree of {package} is empty");
    Ok(names)
}

fn forbidden(package: &str, names: &[&str]) -> Result<Findings> {
    let tree = tree(package)?;
    Ok(names
        .iter()
        .filter(|name| tree.contains(**name))
        .map(|name| format!("{package} reaches {name}"))
        .collect())
}

fn plan_is_pure(sources: &[TidySource]) -> Result<Findings> {
    let mut findings = forbidden(
        "russet-plan",
        &["tokio", "kube-client", "kube-runtime", "reqwest", "hyper", "rand", "getrandom"],
    )?;
    // Long tests have files of their own.
    let is_test = |source: &TidySource| source.path.iter().any(|part| part == "tests" || part == "tests.rs");
    for source in sources.iter().filter(|source| in_folder(source, "plan/src") && !is_test(source)) {
        let code = source.text.split("#[cfg(test)]").next().unwrap_or("");
        for word in
            ["SystemTime", "Instant::now", "Timestamp::now", "thread_rng", "async fn", "std::fs", "std::env"]
        {
            if code.contains(word) {
                findings.push(format!("{} uses {word}", source.path.display()));
            }
        }
    }
    Ok(findings)
}

fn wire_and_crds_have_no_client(_: &[TidySource]) -> Result<Findings> {
    let mut findings = forbidden("russet-wire", &["tokio", "kube", "kube-core", "hyper", "tonic"])?;
    findings.extend(forbidden("russet-crds", &["tokio", "kube-client", "kube-runtime", "hyper", "tonic"])?);
    Ok(findings)
}

fn the_api_server_knows_none_of_our_kinds(sources: &[TidySource]) -> Result<Findings> {
    let mut findings = forbidden("russet-apiserver", &["russet-crds", "russet-plan", "russet-wire"])?;
    for source in sources.iter().filter(|source| in_folder(source, "apiserver/src")) {
        let code = source.text.split("#[cfg(test)]").next().unwrap_or("");
        for (number, line) in code.lines().enumerate() {
            if line.contains("russet.dev") && !line.trim_start().starts_with("//") {
                findings.push(format!("{}:{} names russet.dev", source.path.display(), number + 1));
            }
        }
    }
    Ok(findings)
}

fn crates_depend_as_drawn(_: &[TidySource]) -> Result<Findings> {
    let mut findings = Vec::new();
    for (package, allowed) in GRAPH {
        for name in tree(package)? {
            if name.starts_with("russet-") && name != *package && !allowed.contains(&name.as_str()) {
                findings.push(format!("{package} reaches {name}, which the graph does not draw"));
            }
        }
    }
    Ok(findings)
}

fn only_the_engine_links_mlx(_: &[TidySource]) -> Result<Findings> {
    let mut findings = Vec::new();
    for (package, _) in
        GRAPH.iter().filter(|(package, _)| *package != "russet-engine" && *package != "russet-mlx")
    {
        findings.extend(forbidden(package, &["mlx-sys", "mlx-rs"])?);
    }
    ensure!(tree("russet-engine")?.contains("mlx-sys"), "the engine does not link MLX: the check is blind");
    Ok(findings)
}

fn one_tls_provider(_: &[TidySource]) -> Result<Findings> {
    let mut findings = forbidden("russet-cli", &["aws-lc-rs", "aws-lc-sys", "openssl", "native-tls"])?;
    findings.extend(forbidden("russet-engine", &["aws-lc-rs", "aws-lc-sys", "openssl", "native-tls"])?);
    Ok(findings)
}

fn every_crate_obeys_the_workspace_lints(_: &[TidySource]) -> Result<Findings> {
    let mut findings = Vec::new();
    for (package, _) in GRAPH {
        let folder =
            if *package == "russet-mlx" { "engine/mlx" } else { package.trim_start_matches("russet-") };
        let manifest = std::fs::read_to_string(cargo::root().join(folder).join("Cargo.toml"))?;
        // engine/mlx alone may contain unsafe code, so it has its own lints.
        if !manifest.contains("[lints]\nworkspace = true") && *package != "russet-mlx" {
            findings.push(format!("{folder}/Cargo.toml does not take the workspace's lints"));
        }
    }
    Ok(findings)
}

fn charts_are_what_the_manifests_say(_: &[TidySource]) -> Result<Findings> {
    let stale = charts::stale()?;
    Ok(stale.iter().map(|path| format!("{path} is old: run `cargo xtask codegen` and commit")).collect())
}

fn no_work_is_left_in_comments(sources: &[TidySource]) -> Result<Findings> {
    let marks =
        [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("Stub: ", "being written")];
    Ok(sources
        .iter()
        .flat_map(|source| {
            marks
                .iter()
                .filter(|mark| source.text.contains(**mark))
                .map(|mark| format!("{} says {mark}", source.path.display()))
        })
        .collect())
}

fn every_invariant_is_executed(sources: &[TidySource]) -> Result<Findings> {
    ensure!(INVARIANTS.len() >= 29, "{} invariants are listed; 29 are wanted", INVARIANTS.len());
    Ok(invariants::missing(sources, INVARIANTS))
}

fn invariants_page_is_generated(sources: &[TidySource]) -> Result<Findings> {
    Ok(invariants::stale(&read(Path::new(PAGE))?, &invariants::page(sources)))
}

fn architecture_lists_every_invariant(_: &[TidySource]) -> Result<Findings> {
    Ok(invariants::unlisted(&read(Path::new(ARCHITECTURE))?, INVARIANTS))
}

fn architecture_is_short(_: &[TidySource]) -> Result<Findings> {
    Ok(documents::too_large(ARCHITECTURE, &read(Path::new(ARCHITECTURE))?))
}

/// The changelog and the evidence tell of files as they were.
fn pages_name_files_that_exist(_: &[TidySource]) -> Result<Findings> {
    let pages = ["*.md", ":!CHANGELOG.md", ":!docs/evidence", ":!docs/benchmarks.md"];
    let mut findings = Vec::new();
    for page in files(&pages)? {
        let text = read(Path::new(&page))?;
        findings.extend(documents::dead_paths(&page, &text, |path| cargo::root().join(path).is_file()));
    }
    Ok(findings)
}

fn names_are_the_fields_own(sources: &[TidySource]) -> Result<Findings> {
    Ok([names::private_words(sources), names::private_identifiers(sources)].concat())
}

fn no_type_is_defined_in_three_crates(sources: &[TidySource]) -> Result<Findings> {
    Ok(names::repeated_types(sources))
}

fn limits_are_max_or_min(sources: &[TidySource]) -> Result<Findings> {
    Ok(names::odd_limits(sources))
}

fn test_names_are_short(sources: &[TidySource]) -> Result<Findings> {
    Ok(names::long_test_names(sources))
}

/// Writes the page of invariants.
pub fn write() -> Result<()> {
    std::fs::write(cargo::root().join(PAGE), invariants::page(&sources()?))
        .with_context(|| format!("cannot write {PAGE}"))
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(cargo::root().join(path)).with_context(|| format!("{}", path.display()))
}
