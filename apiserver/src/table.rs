//! `meta.k8s.io/v1` Tables: the output of `kubectl get`, for custom resources and built-in kinds.
//!
//! Not here: choosing Table over JSON (the Accept header), pagination, watches.

mod builtin;
pub mod jsonpath;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

pub use builtin::builtin_columns;
use jsonpath::JsonPath;

/// How much of each object a row carries (`includeObject`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Include {
    /// Nothing.
    None,
    /// `PartialObjectMetadata`, the default.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

/// One printed column.
#[derive(Debug, Clone)]
pub struct Column {
    /// The heading.
    pub name: String,
    /// `string`, `integer`, `number`, `boolean`, `date`.
    pub kind: String,
    /// OpenAPI format, often empty; `name` marks the object's name.
    pub format: String,
    /// Help text.
    pub description: String,
    /// Zero is always printed, larger ones only with `-o wide`.
    pub priority: i64,
    /// The source of the cells.
    pub source: ColumnSource,
}

/// The source of a cell.
#[derive(Debug, Clone)]
pub enum ColumnSource {
    /// A JSONPath of a CRD; an invalid one prints nothing.
    Path(Option<JsonPath>),
    /// A function, for built-in kinds.
    Code(fn(&Value, Timestamp) -> Value),
}

/// The columns of a CRD version (an element of `spec.versions`): Name, then its printer columns, or Age
/// without any.
pub fn custom_columns(version: &Value) -> Vec<Column> {
    let declared = version["additionalPrinterColumns"].as_array().map_or(&[][..], Vec::as_slice);
    let mut columns = vec![name_column()];
    if declared.is_empty() {
        columns.push(age_column());
    }
    for column in declared {
        let text = |name: &str| column[name].as_str().unwrap_or_default().to_owned();
        let path = text("jsonPath");
        let description = match text("description") {
            described if !described.is_empty() => described,
            _ => format!("Custom resource definition column (in JSONPath format): {path}"),
        };
        columns.push(Column {
            name: text("name"),
            kind: text("type"),
            format: text("format"),
            description,
            priority: column["priority"].as_i64().unwrap_or_default(),
            source: ColumnSource::Path(JsonPath::parse(&path).ok()),
        });
    }
    columns
}

fn name_column() -> Column {
    Column {
        name: "Name".into(),
        kind: "string".into(),
        format: "name".into(),
        description: "Name must be unique within a namespace; it identifies the object.".into(),
        priority: 0,
        source: ColumnSource::Code(|object, _| object["metadata"]["name"].clone()),
    }
}

fn age_column() -> Column {
    Column {
        name: "Age".into(),
        kind: "date".into(),
        format: String::new(),
        description: "The time since the object was created.".into(),
        priority: 0,
        source: ColumnSource::Code(|object, now| age(&object["metadata"]["creationTimestamp"], now)),
    }
}

/// A Table of `objects`; `list_metadata` (resourceVersion, continue, remainingItemCount) is copied into it.
///
/// `with_headings: false` omits `columnDefinitions`, as in watches after the first event.
pub fn render(
    columns: &[Column],
    objects: &[&Value],
    list_metadata: Value,
    include: Include,
    with_headings: bool,
    now: Timestamp,
) -> Value {
    let headings: Vec<Value> = columns
        .iter()
        .filter(|_| with_headings)
        .map(|column| {
            json!({
                "name": column.name, "type": column.kind, "format": column.format,
                "description": column.description, "priority": column.priority,
            })
        })
        .collect();
    let rows: Vec<Value> = objects
        .iter()
        .map(|object| {
            let cells: Vec<Value> = columns.iter().map(|column| column.cell(object, now)).collect();
            let mut row = Map::from_iter([("cells".to_owned(), Value::from(cells))]);
            match include {
                Include::None => {}
                Include::Metadata => {
                    row.insert("object".into(), partial_metadata(object));
                }
                Include::Object => {
                    row.insert("object".into(), (*object).clone());
                }
            }
            row.into()
        })
        .collect();
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": list_metadata,
        "columnDefinitions": headings,
        "rows": rows,
    })
}

