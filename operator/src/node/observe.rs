//! What is known of a node's Lease: when this process last saw it change.

use std::time::Instant;

use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use russet_crds::{InferenceNode, names};

use super::decide::Seen;
use crate::context::{Context, SeenLease};

/// Reads the Lease from the cache and remembers when it last changed.
pub fn lease(context: &Context, node: &InferenceNode) -> Seen {
    let name = node.name_any();
    let key = ObjectRef::new(&names::node_lease(&name)).within(names::SYSTEM_NAMESPACE);
    let Some(lease) = context.stores.leases.get(&key) else { return Seen::default() };
    let Some(spec) = &lease.spec else { return Seen::default() };
    let renewed = spec.renew_time.as_ref().map(|time| time.0);
    let now = Instant::now();
    let mut leases = context.leases.lock();
    let seen = leases
        .entry(name)
        .and_modify(|seen| {
            if seen.renewed != renewed {
                *seen = SeenLease { renewed, at: now, changed: true };
            }
        })
        .or_insert(SeenLease { renewed, at: now, changed: false });
    Seen {
        exists: true,
        renewed,
        age: now.duration_since(seen.at),
        changed: seen.changed,
        holder: spec.holder_identity.clone(),
    }
}
