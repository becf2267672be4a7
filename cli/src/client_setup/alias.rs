//! Names of models that begin with `claude`, which Claude Code's list wants: the ModelRoute that gives a model one.
//! It is printed and not applied: a person decides what a cluster has.

use super::endpoint::GatewayEndpoint;

/// What the names in the list begin with.
const PREFIXES: [&str; 2] = ["claude", "anthropic"];

/// The ModelRoute in YAML, with one more name for the endpoint's model; `None` where it has one already.
pub fn route(endpoint: &GatewayEndpoint) -> Option<String> {
    let model = &endpoint.model;
    let has_name = |name: &str| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let aliased = endpoint.models.iter().any(|other| {
        has_name(&other.name) && (other.name == model.name || other.deployments == model.deployments)
    });
    let (namespace, _) = model.deployments.first()?.split_once('/')?;
    if aliased {
        return None;
    }
    // An adapter's name is that of its model and its own; a route of the model has its adapters too.
    let name = model.name.rsplit('/').next()?.split(':').next()?;
    let alias = format!("claude-{}", name.to_lowercase());
    let mut yaml = format!(
        "apiVersion: russet.dev/v1alpha1\n\
         kind: ModelRoute\n\
         metadata: {{name: {}, namespace: {namespace}}}\n\
         spec:\n\
         \x20 models: [\"{alias}\"]\n\
         \x20 targets:\n",
        object_name(&alias)
    );
    // Deployments of another namespace are no target of a route.
    for deployment in &model.deployments {
        if let Some(name) = deployment.strip_prefix(&format!("{namespace}/")) {
            yaml += &format!("  - deploymentRef: {{name: {name}}}\n");
        }
    }
    Some(yaml)
}

/// A name that an object may have.
fn object_name(alias: &str) -> String {
    let name: String = alias
        .chars()
        .map(|letter| if letter.is_ascii_lowercase() || letter.is_ascii_digit() { letter } else { '-' })
        .take(63)
        .collect();
    name.trim_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_setup::endpoint::ListedModel;

    fn endpoint(models: &[(&str, &str)]) -> GatewayEndpoint {
        let models = models.iter().map(|(name, deployment)| ListedModel {
            name: (*name).to_owned(),
            context_tokens: None,
            is_ready: true,
            message: String::new(),
            deployments: vec![(*deployment).to_owned()],
        });
        let models: Vec<ListedModel> = models.collect();
        let first = models[0].name.clone();
        GatewayEndpoint::new("http://127.0.0.1:52415".into(), None, models, Some(&first)).unwrap()
    }

    #[test]
    fn a_model_gets_a_name_that_begins_with_claude() {
        let yaml = route(&endpoint(&[("Qwen3_30b:pirate", "team/qwen3-30b")])).unwrap();
        assert_eq!(
            yaml,
            "apiVersion: russet.dev/v1alpha1\nkind: ModelRoute\nmetadata: {name: claude-qwen3-30b, namespace: team}\n\
             spec:\n  models: [\"claude-qwen3_30b\"]\n  targets:\n  - deploymentRef: {name: qwen3-30b}\n"
        );
        let parsed: russet_crds::ModelRoute = serde_norway::from_str(&yaml).unwrap();
        assert_eq!(parsed.spec.models, ["claude-qwen3_30b"]);
        assert_eq!(parsed.spec.targets.len(), 1);
    }

    #[test]
    fn a_model_that_has_such_a_name_needs_no_route() {
        assert_eq!(route(&endpoint(&[("claude-smoke", "default/smoke")])), None);
        assert_eq!(route(&endpoint(&[("smoke", "default/smoke"), ("claude-x", "default/smoke")])), None);
        assert!(route(&endpoint(&[("smoke", "default/smoke"), ("claude-x", "default/x")])).is_some());
    }
}
