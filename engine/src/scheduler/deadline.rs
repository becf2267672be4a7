//! Deadline of a request: when its work is no longer worth doing. Pure: the time is an argument.

use std::time::Duration;

use russet_wire::event::{FailureKind, GenerationFailure};

/// Safety factor on the measured prefill rate before a request is refused for its prompt: a rejection has to be
/// certain.
const MAX_PREFILL_SPEEDUP: u32 = 2;

/// A request's deadline and its progress.
#[derive(Clone, Copy, Debug)]
pub struct RequestProgress {
    /// Timeout of its client.
    pub timeout: Duration,
    /// Time since its arrival.
    pub waited: Duration,
    /// Output tokens so far.
    pub generated: u32,
    /// Tokens to prefill before its next output token.
    pub prefill_tokens: u32,
    /// Expected prefill time at the measured rate, if there is one.
    pub prefill_time: Option<Duration>,
}

/// Why a request can no longer meet its deadline; `None` if it can.
pub fn deadline_failure(progress: &RequestProgress) -> Option<GenerationFailure> {
    let RequestProgress {
        timeout: patience,
        waited,
        generated,
        prefill_tokens: unread,
        prefill_time: reading,
    } = *progress;
    let exceeded = |message| Some(GenerationFailure { kind: FailureKind::DeadlineExceeded, message });
    let Some(left) = patience.checked_sub(waited).filter(|left| !left.is_zero()) else {
        return exceeded(format!(
            "the deadline of {patience:?} has passed, with {generated} tokens of the answer sent; ask with more time or for less"
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
            let failure = deadline_failure(&RequestProgress {
                timeout: patience,
                waited,
                generated,
                prefill_tokens: 70,
                prefill_time: reading,
            });
            let kind = failure.as_ref().map(|failure| failure.kind);
            assert_eq!(kind, expected.map(|_| FailureKind::DeadlineExceeded), "{story}");
            let message = failure.map(|failure| failure.message).unwrap_or_default();
            assert!(message.contains(expected.unwrap_or_default()), "{story}: {message}");
        }
    }
}
