//! Simulator of the planner over time: small scripts of events in a cluster, with every step checked
//! (docs/simulator.md). `RUSSET_SIM=substring` selects scripts by name; `RUSSET_UPDATE_GOLDENS=1` rewrites
//! the traces.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test reads its scripts and may fail")]

#[path = "sim/actions.rs"]
mod actions;
#[path = "sim/agent.rs"]
mod agent;
#[path = "sim/cable.rs"]
mod cable;
#[path = "sim/disk.rs"]
mod disk;
#[path = "sim/expectation.rs"]
mod expectation;
#[path = "sim/ledger.rs"]
mod ledger;
#[path = "sim/machine.rs"]
mod machine;
#[path = "sim/model_shape.rs"]
mod model_shape;
#[path = "sim/operator.rs"]
mod operator;
#[path = "sim/random_script.rs"]
mod random_script;
#[path = "sim/script.rs"]
mod script;
#[path = "sim/spec_fields.rs"]
mod spec_fields;
#[path = "sim/story.rs"]
mod story;
#[path = "sim/trace.rs"]
mod trace;
#[path = "sim/words.rs"]
mod words;
#[path = "sim/world.rs"]
mod world;

use std::path::PathBuf;

use russet_plan::placement::{NewGroup, Placement, RemovalReason, RemovedGroup};
use script::Script;
use story::Story;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/sim/scripts");

/// Number of random stories; each settles several times. `RUSSET_SIM_STORIES` sets it.
const STORIES: u64 = 10;

/// Every selected script, in the order of names, with its text.
fn scripts() -> Vec<(String, String)> {
    let part = std::env::var("RUSSET_SIM").unwrap_or_default();
    let files = std::fs::read_dir(SCRIPTS).unwrap().map(|entry| entry.unwrap().path());
    let mut scripts: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|it| it == "txt")).collect();
    scripts.sort();
    let named = scripts.into_iter().map(|path| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(&path).unwrap())
    });
    named.filter(|(name, _)| name.contains(&part)).collect()
}

/// Golden files whose script is gone or pending.
fn strays(scripts: &[(String, String)]) -> Vec<String> {
    let files = std::fs::read_dir(SCRIPTS).unwrap().map(|entry| entry.unwrap().path());
    let goldens = files.filter(|path| path.extension().is_some_and(|it| it == "golden"));
    let names = goldens.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned());
    let complete =
        |name: &String| scripts.iter().any(|(it, text)| it == name && !text.starts_with("pending"));
    names
        .filter(|name| !complete(name))
        .map(|name| format!("{name}.golden has no script that writes it"))
        .collect()
}

/// Compares a trace with its golden file, or writes it.
fn compare(name: &str, trace: &str) -> Result<(), String> {
    let path = format!("{SCRIPTS}/{name}.golden");
    if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
        std::fs::write(&path, trace).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    if golden == trace {
        return Ok(());
    }
    let (mut old, mut new) = (golden.lines(), trace.lines());
    let at = (1..).find_map(|number| {
        let (old, new) = (old.next(), new.next());
        (old != new).then(|| format!("line {number} was {old:?} and is {new:?}"))
    });
    Err(format!(
        "tests/sim/scripts/{name}.golden: {}; RUSSET_UPDATE_GOLDENS=1 writes it anew",
        at.unwrap_or_default()
    ))
}

#[test]
fn every_script_comes_out_as_written() {
    let scripts = scripts();
    assert!(!scripts.is_empty(), "no script in {SCRIPTS} has RUSSET_SIM in its name");
    let (mut failures, mut pending, mut crashes, mut conflicts) = (Vec::new(), 0, 0, 0);
    for (name, text) in &scripts {
        let script = match Script::read(name, text) {
            Ok(script) => script,
            Err(wrong) => {
                failures.push(wrong);
                continue;
            }
        };
        let mut story = Story::default();
        let outcome = story.run(&script);
        crashes += story.crashes;
        conflicts += story.conflicts;
        match (outcome, &script.pending) {
            (Ok(()), None) => failures.extend(compare(name, &story.trace.text).err()),
            (Ok(()), Some(why)) => {
                failures.push(format!(
                    "{name} comes out as written now; take its first line away (pending {why})"
                ));
            }
            (Err(wrong), None) => {
                println!("{name}, until it came out otherwise:\n{}", story.trace.text);
                failures.push(wrong);
            }
            (Err(wrong), Some(why)) => {
                if std::env::var_os("RUSSET_SIM").is_some() {
                    println!("{}", story.trace.text);
                }
                pending += 1;
                println!("pending {name}: {why}\n  {wrong}");
            }
        }
    }
    if std::env::var_os("RUSSET_SIM").is_none() {
        failures.extend(strays(&scripts));
    }
    println!(
        "{} scripts, {pending} of them pending; {crashes} crash points and {conflicts} conflicts",
        scripts.len()
    );
    assert!(failures.is_empty(), "{} scripts failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn stories_drawn_at_random_break_no_promise() {
    let mut crashes = 0;
    let configured = std::env::var("RUSSET_SIM_STORIES").ok();
    let stories = configured.map_or(STORIES, |count| count.parse().unwrap());
    for seed in 0..stories {
        let text = random_script::story(seed);
        let script = Script::read("drawn", &text).unwrap();
        let mut story = Story::loose();
        if let Err(wrong) = story.run(&script) {
            panic!("seed {seed}: {wrong}\n\n{text}\n\n{}", story.trace.text);
        }
        crashes += story.crashes;
    }
    println!("{stories} stories, {crashes} crash points");
}

/// The page with the current content of every file that it shows.
fn page(written: &str) -> String {
    let (mut fresh, mut skipping) = (String::new(), false);
    for line in written.lines() {
        skipping &= line != "```";
        if skipping {
            continue;
        }
        fresh.push_str(line);
        fresh.push('\n');
        if let Some(file) = line.strip_prefix("$ cat tests/sim/scripts/") {
            fresh.push_str(&std::fs::read_to_string(format!("{SCRIPTS}/{file}")).unwrap());
            skipping = true;
        }
    }
    fresh
}

#[test]
fn the_page_shows_the_language_and_a_script_as_they_are() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/simulator.md");
    let written = std::fs::read_to_string(path).unwrap();
    let fresh = page(&written);
    if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
        std::fs::write(path, &fresh).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert!(written == fresh, "docs/simulator.md shows other files; RUSSET_UPDATE_GOLDENS=1 writes it anew");
    // A bar in a Markdown table is escaped.
    let written = written.replace("\\|", "|");
    let verbs = script::VERBS.iter().map(|(_, usage, _)| *usage);
    let usages = verbs.chain(script::OTHERS).chain(expectation::USAGE.iter().flat_map(|it| it.split(" or ")));
    let missing: Vec<&str> = usages.filter(|usage| !written.contains(&format!("`{usage}`"))).collect();
    assert!(missing.is_empty(), "docs/simulator.md does not show {missing:#?}");
}

