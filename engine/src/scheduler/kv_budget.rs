//! KV-cache token budget: admission and preemption of sequences. Pure.
//!
//! The length of an output is not known before its end, and most clients set no limit. Reserving the longest
//! possible output for each sequence would leave most of the KV cache empty. So each sequence is expected to
//! continue for the usual output length, however long it already is. If that is too little, a sequence is
//! preempted and resumes later.

use std::cmp::Reverse;

use russet_wire::event::{FailureKind, GenerationFailure};

use crate::prefix_cache::CACHE_STEP;

/// Minimum expected output length, whatever was observed: KV capacity is allocated in steps anyway.
const MIN_EXPECTED_TOKENS: f64 = 256.0;
/// Weight of the newest output in the moving average: it adapts within some dozens of requests.
const EMA_WEIGHT: f64 = 1.0 / 16.0;
/// Maximum preemptions of one sequence. From then on its full possible length is reserved, so that it is
/// never preempted again.
pub const MAX_PREEMPTIONS: u32 = 3;
/// Minimum tokens that a sequence decodes between preemptions by a higher priority: prefilling its prompt
/// again costs about as much as decoding some dozens.
pub const MIN_TOKENS_BEFORE_PREEMPTION: u32 = 32;

/// KV usage of a sequence in a slot, or of one that waits for admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceUsage {
    /// As requested; does not age.
    pub priority: i32,
    /// Arrival number; later requests have higher ones.
    pub number: u64,
    /// Prompt tokens.
    pub prompt: u32,
    /// Output tokens.
    pub generated: u32,
    /// Maximum output tokens.
    pub limit: u32,
    /// Output tokens since its admission.
    pub tokens_since_admission: u32,
    /// Tokens in the KV cache once all batches in flight have ended.
    pub cached_tokens: u32,
    /// Times it was preempted.
    pub preemptions: u32,
    /// Whether its slot is being loaded, so that it cannot be preempted now.
    pub is_pinned: bool,
}

/// Admission decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvAdmission {
    /// Admit after preempting these, by index into the running sequences, ascending; usually none.
    AfterPreempting(Vec<usize>),
    /// Wait.
    Wait,
}

/// KV budget and the usual output length.
#[derive(Clone, Debug)]
pub struct KvBudget {
    capacity: u64,
    context: u32,
    /// Usual output length in tokens.
    expected_answer_tokens: f64,
}

/// Maximum output tokens within a KV cache of `capacity` tokens, at most `limit`; a failure if the prompt
/// alone fills the cache and is not all that is asked for.
pub fn max_answer_tokens(prompt_tokens: u32, limit: u32, capacity: u64) -> Result<u32, GenerationFailure> {
    match capacity.checked_sub(u64::from(prompt_tokens)) {
        Some(left) if left > 0 || limit == 0 => Ok(limit.min(u32::try_from(left).unwrap_or(u32::MAX))),
        Some(_) | None => Err(prompt_exceeds_capacity(&prompt_tokens.to_string(), capacity)),
    }
}

/// The failure of a prompt of this many tokens in a KV cache of `capacity`.
pub fn prompt_exceeds_capacity(prompt_tokens: &str, capacity: u64) -> GenerationFailure {
    let message = format!(
        "This model's maximum context length is {capacity} tokens, all that the KV cache of this engine holds. However, your messages resulted in {prompt_tokens} tokens. Shorten the conversation, or deploy the model with more kvTokens."
    );
    GenerationFailure { kind: FailureKind::ContextLengthExceeded, message }
}

impl KvBudget {
    /// A budget of `capacity` tokens for sequences of at most `context` tokens.
    pub fn new(capacity: u64, context: u32) -> Self {
        Self { capacity, context, expected_answer_tokens: MIN_EXPECTED_TOKENS }
    }

    /// Records an output of `generated` tokens.
    pub fn record_answer(&mut self, generated: u32) {
        self.expected_answer_tokens += (f64::from(generated) - self.expected_answer_tokens) * EMA_WEIGHT;
    }

