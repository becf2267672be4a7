//! The routing table: the gateway's view of the cluster at one moment, and which deployments serve a model
//! name. A [`RoutingTable`] is immutable; every change publishes a new one. No sockets and no Kubernetes
//! client here; `objects` reads the kinds and `follow` watches them.

mod aliases;
mod complexity;
mod facts;
#[cfg(test)]
pub(crate) mod fixtures;
mod follow;
mod model_details;
mod objects;
mod rules;
mod scope;
mod target;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use russet_crds::{GroupEnergy, RouteTask, TargetPick, Zone};

use crate::request_defaults::RequestDefaults;
use crate::zones::ZoneLimit;
pub use aliases::Aliases;
pub(crate) use complexity::BYTES_PER_TOKEN;
pub use complexity::Complexity;
pub(crate) use facts::LABELS;
pub use facts::{FactsCaller, RequestFacts, RouteHeaders, task_name};
pub use follow::follow;
pub use model_details::{FetchState, ModelDetails, ModelHeaders};
pub use rules::{RoutePolicy, RouteTerms, TargetSelection, Targets, Verdict};
pub use scope::ModelScope;
pub use target::{PipelineTarget, Provider, Target, TargetName, deployments};

/// Tokens of a prompt of which nothing is known, and of an answer, for which the prices of targets are compared.
const TYPICAL_PROMPT: u64 = 3000;
const TYPICAL_ANSWER: u64 = 1000;

/// The state the gateway routes by.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingTable {
    /// Whether every kind was listed once; before that, an unknown name may belong to an object that was not listed yet.
    pub synced: bool,
    /// By namespace and name, `default` first.
    pub deployments: Vec<Deployment>,
    /// Names that ModelRoutes give to deployments and models of providers.
    pub aliases: Aliases,
    /// ModelProviders, by namespace and name.
    pub providers: Vec<Provider>,
    /// What the labels `russet.dev/zone` of namespaces say; none until they are listed, when nothing may leave.
    pub namespace_zones: Option<BTreeMap<String, String>>,
    /// What is known of Models, by namespace and name; empty until they are listed, which routing does not wait for.
    pub models: BTreeMap<(String, String), ModelDetails>,
    /// Power of ShardGroups, by `namespace/name`; none of one whose machines nobody knows. It is no part of an [`Endpoint`],
    /// which stays the same while it changes.
    pub group_energy: BTreeMap<Arc<str>, GroupEnergy>,
}

/// A ModelDeployment as the gateway sees it.
#[derive(Clone, Debug, PartialEq)]
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
    /// Its desired adapters: the Model of each, by name.
    pub adapters: BTreeMap<String, String>,
    /// What it sets where requests say nothing.
    pub defaults: RequestDefaults,
    /// How its weights are packed while they are loaded, such as `4bit`; empty where they stay as they are stored.
    pub load_quantization: &'static str,
    /// Bytes that its ready groups have reserved, on all nodes together.
    pub memory_bytes: u64,
    /// When it scales to zero; `None` where its demand does not decide that.
    pub idle_limits: Option<IdleLimits>,
    /// Whether waiting for it makes sense.
    pub state: DeploymentState,
    /// Groups that are ready.
    pub endpoints: Vec<Endpoint>,
}

/// How long a deployment that scales to zero stays without requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleLimits {
    /// After a request that does not say it.
    pub idle: Duration,
    /// The most that a request may say.
    pub max_idle: Duration,
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
    pub address: Arc<str>,
    /// Its node, which its certificate names.
    pub node: Arc<str>,
    /// `namespace/name` of the ShardGroup.
    pub group: Arc<str>,
    /// Name of the Model it runs, whose source is immutable.
    pub model: Arc<str>,
    /// The adapters it has: the Model of each, by name.
    pub adapters: BTreeMap<String, String>,
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
    /// Where its requests go: shared by all names of the route.
    pub policy: Arc<RoutePolicy>,
    /// How long answers are kept; `None`: none is.
    pub cache_ttl: Option<Duration>,
}

/// The result of resolving a model name.
#[derive(Debug, PartialEq)]
pub enum Resolved<'a> {
    /// These serve it, tried in order; never empty.
    Targets(Vec<Target<'a>>),
    /// A ModelRoute has the name, but none of the targets that it selects exists.
    Dangling(&'a ModelAlias, TargetSelection<'a>),
    /// Several namespaces have the name; these are its full names.
    Ambiguous(Vec<String>),
    /// The caller's key does not allow the name, whether it exists or not.
    Forbidden,
    /// Nothing has the name.
    Unknown,
}

