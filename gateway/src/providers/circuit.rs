//! A circuit breaker of one model of a provider: after a few failures in a row it is left alone for a while, then one request
//! tries it. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::trial::{Trial, TrialSlot};
use crate::error::ErrorKind;

/// Failures in a row that are taken for bad luck.
const MAX_FAILURES: u32 = 3;
/// For how long it is left alone at first; twice as long after each further failure.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest that it is left alone for failures: it may have been mended.
const MAX_OWN_PAUSE: Duration = Duration::from_secs(60);
/// The longest that it is left alone, whatever the provider asks for.
const MAX_PAUSE: Duration = Duration::from_secs(600);

/// What is known of a model of a provider.
#[derive(Clone, Debug, Default)]
pub(crate) struct Circuit {
    failures: u32,
    open_until: Option<Instant>,
    last_error: String,
    is_busy: bool,
    trial: TrialSlot,
}

impl Circuit {
    /// For how long it is left alone; none where it may be asked. After a pause one request tries it: should that fail, the
    /// next pause is longer.
    pub(super) fn open_for(&self, now: Instant) -> Option<Duration> {
        self.open_until?.checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// Whether it was left alone, and no request has been answered since.
    fn is_half_open(&self, now: Instant) -> bool {
        self.open_until.is_some_and(|until| until <= now)
    }

    /// Whether one request tries it now.
    pub(super) fn is_tried(&self, now: Instant) -> bool {
        self.is_half_open(now) && self.trial.is_taken(now)
    }

    /// Makes a request the one that tries it, where that is needed.
    pub(super) fn trial(&mut self, now: Instant) -> Option<Trial> {
        self.is_half_open(now).then(|| self.trial.take(now))
    }

    /// The request that tries it has the beginning of an answer: others may follow. Whether it fails after all is counted.
    pub(super) fn closes(&mut self, now: Instant) {
        if self.is_half_open(now) {
            self.open_until = None;
        }
    }

    /// Why it is left alone.
    pub(super) fn last_error(&self) -> &str {
        &self.last_error
    }

    /// What it makes of a request that nothing else answers.
    pub(super) fn error_kind(&self) -> ErrorKind {
        if self.is_busy { ErrorKind::Overloaded } else { ErrorKind::ProviderFailed }
    }

    /// A request failed, maybe because there are too many; `pause` is what the provider asks for.
    pub(super) fn failed(&mut self, message: &str, is_busy: bool, pause: Option<Duration>, now: Instant) {
        self.is_busy = is_busy;
        self.failures = self.failures.saturating_add(1);
        message.clone_into(&mut self.last_error);
        let own = self.failures.checked_sub(MAX_FAILURES);
        let own = own.map(|more| (FIRST_PAUSE * (1 << more.min(10))).min(MAX_OWN_PAUSE));
        if let Some(pause) = pause.max(own) {
            self.open_until = Some(now + pause.min(MAX_PAUSE));
        }
    }

    /// The provider answered a request with a refusal of that request.
    pub(super) fn trial_ended(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_fails_is_left_alone_longer_each_time() {
        let mut now = Instant::now();
        let mut circuit = Circuit::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            circuit.failed("503", false, None, now);
            let pause = circuit.open_for(now).unwrap_or_default();
            pauses.push(pause.as_secs());
            now += pause;
            assert_eq!(circuit.open_for(now), None, "a request tries it");
        }
        assert_eq!(pauses, [0, 0, 5, 10, 20, 40, 60, 60, 60, 60, 60, 60]);
        circuit.trial_ended();
        circuit.failed("503", false, None, now);
        assert_eq!(circuit.open_for(now), None);
    }

    #[test]
    fn one_request_at_a_time_tries_a_model_that_failed() {
        let now = Instant::now();
        let mut circuit = Circuit::default();
        assert!(circuit.trial(now).is_none(), "nothing failed");
        for _ in 0..MAX_FAILURES {
            circuit.failed("503", false, None, now);
        }
        assert!(circuit.trial(now).is_none(), "it is left alone");
        let later = now + FIRST_PAUSE;
        let trial = circuit.trial(later);
        assert!(trial.is_some() && circuit.is_tried(later));
        // Its client has gone: nobody knows how it would have ended.
        drop(trial);
        assert!(!circuit.is_tried(later));
        let trial = circuit.trial(later);
        assert!(trial.is_some());
        circuit.closes(later);
        assert!(!circuit.is_tried(later) && circuit.trial(later).is_none());
        // An answer that begins and breaks is one more failure.
        circuit.failed("it broke", false, None, later);
        assert_eq!(circuit.open_for(later), Some(FIRST_PAUSE * 2));
    }

    #[test]
    fn a_pause_that_a_provider_asks_for_is_kept_within_bounds() {
        let now = Instant::now();
        for (asked, expected) in [(7, 7), (86_400, 600)] {
            let mut circuit = Circuit::default();
            circuit.failed("429", true, Some(Duration::from_secs(asked)), now);
            assert_eq!(circuit.error_kind(), ErrorKind::Overloaded);
            assert_eq!(circuit.open_for(now), Some(Duration::from_secs(expected)));
            assert_eq!(circuit.last_error(), "429");
        }
    }
}
