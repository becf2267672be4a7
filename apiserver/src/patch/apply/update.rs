//! Field ownership after a write, and conflicts between managers.
//!
//! Not here: which writes are allowed at all, times, the wire form.

use serde_json::Value;

use super::compare::{Comparison, compare};
use super::fields;
use super::managers::{ManagerId, Managers, Owned};
use super::merge::merge;
use super::path::Path;
use super::set::FieldSet;
use super::shape::Shape;

/// Fields owned by other managers that the write would change.
pub type Conflicts = Vec<(ManagerId, Path)>;

/// Fields that no manager owns: Kubernetes' own bookkeeping.
fn unowned_fields() -> FieldSet {
    FieldSet::of_fields(&[
        &["apiVersion"],
        &["kind"],
        &["metadata"],
        &["metadata", "name"],
        &["metadata", "namespace"],
        &["metadata", "creationTimestamp"],
        &["metadata", "selfLink"],
        &["metadata", "uid"],
        &["metadata", "clusterName"],
        &["metadata", "generation"],
        &["metadata", "managedFields"],
        &["metadata", "resourceVersion"],
    ])
}

/// Removes the unowned fields from the set of `id`, and the manager if its set becomes empty.
fn strip(managers: &mut Managers, id: &ManagerId) {
    if let Some(owned) = managers.get_mut(id) {
        owned.set = owned.set.difference(&unowned_fields());
        if owned.set.is_empty() {
            managers.remove(id);
        }
    }
}

/// Converts sets that were written under another schema to the current one.
fn reconcile(shape: Shape<'_>, managers: &mut Managers) {
    for owned in managers.values_mut() {
        owned.set = fields::reconciled(shape, &owned.set);
    }
}

/// Removes changed fields from all managers but `id`; without `force`, changes to fields of others are
/// conflicts.
fn transfer_ownership(
    shape: Shape<'_>,
    old: &Value,
    new: &Value,
    managers: &mut Managers,
    id: &ManagerId,
    force: bool,
) -> Result<Comparison, Conflicts> {
    let comparison = compare(shape, old, new);
    let changed = comparison.modified.union(&comparison.added);
    let mut conflicts = Conflicts::new();
    for (other, owned) in managers.iter().filter(|(other, _)| *other != id) {
        let disputed = owned.set.intersection(&changed).paths();
        conflicts.extend(disputed.into_iter().map(|path| (other.clone(), path)));
    }
    if !force && !conflicts.is_empty() {
        return Err(conflicts);
    }
    for (_, owned) in managers.iter_mut().filter(|(other, _)| *other != id) {
        owned.set = owned.set.difference(&changed).difference(&comparison.removed);
    }
    managers.retain(|_, owned| !owned.set.is_empty());
    Ok(comparison)
}

/// Records an update from `old` to `new`; returns whether `id` gained any field.
pub fn update(
    shape: Shape<'_>,
    old: &Value,
    new: &Value,
    managers: &mut Managers,
    id: &ManagerId,
    api_version: &str,
    ignored: impl Fn(FieldSet) -> FieldSet,
) -> bool {
    reconcile(shape, managers);
    let own = managers.remove(id);
    // Forced, so there are no conflicts; the id is not among the managers, so it loses removed fields, too.
    let Ok(comparison) = transfer_ownership(shape, old, new, managers, id, true) else { return false };
    let gained = ignored(comparison.modified.union(&comparison.added)).difference(&unowned_fields());
    let took = !gained.is_empty();
    let retained = own.as_ref().map(|own| own.set.difference(&comparison.removed)).unwrap_or_default();
    let set = retained.union(&gained);
    if !set.is_empty() {
        let time = own.and_then(|own| own.time);
        managers.insert(id.clone(), Owned { set, api_version: api_version.to_owned(), time });
    }
    took
}

/// Applies `config` to `live`: returns the new value and updates `managers`.
pub fn apply(
    shape: Shape<'_>,
    live: &Value,
    config: &Value,
    managers: &mut Managers,
    id: &ManagerId,
    api_version: &str,
    force: bool,
) -> Result<Value, Conflicts> {
    reconcile(shape, managers);
    let merged = merge(shape, Some(live), Some(config)).unwrap_or_default();
    let last = managers.get(id).cloned();
    managers.insert(
        id.clone(),
        Owned {
            set: fields::from_value(shape, config),
            api_version: api_version.to_owned(),
            time: last.as_ref().and_then(|owned| owned.time.clone()),
        },
    );
    let new = match last {
        Some(last) => prune(shape, merged, managers, &last.set),
        None => merged,
    };
    transfer_ownership(shape, live, &new, managers, id, force)?;
    strip(managers, id);
    Ok(new)
}

/// Removes the fields in `last`, the applier's previous set, that no manager, itself included, owns any more.
fn prune(shape: Shape<'_>, merged: Value, managers: &Managers, last: &FieldSet) -> Value {
    if last.is_empty() {
        return merged;
    }
    let whole = |set: &FieldSet| fields::with_named_parents(shape, set);
    let last = whole(last);
    let everything = whole(&fields::from_value(shape, &merged));
    let without_last = fields::remove(shape, &merged, &last);
    // First restore the fields that a manager owns …
    let owned = managers.values().fold(FieldSet::default(), |union, owned| union.union(&owned.set));
    let remaining = whole(&fields::from_value(shape, &without_last)).union(&whole(&owned));
    let with_owned = fields::remove(shape, &merged, &everything.difference(&remaining));
    // … then those without an owner, which this applier may not remove either.
    let remaining = whole(&fields::from_value(shape, &with_owned));
    let obsolete = everything.difference(&remaining).intersection(&last);
    let mut pruned = fields::remove(shape, &merged, &obsolete);
    fields::settle(shape, &mut pruned, &merged, &owned);
    pruned
}
