//! Builds a [`RoutingTable`] from the objects. Pure and infallible: objects that are not ready or contradict
//! themselves are left out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    Adapter, Autoscaling, KvCapacity, Model, ModelDeployment, ModelProvider, ModelRoute, PowerSource,
    ShardGroup, WeightQuantization, names,
};

use crate::request_defaults::RequestDefaults;
use crate::strip_patterns::StripPatterns;

use super::{
    Aliases, DEFAULT_NAMESPACE, Deployment, DeploymentState, Endpoint, IdleLimits, ModelAlias, ModelDetails,
    Provider, RoutePolicy, RoutingTable,
};

impl RoutingTable {
    /// The routing table of these objects.
    pub fn from_objects<'a>(
        deployments: impl IntoIterator<Item = &'a ModelDeployment>,
        groups: impl IntoIterator<Item = &'a ShardGroup>,
        routes: impl IntoIterator<Item = &'a ModelRoute>,
    ) -> Self {
        let mut endpoints: BTreeMap<(String, String), Vec<Endpoint>> = BTreeMap::new();
        // The context length a group was planned with counts: the model's own limit may be below the
        // deployment's request.
        let mut planned: BTreeMap<(String, String), u32> = BTreeMap::new();
        let mut memory: BTreeMap<(String, String), u64> = BTreeMap::new();
        let mut group_energy = BTreeMap::new();
        for group in groups {
            let key = (group.namespace().unwrap_or_default(), group.spec.deployment_ref.name.clone());
            let tokens = planned.entry(key.clone()).or_insert(u32::MAX);
            *tokens = (*tokens).min(group.spec.plan.context_tokens);
            if let Some(endpoint) = endpoint(group) {
                let energy = group.status.as_ref().and_then(|status| status.energy);
                let known = energy.filter(|energy| energy.source != PowerSource::Unknown);
                group_energy.extend(known.map(|energy| (endpoint.group.clone(), energy)));
                let reserved = group.spec.plan.members.iter().map(|member| member.reserved_bytes());
                let bytes = memory.entry(key.clone()).or_default();
                *bytes = reserved.fold(*bytes, u64::saturating_add);
                endpoints.entry(key).or_default().push(endpoint);
            }
        }
        let mut deployments: Vec<Deployment> = deployments
            .into_iter()
            .filter(|object| object.metadata.deletion_timestamp.is_none())
            .map(|object| {
                let namespace = object.namespace().unwrap_or_default();
                let name = object.name_any();
                let key = (namespace.clone(), name.clone());
                let endpoints = endpoints.remove(&key).unwrap_or_default();
                // The values of a ShardingStrategy are known once a group was planned with it.
                let from_spec = object.spec.sharding.as_ref().map(|sharding| sharding.kv.context_tokens);
                let requested = from_spec.unwrap_or(KvCapacity::default().context_tokens);
                let context_tokens = planned.get(&key).copied();
                Deployment {
                    state: state(object),
                    created: object.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
                    context_tokens: context_tokens.unwrap_or(requested),
                    model: object.spec.model_ref.name.clone(),
                    adapters: adapters(&object.spec.adapters),
                    defaults: defaults(object),
                    load_quantization: load_quantization(object.spec.engine.options.quantization),
                    memory_bytes: memory.get(&key).copied().unwrap_or(0),
                    idle_limits: object.spec.autoscaling.as_ref().and_then(idle_limits),
                    namespace,
                    name,
                    endpoints,
                }
            })
            .collect();
        deployments.sort_by_cached_key(|one| {
            (one.namespace != DEFAULT_NAMESPACE, one.namespace.clone(), one.name.clone())
        });
        let mut aliases: Vec<ModelAlias> = routes
            .into_iter()
            .filter(|object| object.metadata.deletion_timestamp.is_none())
            .flat_map(|object| {
                let namespace = object.namespace().unwrap_or_default();
                let route = format!("{namespace}/{}", object.name_any());
                let policy = Arc::new(RoutePolicy::new(&object.spec));
                let seconds = object.spec.cache.as_ref().map(|cache| cache.ttl_seconds);
                let cache_ttl = seconds.map(|seconds| Duration::from_secs(seconds.into()));
                object.spec.models.iter().map(move |pattern| ModelAlias {
                    pattern: pattern.clone(),
                    route: route.clone(),
                    namespace: namespace.clone(),
                    policy: policy.clone(),
                    cache_ttl,
                })
            })
            .collect();
        aliases.sort_by_cached_key(|alias| {
            (alias.namespace != DEFAULT_NAMESPACE, alias.route.clone(), alias.pattern.clone())
        });
        Self { synced: true, deployments, group_energy, aliases: Aliases::from(aliases), ..Self::default() }
    }

    /// The same with what is known of these Models.
    #[must_use]
    pub fn with_models<'a>(self, models: impl IntoIterator<Item = &'a Model>) -> Self {
        let details = |model: &Model| {
            ((model.namespace().unwrap_or_default(), model.name_any()), ModelDetails::of(model))
        };
        Self { models: models.into_iter().map(details).collect(), ..self }
    }

    /// The same with these ModelProviders.
    #[must_use]
    pub fn with_providers<'a>(self, providers: impl IntoIterator<Item = &'a ModelProvider>) -> Self {
        let there = providers.into_iter().filter(|object| object.metadata.deletion_timestamp.is_none());
        let provider = |object: &ModelProvider| Provider {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
            spec: object.spec.clone(),
            generation: object.metadata.generation,
            status: object.status.clone().unwrap_or_default(),
        };
        let mut providers: Vec<Provider> = there.map(provider).collect();
        providers.sort_by_cached_key(|one| (one.namespace.clone(), one.name.clone()));
        Self { providers, ..self }
    }

    /// The same with what the labels of these Namespaces say.
    #[must_use]
    pub fn with_namespaces<'a>(self, namespaces: impl IntoIterator<Item = &'a Namespace>) -> Self {
        let zone = |object: &Namespace| {
            Some((object.name_any(), object.labels().get(names::LABEL_REQUEST_ZONE)?.clone()))
        };
        Self { namespace_zones: Some(namespaces.into_iter().filter_map(zone).collect()), ..self }
    }
}

