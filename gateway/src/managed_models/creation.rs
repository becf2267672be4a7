//! Which objects a pull and a copy create. Pure: of what is there, what is missing.

use kube::ResourceExt as _;
use russet_crds::{ModelDeployment, ModelSource, RouteTarget, WeightQuantization};

use super::ModelStep;
use super::objects::{ManagedObject, NamespaceObjects, Requester, hash, is_alive, title};
use super::source::{PullSource, is_alias};
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER, shown};
use crate::routes::matches_pattern;

/// Most Models, and most ModelDeployments, that gateways create in a namespace: a client that pulls in a loop fills no
/// cluster.
const MAX_MODELS: usize = 64;
/// Most ModelRoutes that gateways create in a namespace.
const MAX_ALIASES: usize = 256;

/// What makes the requested name that of this source: a Model of it, a deployment, and a ModelRoute where the name is not
/// the deployment's. What is there is used, whoever made it.
pub(super) fn pull(
    objects: &NamespaceObjects,
    requester: &Requester,
    source: &PullSource,
) -> Result<Vec<ModelStep>, GatewayError> {
    let mut steps = Vec::new();
    // One with a revision, a digest or a Secret has other files, or other rights.
    let plain = ModelSource { uri: source.uri.clone(), ..ModelSource::default() };
    let model = match objects.models.iter().find(|model| model.spec.source == plain) {
        Some(model) if !is_alive(&model.metadata) => return Err(leaving(&title("Model", &model.metadata))),
        Some(model) => model.name_any(),
        None => {
            check_models(objects, &requester.namespace)?;
            let is_taken = |name: &str| objects.has_model(name) || objects.has_deployment(name);
            let name = free_name(&source.name, &source.uri, is_taken)?;
            steps.push(create(ManagedObject::Model(Box::new(requester.model(name.clone(), source)))));
            name
        }
    };
    let serves = |one: &&ModelDeployment| {
        let spec = &one.spec;
        spec.model_ref.name == model && spec.engine.options.quantization == source.quantization
    };
    let found = objects.deployments.iter().filter(serves);
    let deployment = match found.max_by_key(|one| (is_alive(&one.metadata), one.name_any() == model)) {
        Some(one) if !is_alive(&one.metadata) => {
            return Err(leaving(&title("ModelDeployment", &one.metadata)));
        }
        Some(one) => one.name_any(),
        None => {
            check_models(objects, &requester.namespace)?;
            let packed = match source.quantization {
                WeightQuantization::Int4 => format!("{model}-as-4bit"),
                WeightQuantization::Int8 => format!("{model}-as-8bit"),
                WeightQuantization::AsStored | WeightQuantization::Unknown => model.clone(),
            };
            let name = free_name(&packed, &source.uri, |name| objects.has_deployment(name))?;
            let object = requester.deployment(name.clone(), &model, source);
            steps.push(create(ManagedObject::Deployment(Box::new(object))));
            name
        }
    };
    if requester.name != deployment {
        steps.extend(alias(objects, requester, &[deployment])?);
    }
    Ok(steps)
}

/// What gives these deployments the requested name too. A name that leads elsewhere stays what it is: whoever gave it counts
/// on that.
pub(super) fn copy(
    objects: &NamespaceObjects,
    requester: &Requester,
    targets: &[String],
) -> Result<Vec<ModelStep>, GatewayError> {
    let Requester { namespace, name, .. } = requester;
    if !is_alias(name) {
        let message = format!(
            "`{}` cannot be the name of a model: write up to 253 letters, digits and `.`, `_`, `-`, with `:` and `/` \
             between them",
            shown(name)
        );
        return Err(GatewayError::field("destination", message));
    }
    if let Some(deployment) = objects.deployment(name) {
        if targets == [deployment.name_any()] {
            return Ok(Vec::new());
        }
        let message =
            format!("`{name}` is the name of ModelDeployment {namespace}/{name} already; choose another one");
        return Err(GatewayError::field("destination", message));
    }
    let pattern = objects.routes.iter().filter(|route| is_alive(&route.metadata)).find(|route| {
        route.spec.models.iter().any(|pattern| pattern.contains('*') && matches_pattern(pattern, name))
    });
    if let (Some(route), None) = (pattern, objects.route_of(name)) {
        let route = title("ModelRoute", &route.metadata);
        let message =
            format!("`{name}` leads elsewhere already, by a pattern of {route}; choose another name");
        return Err(GatewayError::field("destination", message));
    }
    alias(objects, requester, targets)
}