/// The `PartialObjectMetadata` of an object.
pub fn partial_metadata(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

impl Column {
    fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let path = match &self.source {
            ColumnSource::Code(code) => return code(object, now),
            ColumnSource::Path(path) => path.as_ref(),
        };
        let Some(found) = path.and_then(|path| path.find(object).into_iter().next()) else {
            return Value::Null;
        };
        match self.kind.as_str() {
            "string" => match found {
                Value::String(_) => found.clone(),
                Value::Null => Value::Null,
                other => other.to_string().into(),
            },
            "integer" => match (found.as_i64(), found.as_f64()) {
                (Some(number), _) => number.into(),
                (None, Some(number)) => (number as i64).into(),
                (None, None) => Value::Null,
            },
            "number" => found.as_f64().map_or(Value::Null, Value::from),
            "boolean" => found.as_bool().map_or(Value::Null, Value::from),
            "date" => age(found, now),
            _ => Value::Null,
        }
    }
}

/// A timestamp as the age since it; `<unknown>` without one, `<invalid>` for a malformed one.
pub fn age(timestamp: &Value, now: Timestamp) -> Value {
    match timestamp.as_str() {
        None => "<unknown>".into(),
        Some(text) => match text.parse::<Timestamp>() {
            Ok(then) => human_duration(now.as_second() - then.as_second()).into(),
            Err(_) => "<invalid>".into(),
        },
    }
}

