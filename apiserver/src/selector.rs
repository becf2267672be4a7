//! Label and field selectors: parsing and matching. Not here: which fields are selectable; the resource
//! defines that.

use serde_json::Value;

use crate::kinds::resource::Resource;
use crate::status::{ApiError, Result};

/// One requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    Exists,
    Absent,
    In(Vec<String>),
    /// Also matches objects without the label.
    NotIn(Vec<String>),
    Greater(i64),
    Less(i64),
}

/// A parsed pair of selectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<(String, Requirement)>,
    /// Path, whether it must be equal, value.
    fields: Vec<(String, bool, String)>,
}

impl Selector {
    /// Parses both selectors of a request on a resource.
    pub fn parse(labels: &str, fields: &str, resource: &Resource) -> Result<Self> {
        let labels = parse_labels(labels).map_err(|why| {
            ApiError::bad_request(format!("unable to parse requirement: {why} in label selector {labels:?}"))
        })?;
        let fields = parse_fields(fields, resource)?;
        Ok(Self { labels, fields })
    }

    /// Whether it matches everything.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// The only name that can match, if a field selector requires one.
    pub fn only_name(&self) -> Option<&str> {
        self.fields
            .iter()
            .find(|(path, equal, _)| *equal && path == "metadata.name")
            .map(|(_, _, value)| value.as_str())
    }

    /// Whether the object matches.
    pub fn matches(&self, object: &Value) -> bool {
        self.labels.iter().all(|(key, demand)| demand.is_met(object["metadata"]["labels"][key].as_str()))
            && self.fields.iter().all(|(path, equal, value)| (field(object, path) == *value) == *equal)
    }
}

/// Whether a label selector of an object (`matchLabels`, `matchExpressions`) matches these labels.
pub fn matches_labels(selector: &Value, labels: &Value) -> bool {
    let equal =
        selector["matchLabels"].as_object().into_iter().flatten().all(|(key, value)| labels[key] == *value);
    let expressions = selector["matchExpressions"].as_array().into_iter().flatten();
    equal
        && expressions.into_iter().all(|expression| {
            let label = labels[expression["key"].as_str().unwrap_or_default()].as_str();
            let values = || {
                let values = expression["values"].as_array().into_iter().flatten();
                values.filter_map(Value::as_str).map(str::to_string).collect()
            };
            match expression["operator"].as_str() {
                Some("In") => Requirement::In(values()).is_met(label),
                Some("NotIn") => Requirement::NotIn(values()).is_met(label),
                Some("Exists") => Requirement::Exists.is_met(label),
                Some("DoesNotExist") => Requirement::Absent.is_met(label),
                _ => false,
            }
        })
}

impl Requirement {
    fn is_met(&self, label: Option<&str>) -> bool {
        let number = || label.and_then(|label| label.parse::<i64>().ok());
        match self {
            Self::Exists => label.is_some(),
            Self::Absent => label.is_none(),
            Self::In(values) => label.is_some_and(|label| values.iter().any(|value| value == label)),
            Self::NotIn(values) => label.is_none_or(|label| !values.iter().any(|value| value == label)),
            Self::Greater(than) => number().is_some_and(|number| number > *than),
            Self::Less(than) => number().is_some_and(|number| number < *than),
        }
    }
}

