//! Resolves what a person types (`mdeploy`, `modeldeployments.russet.dev`, `Model`) to the path of a
//! resource, with the server's discovery. No kind is hard-coded but one: a node is an InferenceNode here.

use anyhow::{Context as _, Result, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResource;
use kube::Client;

/// A resource of the server.
#[derive(Clone, Debug)]
pub struct Resource {
    /// `v1` or `group/version`.
    pub api_version: String,
    /// Plural name.
    pub plural: String,
    /// Kind.
    pub kind: String,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    short_names: Vec<String>,
    singular: String,
    categories: Vec<String>,
}

impl Resource {
    /// The path of the list.
    pub fn collection(&self, namespace: Option<&str>) -> String {
        let root = if self.api_version.contains('/') { "apis" } else { "api" };
        match namespace {
            Some(namespace) if self.namespaced => {
                format!("/{root}/{}/namespaces/{namespace}/{}", self.api_version, self.plural)
            }
            _ => format!("/{root}/{}/{}", self.api_version, self.plural),
        }
    }

    /// The path of one object.
    pub fn object(&self, namespace: &str, name: &str) -> String {
        format!("{}/{name}", self.collection(Some(namespace)))
    }

    fn matches(&self, word: &str) -> bool {
        let word = word.to_lowercase();
        let group = self.api_version.split_once('/').map_or("", |(group, _)| group);
        let (name, requested_group) =
            word.split_once('.').map_or((word.as_str(), None), |(n, g)| (n, Some(g)));
        requested_group.is_none_or(|requested| requested == group)
            && (name == self.plural
                || name == self.singular
                || name == self.kind.to_lowercase()
                || self.short_names.iter().any(|short| short == name))
    }

    fn new(api_version: &str, resource: APIResource) -> Self {
        Self {
            api_version: api_version.to_owned(),
            plural: resource.name,
            kind: resource.kind,
            namespaced: resource.namespaced,
            short_names: resource.short_names.unwrap_or_default(),
            singular: resource.singular_name,
            categories: resource.categories.unwrap_or_default(),
        }
    }
}

/// Every listable resource of the server.
pub async fn discover(client: &Client) -> Result<Vec<Resource>> {
    let mut found = Vec::new();
    let mut collect = |api_version: &str, list: Vec<APIResource>| {
        found.extend(
            list.into_iter()
                .filter(|resource| !resource.name.contains('/'))
                .map(|resource| Resource::new(api_version, resource)),
        );
    };
    collect("v1", client.list_core_api_resources("v1").await?.resources);
    for group in client.list_api_groups().await?.groups {
        let Some(version) = group.preferred_version.or_else(|| group.versions.into_iter().next()) else {
            continue;
        };
        let list = client.list_api_group_resources(&version.group_version).await?;
        collect(&version.group_version, list.resources);
    }
    Ok(found)
}

/// The resources that a word names: one, or all of a category.
pub fn named<'a>(all: &'a [Resource], word: &str) -> Result<Vec<&'a Resource>> {
    // Kubernetes' own Nodes are none of Russet's machines, and an embedded control plane has none.
    let machines = |resource: &&Resource| {
        resource.kind == "InferenceNode" && resource.api_version.starts_with("russet.dev/")
    };
    if ["no", "node", "nodes"].contains(&word.to_lowercase().as_str())
        && let Some(machines) = all.iter().find(machines)
    {
        return Ok(vec![machines]);
    }
    if let Some(resource) = all.iter().find(|resource| resource.matches(word)) {
        return Ok(vec![resource]);
    }
    let category: Vec<&Resource> =
        all.iter().filter(|resource| resource.categories.iter().any(|name| name == word)).collect();
    if category.is_empty() {
        let known: Vec<&str> = all.iter().map(|resource| resource.plural.as_str()).collect();
        bail!("the server has no resource \"{word}\"; it has: {}", known.join(", "));
    }
    Ok(category)
}

/// The path of an object given as `resource/name`.
pub async fn path_of(client: &Client, object: &str, namespace: &str) -> Result<String> {
    let (word, name) = object.split_once('/').context("name the object as resource/name")?;
    let all = discover(client).await?;
    let found = named(&all, word)?;
    Ok(found.first().context("no such resource")?.object(namespace, name))
}

/// The resource of a manifest.
pub fn of_kind<'a>(all: &'a [Resource], api_version: &str, kind: &str) -> Result<&'a Resource> {
    all.iter().find(|resource| resource.api_version == api_version && resource.kind == kind).ok_or_else(
        || {
            anyhow::anyhow!(
                "the server has no kind {kind} in {api_version}; is the name right, is the CRD installed?"
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployments() -> Resource {
        Resource {
            api_version: "russet.dev/v1alpha1".into(),
            plural: "modeldeployments".into(),
            kind: "ModelDeployment".into(),
            namespaced: true,
            short_names: vec!["mdeploy".into()],
            singular: "modeldeployment".into(),
            categories: vec!["russet".into()],
        }
    }

    #[test]
    fn people_may_type_any_name_of_a_resource() {
        let all = [deployments()];
        for word in
            ["mdeploy", "modeldeployments", "ModelDeployment", "modeldeployments.russet.dev", "russet"]
        {
            assert_eq!(named(&all, word).unwrap().len(), 1, "{word}");
        }
        let error = named(&all, "pods").unwrap_err().to_string();
        assert!(error.contains("\"pods\"") && error.contains("modeldeployments"), "{error}");
        assert!(named(&all, "mdeploy.other.dev").is_err());
    }

    #[test]
    fn a_node_is_russet_s_machine_where_the_server_has_them() {
        let kind = |api_version: &str, kind: &str, singular: &str| Resource {
            api_version: api_version.into(),
            plural: format!("{singular}s"),
            kind: kind.into(),
            namespaced: false,
            short_names: Vec::new(),
            singular: singular.into(),
            categories: Vec::new(),
        };
        let nodes = kind("v1", "Node", "node");
        let machines = kind("russet.dev/v1alpha1", "InferenceNode", "inferencenode");
        for word in ["node", "nodes", "no", "Node", "inferencenodes"] {
            let all = [nodes.clone(), machines.clone()];
            assert_eq!(named(&all, word).unwrap()[0].kind, "InferenceNode", "{word}");
        }
        assert_eq!(named(&[nodes], "nodes").unwrap()[0].kind, "Node");
    }

    #[test]
    fn paths_follow_scope_and_group() {
        let resource = deployments();
        assert_eq!(
            resource.object("lab", "chat"),
            "/apis/russet.dev/v1alpha1/namespaces/lab/modeldeployments/chat"
        );
        assert_eq!(resource.collection(None), "/apis/russet.dev/v1alpha1/modeldeployments");
    }
}
