//! How long a request is expected to take at a replica, in milliseconds: it goes where that is least. Pure.

use std::time::Duration;

use russet_rpc::engine::EngineLoad;

/// Rates of an engine that has measured none yet.
const PROMPT_TOKENS_PER_SECOND: f64 = 1000.0;
const TOKENS_PER_SECOND: f64 = 30.0;
/// What each further stream adds to the time of a token, as a share of it: weights are read once for all of them.
const FURTHER_STREAM: f64 = 0.125;

/// What a gateway knows of a replica.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplicaState {
    /// Requests of this gateway that it answers.
    pub(crate) in_flight: usize,
    /// Tokens of their prompts that it has not read yet.
    pub(crate) unread_tokens: u64,
    /// What it said last, of the requests of all gateways.
    pub(crate) load: EngineLoad,
}

/// What a request brings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NewRequest {
    /// Tokens of its prompt that the replica has not cached.
    pub(crate) unread_tokens: u64,
    /// Tokens of an answer.
    pub(crate) answer_tokens: f64,
}

/// Expected milliseconds of a request at a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ReplicaScore {
    /// For the prompts before it.
    pub(crate) queue: f64,
    /// For its prompt.
    pub(crate) prompt: f64,
    /// For its answer, beside the others.
    pub(crate) answer: f64,
    /// Until a slot is free.
    pub(crate) load: f64,
}

impl ReplicaScore {
    /// How long the first token of its answer takes.
    pub(crate) fn first_token(&self) -> Duration {
        Duration::try_from_secs_f64((self.load + self.queue + self.prompt) / 1000.0).unwrap_or(Duration::MAX)
    }

    /// The score of a request at a replica.
    pub(crate) fn new(replica: &ReplicaState, request: &NewRequest) -> Self {
        let ReplicaState { in_flight, unread_tokens, load } = replica;
        let rate = |measured: f64, default: f64| if measured > 0.0 { measured } else { default } / 1000.0;
        let prompt_rate = rate(load.prompt_tokens_per_second, PROMPT_TOKENS_PER_SECOND);
        let answer_rate = rate(load.tokens_per_second, TOKENS_PER_SECOND);
        // Its own requests count from the moment they are sent, those of other gateways once the engine tells.
        let others = f64::from(load.running + load.waiting).max(*in_flight as f64);
        let unread = load.unread_tokens.max(*unread_tokens) as f64;
        let answer = request.answer_tokens / answer_rate * (1.0 + FURTHER_STREAM * others);
        let slots = f64::from(load.slots);
        let without_slot = if slots > 0.0 { (others + 1.0 - slots).max(0.0) } else { 0.0 };
        Self {
            queue: unread / prompt_rate,
            prompt: request.unread_tokens as f64 / prompt_rate,
            answer,
            load: without_slot * answer / slots.max(1.0),
        }
    }

    /// One that says no more than how many requests are there.
    pub(crate) fn of_requests(in_flight: usize) -> Self {
        // Far more than what makes replicas equals.
        Self { load: in_flight as f64 * 1000.0, ..Self::default() }
    }

    /// All of it.
    pub(crate) fn total(&self) -> f64 {
        let Self { queue, prompt, answer, load } = self;
        queue + prompt + answer + load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: EngineLoad = EngineLoad {
        running: 0,
        waiting: 0,
        slots: 4,
        unread_tokens: 0,
        prompt_tokens_per_second: 500.0,
        tokens_per_second: 20.0,
    };

    fn score(replica: ReplicaState, unread_tokens: u64) -> ReplicaScore {
        ReplicaScore::new(&replica, &NewRequest { unread_tokens, answer_tokens: 100.0 })
    }

    #[test]
    fn scores_are_expected_milliseconds() {
        let idle = ReplicaState { load: MEASURED, ..Default::default() };
        let expected = ReplicaScore { queue: 0.0, prompt: 2000.0, answer: 5000.0, load: 0.0 };
        assert_eq!(score(idle, 1000), expected);
        // Two others, of which one is read: with a slot for this one.
        let busy = ReplicaState { in_flight: 2, unread_tokens: 3000, ..idle };
        let expected = ReplicaScore { queue: 6000.0, prompt: 2000.0, answer: 6250.0, load: 0.0 };
        assert_eq!(score(busy, 1000), expected);
        // The same two again, and two of another gateway: this one waits for a quarter of an answer.
        let load = EngineLoad { running: 3, waiting: 1, unread_tokens: 5000, ..MEASURED };
        let expected = ReplicaScore { queue: 10_000.0, prompt: 2000.0, answer: 7500.0, load: 1875.0 };
        assert_eq!(score(ReplicaState { load, ..busy }, 1000), expected);
        assert_eq!(expected.total(), 21_375.0);
    }

    #[test]
    fn engines_that_have_measured_nothing_are_alike() {
        let idle = ReplicaState::default();
        let expected = ReplicaScore { queue: 0.0, prompt: 3000.0, answer: 100_000.0 / 30.0, load: 0.0 };
        assert_eq!(score(idle, 3000), expected);
        assert!(score(ReplicaState { in_flight: 1, ..idle }, 3000).total() > expected.total());
    }
}
