//! Installs Russet's CRDs and access rules on any API server, and waits until the kinds are served.
//! Idempotent: a newer version replaces what an older one installed.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt as _};
use thiserror::Error;

/// The access rules, as they are in `manifests/`.
pub const RBAC: &str = include_str!("../../manifests/rbac.yaml");

/// The admission policies that restrict components to their own objects, as they are in `manifests/`.
pub const ADMISSION: &str = include_str!("../../manifests/admission.yaml");

/// Field manager of the installation; not the operator's, because a person installs.
const MANAGER: &str = "russet-install";
/// Timeout until the server serves the kinds. A real one needs seconds.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

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

/// Installs everything and returns once every kind is served.
pub async fn apply(client: &Client) -> Result<(), Error> {
    for object in rules(RBAC)?.into_iter().chain(rules(ADMISSION)?) {
        let (api, kind) = rule_api(client, &object)?;
        patch(&api, &kind, &object).await?;
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

/// How often the definitions are looked for: Russet does nothing while one is missing, and 13 names cost little.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Installs a definition again when it was deleted, until the future is dropped. Its objects are gone all the same.
pub async fn keep(client: Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client);
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        // An API server that does not answer is everybody's problem; the next check comes.
        let Ok(present) = definitions.list_metadata(&ListParams::default()).await else { continue };
        let present: BTreeSet<String> = present.items.iter().map(kube::ResourceExt::name_any).collect();
        for definition in missing(&present) {
            let name = definition.name_any();
            match patch(&definitions, "CustomResourceDefinition", &definition).await {
                Ok(()) => {
                    tracing::warn!(name, "the CustomResourceDefinition was deleted; it is installed again")
                }
                Err(error) => tracing::warn!(name, %error, "a deleted CustomResourceDefinition is missing"),
            }
        }
    }
}

/// The definitions that are not there. One that is still being deleted is there: it cannot be kept.
fn missing(present: &BTreeSet<String>) -> Vec<CustomResourceDefinition> {
    russet_crds::all().into_iter().filter(|definition| !present.contains(&definition.name_any())).collect()
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
    fn only_definitions_that_are_gone_are_missing() {
        let mut present: BTreeSet<String> =
            russet_crds::all().iter().map(kube::ResourceExt::name_any).collect();
        assert!(missing(&present).is_empty());
        present.remove("models.russet.dev");
        present.insert("things.example.com".into());
        let names: Vec<String> = missing(&present).iter().map(kube::ResourceExt::name_any).collect();
        assert_eq!(names, ["models.russet.dev"]);
    }

    #[test]
    fn rbac_bindings_name_shipped_roles_and_grant_no_wildcard() {
        let objects = rules(RBAC).unwrap();
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
