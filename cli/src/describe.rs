//! `russet describe`: one object with its conditions and the events about it.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::client::{self, Connection};
use crate::get::percent_encode;
use crate::resources;
use crate::stdout::outln;

/// Arguments of `russet describe`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Resource, such as `modeldeployment`, or `resource/name`.
    resource: String,
    /// Name.
    name: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// Prints spec, status, conditions and events.
pub async fn run(arguments: Arguments) -> Result<()> {
    let client = arguments.connection.client().await?;
    let all = resources::discover(&client).await?;
    let (word, name) = match (arguments.resource.split_once('/'), &arguments.name) {
        (Some((word, name)), _) => (word, name),
        (None, Some(name)) => (arguments.resource.as_str(), name.as_str()),
        (None, None) => anyhow::bail!("name the object: russet describe {} NAME", arguments.resource),
    };
    let found = resources::named(&all, word)?;
    let resource = found.first().context("no such resource")?;
    let namespace = &arguments.connection.namespace();
    let object = client::get_json(&client, &resource.object(namespace, name), "application/json").await?;
    outln!("Name:       {name}")?;
    if resource.namespaced {
        outln!("Namespace:  {namespace}")?;
    }
    outln!("Kind:       {} ({})", resource.kind, resource.api_version)?;
    outln!("Created:    {}", object["metadata"]["creationTimestamp"].as_str().unwrap_or("?"))?;
    if let Some(labels) = object["metadata"]["labels"].as_object() {
        for (key, value) in labels {
            outln!("Label:      {key}={}", value.as_str().unwrap_or(""))?;
        }
    }
    section("Spec", &object["spec"])?;
    let mut status = object["status"].clone();
    let conditions = status.as_object_mut().and_then(|status| status.remove("conditions"));
    section("Status", &status)?;
    if let Some(conditions) = conditions.as_ref().and_then(Value::as_array) {
        outln!("\nConditions:")?;
        for condition in conditions {
            outln!(
                "  {:<14} {:<6} {:<24} {}",
                condition["type"].as_str().unwrap_or(""),
                condition["status"].as_str().unwrap_or(""),
                condition["reason"].as_str().unwrap_or(""),
                condition["message"].as_str().unwrap_or("")
            )?;
        }
    }
    let uid = object["metadata"]["uid"].as_str().unwrap_or("");
    let path =
        format!("/api/v1/events?fieldSelector={}", percent_encode(&format!("involvedObject.uid={uid}")));
    let events = client::get_json(&client, &path, "application/json").await?;
    let events = events["items"].as_array().cloned().unwrap_or_default();
    outln!("\nEvents:")?;
    if events.is_empty() {
        outln!("  <none>")?;
    }
    for event in events {
        let when = ["lastTimestamp", "eventTime", "firstTimestamp"]
            .iter()
            .find_map(|field| event[*field].as_str())
            .unwrap_or("");
        outln!(
            "  {when:<28} {:<8} {:<22} {}",
            event["type"].as_str().unwrap_or(""),
            event["reason"].as_str().unwrap_or(""),
            event["message"].as_str().or(event["note"].as_str()).unwrap_or("")
        )?;
    }
    Ok(())
}

fn section(title: &str, value: &Value) -> Result<()> {
    if value.as_object().is_some_and(|fields| !fields.is_empty()) {
        outln!("\n{title}:")?;
        for line in serde_norway::to_string(value)?.lines() {
            outln!("  {line}")?;
        }
    }
    Ok(())
}
