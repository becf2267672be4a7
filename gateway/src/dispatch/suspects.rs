//! Requests that may be what ends engines: they are sent to an engine one at a time, so that a second loss tells a
//! request that ends engines from one that was only there, and what was learnt is remembered for a while, because
//! clients send failed requests again. Not here: when a loss counts, see `attempts`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use russet_wire::conversation::Tool;
use russet_wire::request::{GenerationRequest, RawPrompt};
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::keys::Caller;
use crate::routes::Endpoint;

/// How long a request is remembered. SDKs send a failed request again within seconds, agents and job queues within a
/// few minutes; a request that only seemed to end engines must not be refused for long.
const RECALL_TIME: Duration = Duration::from_secs(300);
/// Requests remembered at once, 60 bytes each; of more the oldest is forgotten. Every entry cost an engine.
const MAX_RECALLED: usize = 1024;
/// How long a suspect keeps other suspects from its engine. A request that takes the engine's memory does so within
/// this time, and most prompts are prefilled by then.
const MAX_ISOLATION: Duration = Duration::from_secs(10);
/// The same once it waits in the engine's queue, where it does nothing.
const MAX_QUEUED_ISOLATION: Duration = Duration::from_secs(1);

/// Identifies a prompt of a caller: what is learnt about it counts for no other caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PromptDigest([u8; 32]);

impl PromptDigest {
    /// The digest of texts that are embedded or scored.
    pub(crate) fn of_texts<'a>(
        caller: &Caller,
        model: &'a str,
        texts: impl Iterator<Item = Cow<'a, str>>,
    ) -> Self {
        let mut hash = Sha256::new();
        let caller = caller.key_name().unwrap_or_default().to_owned();
        // The length before each text keeps two texts from being read as one.
        for text in [Cow::from(caller), model.into()].into_iter().chain(texts) {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        Self(hash.finalize().into())
    }

    /// The digest of this request's conversation.
    pub(crate) fn new(caller: &Caller, model: &str, request: &GenerationRequest) -> Self {
        let mut hash = Sha256::new();
        // The length before each text keeps two texts from being read as one.
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(caller.key_name().unwrap_or_default());
        add(model);
        // The number of texts keeps one message from being read as two.
        for message in &request.messages {
            add(&message.texts().count().to_string());
            message.texts().for_each(&mut add);
        }
        match &request.raw_prompt {
            None => {}
            Some(RawPrompt::Text(text)) => add(text),
            Some(RawPrompt::Tokens(tokens)) => tokens.iter().for_each(|token| add(&token.to_string())),
        }
        add(&request.template_arguments);
        request.tools.iter().flat_map(Tool::texts).for_each(&mut add);
        if let Some(output) = &request.structured_output {
            output.texts().for_each(&mut add);
        }
        Self(hash.finalize().into())
    }
}

/// What is known about a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suspicion {
    /// One engine was lost while it worked on it.
    Suspect,
    /// Another engine was lost while it was the only suspect there.
    Convicted,
}

/// The suspects of all engines.
#[derive(Default)]
pub(super) struct Suspects {
    recalled: Mutex<HashMap<PromptDigest, (Suspicion, Instant)>>,
    /// The engines that suspects are sent to.
    isolation: Mutex<HashMap<Endpoint, Arc<IsolationWard>>>,
}

/// An engine that suspects are sent to one at a time.
struct IsolationWard {
    permit: Arc<Semaphore>,
    /// Since when a suspect was lost here, or left without a word from the engine: that may be dead since, and not even get what
    /// it is sent. None once it has said something.
    silent_since: Mutex<Option<Instant>>,
}

impl Default for IsolationWard {
    fn default() -> Self {
        Self { permit: Arc::new(Semaphore::new(1)), silent_since: Mutex::default() }
    }
}

impl Suspects {
    /// What is known about the prompt at `now`.
    pub(super) fn recall(&self, prompt: &PromptDigest, now: Instant) -> Option<Suspicion> {
        let recalled = self.recalled.lock();
        let (suspicion, at) = recalled.get(prompt)?;
        (now < *at + RECALL_TIME).then_some(*suspicion)
    }

