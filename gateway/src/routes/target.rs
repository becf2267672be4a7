//! What a request may go to: deployments of this cluster, models of providers outside of it, and Pipelines.

use std::fmt;

use russet_crds::{
    ModelPrice, ModelProviderSpec, ModelProviderStatus, Money, ProviderModel, ProviderPause, RouteTarget,
    Zone,
};

use jiff::Timestamp;

use super::{Deployment, matches_pattern};

/// A ModelProvider as the gateway sees it.
#[derive(Clone, Debug, Default)]
pub struct Provider {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Where it is and how it is asked.
    pub spec: ModelProviderSpec,
    /// Generation of the object.
    pub generation: Option<i64>,
    /// The object's status.
    pub status: ModelProviderStatus,
}

/// What it says of itself makes it no other one: a status that is written is no news for requests.
impl PartialEq for Provider {
    fn eq(&self, other: &Self) -> bool {
        let Self { namespace, name, spec, generation, status: _ } = self;
        (namespace, name, spec, generation) == (&other.namespace, &other.name, &other.spec, &other.generation)
    }
}

impl Provider {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Its kind and full name.
    pub(crate) fn subject(&self) -> String {
        format!("ModelProvider {}", self.full_name())
    }

    /// What is known of one of its models.
    pub fn known(&self, model: &str) -> Option<&ProviderModel> {
        self.spec.models.iter().find(|known| matches_pattern(&known.name, model))
    }

    /// What answers of one of its models cost; `None` where nobody knows.
    pub fn price(&self, model: &str) -> Option<ModelPrice> {
        let known = self.known(model);
        // Servers of one's own cost nothing unless somebody says so.
        let own = (self.spec.zone < Zone::Cloud).then_some(Default::default());
        let tokens = known.and_then(|known| known.price_per_million_tokens).or(own)?;
        let request = known.and_then(|known| known.price_per_request).unwrap_or_default();
        Some(ModelPrice { tokens, request })
    }

    /// The pause in its status that ends last, of those that a model has at this time.
    pub fn pause(&self, model: &str, at: Timestamp) -> Option<&ProviderPause> {
        // One that was edited is asked anew.
        let is_of_this = self.status.observed_generation == self.generation;
        let holds = |pause: &&ProviderPause| pause.is_about(model) && pause.until.0 > at;
        let pauses = self.status.pauses.iter().filter(|_| is_of_this);
        pauses.filter(holds).max_by_key(|pause| pause.until.0)
    }
}

/// What may answer a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target<'a> {
    /// A deployment.
    Deployment(&'a Deployment),
    /// A model of a provider.
    Provider(&'a Provider, &'a str),
    /// A run of a Pipeline.
    Pipeline(PipelineTarget<'a>),
}

/// A Pipeline as a target. Whether there is one, and what it is, only the gateway knows that runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineTarget<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// The parameter that gets the text of the last message.
    pub parameter: &'a str,
}

impl PipelineTarget<'_> {
    /// Its kind and full name.
    pub(crate) fn subject(&self) -> String {
        format!("Pipeline {}/{}", self.namespace, self.name)
    }
}

impl<'a> Target<'a> {
    /// `namespace/name` of the deployment; of a provider with its kind and model.
    pub fn full_name(self) -> String {
        match self {
            Self::Deployment(deployment) => deployment.full_name(),
            Self::Provider(provider, model) => format!("{model} of ModelProvider {}", provider.full_name()),
            Self::Pipeline(pipeline) => pipeline.subject(),
        }
    }

    /// Its namespace.
    pub fn namespace(self) -> &'a str {
        match self {
            Self::Deployment(deployment) => &deployment.namespace,
            Self::Provider(provider, _) => &provider.namespace,
            Self::Pipeline(pipeline) => pipeline.namespace,
        }
    }

    /// What a request costs there with so many tokens in its prompt and its answer: nothing at home, and the most where nobody
    /// knows it, as of Pipelines.
    pub(super) fn cost(self, prompt: u64, answer: u64) -> Money {
        match self {
            Self::Deployment(_) => Money::ZERO,
            Self::Pipeline(_) => Money { nanos: u64::MAX },
            Self::Provider(provider, model) => {
                provider.price(model).map_or(Money { nanos: u64::MAX }, |price| price.of(prompt, 0, answer))
            }
        }
    }

    /// The deployment, if it is one.
    pub fn deployment(self) -> Option<&'a Deployment> {
        match self {
            Self::Deployment(deployment) => Some(deployment),
            Self::Provider(..) | Self::Pipeline(_) => None,
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
    /// A Pipeline.
    Pipeline {
        /// Its name.
        pipeline: String,
        /// The parameter that gets the text of the last message.
        parameter: String,
    },
}

impl TargetName {
    /// That of a spec; none where a newer release has other targets.
    pub(super) fn of(target: &RouteTarget) -> Option<Self> {
        let provider = || {
            let (provider, model) = (target.provider_name()?.to_owned(), target.model.clone()?);
            Some(Self::Provider { provider, model })
        };
        let pipeline = || {
            let (pipeline, parameter) =
                (target.pipeline_name()?.to_owned(), target.parameter_name().to_owned());
            Some(Self::Pipeline { pipeline, parameter })
        };
        let deployment = target.deployment_name().map(|name| Self::Deployment(name.to_owned()));
        deployment.or_else(provider).or_else(pipeline)
    }
}

impl fmt::Display for TargetName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deployment(name) => formatter.write_str(name),
            Self::Provider { provider, model } => write!(formatter, "{model} of ModelProvider {provider}"),
            Self::Pipeline { pipeline, .. } => write!(formatter, "Pipeline {pipeline}"),
        }
    }
}
