//! Access to the Secret of a Model's source, for the nodes that have to contact the source, and only for that
//! time.
//!
//! A RoleBinding in the Model's namespace lists them and is deleted when there are none. Its Role belongs to
//! the owner of the Secrets; the operator may bind it and cannot read them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use kube::{Api, Resource as _, ResourceExt as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{CopyMode, Model, ModelCopy, ModelSource, names};

use super::source_selection::{self, PeerNode};
use super::{Error, is_ready};
use crate::context::Context;
use crate::node_accounts::{Credential, NODES_NAMESPACE};
use crate::ssa;

const RBAC: &str = "rbac.authorization.k8s.io";

/// The nodes that contact the source: those that read headers, those that fetch, and those that were to
/// download from peers and fell back to the source. Pure.
pub fn source_readers<'a>(
    source: &ModelSource,
    copies: &'a [Arc<ModelCopy>],
    nodes: &BTreeMap<String, PeerNode>,
    read_on: Option<&'a str>,
) -> BTreeSet<&'a str> {
    if source.secret_ref.is_none() {
        return BTreeSet::new();
    }
    let supplies = source_selection::decide(source, copies, nodes);
    let needs_secret = |copy: &ModelCopy| match copy.spec.want {
        CopyMode::Headers => true,
        CopyMode::Files => supplies.get(&copy.name_any()).is_some_and(Option::is_none) || is_refused(copy),
        CopyMode::Unknown => false,
    };
    let is_pending = |copy: &&ModelCopy| copy.metadata.deletion_timestamp.is_none() && !is_ready(copy);
    let copies = copies.iter().map(AsRef::as_ref).filter(is_pending).filter(|copy| needs_secret(copy));
    copies.map(|copy| copy.spec.node_name.as_str()).chain(read_on).collect()
}

fn is_refused(copy: &ModelCopy) -> bool {
    let conditions = copy.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let ready = conditions::get(conditions, Type::Ready);
    ready.and_then(conditions::reason) == Some(Reason::SourceForbidden)
}

/// Grants access to these nodes, and to no others.
pub async fn apply(context: &Context, model: &Model, readers: &BTreeSet<&str>) -> Result<(), Error> {
    // Whether a source needs credentials is fixed when a Model is created.
    if model.spec.source.secret_ref.is_none() {
        return Ok(());
    }
    let name = names::source_binding(&model.name_any());
    let failed = |source| Error::Grant { model: model.name_any(), binding: name.clone(), source };
    let api: Api<RoleBinding> = ssa::namespaced_api(&context.client, model);
    let existing = api.get_opt(&name).await.map_err(failed)?;
    let subjects: Vec<Subject> = readers.iter().map(|node| subject(context.credential, node)).collect();
    match existing {
        Some(existing) if subjects.is_empty() => ssa::delete(&api, &existing).await.map_err(failed),
        None if subjects.is_empty() => Ok(()),
        Some(existing) if existing.subjects.as_deref() == Some(&subjects) => Ok(()),
        _ => {
            let mut binding = RoleBinding {
                role_ref: RoleRef {
                    api_group: Some(RBAC.to_owned()),
                    kind: "Role".to_owned(),
                    name: names::SOURCES_ROLE.to_owned(),
                },
                subjects: Some(subjects),
                ..RoleBinding::default()
            };
            binding.metadata.name = Some(name.clone());
            binding.metadata.owner_references = model.controller_owner_ref(&()).map(|owner| vec![owner]);
            ssa::apply(&api, &binding).await.map(drop).map_err(failed)
        }
    }
}

/// A node, as the API server authenticates it.
fn subject(credential: Credential, node: &str) -> Subject {
    match credential {
        Credential::Certificate => Subject {
            kind: "User".to_owned(),
            api_group: Some(RBAC.to_owned()),
            name: format!("russet:node:{node}"),
            namespace: None,
        },
        Credential::Account => Subject {
            kind: "ServiceAccount".to_owned(),
            api_group: None,
            name: node.to_owned(),
            namespace: Some(NODES_NAMESPACE.to_owned()),
        },
    }
}
