//! `russet plan` as a program, without a server and without an environment. The examples in `docs/plan.md`
//! and `docs/tiers.md` are its output; `RUSSET_UPDATE_GOLDENS=1` rewrites them.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const SPEC: &str = "docs/plan/spec.yaml";
const CLUSTER: &str = "docs/plan/cluster.yaml";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn russet(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_russet"))
        .args(arguments)
        .current_dir(root())
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Exit code, standard output, standard error.
fn plan(arguments: &[&str], input: &str) -> (i32, String, String) {
    let output = russet(&[&["plan"], arguments].concat(), input);
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_pages_show_what_the_program_prints() {
    for (name, least) in [("docs/plan.md", 2), ("docs/tiers.md", 4)] {
        shows(name, least);
    }
}

fn shows(name: &str, least: usize) {
    let page = root().join(name);
    let written = std::fs::read_to_string(&page).unwrap();
    let (mut fresh, mut shown, mut skipping) = (String::new(), 0, false);
    for line in written.lines() {
        if line == "```" {
            skipping = false;
        }
        if skipping {
            continue;
        }
        fresh.push_str(line);
        fresh.push('\n');
        if let Some(command) = line.strip_prefix("$ russet ") {
            let arguments: Vec<&str> = command.split(' ').collect();
            let output = russet(&arguments, "");
            assert!(matches!(output.status.code(), Some(0 | 3)), "{line}: {}", text(&output.stderr));
            let answer = text(&output.stdout);
            if arguments.contains(&"table") || !arguments.contains(&"-o") {
                let wide: Vec<&str> = answer.lines().filter(|line| line.chars().count() > 100).collect();
                assert!(wide.is_empty(), "beyond 100 columns: {wide:#?}");
            }
            fresh.push_str(&answer);
            (shown, skipping) = (shown + 1, true);
        }
    }
    assert!(shown >= least, "{name} shows {shown} answers");
    if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
        std::fs::write(&page, &fresh).unwrap();
    }
    let written = std::fs::read_to_string(&page).unwrap();
    let differs = written.lines().zip(fresh.lines()).find(|(written, fresh)| written != fresh);
    assert!(
        written == fresh,
        "{name} shows what `russet plan` does not print any more: {differs:#?}; \
         RUSSET_UPDATE_GOLDENS=1 cargo test -p russet-cli --test plan writes it anew"
    );
}

#[test]
fn json_and_yaml_say_what_the_table_says() {
    let arguments = ["-f", SPEC, "--cluster", CLUSTER];
    let (exit, table, errors) = plan(&arguments, "");
    assert_eq!((exit, errors.as_str()), (0, ""));
    let (exit, json, _) = plan(&[&arguments[..], &["-o", "json"]].concat(), "");
    assert_eq!(exit, 0);
    let json: Value = serde_json::from_str(&json).unwrap();
    let (_, yaml, _) = plan(&[&arguments[..], &["-o", "yaml"]].concat(), "");
    assert_eq!(serde_norway::from_str::<Value>(&yaml).unwrap(), json);

    let deployments = json["deployments"].as_array().unwrap();
    let names: Vec<&str> = deployments.iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["reasoning", "assistant", "documents"], "the order of the file");
    let mut rows = 0;
    for deployment in deployments {
        assert_eq!((&deployment["namespace"], &deployment["placed"]), (&"default".into(), &true.into()));
        assert_eq!(
            (&deployment["keep"], &deployment["delete"]),
            (&Value::Array(vec![]), &Value::Array(vec![]))
        );
        let created = deployment["create"].as_array().unwrap();
        rows += created.len();
        for replica in created {
            let hash = replica["plan"]["hash"].as_str().unwrap();
            assert!(replica["name"].as_str().unwrap().ends_with(&hash[..8]));
            for member in replica["plan"]["members"].as_array().unwrap() {
                let node = member["nodeName"].as_str().unwrap();
                let bytes = |field: &str| member[field].as_u64().unwrap();
                let reserved = bytes("weightBytes") + bytes("kvBytes") + bytes("overheadBytes");
                let cell = format!("{node}: {} of ", russet_plan::quantity::write(reserved));
                assert!(table.contains(&cell), "{cell} is not in\n{table}");
            }
        }
        let reason = deployment["report"]["reason"].as_str().unwrap();
        let flowing = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flowing.contains(reason), "{reason} is not in\n{table}");
    }
    assert_eq!(rows, 4, "the assistant has two replicas");
}

