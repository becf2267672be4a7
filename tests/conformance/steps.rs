//! Common uses of kubectl, one function each. Each creates and deletes its own objects.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::repository;

use crate::ConformanceBench;

/// A use.
type KubectlStep = fn(&ConformanceBench) -> Result<()>;

/// Every use.
pub const ALL: &[(&str, KubectlStep)] = &[
    ("apply_creates_changes_and_leaves_alone", apply),
    ("apply_server_side_reports_conflicts_and_forces", apply_server_side),
    ("diff_shows_what_would_change", diff),
    ("get_prints_the_columns_of_the_kind", get),
    ("get_watch_shows_changes_as_they_come", get_watch),
    ("describe_shows_an_object_and_its_events", describe),
    ("edit_stores_what_the_editor_wrote", edit),
    ("patch_label_and_annotate_change_one_thing", patch),
    ("scale_changes_replicas", scale),
    ("delete_waits_for_finalizers", delete),
    ("wait_sees_conditions_and_deletion", wait),
    ("explain_knows_our_fields_and_the_core_ones", explain),
    ("typed_creates_arrive_as_protobuf", typed_creates),
    ("invalid_objects_are_refused_with_their_field", refusals),
    ("selectors_choose", selectors),
    ("auth_can_i_answers_by_role", auth),
    ("api_resources_lists_short_names_and_categories", api_resources),
    ("deleting_a_namespace_deletes_its_objects", namespaces),
    ("a_new_definition_is_served_at_once", definitions),
];

const DEPLOYMENT: &str = "\
apiVersion: russet.dev/v1alpha1
kind: ModelDeployment
metadata:
  name: NAME
  labels: {suite: kubectl}
spec:
  modelRef: {name: absent}
";

fn deployment(name: &str) -> String {
    DEPLOYMENT.replace("NAME", name)
}

fn has(text: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(text.contains(word), "\"{word}\" is missing in:\n{text}");
    }
    Ok(())
}

fn delete_all(bench: &ConformanceBench, what: &[&str]) -> Result<()> {
    let mut arguments = vec!["delete", "--ignore-not-found"];
    arguments.extend(what);
    bench.run(&arguments, "").map(|_| ())
}

fn apply(bench: &ConformanceBench) -> Result<()> {
    let one = deployment("applied");
    has(&bench.run(&["apply", "-f", "-"], &one)?, &["created"])?;
    has(&bench.run(&["apply", "-f", "-"], &one)?, &["unchanged"])?;
    has(&bench.run(&["apply", "-f", "-"], &format!("{one}  replicas: 3\n"))?, &["configured"])?;
    let replicas = bench.run(&["get", "mdeploy", "applied", "-o", "jsonpath={.spec.replicas}"], "")?;
    ensure!(replicas == "3", "replicas are {replicas}");
    has(&bench.run(&["apply", "-f", "-"], &one)?, &["configured"])?;
    let replicas = bench.run(&["get", "mdeploy", "applied", "-o", "jsonpath={.spec.replicas}"], "")?;
    ensure!(replicas == "1", "a removed field goes back to its default, not to {replicas}");
    let config = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: core}\ndata: {a: '1', b: '2'}\n";
    bench.run(&["apply", "-f", "-"], config)?;
    bench.run(&["apply", "-f", "-"], &config.replace(", b: '2'", ""))?;
    let data = bench.run(&["get", "cm", "core", "-o", "jsonpath={.data}"], "")?;
    ensure!(data == "{\"a\":\"1\"}", "a strategic merge must remove b: {data}");
    delete_all(bench, &["mdeploy/applied", "cm/core"])
}