/// Two or three significant figures, as in kubectl's ages.
pub fn human_duration(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let pair = |large: i64, unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit}{small}{small_unit}"),
    };
    match seconds {
        // Clocks of different machines may differ a little.
        ..-1 => "<invalid>".into(),
        -1 => "0s".into(),
        _ if seconds < 2 * MINUTE => format!("{seconds}s"),
        _ if seconds < 10 * MINUTE => pair(seconds / MINUTE, "m", seconds % MINUTE, "s"),
        _ if seconds < 3 * HOUR => format!("{}m", seconds / MINUTE),
        _ if seconds < 8 * HOUR => pair(seconds / HOUR, "h", seconds / MINUTE % 60, "m"),
        _ if seconds < 2 * DAY => format!("{}h", seconds / HOUR),
        _ if seconds < 8 * DAY => pair(seconds / DAY, "d", seconds / HOUR % 24, "h"),
        _ if seconds < 2 * YEAR => format!("{}d", seconds / DAY),
        _ if seconds < 8 * YEAR => pair(seconds / YEAR, "y", seconds / DAY % 365, "d"),
        _ => format!("{}y", seconds / YEAR),
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::{Value, json};

    use super::{Include, builtin_columns, custom_columns, human_duration, render};

    fn now() -> Timestamp {
        "2026-11-21T10:00:00Z".parse().expect("a timestamp")
    }

    #[test]
    fn ages_have_two_or_three_figures() {
        for (seconds, expected) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (119, "119s"),
            (120, "2m"),
            (599, "9m59s"),
            (600, "10m"),
            (3 * 3600, "3h"),
            (7 * 3600 + 60, "7h1m"),
            (47 * 3600, "47h"),
            (50 * 3600, "2d2h"),
            (9 * 86400, "9d"),
            (3 * 365 * 86400 + 86400, "3y1d"),
            (9 * 365 * 86400, "9y"),
        ] {
            assert_eq!(human_duration(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn crd_columns_print_by_type_and_missing_values_are_empty() {
        let version = json!({"additionalPrinterColumns": [
            {"name": "Replicas", "type": "integer", "jsonPath": ".spec.replicas"},
            {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status"},
            {"name": "Share", "type": "number", "jsonPath": ".spec.share", "priority": 1},
            {"name": "On", "type": "boolean", "jsonPath": ".spec.on"},
            {"name": "Nodes", "type": "string", "jsonPath": ".spec.nodes"},
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
            {"name": "Broken", "type": "date", "jsonPath": ".spec.replicas", "description": "a broken column"},
        ]});
        let full = json!({"metadata": {"name": "a", "creationTimestamp": "2026-11-21T09:00:00Z"},
            "spec": {"replicas": 2, "share": 0.5, "on": true, "nodes": ["x"]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let empty = json!({"metadata": {"name": "b"}});
        let table = render(
            &custom_columns(&version),
            &[&full, &empty],
            json!({"resourceVersion": "7"}),
            Include::None,
            true,
            now(),
        );
        assert_eq!(
            table["rows"][0],
            json!({"cells": ["a", 2, "True", 0.5, true, "[\"x\"]", "60m", "<unknown>"]})
        );
        assert_eq!(table["rows"][1], json!({"cells": ["b", null, null, null, null, null, null, null]}));
        assert_eq!(table["metadata"]["resourceVersion"], "7");
        let headings: Vec<&Value> =
            table["columnDefinitions"].as_array().expect("headings").iter().map(|c| &c["name"]).collect();
        assert_eq!(headings, ["Name", "Replicas", "Ready", "Share", "On", "Nodes", "Age", "Broken"]);
        assert_eq!(table["columnDefinitions"][3]["priority"], 1);
        assert_eq!(table["columnDefinitions"][7]["description"], "a broken column");
    }

    #[test]
    fn rows_carry_as_much_of_the_object_as_was_asked() {
        let object = json!({"metadata": {"name": "a"}, "spec": {}});
        let columns = custom_columns(&json!({}));
        let row = |include| render(&columns, &[&object], json!({}), include, false, now())["rows"][0].clone();
        assert_eq!(row(Include::None).get("object"), None);
        assert_eq!(
            row(Include::Metadata)["object"],
            json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": "a"}})
        );
        assert_eq!(row(Include::Object)["object"], object);
        let table = render(&columns, &[], json!({}), Include::None, false, now());
        assert_eq!(table["columnDefinitions"], json!([]));
    }

    #[test]
    fn built_in_kinds_print_the_columns_of_kubectl() {
        let then = "2026-11-21T09:59:00Z";
        for (group, kind, object, expected) in [
            ("", "Namespace", json!({"status": {"phase": "Active"}}), json!(["n", "Active", "60s"])),
            (
                "",
                "Secret",
                json!({"type": "Opaque", "data": {"a": "", "b": ""}}),
                json!(["n", "Opaque", 2, "60s"]),
            ),
            ("", "ConfigMap", json!({"data": {"a": ""}, "binaryData": {"b": ""}}), json!(["n", 2, "60s"])),
            ("", "ServiceAccount", json!({}), json!(["n", 0, "60s"])),
            (
                "coordination.k8s.io",
                "Lease",
                json!({"spec": {"holderIdentity": "me"}}),
                json!(["n", "me", "60s"]),
            ),
            ("apiextensions.k8s.io", "CustomResourceDefinition", json!({}), json!(["n", then])),
            ("rbac.authorization.k8s.io", "ClusterRole", json!({}), json!(["n", then])),
            (
                "rbac.authorization.k8s.io",
                "RoleBinding",
                json!({"roleRef": {"kind": "Role", "name": "r"}, "subjects": [
                    {"kind": "User", "name": "u"}, {"kind": "Group", "name": "g"}, {"kind": "ServiceAccount", "namespace": "x", "name": "s"}]}),
                json!(["n", "Role/r", "60s", "u", "g", "x/s"]),
            ),
            (
                "certificates.k8s.io",
                "CertificateSigningRequest",
                json!({"spec": {"signerName": "s", "username": "u", "expirationSeconds": 3600}, "status": {"conditions": [{"type": "Approved"}], "certificate": "x"}}),
                json!(["n", "60s", "s", "u", "60m", "Approved,Issued"]),
            ),
            (
                "",
                "Event",
                json!({"type": "Warning", "reason": "R", "message": "m\n", "count": 3, "lastTimestamp": then, "firstTimestamp": then,
                       "involvedObject": {"kind": "Model", "name": "x"}, "source": {"component": "c", "host": "h"}}),
                json!(["60s", "Warning", "R", "model/x", "", "c, h", "m", "60s", 3, "n"]),
            ),
            ("example.com", "Anything", json!({}), json!(["n", "60s"])),
        ] {
            let mut object = object;
            object["metadata"] = json!({"name": "n", "creationTimestamp": then});
            let columns = builtin_columns(group, kind);
            let table = render(&columns, &[&object], json!({}), Include::None, true, now());
            assert_eq!(table["rows"][0]["cells"], expected, "{kind}");
        }
    }
}
