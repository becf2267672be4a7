//! Which objects the deletion of a name removes. Pure. Only what a gateway created, and only what nothing else needs.
//!
//! ```text
//! name of a ModelRoute ─▶ the ModelRoute, and with the last requested name of its deployment
//! name of a deployment ─▶ its ModelRoute of the requested name, the deployment ─▶ its Model, if no other deployment needs it
//! name of a Model that no deployment serves ─▶ the Model
//! ```

use kube::ResourceExt as _;
use russet_crds::{Model, ModelDeployment, ModelRoute, names};

use super::ModelStep;
use super::objects::{ManagedObject, NamespaceObjects, is_alive, title};
use crate::error::{ErrorKind, GatewayError};

/// What is deleted with a name.
pub(super) fn removal(
    objects: &NamespaceObjects,
    namespace: &str,
    name: &str,
) -> Result<Vec<ModelStep>, GatewayError> {
    let removed = objects.removed_with(name)?;
    let Some(first) = removed.first() else {
        let message =
            format!("model `{name}` does not exist in namespace {namespace}, so it cannot be deleted");
        return Err(GatewayError::new(ErrorKind::ModelNotFound, message));
    };
    if !objects.undecodable.is_empty() {
        let message = format!(
            "{} is not deleted: what a newer release made may need it, {}; delete it with kubectl",
            first.title(),
            objects.undecodable.join(", ")
        );
        return Err(GatewayError::new(ErrorKind::Forbidden, message));
    }
    match removed.iter().find(|object| !object.is_managed()) {
        Some(object) => Err(not_managed(object)),
        None => Ok(removed.into_iter().map(ModelStep::Delete).collect()),
    }
}

impl NamespaceObjects {
    /// The objects that go with a name, those that no gateway created among them.
    fn removed_with(&self, name: &str) -> Result<Vec<ManagedObject>, GatewayError> {
        if let Some(route) = self.route_of(name) {
            let object = ManagedObject::Route(Box::new(route.clone()));
            if object.is_managed() && route.spec.models.len() > 1 {
                let message = format!(
                    "{} has {} names, and a name alone cannot be taken out of it by this API; edit it with kubectl",
                    object.title(),
                    route.spec.models.len()
                );
                return Err(GatewayError::new(ErrorKind::Forbidden, message));
            }
            let mut removed = vec![object];
            if let ([target], true) = (route.spec.targets.as_slice(), route.spec.rules.is_empty())
                && let Some(deployment) = target.deployment_name().and_then(|name| self.deployment(name))
                && names::is_managed_by_gateway(&deployment.metadata)
                // Whoever asked for the deployment by its own name still has that.
                && requested_name(deployment) != Some(deployment.name_any().as_str())
                && self.routes_to(deployment).all(|other| other.name_any() == route.name_any())
            {
                removed.extend(self.deployment_and_model(deployment));
            }
            return Ok(removed);
        }
        if let Some(deployment) = self.deployment(name) {
            if !names::is_managed_by_gateway(&deployment.metadata) {
                return Ok(vec![ManagedObject::Deployment(Box::new(deployment.clone()))]);
            }
            let (own, others): (Vec<&ModelRoute>, Vec<&ModelRoute>) =
                self.routes_to(deployment).partition(|route| {
                    names::is_managed_by_gateway(&route.metadata)
                        && route.spec.all_targets().count() == 1
                        && route.spec.models.iter().map(String::as_str).eq(requested_name(deployment))
                });
            if !others.is_empty() {
                let others: Vec<String> = others
                    .iter()
                    .map(|route| {
                        format!("{} ({})", title("ModelRoute", &route.metadata), route.spec.models.join(", "))
                    })
                    .collect();
                let message = format!(
                    "{} has further names, which would lead nowhere: {}; delete those first",
                    title("ModelDeployment", &deployment.metadata),
                    others.join(", ")
                );
                return Err(GatewayError::new(ErrorKind::Forbidden, message));
            }
            let routes = own.into_iter().map(|route| ManagedObject::Route(Box::new(route.clone())));
            return Ok(routes.chain(self.deployment_and_model(deployment)).collect());
        }
        let model = self.models.iter().find(|one| one.name_any() == name && is_alive(&one.metadata));
        let Some(model) = model else { return Ok(Vec::new()) };
        let mut users = self.deployments.iter().filter(|one| one.spec.models().any(|used| used == name));
        if let Some(user) = users.next() {
            let message = format!(
                "{} is needed by {}; delete that first",
                title("Model", &model.metadata),
                title("ModelDeployment", &user.metadata)
            );
            return Err(GatewayError::new(ErrorKind::Forbidden, message));
        }
        Ok(vec![ManagedObject::Model(Box::new(model.clone()))])
    }

