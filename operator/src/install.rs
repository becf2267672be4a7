//! Installs Russet's CRDs and access rules on any API server, and waits until the kinds are served.
//! Idempotent: a newer version replaces what an older one installed.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt as _};
use thiserror::Error;

/// The access rules, as they are in `manifests/`.
pub const RBAC: &str = include_str!("../../manifests/rbac.yaml");

/// The admission policies that restrict components to their own objects, as they are in `manifests/`.
pub const ADMISSION: &str = include_str!("../../manifests/admission.yaml");

/// What lets gateways manage models for clients, as it is in `manifests/`. Installed only where the owner wants it.
pub const GATEWAY_MODELS: &str = include_str!("../../manifests/gateway-models.yaml");

/// Field manager of the installation; not the operator's, because a person installs.
const MANAGER: &str = "russet-install";
/// Timeout until the server serves the kinds. A real one needs seconds.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval at which [`keep`] looks: without a kind nothing of it works, and it is rarely deleted.
const KEEP_INTERVAL: Duration = Duration::from_secs(15);

/// Why Russet could not be installed.
#[derive(Debug, Error)]
pub enum Error {
    /// The bundled rules cannot be parsed; a broken build.
    #[error("the shipped access rules cannot be read; reinstall Russet")]
    Rules(#[source] serde_norway::Error),
    /// The bundled rules contain an unexpected kind; a broken build.
    #[error("the shipped access rules hold an unexpected object {0:?}; reinstall Russet")]
    Kind(String),
    /// The server rejected an object.
    #[error("{kind} {name} could not be installed; use an administrator's credentials")]
    Refused {
        /// Kind of the object.
        kind: String,
        /// Its name.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The server did not serve a kind in time.
    #[error("the API server does not serve {name} after {} s; look at that CustomResourceDefinition's conditions", ESTABLISH_TIMEOUT.as_secs())]
    NotEstablished {
        /// Name of the definition.
        name: String,
    },
}

/// Whether gateways may manage models for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayModels {
    /// They only read them.
    Denied,
    /// They create them, and delete what they created.
    Allowed,
}

/// Installs everything and returns once every kind is served.
pub async fn apply(client: &Client, gateway_models: GatewayModels) -> Result<(), Error> {
    for object in rules(RBAC)?.into_iter().chain(rules(ADMISSION)?) {
        let (api, kind) = rule_api(client, &object)?;
        patch(&api, &kind, &object).await?;
    }
    for object in rules(GATEWAY_MODELS)? {
        let (api, kind) = rule_api(client, &object)?;
        match gateway_models {
            GatewayModels::Allowed => patch(&api, &kind, &object).await?,
            // An earlier start may have allowed it.
            GatewayModels::Denied => remove(&api, &kind, &object.name_any()).await?,
        }
    }
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in russet_crds::all() {
        patch(&definitions, "CustomResourceDefinition", &definition).await?;
    }
    let start = tokio::time::Instant::now();
    for definition in russet_crds::all() {
        let name = definition.name_any();
        while !established(&definitions, &name).await {
            if start.elapsed() > ESTABLISH_TIMEOUT {
                return Err(Error::NotEstablished { name });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
    Ok(())
}

/// Installs a kind again that somebody deleted while the control plane runs; its objects are gone. Never ends.
pub async fn keep(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    loop {
        tokio::time::sleep(KEEP_INTERVAL).await;
        let existing = match definitions.list_metadata(&ListParams::default()).await {
            Ok(existing) => existing.iter().map(|it| it.name_any()).collect(),
            Err(error) => {
                tracing::debug!(%error, "the CustomResourceDefinitions cannot be listed");
                continue;
            }
        };
        for definition in missing(&existing) {
            let name = definition.name_any();
            tracing::warn!(name, "somebody deleted this CustomResourceDefinition; it is installed again");
            if let Err(error) = patch(&definitions, "CustomResourceDefinition", &definition).await {
                tracing::warn!(name, error = %russet_telemetry::errors::chain(&error), "it could not be installed");
            }
        }
    }
}

/// The kinds that are not there. One that is being deleted is.
fn missing(existing: &BTreeSet<String>) -> Vec<CustomResourceDefinition> {
    russet_crds::all().into_iter().filter(|kind| !existing.contains(&kind.name_any())).collect()
}

/// The bundled rules as objects.
fn rules(text: &str) -> Result<Vec<DynamicObject>, Error> {
    use serde::Deserialize as _;
    serde_norway::Deserializer::from_str(text)
        .map(|document| DynamicObject::deserialize(document).map_err(Error::Rules))
        .collect()
}

fn rule_api(client: &Client, object: &DynamicObject) -> Result<(Api<DynamicObject>, String), Error> {
    let kind = object.types.as_ref().map(|types| types.kind.clone()).unwrap_or_default();
    let plural = match kind.as_str() {
        "Namespace" => "namespaces",
        "ClusterRole" => "clusterroles",
        "ClusterRoleBinding" => "clusterrolebindings",
        "Role" => "roles",
        "RoleBinding" => "rolebindings",
        "ValidatingAdmissionPolicy" => "validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding" => "validatingadmissionpolicybindings",
        _ => return Err(Error::Kind(kind)),
    };
    let group = match kind.as_str() {
        "Namespace" => "",
        "ValidatingAdmissionPolicy" | "ValidatingAdmissionPolicyBinding" => "admissionregistration.k8s.io",
        _ => "rbac.authorization.k8s.io",
    };
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", &kind), plural);
    let api = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    Ok((api, kind))
}

async fn patch<K>(api: &Api<K>, kind: &str, object: &K) -> Result<(), Error>
where
    K: kube::Resource + Clone + serde::Serialize + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let name = object.name_any();
    let start = tokio::time::Instant::now();
    loop {
        let params = PatchParams::apply(MANAGER).force();
        match api.patch(&name, &params, &Patch::Apply(object)).await {
            Ok(_) => return Ok(()),
            // The server may still be starting; an API error is final.
            Err(source) if matches!(source, kube::Error::Api(_)) || start.elapsed() > ESTABLISH_TIMEOUT => {
                return Err(Error::Refused { kind: kind.to_owned(), name, source });
            }
            Err(error) => {
                tracing::debug!(kind, name, %error, "the API server does not answer yet");
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
    }
}

/// Deletes an object that may not be there.
async fn remove(api: &Api<DynamicObject>, kind: &str, name: &str) -> Result<(), Error> {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(source) => Err(Error::Refused { kind: kind.to_owned(), name: name.to_owned(), source }),
    }
}

async fn established(definitions: &Api<CustomResourceDefinition>, name: &str) -> bool {
    let Ok(definition) = definitions.get(name).await else { return false };
    definition.status.and_then(|status| status.conditions).is_some_and(|conditions| {
        conditions.iter().any(|it| it.type_ == "Established" && it.status == "True")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_deleted_kinds_are_installed_again() {
        let mut existing: BTreeSet<String> =
            russet_crds::all().iter().map(kube::ResourceExt::name_any).collect();
        existing.insert("things.example.com".to_owned());
        assert!(missing(&existing).is_empty());
        assert!(existing.remove("models.russet.dev"));
        assert_eq!(
            missing(&existing).iter().map(kube::ResourceExt::name_any).collect::<Vec<_>>(),
            ["models.russet.dev"]
        );
    }

    #[test]
    fn rbac_bindings_name_shipped_roles_and_grant_no_wildcard() {
        let objects = [rules(RBAC).unwrap(), rules(GATEWAY_MODELS).unwrap()].concat();
        let names = |kind: &str| -> Vec<String> {
            let of_kind =
                objects.iter().filter(|it| it.types.as_ref().is_some_and(|types| types.kind == kind));
            of_kind.map(kube::ResourceExt::name_any).collect()
        };
        let roles = [names("ClusterRole"), names("Role")].concat();
        for object in &objects {
            if let Some(role) = object.data.pointer("/roleRef/name").and_then(|name| name.as_str()) {
                assert!(roles.iter().any(|known| known == role), "{} names {role}", object.name_any());
            }
            assert!(!object.data.to_string().contains("\"*\""), "{} holds a wildcard", object.name_any());
        }
        assert!(names("ClusterRoleBinding").len() >= 4);
    }
}