fn apply_server_side(bench: &ConformanceBench) -> Result<()> {
    let one = format!("{}  replicas: 2\n", deployment("shared"));
    let as_manager =
        |manager: &'static str| ["apply", "--server-side", "-f", "-", "--field-manager", manager];
    bench.run(&as_manager("one"), &one)?;
    let version = || bench.run(&["get", "mdeploy", "shared", "-o", "jsonpath={.metadata.generation}"], "");
    let before = version()?;
    bench.run(&as_manager("one"), &one)?;
    ensure!(version()? == before, "a no-op apply moved the generation");
    bench.refused(
        &as_manager("two"),
        &one.replace("replicas: 2", "replicas: 4"),
        &["conflict", "\"one\"", ".spec.replicas"],
    )?;
    let mut forced = as_manager("two").to_vec();
    forced.push("--force-conflicts");
    bench.run(&forced, &one.replace("replicas: 2", "replicas: 4"))?;
    let managers = bench.run(
        &[
            "get",
            "mdeploy",
            "shared",
            "-o",
            "jsonpath={.metadata.managedFields[*].manager}",
            "--show-managed-fields",
        ],
        "",
    )?;
    has(&managers, &["one", "two"])?;
    delete_all(bench, &["mdeploy/shared"])
}

fn diff(bench: &ConformanceBench) -> Result<()> {
    let one = deployment("differs");
    bench.run(&["apply", "-f", "-"], &one)?;
    ensure!(bench.try_run(&["diff", "-f", "-"], &one)?.ok, "an equal object differs");
    let said = bench.try_run(&["diff", "-f", "-"], &format!("{one}  replicas: 9\n"))?;
    ensure!(!said.ok, "a changed object does not differ");
    has(&said.out, &["+  replicas: 9"])?;
    delete_all(bench, &["mdeploy/differs"])
}

fn get(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["apply", "-f", "-"], &deployment("listed"))?;
    let table = bench.run(&["get", "modeldeployments"], "")?;
    has(&table, &["NAME", "MODEL", "READY", "REASON", "AGE", "listed", "absent"])?;
    has(&bench.run(&["get", "russet"], "")?, &["modeldeployment.russet.dev/listed"])?;
    has(
        &bench.run(&["get", "mdeploy", "listed", "-o", "yaml"], "")?,
        &["kind: ModelDeployment", "replicas: 1"],
    )?;
    has(&bench.run(&["get", "mdeploy", "-A", "-o", "wide"], "")?, &["NAMESPACE", "MESSAGE"])?;
    bench.refused(&["get", "mdeploy", "nosuch"], "", &["NotFound", "nosuch"])?;
    delete_all(bench, &["mdeploy/listed"])
}

fn get_watch(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["apply", "-f", "-"], &deployment("watched"))?;
    let mut watch = bench.start_kubectl(&[
        "get",
        "mdeploy",
        "-w",
        "-o",
        "jsonpath={.metadata.name}={.spec.replicas}{'\\n'}",
    ])?;
    let mut lines = BufReader::new(watch.stdout.take().context("no output")?).lines();
    let mut until = |expected: &str| -> Result<()> {
        for line in lines.by_ref() {
            if line? == expected {
                return Ok(());
            }
        }
        anyhow::bail!("the watch ended before {expected}")
    };
    until("watched=1")?;
    bench.run(&["scale", "mdeploy", "watched", "--replicas=2"], "")?;
    until("watched=2")?;
    watch.kill()?;
    watch.wait()?;
    delete_all(bench, &["mdeploy/watched"])
}

fn describe(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["apply", "-f", "-"], &deployment("described"))?;
    bench.run(&["wait", "mdeploy/described", "--for=condition=Ready=False", "--timeout=60s"], "")?;
    let text = bench.run(&["describe", "mdeploy", "described"], "")?;
    has(&text, &["Name:", "described", "ModelNotFound", "absent", "Events:"])?;
    delete_all(bench, &["mdeploy/described"])
}

fn edit(bench: &ConformanceBench) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    bench.run(&["apply", "-f", "-"], &deployment("edited"))?;
    let editor = bench.folder().join("editor");
    std::fs::write(&editor, "#!/bin/sh\nsed -i 's/replicas: 1/replicas: 5/' \"$1\"\n")?;
    std::fs::set_permissions(&editor, std::fs::Permissions::from_mode(0o755))?;
    let mut child = bench.command(&["edit", "mdeploy", "edited"]);
    let output = child.env("KUBE_EDITOR", &editor).output()?;
    ensure!(output.status.success(), "edit failed: {}", String::from_utf8_lossy(&output.stderr));
    let replicas = bench.run(&["get", "mdeploy", "edited", "-o", "jsonpath={.spec.replicas}"], "")?;
    ensure!(replicas == "5", "the edit was lost: {replicas}");
    delete_all(bench, &["mdeploy/edited"])
}

