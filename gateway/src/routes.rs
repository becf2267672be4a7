//! The routing table: the gateway's view of the cluster at one moment, and which deployments serve a model
//! name. A [`RoutingTable`] is immutable; every change publishes a new one. No sockets and no Kubernetes
//! client here; `objects` reads the kinds and `follow` watches them.

mod follow;
mod objects;
mod scope;

use std::time::Duration;

pub use follow::follow;
pub use scope::ModelScope;

/// The state the gateway routes by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingTable {
    /// Whether every kind was listed once; before that, an unknown name may belong to an object that was not listed yet.
    pub synced: bool,
    /// By namespace and name, `default` first.
    pub deployments: Vec<Deployment>,
    /// Names that ModelRoutes give to deployments.
    pub aliases: Vec<ModelAlias>,
}

/// A ModelDeployment as the gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// Its namespace.
    pub namespace: String,
    /// Its name, under which clients request the model.
    pub name: String,
    /// When it was created, in seconds since 1970.
    pub created: i64,
    /// Context length in tokens.
    pub context_tokens: u32,
    /// Name of its desired Model.
    pub model: String,
    /// Whether waiting for it makes sense.
    pub state: DeploymentState,
    /// Groups that are ready.
    pub endpoints: Vec<Endpoint>,
}

/// Whether a deployment serves requests, or will.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeploymentState {
    /// It serves requests.
    Ready,
    /// It is not ready yet; the message says why.
    Working(String),
    /// It will not become ready until a person acts; the message says what is wrong.
    Halted(String),
}

/// Rank 0 of one group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// `ip:port` of its gRPC service.
    pub address: String,
    /// Its node, which its certificate names.
    pub node: String,
    /// `namespace/name` of the ShardGroup.
    pub group: String,
    /// Name of the Model it runs, whose source is immutable.
    pub model: String,
    /// Incarnation of the group.
    pub epoch: i64,
}

/// One name of a ModelRoute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelAlias {
    /// The name clients send; `*` matches any run of characters.
    pub pattern: String,
    /// `namespace/name` of the ModelRoute.
    pub route: String,
    /// Namespace of the route and its targets.
    pub namespace: String,
    /// Names of target deployments, tried in order.
    pub targets: Vec<String>,
    /// How long a request is held while no target is ready; `None`: it is rejected at once.
    pub hold_timeout: Option<Duration>,
}

