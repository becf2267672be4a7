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
use russet_crds::{ModelProvider, ModelProviderStatus, Money, PauseReason, PauseScope, ProviderPause, names};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::credits::CreditsHealth;
use super::{Outcome, Pauses, Providers};
use crate::api_timeout::{WriteError, with_timeout};
use crate::error::shown;
use crate::routes::{Provider, RoutingTable};

/// Time between two checks for statuses to write.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// In this time at most three statuses of one provider are written, so that a first turn is seen at once.
const WRITE_WINDOW: Duration = Duration::from_secs(30);
/// Time between two writes of when a provider answered last.
const LAST_ANSWERED_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// Most pauses in a status, as its schema has it.
const MAX_SHOWN_PAUSES: usize = 64;

/// What this gateway has seen of a provider since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ProviderHealth {
    pub(super) last_answered: Option<Timestamp>,
    /// Why the last request was not answered, if it was not.
    pub(super) failure: Option<String>,
    /// Which of its models are left alone.
    pub(super) pauses: Pauses,
    /// What is left of its credits.
    pub(super) credits: CreditsHealth,
}

impl ProviderHealth {
    /// Counts how a request to this provider ended.
    pub(super) fn record(&mut self, provider: &str, outcome: Outcome<'_>, now: Timestamp) {
        match outcome {
            Outcome::Answered => {
                self.last_answered = Some(now);
                self.failure = None;
            }
            // What it says of the request says nothing of the provider, and one that is busy is well.
            Outcome::Rejected | Outcome::Failed { is_busy: true, .. } => {}
            Outcome::Failed { message, .. } => {
                if let Some(cause) = public_cause(message, provider) {
                    self.failure = Some(cause);
                }
            }
        }
    }
}

/// What was written of a provider.
#[derive(Clone, Debug, Default)]
struct WrittenStatus {
    generation: Option<i64>,
    health: ProviderHealth,
    /// When, the last time first.
    at: [Option<Instant>; 3],
}

