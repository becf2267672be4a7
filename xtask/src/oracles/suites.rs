//! The suites that need programs of others, each with the slice of CI that runs it. The programs are found or built one
//! level up.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::slice::{self, ETCD, KUBERNETES, POLICY, ScenarioRun, Slice};
use crate::tally::{Tally, run_counting};
use crate::{oracles, real_weights, sdk_tests, setup, suites, test_binaries};

/// A suite that needs programs built from Go modules: its name, its test binary, its environment, and its
/// filter.
struct OracleSuite {
    name: &'static str,
    test: &'static str,
    /// The programs it needs, by the variables that name them.
    programs: &'static [&'static str],
    /// The slice of CI that runs it; `None` for every one.
    slice: Option<u32>,
    environment: &'static [(&'static str, &'static str)],
    arguments: &'static [&'static str],
}

/// Ordered by how soon they give a result.
const ORACLE_SUITES: &[OracleSuite] = &[
    OracleSuite {
        name: "kubectl",
        test: "conformance",
        programs: &[oracles::KUBECTL],
        slice: Some(ETCD),
        environment: &[],
        arguments: &["--skip", "charts::"],
    },
    OracleSuite {
        name: "documents",
        test: "documents",
        programs: &[oracles::KUBECTL, oracles::JQ],
        slice: None,
        environment: &[],
        arguments: &[],
    },
    OracleSuite {
        name: "seen",
        test: "e2e",
        programs: &[oracles::PROMETHEUS, oracles::PROMTOOL],
        slice: None,
        environment: &[("RUSSET_SEEN", "1")],
        arguments: &[],
    },
    OracleSuite {
        name: "presence",
        test: "cluster",
        programs: &[oracles::MOSQUITTO],
        slice: None,
        environment: &[],
        arguments: &["mosquitto"],
    },
    OracleSuite {
        name: "inbox",
        test: "gateway",
        programs: &[oracles::MOSQUITTO],
        slice: Some(POLICY),
        environment: &[],
        arguments: &["mosquitto"],
    },
    OracleSuite {
        name: "services",
        test: "services",
        programs: &[oracles::NSPAWN],
        slice: Some(POLICY),
        environment: &[],
        arguments: &["--test-threads=1"],
    },
    OracleSuite {
        name: "sources",
        test: "sources",
        programs: &[
            oracles::SOURCES_PYTHON,
            oracles::REGISTRY,
            oracles::ORAS,
            oracles::FAKE_GCS,
            oracles::AZURITE,
        ],
        slice: Some(ETCD),
        environment: &[],
        arguments: &[],
    },
    OracleSuite {
        name: "clients",
        test: "clients",
        programs: oracles::clients::ALL,
        slice: Some(POLICY),
        environment: &[],
        arguments: &["--nocapture"],
    },
    OracleSuite {
        name: "charts",
        test: "conformance",
        programs: REAL,
        slice: Some(KUBERNETES),
        environment: &[],
        arguments: &["charts::"],
    },
    OracleSuite {
        name: "store",
        test: "etcd",
        programs: &[oracles::ETCD],
        slice: Some(ETCD),
        environment: &[],
        arguments: &[],
    },
    OracleSuite {
        name: "attempts",
        test: "attempts",
        programs: REAL,
        slice: Some(KUBERNETES),
        environment: &[("RUSSET_CONTROL_PLANE", "kubernetes")],
        arguments: &[],
    },
    OracleSuite {
        name: "kubernetes",
        test: "e2e",
        programs: REAL,
        slice: Some(KUBERNETES),
        environment: &[("RUSSET_CONTROL_PLANE", "kubernetes")],
        arguments: &[],
    },
    OracleSuite {
        name: "clocks",
        test: "e2e",
        programs: &[oracles::LIBFAKETIME],
        slice: Some(ETCD),
        environment: &[("RUSSET_CLOCKS", "1")],
        arguments: &[],
    },
    OracleSuite {
        name: "etcd",
        test: "e2e",
        programs: &[oracles::ETCD, oracles::KUBECTL, oracles::FLUX],
        slice: Some(ETCD),
        environment: &[("RUSSET_CONTROL_PLANE", "etcd")],
        arguments: &[],
    },
];

/// The programs of the real Kubernetes, with its users' tools.
const REAL: &[&str] = &[
    oracles::KUBE_APISERVER,
    oracles::KUBE_CONTROLLER_MANAGER,
    oracles::ETCD,
    oracles::HELM,
    oracles::KUBECTL,
    oracles::FLUX,
];

