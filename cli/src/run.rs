//! `russet run`: adds a Model if there is none, deploys it if no deployment serves it, waits until it is
//! ready and chats with it through the gateway. The objects it created stay.

pub mod chat;
mod status;
mod target;
mod wait;

use std::io::IsTerminal as _;

use anyhow::{Context, Result, bail};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{GROUP, Model, ModelDeployment, VERSION};
use russet_rpc::list_item::ListItem;
use russet_telemetry::say;
use serde_json::json;
use target::KnownModel;

use crate::catalog::{self, entry};
use crate::client::Connection;
use crate::data_dir::DataDir;

/// Arguments of `russet run`.
#[derive(clap::Args)]
pub struct Arguments {
    /// A Model of the namespace, a name of the catalogue (russet catalog search), or a source: hf://OWNER/NAME,
    /// https://…, s3://…, gs://…, az://…, oci://REGISTRY/NAME:TAG, file:///…, builtin://smoke.
    model: String,
    /// Send this one prompt and exit; without it, every line of standard input is a prompt.
    #[arg(long)]
    prompt: Option<String>,
    /// URL of the gateway; default that of the `russet up` that wrote the kubeconfig, else
    /// http://127.0.0.1:52415.
    #[arg(long, env = "RUSSET_GATEWAY")]
    gateway: Option<String>,
    /// API key for the gateway (russet key create).
    #[arg(long, env = "RUSSET_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Maximum output tokens of one answer; default as many as the context holds.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Sampling temperature, from 0 (greedy) to 2; default the gateway's.
    #[arg(long)]
    temperature: Option<f32>,
    /// Seconds to wait until the model is ready; large models take long to download.
    #[arg(long, default_value_t = 7200)]
    timeout_seconds: u64,
    #[command(flatten)]
    connection: Connection,
}

/// Adds the Model, deploys it, waits and chats.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { model, prompt, gateway, key, max_tokens, temperature, timeout_seconds, connection } =
        arguments;
    let namespace = connection.namespace();
    let client = connection.client().await?;
    let name = ensure_model(&client, &connection, &model).await?;
    let deployment = ensure_deployment(&client, &connection, &name).await?;
    wait::until_ready(&client, &namespace, &name, &deployment, timeout_seconds).await?;

    say!("ModelDeployment {namespace}/{deployment} is ready and keeps running. To delete it:");
    say!("  russet delete modeldeployment/{deployment} -n {namespace}");
    let gateway = match gateway {
        Some(gateway) => gateway,
        None => nearest_gateway(&connection)?,
    };
    let asked = chat::ChatParameters { model: format!("{namespace}/{deployment}"), max_tokens, temperature };
    let chat = chat::Chat::new(&gateway, key, asked)?;
    match prompt {
        Some(prompt) => chat.ask_once(prompt).await,
        None => {
            if std::io::stdin().is_terminal() {
                say!("Type a question; Ctrl-D ends.");
            }
            chat.ask_lines().await
        }
    }
}

/// The requested Model; created if there is none.
async fn ensure_model(client: &Client, connection: &Connection, word: &str) -> Result<String> {
    let namespace = &connection.namespace();
    let models: Vec<Model> = list(client, namespace).await.context("the Models could not be listed")?;
    let known = models.iter().map(|model| KnownModel {
        name: model.name_any(),
        uri: model.spec.source.uri.clone(),
        deleting: model.metadata.deletion_timestamp.is_some(),
    });
    let known: Vec<KnownModel> = known.collect();
    let target = target::resolve(word, &known, &entry::all()?)?;
    if target.add {
        let model = catalog::model(namespace, &target.name, &target.uri);
        catalog::add(connection, &target.name, &model).await?;
        // Standard output is for answers.
        say!("model/{} applied", target.name);
    }
    Ok(target.name)
}

/// The deployment that serves a Model; created if there is none.
async fn ensure_deployment(client: &Client, connection: &Connection, model: &str) -> Result<String> {
    let namespace = &connection.namespace();
    let all: Vec<ModelDeployment> =
        list(client, namespace).await.context("the ModelDeployments could not be listed")?;
    if let Some(name) = target::serving(&all, model) {
        return Ok(name);
    }
    if let Some(other) = all.iter().find(|deployment| deployment.name_any() == model) {
        if other.spec.model_ref.name == model {
            bail!("ModelDeployment {namespace}/{model} is being deleted; run this again once it is gone");
        }
        bail!(
            "ModelDeployment {namespace}/{model} serves Model {}, so no deployment of Model {model} can have its name; \
             apply one of another name, and run this again",
            other.spec.model_ref.name
        );
    }
    let deployment = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "ModelDeployment",
        "metadata": {"name": model, "namespace": namespace},
        "spec": {"modelRef": {"name": model}},
    });
    let deployments: Api<ModelDeployment> = Api::namespaced(client.clone(), namespace);
    catalog::server_side_apply(&deployments, model, &deployment)
        .await
        .with_context(|| format!("ModelDeployment {namespace}/{model} could not be applied"))?;
    say!("modeldeployment/{model} applied");
    Ok(model.to_owned())
}

/// The objects of a kind in a namespace, without those that this version cannot parse.
async fn list<K>(client: &Client, namespace: &str) -> Result<Vec<K>>
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned + 'static,
{
    let api: Api<ListItem<K>> = Api::namespaced(client.clone(), namespace);
    let all = api.list(&ListParams::default()).await?;
    Ok(all.items.into_iter().filter_map(|one| one.0.ok()).collect())
}

/// URL of the gateway of the `russet up` that wrote the kubeconfig.
pub fn nearest_gateway(connection: &Connection) -> Result<String> {
    Ok(DataDir::resolve(Some(connection.folder()?))?.nearest_gateway())
}
