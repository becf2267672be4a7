//! Kubernetes Events about this machine's InferenceNode. A group reports the first loss that reaches it,
//! which may be a consequence; here the machine reports failures of its own engines.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource as _};
use russet_crds::InferenceNode;
use russet_crds::conditions::Reason;
use russet_crds::names::{AGENT_MANAGER, event_note};
use russet_telemetry::tasks::TaskSet;
use tokio::sync::mpsc;

use crate::oom_guard::panics::RecordedPanic;
use crate::process::record::EngineRecord;

/// Maximum number of Events that wait for an unreachable API server; further ones are only in the log and
/// metrics.
const MAX_PENDING_EVENTS: usize = 64;

/// Queue of Events. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct EventRecorder(mpsc::Sender<Event>);

impl EventRecorder {
    /// Starts recording about the InferenceNode `node` with `client`.
    pub fn start(client: Client, node: String, tasks: &mut TaskSet) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_PENDING_EVENTS);
        tasks.spawn("events", run(client, node, receiver));
        Self(sender)
    }

    /// A rank of this machine can no longer serve its group.
    pub fn rank_lost(&self, rank: &EngineRecord, reason: Reason, message: &str) {
        let note = format!("Shard {}/{}: {message}", rank.namespace, rank.name);
        let event = Event {
            type_: EventType::Warning,
            reason: format!("{reason:?}"),
            note: Some(event_note(&note).to_owned()),
            action: "GiveUp".to_owned(),
            // Events that differ only in their notes are merged; those of two Shards must not be.
            secondary: Some(ObjectReference {
                kind: Some("Shard".to_owned()),
                namespace: Some(rank.namespace.clone()),
                name: Some(rank.name.clone()),
                uid: Some(rank.shard.clone()),
                ..ObjectReference::default()
            }),
        };
        self.0.try_send(event).ok();
    }

    /// This machine's kernel panicked and the machine restarted.
    pub fn kernel_panicked(&self, seen: &RecordedPanic) {
        let under = seen.deployment.as_ref().map(|name| format!(" under {name}")).unwrap_or_default();
        let note = format!("the kernel panicked{under}: {} ({})", seen.message, seen.report);
        let event = Event {
            type_: EventType::Warning,
            reason: format!("{:?}", Reason::KernelPanicked),
            note: Some(event_note(&note).to_owned()),
            action: "Restart".to_owned(),
            secondary: None,
        };
        self.0.try_send(event).ok();
    }
}

/// Records Events until the agent exits. The Shard's condition says the same, so a failed write is only
/// logged.
async fn run(client: Client, node: String, mut waiting: mpsc::Receiver<Event>) {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let reporter = Reporter { controller: AGENT_MANAGER.to_owned(), instance: Some(node.clone()) };
    let recorder = Recorder::new(client, reporter);
    while let Some(event) = waiting.recv().await {
        // `kubectl describe` finds events by the UID of their object.
        let recorded = match nodes.get(&node).await {
            Ok(about) => recorder.publish(&event, &about.object_ref(&())).await,
            Err(error) => Err(error),
        };
        if let Err(error) = recorded {
            tracing::warn!(reason = event.reason, %error, "an event could not be recorded");
        }
    }
}
