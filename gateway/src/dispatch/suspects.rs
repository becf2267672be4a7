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
    /// One permit for each engine, by its address.
    isolation: Mutex<HashMap<String, Arc<Semaphore>>>,
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

    /// Waits until no other suspect is isolated at the engine with this address.
    pub(super) async fn isolate(&self, address: &str) -> Isolation {
        let permits = {
            let mut isolation = self.isolation.lock();
            isolation.retain(|known, permits| known == address || Arc::strong_count(permits) > 1);
            isolation.entry(address.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
        };
        // The semaphore is never closed.
        let permit = permits.acquire_owned().await.ok();
        Isolation { permit, until: Instant::now() + MAX_ISOLATION }
    }
}

/// While it holds its permit, a suspect is the only one at its engine.
pub(super) struct Isolation {
    permit: Option<OwnedSemaphorePermit>,
    until: Instant,
}

impl Isolation {
    /// The request waits in the engine's queue now.
    pub(super) fn queued(&mut self) {
        self.until = self.until.min(Instant::now() + MAX_QUEUED_ISOLATION);
    }

    /// The engine works on the request again.
    pub(super) fn running(&mut self) {
        self.until = Instant::now() + MAX_ISOLATION;
    }

    /// Whether the request was the only suspect there all the time.
    pub(super) fn is_exclusive(&self) -> bool {
        self.permit.is_some()
    }

    /// Completes once, when the permit has been held for long enough; it is then given back.
    pub(super) async fn expire(&mut self) {
        if self.permit.is_none() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(self.until).await;
        self.permit = None;
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

    #[tokio::test]
    async fn suspects_reach_an_engine_one_at_a_time_for_a_while() {
        let suspects = Suspects::default();
        let mut first = suspects.isolate("a").await;
        let _elsewhere = suspects.isolate("b").await;
        let second = suspects.isolate("a");
        let mut second = std::pin::pin!(second);
        assert!(futures::poll!(&mut second).is_pending());
        let whole = first.until;
        first.queued();
        assert!(first.until < whole, "one that waits in the queue makes way");
        first.until = Instant::now();
        first.expire().await;
        assert!(!first.is_exclusive());
        assert!(second.await.is_exclusive());
        assert!(futures::poll!(std::pin::pin!(first.expire())).is_pending(), "it expires once");
        let third = suspects.isolate("c").await;
        assert_eq!(
            suspects.isolation.lock().len(),
            2,
            "engines without suspects are forgotten: b and c are left"
        );
        drop(third);
    }
}
