//! Draft model: runs beside the target model, on the same thread of rank 0, as a single rank with KV caches
//! of its own. Only the scheduler treats its tokens as draft tokens.

use std::collections::HashMap;

use russet_wire::engine_options::KvCacheType;

use super::{RuntimeConfig, RuntimeError, model_runner::ModelRunner};
use crate::{
    executor::{DraftRequest, DraftRewind, SampleSpec, SequenceStep},
    prefix_cache::CacheCommand,
    step_profiler::StepProfiler,
};

/// Prefill chunk, as for a prompt.
const PREFILL_CHUNK_TOKENS: usize = 2048;

pub(super) struct DraftRunner {
    runner: ModelRunner,
    /// Vocabulary size of the target model.
    vocabulary: u32,
    /// What ran in each slot since its snapshot; empty for a model whose layers take back draft tokens.
    since_snapshot: HashMap<u32, SinceSnapshot>,
}

/// Tokens that ran in a slot since its snapshot. A recurrent state goes back to the snapshot alone, and the draft tokens
/// that were accepted run again.
#[derive(Debug, PartialEq, Eq)]
struct SinceSnapshot {
    /// Tokens in the snapshot.
    offset: u32,
    tokens: Vec<u32>,
}

impl SinceSnapshot {
    /// The command that takes the slot back to its first `length` tokens, or to its snapshot, and the tokens that are
    /// missing then.
    fn rewind(self, slot: u32, length: u32) -> (CacheCommand, Vec<u32>) {
        let Self { offset, mut tokens } = self;
        let held = offset + tokens.len() as u32;
        if !(offset..held).contains(&length) {
            return (CacheCommand::Truncate { slot, length }, Vec::new());
        }
        tokens.truncate((length - offset) as usize);
        (CacheCommand::Restore { slot }, tokens)
    }
}

impl DraftRunner {
    /// Loads the draft model that `config` names, if any, for a target model with `vocabulary` tokens.
    pub(super) fn load(config: &RuntimeConfig, vocabulary: u32) -> Result<Option<Self>, RuntimeError> {
        let Some(model_dir) = &config.draft_dir else { return Ok(None) };
        let alone = RuntimeConfig {
            model_dir: model_dir.clone(),
            layers_per_rank: None,
            tensor_size: 1,
            rank: 0,
            devices: None,
            quantization: None,
            // Its KV caches are small, and its head size may not divide into quantisation groups.
            kv_cache: KvCacheType::AsComputed,
            disk_cache: None,
            draft_dir: None,
            adapters: Vec::new(),
            ..config.clone()
        };
        let rank = ModelRunner::load(&alone, StepProfiler::default(), |_| None, |_, _| {})?;
        Ok(Some(Self { runner: rank, vocabulary, since_snapshot: HashMap::new() }))
    }

    /// The model runner of the draft model.
    pub(super) fn runner(&mut self) -> &mut ModelRunner {
        &mut self.runner
    }

    /// Resets a slot.
    pub(super) fn reset(&mut self, slot: u32) -> Result<(), RuntimeError> {
        self.since_snapshot.remove(&slot);
        self.runner.apply_cache_command(CacheCommand::Reset { slot }, || true)
    }

    /// Draft tokens for each request, limited to the target model's vocabulary.
    pub(super) fn draft(&mut self, drafts: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RuntimeError> {
        for draft in drafts {
            self.prepare(draft)?;
        }
        let most = drafts.iter().map(|draft| draft.draft_tokens).max().unwrap_or_default();
        // All steps start before any is awaited: each sampled token feeds the next step on the device.
        let runs: Vec<_> = (0..most)
            .map(|position| {
                let steps: Vec<SequenceStep> =
                    drafts.iter().filter_map(|draft| draft_step(draft, position)).collect();
                self.runner.begin(&steps, false)
            })
            .collect::<Result<_, _>>()?;
        let mut draft_tokens = vec![Vec::new(); drafts.len()];
        for (position, run) in (0..most).zip(runs) {
            let asked =
                drafts.iter().zip(&mut draft_tokens).filter(|(draft, _)| draft.draft_tokens > position);
            for ((_, draft_tokens), chosen) in asked.zip(run.end()?.outputs) {
                draft_tokens
                    .extend(chosen.into_iter().map(|chosen| chosen.map_or(u32::MAX, |chosen| chosen.token)));
            }
        }
        for (DraftRequest { slot, .. }, draft_tokens) in drafts.iter().zip(&mut draft_tokens) {
            // The last draft token has not run.
            let (_, ran) = draft_tokens.split_last().unwrap_or((&0, &[]));
            if let Some(since) = self.since_snapshot.get_mut(slot) {
                since.tokens.extend(ran);
            }
            let sound = draft_tokens.iter().take_while(|token| **token < self.vocabulary).count();
            draft_tokens.truncate(sound);
        }
        Ok(draft_tokens)
    }

    /// Prefills all tokens but the one of the first step.
    fn prepare(&mut self, draft: &DraftRequest) -> Result<(), RuntimeError> {
        let DraftRequest { slot, offset: length, tokens, .. } = draft;
        let (slot, length) = (*slot, *length);
        let (command, mut prefill) = match self.since_snapshot.remove(&slot) {
            Some(since) => since.rewind(slot, length),
            None => (CacheCommand::Truncate { slot, length }, Vec::new()),
        };
        self.runner.apply_cache_command(command, || true)?;
        let mut offset = length - prefill.len() as u32;
        let (before, first) = tokens.split_at(tokens.len().saturating_sub(1));
        prefill.extend(before);
        for tokens in prefill.chunks(PREFILL_CHUNK_TOKENS) {
            let tokens = tokens.to_vec();
            let step =
                SequenceStep { slot, offset, tokens, draft_tokens: 0, adapter: 0, sample: None, score: None };
            offset += step.length();
            self.runner.begin(&[step], false)?.end()?;
        }
        if self.runner.cache_support().draft_rewind() == DraftRewind::ToStepBeginning {
            self.runner.apply_cache_command(CacheCommand::Snapshot { slot }, || true)?;
            self.since_snapshot.insert(slot, SinceSnapshot { offset, tokens: first.to_vec() });
        }
        Ok(())
    }
}

/// The step that samples one of the draft tokens, if that many are requested: the first one continues from
/// the last token of the text, each later one from the previous draft token.
fn draft_step(
    DraftRequest { slot, offset, tokens, draft_tokens: count, sample: choice }: &DraftRequest,
    position: u32,
) -> Option<SequenceStep> {
    let text = offset + tokens.len() as u32;
    (position < *count).then(|| SequenceStep {
        slot: *slot,
        offset: text - 1 + position,
        tokens: if position == 0 { tokens.last().copied().into_iter().collect() } else { Vec::new() },
        draft_tokens: 0,
        adapter: 0,
        sample: Some(SampleSpec { index: choice.index + position, ..choice.clone() }),
        score: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_draft_tokens_are_taken_back_to_the_snapshot() {
        let truncate = |length| CacheCommand::Truncate { slot: 3, length };
        let restore = CacheCommand::Restore { slot: 3 };
        for (story, length, command, again) in [
            ("all were accepted", 13, truncate(13), vec![]),
            ("one was rejected", 12, restore.clone(), vec![7, 8]),
            ("all were rejected", 11, restore.clone(), vec![7]),
            ("not even the token before them counts", 10, restore, vec![]),
            ("the sequence begins anew", 0, truncate(0), vec![]),
        ] {
            let since = SinceSnapshot { offset: 10, tokens: vec![7, 8, 9] };
            assert_eq!(since.rewind(3, length), (command, again), "{story}");
        }
    }
}
