//! Which models of a provider are left alone, and until when: because nothing of a rate limit is left, or because the provider
//! wants to be paid first. Pure; the clock is an argument. Not here: what a few failures in a row lead to (`circuit`).
//!
//! | what the provider says | scope | until |
//! |---|---|---|
//! | nothing is left of requests or tokens | the model | a request fits again, at most an hour |
//! | nothing is left of a limit without a name, to a `:free` model | all `:free` models | that is reset, at most a day |
//! | the same, to another model | all models of OpenRouter; elsewhere the model | that is reset, at most an hour |
//! | 402 to a model that costs something, or that no credits are left | all but `:free` models | five minutes have passed |
//!
//! Then one request tries it (`trial`), and the others go to their next targets until it is answered.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::{FREE_SUFFIX, PauseReason, PauseScope, ProviderPause};
use tokio::time::Instant;

use super::rate_limits::{LimitScope, SpentLimit};
use super::trial::{Trial, TrialSlot};

/// The longest that a limit keeps requests away: what says more is wrong, or may have been raised meanwhile.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// The longest for free models: OpenRouter counts them by the day, and a request that it refuses counts too.
const MAX_FREE_PAUSE: Duration = Duration::from_secs(24 * 3600);
/// How long models that cost something are left alone after a 402: nobody says when somebody will have paid.
const UNPAID_PAUSE: Duration = Duration::from_secs(300);
/// Most pauses of a provider: more models than one uses at once.
const MAX_PAUSES: usize = 64;

/// Models that are left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    /// For people, and for the status.
    pub(super) shown: ProviderPause,
    until: Instant,
    /// The generation of the ModelProvider that it was seen with: one that is edited starts anew.
    generation: Option<i64>,
    /// The request that tries these models after the end.
    trial: TrialSlot,
}

/// A moment, by the clock that runs evenly and by that of the wall.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) instant: Instant,
    pub(super) time: Timestamp,
}

impl Moment {
    pub(super) fn now() -> Self {
        Self { instant: Instant::now(), time: Timestamp::now() }
    }
}

/// All pauses of a provider.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pauses(Vec<Pause>);

impl Pauses {
    /// Leaves models alone for these limits, which the provider told with the answer of this model; `is_shared`: limits
    /// without a name are those of all of its models.
    pub(super) fn spent(
        &mut self,
        (model, is_shared): (&str, bool),
        limits: &[SpentLimit],
        generation: Option<i64>,
        now: Moment,
    ) {
        for SpentLimit { scope, left } in limits {
            let (scope, most) = match scope {
                LimitScope::Model => (PauseScope::Model, MAX_PAUSE),
                LimitScope::Unnamed if model.ends_with(FREE_SUFFIX) => (PauseScope::Free, MAX_FREE_PAUSE),
                LimitScope::Unnamed if is_shared => (PauseScope::All, MAX_PAUSE),
                // Together and others count each model by itself. Where they do not, the others say so when they are asked.
                LimitScope::Unnamed => (PauseScope::Model, MAX_PAUSE),
            };
            let model = (scope == PauseScope::Model).then(|| model.to_owned());
            self.insert((scope, model, PauseReason::RateLimited), (*left).min(most), generation, now);
        }
    }

    /// The provider wants to be paid before it answers this model.
    pub(super) fn unpaid(&mut self, model: &str, generation: Option<i64>, now: Moment) {
        // One that costs nothing and is refused so says nothing of the others: OpenRouter does that below a balance of zero.
        let scope = if model.ends_with(FREE_SUFFIX) { PauseScope::Free } else { PauseScope::Paid };
        self.wants_money(scope, generation, now);
    }

    /// Nothing is left of the key's credits.
    pub(super) fn no_credits(&mut self, generation: Option<i64>, now: Moment) {
        self.wants_money(PauseScope::Paid, generation, now);
    }

    fn wants_money(&mut self, scope: PauseScope, generation: Option<i64>, now: Moment) {
        self.insert((scope, None, PauseReason::NoCredits), UNPAID_PAUSE, generation, now);
    }

    fn insert(
        &mut self,
        (scope, model, reason): (PauseScope, Option<String>, PauseReason),
        left: Duration,
        generation: Option<i64>,
        now: Moment,
    ) {
        let Self(pauses) = self;
        // An answer that was asked for before an edit says nothing of what is there now.
        if pauses.iter().any(|pause| pause.generation > generation) {
            return;
        }
        pauses.retain(|pause| pause.generation == generation);
        // The bounds are within what both clocks can say.
        let at = now.time.checked_add(left).unwrap_or(now.time);
        let pause = Pause {
            shown: ProviderPause { scope, model, reason, until: Time(at) },
            until: now.instant + left,
            generation,
            trial: TrialSlot::default(),
        };
        let same = pauses.iter_mut().find(|other| {
            let ProviderPause { scope, model, reason, until: _ } = &other.shown;
            (scope, model, reason) == (&pause.shown.scope, &pause.shown.model, &pause.shown.reason)
        });
        match same {
            // A later answer to an earlier request does not shorten it.
            Some(same) if same.until >= pause.until => {}
            Some(same) => *same = pause,
            None => {
                if pauses.len() >= MAX_PAUSES {
                    let first = (0..pauses.len()).min_by_key(|index| pauses.get(*index).map(|one| one.until));
                    if let Some(first) = first {
                        pauses.swap_remove(first);
                    }
                }
                pauses.push(pause);
            }
        }
    }