    /// KV capacity allocated to a sequence of this many tokens.
    fn reserved_tokens(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(CACHE_STEP).saturating_mul(CACHE_STEP).min(self.context)).min(self.capacity)
    }

    /// KV capacity that a sequence is expected to need at its end.
    pub fn expected_tokens(&self, one: &SequenceUsage) -> u64 {
        let rest = one.limit.saturating_sub(one.generated);
        let still = if one.preemptions < MAX_PREEMPTIONS {
            rest.min(self.expected_answer_tokens.max(MIN_EXPECTED_TOKENS).round() as u32)
        } else {
            rest
        };
        self.reserved_tokens(one.prompt.saturating_add(one.generated).saturating_add(still))
    }

    /// Share of the budget in use, 0 to 1.
    pub fn usage<'a>(&self, running: impl IntoIterator<Item = &'a SequenceUsage>) -> f64 {
        let taken: u64 = running.into_iter().map(|one| self.reserved_tokens(one.cached_tokens)).sum();
        taken as f64 / self.capacity.max(1) as f64
    }

    /// Whether to admit `newcomer` beside the running sequences, with `free` slots left. Preempts only
    /// sequences of lower priority, lowest and youngest first, and only if the newcomer then fits.
    pub fn admission(&self, newcomer: &SequenceUsage, running: &[SequenceUsage], free: usize) -> KvAdmission {
        let forecasts: Vec<u64> = running.iter().map(|one| self.expected_tokens(one)).collect();
        let needed = self.expected_tokens(newcomer);
        let fits_without = |leave: &[usize]| {
            let remaining = (0..running.len()).filter(|index| !leave.contains(index));
            let taken: u64 = remaining.map(|index| forecasts[index]).sum();
            free + leave.len() > 0 && taken + needed <= self.capacity
        };
        let mut leave = Vec::new();
        if fits_without(&leave) {
            return KvAdmission::AfterPreempting(leave);
        }
        let may_leave = |one: &SequenceUsage| {
            one.priority < newcomer.priority
                && one.preemptions < MAX_PREEMPTIONS
                && one.tokens_since_admission >= MIN_TOKENS_BEFORE_PREEMPTION
                && !one.is_pinned
        };
        let mut candidates: Vec<usize> =
            (0..running.len()).filter(|&index| may_leave(&running[index])).collect();
        candidates.sort_by_key(|&index| (running[index].priority, Reverse(running[index].number)));
        for candidate in candidates {
            leave.push(candidate);
            if !fits_without(&leave) {
                continue;
            }
            for spared in leave.clone() {
                let fewer: Vec<usize> = leave.iter().copied().filter(|&index| index != spared).collect();
                if fits_without(&fewer) {
                    leave = fewer;
                }
            }
            leave.sort_unstable();
            return KvAdmission::AfterPreempting(leave);
        }
        KvAdmission::Wait
    }

    /// Whether the running sequences can grow by `more` tokens each.
    pub fn fits(&self, running: &[SequenceUsage], more: &[u32]) -> bool {
        let taken: u64 = running
            .iter()
            .zip(more)
            .map(|(one, more)| self.reserved_tokens(one.cached_tokens.saturating_add(*more)))
            .sum();
        taken <= self.capacity
    }

    /// The next sequence to preempt so that the running ones can grow by `more` tokens each: lowest priority
    /// and youngest first; call again until `None`. Never one at the preemption limit, and never the last
    /// one.
    pub fn victim(&self, running: &[SequenceUsage], more: &[u32]) -> Option<usize> {
        if self.fits(running, more) || running.len() < 2 {
            return None;
        }
        (0..running.len())
            .filter(|&index| running[index].preemptions < MAX_PREEMPTIONS && !running[index].is_pinned)
            .min_by_key(|&index| (running[index].priority, Reverse(running[index].number)))
    }
}

#[cfg(test)]
mod tests;
