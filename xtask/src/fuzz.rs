//! `cargo xtask proof fuzz [EXECUTIONS] [FOLDER|TARGET...]`: the fuzz targets of `model/fuzz`, `chat/fuzz` and
//! `gateway/fuzz`, those of a folder at the same time, and the table of what they found in docs/evidence, in which lines of
//! others stay; fewer executions than it has of each are not written. What they learn of the code is kept in the cache
//! folder and is where the next run begins.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, anyhow, ensure};

use crate::{bench::commit, cargo, exactness, mlx};

const PAGE: &str = "docs/evidence/fuzz.md";
/// A crate of ours, and the programs of its folder `fuzz`: each reads a stranger's bytes.
type FuzzCrate = (&'static str, &'static [&'static str]);
const FUZZ_CRATES: &[FuzzCrate] = &[
    ("model", &["config", "safetensors_header", "index", "gguf", "adapter"]),
    ("chat", &["parser", "template", "grammar"]),
    ("gateway", &["openai_chat", "openai_completion", "openai_responses", "anthropic", "ollama", "pooling"]),
];
/// Executions of each, where the command says no number.
const EXECUTIONS: u64 = 10_000_000;
/// Coverage as cargo-fuzz asks for it, without a sanitizer: those need a nightly compiler.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
/// An input has 5 s, and a program 1 GiB; more is a finding like a panic.
const LIMITS: &[&str] =
    &["-max_len=8192", "-timeout=5", "-rss_limit_mb=1024", "-malloc_limit_mb=256", "-print_final_stats=1"];
const ABOUT: &str = "\
Programs of `model/fuzz`, `chat/fuzz` and `gateway/fuzz` on libFuzzer, with coverage, overflow checks and debug assertions: inputs of up to 8 KiB, each within \
5 s, a program within 1 GiB and one allocation within 256 MiB. Branches are those that the inputs kept reach. Templates may take \
50,000 steps and make 128 KiB here, a hundredth of what they may elsewhere: most of the time would go into the few that do.";

/// Runs every target; the page is written whatever they found, and a finding is an error.
pub fn proof(arguments: &[String]) -> Result<()> {
    let executions = arguments
        .first()
        .map_or(Ok(EXECUTIONS), |text| text.parse())
        .context("the second word is a number of executions")?;
    let only = arguments.get(1..).unwrap_or_default();
    let is_meant = |folder: &str, target: &str| {
        only.is_empty() || only.iter().any(|name| [folder, target].contains(&name.as_str()))
    };
    let commit = commit()?;
    let corpus = mlx::cache_dir()?.join("fuzz");
    let mut found = Vec::new();
    for (folder, targets) in FUZZ_CRATES {
        let targets: Vec<&str> = targets.iter().copied().filter(|target| is_meant(folder, target)).collect();
        if targets.is_empty() {
            continue;
        }
        let programs = build(folder)?;
        found.extend(thread::scope(|scope| {
            let runs: Vec<_> = targets
                .iter()
                .map(|target| scope.spawn(|| run(folder, target, &programs, &corpus, executions)))
                .collect();
            let ended = runs.into_iter().map(|run| run.join().map_err(|_| anyhow!("a thread panicked"))?);
            ended.collect::<Result<Vec<Figures>>>()
        })?);
    }
    ensure!(
        !found.is_empty(),
        "the third word is a folder with fuzz targets (model, chat or gateway) or a target"
    );
    let path = cargo::root().join(PAGE);
    let page = page(&fs::read_to_string(&path).unwrap_or_default(), &found, &commit);
    if executions >= EXECUTIONS {
        fs::write(path, &page).with_context(|| format!("write {PAGE}"))?;
    }
    println!("{page}");
    let failed: Vec<&str> = found.iter().filter_map(|figures| figures.finding.as_deref()).collect();
    ensure!(failed.is_empty(), "found, each to become a test:\n{}", failed.join("\n"));
    Ok(())
}

/// Compiles the targets, beside what else is compiled: with coverage nothing can be shared.
fn build(folder: &str) -> Result<PathBuf> {
    let triple = host()?;
    // With a target named, the flags are not those of build scripts.
    let mut command = command(folder, &["build", "--release", "--target", &triple])?;
    cargo::run(command.env("RUSTFLAGS", FLAGS))?;
    Ok(target_dir()?.join(triple).join("release"))
}

/// That the targets compile, without a warning.
pub fn check() -> Result<()> {
    FUZZ_CRATES
        .iter()
        .try_for_each(|(folder, _)| cargo::run(command(folder, &["clippy"])?.args(["--", "-D", "warnings"])))
}

/// A cargo command on the targets of a folder.
fn command(folder: &str, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo::without_own_variables(command.args(arguments));
    command.args(["--locked", "--manifest-path", &format!("{folder}/fuzz/Cargo.toml")]);
    command.env("CARGO_TARGET_DIR", target_dir()?);
    Ok(command)
}

fn target_dir() -> Result<PathBuf> {
    Ok(std::path::absolute(cargo::programs().with_file_name("fuzz"))?)
}

/// The triple of this machine.
fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("run rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

/// What a target did.
struct Figures {
    target: &'static str,
    /// By libFuzzer's names, after `stat::`.
    stats: BTreeMap<String, u64>,
    branches: u64,
    /// What went wrong, and the input.
    finding: Option<String>,
    /// Whether it was ended from outside, so that its figures are of no whole run.
    is_interrupted: bool,
}

/// libFuzzer's exit status where a signal ended it.
const INTERRUPTED: i32 = 72;

fn run(
    folder: &str,
    target: &'static str,
    programs: &Path,
    corpus: &Path,
    executions: u64,
) -> Result<Figures> {
    let (kept, findings) = (corpus.join("corpus").join(target), corpus.join("findings").join(target));
    for folder in [&kept, &findings] {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    let mut folders = vec![kept.clone()];
    let seeds = cargo::root().join(folder).join("fuzz/seeds").join(target);
    folders.extend(seeds.exists().then_some(seeds));
    if target == "config" {
        for (name, config) in exactness::configurations()? {
            fs::write(kept.join(name), config.to_string())?;
        }
    }
    let mut child = Command::new(programs.join(target))
        .args(LIMITS)
        .arg(format!("-runs={executions}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .args(&folders)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start the fuzz target {target}"))?;
    let mut figures = Figures::new(target);
    for line in BufReader::new(child.stderr.take().context("no stderr")?).split(b'\n') {
        figures.read(&String::from_utf8_lossy(&line?));
    }
    let status = child.wait()?;
    figures.is_interrupted = status.code() == Some(INTERRUPTED);
    if !status.success() {
        let said = figures.finding.take().unwrap_or_default();
        figures.finding = Some(format!("{target} ended with {status}; see {} {said}", findings.display()));
    }
    Ok(figures)
}

impl Figures {
    fn new(target: &'static str) -> Self {
        Self { target, stats: BTreeMap::new(), branches: 0, finding: None, is_interrupted: false }
    }

    /// A line of libFuzzer's: `#4096 pulse cov: 812 ft: 2301 …`, `stat::peak_rss_mb: 29`, and what a panic says.
    fn read(&mut self, line: &str) {
        if let Some((name, value)) = line.strip_prefix("stat::").and_then(|stat| stat.split_once(':')) {
            self.stats.extend(value.trim().parse().ok().map(|value| (name.to_owned(), value)));
        }
        let mut words = line.split_whitespace();
        if line.starts_with('#')
            && let Some(branches) = words.by_ref().skip_while(|word| *word != "cov:").nth(1)
        {
            self.branches = branches.parse().unwrap_or(self.branches);
        }
        if line.contains("pulse") {
            println!("▸ {}: {line}", self.target);
        }
        if line.contains("panicked at") || line.contains("ERROR: libFuzzer") {
            self.finding = Some(line.to_owned());
        }
    }

    fn line(&self, commit: &str) -> String {
        let [executions, slowest, memory] =
            ["number_of_executed_units", "slowest_unit_time_sec", "peak_rss_mb"].map(|name| self.stat(name));
        let finding = self.finding.as_deref().unwrap_or("nothing");
        let (target, branches) = (self.target, self.branches);
        format!("| {target} | {executions} | {branches} | {slowest} | {memory} | {finding} | {commit} |")
    }

    fn stat(&self, name: &str) -> u64 {
        self.stats.get(name).copied().unwrap_or_default()
    }
}

/// The page with new lines in place of those of the same targets.
fn page(former: &str, found: &[Figures], commit: &str) -> String {
    let mut page = format!(
        "# Strangers' bytes\n\n`cargo xtask proof fuzz`. {ABOUT}\n\n\
        | target | executions | branches | slowest input, s | most memory, MB | found | commit |\n\
        |---|---|---|---|---|---|---|\n"
    );
    for target in FUZZ_CRATES.iter().flat_map(|(_, targets)| *targets) {
        let old = former.lines().find(|line| line.starts_with(&format!("| {target} |")));
        let line = match found.iter().find(|figures| figures.target == *target) {
            Some(figures) if !figures.is_interrupted => Some(figures.line(commit)),
            Some(_) | None => old.map(str::to_owned),
        };
        line.into_iter().for_each(|line| page += &format!("{line}\n"));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_what_libfuzzer_printed() {
        let mut figures = Figures::new("gguf");
        for line in [
            "#2\tINITED cov: 81 ft: 90 corp: 1/1b exec/s: 0 rss: 27Mb",
            "#4096\tNEW    cov: 812 ft: 2301 corp: 12/8Kb lim: 4096 exec/s: 4096 rss: 29Mb",
            "#5000\tDONE   cov: 813 ft: 2302 corp: 13/8Kb lim: 4096 exec/s: 4096 rss: 29Mb",
            "stat::number_of_executed_units: 5000",
            "stat::slowest_unit_time_sec:    1",
            "stat::peak_rss_mb:              29",
        ] {
            figures.read(line);
        }
        let former = "| index | 9 | 8 | 7 | 6 | nothing | old |\n| gguf | 1 | 1 | 1 | 1 | nothing | old |\n";
        // What was interrupted leaves the line of before.
        let interrupted = Figures { is_interrupted: true, ..Figures::new("index") };
        let page = page(former, &[figures, interrupted], "abc");
        let lines =
            "| index | 9 | 8 | 7 | 6 | nothing | old |\n| gguf | 5000 | 813 | 1 | 29 | nothing | abc |\n";
        assert!(page.ends_with(lines), "{page}");
    }

    #[test]
    fn every_target_is_a_program_of_its_rooms_fuzz_crate() {
        for (folder, targets) in FUZZ_CRATES {
            let manifest = cargo::root().join(folder).join("fuzz/Cargo.toml");
            let manifest = fs::read_to_string(manifest).unwrap();
            let named = manifest.lines().filter_map(|line| line.strip_prefix("path = \"fuzz_targets/"));
            let mut programs: Vec<&str> = named.filter_map(|line| line.strip_suffix(".rs\"")).collect();
            let mut targets = targets.to_vec();
            programs.sort_unstable();
            targets.sort_unstable();
            assert_eq!(programs, targets, "{folder}");
        }
    }
}
