//! `russet get`: the server's own tables, or YAML/JSON.

use anyhow::{Result, bail};
use serde_json::Value;

use crate::client::{self, Connection};
use crate::resources;
use crate::stdout::{out, outln};

/// Arguments of `russet get`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Resource, such as `modeldeployments`, `mdeploy`, several with commas between them, or `russet` for all of Russet's kinds.
    resource: String,
    /// Name of one object.
    name: Option<String>,
    /// All namespaces.
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Label selector.
    #[arg(short = 'l', long)]
    selector: Option<String>,
    /// `table`, `wide`, `yaml` or `json`.
    #[arg(short, long, default_value = "table")]
    output: String,
    #[command(flatten)]
    connection: Connection,
}

/// Prints the objects.
pub async fn run(arguments: Arguments) -> Result<()> {
    let client = arguments.connection.client().await?;
    let all = resources::discover(&client).await?;
    let (word, name) = match (arguments.resource.split_once('/'), &arguments.name) {
        (Some((word, name)), None) => (word.to_owned(), Some(name.to_owned())),
        _ => (arguments.resource.clone(), arguments.name.clone()),
    };
    let found: Vec<Vec<_>> =
        word.split(',').map(|word| resources::named(&all, word)).collect::<Result<_>>()?;
    let found = found.concat();
    let several = found.len() > 1;
    let namespace = arguments.connection.namespace();
    for (index, resource) in found.into_iter().enumerate() {
        let in_namespace = (!arguments.all_namespaces).then_some(namespace.as_str());
        let mut path = match &name {
            Some(name) => resource.object(&namespace, name),
            None => resource.collection(in_namespace),
        };
        if let Some(selector) = &arguments.selector {
            path.push_str(&format!("?labelSelector={}", percent_encode(selector)));
        }
        match arguments.output.as_str() {
            "table" | "wide" => {
                let table = client::get_json(&client, &path, client::TABLE).await?;
                let wide = arguments.output == "wide";
                let text = render(&table, wide, arguments.all_namespaces && resource.namespaced);
                if several {
                    if table["rows"].as_array().is_some_and(|rows| !rows.is_empty()) {
                        outln!("{}\n{text}", resource.plural)?;
                    }
                } else {
                    out!("{text}")?;
                }
            }
            "json" => {
                outln!("{}", serde_json::to_string_pretty(&without_managed_fields(&client, &path).await?)?)?
            }
            "yaml" => {
                let between = if index > 0 { "---\n" } else { "" };
                out!(
                    "{between}{}",
                    serde_norway::to_string(&without_managed_fields(&client, &path).await?)?
                )?;
            }
            other => bail!("output \"{other}\" is not known; use table, wide, yaml or json"),
        }
    }
    Ok(())
}

async fn without_managed_fields(client: &kube::Client, path: &str) -> Result<Value> {
    let mut object = client::get_json(client, path, "application/json").await?;
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    for item in object.get_mut("items").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(metadata) = item["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
    }
    Ok(object)
}

/// Percent-encodes a query value.
pub fn percent_encode(value: &str) -> String {
    value
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => (byte as char).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// Formats a meta.k8s.io Table in columns, three spaces apart.
pub fn render(table: &Value, wide: bool, with_namespace: bool) -> String {
    let no_list = Vec::new();
    let columns = table["columnDefinitions"].as_array().unwrap_or(&no_list);
    let shown: Vec<usize> = columns
        .iter()
        .enumerate()
        .filter(|(_, column)| wide || column["priority"].as_i64().unwrap_or(0) == 0)
        .map(|(index, _)| index)
        .collect();
    let rows = table["rows"].as_array().unwrap_or(&no_list);
    if rows.is_empty() {
        return "No resources found.\n".into();
    }
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut header: Vec<String> =
        shown.iter().map(|&index| cell(&columns[index]["name"]).to_uppercase()).collect();
    if with_namespace {
        header.insert(0, "NAMESPACE".into());
    }
    lines.push(header);
    for row in rows {
        let mut line: Vec<String> = shown.iter().map(|&index| cell(&row["cells"][index])).collect();
        if with_namespace {
            line.insert(0, cell(&row["object"]["metadata"]["namespace"]));
        }
        lines.push(line);
    }
    format_table(&lines)
}

/// Formats rows of equally many cells in columns, three spaces apart.
pub fn format_table(lines: &[Vec<String>]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines.first().map_or(0, Vec::len)).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let padded: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(padded.join("   ").trim_end());
        text.push('\n');
    }
    text
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "<none>".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_laid_out_in_columns_without_hidden_ones() {
        let table = serde_json::json!({
            "columnDefinitions": [{"name": "Name"}, {"name": "Ready"}, {"name": "Message", "priority": 1}],
            "rows": [{"cells": ["chat", "True", "long"]}, {"cells": ["a-longer-name", null, ""]}]
        });
        assert_eq!(
            render(&table, false, false),
            "NAME            READY\nchat            True\na-longer-name   <none>\n"
        );
        assert!(render(&table, true, false).contains("MESSAGE"));
        assert_eq!(percent_encode("a=b,c in (d)"), "a%3Db%2Cc%20in%20%28d%29");
    }
}
