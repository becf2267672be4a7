//! What mlx-lm answers, for the engine's test `exactness` to compare with, and which groups a run compares. Answers are
//! kept for as long as the variant, the script that asks and MLX are the same. It compares nothing itself.

mod cases;
mod proof;
mod support;

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use cases::{Case, Matrix};
pub use proof::proof;

use crate::{
    cargo,
    mlx::{self, MLX_VERSION, Prepared, cache_dir},
    python::Python,
    slice,
    step::fingerprint,
};

const SCRIPT: &str = "engine/tests/oracle.py";
/// What the script imports besides mlx-lm.
const IMPORTED: &str = "engine/tests/packings.py";
const VARIANTS: &str = "engine/tests/exactness/variants.json";
/// In a folder of answers, written last.
const MARK: &str = "oracle.json";
/// In the cache folder: commits that passed on this machine, the newest last.
const PASSED: &str = "exactness-passed";
/// Commits that are remembered.
const REMEMBERED: usize = 50;

/// The groups of a run of `cargo xtask test`: those of the change and a share of the rest; with `RUSSET_SLICE=all` every
/// one. Asks mlx-lm for what is not there, and returns the variables that tell the engine's test `exactness`.
pub fn of_this_run(python: &Python) -> Result<Vec<(String, OsString)>> {
    let matrix = matrix()?;
    let every = matrix.cases();
    let chosen = match slice::number()? {
        None => every,
        Some(number) => {
            let base = base()?;
            let changed = changed(&base)?;
            let former = git(&["show", &format!("{base}:{VARIANTS}")])
                .and_then(|text| Matrix::read(&text))
                .unwrap_or_default();
            let edited = matrix.differing(&former);
            let all = every.len();
            let chosen = cases::chosen(every, &changed, &edited, number);
            println!(
                "exactness: {} of {all} groups, by the change since {base:.7} and slice {number}",
                chosen.len()
            );
            chosen
        }
    };
    prepared(python, &matrix, &chosen)
}

/// Notes that the tests of this commit passed: the next run looks at what changed since.
pub fn passed() -> Result<()> {
    let path = cache_dir()?.join(PASSED);
    let before = fs::read_to_string(&path).unwrap_or_default();
    let head = git(&["rev-parse", "HEAD"])?;
    let mut lines: Vec<&str> = before.lines().filter(|line| *line != head.trim()).collect();
    lines.push(head.trim());
    let from = lines.len().saturating_sub(REMEMBERED);
    fs::write(&path, lines[from..].join("\n") + "\n").with_context(|| format!("write {}", path.display()))
}

/// The newest commit before this state that passed on this machine; without one, the commit before this one.
fn base() -> Result<String> {
    let noted = fs::read_to_string(cache_dir()?.join(PASSED)).unwrap_or_default();
    let before = |commit: &&str| git(&["merge-base", "--is-ancestor", commit, "HEAD"]).is_ok();
    match noted.lines().rev().find(before) {
        Some(commit) => Ok(commit.to_owned()),
        None => Ok(git(&["rev-parse", "--verify", "HEAD^1"])
            .map_or("HEAD".to_owned(), |hash| hash.trim().to_owned())),
    }
}

/// Paths that differ from a commit, edits that are not committed among them. Not those that are gone: what does their
/// work now is a path of its own.
fn changed(base: &str) -> Result<BTreeSet<String>> {
    let differing = git(&["diff", "--name-only", "--diff-filter=d", base])?;
    let untracked = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(differing.lines().chain(untracked.lines()).map(str::to_owned).collect())
}

fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).current_dir(cargo::root()).output()?;
    ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?)
}

fn matrix() -> Result<Matrix> {
    let path = cargo::root().join(VARIANTS);
    Matrix::read(&fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?)
        .with_context(|| format!("read {}", path.display()))
}

/// The `config.json` of every variant, with its name.
pub fn configurations() -> Result<Vec<(String, serde_json::Value)>> {
    let matrix = matrix()?;
    let names: BTreeSet<String> = matrix.cases().into_iter().map(|case| case.variant).collect();
    names.into_iter().map(|name| Ok((name.clone(), matrix.spec(&name)?["config"].take()))).collect()
}

/// Has the answers that these groups need, and tells the test where they are.
fn prepared(python: &Python, matrix: &Matrix, cases: &[Case]) -> Result<Vec<(String, OsString)>> {
    same_library(&mlx::prepare()?, &python.interpreter())?;
    let controls = [
        ("alone", Case::new("tied-llama3", &[5], 1)),
        ("stage", Case::new("sharded", &[3], 2)),
        ("pipeline", Case::new("tied-llama3", &[3, 2], 1)),
    ];
    let answers = Answers::open(matrix)?;
    let needed: Vec<&Case> = cases.iter().chain(controls.iter().map(|(_, case)| case)).collect();
    answers.ask(python, &needed)?;
    let mut plan = json!({ "cases": [] });
    plan["cases"] = cases.iter().map(|case| answers.entry(case)).collect::<Result<_>>()?;
    for (name, case) in &controls {
        plan[*name] = answers.entry(case)?;
    }
    let path = std::path::absolute(cargo::programs().join("exactness.json"))?;
    fs::write(&path, plan.to_string()).with_context(|| format!("write {}", path.display()))?;
    Ok(vec![("RUSSET_EXACTNESS".to_owned(), path.into())])
}

