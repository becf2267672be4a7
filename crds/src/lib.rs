//! Russet's kinds as Rust types: the one source of the CRD YAML, the chart templates and the API reference.
//! Field names, defaults and validation are here. Not here: decisions.

// Every printer column is one more attribute of the same name, which clippy reports as a mistake.
#![allow(clippy::duplicated_attributes)]

mod access_key;
pub mod active_hours;
mod approval;
mod autoscaling;
mod benchmark;
mod budget;
pub mod conditions;
mod demand;
mod demand_history;
mod fabric;
mod http_endpoint;
mod inference_node;
mod model;
mod model_copy;
mod model_deployment;
mod model_provider;
mod model_route;
mod money;
pub mod names;
mod node_energy;
mod node_pool;
mod pipeline;
mod pipeline_run;
pub mod reference;
mod references;
mod rollout;
mod route_rule;
mod schedule;
mod shard;
mod shard_group;
mod sharding_strategy;
mod spread;
mod strip_patterns;
mod tier;
mod transfers;
mod zone;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;

pub use access_key::*;
pub use approval::*;
pub use autoscaling::*;
pub use benchmark::*;
pub use budget::*;
pub use demand::*;
pub use demand_history::*;
pub use fabric::*;
pub use http_endpoint::*;
pub use inference_node::*;
pub use model::*;
pub use model_copy::*;
pub use model_deployment::*;
pub use model_provider::*;
pub use model_route::*;
pub use money::{InvalidMoney, Money};
pub use node_energy::*;
pub use node_pool::*;
pub use pipeline::*;
pub use pipeline_run::*;
pub use references::*;
pub use rollout::*;
pub use route_rule::*;
pub use russet_model::description::Task;
pub use russet_model::generation_config::GenerationConfig;
pub use russet_wire::engine_config::{Backend, Transport};
pub use russet_wire::engine_options::*;
pub use schedule::*;
pub use shard::*;
pub use shard_group::*;
pub use sharding_strategy::*;
pub use spread::*;
pub use strip_patterns::strip_pattern;
pub use tier::*;
pub use transfers::*;
pub use zone::Zone;

/// API group of every kind.
pub const GROUP: &str = "russet.dev";
/// The served and stored version.
pub const VERSION: &str = "v1alpha1";

/// `status.observedGeneration` of an object whose status no controller has written yet. Tools that wait for readiness (Helm, Flux)
/// take an object without any status for ready; with this default they wait for the controller.
pub const NOT_OBSERVED: i64 = -1;

/// Every kind Russet installs, in the order of the documentation. A new kind is one file and one
/// line here.
pub fn all() -> Vec<CustomResourceDefinition> {
    let mut all = vec![
        InferenceNode::crd(),
        NodePool::crd(),
        ShardingStrategy::crd(),
        Tier::crd(),
        Model::crd(),
        ModelCopy::crd(),
        ModelDeployment::crd(),
        ShardGroup::crd(),
        Shard::crd(),
        ModelRoute::crd(),
        ModelProvider::crd(),
        AccessKey::crd(),
        Budget::crd(),
        Approval::crd(),
        Benchmark::crd(),
        Pipeline::crd(),
        PipelineRun::crd(),
        HttpEndpoint::crd(),
    ];
    let versions = all.iter_mut().flat_map(|crd| &mut crd.spec.versions);
    for schema in versions.filter_map(|version| version.schema.as_mut()?.open_api_v3_schema.as_mut()) {
        visit_schemas(schema, &mut drop_unsigned_formats);
        if let Some(spec) = schema.properties.as_mut().and_then(|fields| fields.get_mut("spec")) {
            visit_schemas(spec, &mut default_to_empty);
        }
        if let Some(status) = schema.properties.as_mut().and_then(|fields| fields.get_mut("status")) {
            default_to_not_observed(status);
        }
    }
    all
}

/// Visits a schema and all schemas nested in it.
fn visit_schemas(schema: &mut JSONSchemaProps, visit: &mut impl FnMut(&mut JSONSchemaProps)) {
    visit(schema);
    schema.properties.iter_mut().flatten().for_each(|(_, field)| visit_schemas(field, visit));
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => visit_schemas(items, visit),
        Some(JSONSchemaPropsOrArray::Schemas(several)) => {
            several.iter_mut().for_each(|one| visit_schemas(one, visit))
        }
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        visit_schemas(values, visit);
    }
}

/// Kubernetes supports only signed number formats and warns of every other. The types' minimum of 0 stays.
fn drop_unsigned_formats(schema: &mut JSONSchemaProps) {
    if let Some(format @ ("uint32" | "uint64")) = schema.format.as_deref() {
        schema.format = Some(format[1..].to_owned());
    }
}

/// Gives a status that names the generation it describes a default that describes none.
fn default_to_not_observed(status: &mut JSONSchemaProps) {
    if status.properties.as_ref().is_some_and(|fields| fields.contains_key("observedGeneration")) {
        status.default = Some(JSON(serde_json::json!({ "observedGeneration": NOT_OBSERVED })));
    }
}

/// Gives every optional object or list the empty one as its default. Server-side apply of `{}` over an object
/// that had fields makes it `null` (kubernetes/kubernetes#117447; 1.36.0 to 1.36.2 do not). Without a
/// default, `null` is rejected.
fn default_to_empty(schema: &mut JSONSchemaProps) {
    let required = schema.required.clone().unwrap_or_default();
    for (name, field) in schema.properties.iter_mut().flatten() {
        let empty = match field.type_.as_deref() {
            Some("object") => serde_json::json!({}),
            Some("array") => serde_json::json!([]),
            _ => continue,
        };
        if !required.contains(name) && field.nullable != Some(true) && field.required.is_none() {
            field.default.get_or_insert(JSON(empty));
        }
    }
}
