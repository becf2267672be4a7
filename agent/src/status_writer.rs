//! Writer of the statuses of Shards and ModelCopies, by server-side apply. While the API server is
//! unreachable, only the newest status of each object is kept, and it is retried until it succeeds.

use std::collections::BTreeMap;
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use russet_crds::names::AGENT_MANAGER;
use russet_crds::{GROUP, ModelCopy, ModelCopyStatus, Shard, ShardStatus, VERSION};
use russet_telemetry::tasks::TaskSet;
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Maximum backoff between two attempts; a returning control plane gets this node's statuses within it.
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Backoff between two attempts; it doubles.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(100))
    .with_max_delay(MAX_BACKOFF)
    .without_max_times();

/// The object of a status.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StatusObject {
    Shard(String, String),
    Copy(String),
}

/// Queue of statuses. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct StatusQueue(mpsc::UnboundedSender<(StatusObject, Value)>);

impl StatusQueue {
    /// Starts writing with `client`.
    pub fn start(client: Client, tasks: &mut TaskSet) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        tasks.spawn("status writer", run(client, receiver));
        Self(sender)
    }

    /// Queues the newest status of a Shard.
    pub fn shard(&self, namespace: &str, name: &str, status: &ShardStatus) {
        // The receiver ends only with the agent.
        self.0.send((StatusObject::Shard(namespace.to_owned(), name.to_owned()), json!(status))).ok();
    }

    /// Queues the newest status of a ModelCopy.
    pub fn copy(&self, name: &str, status: &ModelCopyStatus) {
        self.0.send((StatusObject::Copy(name.to_owned()), json!(status))).ok();
    }
}

async fn run(client: Client, mut inbox: mpsc::UnboundedReceiver<(StatusObject, Value)>) {
    let mut waiting: BTreeMap<StatusObject, Value> = BTreeMap::new();
    let mut delays = BACKOFF.build();
    loop {
        if waiting.is_empty() {
            let Some((object, status)) = inbox.recv().await else { return };
            waiting.insert(object, status);
        }
        while let Ok((object, status)) = inbox.try_recv() {
            waiting.insert(object, status);
        }
        let mut failed = false;
        for (object, status) in std::mem::take(&mut waiting) {
            match apply(&client, &object, &status).await {
                Ok(()) => {}
                Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 410) => {
                    tracing::debug!(
                        ?object,
                        message = answer.message,
                        "the object no longer exists; its status is not written"
                    );
                }
                Err(kube::Error::Api(answer)) if matches!(answer.code, 400 | 422) => {
                    tracing::error!(?object, message = answer.message, "a report was refused as invalid");
                }
                Err(error) => {
                    tracing::warn!(?object, %error, "a report waits for the API server");
                    failed = true;
                    waiting.entry(object).or_insert(status);
                }
            }
        }
        if failed {
            tokio::time::sleep(delays.next().unwrap_or(MAX_BACKOFF)).await;
        } else {
            delays = BACKOFF.build();
        }
    }
}

async fn apply(client: &Client, object: &StatusObject, status: &Value) -> Result<(), kube::Error> {
    let patch =
        |kind: &str| json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind, "status": status});
    let params = PatchParams::apply(AGENT_MANAGER).force();
    match object {
        StatusObject::Shard(namespace, name) => {
            let api: Api<Shard> = Api::namespaced(client.clone(), namespace);
            api.patch_status(name, &params, &Patch::Apply(patch("Shard"))).await.map(drop)
        }
        StatusObject::Copy(name) => {
            let api: Api<ModelCopy> = Api::all(client.clone());
            api.patch_status(name, &params, &Patch::Apply(patch("ModelCopy"))).await.map(drop)
        }
    }
}
