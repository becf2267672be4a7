//! Draft model: runs beside the target model, on the same thread of rank 0, as a single rank with KV caches
//! of its own. Only the scheduler treats its tokens as draft tokens.

use russet_wire::engine_options::KvCacheType;

use super::{RuntimeConfig, RuntimeError, model_runner::ModelRunner};
use crate::{
    executor::{DraftRequest, SampleSpec, SequenceStep},
    prefix_cache::CacheCommand,
    step_profiler::StepProfiler,
};

/// Prefill chunk, as for a prompt.
const PREFILL_CHUNK_TOKENS: usize = 2048;

pub(super) struct DraftRunner {
    runner: ModelRunner,
    /// Vocabulary size of the target model.
    vocabulary: u32,
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
            ..config.clone()
        };
        let rank = ModelRunner::load(&alone, StepProfiler::default(), |_| None, |_, _| {})?;
        Ok(Some(Self { runner: rank, vocabulary }))
    }

    /// The model runner of the draft model.
    pub(super) fn runner(&mut self) -> &mut ModelRunner {
        &mut self.runner
    }

    /// Resets a slot.
    pub(super) fn reset(&mut self, slot: u32) -> Result<(), RuntimeError> {
        self.runner.apply_cache_command(CacheCommand::Reset { slot }, || true)
    }

    /// Draft tokens for each request, limited to the target model's vocabulary.
    pub(super) fn draft(&mut self, drafts: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RuntimeError> {
        for DraftRequest { slot, offset, tokens, .. } in drafts {
            self.runner
                .apply_cache_command(CacheCommand::Truncate { slot: *slot, length: *offset }, || true)?;
            self.prefill(*slot, *offset, tokens)?;
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
            for ((_, draft_tokens), chosen) in asked.zip(run.end()?) {
                draft_tokens
                    .extend(chosen.into_iter().map(|chosen| chosen.map_or(u32::MAX, |chosen| chosen.token)));
            }
        }
        for draft_tokens in &mut draft_tokens {
            let sound = draft_tokens.iter().take_while(|token| **token < self.vocabulary).count();
            draft_tokens.truncate(sound);
        }
        Ok(draft_tokens)
    }

    /// Prefills all tokens but the ones of the first step.
    fn prefill(&mut self, slot: u32, offset: u32, tokens: &[u32]) -> Result<(), RuntimeError> {
        let (before, _) = tokens.split_at(tokens.len().saturating_sub(1));
        let mut offset = offset;
        for tokens in before.chunks(PREFILL_CHUNK_TOKENS) {
            let step = SequenceStep { slot, offset, tokens: tokens.to_vec(), draft_tokens: 0, sample: None };
            offset += step.length();
            self.runner.begin(&[step], false)?.end()?;
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
        sample: Some(SampleSpec { index: choice.index + position, ..choice.clone() }),
    })
}