/// What a deployment sets; its operator has put its own values and those of its model together.
fn defaults(object: &ModelDeployment) -> RequestDefaults {
    let status = object.status.as_ref();
    RequestDefaults {
        sampling: status.and_then(|status| status.generation_config).unwrap_or_default(),
        template_arguments: object.spec.engine.chat_template_arguments.clone().unwrap_or_default(),
        strip_patterns: StripPatterns::new(&object.spec.engine.strip_patterns),
    }
}

/// When a deployment with this autoscaling scales to zero.
fn idle_limits(autoscaling: &Autoscaling) -> Option<IdleLimits> {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    (autoscaling.min_replicas == 0).then(|| IdleLimits {
        idle: seconds(autoscaling.idle_seconds),
        max_idle: seconds(autoscaling.max_idle_seconds.unwrap_or(autoscaling.idle_seconds)),
    })
}

/// As [`ModelDetails::quantization`] writes it; empty where weights stay as they are stored.
fn load_quantization(quantization: WeightQuantization) -> &'static str {
    match quantization {
        WeightQuantization::Int8 => "8bit",
        WeightQuantization::Int4 => "4bit",
        WeightQuantization::AsStored | WeightQuantization::Unknown => "",
    }
}

/// The Model of each adapter, by name.
fn adapters(adapters: &[Adapter]) -> BTreeMap<String, String> {
    adapters.iter().map(|adapter| (adapter.name.clone(), adapter.model_ref.name.clone())).collect()
}

/// The endpoint of the group; `None` while it is not ready or is being re-formed.
fn endpoint(group: &ShardGroup) -> Option<Endpoint> {
    let status = group.status.as_ref()?;
    let endpoint = status.endpoint.as_ref()?;
    let current = status.served_epoch.is_none_or(|served| served == group.spec.epoch);
    let serves = group.metadata.deletion_timestamp.is_none()
        && conditions::is_true(&status.conditions, Type::Ready)
        && current;
    serves.then(|| Endpoint {
        address: endpoint.address.as_str().into(),
        node: endpoint.node_name.as_str().into(),
        group: format!("{}/{}", group.namespace().unwrap_or_default(), group.name_any()).into(),
        model: group.spec.model_ref.name.as_str().into(),
        adapters: adapters(&group.spec.plan.adapters),
        epoch: group.spec.epoch,
    })
}

