//! Certificates of nodes and of the gateway: approves correct requests, denies others with the reason, signs
//! with the data-plane CA, and removes used join tokens. Requests for other signers are ignored.

mod decide;
mod sign;
mod token;

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
use serde_json::{Value, json};
use thiserror::Error;

use self::decide::{CsrSubject, CsrVerdict, NodeMembership, ParsedRequest, Requester};
use self::token::TokenState;
use crate::context::Context;
use crate::node_accounts::Credential;
use crate::reconcile::requeue_after;
use crate::{node_accounts, ssa};

/// Why a request could not be handled.
#[derive(Debug, Error)]
pub enum Error {
    /// The verdict was not written.
    #[error("CertificateSigningRequest {name}: the verdict could not be written")]
    Verdict {
        /// The request.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The token was not read, written or removed.
    #[error("CertificateSigningRequest {name}: the Secret of its join token could not be read or changed")]
    Token {
        /// The request.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The objects of a joining node were not created.
    #[error("CertificateSigningRequest {name}: node {node} could not be admitted")]
    Admit {
        /// The request.
        name: String,
        /// The node.
        node: String,
        /// The server's error.
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
        /// The server's error.
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

/// Handles one request.
pub async fn reconcile(
    request: Arc<CertificateSigningRequest>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let name = request.name_any();
    let requested = match decide::read(&request) {
        Ok(requested) => requested,
        Err(CsrVerdict::Deny(why)) => {
            deny(&context, &name, &why).await?;
            return Ok(requeue_after([]));
        }
        Err(CsrVerdict::Fail(why)) => {
            fail(&context, &name, &request, &why).await?;
            return Ok(requeue_after([]));
        }
        Err(_) => return Ok(requeue_after([])),
    };
    let token = match &requested.requester {
        Requester::Bootstrap(id) => token::observe(&context.client, id)
            .await
            .map_err(|source| Error::Token { name: name.clone(), source })?,
        Requester::Node { .. } | Requester::Account(_) | Requester::Gateway | Requester::Other(_) => {
            TokenState::Gone
        }
    };
    let (standing, life) = membership(&context, &requested.subject);
    match decide::evaluate(&requested, standing, life.as_deref(), &token, Timestamp::now()) {
        CsrVerdict::Nothing => {}
        CsrVerdict::Wait(pause) => return Ok(requeue_after([Some(pause)])),
        CsrVerdict::Deny(why) => deny(&context, &name, &why).await?,
        CsrVerdict::Fail(why) => fail(&context, &name, &request, &why).await?,
        CsrVerdict::Approve { claim } => {
            if let (Some(seen), Requester::Bootstrap(id), CsrSubject::Node(node)) =
                (&claim, &requested.requester, &requested.subject)
            {
                token::claim(&context.client, id, seen, node, &requested.key)
                    .await
                    .map_err(|source| Error::Token { name: name.clone(), source })?;
            }
            tracing::info!(request = name, subject = %requested.subject, "a certificate is approved");
            let message = format!("certificate of {}", requested.subject);
            verdict(&context, &name, "Approved", "Identity", &message).await?;
        }
        CsrVerdict::Sign => sign(&context, &name, &request, &requested).await?,
        CsrVerdict::RemoveToken(seen) => {
            if let (Requester::Bootstrap(id), CsrSubject::Node(node)) =
                (&requested.requester, &requested.subject)
            {
                let failed = |source| Error::Token { name: name.clone(), source };
                let node_exists = context.stores.nodes.get(&ObjectRef::new(node)).is_some();
                if node_exists && context.credential == Credential::Account {
                    node_accounts::bind_token_role(&context.client, node, None).await.map_err(failed)?;
                }
                token::remove(&context.client, id, &seen).await.map_err(failed)?;
                tracing::info!(node, token = id, "the join token has done its work and is removed");
            }
        }
    }
    Ok(requeue_after([]))
}

/// The membership of the node that a request names, and its current incarnation.
fn membership(context: &Context, subject: &CsrSubject) -> (NodeMembership, Option<String>) {
    let CsrSubject::Node(node) = subject else { return (NodeMembership::Unknown, None) };
    let Some(node) = context.stores.nodes.get(&ObjectRef::new(node)) else {
        return (NodeMembership::Unknown, None);
    };
    let standing = if node.metadata.deletion_timestamp.is_some() {
        NodeMembership::Leaving
    } else if node.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Reachable)) {
        NodeMembership::Reachable
    } else if node.status.is_none() && node_accounts::node_incarnation(&node).is_none() {
        NodeMembership::Announced
    } else {
        NodeMembership::Unreachable
    };
    (standing, node_accounts::node_incarnation(&node).map(str::to_owned))
}

/// Admits a node that joins, then signs.
async fn sign(
    context: &Context,
    name: &str,
    request: &CertificateSigningRequest,
    requested: &ParsedRequest,
) -> Result<(), Error> {
    if let CsrSubject::Node(node) = &requested.subject
        && !matches!(requested.requester, Requester::Node { .. } | Requester::Account(_))
    {
        let failed = |source| Error::Admit { name: name.to_owned(), node: node.clone(), source };
        let bootstrap = match &requested.requester {
            Requester::Bootstrap(id) => Some(id.as_str()),
            _ => None,
        };
        node_accounts::begin_incarnation(&context.client, node, requested.incarnation())
            .await
            .map_err(failed)?;
        if context.credential == Credential::Account {
            node_accounts::create_account(&context.client, node, bootstrap).await.map_err(failed)?;
        }
    }
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), names::SYSTEM_NAMESPACE);
    let secret = secrets
        .get(names::CA_SECRET)
        .await
        .map_err(|source| Error::Authority { name: name.to_owned(), source })?;
    let certificate = sign::sign(
        &secret,
        &request.spec.request.0,
        &requested.subject,
        requested.incarnation(),
        request.spec.expiration_seconds,
        sign::max_lifetime_seconds(),
        Timestamp::now(),
    )
    .map_err(|source| Error::Sign { name: name.to_owned(), source })?;
    let patch = json!({"status": {"certificate": k8s_openapi::ByteString(certificate.into_bytes())}});
    let api: Api<CertificateSigningRequest> = Api::all(context.client.clone());
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(drop)
        .map_err(|source| Error::Verdict { name: name.to_owned(), source })
}

