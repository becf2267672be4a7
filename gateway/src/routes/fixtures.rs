//! What unit tests route to.

use std::collections::BTreeMap;

use super::{Deployment, DeploymentState, Endpoint};
use crate::request_defaults::RequestDefaults;

/// A deployment that is ready, without a group.
pub(crate) fn deployment(namespace: &str, name: &str) -> Deployment {
    Deployment {
        namespace: namespace.into(),
        name: name.into(),
        created: 0,
        context_tokens: 8,
        model: "small".into(),
        adapters: BTreeMap::new(),
        defaults: RequestDefaults::default(),
        load_quantization: "",
        memory_bytes: 0,
        idle_limits: None,
        state: DeploymentState::Ready,
        endpoints: vec![],
    }
}

/// A group on the node `a`, at this address.
pub(crate) fn endpoint(address: &str) -> Endpoint {
    let (node, group, model) = ("a".into(), "default/g".into(), "small".into());
    Endpoint { address: address.into(), node, group, model, adapters: BTreeMap::new(), epoch: 1 }
}