/// mlx-lm's answers on this machine: a folder a variant.
struct Answers<'a> {
    home: PathBuf,
    script: Vec<u8>,
    matrix: &'a Matrix,
}

impl<'a> Answers<'a> {
    fn open(matrix: &'a Matrix) -> Result<Self> {
        let home = cache_dir()?.join(format!("oracle-{MLX_VERSION}"));
        fs::create_dir_all(&home).with_context(|| format!("create {}", home.display()))?;
        let mut script = Vec::new();
        for name in [SCRIPT, IMPORTED] {
            let path = cargo::root().join(name);
            script.extend(fs::read(&path).with_context(|| format!("read {}", path.display()))?);
        }
        Ok(Self { home, script, matrix })
    }

    /// Named by what the answers depend on.
    fn folder(&self, variant: &str) -> Result<PathBuf> {
        let spec = self.matrix.spec(variant)?.to_string();
        let hash = fingerprint(&[self.script.as_slice(), spec.as_bytes()].concat());
        Ok(self.home.join(format!("{variant}-{hash:016x}")))
    }

    /// Asks for what is not there: single processes two at a time, then those whose members wait for each other.
    fn ask(&self, python: &Python, cases: &[&Case]) -> Result<()> {
        // Two runs at once would write one folder; the second waits here and then finds it done.
        let lock = fs::File::create(self.home.join("lock"))?;
        lock.lock().with_context(|| format!("lock {}", self.home.display()))?;
        let (mut alone, mut sharded) = (BTreeSet::new(), BTreeSet::new());
        for case in cases {
            let folder = self.folder(&case.variant)?;
            if !folder.join(MARK).exists() {
                let _ = fs::remove_dir_all(&folder);
                fs::create_dir_all(&folder)?;
                fs::write(folder.join("spec.json"), self.matrix.spec(&case.variant)?.to_string())?;
                alone.insert(folder.display().to_string());
            }
            if case.members > 1 && !folder.join(format!("tensor-{}", case.members)).join(MARK).exists() {
                sharded.insert(format!("{}:{}", folder.display(), case.members));
            }
        }
        if alone.is_empty() && sharded.is_empty() {
            return Ok(());
        }
        println!(
            "exactness: asking mlx-lm for {} variants, {} more of them sharded (kept until they change)",
            alone.len(),
            sharded.len()
        );
        let mut halves = [Vec::new(), Vec::new()];
        for (index, job) in alone.into_iter().enumerate() {
            halves[index % 2].push(job);
        }
        run_script(python, &halves)?;
        run_script(python, &[sharded.into_iter().collect()])
    }

    /// A group as the test reads it.
    fn entry(&self, case: &Case) -> Result<serde_json::Value> {
        let model = self.folder(&case.variant)?;
        let oracle = match case.members {
            1 => model.clone(),
            members => model.join(format!("tensor-{members}")),
        };
        Ok(json!({
            "name": case.name(), "model": model, "oracle": oracle, "split": case.split, "members": case.members,
            "brief": case.brief,
        }))
    }
}

/// Runs the script once for each list of jobs that is not empty, all at the same time.
fn run_script(python: &Python, lists: &[Vec<String>]) -> Result<()> {
    let mut children = Vec::new();
    for jobs in lists.iter().filter(|jobs| !jobs.is_empty()) {
        let mut command = python.command();
        command.arg(SCRIPT).args(jobs).env("OPENBLAS_NUM_THREADS", "1").current_dir(cargo::root());
        children.push(command.spawn()?);
    }
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "{SCRIPT} ended with {status}");
    }
    Ok(())
}

/// Both sides have to run the same kernels: the engine's library and the oracle's are the same file.
fn same_library(prepared: &Prepared, interpreter: &Path) -> Result<()> {
    let Some(ours) = prepared.libmlx_dir().map(|dir| dir.join("libmlx.so")) else {
        return Ok(());
    };
    let probe =
        "import mlx.core, pathlib; print(pathlib.Path(mlx.core.__file__).parent / 'lib' / 'libmlx.so')";
    let output = Command::new(interpreter).args(["-c", probe]).output()?;
    let theirs = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        fs::read(&ours)?
            == fs::read(&theirs).with_context(|| format!("read the oracle's library {theirs:?}"))?,
        "{} and {theirs} differ, so the comparison would mean nothing; delete both folders and prepare again",
        ours.display()
    );
    Ok(())
}