/// The named suites; without names all of them, in CI those of this commit.
fn chosen(arguments: &[String]) -> Result<Vec<&'static OracleSuite>> {
    for name in arguments {
        let known: Vec<&str> = ORACLE_SUITES.iter().map(|suite| suite.name).collect();
        ensure!(
            known.contains(&name.as_str()),
            "oracle suite {name} is not known; there is: build, {}",
            known.join(", ")
        );
    }
    let slice = Slice::of_this_run()?;
    let is_selected = |suite: &&OracleSuite| match arguments.is_empty() {
        true => suite.slice.is_none_or(|number| slice.runs(number)),
        false => arguments.iter().any(|argument| argument == suite.name),
    };
    Ok(ORACLE_SUITES.iter().filter(is_selected).collect())
}

/// The programs of suites, by the variables that tests read; built if missing. One that cannot be had keeps no other
/// from being built: the error names all of them. Of the clients a slice of CI has the quick ones.
fn programs(suites: &[&OracleSuite], run: Slice) -> Result<BTreeMap<&'static str, PathBuf>> {
    let is_of_run = |name: &&str| {
        run == Slice::Everything || !oracles::clients::ALL.contains(name) || oracles::clients::is_quick(name)
    };
    let names: BTreeSet<&'static str> =
        suites.iter().flat_map(|suite| suite.programs).copied().filter(is_of_run).collect();
    // Downloads need no core, compilers need all of them.
    let (fetched, built): (Vec<&'static str>, _) =
        names.into_iter().partition(|name| oracles::is_fetched(name));
    let found = |names: Vec<&'static str>| -> Vec<(&str, Result<PathBuf>)> {
        names.into_iter().map(|name| (name, oracles::program(name))).collect()
    };
    let results = std::thread::scope(|scope| {
        let fetched = scope.spawn(|| found(fetched));
        let mut results = found(built);
        results.extend(fetched.join().map_err(|_| anyhow::anyhow!("a download panicked"))?);
        anyhow::Ok(results)
    })?;
    let (mut programs, mut missing) = (BTreeMap::new(), Vec::new());
    for (name, result) in results {
        match result {
            Ok(program) => drop(programs.insert(name, program)),
            Err(error) => missing.push(format!("{name}: {error:#}")),
        }
    }
    ensure!(missing.is_empty(), "programs of the oracles are missing\n{}", missing.join("\n"));
    Ok(programs)
}

/// The named suites, or all of them; ends with `N passed, N failed`. After `build` only their programs are built.
pub fn run(arguments: &[String]) -> Result<()> {
    if let Some((_, suites)) = arguments.split_first().filter(|(verb, _)| *verb == "build") {
        for (name, program) in programs(&chosen(suites)?, Slice::of_this_run()?)? {
            println!("export {name}={}", program.display());
        }
        return Ok(());
    }
    let suites = chosen(arguments)?;
    let run = Slice::of_this_run()?;
    let part = match run {
        Slice::Of(number) if arguments.is_empty() => slice::scenarios(ScenarioRun::Other, Some(number)),
        _ => None,
    };
    let (prepared, python) = setup::with_python()?;
    let files = [real_weights::vocabularies()?, real_weights::minilm()?];
    let openai_tests = sdk_tests::openai()?;
    let programs = programs(&suites, run)?;
    suites::build_with(&prepared)?;
    let binaries = test_binaries::build(&prepared)?;
    let (mut all, mut clean) = (Tally::default(), true);
    for suite in suites {
        let started = Instant::now();
        println!("▸ {}", suite.name);
        let mut tally = Tally::default();
        for mut tests in test_binaries::commands(&binaries, suite.test)? {
            // With this variable these suites fail if a program is missing; otherwise their tests print
            // `skipped`.
            tests.args(suite.arguments).env("RUSSET_ORACLES", "1").env("RUSSET_PYTHON", python.interpreter());
            tests.envs(&programs).envs(files.clone()).envs(openai_tests.clone());
            if let Slice::Of(number) = run {
                tests.env("RUSSET_SLICE", number.to_string());
            }
            tests.envs(suite.environment.iter().copied()).env_remove("KUBECONFIG");
            tests.envs(part.clone());
            let (counted, well) = run_counting(&mut tests)?;
            tally.merge(counted);
            clean &= well;
        }
        println!(
            "▸ {}: {} passed, {} failed, {} skipped, {:.0} s",
            suite.name,
            tally.passed,
            tally.failed,
            tally.skipped.len(),
            started.elapsed().as_secs_f64()
        );
        ensure!(tally.passed + tally.failed > 0, "no test of {} ran", suite.name);
        all.add(tally, suite.name);
    }
    println!("{all}");
    ensure!(clean && all.failed == 0, "an oracle suite failed");
    Ok(())
}
