//! The durations of a response, as Ollama tells them: until the first token the prompt was read, and from then on tokens
//! were generated.

use std::time::Duration;

use russet_wire::event::Usage;
use serde::Serialize;
use tokio::time::Instant;

/// When a request arrived, and when its first token did.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseClock {
    started: Instant,
    first_token: Option<Instant>,
}

/// Tokens, and durations in nanoseconds.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Timings {
    total_duration: u64,
    /// Always 0: models are loaded before they are asked, and the wait for one counts as the prompt's.
    load_duration: u64,
    prompt_eval_count: u32,
    prompt_eval_duration: u64,
    eval_count: u32,
    eval_duration: u64,
}

impl ResponseClock {
    /// Of a request that arrived then.
    pub(super) fn new(started: Instant) -> Self {
        Self { started, first_token: None }
    }

    /// A token arrived; the first one counts.
    pub(super) fn token(&mut self, now: Instant) {
        self.first_token.get_or_insert(now);
    }

    /// The timings of a response that is complete now.
    pub(super) fn timings(&self, now: Instant, usage: Usage) -> Timings {
        let Usage { prompt_tokens, completion_tokens, cached_tokens: _ } = usage;
        let first = self.first_token.unwrap_or(now);
        Timings {
            total_duration: nanoseconds(now.saturating_duration_since(self.started)),
            load_duration: 0,
            prompt_eval_count: prompt_tokens,
            prompt_eval_duration: nanoseconds(first.saturating_duration_since(self.started)),
            eval_count: completion_tokens,
            eval_duration: nanoseconds(now.saturating_duration_since(first)),
        }
    }

    /// Nanoseconds since the request arrived.
    pub(super) fn total(&self, now: Instant) -> u64 {
        nanoseconds(now.saturating_duration_since(self.started))
    }
}

/// At least one: clients divide by them.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_ends_the_time_of_the_prompt() {
        let started = Instant::now();
        let after = |ms| started + Duration::from_millis(ms);
        let usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 2 };
        let mut clock = ResponseClock::new(started);
        assert_eq!(clock.timings(started, usage).eval_duration, 1);
        clock.token(after(200));
        clock.token(after(300));
        let expected = Timings {
            total_duration: 1_000_000_000,
            load_duration: 0,
            prompt_eval_count: 7,
            prompt_eval_duration: 200_000_000,
            eval_count: 3,
            eval_duration: 800_000_000,
        };
        assert_eq!(clock.timings(after(1000), usage), expected);
        // A response without a token was nothing but its prompt.
        let silent = ResponseClock::new(started).timings(after(5), Usage::default());
        assert_eq!((silent.prompt_eval_duration, silent.eval_duration), (5_000_000, 1));
        assert_eq!(clock.total(after(2)), 2_000_000);
    }
}
