//! What model lists say about one model name, in any dialect.

use crate::routes::{Deployment, DeploymentState};

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
}

impl ModelSummary {
    /// The summary of the deployments that `id` resolves to, and of the adapter where it names one.
    pub(super) fn new(id: &str, deployments: &[&Deployment], adapter: &str) -> Self {
        let ready = deployments.iter().any(|deployment| deployment.endpoints_with(adapter).next().is_some());
        let message = match deployments.first().map(|deployment| &deployment.state) {
            Some(DeploymentState::Working(message) | DeploymentState::Halted(message)) if !ready => {
                message.clone()
            }
            _ => String::new(),
        };
        Self {
            id: id.to_owned(),
            created: deployments.first().map_or(0, |deployment| deployment.created),
            context_tokens: deployments.iter().map(|one| one.context_tokens).min().unwrap_or(0),
            ready,
            message,
            deployments: deployments.iter().map(|deployment| deployment.full_name()).collect(),
        }
    }
}
