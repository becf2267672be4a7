//! Certificates of nodes: approves the requests that are exactly right, denies the others with the
//! reason, and signs with the data-plane CA. Requests for other signers are not its business.

mod decide;
mod sign;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, is_true};
use russet_crds::names;
use serde_json::json;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::after;
use crate::ssa;

/// Why a request could not be answered.
#[derive(Debug, Error)]
pub enum Error {
    /// The verdict was not written.
    #[error("CertificateSigningRequest {name}: the verdict could not be written")]
    Verdict {
        /// The request.
        name: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
    /// The CA could not be read.
    #[error(
        "CertificateSigningRequest {name}: Secret {}/{} with the CA could not be read",
        names::SYSTEM_NAMESPACE,
        names::CA_SECRET
    )]
    Authority {
        /// The request.
        name: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
    /// Signing failed.
    #[error("CertificateSigningRequest {name}: could not be signed")]
    Sign {
        /// The request.
        name: String,
        /// Why.
        #[source]
        source: sign::SignError,
    },
}

/// Answers one request.
pub async fn reconcile(
    request: Arc<CertificateSigningRequest>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let name = request.name_any();
    let api: Api<CertificateSigningRequest> = Api::all(context.client.clone());
    let joined = |node: &str| {
        let known = context.stores.nodes.get(&ObjectRef::new(node));
        known.is_some_and(|node| {
            node.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Reachable))
        })
    };
    match decide::decide(&request, joined) {
        decide::Verdict::Nothing => {}
        decide::Verdict::Deny(why) => {
            tracing::warn!(request = name, why, "a node's certificate is refused");
            verdict(&api, &name, "Denied", "Refused", &why).await?;
        }
        decide::Verdict::Approve { node } => {
            tracing::info!(request = name, node, "a node's certificate is approved");
            verdict(&api, &name, "Approved", "NodeIdentity", &format!("certificate of node {node}")).await?;
        }
        decide::Verdict::Sign { node } => {
            let secrets: Api<Secret> = Api::namespaced(context.client.clone(), names::SYSTEM_NAMESPACE);
            let secret = secrets
                .get(names::CA_SECRET)
                .await
                .map_err(|source| Error::Authority { name: name.clone(), source })?;
            let certificate = sign::sign(
                &secret,
                &request.spec.request.0,
                &node,
                request.spec.expiration_seconds,
                Timestamp::now(),
            )
            .map_err(|source| Error::Sign { name: name.clone(), source })?;
            let patch = json!({"status": {"certificate": k8s_openapi::ByteString(certificate.into_bytes())}});
            api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
                .await
                .map_err(|source| Error::Verdict { name, source })?;
        }
    }
    Ok(after([]))
}

async fn verdict(
    api: &Api<CertificateSigningRequest>,
    name: &str,
    kind: &str,
    reason: &str,
    message: &str,
) -> Result<(), Error> {
    let now = format!("{:.0}", Timestamp::now());
    let condition = json!({
        "type": kind, "status": "True", "reason": reason, "message": message,
        "lastUpdateTime": now, "lastTransitionTime": now,
    });
    let patch = json!({"status": {"conditions": [condition]}});
    match api.patch_approval(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 404) => Ok(()),
        Err(source) => Err(Error::Verdict { name: name.to_owned(), source }),
    }
}