fn state(deployment: &ModelDeployment) -> DeploymentState {
    if deployment.spec.replicas == 0 {
        if deployment.spec.autoscaling.as_ref().is_some_and(|autoscaling| autoscaling.min_replicas == 0) {
            return DeploymentState::Working(
                "it is scaled to zero, because it had no requests; the next request starts a replica".into(),
            );
        }
        return DeploymentState::Halted("it is stopped: spec.replicas is 0; scale it to 1 or more".into());
    }
    let conditions =
        deployment.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let message_of = |kind| conditions::message(conditions, kind).map(str::to_owned);
    // A deployment that is idle on purpose is Ready, with the reason.
    let is_idle = |reason: Reason| {
        conditions::get(conditions, Type::Ready).is_some_and(|ready| ready.reason == format!("{reason:?}"))
    };
    if is_idle(Reason::Idle) {
        DeploymentState::Working(
            message_of(Type::Ready)
                .unwrap_or_else(|| "it is scaled to zero; the next request starts a replica".into()),
        )
    } else if is_idle(Reason::OutsideSchedule) {
        DeploymentState::Halted(
            message_of(Type::Ready).unwrap_or_else(|| "it is outside the schedules of its tier".into()),
        )
    } else if conditions::is_true(conditions, Type::Ready) {
        DeploymentState::Ready
    } else if conditions::is_true(conditions, Type::Stalled) {
        DeploymentState::Halted(stalled_message(conditions))
    } else {
        DeploymentState::Working(message_of(Type::Ready).unwrap_or_else(|| "it is being set up".into()))
    }
}

