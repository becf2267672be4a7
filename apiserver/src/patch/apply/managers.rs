//! `metadata.managedFields`: the managers of an object, decoded from and encoded to its wire form.
//!
//! Not here: changes of ownership.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::set::FieldSet;

/// Identity of a manager. It has one entry for all its applies, and one per version for its updates.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManagerId {
    /// The name.
    pub name: String,
    /// The operation.
    pub operation: Operation,
    /// The version of the written object; empty for appliers, whose entries move from version to version.
    pub api_version: String,
    /// The written subresource; empty for the object itself.
    pub subresource: String,
}

/// The operation of a manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Server-side apply.
    Apply,
    /// Any other write.
    Update,
}

/// The fields that a manager owns.
#[derive(Debug, Clone)]
pub struct Owned {
    /// The fields.
    pub set: FieldSet,
    /// The version they were written at.
    pub api_version: String,
    /// The time of the last change, in RFC 3339.
    pub time: Option<String>,
}

/// All managers of one object.
pub type Managers = BTreeMap<ManagerId, Owned>;

impl ManagerId {
    /// The identity of an applier.
    pub fn applier(name: &str, subresource: &str) -> ManagerId {
        ManagerId {
            name: name_or_unknown(name),
            operation: Operation::Apply,
            api_version: String::new(),
            subresource: subresource.to_owned(),
        }
    }

    /// The identity of an updater.
    pub fn updater(name: &str, api_version: &str, subresource: &str) -> ManagerId {
        ManagerId {
            name: name_or_unknown(name),
            operation: Operation::Update,
            api_version: api_version.to_owned(),
            subresource: subresource.to_owned(),
        }
    }

    /// Its description in conflicts: `"m" with subresource "status" using v1`.
    pub fn describe(&self) -> String {
        let ManagerId { name, operation, api_version, subresource } = self;
        let mut text = format!("{name:?}");
        if !subresource.is_empty() {
            text.push_str(&format!(" with subresource {subresource:?}"));
        }
        if *operation == Operation::Update {
            text.push_str(&format!(" using {api_version}"));
        }
        text
    }
}

fn name_or_unknown(name: &str) -> String {
    if name.is_empty() { "unknown".into() } else { name.to_owned() }
}

/// Decodes the wire form; null and absent mean no managers.
pub fn decode(entries: &Value) -> Result<Managers, String> {
    let mut managers = Managers::new();
    for (index, entry) in entries.as_array().into_iter().flatten().enumerate() {
        let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
        let operation = match text("operation").as_str() {
            "Apply" => Operation::Apply,
            "Update" => Operation::Update,
            _ => return Err("operation must be `Apply` or `Update`".into()),
        };
        let api_version = text("apiVersion");
        if api_version.is_empty() {
            return Err("apiVersion must not be empty".into());
        }
        match text("fieldsType").as_str() {
            "FieldsV1" => {}
            "" => return Err(format!("missing fieldsType in managed fields entry {index}")),
            other => return Err(format!("invalid fieldsType {other:?} in managed fields entry {index}")),
        }
        let set = match &entry["fieldsV1"] {
            Value::Null => FieldSet::default(),
            fields => FieldSet::decode(fields)?,
        };
        let id = ManagerId {
            name: text("manager"),
            operation,
            api_version: if operation == Operation::Apply { String::new() } else { api_version.clone() },
            subresource: text("subresource"),
        };
        let time = entry["time"].as_str().map(str::to_owned);
        managers.insert(id, Owned { set, api_version, time });
    }
    Ok(managers)
}

/// Encodes the wire form: appliers first, then by time and name; null for no managers.
pub fn encode(managers: &Managers) -> Value {
    let mut sorted: Vec<(&ManagerId, &Owned)> = managers.iter().collect();
    sorted.sort_by_key(|(id, owned)| {
        (id.operation, owned.time.clone(), id.name.clone(), owned.api_version.clone(), id.subresource.clone())
    });
    if sorted.is_empty() {
        return Value::Null;
    }
    sorted
        .into_iter()
        .map(|(id, owned)| {
            let mut entry = json!({
                "manager": id.name,
                "operation": match id.operation { Operation::Apply => "Apply", Operation::Update => "Update" },
                "apiVersion": owned.api_version,
                "fieldsType": "FieldsV1",
                "fieldsV1": owned.set.encode(),
            });
            if let Some(time) = &owned.time {
                entry["time"] = time.as_str().into();
            }
            if !id.subresource.is_empty() {
                entry["subresource"] = id.subresource.as_str().into();
            }
            entry
        })
        .collect()
}

/// Maximum entries of updaters: with more, every object would carry the history of its clients.
const MAX_UPDATERS: usize = 10;

/// Merges the oldest updaters of each version into one entry `ancient-changes` until at most the maximum is
/// left.
pub fn cap_updaters(managers: &mut Managers) {
    let mut updaters: Vec<ManagerId> =
        managers.keys().filter(|id| id.operation == Operation::Update).cloned().collect();
    if updaters.len() <= MAX_UPDATERS {
        return;
    }
    updaters.sort_by_key(|id| (managers.get(id).and_then(|owned| owned.time.clone()), id.clone()));
    let mut left = updaters.len();
    let mut first_of: BTreeMap<String, ManagerId> = BTreeMap::new();
    for id in updaters {
        if left <= MAX_UPDATERS {
            return;
        }
        let bucket = ManagerId::updater("ancient-changes", &id.api_version, "");
        let Some(first) = first_of.get(&id.api_version).cloned() else {
            first_of.insert(id.api_version.clone(), id);
            continue;
        };
        if !managers.contains_key(&bucket)
            && let Some(owned) = managers.remove(&first)
        {
            managers.insert(bucket.clone(), owned);
        }
        let Some(merged) = managers.remove(&id) else { continue };
        if let Some(ancient) = managers.get_mut(&bucket) {
            ancient.set = ancient.set.union(&merged.set);
            ancient.time = merged.time;
        }
        left -= 1;
    }
}
