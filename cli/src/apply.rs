//! `russet apply`: server-side apply of YAML files, as `kubectl apply --server-side` does it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use russet_telemetry::say;
use serde_json::Value;

use crate::client::Connection;
use crate::stdout::outln;
use crate::{manifests, resources};

/// Interval between two attempts while the server is temporarily unavailable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Arguments of `russet apply`.
#[derive(clap::Args)]
pub struct Arguments {
    /// YAML file, folder of YAML files, or `-` for standard input; may be given several times.
    #[arg(short, long = "filename", required = true)]
    filename: Vec<PathBuf>,
    /// Take over fields that another field manager owns.
    #[arg(long)]
    force_conflicts: bool,
    /// Check on the server without storing anything.
    #[arg(long)]
    dry_run: bool,
    /// Total seconds to retry while the server answers that it is temporarily unavailable.
    #[arg(long, default_value_t = 60)]
    timeout_seconds: u64,
    #[command(flatten)]
    connection: Connection,
}

/// Applies every object; all are tried, the first failure is the exit.
pub async fn run(arguments: Arguments) -> Result<()> {
    let objects = manifests::read(&arguments.filename)?;
    if objects.is_empty() {
        bail!("no objects in {:?}", arguments.filename);
    }
    let client = arguments.connection.client().await?;
    let writer = arguments.connection.client_without_retry().await?;
    let mut patience = ApplyRetry::new(Duration::from_secs(arguments.timeout_seconds), RETRY_INTERVAL);
    let mut all = resources::discover(&client).await?;
    let mut failed = 0;
    let own_namespace = arguments.connection.namespace();
    for document in &objects {
        let object = &document.object;
        let (api_version, kind) = (text(object, "apiVersion")?, text(object, "kind")?);
        let name = object["metadata"]["name"]
            .as_str()
            .with_context(|| format!("{document}: {kind} without metadata.name"))?;
        if resources::of_kind(&all, api_version, kind).is_err() {
            // A CRD applied by this call may have added the kind.
            all = resources::discover(&client).await?;
        }
        let resource = resources::of_kind(&all, api_version, kind)
            .with_context(|| document.file.display().to_string())?;
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or(&own_namespace);
        let mut path = format!(
            "{}?fieldManager=russet&fieldValidation=Strict&force={}",
            resource.object(namespace, name),
            arguments.force_conflicts
        );
        if arguments.dry_run {
            path.push_str("&dryRun=All");
        }
        let request = http::Request::patch(path)
            .header("content-type", "application/apply-patch+yaml")
            .header("accept", "application/json")
            .body(serde_json::to_vec(object)?)?;
        let what = format!("{kind} {name}");
        match patience.send(&what, async || writer.request::<Value>(request.clone()).await).await {
            Ok(_) => outln!("{}/{name} applied", kind.to_lowercase())?,
            Err(error) => {
                failed += 1;
                let words = match &error {
                    kube::Error::Api(status) => status.message.clone(),
                    other => other.to_string(),
                };
                say!("error: {}: {kind} {name}: {words}", document.file.display());
            }
        }
    }
    if failed > 0 {
        bail!("{failed} of {} objects were not applied", objects.len());
    }
    Ok(())
}

/// Retries against a server that is temporarily unavailable: its message is printed once, and there is a
/// deadline.
struct ApplyRetry {
    deadline: Instant,
    interval: Duration,
    reported: Vec<String>,
}

impl ApplyRetry {
    fn new(whole: Duration, interval: Duration) -> Self {
        Self { deadline: Instant::now() + whole, interval, reported: Vec::new() }
    }

    async fn send<T>(
        &mut self,
        what: &str,
        request: impl AsyncFn() -> Result<T, kube::Error>,
    ) -> Result<T, kube::Error> {
        loop {
            let answer = request().await;
            let left = self.deadline.saturating_duration_since(Instant::now());
            match &answer {
                Err(kube::Error::Api(status)) if is_retryable(status.code) && left > self.interval => {
                    if self.reported.last() != Some(&status.message) {
                        say!(
                            "{what}: the server cannot store it just now: {}; trying again for up to {} s",
                            status.message,
                            left.as_secs()
                        );
                        self.reported.push(status.message.clone());
                    }
                }
                _ => return answer,
            }
            tokio::time::sleep(self.interval).await;
        }
    }
}

/// Whether an HTTP status allows a retry of the same request: too many requests, unavailable, timeout,
/// insufficient storage.
fn is_retryable(code: u16) -> bool {
    matches!(code, 429 | 503 | 504 | 507)
}

fn text<'a>(object: &'a Value, field: &str) -> Result<&'a str> {
    object[field].as_str().with_context(|| format!("an object without {field}"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use kube::core::Status;

    use super::*;

    #[tokio::test]
    async fn retryable_errors_are_reported_once_and_retried() {
        const FULL: (u16, &str) = (503, "the store's disk is full");
        const BUSY: (u16, &str) = (429, "too many requests");
        const WRONG: (u16, &str) = (422, "spec.replicas: must be 64 or less");
        for (story, seconds, answers, reports, ends) in [
            ("granted at once", 60, vec![], vec![], None),
            ("granted later", 60, vec![FULL, FULL, FULL], vec![FULL.1], None),
            ("another reason", 60, vec![FULL, BUSY, BUSY], vec![FULL.1, BUSY.1], None),
            ("wrong, whenever it is asked", 60, vec![FULL, WRONG], vec![FULL.1], Some(WRONG.1)),
            ("no patience", 0, vec![FULL, FULL], vec![], Some(FULL.1)),
        ] {
            let asked = Cell::new(0);
            let request = async || {
                let refused = answers.get(asked.replace(asked.get() + 1)).copied();
                refused.map_or(Ok(()), |(code, message)| {
                    Err(kube::Error::Api(Box::new(Status::failure(message, "").with_code(code))))
                })
            };
            let mut patience = ApplyRetry::new(Duration::from_secs(seconds), Duration::from_millis(1));
            let answer = patience.send("Model m", request).await;
            let words = answer.err().map(|error| error.to_string());
            assert_eq!(patience.reported, reports, "{story}");
            assert_eq!(words.is_some(), ends.is_some(), "{story}: {words:?}");
            assert!(words.unwrap_or_default().contains(ends.unwrap_or_default()), "{story}");
        }
    }
}
