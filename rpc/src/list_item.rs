//! An object of a list or a watch event that is decoded on its own: one that cannot be decoded spoils neither
//! the list nor the watch. Not here: what is done about it ([`crate::cache_status`] tells).
//!
//! kube's `DeserializeGuard` decodes the whole body into values first, so it stops at what the JSON syntax
//! allows and its reader does not: more levels than the recursion limit, a number that is no `f64`, half a
//! surrogate pair, metadata of another type. Here an item is first only skipped, which needs no recursion and
//! looks at no value, and then decoded alone.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::{Api, ListParams};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// An object, or what is known of one that cannot be decoded.
#[derive(Clone, Debug)]
pub struct ListItem<K>(pub Result<K, UndecodableObject>);

/// An object that exists and cannot be decoded as its kind.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{error}")]
pub struct UndecodableObject {
    /// Why, in the decoder's words.
    pub error: String,
    /// Its name, namespace, UID and resourceVersion, as far as they can be read. Nothing else.
    pub metadata: ObjectMeta,
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for ListItem<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self(
            serde_json::from_str(raw.get()).map_err(|error| UndecodableObject {
                error: error.to_string(),
                metadata: identity(raw.get()),
            }),
        ))
    }
}

/// Who an undecodable object is.
fn identity(json: &str) -> ObjectMeta {
    #[derive(Deserialize)]
    struct Object<'a> {
        #[serde(borrow)]
        metadata: &'a RawValue,
    }
    // Each field by itself: the next one may be what cannot be decoded.
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Identity<'a> {
        #[serde(borrow)]
        name: Option<&'a RawValue>,
        namespace: Option<&'a RawValue>,
        uid: Option<&'a RawValue>,
        resource_version: Option<&'a RawValue>,
    }
    let metadata = serde_json::from_str::<Object<'_>>(json).map(|object| object.metadata);
    let identity = metadata.and_then(|metadata| serde_json::from_str::<Identity<'_>>(metadata.get()));
    let identity = identity.unwrap_or_default();
    let text = |raw: Option<&RawValue>| raw.and_then(|raw| serde_json::from_str::<String>(raw.get()).ok());
    ObjectMeta {
        name: text(identity.name),
        namespace: text(identity.namespace),
        uid: text(identity.uid),
        resource_version: text(identity.resource_version),
        ..ObjectMeta::default()
    }
}

impl<K: Resource> Resource for ListItem<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.as_ref().map_or_else(|undecodable| &undecodable.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.as_mut().map_or_else(|undecodable| &mut undecodable.metadata, K::meta_mut)
    }
}

/// Every object of an API that can be decoded, as the server has it. The others are left out at `warn`.
pub async fn list_decodable<K>(client: &kube::Client) -> Result<Vec<K>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let listed = Api::<ListItem<K>>::all(client.clone()).list(&ListParams::default()).await?;
    let decoded = listed.items.into_iter().filter_map(|item| match item.0 {
        Ok(object) => Some(object),
        Err(UndecodableObject { error, metadata }) => {
            let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
            tracing::warn!(kind = %K::kind(&()), namespace, name, error, "an object that cannot be decoded is left out");
            None
        }
    });
    Ok(decoded.collect())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::Lease;
    use kube::ResourceExt as _;
    use kube::api::{ObjectList, WatchEvent};

    use super::*;

    fn lease(name: &str, more: &str) -> String {
        format!(
            r#"{{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {{{more} "name": "{name}", "namespace": "n", "uid": "u", "resourceVersion": "7"}}}}"#
        )
    }

    /// Objects that some server stores and no client of ours decodes.
    fn hostile() -> Vec<(&'static str, String)> {
        let deep = |levels: usize| {
            let (open, close) = (r#"{"f:a":"#.repeat(levels), "}".repeat(levels));
            format!(
                r#""managedFields": [{{"manager": "m", "operation": "Update", "fieldsV1": {open}{{}}{close}}}],"#
            )
        };
        vec![
            ("124 levels", lease("bad", &deep(124))),
            ("100,000 levels", lease("bad", &deep(100_000))),
            ("a number beyond f64", lease("bad", r#""generation": 1e999,"#)),
            ("half a surrogate pair", lease("bad", r#""labels": {"a": "\ud800"},"#)),
            ("a date that is none", lease("bad", r#""creationTimestamp": "yesterday","#)),
            ("labels of another type", lease("bad", r#""labels": [1],"#)),
        ]
    }

    #[test]
    fn an_undecodable_item_leaves_the_list_whole() {
        for (what, bad) in hostile() {
            let (before, after) = (lease("a", ""), lease("b", ""));
            let json = format!(
                r#"{{"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1", "metadata": {{"resourceVersion": "9"}}, "items": [{before}, {bad}, {after}]}}"#
            );
            let list: ObjectList<ListItem<Lease>> = serde_json::from_str(&json).unwrap();
            assert_eq!(list.metadata.resource_version.as_deref(), Some("9"), "{what}");
            assert_eq!(
                list.items.iter().map(|item| item.0.is_ok()).collect::<Vec<_>>(),
                [true, false, true],
                "{what}"
            );
            let bad = &list.items[1];
            assert_eq!((bad.name_any().as_str(), bad.namespace().as_deref()), ("bad", Some("n")), "{what}");
            assert_eq!(bad.resource_version().as_deref(), Some("7"), "{what}");
        }
    }

    #[test]
    fn an_undecodable_watch_event_leaves_the_watch_whole() {
        for (what, bad) in hostile() {
            let json = format!(r#"{{"type": "MODIFIED", "object": {bad}}}"#);
            let event: WatchEvent<ListItem<Lease>> = serde_json::from_str(&json).unwrap();
            let WatchEvent::Modified(ListItem(Err(bad))) = event else { panic!("{what}: {event:?}") };
            assert_eq!(bad.metadata.name.as_deref(), Some("bad"), "{what}");
        }
    }

    #[test]
    fn an_item_without_readable_metadata_still_counts() {
        for json in ["7", "{}", r#"{"metadata": 7}"#, r#"{"metadata": {"name": {"a": 1}}}"#, "[[[]]]"] {
            let item: ListItem<Lease> = serde_json::from_str(json).unwrap();
            assert!(item.0.is_err() || json == "{}", "{json}");
            assert_eq!(item.meta().name, None, "{json}");
        }
    }
}
