//! What a terminating namespace or definition waits for, and its conditions. Pure; the controllers write them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::object;

/// Objects that are still there, counted by resource and by finalizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// `models.russet.dev`, and how many.
    resources: BTreeMap<String, usize>,
    /// `russet.dev/copies`, and how many objects have it.
    finalizers: BTreeMap<String, usize>,
}

impl Remaining {
    /// Counts an object of this resource.
    pub fn add(&mut self, group: &str, plural: &str, object: &Value) {
        let resource = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        *self.resources.entry(resource).or_default() += 1;
        for finalizer in object::finalizers(object) {
            *self.finalizers.entry(finalizer.to_owned()).or_default() += 1;
        }
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.resources.is_empty()
    }

    /// `models.russet.dev has 2 resource instances`
    fn resources(&self) -> String {
        let all = self.resources.iter().map(|(name, count)| format!("{name} has {count} resource instances"));
        all.collect::<Vec<_>>().join(", ")
    }

    /// `russet.dev/copies in 2 resource instances`
    fn finalizers(&self) -> String {
        let all = self.finalizers.iter().map(|(name, count)| format!("{name} in {count} resource instances"));
        all.collect::<Vec<_>>().join(", ")
    }

    /// The message of a definition's condition while its objects are deleted.
    pub fn of_definition(&self) -> String {
        let mut message = format!("CustomResource deletion is in progress: {}", self.resources());
        if !self.finalizers.is_empty() {
            message.push_str(&format!("; finalizers: {}", self.finalizers()));
        }
        message
    }

    /// Sets the conditions of a namespace; false if they say so already.
    pub fn set_conditions(&self, namespace: &mut Value, now: &str) -> bool {
        let desired = [
            (
                "NamespaceDeletionDiscoveryFailure",
                false,
                "ResourcesDiscovered",
                "All resources successfully discovered".to_owned(),
            ),
            (
                "NamespaceDeletionGroupVersionParsingFailure",
                false,
                "ParsedGroupVersions",
                "All legacy kube types successfully parsed".to_owned(),
            ),
            (
                "NamespaceDeletionContentFailure",
                false,
                "ContentDeleted",
                "All content successfully deleted, may be waiting on finalization".to_owned(),
            ),
            match self.is_empty() {
                true => (
                    "NamespaceContentRemaining",
                    false,
                    "ContentRemoved",
                    "All content successfully removed".to_owned(),
                ),
                false => (
                    "NamespaceContentRemaining",
                    true,
                    "SomeResourcesRemain",
                    format!("Some resources are remaining: {}", self.resources()),
                ),
            },
            match self.finalizers.is_empty() {
                true => (
                    "NamespaceFinalizersRemaining",
                    false,
                    "ContentHasNoFinalizers",
                    "All content-preserving finalizers finished".to_owned(),
                ),
                false => (
                    "NamespaceFinalizersRemaining",
                    true,
                    "SomeFinalizersRemain",
                    format!("Some content in the namespace has finalizers remaining: {}", self.finalizers()),
                ),
            },
        ];
        let before = namespace["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let mut conditions = before.clone();
        for (kind, holds, reason, message) in desired {
            let status = if holds { "True" } else { "False" };
            let place = conditions.iter().position(|condition| condition["type"] == kind);
            let since = place
                .map(|index| &conditions[index])
                .filter(|condition| condition["status"] == status)
                .map_or(json!(now), |condition| condition["lastTransitionTime"].clone());
            let condition = json!({
                "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since,
            });
            match place {
                Some(index) => conditions[index] = condition,
                None => conditions.push(condition),
            }
        }
        if conditions == before {
            return false;
        }
        if !namespace["status"].is_object() {
            namespace["status"] = json!({});
        }
        namespace["status"]["conditions"] = conditions.into();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_remains_is_listed_with_numbers_and_names() {
        let held = |finalizers: &[&str]| json!({"metadata": {"finalizers": finalizers}});
        let mut remaining = Remaining::default();
        for object in [held(&["russet.dev/copies"]), held(&["russet.dev/copies", "a.b/c"])] {
            remaining.add("russet.dev", "models", &object);
        }
        remaining.add("", "configmaps", &held(&[]));
        let mut namespace = json!({"status": {"phase": "Terminating"}});
        assert!(remaining.set_conditions(&mut namespace, "2026-01-01T00:00:00Z"));
        assert!(!remaining.set_conditions(&mut namespace, "2026-01-02T00:00:00Z"), "nothing changed");
        let message =
            |namespace: &Value, index: usize| namespace["status"]["conditions"][index]["message"].clone();
        assert_eq!(
            message(&namespace, 3),
            "Some resources are remaining: configmaps has 1 resource instances, models.russet.dev has 2 resource instances"
        );
        assert_eq!(
            message(&namespace, 4),
            "Some content in the namespace has finalizers remaining: a.b/c in 1 resource instances, russet.dev/copies in 2 resource instances"
        );
        assert_eq!(
            remaining.of_definition(),
            "CustomResource deletion is in progress: configmaps has 1 resource instances, models.russet.dev has 2 resource instances; finalizers: a.b/c in 1 resource instances, russet.dev/copies in 2 resource instances"
        );
        assert!(Remaining::default().set_conditions(&mut namespace, "2026-01-03T00:00:00Z"));
        let conditions = namespace["status"]["conditions"].as_array().expect("conditions");
        assert!(conditions.iter().all(|condition| condition["status"] == "False"), "{namespace}");
        assert_eq!(conditions[0]["lastTransitionTime"], "2026-01-01T00:00:00Z");
        assert_eq!(conditions[3]["lastTransitionTime"], "2026-01-03T00:00:00Z");
    }
}
