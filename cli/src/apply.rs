//! `russet apply`: server-side apply of YAML files, as `kubectl apply --server-side` does it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize as _;
use serde_json::Value;

use crate::client::Connection;
use crate::resources;

/// Arguments of `russet apply`.
#[derive(clap::Args)]
pub struct Arguments {
    /// YAML file or folder of YAML files; may be given several times.
    #[arg(short, long = "filename", required = true)]
    filename: Vec<PathBuf>,
    /// Take over fields that somebody else manages.
    #[arg(long)]
    force_conflicts: bool,
    /// Check on the server without storing anything.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Applies every object; all are tried, the first failure is the exit.
pub async fn run(arguments: Arguments) -> Result<()> {
    let mut objects = Vec::new();
    for path in &arguments.filename {
        for file in files(path)? {
            objects.extend(read(&file)?);
        }
    }
    if objects.is_empty() {
        bail!("no objects in {:?}", arguments.filename);
    }
    let client = arguments.connection.client().await?;
    let mut all = resources::discover(&client).await?;
    let mut failed = 0;
    for (file, object) in &objects {
        let (api_version, kind) = (text(object, "apiVersion")?, text(object, "kind")?);
        let name = object["metadata"]["name"]
            .as_str()
            .with_context(|| format!("{}: {kind} without metadata.name", file.display()))?;
        if resources::of_kind(&all, api_version, kind).is_err() {
            // A CRD of this very call may have brought the kind.
            all = resources::discover(&client).await?;
        }
        let resource =
            resources::of_kind(&all, api_version, kind).with_context(|| format!("{}", file.display()))?;
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or(&arguments.connection.namespace);
        let mut path = format!(
            "{}?fieldManager=russet&fieldValidation=Strict&force={}",
            resource.object(namespace, name),
            arguments.force_conflicts
        );
        if arguments.dry_run {
            path.push_str("&dryRun=All");
        }
        let request = http::Request::patch(path)
            .header("content-type", "application/apply-patch+yaml")
            .header("accept", "application/json")
            .body(serde_json::to_vec(object)?)?;
        match client.request::<Value>(request).await {
            Ok(_) => println!("{}/{name} applied", kind.to_lowercase()),
            Err(error) => {
                failed += 1;
                eprintln!("error: {}: {kind} {name}: {error}", file.display());
            }
        }
    }
    if failed > 0 {
        bail!("{failed} of {} objects were not applied", objects.len());
    }
    Ok(())
}

fn text<'a>(object: &'a Value, field: &str) -> Result<&'a str> {
    object[field].as_str().with_context(|| format!("an object without {field}"))
}

/// The YAML files of a path; `kustomization.yaml` is kustomize's business and left out.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("{}", path.display()))? {
        let file = entry?.path();
        let is_yaml = file
            .extension()
            .is_some_and(|extension| extension == "yaml" || extension == "yml" || extension == "json");
        if is_yaml && file.file_stem().is_some_and(|stem| stem != "kustomization") {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}

fn read(file: &Path) -> Result<Vec<(PathBuf, Value)>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut objects = Vec::new();
    for document in serde_norway::Deserializer::from_str(&text) {
        let value =
            Value::deserialize(document).with_context(|| format!("{} is not valid YAML", file.display()))?;
        match value {
            Value::Null => {}
            Value::Object(ref map) if map.get("kind").is_some_and(|kind| kind == "List") => {
                for item in value["items"].as_array().into_iter().flatten() {
                    objects.push((file.to_owned(), item.clone()));
                }
            }
            value => objects.push((file.to_owned(), value)),
        }
    }
    Ok(objects)
}
