//! What a request may go to: deployments of this cluster, and models of providers outside of it.

use std::fmt;

use russet_crds::{ModelProviderSpec, RouteTarget};

use super::Deployment;

/// A ModelProvider as the gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Where it is and how it is asked.
    pub spec: ModelProviderSpec,
}

impl Provider {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// What may answer a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target<'a> {
    /// A deployment.
    Deployment(&'a Deployment),
    /// A model of a provider.
    Provider(&'a Provider, &'a str),
}

impl<'a> Target<'a> {
    /// `namespace/name` of the deployment; of a provider with its kind and model.
    pub fn full_name(self) -> String {
        match self {
            Self::Deployment(deployment) => deployment.full_name(),
            Self::Provider(provider, model) => format!("{model} of ModelProvider {}", provider.full_name()),
        }
    }

    /// The deployment, if it is one.
    pub fn deployment(self) -> Option<&'a Deployment> {
        match self {
            Self::Deployment(deployment) => Some(deployment),
            Self::Provider(..) => None,
        }
    }
}

/// The deployments of several targets.
pub fn deployments<'a>(targets: &[Target<'a>]) -> Vec<&'a Deployment> {
    targets.iter().filter_map(|target| target.deployment()).collect()
}

/// A target as a ModelRoute names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetName {
    /// Name of a deployment.
    Deployment(String),
    /// A model of a provider.
    Provider {
        /// Name of the provider.
        provider: String,
        /// The model, as the provider names it.
        model: String,
    },
}

impl TargetName {
    /// That of a spec; none where a newer release has other targets.
    pub(super) fn of(target: &RouteTarget) -> Option<Self> {
        let provider = || {
            let (provider, model) = (target.provider_name()?.to_owned(), target.model.clone()?);
            Some(Self::Provider { provider, model })
        };
        target.deployment_name().map(|name| Self::Deployment(name.to_owned())).or_else(provider)
    }
}

impl fmt::Display for TargetName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deployment(name) => formatter.write_str(name),
            Self::Provider { provider, model } => write!(formatter, "{model} of ModelProvider {provider}"),
        }
    }
}