/// Writes statuses until the future is dropped.
pub(crate) async fn report(
    client: Client,
    providers: Arc<Providers>,
    table: watch::Receiver<Arc<RoutingTable>>,
) {
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // So that two gateways with two opinions do not write them in turns.
    let mut written: HashMap<String, WrittenStatus> = HashMap::new();
    // Logged once each time writing begins to fail, not at every check.
    let mut failing = false;
    loop {
        poll.tick().await;
        let table = table.borrow().clone();
        written.retain(|name, _| table.providers.iter().any(|provider| provider.full_name() == *name));
        providers.forget_health(&table.providers);
        for provider in &table.providers {
            let name = provider.full_name();
            let health = providers.health(provider);
            let before = written.entry(name.clone()).or_default();
            let is_early = before.at[2].is_some_and(|at| at.elapsed() < WRITE_WINDOW);
            if is_early && before.generation == provider.generation {
                continue;
            }
            if decide(provider, &health, before, Timestamp::now()).is_none() {
                continue;
            }
            match with_timeout(merge(&client, provider, &health, before)).await {
                Ok(()) => {
                    failing = false;
                    *before = WrittenStatus {
                        generation: provider.generation,
                        health,
                        at: [Some(Instant::now()), before.at[0], before.at[1]],
                    };
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
    written: &WrittenStatus,
    now: Timestamp,
) -> Option<ModelProviderStatus> {
    let Provider { generation, status, .. } = provider;
    let is_edited = status.observed_generation != *generation && written.generation != *generation;
    let shown = status.last_answered.as_ref().map(|time| time.0).max(written.health.last_answered);
    // Another gateway may have written a later answer.
    let is_later = |answered: &Timestamp| {
        shown.is_none_or(|shown| answered.duration_since(shown) >= LAST_ANSWERED_INTERVAL)
    };
    let answered = health.last_answered.filter(is_later);
    let has_turned = health.failure != written.health.failure
        || (written.health.last_answered.is_none() && health.last_answered.is_some());
    let has_paused = is_news(health, written, *generation, now);
    let has_credits = amounts(&health.credits) != amounts(&written.health.credits);
    if !is_edited && !has_turned && !has_paused && !has_credits && answered.is_none() {
        return None;
    }
    let mut status = ModelProviderStatus { observed_generation: *generation, ..status.clone() };
    // One that was edited starts anew.
    let others =
        if provider.status.observed_generation == *generation { &*provider.status.pauses } else { &[] };
    status.pauses = pauses(others, health, *generation, now);
    status.credits = match provider.spec.credits_interval_seconds {
        Some(_) => {
            let (said, shown) = (health.credits.said.clone(), status.credits.take());
            said.into_iter().chain(shown).max_by_key(|credits| credits.read_at.0)
        }
        None => None,
    };
    if let Some(answered) = answered {
        status.last_answered = Some(Time(answered));
    }
    let has_condition = conditions::get(&status.conditions, Type::Ready).is_some();
    let (ready, reason, message) = match (&health.failure, health.last_answered) {
        (Some(failure), _) => (false, Reason::NotAnswering, failure.clone()),
        (None, Some(_)) => (true, Reason::Answering, "the last request was answered".to_owned()),
        // Who has seen nothing does not change what another gateway saw.
        (None, None) if has_condition => return Some(status),
        (None, None) => (true, Reason::NotAsked, "no request has gone there yet".to_owned()),
    };
    conditions::set(&mut status.conditions, Type::Ready, ready, reason, message, *generation, now);
    Some(status)
}

/// The credits without their time, which alone is no news.
fn amounts(credits: &CreditsHealth) -> Option<(Option<Money>, Option<Money>)> {
    credits.said.as_ref().map(|said| (said.remaining, said.limit))
}

/// Whether models are left alone that the written status does not say, or for a minute longer than it says.
fn is_news(
    health: &ProviderHealth,
    written: &WrittenStatus,
    generation: Option<i64>,
    now: Timestamp,
) -> bool {
    let is_written = |pause: &ProviderPause| {
        written.health.pauses.shown(written.generation, now).any(|other| {
            is_same(pause, other) && pause.until.0.duration_since(other.until.0) < LAST_ANSWERED_INTERVAL
        })
    };
    // What is over in a moment nobody reads.
    let is_long = |pause: &&ProviderPause| pause.until.0.duration_since(now) >= LAST_ANSWERED_INTERVAL;
    health.pauses.shown(generation, now).filter(is_long).any(|pause| !is_written(pause))
}

/// The pauses that have not ended, of this gateway and of others, each with its latest end. Words of a newer release cannot be
/// written again.
fn pauses(
    shown: &[ProviderPause],
    health: &ProviderHealth,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<ProviderPause> {
    let mut all: Vec<ProviderPause> = Vec::new();
    let is_known =
        |pause: &ProviderPause| pause.scope != PauseScope::Unknown && pause.reason != PauseReason::Unknown;
    let running = shown.iter().filter(|pause| pause.until.0 > now && is_known(pause));
    for pause in health.pauses.shown(generation, now).chain(running) {
        if let Some(other) = all.iter_mut().find(|other| is_same(other, pause)) {
            other.until.0 = other.until.0.max(pause.until.0);
        } else if all.len() < MAX_SHOWN_PAUSES {
            all.push(pause.clone());
        }
    }
    for pause in &mut all {
        pause.until.0 = whole_seconds(pause.until.0);
    }
    all
}

/// The time as a status has it, in whole seconds: what others read and write is the same then.
pub(super) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn is_same(one: &ProviderPause, other: &ProviderPause) -> bool {
    (one.scope, one.reason, &one.model) == (other.scope, other.reason, &other.model)
}

/// Writes what is news beside what other gateways have written by now: what the routing table has of a status is older.
async fn merge(
    client: &Client,
    provider: &Provider,
    health: &ProviderHealth,
    written: &WrittenStatus,
) -> Result<(), kube::Error> {
    let api: Api<ModelProvider> = Api::namespaced(client.clone(), &provider.namespace);
    let status = api.get(&provider.name).await?.status.unwrap_or_default();
    let now = Provider { status, ..provider.clone() };
    match decide(&now, health, written, Timestamp::now()) {
        Some(status) => write(&api, provider, &status).await,
        None => Ok(()),
    }
}

async fn write(
    api: &Api<ModelProvider>,
    provider: &Provider,
    status: &ModelProviderStatus,
) -> Result<(), kube::Error> {
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

/// The part of a failure of this provider that quotes nobody: what a provider says of a request may repeat the request, and
/// everybody who reads objects reads statuses. None where it is a failure of the gateway.
fn public_cause(message: &str, provider: &str) -> Option<String> {
    let said = message.strip_prefix("ModelProvider ")?.strip_prefix(provider)?;
    if let Some(answer) = said.strip_prefix(" answers ") {
        let status: String = answer.chars().take_while(char::is_ascii_digit).collect();
        return Some(format!("it answers {status}; `russet why` of a request says more"));
    }
    let said = said.strip_prefix(": ")?;
    let quoting = ["it reports", "it sent what is no part of an answer"];
    Some(match quoting.iter().find(|beginning| said.starts_with(*beginning)) {
        Some(beginning) => format!("{beginning}; `russet why` of a request says more")
            .replace("it reports;", "it reports an error;"),
        None => shown(said),
    })
}

#[cfg(test)]
mod tests {
    use russet_crds::ProviderCredits;

    use super::*;
    use crate::providers::Moment;
    use crate::providers::provider_stream::tests::provider;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn health(answered: Option<i64>, failure: Option<&str>) -> ProviderHealth {
        let failure = failure.map(str::to_owned);
        ProviderHealth { last_answered: answered.map(at), failure, ..ProviderHealth::default() }
    }

    fn shown_status(status: &ModelProviderStatus) -> (String, Option<i64>) {
        let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
        let answered = status.last_answered.as_ref().map(|time| time.0.as_second());
        (format!("{} {} {}", ready.status, ready.reason, ready.message), answered)
    }

    #[test]
    fn statuses_say_what_is_new_and_are_written_once() {
        let mut one = Provider { generation: Some(1), ..provider("https://example.com/v1") };
        let unknown = ProviderHealth::default();
        let mut written = WrittenStatus::default();
        for (now, seen, expected) in [
            (1, unknown.clone(), Some(("True NotAsked no request has gone there yet", None))),
            (2, unknown.clone(), None),
            (3, health(Some(3), None), Some(("True Answering the last request was answered", Some(3)))),
            (9, health(Some(9), None), None),
            (10, health(Some(9), Some("it is gone")), Some(("False NotAnswering it is gone", Some(3)))),
            (11, health(Some(9), Some("it is gone")), None),
            (12, health(Some(12), None), Some(("True Answering the last request was answered", Some(3)))),
            (90, health(Some(83), None), Some(("True Answering the last request was answered", Some(83)))),
        ] {
            let status = decide(&one, &seen, &written, at(now));
            let found = status.as_ref().map(shown_status);
            let expected = expected.map(|(text, answered)| (text.to_owned(), answered));
            assert_eq!(found, expected, "{now}");
            if let Some(status) = status {
                one.status = status;
                written = WrittenStatus { generation: Some(1), health: seen, ..WrittenStatus::default() };
            }
        }
        // Another gateway, which asked nothing, has no news, also of an edited object.
        let nothing = WrittenStatus::default();
        assert_eq!(decide(&one, &unknown, &nothing, at(91)), None);
        one.generation = Some(2);
        let edited = decide(&one, &unknown, &nothing, at(92)).unwrap();
        assert_eq!((edited.observed_generation, &edited.conditions), (Some(2), &one.status.conditions));
        // Once written it is not written again, whether or not the table has it.
        assert_eq!(decide(&one, &unknown, &WrittenStatus { generation: Some(2), ..nothing }, at(93)), None);
    }

    #[test]
    fn statuses_say_which_models_are_left_alone_until_when() {
        let moment = |second| Moment { instant: Instant::now(), time: at(second) };
        let mut one = Provider { generation: Some(1), ..provider("https://openrouter.ai/api/v1") };
        let mut seen = health(Some(1), None);
        let mut written =
            WrittenStatus { generation: Some(1), health: seen.clone(), ..WrittenStatus::default() };
        one.status.observed_generation = Some(1);
        one.status.last_answered = Some(Time(at(1)));
        let pause =
            |scope, reason, until| ProviderPause { scope, model: None, reason, until: Time(at(until)) };
        // Another gateway wrote these; the second one is over.
        one.status.pauses = vec![
            pause(PauseScope::Free, PauseReason::RateLimited, 500),
            pause(PauseScope::All, PauseReason::RateLimited, 9),
        ];
        assert_eq!(decide(&one, &seen, &written, at(10)), None);
        seen.pauses.unpaid("org/big", Some(1), moment(10));
        let status = decide(&one, &seen, &written, at(10)).unwrap();
        let unpaid = |until| pause(PauseScope::Paid, PauseReason::NoCredits, until);
        let others = pause(PauseScope::Free, PauseReason::RateLimited, 500);
        assert_eq!(status.pauses, [unpaid(310), others.clone()]);
        (one.status, written.health) = (status, seen.clone());
        // A little longer is no news, and a minute is.
        seen.pauses.unpaid("org/big", Some(1), moment(30));
        assert_eq!(decide(&one, &seen, &written, at(30)), None);
        seen.pauses.unpaid("org/big", Some(1), moment(70));
        assert_eq!(decide(&one, &seen, &written, at(70)).unwrap().pauses, [unpaid(370), others]);
        // Nobody writes that one has ended; it goes with the next write.
        let later = decide(&one, &health(Some(600), None), &written, at(600)).unwrap();
        assert_eq!(later.pauses, []);
    }

    #[test]
    fn statuses_say_what_is_left_of_the_credits() {
        let mut one = Provider { generation: Some(1), ..provider("https://openrouter.ai/api/v1") };
        one.spec.credits_interval_seconds = Some(300);
        one.status.observed_generation = Some(1);
        let credits = |remaining: &str, second| ProviderCredits {
            remaining: remaining.parse().ok(),
            limit: "10".parse().ok(),
            read_at: Time(at(second)),
        };
        let seen = |credits| {
            let mut seen = health(None, None);
            seen.credits.said = credits;
            seen
        };
        let nothing = WrittenStatus { generation: Some(1), ..WrittenStatus::default() };
        assert_eq!(decide(&one, &seen(None), &nothing, at(1)), None);
        let first = seen(Some(credits("9.5", 2)));
        let status = decide(&one, &first, &nothing, at(2)).unwrap();
        assert_eq!(status.credits, Some(credits("9.5", 2)));
        (one.status, one.status.credits) = (status, Some(credits("9", 7)));
        // The same later is no news, and another gateway's later reading stands.
        let written = WrittenStatus { health: first, ..nothing.clone() };
        assert_eq!(decide(&one, &seen(Some(credits("9.5", 9))), &written, at(9)), None);
        let older = decide(&one, &seen(Some(credits("9.25", 6))), &written, at(9)).unwrap();
        assert_eq!(older.credits, Some(credits("9", 7)));
        // Where nobody is to ask any more, nothing is said.
        one.spec.credits_interval_seconds = None;
        one.generation = Some(2);
        assert_eq!(decide(&one, &written.health, &written, at(10)).unwrap().credits, None);
    }

    #[test]
    fn statuses_quote_no_provider() {
        for (message, expected) in [
            (
                "ModelProvider default/p answers 400 Bad Request: bad prompt: tell me a secret",
                Some("it answers 400; `russet why` of a request says more"),
            ),
            (
                "ModelProvider default/p: it reports: who answers for my debt: me",
                Some("it reports an error; `russet why` of a request says more"),
            ),
            (
                "ModelProvider default/p: it sent what is no part of an answer: invalid type: string \"a secret\"",
                Some("it sent what is no part of an answer; `russet why` of a request says more"),
            ),
            ("ModelProvider default/p: it sent nothing for 120 s", Some("it sent nothing for 120 s")),
            ("the audit log takes no more entries", None),
        ] {
            assert_eq!(public_cause(message, "default/p").as_deref(), expected);
        }
    }

    #[test]
    fn a_provider_that_is_busy_or_refuses_a_request_is_well() {
        let mut one = health(Some(1), None);
        let message = "ModelProvider default/p answers 429 Too Many Requests: wait";
        let busy = Outcome::Failed { message, is_busy: true, pause: None };
        for outcome in [busy, Outcome::Rejected] {
            one.record("default/p", outcome, at(2));
            assert_eq!(one, health(Some(1), None));
        }
        let message = "ModelProvider default/p answers 500 Internal Server Error: oh";
        one.record("default/p", Outcome::Failed { message, is_busy: false, pause: None }, at(3));
        assert_eq!(one, health(Some(1), Some("it answers 500; `russet why` of a request says more")));
        one.record("default/p", Outcome::Answered, at(4));
        assert_eq!(one, health(Some(4), None));
    }
}