    /// The ModelRoutes with this target.
    fn routes_to(&self, deployment: &ModelDeployment) -> impl Iterator<Item = &ModelRoute> {
        let name = deployment.name_any();
        let leads = move |route: &&ModelRoute| {
            route.spec.all_targets().any(|target| target.deployment_name() == Some(name.as_str()))
        };
        self.routes.iter().filter(|route| is_alive(&route.metadata)).filter(leads)
    }

    /// A deployment, and its Model where a gateway created it and nothing else needs it.
    fn deployment_and_model(&self, deployment: &ModelDeployment) -> impl Iterator<Item = ManagedObject> {
        let model =
            self.unneeded_model(deployment).map(|model| ManagedObject::Model(Box::new(model.clone())));
        std::iter::once(ManagedObject::Deployment(Box::new(deployment.clone()))).chain(model)
    }

    fn unneeded_model(&self, deployment: &ModelDeployment) -> Option<&Model> {
        let name = deployment.spec.model_ref.name.as_str();
        let others = self.deployments.iter().filter(|other| other.name_any() != deployment.name_any());
        let is_needed = others.flat_map(|other| other.spec.models()).any(|used| used == name);
        let mut models =
            self.models.iter().filter(|model| names::is_managed_by_gateway(&model.metadata) && !is_needed);
        models.find(|model| model.name_any() == name && is_alive(&model.metadata))
    }
}

/// The name by which a client pulled it.
fn requested_name(deployment: &ModelDeployment) -> Option<&str> {
    deployment.annotations().get(names::REQUESTED_NAME).map(String::as_str)
}

/// The error for what people or Git made.
fn not_managed(object: &ManagedObject) -> GatewayError {
    let metadata = object.metadata();
    let message = format!(
        "{} was not created by a pull or a copy, so this API does not delete it: delete it where its manifest is kept, or \
         with `kubectl delete {} {} -n {}`",
        object.title(),
        object.kind().to_lowercase(),
        metadata.name.as_deref().unwrap_or_default(),
        metadata.namespace.as_deref().unwrap_or_default()
    );
    GatewayError::new(ErrorKind::Forbidden, message)
}

#[cfg(test)]
mod tests {
    use russet_crds::{Adapter, LocalReference};

    use super::super::creation::{copy, pull};
    use super::super::objects::tests::requester;
    use super::super::source::PullSource;
    use super::super::source::tests::catalog;
    use super::*;

    impl NamespaceObjects {
        fn pull(&mut self, name: &str) {
            let source = PullSource::parse(name, &catalog()).unwrap();
            self.add(pull(self, &requester(name), &source).unwrap());
        }

        fn copy(&mut self, deployment: &str, name: &str) {
            self.add(copy(self, &requester(name), &[deployment.to_owned()]).unwrap());
        }

        /// Kinds of what is deleted, which is gone then; or the error.
        fn delete(&mut self, name: &str) -> Result<String, String> {
            let steps = removal(self, "lab", name).map_err(|error| error.message)?;
            let mut kinds = Vec::new();
            for step in steps {
                let ModelStep::Delete(object) = step else { panic!("it creates") };
                let is_other = |other: String| Some(other.as_str()) != object.metadata().name.as_deref();
                match &object {
                    ManagedObject::Model(_) => self.models.retain(|one| is_other(one.name_any())),
                    ManagedObject::Deployment(_) => self.deployments.retain(|one| is_other(one.name_any())),
                    ManagedObject::Route(_) => self.routes.retain(|one| is_other(one.name_any())),
                }
                kinds.push(object.kind());
            }
            Ok(kinds.join(" "))
        }
    }

