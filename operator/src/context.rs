//! State shared by all controllers: the client, the caches, the memory and the event recorder. Not here:
//! decisions.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};
use russet_crds::conditions::Reason;
use russet_crds::names;

use crate::memory::Memory;
use crate::metrics::OperatorMetrics;
use crate::node_accounts::Credential;
use crate::planner::Planner;
use crate::stores::Stores;

/// Shared by all controllers.
pub struct Context {
    /// The API.
    pub client: Client,
    /// Everything the operator watches.
    pub stores: Stores,
    /// Counters.
    pub metrics: OperatorMetrics,
    /// How the API server authenticates nodes.
    pub credential: Credential,
    /// Where plans are made; its turn serialises placements, so that no two of them reserve the same memory.
    pub planner: Planner,
    /// What is kept between reconciliations and is in no object.
    pub memory: Memory,
    recorder: Recorder,
}

impl Context {
    /// A context over full or filling caches.
    pub fn new(
        client: Client,
        stores: Stores,
        metrics: OperatorMetrics,
        credential: Credential,
    ) -> Arc<Self> {
        let reporter = Reporter { controller: names::OPERATOR_MANAGER.to_owned(), instance: None };
        Arc::new(Self {
            recorder: Recorder::new(client.clone(), reporter),
            client,
            stores,
            metrics,
            credential,
            planner: Planner::default(),
            memory: Memory::default(),
        })
    }

    /// Records an event about `about`. Events are best effort: the condition says the same, so a failure is
    /// only logged.
    pub async fn record<K>(&self, about: &K, good: bool, reason: Reason, action: &str, note: &str)
    where
        K: Resource<DynamicType = ()>,
    {
        self.record_about(&about.object_ref(&()), good, reason, action, note).await;
    }

    /// The same about an object of which only the reference is known.
    pub async fn record_about(
        &self,
        reference: &ObjectReference,
        good: bool,
        reason: Reason,
        action: &str,
        note: &str,
    ) {
        let event = Event {
            type_: if good { EventType::Normal } else { EventType::Warning },
            reason: format!("{reason:?}"),
            note: Some(names::event_note(note).to_owned()),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, reference).await {
            tracing::warn!(object = ?reference.name, %error, "an event could not be recorded");
        }
    }
}
