//! `russet pipeline run`: uploads the files of a run and creates it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{
    LocalReference, ParameterType, ParameterValue, Pipeline, PipelineRun, PipelineRunSpec, PipelineSpec,
};

use super::gateway_client::GatewayOptions;
use crate::client::Connection;
use crate::stdout::outln;

/// Arguments of `russet pipeline run`.
#[derive(clap::Args)]
pub struct RunOptions {
    /// Name of the Pipeline.
    pipeline: String,
    /// Name of the run; default one that begins with the Pipeline's.
    #[arg(long)]
    name: Option<String>,
    /// The value of a parameter. For a file that the gateway has already, its id.
    #[arg(long, value_name = "NAME=VALUE", value_parser = assignment)]
    set: Vec<(String, String)>,
    /// A file for a parameter, which is uploaded to the gateway.
    #[arg(long, value_name = "NAME=PATH", value_parser = assignment)]
    file: Vec<(String, String)>,
    /// AccessKey of the namespace as whose holder the run asks models. Its key is the one to upload files with.
    #[arg(long, value_name = "ACCESSKEY")]
    key: Option<String>,
    /// Print each step that changes its state until the run has ended, then what they made; exit with 1 if it failed.
    #[arg(long, short)]
    pub follow: bool,
    #[command(flatten)]
    pub gateway: GatewayOptions,
}

/// The parts of `name=value`.
fn assignment(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| "write name=value".to_owned())?;
    let is_name = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.len() <= 63
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
    match is_name {
        true => Ok((name.to_owned(), value.to_owned())),
        false => Err(format!(
            "{name:?} is no name of a parameter: it begins with a lower-case letter, and has lower-case letters, \
             digits and _"
        )),
    }
}

/// Creates a run and prints its name, which it returns.
pub async fn create(client: &Client, connection: &Connection, options: RunOptions) -> Result<String> {
    let RunOptions { pipeline, name, set, file, key, follow: _, gateway } = options;
    let namespace = connection.namespace();
    let pipelines: Api<Pipeline> = Api::namespaced(client.clone(), &namespace);
    let found = pipelines.get_opt(&pipeline).await;
    let found = found.with_context(|| format!("Pipeline {namespace}/{pipeline} cannot be read"))?;
    let found = found.with_context(|| {
        format!(
            "there is no Pipeline {namespace}/{pipeline}; `russet get pipelines -n {namespace}` lists all"
        )
    })?;
    // The gateway looks at the parameters too; here nothing is uploaded yet.
    check(&pipeline, &found.spec, &set, &file)?;

    let mut parameters: Vec<ParameterValue> =
        set.into_iter().map(|(name, value)| ParameterValue { name, value, sha256: None }).collect();
    if !file.is_empty() {
        let gateway = gateway.client(connection)?;
        for (name, path) in file {
            let uploaded = gateway.upload(&PathBuf::from(path)).await?;
            parameters.push(ParameterValue { name, value: uploaded.id, sha256: Some(uploaded.sha256) });
        }
    }
    let run = pipeline_run(&pipeline, name.as_deref(), key, parameters);
    let runs: Api<PipelineRun> = Api::namespaced(client.clone(), &namespace);
    match (runs.create(&PostParams::default(), &run).await, name) {
        (Ok(created), _) => {
            let name = created.name_any();
            outln!("pipelinerun.russet.dev/{name} created")?;
            Ok(name)
        }
        (Err(kube::Error::Api(error)), Some(name)) if error.code == 409 => bail!(
            "PipelineRun {namespace}/{name} exists already; choose another name, or remove it with `russet delete \
             pipelinerun/{name} -n {namespace}`"
        ),
        (Err(error), _) => Err(error)
            .with_context(|| format!("a run of Pipeline {namespace}/{pipeline} could not be created")),
    }
}

fn pipeline_run(
    pipeline: &str,
    name: Option<&str>,
    key: Option<String>,
    parameters: Vec<ParameterValue>,
) -> PipelineRun {
    let spec = PipelineRunSpec {
        pipeline_ref: LocalReference { name: pipeline.to_owned() },
        key_ref: key.map(|name| LocalReference { name }),
        parameters,
        attempt: 1,
        ..PipelineRunSpec::default()
    };
    let mut run = PipelineRun::new(name.unwrap_or_default(), spec);
    if name.is_none() {
        run.metadata.name = None;
        run.metadata.generate_name = Some(format!("{pipeline}-"));
    }
    run
}