/// Runs a script.
fn run_story(text: &str) -> Story {
    let mut story = Story::loose();
    story.run(&Script::read("story", text).unwrap()).unwrap();
    story
}

#[test]
fn ledger_detects_every_violation_it_checks() {
    let story = run_story(
        "node a \"Apple M3 Ultra\" 256Gi\nnode b \"Apple M3 Ultra\" 256Gi\ncable a b rdma\n\
         model m llama-405b bits=4\ndeploy chat model=m mode=tensor ranks=2\nsettle",
    );
    let world = story.world();
    let group = world.living()[0].clone();
    let again = NewGroup { name: "chat-0-again".to_owned(), replica: 0, plan: group.spec.plan.clone() };
    let found = ledger::doubled(world, "m", &again).join("; ");
    for words in
        ["node a is promised twice: 242", "port rdma_en3 of node b is given away and in use by chat-0#1"]
    {
        assert!(found.contains(words), "{found}");
    }
    let placement = Placement { create: vec![again], ..Placement::default() };
    assert!(
        ledger::unrequested(world, "chat", &placement, false)[0]
            .contains("placed again beside chat-0#1 unasked")
    );
    let name = group.metadata.name.clone().unwrap();
    let delete = vec![RemovedGroup { name, reason: RemovalReason::Replaced }];
    let placement = Placement { delete, ..Placement::default() };
    assert_eq!(ledger::unrequested(world, "chat", &placement, false), ["chat-0#1 of chat goes unasked"]);
    let mut edited = world.clone();
    edited.deployments.get_mut("chat").unwrap().spec.replicas = 0;
    assert!(ledger::unrequested(&edited, "chat", &placement, false).is_empty());
    assert_eq!(ledger::unsettled(&edited), ["chat-0#1 is one of 1, and 0 are wanted"]);
    // An engine whose group and Shard are gone still holds its memory and its port.
    let mut held = world.clone();
    held.cluster.groups.clear();
    assert_eq!(ledger::unsettled(&held), ["0 replicas of chat are there or said to wait, not 1"]);
    let again = NewGroup { name: "chat-0-again".to_owned(), replica: 0, plan: group.spec.plan.clone() };
    let found = ledger::doubled(&held, "m", &again).join("; ");
    assert!(found.contains("in use by an engine that was not released"), "{found}");
}

#[test]
fn unreadable_script_line_names_its_place_and_expectation() {
    for (line, wrong) in [
        ("nod a \"M4 Max\" 64Gi", "\"nod\" is no verb; there are node, cable"),
        ("node a M4 64Gi", "the chip in quotes is expected where \"M4\" stands; it is: node NAME \"CHIP\""),
        ("node a \"M4 Max", "has no closing quote"),
        ("node a \"M4 Max\" much", "\"much\" is not a quantity of bytes"),
        ("cable a b string", "rdma, thunderbolt, ethernet, wifi is expected where \"string\" stands"),
        ("cable a b rdma fast", "the speed: \"fast\" is not a quantity"),
        ("deploy chat replicas=1", "model= is expected; it is: deploy NAME model="),
        ("deploy chat model=m colour=red", "colour= is no field of this line; there are model, replicas"),
        (
            "edit chat mode=sideways",
            "mode= is one of auto, single, pipeline, tensor, hybrid, not \"sideways\"",
        ),
        ("scale chat many", "replicas is a number, not \"many\""),
        ("lose", "the name of a node is expected at the end of the line"),
        ("settle now", "nothing is expected where \"now\" stands"),
        ("clock soon", "a time such as 90s, 5m, -3h or 25d is expected"),
        ("expect chat sings", "waits, refused, says, silent, empty is expected where \"sings\" stands"),
        ("expect chat waits why", "the words in quotes is expected where \"why\" stands"),
        ("expect only chat", "moved is expected"),
        ("during lunch", "during settle is expected"),
        ("during settle", "story.txt:2: end is expected after during settle"),
        ("during settle\nrestart operator", "story.txt:3: a step that changes the cluster is expected"),
        ("end", "end is expected after during settle and a step"),
    ] {
        let read = Script::read("story", &format!("# A story.\n{line}\n")).map(|_| ());
        let error = read.unwrap_err();
        assert!(error.starts_with("tests/sim/scripts/story.txt:") && error.contains(wrong), "{error}");
    }
}
