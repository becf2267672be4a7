//! What model lists say about one model name, in any dialect.

use jiff::Timestamp;
use russet_crds::GenerationConfig;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::routes::{Deployment, DeploymentState, ModelHeaders, RoutingTable};

/// A model name and the deployments that serve it.
#[derive(Clone, Debug)]
pub(crate) struct ModelSummary {
    /// The name that clients send.
    pub(crate) id: String,
    /// When its first deployment was created, in seconds since 1970.
    pub(crate) created: i64,
    /// The context length that every deployment has: a conversation of that length fits on any of them.
    pub(crate) context_tokens: u32,
    /// Whether a deployment serves requests now.
    pub(crate) ready: bool,
    /// What it waits for; empty once it is ready.
    pub(crate) message: String,
    /// `namespace/name` of its deployments, tried in order.
    pub(crate) deployments: Vec<String>,
    /// When it scales to zero without further requests, as far as this gateway knows; `None` where it stays.
    pub(crate) expires: Option<Timestamp>,
    /// What its first deployment runs.
    pub(crate) files: ServedFiles,
}

/// The files of a model, and what they take.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServedFiles {
    /// SHA-256 in hexadecimal of the files of all deployments and of the adapter; of the name and its deployments where
    /// those are unknown. Names with one digest answer with the same files.
    pub(crate) digest: String,
    /// `gguf`, `safetensors`, or empty while unknown.
    pub(crate) format: &'static str,
    /// How the weights are stored, or packed while they are loaded; empty while unknown.
    pub(crate) quantization: String,
    /// What their headers say; `None` until they are read.
    pub(crate) headers: Option<ModelHeaders>,
    /// Bytes that the ready groups of all deployments have reserved.
    pub(crate) memory_bytes: u64,
    /// Sampling parameters of requests that name none.
    pub(crate) sampling: GenerationConfig,
}

/// The context length that lists name for a model that providers alone answer: theirs is unknown, and clients take 0 for a
/// model that fits nothing.
const PROVIDER_CONTEXT_TOKENS: u32 = 131_072;

impl ModelSummary {
    /// The summary of the deployments that `id` resolves to, and of the adapter where it names one. Without any, providers
    /// answer.
    pub(super) fn new(table: &RoutingTable, id: &str, deployments: &[&Deployment], adapter: &str) -> Self {
        let ready = deployments.iter().any(|deployment| deployment.endpoints_with(adapter).next().is_some())
            || deployments.is_empty();
        let message = match deployments.first().map(|deployment| &deployment.state) {
            Some(DeploymentState::Working(message) | DeploymentState::Halted(message)) if !ready => {
                message.clone()
            }
            _ => String::new(),
        };
        Self {
            id: id.to_owned(),
            created: deployments.first().map_or(0, |deployment| deployment.created),
            context_tokens: deployments
                .iter()
                .map(|one| one.context_tokens)
                .min()
                .unwrap_or(PROVIDER_CONTEXT_TOKENS),
            ready,
            message,
            deployments: deployments.iter().map(|deployment| deployment.full_name()).collect(),
            expires: None,
            files: ServedFiles::new(table, id, deployments, adapter),
        }
    }
}

impl ServedFiles {
    fn new(table: &RoutingTable, id: &str, deployments: &[&Deployment], adapter: &str) -> Self {
        let model = |deployment: &Deployment, name: &String| {
            table.models.get(&(deployment.namespace.clone(), name.clone()))
        };
        let first = deployments.first().and_then(|one| Some((one, model(one, &one.model)?)));
        let all = deployments.iter().flat_map(|one| {
            let names = std::iter::once(&one.model).chain(one.adapters.get(adapter));
            names.map(|name| model(one, name).map(|details| details.digest.as_str()))
        });
        let digest = match all.collect::<Option<Vec<&str>>>() {
            Some(mut digests) => {
                digests.dedup();
                match digests.as_slice() {
                    [only] => (*only).to_owned(),
                    several => hex::encode(Sha256::digest(json!(several).to_string())),
                }
            }
            None => {
                let deployments: Vec<String> = deployments.iter().map(|one| one.full_name()).collect();
                hex::encode(Sha256::digest(json!([id, deployments]).to_string()))
            }
        };
        let quantization =
            first.map_or_else(String::new, |(deployment, details)| match deployment.load_quantization {
                "" => details.quantization.clone(),
                packed => packed.to_owned(),
            });
        Self {
            digest,
            format: first.map_or("", |(_, details)| details.format),
            quantization,
            headers: first.and_then(|(_, details)| details.headers.clone()),
            memory_bytes: deployments.iter().fold(0, |sum, one| sum.saturating_add(one.memory_bytes)),
            sampling: deployments.first().map(|one| one.defaults.sampling).unwrap_or_default(),
        }
    }
}
