//! Server-side apply: field ownership, and the changes a declarative write makes.
//!
//! Not here: storing, admission, validation or defaults; callers run those between [`apply`] and the store.

mod compare;
mod fields;
mod last_applied;
mod managers;
mod merge;
mod path;
mod set;
mod shape;
mod update;

use jiff::Timestamp;
use serde_json::{Map, Value};

use crate::schema::Schema;
use managers::{ManagerId, Managers, Operation};
use path::{Element, display, same};
use set::FieldSet;
use shape::Shape;
use update::Conflicts;

/// An apply request.
pub struct ApplyRequest<'a> {
    /// The stored object at the request's API version, or `None` when apply creates it.
    pub live: Option<&'a Value>,
    /// The applied configuration: the decoded body, without the fields that this endpoint does not write.
    pub config: &'a Value,
    /// The `fieldManager`.
    pub manager: &'a str,
    /// Whether to take over conflicting fields.
    pub force: bool,
    /// The subresource written (`status`, `scale`), or the empty string.
    pub subresource: &'a str,
    /// `group/version` of the request.
    pub api_version: &'a str,
    /// The current time.
    pub now: Timestamp,
    /// The schema of the whole object at `api_version`.
    pub schema: &'a Schema,
}

/// A field that another manager owns with another value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// `conflict with "m" using v1`, the cause's message.
    pub message: String,
    /// `.spec.replicas`, the cause's field.
    pub field: String,
}

/// Why an apply failed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Other managers own fields that this one sets to other values (409, causes `FieldManagerConflict`).
    #[error("{message}")]
    Conflict {
        /// Kubernetes' message for these conflicts.
        message: String,
        /// One cause per manager and field.
        conflicts: Vec<Conflict>,
    },
    /// The body cannot be applied (400).
    #[error("{0}")]
    BadRequest(String),
    /// The body does not match the schema (400).
    #[error("failed to create typed patch object {0}")]
    Typed(String),
}

/// The maximum of fields, entries of maps and elements of lists that managers own one by one: each is a path in several
/// sets while an object is written, some hundred bytes in each.
const MAX_OWNED_FIELDS: usize = 30_000;

/// Checks that the fields of `new` can be tracked; an object that holds more of them already may not grow.
pub fn check_owned_fields(schema: &Schema, new: &Value, old: Option<&Value>) -> Result<(), String> {
    let count = |value: &Value| fields::count(Shape::Typed(schema), value);
    let fields = count(new);
    if fields <= MAX_OWNED_FIELDS || old.is_some_and(|old| fields <= count(old)) {
        return Ok(());
    }
    Err(format!(
        "it has {fields} fields, entries and elements that managers own one by one, more than the {MAX_OWNED_FIELDS} allowed; split it into several objects"
    ))
}

/// Applies a configuration; the result equals `live` exactly when nothing changed, so that the caller can
/// skip the write.
pub fn apply(request: ApplyRequest<'_>) -> Result<Value, ApplyError> {
    let ApplyRequest { live: stored, config, manager, force, subresource, api_version, now, schema } =
        request;
    let shape = Shape::Typed(schema);
    check(shape, config, api_version)?;
    let mut live = stored.cloned().unwrap_or_else(|| Value::Object(Map::new()));
    let entries = take_managed_fields(&mut live);
    let mut managers = managers::decode(&entries).unwrap_or_default();
    if managers.is_empty() && stored.is_some() {
        claim_unmanaged(shape, &live, &mut managers, api_version, subresource);
    }
    let before = managers.clone();
    let id = ManagerId::applier(manager, subresource);
    let run = |managers: &mut Managers, force| {
        update::apply(shape, &live, config, managers, &id, api_version, force)
    };
    let outcome = match run(&mut managers, force) {
        Err(conflicts) if manager == last_applied::MANAGER => {
            // Fields that kubectl wrote by client-side apply are no conflict.
            let allowed = last_applied::owned(shape, &live, api_version);
            let conflicts: Conflicts = conflicts.into_iter().filter(|(_, path)| !allowed.has(path)).collect();
            if conflicts.is_empty() {
                managers = before.clone();
                run(&mut managers, true)
            } else {
                Err(conflicts)
            }
        }
        outcome => outcome,
    };
    let mut new = outcome.map_err(|conflicts| conflict_error(&conflicts))?;
    if manager == last_applied::MANAGER {
        last_applied::refresh(&mut new, config);
    }
    let unchanged = same(&live, &new);
    if !unchanged {
        stamp(&mut managers, &id, now);
    }
    let entries_after = managers::encode(&managers);
    if let Some(stored) = stored
        && unchanged
        && entries_after == managers::encode(&managers::decode(&entries).unwrap_or_default())
    {
        return Ok(stored.clone());
    }
    put_managed_fields(&mut new, entries_after);
    Ok(new)
}

