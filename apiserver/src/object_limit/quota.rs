//! ResourceQuotas that count objects: which objects a key counts, and whether one more fits. Not here: the status, see
//! `gc/quotas.rs`. Quantities of pods' resources are accepted and are zero: there are no pods.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::call::Call;
use crate::kinds::builtin;
use crate::kinds::table::Table;
use crate::object;
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use crate::verbs::list;

/// Prefix of keys that count objects of any kind.
const COUNT: &str = "count/";
/// Kinds that count under their own name, too.
const SHORT: &[&str] = &["configmaps", "resourcequotas", "secrets", "services"];

/// A limit of a quota on objects of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaLimit {
    /// The quota's name.
    pub quota: String,
    /// Such as `count/secrets`.
    pub key: String,
    /// How many there may be, as written.
    pub hard: String,
}

/// The storage prefix of the objects that a key counts; `None` for a key of something else.
pub fn counted_prefix(table: &Table, key: &str) -> Option<String> {
    let (plural, group) = match key.strip_prefix(COUNT) {
        Some(counted) => counted.split_once('.').unwrap_or((counted, "")),
        None if SHORT.contains(&key) => (key, ""),
        None => return None,
    };
    let mut resources = table.stored().into_iter().chain(table.all().iter().cloned());
    resources
        .find(|resource| resource.plural == plural && resource.group == group && resource.namespaced)
        .map(|resource| resource.prefix.clone())
}

/// The number that a quantity means, rounded down; `None` if it is none.
pub fn quantity(text: &str) -> Option<u64> {
    const UNITS: [(&str, f64); 16] = [
        ("", 1.0),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("E", 1e18),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("m", 1e-3),
        ("u", 1e-6),
        ("n", 1e-9),
    ];
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '+')).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().ok()?;
    let factor = match UNITS.iter().find(|(name, _)| *name == unit) {
        Some((_, factor)) => *factor,
        None => 10f64.powi(unit.strip_prefix(['e', 'E'])?.parse::<i8>().ok()?.into()),
    };
    Some((number * factor) as u64)
}

/// The limits of the namespace's quotas on the objects that are about to be created.
pub fn limits_of(api: &ServerState, call: &Call) -> Result<Vec<QuotaLimit>> {
    let prefix = format!("{}{}/", builtin::prefix("", "resourcequotas"), call.namespace);
    let quotas = api.store.range(&prefix, None, None).map_err(list::storage_error)?;
    let table = api.kinds.current();
    let mut limits = Vec::new();
    for record in &quotas.records {
        for (key, hard) in hard(record.object()) {
            if counted_prefix(&table, &key).as_ref() == Some(&call.resource.prefix) {
                limits.push(QuotaLimit { quota: object::name(record.object()).into(), key, hard });
            }
        }
    }
    Ok(limits)
}

/// What a quota limits; nothing if it is only about some pods.
pub fn hard(quota: &Value) -> BTreeMap<String, String> {
    let spec = &quota["spec"];
    let of_pods = !spec["scopes"].as_array().is_none_or(Vec::is_empty) || spec["scopeSelector"].is_object();
    if of_pods {
        return BTreeMap::new();
    }
    let entries = spec["hard"].as_object().into_iter().flatten();
    entries.filter_map(|(key, hard)| Some((key.clone(), hard.as_str()?.to_owned()))).collect()
}

/// Objects under a prefix in a namespace.
pub fn used(api: &ServerState, prefix: &str, namespace: &str) -> Result<usize> {
    let snapshot =
        api.store.range(&format!("{prefix}{namespace}/"), None, None).map_err(list::storage_error)?;
    Ok(snapshot.records.len())
}

/// 403 if one more object exceeds a quota.
pub fn check(api: &ServerState, call: &Call) -> Result<()> {
    let limits = limits_of(api, call)?;
    if limits.is_empty() {
        return Ok(());
    }
    let used = used(api, &call.resource.prefix, &call.namespace)?;
    for QuotaLimit { quota, key, hard } in limits {
        if quantity(&hard).is_some_and(|hard| used as u64 >= hard) {
            let why = format!(
                "exceeded quota: {quota}, requested: {key}=1, used: {key}={used}, limited: {key}={hard}"
            );
            return Err(ApiError::forbidden(&call.resource.group, &call.resource.plural, &call.name, why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn keys_name_the_objects_they_count() {
        let table = Table::new(builtin::resources().into_iter().map(Arc::new).collect());
        for (key, expected) in [
            ("count/configmaps", Some("/registry/core/configmaps/")),
            ("configmaps", Some("/registry/core/configmaps/")),
            ("count/leases.coordination.k8s.io", Some("/registry/coordination.k8s.io/leases/")),
            ("count/events.events.k8s.io", Some("/registry/core/events/")),
            ("count/events", Some("/registry/core/events/")),
            ("leases.coordination.k8s.io", None),
            ("count/namespaces", None),
            ("count/nothing.example.com", None),
            ("requests.cpu", None),
        ] {
            assert_eq!(counted_prefix(&table, key).as_deref(), expected, "{key}");
        }
    }

    #[test]
    fn quantities_are_read_as_kubernetes_does() {
        for (text, expected) in [
            ("0", Some(0)),
            ("10", Some(10)),
            ("1k", Some(1000)),
            ("1Ki", Some(1024)),
            ("1.5k", Some(1500)),
            ("1500m", Some(1)),
            ("1e3", Some(1000)),
            ("12E2", Some(1200)),
            ("1Ei", Some(1 << 60)),
            ("5000000u", Some(5)),
            ("1e", None),
            ("1e999", None),
            ("", None),
            ("x", None),
            ("-1", None),
            ("1x", None),
        ] {
            assert_eq!(quantity(text), expected, "{text}");
        }
    }
}