/// The result of resolving a model name.
#[derive(Debug, PartialEq, Eq)]
pub enum Resolved<'a> {
    /// These deployments serve it, tried in order; never empty.
    Deployments(Vec<&'a Deployment>),
    /// A ModelRoute has the name, but none of its targets exists.
    Dangling(&'a ModelAlias),
    /// Deployments of several namespaces have the name; these are their full names.
    Ambiguous(Vec<String>),
    /// The caller's key does not allow the name, whether it exists or not.
    Forbidden,
    /// Nothing has the name.
    Unknown,
}

impl Deployment {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

impl ModelAlias {
    fn is_exact(&self) -> bool {
        !self.pattern.contains('*')
    }

    /// Literal characters of the pattern: the more, the more specific it is.
    fn literal_length(&self) -> usize {
        self.pattern.chars().filter(|&character| character != '*').count()
    }
}

impl RoutingTable {
    /// Resolves `model` for a caller restricted to `scope`. A name in a ModelRoute wins over a deployment's
    /// own name, and both win over a pattern; of patterns the most specific wins. Objects outside the scope
    /// do not exist for the caller.
    pub fn resolve(&self, model: &str, scope: &ModelScope) -> Resolved<'_> {
        if !scope.allows(model) {
            return Resolved::Forbidden;
        }
        match self.matching_alias(model, scope) {
            Some(alias) => self.targets(alias),
            None => self.by_own_name(model, scope),
        }
    }

    /// The alias of a ModelRoute that `model` resolves through, if any.
    pub fn matching_alias(&self, model: &str, scope: &ModelScope) -> Option<&ModelAlias> {
        let exact = self.exact_alias(model, scope);
        exact.or_else(|| match self.by_own_name(model, scope) {
            Resolved::Unknown => self.pattern_alias(model, scope),
            _ => None,
        })
    }

    fn visible_aliases(&self, scope: &ModelScope) -> impl Iterator<Item = &ModelAlias> {
        self.aliases.iter().filter(move |alias| scope.sees_namespace(&alias.namespace))
    }

    fn exact_alias(&self, model: &str, scope: &ModelScope) -> Option<&ModelAlias> {
        self.visible_aliases(scope).find(|alias| alias.is_exact() && alias.pattern == model)
    }

    /// The most specific matching pattern.
    fn pattern_alias(&self, model: &str, scope: &ModelScope) -> Option<&ModelAlias> {
        let matching = self
            .visible_aliases(scope)
            .filter(|alias| !alias.is_exact() && matches_pattern(&alias.pattern, model));
        // Ties go to the first route by name, so that all gateways choose the same one.
        matching
            .max_by(|a, b| a.literal_length().cmp(&b.literal_length()).then_with(|| b.route.cmp(&a.route)))
    }

    /// The deployment with this own name.
    fn by_own_name(&self, model: &str, scope: &ModelScope) -> Resolved<'_> {
        let deployments = || self.deployments.iter().filter(|one| scope.sees_namespace(&one.namespace));
        if let Some(full) = deployments().find(|deployment| {
            model.split_once('/') == Some((deployment.namespace.as_str(), deployment.name.as_str()))
        }) {
            return Resolved::Deployments(vec![full]);
        }
        let same: Vec<&Deployment> = deployments().filter(|deployment| deployment.name == model).collect();
        match same.as_slice() {
            [] => Resolved::Unknown,
            [only] => Resolved::Deployments(vec![only]),
            [first, ..] if first.namespace == DEFAULT_NAMESPACE => Resolved::Deployments(vec![first]),
            several => Resolved::Ambiguous(several.iter().map(|one| one.full_name()).collect()),
        }
    }

    fn targets<'a>(&'a self, alias: &'a ModelAlias) -> Resolved<'a> {
        let found: Vec<&Deployment> = alias
            .targets
            .iter()
            .filter_map(|target| {
                self.deployments
                    .iter()
                    .find(|deployment| deployment.namespace == alias.namespace && deployment.name == *target)
            })
            .collect();
        if found.is_empty() { Resolved::Dangling(alias) } else { Resolved::Deployments(found) }
    }

    /// All model names that a caller may request, each with its deployments: for each deployment the shortest
    /// name that resolves to it, and the names of ModelRoutes that are not patterns.
    pub fn models(&self, scope: &ModelScope) -> Vec<(String, Vec<&Deployment>)> {
        let mut models: Vec<(String, Vec<&Deployment>)> = Vec::new();
        for deployment in self.deployments.iter().filter(|one| scope.sees_namespace(&one.namespace)) {
            let resolves_here = |id: &String| match self.resolve(id, scope) {
                Resolved::Deployments(found) => found == [deployment],
                _ => false,
            };
            let ids = [deployment.name.clone(), deployment.full_name()];
            if let Some(id) = ids.into_iter().find(resolves_here) {
                models.push((id, vec![deployment]));
            }
        }
        for alias in self.aliases.iter().filter(|alias| alias.is_exact()) {
            if let Resolved::Deployments(found) = self.resolve(&alias.pattern, scope)
                && !models.iter().any(|(id, _)| *id == alias.pattern)
            {
                models.push((alias.pattern.clone(), found));
            }
        }
        models
    }
}