fn check(shape: Shape<'_>, config: &Value, api_version: &str) -> Result<(), ApplyError> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (given, kind) = (text(&config["apiVersion"]), text(&config["kind"]));
    if given != api_version {
        return Err(ApplyError::BadRequest(format!("invalid object type: {given}, Kind={kind}")));
    }
    if !config["metadata"]["managedFields"].is_null() {
        return Err(ApplyError::BadRequest("metadata.managedFields must be nil".into()));
    }
    let problems = fields::problems(shape, config);
    let detail = match problems.as_slice() {
        [] => return Ok(()),
        [one] => one.clone(),
        many => format!("errors:\n  {}", many.join("\n  ")),
    };
    let metadata = &config["metadata"];
    let object =
        format!("{}/{}; {given}, Kind={kind}", text(&metadata["namespace"]), text(&metadata["name"]));
    Err(ApplyError::Typed(format!("({object}): {detail}")))
}

/// Assigns the untracked fields of an object to one manager, so that an apply cannot take them over silently.
fn claim_unmanaged(
    shape: Shape<'_>,
    live: &Value,
    managers: &mut Managers,
    api_version: &str,
    subresource: &str,
) {
    let id = ManagerId::updater("before-first-apply", api_version, subresource);
    let status = Element::Field("status".into());
    let on_status = subresource == "status";
    let nothing = Value::Object(Map::new());
    update::update(shape, &nothing, live, managers, &id, api_version, |mut set: FieldSet| {
        set.members.retain(|element| (*element == status) == on_status);
        set.children.retain(|element, _| (*element == status) == on_status);
        set
    });
}

fn conflict_error(conflicts: &Conflicts) -> ApplyError {
    let causes = conflicts
        .iter()
        .map(|(id, path)| Conflict {
            message: format!("conflict with {}", id.describe()),
            field: display(path),
        })
        .collect();
    let message = match conflicts.as_slice() {
        [(id, path)] => {
            format!("Apply failed with 1 conflict: conflict with {}: {}", id.describe(), display(path))
        }
        many => {
            let mut lines = Vec::new();
            let mut current = None;
            // Conflicts are ordered by manager.
            for (id, path) in many {
                if current != Some(id) {
                    lines.push(format!("conflicts with {}:", id.describe()));
                    current = Some(id);
                }
                lines.push(format!("- {}", display(path)));
            }
            format!("Apply failed with {} conflicts: {}", many.len(), lines.join("\n"))
        }
    };
    ApplyError::Conflict { message, conflicts: causes }
}

/// Records in `new.metadata.managedFields` the fields that a create, update or other patch by `manager`
/// changed.
///
/// Keeps the live object's managedFields with their times when nothing but metadata bookkeeping changed.
pub fn track_update(
    old: Option<&Value>,
    new: &mut Value,
    manager: &str,
    subresource: &str,
    now: Timestamp,
    schema: &Schema,
) {
    let mut live = old.cloned().unwrap_or_else(|| Value::Object(Map::new()));
    let stored = take_managed_fields(&mut live);
    let sent = take_managed_fields(new);
    let decoded = |entries: &Value| managers::decode(entries).unwrap_or_default();
    let reset = sent.as_array().is_some_and(|entries| match entries.as_slice() {
        [] => true,
        [one] => one.as_object().is_some_and(Map::is_empty),
        _ => false,
    });
    let mut managers = match decoded(&sent) {
        _ if !subresource.is_empty() => decoded(&stored),
        _ if reset => Managers::new(),
        managers if managers.is_empty() => decoded(&stored),
        managers => managers,
    };
    if managers.is_empty() && old.is_some() {
        // No manager has used tracking so far, and the history is unknown: the first apply will claim the
        // fields.
        return;
    }
    let api_version = new["apiVersion"].as_str().unwrap_or_default().to_owned();
    let id = ManagerId::updater(manager, &api_version, subresource);
    // The update first runs under an empty name, so that a manager's own entry also loses fields, as the
    // others do.
    let current = ManagerId { operation: Operation::Update, ..ManagerId::updater("", "", "") };
    let shape = Shape::Typed(schema);
    let took = update::update(shape, &live, new, &mut managers, &current, &api_version, |set| set);
    if took && let Some(gained) = managers.remove(&current) {
        managers
            .entry(id.clone())
            .and_modify(|owned| owned.set = owned.set.union(&gained.set))
            .or_insert(gained);
        stamp(&mut managers, &id, now);
    }
    managers::cap_updaters(&mut managers);
    put_managed_fields(new, managers::encode(&managers));
}

fn stamp(managers: &mut Managers, id: &ManagerId, now: Timestamp) {
    if let Some(owned) = managers.get_mut(id) {
        owned.time = Some(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
}

fn take_managed_fields(object: &mut Value) -> Value {
    object
        .get_mut("metadata")
        .and_then(Value::as_object_mut)
        .and_then(|metadata| metadata.remove("managedFields"))
        .unwrap_or_default()
}

fn put_managed_fields(object: &mut Value, entries: Value) {
    if let Some(object) = object.as_object_mut() {
        let metadata = object.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
        if let Some(metadata) = metadata.as_object_mut().filter(|_| !entries.is_null()) {
            metadata.insert("managedFields".into(), entries);
        }
    }
}

#[cfg(test)]
mod tests;
