//! The objects of one namespace that a gateway may change for a client, and those that it makes. No IO.

use std::collections::BTreeMap;

use kube::ResourceExt as _;
use kube::core::ObjectMeta;
use russet_crds::{
    Autoscaling, LocalReference, Model, ModelDeployment, ModelDeploymentSpec, ModelRoute, ModelRouteSpec,
    ModelSource, ModelSpec, Preload, PreloadPolicy, RouteTarget, names,
};
use sha2::{Digest as _, Sha256};

use super::source::PullSource;

/// Hexadecimal digits that keep two names apart.
const HASH_DIGITS: usize = 8;

/// What a namespace has.
#[derive(Clone, Debug, Default)]
pub(super) struct NamespaceObjects {
    /// Its Models.
    pub(super) models: Vec<Model>,
    /// Its ModelDeployments.
    pub(super) deployments: Vec<ModelDeployment>,
    /// Its ModelRoutes.
    pub(super) routes: Vec<ModelRoute>,
    /// Those of a newer release, which say nothing here: kind and name of each.
    pub(super) undecodable: Vec<String>,
}

/// An object of a kind that a gateway may create and delete.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ManagedObject {
    /// A Model.
    Model(Box<Model>),
    /// A ModelDeployment.
    Deployment(Box<ModelDeployment>),
    /// A ModelRoute.
    Route(Box<ModelRoute>),
}

/// Who a change is for.
#[derive(Clone, Debug)]
pub(super) struct Requester {
    /// The namespace of its key.
    pub(super) namespace: String,
    /// `namespace/name` of its key.
    pub(super) key: String,
    /// The name of a model that it sent.
    pub(super) name: String,
}

impl ManagedObject {
    /// Its kind.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Model(_) => "Model",
            Self::Deployment(_) => "ModelDeployment",
            Self::Route(_) => "ModelRoute",
        }
    }

    /// Its metadata.
    pub(super) fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Model(object) => &object.metadata,
            Self::Deployment(object) => &object.metadata,
            Self::Route(object) => &object.metadata,
        }
    }

    /// Kind, namespace and name, for messages.
    pub(super) fn title(&self) -> String {
        title(self.kind(), self.metadata())
    }

    /// Whether a gateway created it.
    pub(super) fn is_managed(&self) -> bool {
        names::is_managed_by_gateway(self.metadata())
    }
}

/// Kind, namespace and name, for messages.
pub(super) fn title(kind: &str, metadata: &ObjectMeta) -> String {
    let [namespace, name] =
        [&metadata.namespace, &metadata.name].map(|text| text.as_deref().unwrap_or_default());
    format!("{kind} {namespace}/{name}")
}

/// Whether nobody deletes the object with these metadata.
pub(super) fn is_alive(metadata: &ObjectMeta) -> bool {
    metadata.deletion_timestamp.is_none()
}

/// The first digits of a text's SHA-256.
pub(super) fn hash(text: &str) -> String {
    let mut digits = hex::encode(Sha256::digest(text));
    digits.truncate(HASH_DIGITS);
    digits
}

impl NamespaceObjects {
    /// Models and deployments that a gateway created, whichever are more.
    pub(super) fn managed_models(&self) -> usize {
        let models = self.models.iter().filter(|one| names::is_managed_by_gateway(&one.metadata)).count();
        let deployments =
            self.deployments.iter().filter(|one| names::is_managed_by_gateway(&one.metadata)).count();
        models.max(deployments)
    }

    /// ModelRoutes that a gateway created.
    pub(super) fn managed_routes(&self) -> usize {
        self.routes.iter().filter(|one| names::is_managed_by_gateway(&one.metadata)).count()
    }

    /// Whether a Model has this name, one that is being deleted too.
    pub(super) fn has_model(&self, name: &str) -> bool {
        self.models.iter().any(|one| one.name_any() == name)
    }

    /// Whether a ModelDeployment has it, one that is being deleted too.
    pub(super) fn has_deployment(&self, name: &str) -> bool {
        self.deployments.iter().any(|one| one.name_any() == name)
    }

    /// The ModelRoute that has exactly this name.
    pub(super) fn route_of(&self, name: &str) -> Option<&ModelRoute> {
        let mut routes = self.routes.iter().filter(|route| is_alive(&route.metadata));
        routes.find(|route| route.spec.models.iter().any(|model| model == name))
    }

    /// The deployment of this name.
    pub(super) fn deployment(&self, name: &str) -> Option<&ModelDeployment> {
        let mut deployments = self.deployments.iter().filter(|one| is_alive(&one.metadata));
        deployments.find(|one| one.name_any() == name)
    }
}

impl Requester {
    fn metadata(&self, name: String) -> ObjectMeta {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        ObjectMeta {
            name: Some(name),
            namespace: Some(self.namespace.clone()),
            labels: Some(BTreeMap::from([pair(names::LABEL_MANAGED_BY, names::MANAGED_BY_GATEWAY)])),
            annotations: Some(BTreeMap::from([
                pair(names::REQUESTED_NAME, &self.name),
                pair(names::REQUESTED_BY, &self.key),
            ])),
            ..ObjectMeta::default()
        }
    }