#[test]
fn a_shortage_has_its_own_exit_and_names_the_numbers() {
    let (exit, table, errors) = plan(&["-f", "docs/plan/too-large.yaml", "--cluster", CLUSTER], "");
    assert_eq!((exit, errors.as_str()), (3, ""));
    for words in [
        "not placed",
        "studio-1: the whole model needs 710.8 GiB",
        "free of 480.0 GiB",
        "lower kv.contextTokens",
    ] {
        let flowing = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flowing.contains(words), "{words:?} is not in\n{table}");
    }
    let both = ["-f", SPEC, "-f", "docs/plan/too-large.yaml", "--cluster", CLUSTER, "-o", "json"];
    let (exit, json, _) = plan(&both, "");
    let json: Value = serde_json::from_str(&json).unwrap();
    let placed = json["deployments"].as_array().unwrap().iter().map(|it| it["placed"].as_bool().unwrap());
    assert_eq!((exit, placed.collect::<Vec<_>>()), (3, vec![true, true, true, false]));
}

#[test]
fn missing_objects_are_named_and_files_override_the_cluster() {
    let model = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: NAME}\nspec: {source: {uri: \"URI\"}}\n";
    let deployment = "---\napiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: chat}\nspec: {modelRef: {name: NAME}}\n";
    let node = "---\napiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {name: studio-4}\nspec: {scheduling: Cordoned}\n";
    let known = "hf://mlx-community/Meta-Llama-3.1-8B-Instruct-4bit";
    for (story, name, uri, more, expected) in [
        ("headers nobody read", "new", "hf://a/new", "", (3, "Model new: its headers are not read yet")),
        ("the same source", "llama-3.1-8b", known, "", (0, "1 rank on studio-3")),
        (
            "another source",
            "llama-3.1-8b",
            "hf://a/other",
            "",
            (3, "Model llama-3.1-8b: its headers are not read yet"),
        ),
        ("a cordoned node", "llama-3.1-8b", known, node, (0, "1 rank on studio-3")),
    ] {
        let spec = format!("{model}{deployment}{more}").replace("NAME", name).replace("URI", uri);
        let (exit, table, errors) = plan(&["-f", "-", "--cluster", CLUSTER], &spec);
        assert_eq!(
            (exit, table.contains(expected.1), errors.as_str()),
            (expected.0, true, ""),
            "{story}:\n{table}"
        );
    }
    let spec =
        format!("{deployment}{}", node.replace("studio-4", "studio-3")).replace("NAME", "llama-3.1-8b");
    let (_, table, _) = plan(&["-f", "-", "--cluster", CLUSTER], &spec);
    assert!(table.contains("1 rank on studio-4"), "studio-3 is cordoned by the spec:\n{table}");
}

#[test]
fn unreadable_objects_are_named_with_file_and_position() {
    let typo = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: chat}\nspec: {modelRef: {name: m}, replica: 2}\n";
    let bare = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: chat}\nspec: {}\n---\nkind: Model\n";
    for (spec, cluster, input, messages) in [
        ("nowhere.yaml", CLUSTER, "", vec!["cannot read nowhere.yaml"]),
        ("-", CLUSTER, "a: [", vec!["standard input, document 1 is not valid YAML", "at line 2 column 1"]),
        (
            "-",
            CLUSTER,
            typo,
            vec!["standard input, document 1: ModelDeployment chat: spec.replica is no field"],
        ),
        (
            "-",
            CLUSTER,
            bare,
            vec!["missing field `modelRef`", "standard input, document 2: an object without apiVersion"],
        ),
        (CLUSTER, CLUSTER, "", vec!["no ModelDeployment"]),
        ("-", "-", "", vec!["standard input can be read once only"]),
        (
            SPEC,
            "-",
            "kind: List\nitems:\n- apiVersion: russet.dev/v1alpha1\n  kind: Model\n  metadata: {name: m}\n  spec: 7\n",
            vec!["standard input, document 1, item 1: Model m: ", "kubectl get Model m"],
        ),
    ] {
        let (exit, answer, errors) = plan(&["-f", spec, "--cluster", cluster], input);
        assert_eq!((exit, answer.as_str()), (2, ""), "{errors}");
        for message in messages {
            assert!(errors.contains(message), "{errors:?} lacks {message:?}");
        }
    }
}