fn patch(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["apply", "-f", "-"], &deployment("patched"))?;
    bench.run(&["patch", "mdeploy", "patched", "--type=merge", "-p", "{\"spec\":{\"replicas\":2}}"], "")?;
    bench.run(
        &[
            "patch",
            "mdeploy",
            "patched",
            "--type=json",
            "-p",
            "[{\"op\":\"replace\",\"path\":\"/spec/replicas\",\"value\":3}]",
        ],
        "",
    )?;
    bench.refused(&["patch", "mdeploy", "patched", "--type=strategic", "-p", "{}"], "", &["strategic"])?;
    bench.run(&["label", "mdeploy", "patched", "colour=red"], "")?;
    bench.run(&["annotate", "mdeploy", "patched", "note=x"], "")?;
    let text = bench.run(
        &[
            "get",
            "mdeploy",
            "patched",
            "-o",
            "jsonpath={.spec.replicas} {.metadata.labels.colour} {.metadata.annotations.note}",
        ],
        "",
    )?;
    ensure!(text == "3 red x", "{text}");
    bench.refused(
        &["patch", "mdeploy", "patched", "--type=merge", "-p", "{\"spec\":{\"replicas\":-1}}"],
        "",
        &["spec.replicas", "greater than or equal to 0"],
    )?;
    delete_all(bench, &["mdeploy/patched"])
}

fn scale(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["apply", "-f", "-"], &deployment("scaled"))?;
    bench.run(&["scale", "mdeploy/scaled", "--replicas=4"], "")?;
    let replicas = bench.run(&["get", "mdeploy", "scaled", "-o", "jsonpath={.spec.replicas}"], "")?;
    ensure!(replicas == "4", "{replicas}");
    let scale = bench.run(
        &["get", "--raw", "/apis/russet.dev/v1alpha1/namespaces/default/modeldeployments/scaled/scale"],
        "",
    )?;
    has(&scale, &["\"kind\":\"Scale\"", "\"replicas\":4"])?;
    delete_all(bench, &["mdeploy/scaled"])
}

fn delete(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["create", "configmap", "held", "--from-literal=a=b"], "")?;
    bench.run(
        &[
            "patch",
            "cm",
            "held",
            "--type=merge",
            "-p",
            "{\"metadata\":{\"finalizers\":[\"example.com/hold\"]}}",
        ],
        "",
    )?;
    let mut deletion = bench.start_kubectl(&["delete", "cm", "held"])?;
    let begin = std::time::Instant::now();
    while !bench.run(&["get", "cm", "held", "-o", "yaml"], "")?.contains("deletionTimestamp") {
        ensure!(begin.elapsed().as_secs() < 60, "the deletion did not begin");
    }
    ensure!(deletion.try_wait()?.is_none(), "delete ended although a finalizer holds the object");
    bench.run(&["patch", "cm", "held", "--type=merge", "-p", "{\"metadata\":{\"finalizers\":null}}"], "")?;
    let status = deletion.wait()?;
    ensure!(status.success(), "delete ended with {status}");
    bench.refused(&["get", "cm", "held"], "", &["NotFound"])
}

fn wait(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["apply", "-f", "-"], &deployment("awaited"))?;
    bench.run(&["wait", "mdeploy/awaited", "--for=condition=Ready=False", "--timeout=60s"], "")?;
    bench.refused(
        &["wait", "mdeploy/awaited", "--for=condition=Ready", "--timeout=1s"],
        "",
        &["timed out"],
    )?;
    let mut deletion = bench.start_kubectl(&["wait", "mdeploy/awaited", "--for=delete", "--timeout=60s"])?;
    bench.run(&["delete", "mdeploy", "awaited"], "")?;
    let status = deletion.wait()?;
    ensure!(status.success(), "wait --for=delete ended with {status}");
    Ok(())
}