    /// A Model of this source, of which one node fetches the files at once: to others they go with replicas.
    pub(super) fn model(&self, name: String, source: &PullSource) -> Model {
        let preload = Preload { policy: PreloadPolicy::Always, copies: Some(1), pool_ref: None };
        let source = ModelSource { uri: source.uri.clone(), ..ModelSource::default() };
        Model {
            metadata: self.metadata(name),
            spec: ModelSpec { source, preload: Some(preload) },
            status: None,
        }
    }

    /// A deployment of a Model that sleeps until the first request.
    pub(super) fn deployment(&self, name: String, model: &str, source: &PullSource) -> ModelDeployment {
        let mut spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            replicas: 0,
            autoscaling: Some(Autoscaling { min_replicas: 0, max_replicas: 1, ..autoscaling() }),
            ..ModelDeploymentSpec::default()
        };
        spec.engine.options.quantization = source.quantization;
        ModelDeployment { metadata: self.metadata(name), spec, status: None }
    }

    /// A ModelRoute that gives deployments a further name.
    pub(super) fn route(&self, alias: &str, targets: &[String]) -> ModelRoute {
        let name = match super::source::slug(alias) {
            Some(slug) => format!("{slug}-{}", hash(alias)),
            None => hash(alias),
        };
        let target = |name: &String| RouteTarget::deployment(name.clone());
        let spec = ModelRouteSpec {
            models: vec![alias.to_owned()],
            targets: targets.iter().map(target).collect(),
            ..ModelRouteSpec::default()
        };
        ModelRoute { metadata: self.metadata(name), spec, status: None }
    }
}

/// The defaults of the schema.
fn autoscaling() -> Autoscaling {
    serde_json::from_value(serde_json::json!({"maxReplicas": 1})).unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::ModelStep;
    use super::*;

    /// A requester of the namespace `lab`.
    pub(in crate::managed_models) fn requester(name: &str) -> Requester {
        Requester { namespace: "lab".into(), key: "lab/laptop".into(), name: name.into() }
    }

    impl NamespaceObjects {
        /// Titles of what these steps create, which is there then.
        pub(in crate::managed_models) fn add(&mut self, steps: Vec<ModelStep>) -> Vec<String> {
            let mut add = |step| {
                let ModelStep::Create(object) = step else { panic!("{} is no creation", step.title()) };
                let title = object.title();
                match object {
                    ManagedObject::Model(object) => self.models.push(*object),
                    ManagedObject::Deployment(object) => self.deployments.push(*object),
                    ManagedObject::Route(object) => self.routes.push(*object),
                }
                title
            };
            steps.into_iter().map(&mut add).collect()
        }
    }

    fn json(object: impl serde::Serialize) -> serde_json::Value {
        serde_json::to_value(object).unwrap()
    }

    #[test]
    fn what_a_gateway_makes_says_for_whom_and_sleeps() {
        let source = PullSource {
            name: "n".into(),
            uri: "hf://o/n".into(),
            quantization: russet_crds::WeightQuantization::Int8,
        };
        let of = requester("hf.co/o/n:8bit");
        let metadata = |name: &str| {
            serde_json::json!({
                "name": name, "namespace": "lab", "labels": {"russet.dev/managed-by": "gateway"},
                "annotations": {
                    "russet.dev/requested-name": "hf.co/o/n:8bit", "russet.dev/requested-by": "lab/laptop",
                },
            })
        };
        let model = json(of.model("n".into(), &source));
        let spec = serde_json::json!({
            "source": {"uri": "hf://o/n"}, "preload": {"policy": "Always", "copies": 1},
        });
        assert_eq!((&model["metadata"], &model["spec"]), (&metadata("n"), &spec));
        let deployment = json(of.deployment("n".into(), "n", &source));
        let spec = serde_json::json!({
            "modelRef": {"name": "n"}, "engine": {"quantization": "Int8"}, "replicas": 0,
            "autoscaling": {"minReplicas": 0, "maxReplicas": 1, "targetQueue": 4, "idleSeconds": 600},
        });
        assert_eq!((&deployment["metadata"], &deployment["spec"]), (&metadata("n"), &spec));
        let route = json(of.route("hf.co/o/n:8bit", &["n".into()]));
        let name = format!("hf-co-o-n-8bit-{}", hash("hf.co/o/n:8bit"));
        let spec = serde_json::json!({
            "models": ["hf.co/o/n:8bit"], "targets": [{"deploymentRef": {"name": "n"}}], "pick": "InOrder",
            "zone": "Local", "fallbackOn": ["Unavailable", "Overloaded", "Deadline", "Error"],
            "onUnavailable": "Queue", "deadlineSeconds": 300,
        });
        assert_eq!((&route["metadata"], &route["spec"]), (&metadata(&name), &spec));
    }
}
