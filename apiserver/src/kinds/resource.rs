//! A served resource: its names, where its objects are stored, and how they are shown in its version.

use std::sync::Arc;

use serde_json::Value;

use super::events;
use crate::schema::{Schema, builtin};
use crate::store::StoredObject;
use crate::table::Column;

/// How a resource is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Objects in the store.
    Stored,
    /// Computed from the request, as access reviews are.
    Computed,
}

/// Paths of a custom resource's `/scale`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Such as `.spec.replicas`.
    pub spec_replicas: String,
    /// Such as `.status.replicas`.
    pub status_replicas: String,
    /// Such as `.status.selector`; often absent.
    pub selector: Option<String>,
}

/// A version of a custom resource, from its definition.
#[derive(Clone, Debug)]
pub struct CustomResource {
    /// Name of the definition.
    pub definition: String,
    /// The structural schema.
    pub schema: Schema,
    /// The schema as written in the definition, for OpenAPI.
    pub openapi: Value,
    /// `group/version` in which objects are stored.
    pub stored_as: String,
    /// The `/scale` subresource, if it is enabled.
    pub scale: Option<Scale>,
    /// JSON paths that field selectors may use, such as `.spec.nodeName`.
    pub selectable: Vec<String>,
    /// Whether the definition is being deleted; creates are rejected then.
    pub terminating: bool,
    /// The revision of the definition: objects written before it may lack defaults of its schema.
    pub revision: u64,
}

/// One served resource in one version.
#[derive(Clone, Debug)]
pub struct Resource {
    /// Empty for the core group.
    pub group: String,
    /// Such as `v1`.
    pub version: String,
    /// Such as `configmaps`.
    pub plural: String,
    /// Such as `configmap`.
    pub singular: String,
    /// Such as `ConfigMap`.
    pub kind: String,
    /// Such as `ConfigMapList`.
    pub list_kind: String,
    /// Such as `cm`.
    pub short_names: Vec<String>,
    /// Such as `all`.
    pub categories: Vec<String>,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// The verbs clients may use.
    pub verbs: &'static [&'static str],
    /// Subresources such as `status`.
    pub subresources: Vec<&'static str>,
    /// How requests are served.
    pub backing: Backing,
    /// Start of every storage key, ending in a slash.
    pub prefix: String,
    /// Columns of its Table.
    pub columns: Vec<Column>,
    /// Present for custom resources.
    pub custom: Option<CustomResource>,
}

impl Resource {
    /// `v1` or `group/version`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Whether a stored object can be served unchanged: written in this version, and under the current
    /// schema.
    pub fn serves_as_stored(&self, record: &StoredObject) -> bool {
        let written = record.api_version();
        let same = match written.split_once('/') {
            Some((group, version)) => group == self.group && version == self.version,
            None => self.group.is_empty() && written == self.version,
        };
        same && self.custom.as_ref().is_none_or(|custom| record.revision > custom.revision)
    }

    /// The storage key of one object.
    pub fn key(&self, namespace: &str, name: &str) -> String {
        if self.namespaced {
            format!("{}{namespace}/{name}", self.prefix)
        } else {
            format!("{}{name}", self.prefix)
        }
    }

    /// The storage prefix of one namespace, or of all of them when it is empty.
    pub fn prefix_of(&self, namespace: &str) -> String {
        if namespace.is_empty() { self.prefix.clone() } else { format!("{}{namespace}/", self.prefix) }
    }

    /// Whether the resource has this subresource.
    pub fn has_subresource(&self, name: &str) -> bool {
        self.subresources.contains(&name)
    }

    /// The schema of its objects; built-in kinds without a schema have the open one.
    pub fn schema(&self) -> &Schema {
        static OPEN: std::sync::LazyLock<Schema> = std::sync::LazyLock::new(|| {
            Schema::from_openapi(
                &serde_json::json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}),
            )
            .unwrap_or_default()
        });
        match &self.custom {
            Some(custom) => &custom.schema,
            None => builtin::builtin_schema(&self.group, &self.version, &self.kind).unwrap_or(&OPEN),
        }
    }

    /// A stored object in this version.
    pub fn view(&self, record: &StoredObject) -> Arc<Value> {
        let object = record.object();
        if self.serves_as_stored(record) {
            return object.clone();
        }
        Arc::new(self.convert(Value::clone(object)))
    }

    /// Converts an object of any version of this resource to this version.
    pub fn convert(&self, mut object: Value) -> Value {
        match &self.custom {
            Some(custom) => {
                object["apiVersion"] = Value::String(self.api_version());
                custom.schema.prune(&mut object);
                custom.schema.default(&mut object);
            }
            None if self.kind == "Event" => events::convert(&mut object, &self.api_version()),
            None => object["apiVersion"] = Value::String(self.api_version()),
        }
        object
    }

    /// Converts an object of this version to the storage version.
    pub fn to_stored(&self, mut object: Value) -> Value {
        match &self.custom {
            Some(custom) => object["apiVersion"] = Value::String(custom.stored_as.clone()),
            None if self.kind == "Event" => events::convert(&mut object, "v1"),
            None => {}
        }
        object
    }
}