/// The namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Whether `pattern`, in which `*` matches any run of characters, matches all of `text`.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    // `split` yields at least one part.
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            // The earliest match leaves the most text for the remaining parts.
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(namespace: &str, name: &str) -> Deployment {
        Deployment {
            namespace: namespace.into(),
            name: name.into(),
            created: 0,
            context_tokens: 8,
            model: "small".into(),
            state: DeploymentState::Ready,
            endpoints: vec![],
        }
    }

    fn alias(pattern: &str, route: &str, targets: &[&str]) -> ModelAlias {
        ModelAlias {
            pattern: pattern.into(),
            route: format!("default/{route}"),
            namespace: "default".into(),
            targets: targets.iter().map(|&target| target.to_owned()).collect(),
            hold_timeout: None,
        }
    }

    fn table() -> RoutingTable {
        RoutingTable {
            synced: true,
            deployments: vec![
                deployment("default", "small"),
                deployment("default", "twin"),
                deployment("default", "large"),
                deployment("lab", "shared"),
                deployment("lab", "twin"),
                deployment("office", "shared"),
            ],
            aliases: vec![
                alias("gpt-4o", "usual", &["gone", "large", "small"]),
                alias("meta-llama/*", "llama", &["large"]),
                alias("meta-llama/*-1B", "tiny", &["small"]),
                alias("small", "shadow", &["large"]),
                alias("empty", "empty", &["gone"]),
            ],
        }
    }

    #[test]
    fn a_name_leads_to_the_deployments_it_says() {
        let table = table();
        let found = |model: &str| match table.resolve(model, &ModelScope::ALL) {
            Resolved::Deployments(found) => found.iter().map(|one| one.full_name()).collect(),
            Resolved::Dangling(alias) => vec![format!("dangling {}", alias.route)],
            Resolved::Ambiguous(names) => vec![format!("one of {}", names.join(" "))],
            Resolved::Forbidden => vec!["forbidden".to_owned()],
            Resolved::Unknown => vec!["unknown".to_owned()],
        };
        for (model, expected) in [
            ("large", vec!["default/large"]),
            ("lab/twin", vec!["lab/twin"]),
            ("twin", vec!["default/twin"]),
            ("shared", vec!["one of lab/shared office/shared"]),
            ("gpt-4o", vec!["default/large", "default/small"]),
            ("meta-llama/Llama-3-8B", vec!["default/large"]),
            ("meta-llama/Llama-3-1B", vec!["default/small"]),
            ("small", vec!["default/large"]),
            ("default/small", vec!["default/small"]),
            ("empty", vec!["dangling default/empty"]),
            ("Large", vec!["unknown"]),
            ("lab/small", vec!["unknown"]),
            ("", vec!["unknown"]),
        ] {
            assert_eq!(found(model), expected, "{model}");
        }
    }

    #[test]
    fn the_list_names_each_deployment_by_a_name_that_leads_to_it() {
        let table = table();
        let ids: Vec<String> = table.models(&ModelScope::ALL).into_iter().map(|(id, _)| id).collect();
        assert_eq!(
            ids,
            ["default/small", "twin", "large", "lab/shared", "lab/twin", "office/shared", "gpt-4o", "small"]
        );
        for id in ids {
            assert!(matches!(table.resolve(&id, &ModelScope::ALL), Resolved::Deployments(_)), "{id}");
        }
    }

    #[test]
    fn a_key_leads_to_models_of_its_namespace_and_of_its_list_alone() {
        let table = table();
        let models = |scope: &ModelScope| -> Vec<String> {
            table.models(scope).into_iter().map(|(id, _)| id).collect()
        };
        let scope = |namespace: &str, models: &[&str]| {
            ModelScope::new(namespace, &models.iter().map(|&model| model.to_owned()).collect::<Vec<_>>())
        };
        let lab = scope("lab", &[]);
        assert_eq!(models(&lab), ["shared", "twin"]);
        for (scope, model, expected) in [
            (&lab, "twin", "lab/twin"),
            (&lab, "shared", "lab/shared"),
            (&lab, "lab/shared", "lab/shared"),
            (&lab, "office/shared", "unknown"),
            (&lab, "default/large", "unknown"),
            (&lab, "gpt-4o", "unknown"),
            (&lab, "meta-llama/Llama-3-8B", "unknown"),
            (&scope("lab", &["tw*"]), "twin", "lab/twin"),
            (&scope("lab", &["tw*"]), "shared", "forbidden"),
            (&scope("lab", &["tw*"]), "nix", "forbidden"),
            (&scope("lab", &["tw*"]), "lab/twin", "forbidden"),
            (&scope("lab", &["*/twin"]), "lab/twin", "lab/twin"),
            (&scope("lab", &["*"]), "default/large", "unknown"),
            (&scope("default", &["gpt-*"]), "gpt-4o", "default/large"),
            (&scope("default", &["gpt-*"]), "large", "forbidden"),
        ] {
            let found = match table.resolve(model, scope) {
                Resolved::Deployments(found) => found[0].full_name(),
                Resolved::Forbidden => "forbidden".into(),
                Resolved::Unknown => "unknown".into(),
                other => format!("{other:?}"),
            };
            assert_eq!(found, expected, "{model} {scope:?}");
        }
        assert_eq!(
            models(&scope("default", &["gpt-*", "default/*"])),
            ["default/small", "default/twin", "default/large", "gpt-4o"]
        );
        assert!(models(&scope("nowhere", &[])).is_empty());
    }

    #[test]
    fn stars_match_any_run_of_characters() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("*", "a/b", true),
            ("a*", "ab", true),
            ("a*", "ba", false),
            ("*a", "ba", true),
            ("*a", "ab", false),
            ("a*c*e", "abcde", true),
            ("a*c*e", "ace", true),
            ("a*c*e", "aec", false),
            ("a*a", "a", false),
            ("ab*ba", "aba", false),
            ("**é*", "xéy", true),
            ("exact", "exact", true),
            ("exact", "exactly", false),
        ] {
            assert_eq!(matches_pattern(pattern, text), expected, "{pattern} {text}");
        }
    }
}
