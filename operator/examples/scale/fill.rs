//! Load of the benchmark: machines, models of four sizes, deployments, and copies on other machines.

use std::time::{Duration, Instant};

use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Resource};
use russet_crds::conditions::{Type, is_true};
use russet_crds::{
    CopyMode, InferenceNode, LocalReference, Model, ModelCopy, ModelCopySpec, ModelDeployment,
    ModelDeploymentSpec, ModelSource, ModelSpec, NamespacedReference, Sharding, names,
};

use crate::Error;
use crate::stub_agents::StubAgents;

/// Models that deployments use in turn.
const MODELS: usize = 4;
/// Copies per node.
const COPIES: usize = 10;
/// Timeout until everything is ready.
const READY_TIMEOUT: Duration = Duration::from_secs(1800);

/// Machines with their Leases and measurements.
pub async fn machines(client: &Client, played: &StubAgents, nodes: usize) -> Result<(), Error> {
    let api: Api<InferenceNode> = Api::all(client.clone());
    for index in 0..nodes {
        let name = format!("node-{index:05}");
        create(&api, played, InferenceNode::new(&name, Default::default())).await?;
        played.join(&name).await?;
    }
    Ok(())
}

/// Models and deployments of them.
pub async fn deployments(client: &Client, played: &StubAgents, count: usize) -> Result<(), Error> {
    let models: Api<Model> = Api::default_namespaced(client.clone());
    for index in 0..MODELS + COPIES {
        create(
            &models,
            played,
            Model::new(&format!("m{index}"), ModelSpec { source: source(index), preload: None }),
        )
        .await?;
    }
    let api: Api<ModelDeployment> = Api::default_namespaced(client.clone());
    for index in 0..count {
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(format!("m{}", index % MODELS)),
            sharding: Some(Sharding::default()),
            replicas: 1,
            ..ModelDeploymentSpec::default()
        };
        create(&api, played, ModelDeployment::new(&format!("d{index:05}"), spec)).await?;
    }
    Ok(())
}

/// Waits until this many deployments are ready.
pub async fn ready(client: &Client, count: usize) -> Result<(), Error> {
    let api: Api<ModelDeployment> = Api::default_namespaced(client.clone());
    let started = Instant::now();
    loop {
        let list = api.list(&ListParams::default()).await?;
        let of = |one: &&ModelDeployment| {
            one.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
        };
        let ready = list.items.iter().filter(of).count();
        if ready >= count {
            return Ok(());
        }
        if started.elapsed() > READY_TIMEOUT {
            return Err(format!("only {ready} of {count} deployments became ready").into());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Copies of models without deployments, until every node has its number of them.
pub async fn copies(client: &Client, played: &StubAgents, nodes: usize) -> Result<(), Error> {
    let api: Api<ModelCopy> = Api::all(client.clone());
    for index in 0..nodes {
        for model in MODELS..MODELS + COPIES {
            let (name, node) = (format!("m{model}"), format!("node-{index:05}"));
            let spec = ModelCopySpec {
                model_ref: NamespacedReference { namespace: "default".to_owned(), name: name.clone() },
                source: source(model),
                commit: None,
                node_name: node.clone(),
                want: CopyMode::Files,
                retention: None,
                supply: None,
            };
            let copy = ModelCopy::new(&names::model_copy("default", &name, &node), spec);
            match api.create(&PostParams::default(), &copy).await {
                // The operator had its headers read there.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                other => drop(other?),
            }
            played.wrote();
        }
    }
    Ok(())
}

fn source(index: usize) -> ModelSource {
    ModelSource { uri: format!("file:///played/{index}"), ..ModelSource::default() }
}

async fn create<K>(api: &Api<K>, played: &StubAgents, object: K) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    api.create(&PostParams::default(), &object).await?;
    played.wrote();
    Ok(())
}
