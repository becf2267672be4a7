//! The API reference as Markdown, generated from the schemas that the API server enforces. The text comes
//! from the doc comments of the types; none is written here.

use std::fmt::Write as _;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};

/// The whole reference, one chapter a kind.
pub fn markdown() -> String {
    let mut text = String::from(
        "# API reference\n\nGenerated from `crds/src` by `cargo xtask codegen`; edit the Rust types instead.\n\
         Group `russet.dev`, version `v1alpha1`. `kubectl explain KIND` shows the same.\n\n\
         | kind | scope | short name |\n|---|---|---|\n",
    );
    let all = crate::all();
    for crd in &all {
        let names = &crd.spec.names;
        let _ = writeln!(
            text,
            "| [{kind}](#{anchor}) | {scope} | {short} |",
            kind = names.kind,
            anchor = names.kind.to_lowercase(),
            scope = crd.spec.scope,
            short = names.short_names.as_deref().unwrap_or_default().join(", "),
        );
    }
    for crd in &all {
        chapter(&mut text, crd);
    }
    text
}

fn chapter(text: &mut String, crd: &CustomResourceDefinition) {
    let _ = write!(text, "\n## {}\n", crd.spec.names.kind);
    for version in &crd.spec.versions {
        let Some(schema) = version.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref())
        else {
            continue;
        };
        for part in ["spec", "status"] {
            let Some(fields) = schema.properties.as_ref().and_then(|properties| properties.get(part)) else {
                continue;
            };
            if let Some(description) = &fields.description {
                let _ = write!(text, "\n**{part}**: {}\n", line(description));
            }
            let _ = write!(text, "\n| field | type | default | |\n|---|---|---|---|\n");
            rows(text, part, fields);
        }
    }
}

fn rows(text: &mut String, path: &str, schema: &JSONSchemaProps) {
    for (name, field) in schema.properties.iter().flatten() {
        let required = schema.required.as_ref().is_some_and(|required| required.contains(name));
        let path = format!("{path}.{name}");
        let default = field.default.as_ref().map(|value| format!("`{}`", value.0)).unwrap_or_default();
        // An object's default repeats its fields' own.
        let default = if field.properties.is_some() { String::new() } else { default };
        let mut description = field.description.as_deref().map(line).unwrap_or_default();
        if let Some(values) = &field.enum_ {
            let values: Vec<String> =
                values.iter().map(|value| value.0.to_string().replace('"', "`")).collect();
            description = format!("{description} One of {}.", values.join(", "));
        }
        let required = if required { " (required)" } else { "" };
        let _ =
            writeln!(text, "| `{path}` | {}{required} | {default} | {} |", kind(field), description.trim());
        if name == "conditions" {
            continue;
        }
        rows(text, &path, field);
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &field.items {
            rows(text, &format!("{path}[]"), items);
        }
    }
}

fn kind(schema: &JSONSchemaProps) -> String {
    match (schema.type_.as_deref(), &schema.items) {
        (Some("array"), Some(JSONSchemaPropsOrArray::Schema(items))) => format!("list of {}", kind(items)),
        (Some(kind), _) => kind.to_owned(),
        (None, _) => "any".to_owned(),
    }
}

fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}