fn explain(bench: &ConformanceBench) -> Result<()> {
    has(&bench.run(&["explain", "modeldeployment.spec.sharding.mode"], "")?, &["ENUM", "Pipeline"])?;
    has(&bench.run(&["explain", "mdeploy"], "")?, &["KIND:", "ModelDeployment", "spec", "status"])?;
    has(&bench.run(&["explain", "configmap.data"], "")?, &["map[string]string"])
}

fn typed_creates(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["create", "namespace", "typed"], "")?;
    bench.run(&["create", "secret", "generic", "s", "-n", "typed", "--from-literal=token=abc"], "")?;
    let token = bench.run(&["get", "secret", "s", "-n", "typed", "-o", "jsonpath={.data.token}"], "")?;
    ensure!(token == "YWJj", "{token}");
    bench.run(&["create", "serviceaccount", "robot", "-n", "typed"], "")?;
    has(&bench.run(&["create", "token", "robot", "-n", "typed"], "")?, &["."])?;
    bench
        .run(&["create", "role", "reader", "-n", "typed", "--verb=get,list", "--resource=configmaps"], "")?;
    bench.run(
        &["create", "rolebinding", "reader", "-n", "typed", "--role=reader", "--serviceaccount=typed:robot"],
        "",
    )?;
    let may = |verb: &str| {
        bench.try_run(
            &[
                "auth",
                "can-i",
                verb,
                "configmaps",
                "-n",
                "typed",
                "--as",
                "system:serviceaccount:typed:robot",
            ],
            "",
        )
    };
    ensure!(may("list")?.ok, "the role does not allow list");
    ensure!(!may("delete")?.ok, "the role allows delete");
    bench.run(&["delete", "namespace", "typed"], "").map(|_| ())
}

fn refusals(bench: &ConformanceBench) -> Result<()> {
    let one = deployment("wrong");
    bench.refused(
        &["apply", "-f", "-"],
        &format!("{one}  replica: 1\n"),
        &["unknown field", "spec.replica"],
    )?;
    bench.refused(
        &["apply", "-f", "-"],
        &format!("{one}  replicas: many\n"),
        &["spec.replicas", "integer"],
    )?;
    bench.refused(
        &["apply", "-f", "-"],
        &format!("{one}  sharding: {{mode: Diagonal}}\n"),
        &["spec.sharding.mode", "Diagonal", "Pipeline"],
    )?;
    bench.refused(
        &["apply", "-f", "-"],
        &one.replace("  modelRef: {name: absent}", "  replicas: 1"),
        &["spec.modelRef", "Required"],
    )?;
    bench.refused(
        &["apply", "-f", "-"],
        &format!("{one}  sharding: {{mode: Single, ranks: 2}}\n"),
        &["one rank"],
    )?;
    bench.refused(
        &["apply", "-f", "-"],
        &one.replace("ModelDeployment", "ModelDeploiment"),
        &["ModelDeploiment"],
    )?;
    bench.refused(&["apply", "-f", "-"], &one.replace("name: wrong", "name: Not_A_Name"), &["Not_A_Name"])
}

fn selectors(bench: &ConformanceBench) -> Result<()> {
    for name in ["red", "blue"] {
        bench.run(&["create", "configmap", name, "--from-literal=a=b"], "")?;
        bench.run(&["label", "cm", name, &format!("colour={name}")], "")?;
    }
    let names = |arguments: &[&str]| -> Result<String> {
        let mut all = vec!["get", "cm", "-o", "name"];
        all.extend(arguments);
        bench.run(&all, "")
    };
    ensure!(names(&["-l", "colour=red"])? == "configmap/red\n", "equality");
    ensure!(names(&["-l", "colour in (red,blue),colour!=red"])? == "configmap/blue\n", "sets");
    ensure!(names(&["--field-selector", "metadata.name=blue"])? == "configmap/blue\n", "fields");
    bench.refused(&["get", "cm", "--field-selector", "data.a=b"], "", &["field"])?;
    delete_all(bench, &["cm/red", "cm/blue"])
}