    /// Remembers what was learnt about the prompt.
    pub(super) fn remember(&self, prompt: PromptDigest, suspicion: Suspicion, now: Instant) {
        let mut recalled = self.recalled.lock();
        recalled.insert(prompt, (suspicion, now));
        if recalled.len() > MAX_RECALLED {
            recalled.retain(|_, (_, at)| now < *at + RECALL_TIME);
        }
        if recalled.len() > MAX_RECALLED
            && let Some(oldest) = recalled.iter().min_by_key(|(_, (_, at))| *at).map(|(prompt, _)| *prompt)
        {
            recalled.remove(&oldest);
        }
    }

    /// Forgets the prompt: an engine has answered it.
    pub(super) fn forget(&self, prompt: &PromptDigest) {
        self.recalled.lock().remove(prompt);
    }

    /// Waits until no other suspect is isolated at this engine.
    pub(super) async fn isolate(&self, endpoint: &Endpoint) -> Isolation {
        let ward = {
            let (mut isolation, now) = (self.isolation.lock(), Instant::now());
            isolation.retain(|_, ward| {
                let is_silent = ward.silent_since.lock().is_some_and(|since| now < since + RECALL_TIME);
                is_silent || Arc::strong_count(ward) > 1
            });
            isolation.entry(endpoint.clone()).or_default().clone()
        };
        // The semaphore is never closed.
        let permit = ward.permit.clone().acquire_owned().await.ok();
        let is_heard = ward.silent_since.lock().is_none();
        Isolation { permit, ward, is_heard, has_answered: false, until: Instant::now() + MAX_ISOLATION }
    }
}

/// While it holds its permit, a suspect is the only one at its engine.
pub(super) struct Isolation {
    permit: Option<OwnedSemaphorePermit>,
    ward: Arc<IsolationWard>,
    /// Whether the engine was there when the request was sent, as far as is known.
    is_heard: bool,
    /// Whether it has said something about the request.
    has_answered: bool,
    until: Instant,
}

impl Isolation {
    /// The request waits in the engine's queue now.
    pub(super) fn queued(&mut self) {
        self.heard();
        self.until = self.until.min(Instant::now() + MAX_QUEUED_ISOLATION);
    }

    /// The engine works on the request again.
    pub(super) fn running(&mut self) {
        self.heard();
        self.until = Instant::now() + MAX_ISOLATION;
    }

    /// The engine has said something about the request, so it has got it.
    pub(super) fn heard(&mut self) {
        self.has_answered = true;
        *self.ward.silent_since.lock() = None;
    }

    /// The engine was lost, or has said nothing for long.
    pub(super) fn silent(&self) {
        *self.ward.silent_since.lock() = Some(Instant::now());
    }

    /// Whether the request was the only suspect there all the time, and the engine got it.
    pub(super) fn is_exclusive(&self) -> bool {
        // Another one, whose isolation was over, may have been lost there meanwhile.
        let is_heard = || self.is_heard && self.ward.silent_since.lock().is_none();
        self.permit.is_some() && (self.has_answered || is_heard())
    }

    /// Completes once, when the permit has been held for long enough; it is then given back.
    pub(super) async fn expire(&mut self) {
        if self.permit.is_none() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(self.until).await;
        if !self.has_answered {
            self.silent();
        }
        self.permit = None;
    }
}