/// Whether a Pipeline can be given these values and files.
fn check(
    pipeline: &str,
    spec: &PipelineSpec,
    set: &[(String, String)],
    files: &[(String, String)],
) -> Result<()> {
    let mut given = BTreeSet::new();
    for (name, _) in set.iter().chain(files) {
        ensure!(given.insert(name.as_str()), "parameter {name} is given twice; give it once");
        ensure!(
            spec.parameters.iter().any(|parameter| parameter.name == *name),
            "Pipeline {pipeline} has no parameter {name}; {}",
            parameters_of(spec)
        );
    }
    for parameter in &spec.parameters {
        let name = &parameter.name;
        if parameter.kind == ParameterType::Text && files.iter().any(|(file, _)| file == name) {
            bail!("parameter {name} of Pipeline {pipeline} is a text; give it with --set {name}=VALUE");
        }
        if parameter.default.is_none() && !given.contains(name.as_str()) {
            let option = match parameter.kind {
                ParameterType::File => format!("--file {name}=PATH"),
                ParameterType::Text | ParameterType::Unknown => format!("--set {name}=VALUE"),
            };
            bail!("Pipeline {pipeline} needs parameter {name}; give it with {option}");
        }
    }
    Ok(())
}

fn parameters_of(spec: &PipelineSpec) -> String {
    let names: Vec<&str> = spec.parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    match names.is_empty() {
        true => "it has none".to_owned(),
        false => format!("it has {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::PipelineParameter;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_assignment_is_a_name_and_any_value() {
        let pair = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        for (text, expected) in [
            ("topic=news", pair("topic", "news")),
            ("q_2=a=b c", pair("q_2", "a=b c")),
            ("empty=", pair("empty", "")),
        ] {
            assert_eq!(assignment(text), expected, "{text}");
        }
        let long = format!("{}=x", "a".repeat(64));
        for text in ["topic", "=x", "Topic=x", "2=x", "a-b=x", "ä=x", &long] {
            assert!(assignment(text).is_err(), "{text}");
        }
    }

    #[test]
    fn parameters_are_those_of_the_pipeline() {
        let parameter = |name: &str, kind, default: Option<&str>| PipelineParameter {
            name: name.to_owned(),
            kind,
            default: default.map(str::to_owned),
        };
        let spec = PipelineSpec {
            parameters: vec![
                parameter("topic", ParameterType::Text, None),
                parameter("tone", ParameterType::Text, Some("dry")),
                parameter("notes", ParameterType::File, None),
            ],
            ..PipelineSpec::default()
        };
        let pairs = |names: &[&str]| -> Vec<(String, String)> {
            names.iter().map(|name| ((*name).to_owned(), "v".to_owned())).collect()
        };
        for (set, files, expected) in [
            (&["topic"][..], &["notes"][..], None),
            // The id of a file.
            (&["topic", "notes"], &[], None),
            (&["topic"], &[], Some("needs parameter notes; give it with --file notes=PATH")),
            (&[], &["notes"], Some("needs parameter topic; give it with --set topic=VALUE")),
            (&[], &["topic", "notes"], Some("topic of Pipeline digest is a text; give it with --set topic=")),
            (&["topic", "notes"], &["notes"], Some("notes is given twice")),
            (&["topic", "size"], &["notes"], Some("no parameter size; it has topic, tone, notes")),
        ] {
            let error =
                check("digest", &spec, &pairs(set), &pairs(files)).err().map(|error| error.to_string());
            match (error, expected) {
                (None, None) => {}
                (Some(error), Some(part)) => assert!(error.contains(part), "{error}"),
                (found, _) => panic!("{set:?} {files:?}: {found:?}"),
            }
        }
    }

    #[test]
    fn a_run_has_its_name_or_one_that_begins_with_the_pipelines() {
        let run = pipeline_run("digest", None, None, Vec::new());
        let run = serde_json::to_value(&run).unwrap();
        assert_eq!(run["metadata"], json!({"generateName": "digest-"}));
        assert_eq!(run["spec"], json!({"pipelineRef": {"name": "digest"}, "attempt": 1}));
        let notes = ParameterValue {
            name: "notes".to_owned(),
            value: "file-1".to_owned(),
            sha256: Some("ab".to_owned()),
        };
        let run = pipeline_run("digest", Some("monday"), Some("ann".to_owned()), vec![notes]);
        let run = serde_json::to_value(&run).unwrap();
        assert_eq!(run["metadata"], json!({"name": "monday"}));
        assert_eq!(run["spec"]["keyRef"], json!({"name": "ann"}));
        assert_eq!(run["spec"]["parameters"], json!([{"name": "notes", "value": "file-1", "sha256": "ab"}]));
    }
}
