//! The table of served resources: built in, or defined by the custom resource definitions in the store. The
//! rest of this crate looks kinds up in this table and hard-codes none.

pub mod builtin;
pub mod definition;
pub mod events;
pub mod rules;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde_json::Value;

use crate::object;
use crate::schema::Schema;
use crate::store::{Store, StoredObject};
use crate::table::Column;

/// Storage prefix of the definitions.
pub const DEFINITIONS: &str = "/registry/apiextensions.k8s.io/customresourcedefinitions/";

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
            None => crate::openapi::builtin_schema(&self.group, &self.version, &self.kind).unwrap_or(&OPEN),
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

/// Every served resource.
#[derive(Clone, Debug, Default)]
pub struct Table {
    resources: Vec<Arc<Resource>>,
    index: BTreeMap<(String, String, String), Arc<Resource>>,
}

impl Table {
    fn new(resources: Vec<Arc<Resource>>) -> Self {
        let index = resources
            .iter()
            .map(|resource| {
                (
                    (resource.group.clone(), resource.version.clone(), resource.plural.clone()),
                    resource.clone(),
                )
            })
            .collect();
        Self { resources, index }
    }

    /// Every resource, built-in ones first, preferred versions before others.
    pub fn all(&self) -> &[Arc<Resource>] {
        &self.resources
    }

    /// The resource of a path.
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        self.index.get(&(group.to_string(), version.to_string(), plural.to_string())).cloned()
    }

    /// The resource of an owner reference or of a manifest.
    pub fn of_kind(&self, api_version: &str, kind: &str) -> Option<Arc<Resource>> {
        self.resources
            .iter()
            .find(|resource| resource.kind == kind && resource.api_version() == api_version)
            .cloned()
    }

    /// The resource whose objects are stored under keys like this one.
    pub fn of_key(&self, key: &str) -> Option<Arc<Resource>> {
        self.resources
            .iter()
            .find(|resource| resource.backing == Backing::Stored && key.starts_with(&resource.prefix))
            .cloned()
    }

    /// Each stored resource once, whatever versions serve it.
    pub fn stored(&self) -> Vec<Arc<Resource>> {
        let mut seen = std::collections::BTreeSet::new();
        let stored = self.resources.iter().filter(|resource| resource.backing == Backing::Stored);
        stored.filter(|resource| seen.insert(resource.prefix.clone())).cloned().collect()
    }
}

/// The current table; replaced as a whole when a definition changes.
#[derive(Debug)]
pub struct Kinds {
    current: RwLock<Arc<Table>>,
    /// Serialises refreshes: of two, the one that reads later also publishes later. Readers wait for neither.
    refreshing: Mutex<()>,
}

impl Kinds {
    /// The table of the definitions in the store.
    pub fn load(store: &dyn Store) -> Self {
        let kinds = Self { current: RwLock::new(Arc::new(Table::default())), refreshing: Mutex::new(()) };
        kinds.refresh(store);
        kinds
    }

    /// The current table.
    pub fn table(&self) -> Arc<Table> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the definitions again; the compiled schemas of unchanged ones are reused.
    pub fn refresh(&self, store: &dyn Store) {
        let refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = match store.range(DEFINITIONS, None, None) {
            Ok(snapshot) => snapshot,
            Err(error) => return tracing::error!(%error, "the custom resource definitions could not be read"),
        };
        let before = self.table();
        let mut known: BTreeMap<(&str, u64), Vec<Arc<Resource>>> = BTreeMap::new();
        for resource in before.all() {
            if let Some(custom) = &resource.custom {
                known.entry((&custom.definition, custom.revision)).or_default().push(resource.clone());
            }
        }
        let mut resources: Vec<Arc<Resource>> = builtin::resources().into_iter().map(Arc::new).collect();
        for record in &snapshot.records {
            match known.remove(&(object::name(record.object()), record.revision)) {
                Some(kept) => resources.extend(kept),
                None => {
                    let made = definition::resources(record.object(), record.revision);
                    resources.extend(made.into_iter().map(Arc::new));
                }
            }
        }
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Table::new(resources));
        drop(refreshing);
    }
}

/// The storage key of a namespace.
pub fn builtin_namespace_key(name: &str) -> String {
    format!("{}{name}", builtin::prefix("", "namespaces"))
}
