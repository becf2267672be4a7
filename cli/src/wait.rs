//! `russet wait`: waits until a condition holds and shows its reason meanwhile.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use russet_telemetry::say;
use serde_json::Value;

use crate::api_error;
use crate::client::{self, Connection};
use crate::resources;
use crate::stdout::outln;

/// Arguments of `russet wait`.
#[derive(clap::Args)]
pub struct Arguments {
    /// `resource/name`, such as `modeldeployment/smoke`.
    object: String,
    /// `condition=Ready` (or `condition=Ready=False`), or `delete`.
    #[arg(long = "for", default_value = "condition=Ready")]
    condition: String,
    /// Maximum seconds to wait.
    #[arg(long, default_value_t = 300)]
    timeout_seconds: u64,
    #[command(flatten)]
    connection: Connection,
}

/// Waits; an error has the condition's last reason and message.
pub async fn run(arguments: Arguments) -> Result<()> {
    let client = arguments.connection.client().await?;
    let path = resources::path_of(&client, &arguments.object, &arguments.connection.namespace()).await?;
    let condition = WaitCondition::parse(&arguments.condition)?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(arguments.timeout_seconds);
    let mut last = String::new();
    loop {
        let object = match client::get_json(&client, &path, "application/json").await {
            Ok(object) => Some(object),
            Err(error) if is_not_found(&error) => None,
            // A control plane that restarts is waited for as well.
            Err(error) => {
                last = api_error::text(&error);
                if tokio::time::Instant::now() >= deadline {
                    bail!("timed out; the server last said: {last}");
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
                continue;
            }
        };
        let (done, now) = condition.check(object.as_ref());
        if done {
            outln!("{} {}", arguments.object, condition.met())?;
            return Ok(());
        }
        if now != last {
            say!("waiting: {now}");
            last = now;
        }
        if tokio::time::Instant::now() >= deadline {
            bail!(
                "{}: the condition is not met after {} s; last seen: {last}",
                arguments.object,
                arguments.timeout_seconds
            );
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn is_not_found(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<kube::Error>(), Some(kube::Error::Api(status)) if status.code == 404)
}

enum WaitCondition {
    Deleted,
    Condition { kind: String, status: String },
}

impl WaitCondition {
    fn parse(text: &str) -> Result<Self> {
        if text == "delete" {
            return Ok(Self::Deleted);
        }
        let condition = text
            .strip_prefix("condition=")
            .with_context(|| format!("--for {text} is not known; use condition=TYPE[=STATUS] or delete"))?;
        let (kind, status) = condition.split_once('=').unwrap_or((condition, "True"));
        Ok(Self::Condition { kind: kind.to_owned(), status: status.to_owned() })
    }

    fn check(&self, object: Option<&Value>) -> (bool, String) {
        match (self, object) {
            (Self::Deleted, None) => (true, String::new()),
            (Self::Deleted, Some(_)) => (false, "still there".into()),
            (Self::Condition { .. }, None) => (false, "not found yet".into()),
            (Self::Condition { kind, status }, Some(object)) => {
                let condition = object["status"]["conditions"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .find(|condition| condition["type"] == kind.as_str());
                let Some(condition) = condition else {
                    return (false, format!("no condition {kind} yet"));
                };
                let current = condition["observedGeneration"]
                    .as_i64()
                    .is_none_or(|seen| seen >= object["metadata"]["generation"].as_i64().unwrap_or(0));
                let text = format!(
                    "{kind}={} {}: {}",
                    condition["status"].as_str().unwrap_or("?"),
                    condition["reason"].as_str().unwrap_or("?"),
                    condition["message"].as_str().unwrap_or("")
                );
                (current && condition["status"] == status.as_str(), text)
            }
        }
    }

    fn met(&self) -> String {
        match self {
            Self::Deleted => "deleted".into(),
            Self::Condition { kind, status } => format!("condition {kind}={status} met"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_of_an_older_generation_does_not_count() {
        let condition = WaitCondition::parse("condition=Ready").unwrap();
        let object = |seen: i64| {
            serde_json::json!({"metadata": {"generation": 2}, "status": {"conditions": [
                {"type": "Ready", "status": "True", "reason": "Serving", "message": "m", "observedGeneration": seen}]}})
        };
        assert!(!condition.check(Some(&object(1))).0);
        assert!(condition.check(Some(&object(2))).0);
        assert!(!condition.check(None).0);
        assert!(WaitCondition::parse("delete").unwrap().check(None).0);
        assert!(WaitCondition::parse("jsonpath=x").is_err());
    }
}
