//! Writes the status of ModelProviders: whether the last request to one was answered, and when one was. Status is not
//! telemetry: a provider in constant use costs one write per minute, and one that nobody asks costs one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{ModelProvider, ModelProviderStatus, names};
use serde_json::json;
use tokio::sync::watch;

use super::{Outcome, Providers};
use crate::api_timeout::{WriteError, with_timeout};
use crate::routes::{Provider, RoutingTable};

/// Time between two checks for statuses to write.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two writes of when a provider answered last.
const LAST_ANSWERED_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// What this gateway has seen of a provider since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ProviderHealth {
    pub(super) last_answered: Option<Timestamp>,
    /// Why the last request was not answered, if it was not.
    pub(super) failure: Option<String>,
}

impl ProviderHealth {
    /// Counts how a request ended.
    pub(super) fn record(&mut self, outcome: Outcome<'_>, now: Timestamp) {
        match outcome {
            Outcome::Answered => *self = Self { last_answered: Some(now), failure: None },
            // What it says of the request says nothing of the provider.
            Outcome::Rejected => {}
            Outcome::Failed { message, .. } => self.failure = Some(without_quotes(message)),
        }
    }
}

/// Writes statuses until the future is dropped.
pub(crate) async fn report(
    client: Client,
    providers: Arc<Providers>,
    table: watch::Receiver<Arc<RoutingTable>>,
) {
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // What was written of each, so that two gateways with two opinions do not write them in turns.
    let mut written: HashMap<String, ProviderHealth> = HashMap::new();
    // Logged once each time writing begins to fail, not at every check.
    let mut failing = false;
    loop {
        poll.tick().await;
        let table = table.borrow().clone();
        written.retain(|name, _| table.providers.iter().any(|provider| provider.full_name() == *name));
        for provider in &table.providers {
            let name = provider.full_name();
            let health = providers.health(&name);
            let before = written.get(&name).cloned().unwrap_or_default();
            let Some(status) = decide(provider, &health, &before, Timestamp::now()) else { continue };
            match with_timeout(write(&client, provider, &status)).await {
                Ok(()) => {
                    failing = false;
                    written.insert(name, health);
                }
                // A rejected write must not block the others; a server that does not respond would.
                Err(WriteError { cause, timed_out, .. }) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(
                            provider = name,
                            "cannot write the status of the ModelProvider: {cause}"
                        );
                    }
                    if timed_out {
                        break;
                    }
                }
            }
        }
    }
}

/// The status to write; `None` where there is no news.
fn decide(
    provider: &Provider,
    health: &ProviderHealth,
    written: &ProviderHealth,
    now: Timestamp,
) -> Option<ModelProviderStatus> {
    let Provider { generation, status, .. } = provider;
    let is_edited = status.observed_generation != *generation;
    let shown = status.last_answered.as_ref().map(|time| time.0);
    // Another gateway may have written a later answer.
    let is_later = |answered: &Timestamp| {
        shown.is_none_or(|shown| answered.duration_since(shown) >= LAST_ANSWERED_INTERVAL)
    };
    let answered = health.last_answered.filter(is_later);
    let has_turned = health.failure != written.failure
        || (written.last_answered.is_none() && health.last_answered.is_some());
    if !is_edited && !has_turned && answered.is_none() {
        return None;
    }
    let mut status = ModelProviderStatus { observed_generation: *generation, ..status.clone() };
    if let Some(answered) = answered {
        status.last_answered = Some(Time(answered));
    }
    let (ready, reason, message) = match (&health.failure, health.last_answered) {
        (Some(failure), _) => (false, Reason::NotAnswering, failure.clone()),
        (None, Some(_)) => (true, Reason::Answering, "the last request was answered".to_owned()),
        (None, None) => (true, Reason::NotAsked, "no request has gone there yet".to_owned()),
    };
    conditions::set(&mut status.conditions, Type::Ready, ready, reason, message, *generation, now);
    Some(status)
}

