//! The room of the KV cache, in tokens, and who has how much of it: who may enter, who has to leave for whom. Pure.
//!
//! An answer's length is not known before its end, and most callers name no limit. To keep room for the longest
//! answer of everybody would leave most of it empty, so a sequence is expected to go on for as long as answers
//! usually are, however far it has come. Where that was too little, one leaves and comes back later.

use std::cmp::Reverse;

use russet_wire::event::{GenerationFailure, FailureKind};

use crate::prefix_cache::CACHE_STEP;

/// No answer is expected to be shorter, whatever was seen: the room for it is taken a step at a time anyway.
const MIN_EXPECTED_TOKENS: f64 = 256.0;
/// Share of the newest answer in what is usual: some dozens of answers tell it, and it follows who asks now.
const EMA_WEIGHT: f64 = 1.0 / 16.0;
/// Times that one sequence leaves for others. From then on room for all that it may need is kept for it, so that it
/// never has to again.
pub const MAX_PREEMPTIONS: u32 = 3;
/// Tokens that a sequence gets before it makes room for one of higher priority: to read its prompt again costs
/// about as much as to choose some dozens.
pub const MIN_TOKENS_BEFORE_PREEMPTION: u32 = 32;

/// A sequence in a slot, or one that wants to enter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceUsage {
    /// As asked; waiting does not raise it.
    pub priority: i32,
    /// Which one it was; later ones have higher numbers.
    pub number: u64,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens of its answer.
    pub generated: u32,
    /// Most tokens of its answer.
    pub limit: u32,
    /// Tokens of its answer since it entered.
    pub tokens_since_admission: u32,
    /// Tokens in the cache once all that was asked of MLX is done.
    pub cached_tokens: u32,
    /// Times it has left for others.
    pub preemptions: u32,
    /// Whether its slot is being filled, so that it cannot leave it just now.
    pub is_pinned: bool,
}

/// Whether a sequence may enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvAdmission {
    /// Once these have left, by their places among those that run, in ascending order; nobody as a rule.
    AfterPreempting(Vec<usize>),
    /// Not now.
    Wait,
}

/// The room and what is known of those who ask for it.
#[derive(Clone, Debug)]
pub struct KvBudget {
    capacity: u64,
    context: u32,
    /// Tokens of an answer.
    expected_answer_tokens: f64,
}

/// How many of `limit` tokens an answer may have in a cache of `capacity` tokens; a refusal where the prompt alone
/// fills it.
pub fn max_answer_tokens(prompt_tokens: u32, limit: u32, capacity: u64) -> Result<u32, GenerationFailure> {
    let left = capacity.saturating_sub(u64::from(prompt_tokens));
    if left == 0 {
        let message = format!(
            "the prompt has {prompt_tokens} tokens, but the KV cache of this engine holds {capacity} of all sequences together, answers included; shorten the conversation, or deploy the model with more"
        );
        return Err(GenerationFailure { kind: FailureKind::InvalidRequest, message });
    }
    Ok(limit.min(u32::try_from(left).unwrap_or(u32::MAX)))
}

impl KvBudget {
    /// Room for `capacity` tokens of sequences that have `context` at most.
    pub fn new(capacity: u64, context: u32) -> Self {
        Self { capacity, context, expected_answer_tokens: MIN_EXPECTED_TOKENS }
    }

    /// An answer is complete, and had so many tokens.
    pub fn record_answer(&mut self, generated: u32) {
        self.expected_answer_tokens += (f64::from(generated) - self.expected_answer_tokens) * EMA_WEIGHT;
    }

    /// What so many tokens of one sequence take.
    fn reserved_tokens(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(CACHE_STEP).saturating_mul(CACHE_STEP).min(self.context)).min(self.capacity)
    }

    /// What a sequence is expected to take at its end.
    pub fn expected_tokens(&self, one: &SequenceUsage) -> u64 {
        let rest = one.limit.saturating_sub(one.generated);
        let still = if one.preemptions < MAX_PREEMPTIONS {
            rest.min(self.expected_answer_tokens.max(MIN_EXPECTED_TOKENS).round() as u32)
        } else {
            rest
        };
        self.reserved_tokens(one.prompt.saturating_add(one.generated).saturating_add(still))
    }

    /// Share of the room that is taken, 0 to 1.
    pub fn usage<'a>(&self, running: impl IntoIterator<Item = &'a SequenceUsage>) -> f64 {
        let taken: u64 = running.into_iter().map(|one| self.reserved_tokens(one.cached_tokens)).sum();
        taken as f64 / self.capacity.max(1) as f64
    }

    /// Whether `newcomer` may enter beside those that run, `free` slots being left. Others leave for it only where
    /// it was asked with a higher priority than they, the lowest and the youngest first, and none in vain.
    pub fn admission(&self, newcomer: &SequenceUsage, running: &[SequenceUsage], free: usize) -> KvAdmission {
        let forecasts: Vec<u64> = running.iter().map(|one| self.expected_tokens(one)).collect();
        let needed = self.expected_tokens(newcomer);
        let fits_without = |leave: &[usize]| {
            let stay = (0..running.len()).filter(|index| !leave.contains(index));
            let taken: u64 = stay.map(|index| forecasts[index]).sum();
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

    /// Whether those that run can hold `more` tokens each.
    pub fn fits(&self, running: &[SequenceUsage], more: &[u32]) -> bool {
        let taken: u64 =
            running.iter().zip(more).map(|(one, more)| self.reserved_tokens(one.cached_tokens.saturating_add(*more))).sum();
        taken <= self.capacity
    }

    /// Who has to leave before those that run can hold `more` tokens each: the lowest and the youngest, one after
    /// the other until it is `None`. Never who has left often enough, and never the last.
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