impl Drop for Isolation {
    fn drop(&mut self) {
        // Its client left, or its time was over, before the engine said anything.
        if self.permit.is_some() && !self.has_answered {
            self.silent();
        }
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::Message;

    use super::*;

    fn digest(number: usize) -> PromptDigest {
        PromptDigest(Sha256::digest(number.to_le_bytes()).into())
    }

    #[test]
    fn a_prompt_differs_from_every_other_one() {
        let caller = Caller::Anonymous;
        let request = |texts: &[(&str, &str)]| {
            let messages = texts.iter().map(|(role, content)| Message::new(*role, *content));
            GenerationRequest { id: "r".into(), messages: messages.collect(), ..GenerationRequest::default() }
        };
        let all = [
            PromptDigest::new(&caller, "m", &request(&[("user", "ab")])),
            PromptDigest::new(&caller, "n", &request(&[("user", "ab")])),
            PromptDigest::new(&caller, "m", &request(&[("usera", "b")])),
            PromptDigest::new(&caller, "m", &request(&[("user", "a"), ("user", "b")])),
        ];
        for (index, one) in all.iter().enumerate() {
            assert_eq!(all.iter().position(|other| other == one), Some(index));
        }
        let mut same = request(&[("user", "ab")]);
        (same.id, same.sampling.seed) = ("another".into(), Some(3));
        assert_eq!(PromptDigest::new(&caller, "m", &same), all[0], "a client that retries sends another id");
    }

    #[test]
    fn suspicions_are_bounded_in_time_and_number() {
        let (suspects, start) = (Suspects::default(), Instant::now());
        let recall = |number, after| suspects.recall(&digest(number), start + after);
        for number in 0..=MAX_RECALLED {
            let at = start + Duration::from_millis(number as u64);
            suspects.remember(digest(number), Suspicion::Convicted, at);
        }
        let second = Duration::from_secs(2);
        assert_eq!(recall(0, second), None, "the oldest is forgotten");
        assert_eq!(recall(1, second), Some(Suspicion::Convicted));
        assert_eq!(suspects.recalled.lock().len(), MAX_RECALLED);
        assert_eq!(recall(MAX_RECALLED, RECALL_TIME), Some(Suspicion::Convicted));
        assert_eq!(recall(1, RECALL_TIME + second), None, "its time is over");
        suspects.forget(&digest(2));
        assert_eq!(recall(2, second), None);
    }

    fn endpoint(node: &str) -> Endpoint {
        Endpoint { node: node.into(), ..crate::routes::fixtures::endpoint("10.0.0.1:1") }
    }

    #[tokio::test]
    async fn suspects_reach_an_engine_one_at_a_time_for_a_while() {
        let suspects = Suspects::default();
        let [a, b, c] = ["a", "b", "c"].map(endpoint);
        let mut first = suspects.isolate(&a).await;
        let _elsewhere = suspects.isolate(&b).await;
        let second = suspects.isolate(&a);
        let mut second = std::pin::pin!(second);
        assert!(futures::poll!(&mut second).is_pending());
        let whole = first.until;
        first.queued();
        assert!(first.until < whole, "one that waits in the queue makes way");
        first.until = Instant::now();
        first.expire().await;
        assert!(!first.is_exclusive());
        let mut second = second.await;
        assert!(second.is_exclusive());
        second.heard();
        drop(second);
        assert!(futures::poll!(std::pin::pin!(first.expire())).is_pending(), "it expires once");
        drop(first);
        let third = suspects.isolate(&c).await;
        assert_eq!(
            suspects.isolation.lock().len(),
            2,
            "engines without suspects are forgotten: b and c are left"
        );
        drop(third);
    }

    #[tokio::test]
    async fn an_engine_that_may_be_dead_already_tells_nothing() {
        let (suspects, engine) = (Suspects::default(), endpoint("a"));
        let first = suspects.isolate(&engine).await;
        assert!(first.is_exclusive());
        drop(first);
        let mut elsewhere = suspects.isolate(&endpoint("b")).await;
        elsewhere.heard();
        assert!(elsewhere.is_exclusive());
        drop(elsewhere);
        assert_eq!(suspects.isolation.lock().len(), 2);
        let second = suspects.isolate(&engine).await;
        assert!(!second.is_exclusive(), "it is remembered while nobody waits");
        drop(second);
        let mut third = suspects.isolate(&engine).await;
        assert!(!third.is_exclusive());
        third.queued();
        assert!(third.is_exclusive(), "the engine has got this one");
        third.silent();
        drop(third);
        let mut next = suspects.isolate(&engine).await;
        assert!(!next.is_exclusive(), "it was lost with the one before");
        next.heard();
        drop(next);
        // One whose isolation is over is lost there while another one has it.
        let mut early = suspects.isolate(&engine).await;
        early.queued();
        early.until = Instant::now();
        early.expire().await;
        let mut late = suspects.isolate(&engine).await;
        assert!(late.is_exclusive());
        early.silent();
        assert!(!late.is_exclusive());
        late.heard();
        let engine = endpoint("c");
        // A machine freezes; its suspect makes way without a word from it.
        let mut fourth = suspects.isolate(&engine).await;
        assert!(fourth.is_exclusive());
        fourth.until = Instant::now();
        fourth.expire().await;
        assert!(!suspects.isolate(&engine).await.is_exclusive());
        assert!(suspects.isolate(&Endpoint { epoch: 2, ..engine }).await.is_exclusive(), "another engine");
    }
}
