//! Waits until a deployment is ready, with a status line. On a terminal the line is redrawn in place, with a
//! progress bar while files are downloaded; elsewhere each change is a line of its own.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kube::api::ListParams;
use kube::{Api, Client};
use russet_crds::{Model, ModelCopy, ModelDeployment, names};
use russet_rpc::list_item::ListItem;
use russet_telemetry::say;
use tokio::time::Instant;

use super::status::{DeploymentProgress, ProgressTracker};

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Waits until the deployment is ready; the error says why it is not.
pub async fn until_ready(
    client: &Client,
    namespace: &str,
    model: &str,
    deployment: &str,
    seconds: u64,
) -> Result<()> {
    let models: Api<Model> = Api::namespaced(client.clone(), namespace);
    let deployments: Api<ModelDeployment> = Api::namespaced(client.clone(), namespace);
    let copies: Api<ListItem<ModelCopy>> = Api::all(client.clone());
    let own = format!(
        "{}={namespace},{}={}",
        names::LABEL_MODEL_NAMESPACE,
        names::LABEL_MODEL,
        names::label_value(model)
    );
    let own = ListParams::default().labels(&own);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let (mut looks, mut line) = (ProgressTracker::default(), StatusLine::new());
    loop {
        let coming = async {
            match copies.list(&own).await {
                Ok(copies) => Ok(copies.items),
                // A user with rights in one namespace only gets no progress bar.
                Err(kube::Error::Api(answer)) if answer.code == 403 => Ok(Vec::new()),
                Err(error) => Err(error),
            }
        };
        let found = tokio::try_join!(models.get(model), deployments.get(deployment), coming);
        let (object, serving, copies) = found.with_context(|| {
            format!(
                "Model {namespace}/{model}, its ModelDeployment {deployment} or its copies cannot be read"
            )
        })?;
        let copies: Vec<ModelCopy> = copies.into_iter().filter_map(|copy| copy.0.ok()).collect();
        let (words, bytes) = match looks.observe(&object, &serving, &copies) {
            DeploymentProgress::Ready => {
                line.clear();
                return Ok(());
            }
            DeploymentProgress::Failed(why) => {
                line.clear();
                bail!("{why}; `russet explain {deployment} -n {namespace}` says more");
            }
            DeploymentProgress::Waiting { words, bytes } => (words, bytes),
        };
        if Instant::now() >= deadline {
            line.clear();
            bail!(
                "ModelDeployment {namespace}/{deployment} does not answer after {seconds} s; it waits for {words}; run \
                 this again, or wait for longer with --timeout-seconds"
            );
        }
        line.update(&words, bytes);
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The status line.
struct StatusLine {
    bar: Option<ProgressBar>,
    last: String,
    with_bytes: bool,
}

impl StatusLine {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(ProgressBar::new_spinner);
        Self { bar, last: String::new(), with_bytes: false }
    }

    fn update(&mut self, words: &str, bytes: Option<(u64, u64)>) {
        let Some(bar) = &self.bar else {
            if words != self.last {
                say!("waiting: {words}");
                words.clone_into(&mut self.last);
            }
            return;
        };
        if bytes.is_some() != self.with_bytes || self.last.is_empty() {
            self.with_bytes = bytes.is_some();
            bar.set_style(style(self.with_bytes));
        }
        words.clone_into(&mut self.last);
        if let Some((done, total)) = bytes {
            bar.set_length(total);
            bar.set_position(done);
        }
        bar.set_message(words.to_owned());
        bar.tick();
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Style of the line; plain if the template is invalid.
fn style(with_bytes: bool) -> ProgressStyle {
    ProgressStyle::with_template(template(with_bytes)).unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn template(with_bytes: bool) -> &'static str {
    match with_bytes {
        true => "{spinner} {bytes}/{total_bytes} {bar:20} {bytes_per_sec}, {eta} left  {wide_msg}",
        false => "{spinner} {elapsed}  {wide_msg}",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_progress_templates_are_valid() {
        for with_bytes in [true, false] {
            let read = ProgressStyle::with_template(template(with_bytes));
            assert!(read.is_ok(), "{:?}", read.err());
        }
    }
}
