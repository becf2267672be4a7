//! Until when a request is worth its work. Pure: the time is told.

use std::time::Duration;

use russet_wire::event::{GenerationFailure, FailureKind};

/// Prompts may be read this much faster than it was ever measured before a request is given up for them: what is
/// refused has to be certain.
const MAX_PREFILL_SPEEDUP: u32 = 2;

/// What a request wants and what became of it so far.
#[derive(Clone, Copy, Debug)]
pub struct RequestProgress {
    /// How long its caller waits.
    pub timeout: Duration,
    /// How long it has waited.
    pub waited: Duration,
    /// Tokens of its answer.
    pub generated: u32,
    /// Tokens to be read before the next one of its answer.
    pub prefill_tokens: u32,
    /// How long that takes at the pace that was measured, if it was.
    pub prefill_time: Option<Duration>,
}

/// Why a request is of no more use to its caller, if it is not.
pub fn deadline_failure(progress: &RequestProgress) -> Option<GenerationFailure> {
    let RequestProgress { timeout: patience, waited, generated, prefill_tokens: unread, prefill_time: reading } = *progress;
    let exceeded = |message| Some(GenerationFailure { kind: FailureKind::DeadlineExceeded, message });
    let Some(left) = patience.checked_sub(waited).filter(|left| !left.is_zero()) else {
        return exceeded(format!(
            "the deadline of {patience:?} has passed, with {generated} tokens of the answer told; ask with more time or for less"
        ));
    };
    match reading.map(|reading| reading / MAX_PREFILL_SPEEDUP) {
        Some(reading) if generated == 0 && reading > left => exceeded(format!(
            "the deadline of {patience:?} cannot be met: {left:.0?} of it are left, and to read the {unread} tokens of the prompt takes at least {reading:.0?}; ask with more time or for less"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_ends_with_its_deadline_or_once_it_cannot_be_met() {
        let seconds = Duration::from_secs;
        for (story, patience, waited, generated, reading, expected) in [
            ("it has just come", seconds(5), seconds(0), 0, None, None),
            (
                "nobody waits for it at all",
                seconds(0),
                seconds(0),
                0,
                None,
                Some("the deadline of 0ns has passed"),
            ),
            ("it waited too long", seconds(5), seconds(5), 0, None, Some("with 0 tokens")),
            ("the answer takes too long", seconds(5), seconds(6), 9, None, Some("with 9 tokens")),
            ("nearly", seconds(5), seconds(4), 9, None, None),
            ("the prompt may just be read in time", seconds(5), seconds(3), 0, Some(seconds(4)), None),
            (
                "it cannot",
                seconds(5),
                seconds(3),
                0,
                Some(seconds(5)),
                Some(
                    "cannot be met: 2s of it are left, and to read the 70 tokens of the prompt takes at least 2s",
                ),
            ),
            ("who answers already is not judged by that", seconds(5), seconds(3), 1, Some(seconds(9)), None),
        ] {
            let failure = deadline_failure(&RequestProgress { timeout: patience, waited, generated, prefill_tokens: 70, prefill_time: reading });
            let kind = failure.as_ref().map(|failure| failure.kind);
            assert_eq!(kind, expected.map(|_| FailureKind::DeadlineExceeded), "{story}");
            let message = failure.map(|failure| failure.message).unwrap_or_default();
            assert!(message.contains(expected.unwrap_or_default()), "{story}: {message}");
        }
    }
}