async fn deny(context: &Context, name: &str, why: &str) -> Result<(), Error> {
    tracing::warn!(request = name, why, "a certificate is refused");
    verdict(context, name, "Denied", "Refused", why).await
}

/// Marks an approved request as failed; the approval stays beside it.
async fn fail(
    context: &Context,
    name: &str,
    request: &CertificateSigningRequest,
    why: &str,
) -> Result<(), Error> {
    tracing::warn!(request = name, why, "an approved certificate is not signed");
    let conditions =
        request.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let conditions: Vec<Value> =
        conditions.iter().map(|it| json!(it)).chain([condition("Failed", "Refused", why)]).collect();
    let patch = json!({"status": {"conditions": conditions}});
    let api: Api<CertificateSigningRequest> = Api::all(context.client.clone());
    check_written(name, api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await)
}

async fn verdict(
    context: &Context,
    name: &str,
    kind: &str,
    reason: &str,
    message: &str,
) -> Result<(), Error> {
    let api: Api<CertificateSigningRequest> = Api::all(context.client.clone());
    let patch = json!({"status": {"conditions": [condition(kind, reason, message)]}});
    check_written(name, api.patch_approval(name, &PatchParams::default(), &Patch::Merge(patch)).await)
}

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    let now = format!("{:.0}", Timestamp::now());
    json!({
        "type": kind, "status": "True", "reason": reason, "message": message,
        "lastUpdateTime": now, "lastTransitionTime": now,
    })
}

fn check_written(name: &str, answer: Result<CertificateSigningRequest, kube::Error>) -> Result<(), Error> {
    match answer {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 404) => Ok(()),
        Err(source) => Err(Error::Verdict { name: name.to_owned(), source }),
    }
}