fn auth(bench: &ConformanceBench) -> Result<()> {
    has(&bench.run(&["auth", "whoami"], "")?, &["system:masters"])?;
    has(&bench.run(&["auth", "can-i", "create", "modeldeployments"], "")?, &["yes"])?;
    has(&bench.run(&["auth", "can-i", "--list"], "")?, &["*.*"])?;
    let node = ["--as", "russet:node:x", "--as-group", "russet:nodes"];
    let may = |verb: &str, what: &str| -> Result<bool> {
        let mut arguments = vec!["auth", "can-i", verb, what];
        arguments.extend(node);
        Ok(bench.try_run(&arguments, "")?.ok)
    };
    ensure!(may("list", "shards")?, "a node cannot list shards");
    ensure!(!may("delete", "modeldeployments")?, "a node may delete deployments");
    ensure!(!may("list", "secrets")?, "a node may list secrets");
    Ok(())
}

fn api_resources(bench: &ConformanceBench) -> Result<()> {
    let table = bench.run(&["api-resources"], "")?;
    has(&table, &["mdeploy", "russet.dev/v1alpha1", "InferenceNode", "configmaps", "leases"])?;
    let listed = bench.run(&["api-resources", "--categories=russet", "-o", "name"], "")?;
    let kinds: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    ensure!(kinds == generated_kinds()?, "the kinds of manifests/crds are wanted: {kinds:?}");
    has(&bench.run(&["version", "-o", "json"], "")?, &["serverVersion", "v1."])
}

/// The kinds that `cargo xtask codegen` wrote to `manifests/crds`, as kubectl names them.
fn generated_kinds() -> Result<BTreeSet<String>> {
    let mut kinds = BTreeSet::new();
    for file in std::fs::read_dir(repository().join("manifests/crds"))? {
        let path = file?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).context("file name")?;
        if stem != "kustomization" {
            kinds.insert(format!("{stem}.russet.dev"));
        }
    }
    Ok(kinds)
}

fn namespaces(bench: &ConformanceBench) -> Result<()> {
    bench.run(&["create", "ns", "passing"], "")?;
    bench.run(&["create", "cm", "inside", "-n", "passing", "--from-literal=a=b"], "")?;
    bench.run(&["delete", "ns", "passing"], "")?;
    bench.refused(&["get", "cm", "inside", "-n", "passing"], "", &["NotFound"])?;
    bench.refused(&["create", "cm", "late", "-n", "passing", "--from-literal=a=b"], "", &["passing"])
}

fn definitions(bench: &ConformanceBench) -> Result<()> {
    let crd = "\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: lamps.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: lamps, singular: lamp, kind: Lamp}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [watts]
            properties:
              watts: {type: integer, maximum: 100}
              colour: {type: string, default: white}
";
    bench.run(&["apply", "-f", "-"], crd)?;
    bench.run(&["wait", "crd/lamps.example.com", "--for=condition=Established", "--timeout=60s"], "")?;
    let lamp = "apiVersion: example.com/v1\nkind: Lamp\nmetadata: {name: desk}\nspec: {watts: 40}\n";
    bench.run(&["apply", "-f", "-"], lamp)?;
    let colour = bench.run(&["get", "lamp", "desk", "-o", "jsonpath={.spec.colour}"], "")?;
    ensure!(colour == "white", "the default is missing: {colour}");
    bench.refused(&["apply", "-f", "-"], &lamp.replace("40", "400"), &["spec.watts", "100"])?;
    bench.run(&["delete", "crd", "lamps.example.com"], "")?;
    let mut rest = String::new();
    let mut gone = bench.start_kubectl(&["get", "lamps"])?;
    gone.stderr.take().context("no stderr")?.read_to_string(&mut rest)?;
    ensure!(!gone.wait()?.success(), "lamps are still served");
    Ok(())
}