    /// The pause of this model that ends last, if it is left alone.
    pub(super) fn of(&self, model: &str, generation: Option<i64>, now: Instant) -> Option<&ProviderPause> {
        let holds = |pause: &&Pause| {
            pause.until > now && pause.generation == generation && pause.shown.is_about(model)
        };
        self.0.iter().filter(holds).max_by_key(|pause| pause.until).map(|pause| &pause.shown)
    }

    /// The pauses of this model that have ended, and after which it has not answered.
    fn half_open(
        &mut self,
        model: &str,
        generation: Option<i64>,
        now: Instant,
    ) -> impl Iterator<Item = &mut Pause> {
        let holds = move |pause: &&mut Pause| {
            pause.until <= now && pause.generation == generation && pause.shown.is_about(model)
        };
        self.0.iter_mut().filter(holds)
    }

    /// Whether one request tries this model after a pause.
    pub(super) fn are_tried(&mut self, model: &str, generation: Option<i64>, now: Instant) -> bool {
        self.half_open(model, generation, now).any(|pause| pause.trial.is_taken(now))
    }

    /// Makes a request the one that tries this model, where that is needed.
    pub(super) fn trials(&mut self, model: &str, generation: Option<i64>, now: Instant) -> Vec<Trial> {
        self.half_open(model, generation, now).map(|pause| pause.trial.take(now)).collect()
    }

    /// Forgets the pauses that had ended when a request was sent: the model answers it. One that the answer began stays.
    pub(super) fn answered(&mut self, model: &str, generation: Option<i64>, sent: Instant) {
        let was_over = |pause: &Pause| {
            pause.until <= sent && pause.generation == generation && pause.shown.is_about(model)
        };
        self.0.retain(|pause| !was_over(pause));
    }

