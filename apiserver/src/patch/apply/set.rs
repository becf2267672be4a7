//! Sets of fields that managers own, as a trie, and their fieldsV1 form.
//!
//! Not here: the fields of a value; that requires a schema.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::path::{Element, Path};

/// A set of paths. A member is owned itself; children hold the owned paths below an element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSet {
    /// The paths that end here.
    pub members: BTreeSet<Element>,
    /// The paths that continue; never empty sets.
    pub children: BTreeMap<Element, FieldSet>,
}

impl FieldSet {
    /// The set of these paths of field names.
    pub fn of_fields(paths: &[&[&str]]) -> FieldSet {
        let mut set = FieldSet::default();
        for path in paths {
            let path: Path = path.iter().map(|name| Element::Field((*name).to_owned())).collect();
            set.insert(&path);
        }
        set
    }

    /// Whether it contains no path.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty() && self.children.values().all(FieldSet::is_empty)
    }

    /// Adds a path; the root itself cannot be owned.
    pub fn insert(&mut self, path: &[Element]) {
        match path {
            [] => {}
            [last] => {
                self.members.insert(last.clone());
            }
            [first, rest @ ..] => self.children.entry(first.clone()).or_default().insert(rest),
        }
    }

    /// Whether a path is a member.
    pub fn has(&self, path: &[Element]) -> bool {
        match path {
            [] => false,
            [last] => self.members.contains(last),
            [first, rest @ ..] => self.children.get(first).is_some_and(|child| child.has(rest)),
        }
    }

    /// The paths of either set.
    pub fn union(&self, other: &FieldSet) -> FieldSet {
        let mut union = self.clone();
        union.members.extend(other.members.iter().cloned());
        for (element, child) in &other.children {
            let merged = union.children.get(element).map_or_else(|| child.clone(), |own| own.union(child));
            union.children.insert(element.clone(), merged);
        }
        union
    }

    /// The paths of this set that are not in the other.
    pub fn difference(&self, other: &FieldSet) -> FieldSet {
        self.combine(other, |mine, theirs| mine && !theirs, FieldSet::difference, true)
    }

    /// The paths of both sets.
    pub fn intersection(&self, other: &FieldSet) -> FieldSet {
        self.combine(other, |mine, theirs| mine && theirs, FieldSet::intersection, false)
    }

    fn combine(
        &self,
        other: &FieldSet,
        keep: fn(bool, bool) -> bool,
        below: fn(&FieldSet, &FieldSet) -> FieldSet,
        keep_unmatched: bool,
    ) -> FieldSet {
        let members = self
            .members
            .iter()
            .filter(|element| keep(true, other.members.contains(*element)))
            .cloned()
            .collect();
        let children = self
            .children
            .iter()
            .filter_map(|(element, child)| {
                let child = match other.children.get(element) {
                    Some(other) => below(child, other),
                    None if keep_unmatched => child.clone(),
                    None => return None,
                };
                (!child.is_empty()).then(|| (element.clone(), child))
            })
            .collect();
        FieldSet { members, children }
    }

    /// All paths: at each level the ones that end there first, then the ones that continue.
    pub fn paths(&self) -> Vec<Path> {
        let mut paths = Vec::new();
        self.collect(&mut Vec::new(), &mut paths);
        paths
    }

    fn collect(&self, prefix: &mut Path, paths: &mut Vec<Path>) {
        for element in &self.members {
            let mut path = prefix.clone();
            path.push(element.clone());
            paths.push(path);
        }
        for (element, child) in &self.children {
            prefix.push(element.clone());
            child.collect(prefix, paths);
            prefix.pop();
        }
    }

    /// The fieldsV1 form.
    pub fn encode(&self) -> Value {
        let mut fields = Map::new();
        for element in &self.members {
            fields.insert(element.encode(), Value::Object(Map::new()));
        }
        for (element, child) in &self.children {
            let mut below = child.encode();
            if self.members.contains(element)
                && let Some(below) = below.as_object_mut()
            {
                below.insert(".".into(), Value::Object(Map::new()));
            }
            fields.insert(element.encode(), below);
        }
        Value::Object(fields)
    }

    /// Decodes the fieldsV1 form.
    pub fn decode(fields: &Value) -> Result<FieldSet, String> {
        let mut set = FieldSet::default();
        let fields = fields.as_object().ok_or_else(|| format!("fieldsV1 is not an object: {fields}"))?;
        for (key, below) in fields {
            if key == "." {
                continue;
            }
            let Some(element) = Element::decode(key)? else { continue };
            let child = FieldSet::decode(below)?;
            if child.is_empty() || below.get(".").is_some() {
                set.members.insert(element.clone());
            }
            if !child.is_empty() {
                set.children.insert(element, child);
            }
        }
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::FieldSet;

    fn set(fields: &Value) -> FieldSet {
        FieldSet::decode(fields).expect("fieldsV1")
    }

    #[test]
    fn the_written_form_comes_back() {
        let fields = json!({
            "f:spec": {".": {}, "f:list": {"k:{\"name\":\"a\",\"port\":80}": {".": {}, "f:x": {}}}, "f:set": {"v:\"s\"": {}, "v:1": {}}},
            "f:a<b": {},
        });
        assert_eq!(set(&fields).encode(), fields);
        assert!(FieldSet::decode(&json!({"nonsense": {}})).is_err());
        assert!(set(&json!({"z:future": {}})).is_empty());
    }

    #[test]
    fn set_algebra_holds_for_members_and_children() {
        let a = set(&json!({"f:x": {}, "f:m": {".": {}, "f:p": {}, "f:q": {}}}));
        let b = set(&json!({"f:m": {"f:q": {}, "f:r": {}}, "f:y": {}}));
        assert_eq!(
            a.union(&b),
            set(&json!({"f:x": {}, "f:y": {}, "f:m": {".": {}, "f:p": {}, "f:q": {}, "f:r": {}}}))
        );
        assert_eq!(a.difference(&b), set(&json!({"f:x": {}, "f:m": {".": {}, "f:p": {}}})));
        assert_eq!(a.intersection(&b), set(&json!({"f:m": {"f:q": {}}})));
        assert!(a.difference(&a).is_empty());
    }
}