/// What a name leads to for one request.
#[derive(Debug, PartialEq)]
pub struct Resolution<'a> {
    /// What it may go to, in the order in which that is tried, or why there is nothing.
    pub resolved: Resolved<'a>,
    /// The adapter that answers; it is empty where the model itself does.
    pub adapter: &'a str,
    /// The name of a ModelRoute that it leads through, and what that selects for the request.
    pub alias: Option<(&'a ModelAlias, TargetSelection<'a>)>,
}

impl Resolution<'_> {
    /// Which of the targets gets the request.
    pub fn pick(&self) -> TargetPick {
        self.alias.map_or(TargetPick::InOrder, |(_, selection)| selection.targets.pick)
    }
}

/// What a name belongs to.
enum NameOwner<'a> {
    /// A name of a ModelRoute.
    Route(&'a ModelAlias),
    /// A deployment, several of them, or nothing.
    Other(Resolved<'a>),
}

impl Deployment {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Endpoints that answer by this adapter, as it is desired; all of them where it is empty.
    pub fn endpoints_with(&self, adapter: &str) -> impl Iterator<Item = &Endpoint> {
        let desired = self.adapters.get(adapter);
        let has = move |endpoint: &&Endpoint| desired.is_none() || endpoint.adapters.get(adapter) == desired;
        self.endpoints.iter().filter(has)
    }
}

impl ModelAlias {
    fn is_exact(&self) -> bool {
        !self.pattern.contains('*')
    }

    /// Whether it has this name, alone or after its namespace.
    fn claims(&self, model: &str) -> bool {
        let qualified = model.split_once('/').filter(|(namespace, _)| *namespace == self.namespace);
        matches_pattern(&self.pattern, model)
            || qualified.is_some_and(|(_, name)| matches_pattern(&self.pattern, name))
    }

    /// Compares how specific two names are: exact ones, then those with more literal characters; of equal ones the
    /// first by its route, so that all gateways choose the same.
    fn specificity(&self, other: &Self) -> Ordering {
        let literals = |alias: &Self| alias.pattern.chars().filter(|&character| character != '*').count();
        let rank = |alias: &Self| (alias.is_exact(), literals(alias));
        rank(self).cmp(&rank(other)).then_with(|| other.route.cmp(&self.route))
    }
}

impl RoutingTable {
    /// Resolves `model` for a caller restricted to `scope`. Objects outside the scope do not exist for the caller.
    ///
    /// A name belongs to a namespace, and only ModelRoutes of that namespace lead it elsewhere: to the namespace that
    /// the name begins with; else to that of the deployment of this name; else to `default` if one of its ModelRoutes
    /// has the name; else to the only namespace whose ModelRoutes have it. In one namespace a name of a ModelRoute wins
    /// over a deployment's own name, and both win over a pattern; of patterns the most specific wins.
    pub fn resolve(&self, model: &str, scope: &ModelScope) -> Resolved<'_> {
        self.resolve_request(model, scope, None).resolved
    }

    /// The same with the adapter that answers; it is empty where the model itself does.
    ///
    /// `name:adapter` is an adapter of what `name` resolves to, unless a ModelRoute has all of it as a name. Of several
    /// targets those count that have the adapter.
    ///
    /// `name:latest` is `name`, unless something has all of it as a name: Ollama's clients add that tag.
    pub fn resolve_adapter(&self, model: &str, scope: &ModelScope) -> (Resolved<'_>, &str) {
        let Resolution { resolved, adapter, .. } = self.resolve_request(model, scope, None);
        (resolved, adapter)
    }

    /// The same for a request of which this is known; without it, no rule of a ModelRoute matches.
    ///
    /// `name:task` is `name` where that is a name of a ModelRoute with rules.
    pub fn resolve_request(
        &self,
        model: &str,
        scope: &ModelScope,
        facts: Option<&RequestFacts>,
    ) -> Resolution<'_> {
        let (model, _) = self.plain_name(model, scope);
        if !scope.allows(model) {
            return Resolution { resolved: Resolved::Forbidden, adapter: "", alias: None };
        }
        let (resolved, adapter, alias) = match self.adapted(model, scope, facts) {
            Some((found, adapter, alias)) => {
                (Resolved::Targets(found.into_iter().map(Target::Deployment).collect()), adapter, alias)
            }
            None => {
                let (resolved, alias) = self.owned(self.owner(model, scope), facts);
                (resolved, "", alias)
            }
        };
        let alias = alias.map(|alias| (alias, alias.policy.select(facts)));
        Resolution { resolved, adapter, alias }
    }

    /// The task that the name of a model ends in, if it does.
    pub fn named_task(&self, model: &str, scope: &ModelScope) -> Option<RouteTask> {
        self.plain_name(model, scope).1
    }

    /// Where the ModelRoute that has this name sends its requests.
    pub fn policy(&self, model: &str, scope: &ModelScope) -> Option<&RoutePolicy> {
        if self.aliases.is_empty() {
            return None;
        }
        self.matching_alias(model, scope).map(|alias| &*alias.policy)
    }

    /// The name without what only says which of a route's targets is meant, and the task that it named.
    fn plain_name<'m>(&self, model: &'m str, scope: &ModelScope) -> (&'m str, Option<RouteTask>) {
        let model = self.untagged(model, scope);
        let named = || {
            let (name, suffix) = model.rsplit_once(':')?;
            let task = facts::task_of(suffix)?;
            let is_other = matches!(self.owner(model, scope), NameOwner::Route(alias) if alias.is_exact())
                || self.adapted(model, scope, None).is_some();
            let NameOwner::Route(alias) = self.owner(name, scope) else { return None };
            (alias.policy.has_rules() && !is_other).then_some((name, Some(task)))
        };
        named().unwrap_or((model, None))
    }

    /// The name without the tag that a name without one implies in Ollama, where that leads to something and nothing has
    /// all of it as a name. It comes before a pattern that the whole name matches.
    fn untagged<'m>(&self, model: &'m str, scope: &ModelScope) -> &'m str {
        let Some(name) = model.strip_suffix(IMPLIED_TAG) else { return model };
        let is_route = matches!(self.owner(model, scope), NameOwner::Route(alias) if alias.is_exact());
        let leads_somewhere = self.adapted(name, scope, None).is_some()
            || !matches!(self.owner(name, scope), NameOwner::Other(Resolved::Unknown));
        if is_route || self.adapted(model, scope, None).is_some() || !leads_somewhere { model } else { name }
    }

    /// The deployments with the adapter that `name:adapter` asks for, and the name of a ModelRoute that `name` leads through.
    fn adapted(
        &self,
        model: &str,
        scope: &ModelScope,
        facts: Option<&RequestFacts>,
    ) -> Option<(Vec<&Deployment>, &str, Option<&ModelAlias>)> {
        let (name, adapter) = model.rsplit_once(':')?;
        if let NameOwner::Route(alias) = self.owner(model, scope)
            && alias.pattern == model
        {
            return None;
        }
        let (Resolved::Targets(found), alias) = self.owned(self.owner(name, scope), facts) else {
            return None;
        };
        let mut found = deployments(&found);
        found.retain(|deployment| deployment.adapters.contains_key(adapter));
        let (adapter, _) = found.first()?.adapters.get_key_value(adapter)?;
        Some((found, adapter, alias))
    }

    fn owned<'a>(
        &'a self,
        owner: NameOwner<'a>,
        facts: Option<&RequestFacts>,
    ) -> (Resolved<'a>, Option<&'a ModelAlias>) {
        match owner {
            NameOwner::Route(alias) => (self.targets(alias, facts), Some(alias)),
            NameOwner::Other(resolved) => (resolved, None),
        }
    }

    /// The alias of a ModelRoute that `model` resolves through, if any.
    pub fn matching_alias(&self, model: &str, scope: &ModelScope) -> Option<&ModelAlias> {
        let (model, _) = self.plain_name(model, scope);
        if let Some((_, _, alias)) = self.adapted(model, scope, None) {
            return alias;
        }
        match self.owner(model, scope) {
            NameOwner::Route(alias) => Some(alias),
            NameOwner::Other(_) => None,
        }
    }

    fn owner(&self, model: &str, scope: &ModelScope) -> NameOwner<'_> {
        let mut claims = self.aliases.claiming(model);
        claims.retain(|alias| scope.sees_namespace(&alias.namespace));
        let own = self.by_own_name(model, scope);
        if let Resolved::Targets(found) = &own {
            let route = found.first().and_then(|owner| owner.deployment()).and_then(|owner| {
                claims.iter().find(|one| one.namespace == owner.namespace && one.pattern == model)
            });
            return route.map_or(NameOwner::Other(own), |route| NameOwner::Route(route));
        }
        if matches!(own, Resolved::Ambiguous(_)) {
            return NameOwner::Other(own);
        }
        let namespaces: BTreeSet<&str> = claims.iter().map(|alias| alias.namespace.as_str()).collect();
        let prefix = model.split_once('/').map(|(namespace, _)| namespace);
        let owners = [prefix, Some(DEFAULT_NAMESPACE)].into_iter().flatten();
        let owner = owners.into_iter().find(|one| namespaces.contains(one));
        let best = match (owner, namespaces.len()) {
            (Some(owner), _) => {
                claims.iter().filter(|one| one.namespace == owner).max_by(|a, b| a.specificity(b))
            }
            (None, 0 | 1) => claims.iter().max_by(|a, b| a.specificity(b)),
            (None, _) => {
                let names = namespaces.iter().map(|namespace| format!("{namespace}/{model}")).collect();
                return NameOwner::Other(Resolved::Ambiguous(names));
            }
        };
        best.map_or(NameOwner::Other(Resolved::Unknown), |route| NameOwner::Route(route))
    }

    /// The deployment with this own name.
    fn by_own_name(&self, model: &str, scope: &ModelScope) -> Resolved<'_> {
        let deployments = || self.deployments.iter().filter(|one| scope.sees_namespace(&one.namespace));
        if let Some(full) = deployments().find(|deployment| {
            model.split_once('/') == Some((deployment.namespace.as_str(), deployment.name.as_str()))
        }) {
            return Resolved::Targets(vec![Target::Deployment(full)]);
        }
        let same: Vec<&Deployment> = deployments().filter(|deployment| deployment.name == model).collect();
        match same.as_slice() {
            [] => Resolved::Unknown,
            [only] => Resolved::Targets(vec![Target::Deployment(only)]),
            [first, ..] if first.namespace == DEFAULT_NAMESPACE => {
                Resolved::Targets(vec![Target::Deployment(first)])
            }
            several => Resolved::Ambiguous(several.iter().map(|one| one.full_name()).collect()),
        }
    }

    fn targets<'a>(&'a self, alias: &'a ModelAlias, facts: Option<&RequestFacts>) -> Resolved<'a> {
        let selection = alias.policy.select(facts);
        let find = |target: &'a TargetName| match target {
            TargetName::Deployment(name) => {
                let mut deployments = self.deployments.iter();
                let is_named = |one: &&Deployment| one.namespace == alias.namespace && one.name == *name;
                deployments.find(is_named).map(Target::Deployment)
            }
            TargetName::Provider { provider, model } => {
                let mut providers = self.providers.iter();
                let is_named = |one: &&Provider| one.namespace == alias.namespace && one.name == *provider;
                providers.find(is_named).map(|provider| Target::Provider(provider, model))
            }
            TargetName::Pipeline { pipeline, parameter } => {
                let namespace = &alias.namespace;
                Some(Target::Pipeline(PipelineTarget { namespace, name: pipeline, parameter }))
            }
        };
        let mut found: Vec<Target<'_>> = selection.in_order().filter_map(find).collect();
        // Of equal ones the first.
        match selection.targets.pick {
            TargetPick::Largest => {
                // What a provider's models have nobody knows.
                let parameters = |target: &Target<'_>| target.deployment().map(|one| self.parameters(one));
                found.sort_by_key(|target| std::cmp::Reverse(parameters(target)));
            }
            TargetPick::Cheapest => {
                let prompt = facts.map_or(TYPICAL_PROMPT, |facts| facts.prompt_tokens);
                found.sort_by_key(|target| target.cost(prompt, TYPICAL_ANSWER));
            }
            TargetPick::InOrder | TargetPick::Fastest | TargetPick::Unknown => {}
        }
        if found.is_empty() { Resolved::Dangling(alias, selection) } else { Resolved::Targets(found) }
    }

    /// How far from home a request through this name may be answered: as the route, its rule, the namespaces of route and
    /// key, the key and the request itself say. Of a request of which nothing is known it is the strictest.
    pub fn zone_limit(
        &self,
        alias: &ModelAlias,
        selection: &TargetSelection<'_>,
        facts: Option<&RequestFacts>,
    ) -> ZoneLimit {
        let Some(facts) = facts else {
            let by = "the gateway, which knows no labels of the request,";
            return ZoneLimit::of_route(Zone::Local, by.to_owned());
        };
        let ModelAlias { route, namespace, policy, .. } = alias;
        let by_rule =
            selection.terms.zone.zip(selection.rule).map(|(zone, rule)| {
                ZoneLimit::of_route(zone, format!("the rule {rule} of ModelRoute {route}"))
            });
        ZoneLimit::of_route(policy.zone, format!("spec.zone of ModelRoute {route}"))
            .narrowed(by_rule)
            .narrowed(self.namespace_limit(namespace))
            .narrowed(facts.key_namespace.as_deref().and_then(|namespace| self.namespace_limit(namespace)))
            .narrowed(facts.zone.clone())
    }

    /// What a namespace says of that, if it says anything.
    pub(crate) fn namespace_limit(&self, namespace: &str) -> Option<ZoneLimit> {
        let Some(zones) = &self.namespace_zones else {
            let by = "the gateway, which has not read the namespaces' labels yet,";
            return Some(ZoneLimit::of_route(Zone::Local, by.to_owned()));
        };
        zones.get(namespace).map(|zone| ZoneLimit::of_label(zone, &format!("the namespace {namespace}")))
    }

    /// Parameters of a deployment's model; 0 until its headers are read.
    fn parameters(&self, deployment: &Deployment) -> u64 {
        let model = self.models.get(&(deployment.namespace.clone(), deployment.model.clone()));
        model.and_then(|model| Some(model.headers.as_ref()?.parameters)).unwrap_or(0)
    }

    /// All model names that a caller may request, each with its deployments: for each deployment the shortest
    /// name that resolves to it, and the names of ModelRoutes that are not patterns, without deployments where they lead to
    /// providers alone; behind each those of its adapters.
    pub fn models(&self, scope: &ModelScope) -> Vec<(String, Vec<&Deployment>)> {
        let mut models: Vec<(String, Vec<&Deployment>)> = Vec::new();
        let mut listed = BTreeSet::new();
        for deployment in self.deployments.iter().filter(|one| scope.sees_namespace(&one.namespace)) {
            let adapters = deployment.adapters.keys().map(String::as_str);
            for adapter in std::iter::once("").chain(adapters) {
                let resolves_here = |id: &String| match self.resolve_adapter(id, scope) {
                    (Resolved::Targets(found), by) => {
                        found == [Target::Deployment(deployment)] && by == adapter
                    }
                    _ => false,
                };
                let ids =
                    [deployment.name.clone(), deployment.full_name()].map(|id| with_adapter(id, adapter));
                if let Some(id) = ids.into_iter().find(resolves_here) {
                    listed.insert(id.clone());
                    models.push((id, vec![deployment]));
                }
            }
        }
        for alias in self.aliases.iter().filter(|alias| alias.is_exact()) {
            let leads_here =
                |id: &String| self.matching_alias(id, scope).is_some_and(|found| std::ptr::eq(found, alias));
            let ids = [alias.pattern.clone(), format!("{}/{}", alias.namespace, alias.pattern)];
            let Some(id) = ids.into_iter().find(leads_here) else { continue };
            let Resolved::Targets(targets) = self.targets(alias, None) else { continue };
            let adapters: BTreeSet<&str> = deployments(&targets)
                .into_iter()
                .flat_map(|target| target.adapters.keys().map(String::as_str))
                .collect();
            for adapter in std::iter::once("").chain(adapters) {
                let id = with_adapter(id.clone(), adapter);
                if let (Resolved::Targets(found), by) = self.resolve_adapter(&id, scope)
                    && by == adapter
                    && listed.insert(id.clone())
                {
                    models.push((id, deployments(&found)));
                }
            }
        }
        models
    }
}