    /// Those that have not ended.
    pub(super) fn shown(
        &self,
        generation: Option<i64>,
        now: Timestamp,
    ) -> impl Iterator<Item = &ProviderPause> {
        let holds = move |pause: &&Pause| pause.shown.until.0 > now && pause.generation == generation;
        self.0.iter().filter(holds).map(|pause| &pause.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(scope: LimitScope, seconds: u64) -> SpentLimit {
        SpentLimit { scope, left: Duration::from_secs(seconds) }
    }

    fn after(begin: Moment, seconds: u64) -> Moment {
        let span = Duration::from_secs(seconds);
        Moment { instant: begin.instant + span, time: begin.time + span }
    }

    /// For how many seconds from `begin` on a model is left alone, if it is.
    fn left(pauses: &Pauses, model: &str, begin: Moment) -> Option<i64> {
        left_of(pauses, model, None, begin)
    }

    fn left_of(pauses: &Pauses, model: &str, generation: Option<i64>, begin: Moment) -> Option<i64> {
        let until = pauses.of(model, generation, begin.instant)?.until.0;
        Some(until.duration_since(begin.time).as_secs())
    }

    #[test]
    fn a_limit_pauses_the_models_it_is_for_until_it_is_reset() {
        use LimitScope::{Model, Unnamed};
        let begin = Moment { instant: Instant::now(), time: Timestamp::UNIX_EPOCH };
        let models = ["a", "b", "a:free", "b:free"];
        const DAY: i64 = 86_400;
        for (asked, spent, expected) in [
            (("a", true), limit(Model, 60), [Some(60), None, None, None]),
            (("a:free", true), limit(Model, 60), [None, None, Some(60), None]),
            (("a", true), limit(Unnamed, 60), [Some(60); 4]),
            (("a", false), limit(Unnamed, 60), [Some(60), None, None, None]),
            (("a:free", true), limit(Unnamed, 60), [None, None, Some(60), Some(60)]),
            (("a:free", false), limit(Unnamed, 60), [None, None, Some(60), Some(60)]),
            // Nonsense is bounded; a day of free models is none.
            (("a", true), limit(Unnamed, u64::MAX), [Some(3600); 4]),
            (("a", true), limit(Model, 7200), [Some(3600), None, None, None]),
            (("a:free", true), limit(Unnamed, 50_000), [None, None, Some(50_000), Some(50_000)]),
            (("a:free", true), limit(Unnamed, u64::MAX), [None, None, Some(DAY), Some(DAY)]),
        ] {
            let mut pauses = Pauses::default();
            pauses.spent(asked, &[spent], None, begin);
            assert_eq!(models.map(|model| left(&pauses, model, begin)), expected, "{asked:?} {spent:?}");
            for (model, seconds) in models.into_iter().zip(expected) {
                let seconds = seconds.unwrap_or(0) as u64;
                assert_eq!(
                    pauses.of(model, None, after(begin, seconds).instant),
                    None,
                    "{model} is asked again"
                );
            }
        }
    }

    #[test]
    fn one_request_tries_the_models_of_a_pause_that_ended() {
        let begin = Moment { instant: Instant::now(), time: Timestamp::UNIX_EPOCH };
        let mut pauses = Pauses::default();
        let spend = |pauses: &mut Pauses, now| {
            pauses.spent(("a", true), &[limit(LimitScope::Unnamed, 60)], Some(1), now);
        };
        spend(&mut pauses, begin);
        assert!(pauses.trials("a", Some(1), begin.instant).is_empty(), "it has not ended");
        let end = after(begin, 60);
        // Another pause that begins meanwhile does not make it forgotten.
        pauses.spent(("c", true), &[limit(LimitScope::Model, 60)], Some(1), end);
        let trial = pauses.trials("b", Some(1), end.instant);
        assert_eq!(trial.len(), 1, "all models are one pause");
        assert!(pauses.are_tried("a", Some(1), end.instant));
        assert!(!pauses.are_tried("a", Some(2), end.instant), "an edit ends it");
        drop(trial);
        assert!(!pauses.are_tried("a", Some(1), end.instant));
        // The one that tries it is told that nothing is left.
        let trial = pauses.trials("a", Some(1), end.instant);
        spend(&mut pauses, end);
        drop(trial);
        assert_eq!(left_of(&pauses, "a", Some(1), end), Some(60));
        // And then the next one that something is.
        let later = after(end, 60);
        let trial = pauses.trials("a", Some(1), later.instant);
        assert_eq!(trial.len(), 1);
        // Its headers say that a second has to pass, and its first text comes after that.
        pauses.spent(("a", true), &[limit(LimitScope::Model, 1)], Some(1), later);
        pauses.answered("a", Some(1), later.instant);
        drop(trial);
        let later = after(later, 2);
        let trial = pauses.trials("a", Some(1), later.instant);
        assert_eq!(trial.len(), 1, "one request tries it again");
        pauses.answered("a", Some(1), later.instant);
        assert!(!pauses.are_tried("b", Some(1), later.instant));
        assert!(pauses.trials("b", Some(1), later.instant).is_empty());
    }

    #[test]
    fn without_credits_free_models_are_still_asked() {
        let begin = Moment { instant: Instant::now(), time: Timestamp::UNIX_EPOCH };
        let mut pauses = Pauses::default();
        pauses.unpaid("a", None, begin);
        assert_eq!(
            ["a", "b", "c:free"].map(|model| left(&pauses, model, begin)),
            [Some(300), Some(300), None]
        );
        assert_eq!(pauses.of("a", None, after(begin, 300).instant), None);
        pauses.unpaid("c:free", None, begin);
        assert_eq!(left(&pauses, "d:free", begin), Some(300));
    }

    #[test]
    fn a_pause_is_lengthened_and_an_edited_provider_starts_anew() {
        let begin = Moment { instant: Instant::now(), time: Timestamp::UNIX_EPOCH };
        let mut pauses = Pauses::default();
        for (seconds, expected) in [(60, 60), (5, 60), (90, 90)] {
            pauses.spent(("a", true), &[limit(LimitScope::Model, seconds)], Some(1), begin);
            let until = pauses.of("a", Some(1), begin.instant).map(|pause| pause.until.0.as_second());
            assert_eq!(until, Some(expected));
        }
        assert_eq!(pauses.shown(Some(1), begin.time).count(), 1, "the same pause is there once");
        assert_eq!(pauses.of("a", Some(2), begin.instant), None);
        assert_eq!(pauses.shown(Some(1), after(begin, 90).time).count(), 0);
        // However many models there are, those are kept that end last.
        let count = MAX_PAUSES as u64 + 10;
        for number in 0..count {
            let limit = limit(LimitScope::Model, 100 + number);
            pauses.spent((&format!("m{number}"), true), &[limit], Some(1), begin);
        }
        assert_eq!(pauses.shown(Some(1), begin.time).count(), MAX_PAUSES);
        assert!(pauses.of(&format!("m{}", count - 1), Some(1), begin.instant).is_some());
        assert!(pauses.of("a", Some(1), begin.instant).is_none());
    }
}
