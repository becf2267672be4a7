//! `russet catalog`: a built-in list of models, what they need and whether this release runs them; a search
//! of the Hugging Face hub; and a Model made from an entry. The list is `catalog/models.csv`
//! (docs/catalog.md).

pub mod entry;
mod hub;
pub mod text;

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use entry::CatalogEntry;
use kube::Api;
use kube::api::{Patch, PatchParams};
use russet_crds::{GROUP, Model, VERSION};
use russet_gateway::managed_models::{CatalogModel, FindCatalogModel};
use russet_telemetry::say;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::client::Connection;
use crate::stdout::{out, outln};

/// Field manager, the same as that of `russet apply`.
const MANAGER: &str = "russet";

/// Arguments of `russet catalog`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: CatalogAction,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Subcommand)]
enum CatalogAction {
    /// List the entries that contain every word; without words, list all entries.
    Search {
        /// Words of a name, a repository, a family or an architecture; `runs` leaves out models that this
        /// release cannot run.
        words: Vec<String>,
        /// Search the hub ($HF_ENDPOINT, else huggingface.co) instead of the list.
        #[arg(long)]
        hub: bool,
    },
    /// Show the details of an entry.
    Show {
        /// Name of the entry, or its repository.
        name: String,
    },
    /// Create a Model from an entry; an existing Model is not changed.
    Add {
        /// Name of the entry, or its repository.
        name: String,
        /// `yaml`: print the Model without contacting a server.
        #[arg(short, long, value_parser = ["yaml"])]
        output: Option<String>,
    },
}

/// Runs the subcommand.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { action, connection } = arguments;
    let entries = entry::all()?;
    match action {
        CatalogAction::Search { words, hub: true } => {
            out!("{}", hub::search(&words).await?)?;
        }
        CatalogAction::Search { words, hub: false } => {
            let found: Vec<&CatalogEntry> = entries.iter().filter(|entry| entry.matches(&words)).collect();
            if found.is_empty() {
                bail!(
                    "none of the {} entries has \"{words}\"; use fewer words, or ask the hub: russet catalog search --hub {words}",
                    entries.len(),
                    words = words.join(" ")
                );
            }
            out!("{}", text::table(&found))?;
        }
        CatalogAction::Show { name } => out!("{}", text::details(entry::require(&entries, &name)?))?,
        CatalogAction::Add { name, output } => {
            let entry = entry::require(&entries, &name)?;
            let model = model(&connection.namespace(), &entry.name, &entry.uri());
            if output.is_some() {
                out!("{}", serde_norway::to_string(&model)?)?;
                return Ok(());
            }
            add(&connection, &entry.name, &model).await?;
            outln!("model/{} applied", entry.name)?;
            if let Err(why) = entry.runs() {
                say!("This release does not run it: {why}.");
            }
        }
    }
    Ok(())
}

/// Finds entries that this release runs, for clients of the gateway.
pub fn pullable_models() -> Result<FindCatalogModel> {
    let entries = entry::all()?;
    Ok(Arc::new(move |name| {
        let entry = entry::require(&entries, name).map_err(|error| error.to_string())?;
        match entry.runs() {
            Ok(()) => Ok(CatalogModel { name: entry.name.clone(), repository: entry.repository.clone() }),
            Err(why) => Err(format!("{} cannot be run: {why}", entry.name)),
        }
    }))
}

/// A Model with a name and a source.
pub fn model(namespace: &str, name: &str, uri: &str) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "Model",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"source": {"uri": uri}},
    })
}

/// Adds a Model. An existing one of that name with another source is not changed.
pub async fn add(connection: &Connection, name: &str, model: &Value) -> Result<()> {
    let namespace = &connection.namespace();
    let models: Api<Model> = Api::namespaced(connection.client().await?, namespace);
    if let Some(old) =
        models.get_opt(name).await.with_context(|| format!("cannot read Model {namespace}/{name}"))?
        && model["spec"]["source"]["uri"] != old.spec.source.uri.as_str()
    {
        bail!(
            "there is a Model {namespace}/{name} already, and it comes from {}, not from {}; a source never changes: \
             choose another namespace with -n, or remove that Model with `russet delete model/{name} -n {namespace}`",
            old.spec.source.uri,
            model["spec"]["source"]["uri"].as_str().unwrap_or_default()
        );
    }
    server_side_apply(&models, name, model)
        .await
        .with_context(|| format!("Model {namespace}/{name} was not taken"))
}

/// Server-side apply without force: fields of other managers are not taken over.
pub async fn server_side_apply<K>(api: &Api<K>, name: &str, object: &Value) -> Result<()>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
    let params = params.validation_strict();
    match api.patch(name, &params, &Patch::Apply(object)).await {
        Ok(_) => Ok(()),
        // The server's message is enough; the client's error repeats it twice.
        Err(kube::Error::Api(status)) => Err(anyhow!(status.message)),
        Err(error) => Err(error.into()),
    }
}