/// Why an object is stalled.
pub(super) fn stalled_message(conditions: &[Condition]) -> String {
    let message = conditions::message(conditions, Type::Ready)
        .or_else(|| conditions::message(conditions, Type::Stalled));
    message.unwrap_or("its controller is stalled and gives no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use russet_crds::{
        Endpoint as CrdEndpoint, LocalReference, ModelDeploymentSpec, ModelDeploymentStatus, ModelRouteSpec,
        RouteTarget, ShardGroupSpec, ShardGroupStatus,
    };

    use super::*;
    use crate::routes::TargetName;

    fn condition(kind: Type, status: bool, message: &str) -> Vec<Condition> {
        let mut conditions = Vec::new();
        let at = "2026-01-01T00:00:00Z".parse().unwrap();
        conditions::set(&mut conditions, kind, status, Reason::InProgress, message, None, at);
        conditions
    }

    fn deployment(name: &str, replicas: i32, conditions: Vec<Condition>) -> ModelDeployment {
        let mut object = ModelDeployment::new(name, ModelDeploymentSpec { replicas, ..Default::default() });
        object.metadata.namespace = Some("default".into());
        object.status = Some(ModelDeploymentStatus { conditions, ..Default::default() });
        object
    }

    fn group(name: &str, deployment: &str, epoch: i64, served: Option<i64>, ready: bool) -> ShardGroup {
        let mut object = ShardGroup::new(
            name,
            ShardGroupSpec { deployment_ref: LocalReference::new(deployment), epoch, ..Default::default() },
        );
        object.metadata.namespace = Some("default".into());
        object.status = Some(ShardGroupStatus {
            served_epoch: served,
            endpoint: Some(CrdEndpoint { address: format!("10.0.0.1:{epoch}"), node_name: "a".into() }),
            conditions: condition(Type::Ready, ready, ""),
            ..Default::default()
        });
        object
    }

    #[test]
    fn only_groups_that_serve_their_own_epoch_are_endpoints() {
        for (served, ready, expected) in
            [(Some(2), true, 1), (Some(1), true, 0), (None, true, 1), (Some(2), false, 0)]
        {
            let deployments = [deployment("chat", 1, condition(Type::Ready, true, ""))];
            let groups = [group("chat-0-x", "chat", 2, served, ready), group("other", "gone", 2, None, true)];
            let table = RoutingTable::from_objects(&deployments, &groups, &[]);
            assert_eq!(table.deployments[0].endpoints.len(), expected, "{served:?} {ready}");
            assert_eq!(table.deployments.len(), 1);
        }
        let mut deleted = group("chat-0-x", "chat", 2, Some(2), true);
        deleted.metadata.deletion_timestamp =
            Some(serde_json::from_value(serde_json::json!("2026-01-01T00:00:00Z")).unwrap());
        let deployments = [deployment("chat", 1, vec![])];
        assert!(
            RoutingTable::from_objects(&deployments, &[deleted], &[]).deployments[0].endpoints.is_empty()
        );
    }

    #[test]
    fn the_context_is_what_the_groups_were_planned_with() {
        let deployments = [deployment("chat", 1, vec![])];
        let requested = KvCapacity::default().context_tokens;
        assert_eq!(
            RoutingTable::from_objects(&deployments, &[], &[]).deployments[0].context_tokens,
            requested
        );
        let mut smaller = group("chat-0-x", "chat", 1, Some(1), true);
        smaller.spec.plan.context_tokens = 2048;
        let table = RoutingTable::from_objects(&deployments, &[smaller], &[]);
        assert_eq!(table.deployments[0].context_tokens, 2048);
    }

    #[test]
    fn ready_groups_add_up_to_what_a_deployment_has_reserved() {
        let deployments = [deployment("chat", 1, vec![])];
        let member = |weight_bytes| russet_crds::GroupMember {
            weight_bytes,
            kv_bytes: 10,
            overhead_bytes: 1,
            ..Default::default()
        };
        let groups = [true, true, false].map(|ready| {
            let mut group = group("chat-0-x", "chat", 1, Some(1), ready);
            group.spec.plan.members = vec![member(100), member(200)];
            group
        });
        let table = RoutingTable::from_objects(&deployments, &groups, &[]);
        assert_eq!(table.deployments[0].memory_bytes, 2 * 322);
    }

    #[test]
    fn unready_deployment_says_why_and_whether_to_wait() {
        let stalled =
            [condition(Type::Stalled, true, "s"), condition(Type::Ready, false, "needs 9 GiB")].concat();
        for (replicas, conditions, expected) in [
            (1, condition(Type::Ready, true, "fine"), DeploymentState::Ready),
            (
                1,
                condition(Type::Ready, false, "copying 3 of 9 GiB"),
                DeploymentState::Working("copying 3 of 9 GiB".into()),
            ),
            (1, vec![], DeploymentState::Working("it is being set up".into())),
            (1, stalled, DeploymentState::Halted("needs 9 GiB".into())),
            (1, condition(Type::Stalled, true, "s"), DeploymentState::Halted("s".into())),
        ] {
            assert_eq!(state(&deployment("chat", replicas, conditions)), expected);
        }
        let idle = |reason| {
            let mut conditions = Vec::new();
            let at = "2026-01-01T00:00:00Z".parse().unwrap();
            conditions::set(&mut conditions, Type::Ready, true, reason, "idle", None, at);
            state(&deployment("chat", 1, conditions))
        };
        assert_eq!(idle(Reason::Idle), DeploymentState::Working("idle".into()), "a request starts a replica");
        assert_eq!(idle(Reason::OutsideSchedule), DeploymentState::Halted("idle".into()), "no request does");
        let stopped = deployment("chat", 0, condition(Type::Ready, true, ""));
        assert!(matches!(state(&stopped), DeploymentState::Halted(_)));
        // A deployment without demand scales to zero where that is allowed, and a held request starts a replica.
        for (min_replicas, waits) in [(0, true), (1, false)] {
            let mut idle = stopped.clone();
            idle.spec.autoscaling = Some(Autoscaling { min_replicas, ..Autoscaling::default() });
            assert_eq!(matches!(state(&idle), DeploymentState::Working(_)), waits, "at least {min_replicas}");
        }
    }

    #[test]
    fn each_name_of_a_route_is_a_name_of_its_targets() {
        let target = RouteTarget::deployment("chat");
        let mut route = ModelRoute::new(
            "usual",
            ModelRouteSpec {
                models: vec!["gpt-*".into(), "best".into()],
                targets: vec![target],
                ..ModelRouteSpec::default()
            },
        );
        route.metadata.namespace = Some("lab".into());
        let table = RoutingTable::from_objects(&[], &[], &[route.clone()]);
        let names: Vec<(&str, &str)> =
            table.aliases.iter().map(|alias| (alias.pattern.as_str(), alias.route.as_str())).collect();
        assert_eq!(names, [("best", "lab/usual"), ("gpt-*", "lab/usual")]);
        assert_eq!(table.aliases[0].policy.otherwise.names, [TargetName::Deployment("chat".into())]);
        assert_eq!(table.aliases[0].policy.terms.hold_timeout, Some(Duration::from_secs(300)));
        route.spec.on_unavailable = russet_crds::OnUnavailable::Fail;
        assert_eq!(RoutingTable::from_objects(&[], &[], &[route]).aliases[0].policy.terms.hold_timeout, None);
    }
}
