//! Ownership: who owns what after a write, and which writes take from others.
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

/// Fields that belong to others and would change.
pub type Conflicts = Vec<(ManagerId, Path)>;

/// Every path of Kubernetes' own bookkeeping, which nobody owns.
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

/// Takes bookkeeping out of what `id` owns, and the manager with it if nothing else is left.
fn strip(managers: &mut Managers, id: &ManagerId) {
    if let Some(owned) = managers.get_mut(id) {
        owned.set = owned.set.difference(&unowned_fields());
        if owned.set.is_empty() {
            managers.remove(id);
        }
    }
}

/// Lets sets that were written under another schema follow the present one.
fn reconcile(shape: Shape<'_>, managers: &mut Managers) {
    for owned in managers.values_mut() {
        owned.set = fields::reconciled(shape, &owned.set);
    }
}

/// Takes what changed from everybody but `id`; without `force`, changes to what others own are conflicts.
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

/// Records an update that turned `old` into `new`; whether it gave `id` anything.
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
    // Forced, so there are no conflicts; the id is not among the managers, so it loses what was removed, too.
    let Ok(comparison) = transfer_ownership(shape, old, new, managers, id, true) else { return false };
    let gained = ignored(comparison.modified.union(&comparison.added)).difference(&unowned_fields());
    let took = !gained.is_empty();
    let kept = own.as_ref().map(|own| own.set.difference(&comparison.removed)).unwrap_or_default();
    let set = kept.union(&gained);
    if !set.is_empty() {
        let time = own.and_then(|own| own.time);
        managers.insert(id.clone(), Owned { set, api_version: api_version.to_owned(), time });
    }
    took
}

/// Applies `config` to `live`: the new value, with `managers` brought up to date.
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

/// Removes what the applier applied `last` and nobody, itself included, owns any more.
fn prune(shape: Shape<'_>, merged: Value, managers: &Managers, last: &FieldSet) -> Value {
    if last.is_empty() {
        return merged;
    }
    let whole = |set: &FieldSet| fields::with_named_parents(shape, set);
    let last = whole(last);
    let everything = whole(&fields::from_value(shape, &merged));
    let without_last = fields::remove(shape, &merged, &last);
    // First put back what somebody owns …
    let owned = managers.values().fold(FieldSet::default(), |union, owned| union.union(&owned.set));
    let remaining = whole(&fields::from_value(shape, &without_last)).union(&whole(&owned));
    let with_owned = fields::remove(shape, &merged, &everything.difference(&remaining));
    // … then what nobody owned, which this applier may not remove either.
    let remaining = whole(&fields::from_value(shape, &with_owned));
    let unwanted = everything.difference(&remaining).intersection(&last);
    let mut pruned = fields::remove(shape, &merged, &unwanted);
    fields::settle(shape, &mut pruned, &merged, &owned);
    pruned
}