/// The ModelRoute of the requested name, if it is not there yet.
fn alias(
    objects: &NamespaceObjects,
    requester: &Requester,
    targets: &[String],
) -> Result<Vec<ModelStep>, GatewayError> {
    let Requester { namespace, name, .. } = requester;
    if let Some(route) = objects.route_of(name) {
        let existing: Vec<&str> = route.spec.all_targets().filter_map(RouteTarget::deployment_name).collect();
        if existing == targets {
            return Ok(Vec::new());
        }
        let message = format!(
            "`{name}` is a name of {} already, and leads to {}; delete that name first, or choose another one",
            title("ModelRoute", &route.metadata),
            existing.join(", ")
        );
        return Err(GatewayError::field("model", message));
    }
    if objects.managed_routes() >= MAX_ALIASES {
        let message = format!(
            "clients have given {MAX_ALIASES} further names to models of namespace {namespace}, which is the most; delete \
             one (DELETE /api/delete)"
        );
        return Err(GatewayError::field("model", message));
    }
    let route = requester.route(name, targets);
    match objects.routes.iter().find(|one| one.name_any() == route.name_any()) {
        Some(one) if !is_alive(&one.metadata) => Err(leaving(&title("ModelRoute", &one.metadata))),
        Some(one) => {
            let message = format!(
                "{} is in the place of the name `{name}` and has others; delete it with kubectl, or give it that name",
                title("ModelRoute", &one.metadata)
            );
            Err(GatewayError::field("model", message))
        }
        None => Ok(vec![create(ManagedObject::Route(Box::new(route)))]),
    }
}

fn create(object: ManagedObject) -> ModelStep {
    ModelStep::Create(object)
}

/// The name, or where it is taken another one for the same source.
fn free_name(name: &str, uri: &str, is_taken: impl Fn(&str) -> bool) -> Result<String, GatewayError> {
    let names = [name.to_owned(), format!("{name}-{}", hash(uri))];
    let free = names.iter().find(|name| !is_taken(name)).cloned();
    free.ok_or_else(|| {
        let [first, second] = names;
        let message = format!(
            "other objects have the names {first} and {second}; apply a Model and a ModelDeployment of another name with \
             kubectl"
        );
        GatewayError::field("model", message)
    })
}

fn check_models(objects: &NamespaceObjects, namespace: &str) -> Result<(), GatewayError> {
    if objects.managed_models() < MAX_MODELS {
        return Ok(());
    }
    let message = format!(
        "clients have pulled {MAX_MODELS} models into namespace {namespace}, which is the most; delete one (DELETE \
         /api/delete), or deploy this one with kubectl"
    );
    Err(GatewayError::field("model", message))
}

