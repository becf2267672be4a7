//! The table of served resources: built in, or defined by the custom resource definitions in the store. The
//! rest of this crate looks kinds up in this table and hard-codes none.

pub mod builtin;
pub mod checks;
pub mod definition;
pub mod events;
pub mod resource;
pub mod rules;
pub mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::object;
use crate::store::StoredObject;
use crate::store::reflector::FromObjects;
use resource::Resource;
use table::Table;

/// Storage prefix of the definitions.
pub const DEFINITIONS: &str = "/registry/apiextensions.k8s.io/customresourcedefinitions/";

impl FromObjects for Table {
    const PREFIX: &'static str = DEFINITIONS;
    const OBJECTS: &'static str = "custom resource definitions";

    /// Reuses the compiled schemas of unchanged definitions.
    fn from_objects(objects: &[Arc<StoredObject>], before: &Self) -> Self {
        let mut known: BTreeMap<(&str, u64), Vec<Arc<Resource>>> = BTreeMap::new();
        for resource in before.all() {
            if let Some(custom) = &resource.custom {
                known.entry((&custom.definition, custom.revision)).or_default().push(resource.clone());
            }
        }
        let mut resources: Vec<Arc<Resource>> = builtin::resources().into_iter().map(Arc::new).collect();
        for record in objects {
            match known.remove(&(object::name(record.object()), record.revision)) {
                Some(unchanged) => resources.extend(unchanged),
                None => {
                    let compiled = definition::resources(record.object(), record.revision);
                    resources.extend(compiled.into_iter().map(Arc::new));
                }
            }
        }
        Self::new(resources)
    }
}

/// The storage key of a namespace.
pub fn builtin_namespace_key(name: &str) -> String {
    format!("{}{name}", builtin::prefix("", "namespaces"))
}