    #[test]
    fn everything_that_a_pull_made_goes_with_its_name() {
        let mut objects = NamespaceObjects::default();
        for (pulled, deleted, kinds) in [
            ("qwen3-4b-4bit", "qwen3-4b-4bit", "ModelDeployment Model"),
            ("qwen3:4b", "qwen3:4b", "ModelRoute ModelDeployment Model"),
            ("qwen3:4b", "qwen3-4b-4bit", "ModelRoute ModelDeployment Model"),
        ] {
            objects.pull(pulled);
            assert_eq!(objects.delete(deleted).unwrap(), kinds, "{pulled} {deleted}");
            let left = objects.models.len() + objects.deployments.len() + objects.routes.len();
            assert_eq!(left, 0, "{pulled} {deleted}");
        }
        assert!(objects.delete("qwen3:4b").unwrap_err().starts_with("model `qwen3:4b` does not exist"));
    }

    #[test]
    fn a_model_stays_until_its_last_name_goes() {
        let mut objects = NamespaceObjects::default();
        objects.pull("qwen3:4b");
        objects.pull("hf.co/mlx-community/Qwen3-4B-4bit");
        objects.copy("qwen3-4b-4bit", "fast");
        let error = objects.delete("qwen3-4b-4bit").unwrap_err();
        assert!(error.contains("(fast)") && error.contains("lead nowhere"), "{error}");
        for (name, kinds) in [
            ("qwen3:4b", "ModelRoute"),
            ("hf.co/mlx-community/Qwen3-4B-4bit", "ModelRoute"),
            ("fast", "ModelRoute ModelDeployment Model"),
        ] {
            assert_eq!(objects.delete(name).unwrap(), kinds, "{name}");
        }
        // Pulled by its own name it keeps that.
        objects.pull("qwen3-4b-4bit");
        objects.copy("qwen3-4b-4bit", "fast");
        assert_eq!(objects.delete("fast").unwrap(), "ModelRoute");
        assert_eq!(objects.delete("qwen3-4b-4bit").unwrap(), "ModelDeployment Model");
    }

    #[test]
    fn what_git_or_people_made_is_never_deleted() {
        let mut objects = NamespaceObjects::default();
        objects.pull("hf.co/o/m");
        objects.routes.clear();
        objects.copy("m", "fast");
        let managed = objects.clone();
        objects.deployments[0].metadata.labels = None;
        let error = objects.delete("m").unwrap_err();
        let words = "ModelDeployment lab/m was not created by a pull";
        assert!(
            error.contains(words) && error.contains("kubectl delete modeldeployment m -n lab"),
            "{error}"
        );
        // A name that a client gave it may go.
        assert_eq!(objects.delete("fast").unwrap(), "ModelRoute");
        objects.deployments.clear();
        objects.models[0].metadata.labels = Some([("russet.dev/managed-by".into(), "flux".into())].into());
        assert!(objects.delete("m").unwrap_err().contains("Model lab/m was not created"));
        // A ModelRoute of Git leads to what a client pulled.
        let mut objects = managed.clone();
        objects.routes[0].metadata.labels = None;
        assert!(objects.delete("m").unwrap_err().contains("ModelRoute lab/fast"));
        assert!(objects.delete("fast").unwrap_err().contains("was not created"));
        // A deployment of Git needs the Model, as an adapter too.
        let mut objects = managed;
        objects.routes.clear();
        let mut other = objects.deployments[0].clone();
        other.metadata.name = Some("other".into());
        other.metadata.labels = None;
        other.spec.model_ref = LocalReference::new("base");
        other.spec.adapters = vec![Adapter { name: "a".into(), model_ref: LocalReference::new("m") }];
        objects.deployments.push(other);
        assert_eq!(objects.delete("m").unwrap(), "ModelDeployment");
        assert!(objects.delete("m").unwrap_err().contains("needed by ModelDeployment lab/other"));
    }

    #[test]
    fn objects_of_a_newer_release_stop_a_deletion() {
        let mut objects = NamespaceObjects::default();
        objects.pull("hf.co/o/m");
        objects.undecodable = vec!["ModelRoute lab/new".into()];
        let error = objects.delete("m").unwrap_err();
        assert!(error.contains("ModelRoute lab/new"), "{error}");
    }

    #[test]
    fn a_route_with_several_names_is_left_to_its_editor() {
        let mut objects = NamespaceObjects::default();
        objects.pull("hf.co/o/m");
        objects.routes[0].spec.models.push("second".into());
        let error = objects.delete("second").unwrap_err();
        assert!(error.contains("has 2 names"), "{error}");
    }
}