async fn write(
    client: &Client,
    provider: &Provider,
    status: &ModelProviderStatus,
) -> Result<(), kube::Error> {
    let api: Api<ModelProvider> = Api::namespaced(client.clone(), &provider.namespace);
    let patch = json!({
        "apiVersion": ModelProvider::api_version(&()),
        "kind": ModelProvider::kind(&()),
        "metadata": {"name": provider.name},
        "status": status,
    });
    // Force: the status belongs to the gateway, even if another manager edited it.
    let params = PatchParams::apply(names::GATEWAY_MANAGER).force();
    match api.patch_status(&provider.name, &params, &Patch::Apply(patch)).await {
        // Deleted in the meantime: nothing reads the status any more.
        Err(kube::Error::Api(error)) if error.code == 404 => Ok(()),
        other => other.map(|_| ()),
    }
}

/// The part of a failure that quotes nobody: what a provider says of a request may repeat the request, and everybody who reads
/// objects reads statuses.
fn without_quotes(message: &str) -> String {
    for (sign, end) in [(" answers ", Some(':')), (": it reports", None)] {
        if let Some((who, said)) = message.split_once(sign) {
            let known = end.map_or("", |end| said.split(end).next().unwrap_or_default());
            let known = if known.is_empty() { " an error" } else { known };
            return format!("{who}{sign}{known}; `russet why` of a request says more");
        }
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::providers::provider_stream::tests::provider;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn health(answered: Option<i64>, failure: Option<&str>) -> ProviderHealth {
        ProviderHealth { last_answered: answered.map(at), failure: failure.map(str::to_owned) }
    }

    fn shown(status: &ModelProviderStatus) -> (String, Option<i64>) {
        let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
        let answered = status.last_answered.as_ref().map(|time| time.0.as_second());
        (format!("{} {} {}", ready.status, ready.reason, ready.message), answered)
    }

    #[test]
    fn statuses_say_what_is_new_and_are_written_once() {
        let mut one = Provider { generation: Some(1), ..provider("https://example.com/v1") };
        let unknown = ProviderHealth::default();
        let mut written = unknown.clone();
        for (now, seen, expected) in [
            (1, unknown.clone(), Some(("True NotAsked no request has gone there yet", None))),
            (2, unknown.clone(), None),
            (3, health(Some(3), None), Some(("True Answering the last request was answered", Some(3)))),
            (9, health(Some(9), None), None),
            (10, health(Some(9), Some("it is gone")), Some(("False NotAnswering it is gone", Some(3)))),
            (11, health(Some(9), Some("it is gone")), None),
            (12, health(Some(12), None), Some(("True Answering the last request was answered", Some(3)))),
            (70, health(Some(63), None), Some(("True Answering the last request was answered", Some(63)))),
        ] {
            let status = decide(&one, &seen, &written, at(now));
            let found = status.as_ref().map(shown);
            let expected = expected.map(|(text, answered)| (text.to_owned(), answered));
            assert_eq!(found, expected, "{now}");
            if let Some(status) = status {
                one.status = status;
                written = seen;
            }
        }
        // Another gateway, which asked nothing, has no news.
        assert_eq!(decide(&one, &unknown, &unknown, at(71)), None);
        one.generation = Some(2);
        assert_eq!(decide(&one, &unknown, &unknown, at(72)).unwrap().observed_generation, Some(2));
    }

    #[test]
    fn statuses_quote_no_provider() {
        for (message, expected) in [
            (
                "ModelProvider default/p answers 400 Bad Request: bad prompt: tell me a secret",
                "ModelProvider default/p answers 400 Bad Request; `russet why` of a request says more",
            ),
            (
                "ModelProvider default/p: it sent nothing for 120 s",
                "ModelProvider default/p: it sent nothing for 120 s",
            ),
        ] {
            assert_eq!(without_quotes(message), expected);
        }
    }
}