fn field(object: &Value, path: &str) -> String {
    let mut value = object;
    for part in path.trim_start_matches('.').split('.') {
        value = &value[part];
    }
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Splits at commas that are not inside parentheses.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (index, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn parse_labels(text: &str) -> std::result::Result<Vec<(String, Requirement)>, String> {
    split(text).into_iter().map(parse_label).collect()
}

fn parse_label(part: &str) -> std::result::Result<(String, Requirement), String> {
    let one = |value: &str| vec![value.trim().to_string()];
    let (key, demand) = if let Some((key, value)) = part.split_once("!=") {
        (key, Requirement::NotIn(one(value)))
    } else if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        (key, Requirement::In(one(value)))
    } else if let Some((head, list)) = part.split_once('(') {
        let list = list.strip_suffix(')').ok_or_else(|| format!("{part:?} lacks a closing parenthesis"))?;
        let values = list.split(',').map(|value| value.trim().to_string()).collect();
        match head.trim().rsplit_once(char::is_whitespace) {
            Some((key, "in")) => (key, Requirement::In(values)),
            Some((key, "notin")) => (key, Requirement::NotIn(values)),
            _ => return Err(format!("{part:?} is neither `key in (…)` nor `key notin (…)`")),
        }
    } else if let Some(key) = part.strip_prefix('!') {
        (key, Requirement::Absent)
    } else if let Some((key, value)) = part.split_once('>') {
        (key, Requirement::Greater(value.trim().parse().map_err(|_| format!("{value:?} is not a number"))?))
    } else if let Some((key, value)) = part.split_once('<') {
        (key, Requirement::Less(value.trim().parse().map_err(|_| format!("{value:?} is not a number"))?))
    } else {
        (part, Requirement::Exists)
    };
    let key = key.trim();
    if !crate::object::is_label_key(key) {
        return Err(format!("{key:?} is not a label key"));
    }
    if let Requirement::In(values) | Requirement::NotIn(values) = &demand
        && let Some(value) = values.iter().find(|value| !crate::object::is_label_value(value))
    {
        return Err(format!("{value:?} is not a label value"));
    }
    Ok((key.to_string(), demand))
}

fn parse_fields(text: &str, resource: &Resource) -> Result<Vec<(String, bool, String)>> {
    split(text)
        .into_iter()
        .map(|part| {
            let (path, equal, value) = if let Some((path, value)) = part.split_once("!=") {
                (path, false, value)
            } else if let Some((path, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
                (path, true, value)
            } else {
                return Err(ApiError::bad_request(format!(
                    "invalid field selector {part:?}: write path=value"
                )));
            };
            let path = path.trim();
            if !selectable(resource, path) {
                return Err(ApiError::bad_request(format!(
                    "field label not supported: {path} for {} in {}",
                    resource.kind,
                    resource.api_version()
                )));
            }
            Ok((path.to_string(), equal, value.trim().replace("\\,", ",").replace("\\=", "=")))
        })
        .collect()
}

fn selectable(resource: &Resource, path: &str) -> bool {
    if path == "metadata.name" || (path == "metadata.namespace" && resource.namespaced) {
        return true;
    }
    if let Some(custom) = &resource.custom {
        return custom.selectable.iter().any(|known| known.trim_start_matches('.') == path);
    }
    match resource.kind.as_str() {
        "Event" => {
            path.starts_with("involvedObject.")
                || path.starts_with("regarding.")
                || matches!(path, "reason" | "type" | "source" | "reportingComponent" | "reportingController")
        }
        "Secret" => path == "type",
        "Namespace" => path == "status.phase",
        "CertificateSigningRequest" => path == "spec.signerName",
        // Kinds without objects: any selector matches nothing.
        "Pod" | "Node" | "Service" => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn label_selectors_match_as_written() {
        let object = json!({"metadata": {"labels": {"app": "x", "tier": "gold", "n": "5"}}});
        for (selector, expected) in [
            ("app=x", true),
            ("app==y", false),
            ("app!=y,tier", true),
            ("!app", false),
            ("!other", true),
            ("tier in (gold, silver),app=x", true),
            ("tier notin (gold)", false),
            ("other notin (gold)", true),
            ("n>4", true),
            ("n<4", false),
        ] {
            let labels = parse_labels(selector).unwrap();
            assert_eq!(Selector { labels, fields: Vec::new() }.matches(&object), expected, "{selector}");
        }
        assert!(parse_labels("tier in (gold").is_err());
        assert!(parse_labels("a/b/c=x").is_err());
    }

    #[test]
    fn selectors_inside_objects_match_too() {
        let selector =
            json!({"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]});
        assert!(matches_labels(&selector, &json!({"a": "1", "b": "2"})));
        assert!(!matches_labels(&selector, &json!({"a": "1"})));
    }
}