/// The error where an object of the same name has to go first.
fn leaving(title: &str) -> GatewayError {
    let message = format!("{title} is being deleted; send the request again once it is gone");
    GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::super::objects::tests::requester;
    use super::super::source::tests::catalog;
    use super::*;

    fn pulled(objects: &mut NamespaceObjects, name: &str) -> Vec<String> {
        let source = PullSource::parse(name, &catalog()).unwrap();
        let steps = pull(objects, &requester(name), &source).unwrap();
        objects.add(steps)
    }

    #[test]
    fn a_pull_creates_what_is_missing_and_nothing_twice() {
        let mut objects = NamespaceObjects::default();
        let expected = ["Model lab/qwen3-4b-4bit", "ModelDeployment lab/qwen3-4b-4bit"];
        assert_eq!(pulled(&mut objects, "qwen3-4b-4bit"), expected);
        assert!(pulled(&mut objects, "qwen3-4b-4bit").is_empty());
        // The same model by other names.
        let route = |name: &str, slug: &str| vec![format!("ModelRoute lab/{slug}-{}", hash(name))];
        assert_eq!(pulled(&mut objects, "qwen3:4b"), route("qwen3:4b", "qwen3-4b"));
        let hub = "hf.co/mlx-community/Qwen3-4B-4bit";
        assert_eq!(pulled(&mut objects, hub), route(hub, "hf-co-mlx-community-qwen3-4b-4bit"));
        assert!(pulled(&mut objects, hub).is_empty());
        // Packed otherwise it is another deployment of the same Model.
        let packed = pulled(&mut objects, "hf.co/mlx-community/Qwen3-4B-4bit:8bit");
        assert_eq!(packed[0], "ModelDeployment lab/qwen3-4b-4bit-as-8bit");
        assert_eq!((packed.len(), objects.models.len()), (2, 1));
        // Half of it is completed.
        objects.deployments.clear();
        assert_eq!(pulled(&mut objects, "qwen3-4b-4bit"), ["ModelDeployment lab/qwen3-4b-4bit"]);
    }

    #[test]
    fn two_repositories_of_one_name_stay_apart() {
        let mut objects = NamespaceObjects::default();
        assert_eq!(pulled(&mut objects, "hf.co/a/m")[..2], ["Model lab/m", "ModelDeployment lab/m"]);
        let name = format!("m-{}", hash("hf://b/m"));
        let expected = [format!("Model lab/{name}"), format!("ModelDeployment lab/{name}")];
        assert_eq!(pulled(&mut objects, "hf.co/b/m")[..2], expected);
        // A Model with credentials or a revision is another one.
        let mut objects = NamespaceObjects::default();
        pulled(&mut objects, "hf.co/a/m");
        objects.routes.clear();
        objects.models[0].spec.source.revision = Some("main".into());
        assert_eq!(pulled(&mut objects, "hf.co/a/m")[0], format!("Model lab/m-{}", hash("hf://a/m")));
    }

    #[test]
    fn what_is_being_deleted_has_to_go_first() {
        let mut objects = NamespaceObjects::default();
        pulled(&mut objects, "hf.co/a/m");
        let gone = serde_json::from_value(serde_json::json!("2026-01-01T00:00:00Z")).unwrap();
        objects.models[0].metadata.deletion_timestamp = Some(gone);
        let source = PullSource::parse("hf.co/a/m", &catalog()).unwrap();
        let error = pull(&objects, &requester("hf.co/a/m"), &source).unwrap_err();
        assert_eq!((error.kind, error.retry_after), (ErrorKind::ModelNotReady, Some(RETRY_AFTER)));
        assert!(error.message.contains("Model lab/m is being deleted"), "{error}");
    }

    #[test]
    fn a_storm_of_pulls_and_copies_ends_at_the_limits() {
        let mut objects = NamespaceObjects::default();
        for number in 0..MAX_MODELS {
            pulled(&mut objects, &format!("hf.co/o/m{number}"));
        }
        let source = PullSource::parse("hf.co/o/more", &catalog()).unwrap();
        let error = pull(&objects, &requester("hf.co/o/more"), &source).unwrap_err();
        assert!(error.message.contains("64 models into namespace lab"), "{error}");
        assert!(pulled(&mut objects, "hf.co/o/m7").is_empty(), "what is there stays");
        for number in 0..MAX_ALIASES - MAX_MODELS {
            let steps = copy(&objects, &requester(&format!("a{number}")), &["m0".into()]).unwrap();
            objects.add(steps);
        }
        let error = copy(&objects, &requester("last"), &["m0".into()]).unwrap_err();
        assert!(error.message.contains("256 further names"), "{error}");
    }

    #[test]
    fn a_copy_takes_no_name_that_leads_elsewhere() {
        let mut objects = NamespaceObjects::default();
        pulled(&mut objects, "hf.co/a/m");
        pulled(&mut objects, "hf.co/a/n");
        let mut pattern = requester("gpt").route("gpt-*", &["m".into()]);
        pattern.metadata.labels = None;
        objects.routes.push(pattern);
        let copied = |name: &str| copy(&objects, &requester(name), &["m".into()]);
        assert_eq!(copied("fast").unwrap().len(), 1);
        assert!(copied("m").unwrap().is_empty(), "it is the name already");
        assert!(copied("hf.co/a/m").unwrap().is_empty(), "it leads there already");
        for (name, words) in [
            ("n", "ModelDeployment lab/n"),
            ("hf.co/a/n", "leads to n"),
            ("gpt-4", "by a pattern of ModelRoute lab/gpt"),
            ("gpt*", "cannot be the name"),
            ("../m", "cannot be the name"),
            ("", "cannot be the name"),
        ] {
            let error = copied(name).unwrap_err();
            assert!(error.message.contains(words), "{name}: {error}");
        }
    }
}
