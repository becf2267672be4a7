//! Report budget: memory of what responses tell of their prompts and their clients have not read, of all responses in common. A
//! client reads while its prompt is computed; the budget is for those that do not.

use russet_wire::event::{GenerationEvent, PromptToken, TokenLogprob};

use super::byte_budget::{ByteBudget, ByteReservation};

/// Bytes of all that is told and not read: of some five of the largest responses. They are no part of the memory that was
/// granted to the engine.
pub(super) const MAX_UNREAD_BYTES: usize = 128 << 20;
/// Bytes that an allocation takes beside its contents.
const ALLOCATION_BYTES: usize = 16;

/// The report budget.
#[derive(Clone)]
pub(super) struct ReportBudget(ByteBudget);

impl ReportBudget {
    /// A budget of so many bytes.
    pub(super) fn new(max_unread: usize) -> Self {
        Self(ByteBudget::new(max_unread))
    }

    /// Room for an event until its client has read it; the error is how many bytes are not read.
    pub(super) fn reserve(&self, event: &GenerationEvent) -> Result<ByteReservation, usize> {
        self.0.reserve(bytes_of(event))
    }
}

/// Bytes that an event takes of what it tells of a prompt.
pub(super) fn bytes_of(event: &GenerationEvent) -> usize {
    let GenerationEvent::Prompt { tokens } = event else { return 0 };
    let text = |bytes: &[u8]| ALLOCATION_BYTES + bytes.len();
    let of = |PromptToken { id: _, bytes, logprobs }: &PromptToken| {
        let beside = logprobs.iter().flat_map(|logprobs| &logprobs.top);
        let beside: usize = beside.map(|token| size_of::<TokenLogprob>() + text(&token.bytes)).sum();
        size_of::<PromptToken>() + text(bytes) + ALLOCATION_BYTES + beside
    };
    tokens.iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use russet_wire::event::PromptLogprobs;

    use super::*;

    fn report(tokens: usize, top: usize, text: usize) -> GenerationEvent {
        let beside = TokenLogprob { id: 1, bytes: vec![b'x'; text], logprob: -1.0 };
        let logprobs = PromptLogprobs { logprob: -1.0, rank: 1, top: vec![beside; top] };
        let token = PromptToken { id: 1, bytes: vec![b'x'; text], logprobs: Some(logprobs) };
        GenerationEvent::Prompt { tokens: vec![token; tokens] }
    }

    #[test]
    fn what_is_read_makes_room() {
        let one = bytes_of(&report(10, 2, 4));
        let budget = ReportBudget::new(2 * one);
        let first = budget.reserve(&report(10, 2, 4)).ok();
        let second = budget.reserve(&report(10, 2, 4)).ok();
        assert!(first.is_some() && second.is_some());
        assert_eq!(budget.reserve(&report(1, 0, 1)).err(), Some(2 * one));
        // What tells nothing of a prompt takes none of it.
        let started = GenerationEvent::Started { prompt_tokens: 10, emitted_tokens: 0 };
        assert!(budget.reserve(&started).is_ok());
        drop(first);
        assert!(budget.reserve(&report(10, 2, 4)).is_ok());
        drop(second);
        assert_eq!(budget.0.used(), 0);
    }

    #[test]
    fn long_texts_and_every_number_count() {
        let plain = bytes_of(&report(100, 0, 1));
        assert!(bytes_of(&report(100, 0, 1001)) >= plain + 100_000);
        assert!(bytes_of(&report(100, 20, 1)) >= plain + 100 * 20 * size_of::<TokenLogprob>());
        // The largest response fits, with texts of a usual length.
        assert!(bytes_of(&report(1, 1, 8)) * (1 << 17) < MAX_UNREAD_BYTES / 3);
    }
}