/// The name of an adapter of a model; the model's own where there is none.
fn with_adapter(model: String, adapter: &str) -> String {
    if adapter.is_empty() { model } else { format!("{model}:{adapter}") }
}

/// The tag that every name without one has in Ollama.
const IMPLIED_TAG: &str = ":latest";

/// The name without the tag that every name has in Ollama.
pub(crate) fn untagged(model: &str) -> &str {
    model.strip_suffix(IMPLIED_TAG).unwrap_or(model)
}

/// The namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Whether `pattern`, in which `*` matches any run of characters, matches all of `text`.
pub(crate) fn matches_pattern(pattern: &str, text: &str) -> bool {
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
    use super::fixtures::deployment;
    use super::*;

    fn alias(pattern: &str, route: &str, targets: &[&str]) -> ModelAlias {
        ModelAlias {
            pattern: pattern.into(),
            route: format!("default/{route}"),
            namespace: "default".into(),
            policy: Arc::new(RoutePolicy::to(targets.iter().copied())),
            cache_ttl: None,
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
            models: BTreeMap::new(),
            providers: Vec::new(),
            namespace_zones: None,
            group_energy: BTreeMap::new(),
            aliases: Aliases::from(vec![
                alias("gpt-4o", "usual", &["gone", "large", "small"]),
                alias("meta-llama/*", "llama", &["large"]),
                alias("meta-llama/*-1B", "tiny", &["small"]),
                alias("small", "shadow", &["large"]),
                alias("empty", "empty", &["gone"]),
            ]),
        }
    }

    #[test]
    fn a_name_leads_to_the_deployments_it_says() {
        let table = table();
        let found = |model: &str| match table.resolve(model, &ModelScope::ALL) {
            Resolved::Targets(found) => found.iter().map(|one| one.full_name()).collect(),
            Resolved::Dangling(alias, _) => vec![format!("dangling {}", alias.route)],
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
    fn an_adapter_is_named_behind_its_model() {
        let mut table = table();
        let adapters =
            |names: &[&str]| names.iter().map(|name| ((*name).into(), format!("m-{name}"))).collect();
        table.deployments[2].adapters = adapters(&["clerk", "pirate"]);
        table.deployments[4].adapters = adapters(&["pirate"]);
        table.aliases = table.aliases.into_iter().chain([alias("large:clerk", "own", &["twin"])]).collect();
        let found = |model: &str, scope: &ModelScope| match table.resolve_adapter(model, scope) {
            (Resolved::Targets(found), adapter) => format!("{} {adapter}", found[0].full_name()),
            (Resolved::Forbidden, _) => "forbidden".to_owned(),
            (other, _) => format!("{other:?}"),
        };
        for (model, expected) in [
            ("large:pirate", "default/large pirate"),
            ("default/large:pirate", "default/large pirate"),
            ("lab/twin:pirate", "lab/twin pirate"),
            // A ModelRoute has the whole of it as a name.
            ("large:clerk", "default/twin "),
            ("default/large:clerk", "default/large clerk"),
            // Of the targets of a ModelRoute the one that has it.
            ("gpt-4o:pirate", "default/large pirate"),
            ("meta-llama/Llama-3-8B:pirate", "default/large pirate"),
            // A pattern takes what is no adapter, as it takes anything.
            ("meta-llama/Llama-3-8B:x", "default/large "),
            ("large:x", "Unknown"),
            ("twin:pirate", "Unknown"),
            ("large:", "Unknown"),
            (":pirate", "Unknown"),
        ] {
            assert_eq!(found(model, &ModelScope::ALL), expected, "{model}");
        }
        let only = |pattern: &str| ModelScope::new("default", &[pattern.to_owned()]);
        assert_eq!(found("large:pirate", &only("large:*")), "default/large pirate");
        assert_eq!(found("large:pirate", &only("large")), "forbidden");
        let names = |scope: &ModelScope| -> Vec<String> {
            table.models(scope).into_iter().map(|(id, _)| id).filter(|id| id.contains(':')).collect()
        };
        assert_eq!(names(&only("large:*")), ["large:pirate", "large:clerk"]);
        assert!(names(&ModelScope::ALL).contains(&"lab/twin:pirate".to_owned()));
        assert!(names(&ModelScope::ALL).contains(&"gpt-4o:pirate".to_owned()));
        for (id, found) in table.models(&ModelScope::ALL) {
            assert_eq!(
                table.resolve(&id, &ModelScope::ALL),
                Resolved::Targets(found.into_iter().map(Target::Deployment).collect()),
                "{id}"
            );
        }
    }

    #[test]
    fn the_tag_latest_is_implied_unless_it_is_a_name() {
        let mut table = table();
        let more = [alias("large:latest", "exact", &["twin"]), alias("*", "rest", &["small"])];
        table.aliases = table.aliases.into_iter().chain(more).collect();
        table.deployments[1].adapters.insert("latest".into(), "m".into());
        table.deployments[2].adapters.insert("pirate".into(), "m".into());
        let found = |model: &str, scope: &ModelScope| match table.resolve_adapter(model, scope) {
            (Resolved::Targets(found), adapter) => format!("{} {adapter}", found[0].full_name()),
            (other, _) => format!("{other:?}"),
        };
        for (model, expected) in [
            ("gpt-4o:latest", "default/large "),
            ("default/large:latest", "default/twin "),
            ("large:latest", "default/twin "),
            ("twin:latest", "default/twin latest"),
            ("twin:latest:latest", "default/twin latest"),
            ("large:pirate:latest", "default/large pirate"),
            ("lab/twin:latest", "lab/twin "),
            // Only the pattern has it.
            ("nix:latest", "default/small "),
        ] {
            assert_eq!(found(model, &ModelScope::ALL), expected, "{model}");
        }
        table.aliases = Aliases::default();
        let found = |model: &str, scope: &ModelScope| table.resolve(model, scope);
        assert_eq!(found("nix:latest", &ModelScope::ALL), Resolved::Unknown);
        let only = |pattern: &str| ModelScope::new("default", &[pattern.to_owned()]);
        assert!(matches!(found("large:latest", &only("large")), Resolved::Targets(_)));
        assert_eq!(found("large:latest", &only("twin")), Resolved::Forbidden);
        // A key for the model is none for its adapter of that name.
        assert_eq!(found("twin:latest", &only("twin")), Resolved::Forbidden);
    }

    #[test]
    fn a_route_never_takes_a_name_of_another_namespace() {
        let of = |namespace: &str, pattern: &str, target: &str| ModelAlias {
            route: format!("{namespace}/r-{pattern}"),
            namespace: namespace.into(),
            ..alias(pattern, "r", &[target])
        };
        let table = RoutingTable {
            synced: true,
            models: BTreeMap::new(),
            providers: Vec::new(),
            namespace_zones: None,
            group_energy: BTreeMap::new(),
            deployments: vec![
                deployment("default", "smoke"),
                deployment("evil", "trap"),
                deployment("lab", "twin"),
                deployment("office", "twin"),
                deployment("office", "mail"),
            ],
            aliases: Aliases::from(vec![
                of("default", "best", "smoke"),
                of("default", "house-*", "smoke"),
                of("evil", "*", "trap"),
                of("evil", "best", "trap"),
                of("evil", "default/smoke", "trap"),
                of("evil", "gpt-4o", "trap"),
                of("evil", "house-1", "trap"),
                of("evil", "lab/gpt-4o", "trap"),
                of("evil", "mail", "trap"),
                of("evil", "only", "trap"),
                of("evil", "smoke", "trap"),
                of("evil", "twin", "trap"),
                of("lab", "gpt-*", "twin"),
                of("lab", "gpt-4o", "twin"),
                of("office", "mail", "twin"),
            ]),
        };
        for (model, expected) in [
            ("smoke", "default/smoke"),
            ("default/smoke", "default/smoke"),
            ("best", "default/smoke"),
            ("default/best", "default/smoke"),
            ("house-1", "default/smoke"),
            ("twin", "lab/twin or office/twin"),
            ("mail", "office/twin"),
            ("office/mail", "office/mail"),
            ("gpt-4o", "evil/gpt-4o or lab/gpt-4o"),
            ("gpt-5", "evil/gpt-5 or lab/gpt-5"),
            ("lab/gpt-4o", "lab/twin"),
            ("lab/gpt-5", "lab/twin"),
            ("evil/gpt-4o", "evil/trap"),
            ("only", "evil/trap"),
        ] {
            let found = match table.resolve(model, &ModelScope::ALL) {
                Resolved::Targets(found) => found[0].full_name(),
                Resolved::Ambiguous(names) => names.join(" or "),
                other => format!("{other:?}"),
            };
            assert_eq!(found, expected, "{model}");
        }
        for (id, found) in table.models(&ModelScope::ALL) {
            assert_eq!(
                table.resolve(&id, &ModelScope::ALL),
                Resolved::Targets(found.into_iter().map(Target::Deployment).collect()),
                "{id}"
            );
        }
        let lab = ModelScope::new("lab", &[]);
        assert!(
            matches!(table.resolve("gpt-4o", &lab), Resolved::Targets(found) if found[0].full_name() == "lab/twin")
        );
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
            assert!(matches!(table.resolve(&id, &ModelScope::ALL), Resolved::Targets(_)), "{id}");
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
                Resolved::Targets(found) => found[0].full_name(),
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
