//! Server-side apply, the only way the operator writes: field managers, force, and no writes without a
//! change.

use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt as _};
use russet_crds::names::OPERATOR_MANAGER;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn params(manager: &str) -> PatchParams {
    // Force: the operator's fields are its own, even if they were edited meanwhile.
    PatchParams::apply(manager).force()
}

/// Applies a whole object.
pub async fn apply<K>(api: &Api<K>, object: &K) -> Result<K, kube::Error>
where
    K: Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug,
{
    apply_as(OPERATOR_MANAGER, api, object).await
}

/// Applies an object under another of the operator's managers.
pub async fn apply_as<K>(manager: &str, api: &Api<K>, object: &K) -> Result<K, kube::Error>
where
    K: Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug,
{
    api.patch(&object.name_any(), &params(manager), &Patch::Apply(object)).await
}

/// Applies labels.
pub async fn apply_labels<K>(
    api: &Api<K>,
    name: &str,
    labels: &std::collections::BTreeMap<String, String>,
) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let patch = json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"name": name, "labels": labels},
    });
    api.patch(name, &params(OPERATOR_MANAGER), &Patch::Apply(patch)).await.map(|_| ())
}

/// A patch of one field of an object.
fn part<K: Resource<DynamicType = ()>>(name: &str, field: &str, value: &impl Serialize) -> Patch<Value> {
    Patch::Apply(json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"name": name},
        field: value,
    }))
}

/// Applies the part of a spec that `manager` owns; another manager owns the rest.
pub async fn apply_spec<K>(
    api: &Api<K>,
    manager: &str,
    name: &str,
    spec: &impl Serialize,
) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.patch(name, &params(manager), &part::<K>(name, "spec", spec)).await {
        Ok(_) => Ok(()),
        // Deleted meanwhile: a part of a spec creates no valid object, and the server rejects it.
        Err(error) if is_code(&error, 404) || is_code(&error, 422) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Applies a status, or the operator's part of it.
pub async fn apply_status<K>(api: &Api<K>, name: &str, status: &impl Serialize) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    apply_status_as(OPERATOR_MANAGER, api, name, status).await
}

/// Applies a status that carries on parts of the one before it, on the version of the object that it was made from. The
/// caches lag behind: without that, a status made from an older version takes back what a newer one says. Returns the
/// object as it is then, or `None` if it was deleted meanwhile; the error is a conflict (409) if there is a newer version.
pub async fn apply_status_on<K>(
    api: &Api<K>,
    object: &K,
    status: &impl Serialize,
) -> Result<Option<K>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let name = object.name_any();
    let patch = Patch::Apply(json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"name": name, "resourceVersion": object.resource_version()},
        "status": status,
    }));
    match api.patch_status(&name, &params(OPERATOR_MANAGER), &patch).await {
        Ok(written) => Ok(Some(written)),
        // Deleted meanwhile: the status is no longer needed.
        Err(error) if is_code(&error, 404) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Applies the part of a status that another of the operator's managers owns.
pub async fn apply_status_as<K>(
    manager: &str,
    api: &Api<K>,
    name: &str,
    status: &impl Serialize,
) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.patch_status(name, &params(manager), &part::<K>(name, "status", status)).await {
        Ok(_) => Ok(()),
        // Deleted meanwhile: the status is no longer needed.
        Err(error) if is_code(&error, 404) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes exactly this object; another one of the same name stays.
pub async fn delete<K>(api: &Api<K>, object: &K) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    delete_with(api, object, None).await
}

/// The same of exactly this version; one that was changed stays.
pub async fn delete_version<K>(api: &Api<K>, object: &K) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    delete_with(api, object, object.resource_version()).await
}

async fn delete_with<K>(api: &Api<K>, object: &K, resource_version: Option<String>) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let preconditions = Preconditions { uid: object.uid(), resource_version };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match api.delete(&object.name_any(), &params).await {
        Ok(_) => Ok(()),
        Err(error) if is_code(&error, 404) || is_code(&error, 409) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Replaces the finalizers, provided the object is unchanged.
pub async fn set_finalizers<K>(api: &Api<K>, object: &K, finalizers: Vec<String>) -> Result<(), kube::Error>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": object.resource_version()}});
    match api.patch(&object.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(error) if is_code(&error, 404) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The API of the namespace an object lives in.
pub fn namespaced_api<K, O>(client: &Client, object: &O) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    O: Resource,
{
    Api::namespaced(client.clone(), object.meta().namespace.as_deref().unwrap_or("default"))
}

/// Whether the server answered with this status code.
pub fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}
