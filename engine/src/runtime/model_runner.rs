//! Model runner: one rank on the MLX thread, with its shard, its sequences and its process groups. It decides
//! nothing; steps arrive in an order that all ranks share.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    memory,
    ops::{concatenate, indexing::TryIndexOp, logsumexp_axis},
    transforms::{async_eval, eval},
};
use russet_model::{
    divisibility::{shard_units, tensor_sizes, why_indivisible},
    partition::RankPart,
    safetensors,
    tensors::{Role, beside},
};
use russet_wire::engine_options::RouterBroadcast;

use super::{
    DetailedOutput, RuntimeConfig, RuntimeError, StepOutput, block_store::BlockStore, groups,
    groups::MlxGroups, rank_part, token_scores::token_scores,
};
use crate::{
    adapters::AdapterFiles,
    cache::{CacheSnapshot, LayerCache, Rewound, format::KvFormat},
    decoder::Decoder,
    executor::{Addresses, CacheSupport, PooledModel, PooledText, SampleSpec, SequenceStep, TokenScore},
    jaccl::Devices,
    layers::{
        packed_batch::{PackedBatch, SequenceSlice},
        tensor_parallel::{TpGroup, profiled},
    },
    partition::TpShard,
    prefix_cache::disk::{BlockFile, DiskCache},
    prefix_cache::{
        CacheCommand,
        block_hash::{BLOCK_TOKENS, BlockHash},
    },
    sample::{SampledTokens, edited},
    speculative,
    step_profiler::{Collective, StepPhase, StepProfiler},
    weights::{Checkpoint, LoadDtype, Weights},
};

pub(super) struct ModelRunner {
    model: Decoder,
    part: RankPart,
    vocabulary: u32,
    /// Width of what this stage receives.
    width: i32,
    /// Element type of the hidden states between ranks, equal on all of them.
    hidden: Dtype,
    /// Format of the KV cache.
    format: KvFormat,
    /// Whether the first tensor rank chooses experts for all.
    router_broadcast: RouterBroadcast,
    cache_support: CacheSupport,
    pooled_model: Option<PooledModel>,
    /// `None` until joined.
    groups: Option<MlxGroups>,
    sequences: HashMap<u32, RunnerSequence>,
    blocks: BlockStore,
    profiler: StepProfiler,
}

struct RunnerSequence {
    cache: Vec<LayerCache>,
    length: u32,
    snapshot: Option<SequenceSnapshot>,
    /// It as it was before its last step, if that verifies draft tokens. MLX's arrays never change, so this keeps the old
    /// ones alive and copies none.
    rewind_point: Option<SequenceSnapshot>,
    /// The token sampled last.
    last_token: Option<LastToken>,
}

/// A sequence at one length. Layers that go back there by themselves have none of their own.
struct SequenceSnapshot {
    length: u32,
    cache: Vec<Option<CacheSnapshot>>,
}

/// A token that may not be computed yet.
struct LastToken {
    /// The tokens of its batch.
    ids: Array,
    /// Index of its row.
    row: i32,
}

impl RunnerSequence {
    fn new(cache: Vec<LayerCache>) -> Self {
        Self { cache, length: 0, snapshot: None, rewind_point: None, last_token: None }
    }

    /// Goes back to the first `length` tokens, or further ahead nowhere. `Impossible` is a fault of rank 0, which knows
    /// what the model's layers can do; the layers may then stand at different positions.
    fn rewind(&mut self, length: u32) -> Rewound {
        self.last_token = None;
        if length >= self.length {
            return Rewound::Rewound;
        }
        self.snapshot.take_if(|snapshot| snapshot.length > length);
        let point = self.rewind_point.take().filter(|point| point.length == length);
        self.go_back(length, point.map_or(Vec::new(), |point| point.cache))
    }

    /// Goes back to the first `length` tokens: a layer with a snapshot of then to that, the others by themselves.
    fn go_back(&mut self, length: u32, snapshots: Vec<Option<CacheSnapshot>>) -> Rewound {
        let snapshots = snapshots.into_iter().chain(std::iter::repeat(None));
        for (cache, snapshot) in self.cache.iter_mut().zip(snapshots) {
            match snapshot {
                Some(snapshot) => cache.restore(&snapshot),
                None if cache.rewind(length as i32) == Rewound::Impossible => return Rewound::Impossible,
                None => {}
            }
        }
        self.length = length;
        Rewound::Rewound
    }

    /// A copy of it as it is. It shares its arrays until one of both appends to them.
    fn fork(&self) -> Self {
        Self { length: self.length, ..Self::new(self.cache.clone()) }
    }

    /// Keeps a snapshot of it as it is.
    fn keep_snapshot(&mut self) {
        self.snapshot = Some(self.snapshot_unless(LayerCache::rewinds_anywhere));
    }

    /// Goes back to its snapshot, which stays. `Impossible` is a fault of rank 0, as in [`Self::rewind`].
    fn restore(&mut self) -> Rewound {
        let Some(SequenceSnapshot { length, cache }) = &self.snapshot else {
            return Rewound::Impossible;
        };
        let (length, cache) = (*length, cache.clone());
        (self.rewind_point, self.last_token) = (None, None);
        self.go_back(length, cache)
    }

    /// Keeps what its layers need to go back to before this step, if it verifies draft tokens.
    fn prepare_step(&mut self, step: &SequenceStep) {
        let verifies = step.draft_tokens > 0;
        self.rewind_point = verifies.then(|| self.snapshot_unless(LayerCache::takes_back_drafts));
    }

    /// A snapshot of it as it is, of layers that do not go back by themselves.
    fn snapshot_unless(&self, goes_back: impl Fn(&LayerCache) -> bool) -> SequenceSnapshot {
        let of = |cache: &LayerCache| (!goes_back(cache)).then(|| cache.snapshot());
        SequenceSnapshot { length: self.length, cache: self.cache.iter().map(of).collect() }
    }
}

impl ModelRunner {
    /// Loads the configuration and this rank's weights.
    pub(super) fn load(
        config: &RuntimeConfig,
        meter: StepProfiler,
        disk_cache: impl FnOnce(&RankPart) -> Option<Arc<DiskCache>>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self, RuntimeError> {
        let checkpoint = Checkpoint::open_as(&config.model_dir, config.dtype, config.quantization)?;
        let russet_model::Model { description, tensors, converted: _ } = checkpoint.model();
        let part = rank_part(config, description.layers.len() as u32, &description.kept_together())?;
        let units = shard_units(description, tensors);
        if let Some(reason) = why_indivisible(&units, part.tensor_size) {
            let (size, sizes) = (part.tensor_size, tensor_sizes(&units));
            return Err(RuntimeError::TensorSize { size, reason, sizes });
        }
        // Without keys and values there is nothing to quantise.
        let format = match description.attention().map(|attention| attention.key_dim) {
            None => KvFormat::AsComputed,
            Some(head_dim) => {
                let format = KvFormat::new(config.kv_cache, head_dim as usize);
                format.ok_or(RuntimeError::KvFormat { head_dim })?
            }
        };
        let total_bytes = checkpoint.bytes(&part)?;
        let hidden = hidden_dtype(config.dtype, &checkpoint);
        let (mut loaded_bytes, started) = (0, Instant::now());
        progress(loaded_bytes, total_bytes);
        let mut count = |bytes| {
            loaded_bytes += bytes;
            progress(loaded_bytes, total_bytes);
        };
        let adapters = AdapterFiles::open(&config.adapters, tensors)?;
        let weights = Weights::new(&checkpoint, config.dtype, TpShard::for_part(&part), &mut count);
        let mut weights = weights.with_adapters(&adapters);
        let model = Decoder::load(description, &part, &mut weights, &config.model_dir)?;
        adapters.check_read(&part, tensors)?;
        let _ = memory::clear_cache();
        let (bytes_read, elapsed) = (checkpoint.bytes_read(), started.elapsed());
        tracing::info!(bytes = total_bytes, bytes_read, ?elapsed, "the weights are read");
        let disk_cache = disk_cache(&part);
        Ok(Self {
            model,
            vocabulary: description.vocab_size,
            width: description.stage_width(part.layers.start) as i32,
            part,
            hidden,
            format,
            cache_support: CacheSupport::of(description),
            pooled_model: PooledModel::of(description),
            groups: None,
            router_broadcast: config.router_broadcast,
            sequences: HashMap::new(),
            blocks: BlockStore::new(disk_cache),
            profiler: meter,
        })
    }

    /// What the caches of the model's layers can do.
    pub(super) fn cache_support(&self) -> CacheSupport {
        self.cache_support
    }

    /// What the model gives, where it does not generate.
    pub(super) fn pooled_model(&self) -> Option<PooledModel> {
        self.pooled_model
    }

    /// A vector of each text, the shortest of which come first.
    pub(super) fn pool(&self, texts: &[PooledText]) -> Result<Vec<Vec<f32>>, RuntimeError> {
        for text in texts {
            self.check_tokens(&text.tokens)?;
        }
        let all = |part: fn(&PooledText) -> &Vec<u32>| {
            let all: Vec<u32> = texts.iter().flat_map(|text| part(text).iter().copied()).collect();
            (all.len() as i32, all)
        };
        let (count, tokens) = all(|text| &text.tokens);
        let (types, token_types) = all(|text| &text.token_types);
        let lengths: Vec<i32> = texts.iter().map(|text| text.tokens.len() as i32).collect();
        let tokens = Array::from_slice(&tokens, &[1, count]);
        let token_types = Array::from_slice(&token_types, &[types]);
        let pooled = self.model.pool(&tokens, &token_types, &lengths)?;
        let numbers = pooled.to_vec_exact::<f32>();
        let numbers = numbers.map_err(|error| self.mlx_error(&Exception::custom(error.to_string())))?;
        let _ = memory::clear_cache();
        let width = numbers.len() / texts.len().max(1);
        Ok(numbers.chunks_exact(width.max(1)).map(<[f32]>::to_vec).collect())
    }

    /// Size of the vocabulary.
    pub(super) fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    pub(super) fn join(
        &mut self,
        addresses: &Addresses,
        devices: Option<&Devices>,
    ) -> Result<(), RuntimeError> {
        if self.groups.is_some() {
            return Ok(());
        }
        let joined = groups::join(&self.part, addresses, devices, self.router_broadcast, &self.profiler);
        let (rank, addresses) = (self.part.rank, addresses.clone());
        self.groups = Some(joined.map_err(|reason| RuntimeError::Join { rank, addresses, reason })?);
        Ok(())
    }

    /// Leaves the groups and frees every sequence and every in-memory block.
    pub(super) fn leave_group(&mut self) {
        self.groups = None;
        self.sequences.clear();
        self.blocks.clear();
    }

    /// Applies a cache command. Blocks are stored only if their results still count once they are computed.
    pub(super) fn apply_cache_command(
        &mut self,
        order: CacheCommand,
        sound: impl Fn() -> bool,
    ) -> Result<(), RuntimeError> {
        match order {
            CacheCommand::Reset { slot } => {
                if self.sequences.remove(&slot).is_some() {
                    let _ = memory::clear_cache();
                }
            }
            CacheCommand::Truncate { slot, length } => {
                let have = self.sequences.get(&slot).map_or(0, |sequence| sequence.length);
                if let Some(sequence) = self.sequences.get_mut(&slot)
                    && sequence.rewind(length) == Rewound::Impossible
                {
                    return Err(RuntimeError::Rewind { slot, have, length });
                }
            }
            CacheCommand::Snapshot { slot } => {
                if let Some(sequence) = self.sequences.get_mut(&slot) {
                    sequence.keep_snapshot();
                }
            }
            CacheCommand::Restore { slot } => {
                let restored = self.sequences.get_mut(&slot).map(RunnerSequence::restore);
                if restored != Some(Rewound::Rewound) {
                    return Err(RuntimeError::Restore { slot });
                }
            }
            CacheCommand::Fork { from, to } => {
                if let Some(copy) = self.sequences.get(&from).map(RunnerSequence::fork) {
                    self.sequences.insert(to, copy);
                }
            }
            CacheCommand::Store { slot, blocks } => {
                if let Some(sequence) = self.sequences.get(&slot) {
                    let stored = self.blocks.store(&sequence.cache, &blocks, sound);
                    stored.map_err(|error| self.mlx_error(&error))?;
                }
            }
            CacheCommand::Load { slot, hashes: keys } => {
                self.load_blocks(slot, keys.into_iter().map(|key| (key, None)).collect())?;
            }
            CacheCommand::Evict { in_memory, on_disk } => {
                self.blocks.evict(&in_memory, &on_disk);
                let _ = memory::clear_cache();
            }
        }
        Ok(())
    }

    /// Appends blocks to a slot, from memory or else from the disk records. Returns the number of leading
    /// blocks found.
    pub(super) fn load_blocks(
        &mut self,
        slot: u32,
        blocks: Vec<(BlockHash, Option<BlockFile>)>,
    ) -> Result<u32, RuntimeError> {
        let sequence = self
            .sequences
            .entry(slot)
            .or_insert_with(|| RunnerSequence::new(self.model.new_cache(self.format)));
        let filled = self.blocks.load(&mut sequence.cache, blocks);
        let count = filled.map_err(|error| self.mlx_error(&error))?;
        if let Some(sequence) = self.sequences.get_mut(&slot) {
            sequence.length += count * BLOCK_TOKENS;
        }
        Ok(count)
    }

    fn mlx_error(&self, error: &Exception) -> RuntimeError {
        let RankPart { rank, size, .. } = self.part;
        RuntimeError::Mlx { rank, size, reason: strip_source_location(error.what()) }
    }

    /// Starts steps of different sequences as one batch. Only rank 0's steps sample.
    pub(super) fn begin(
        &mut self,
        batch: &[SequenceStep],
        in_detail: bool,
    ) -> Result<BatchRun, RuntimeError> {
        let alone = MlxGroups::default();
        let groups = match &self.groups {
            Some(groups) => groups,
            None if self.part.size == 1 => &alone,
            None => return Err(RuntimeError::NotReady { rank: self.part.rank, asked: "step" }),
        };
        // Rows with a single token come first in a batch, on every rank alike.
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.sort_by_key(|&index| batch[index].length() > 1);
        let steps: Vec<&SequenceStep> = order.iter().map(|&index| &batch[index]).collect();
        let mut sequences = Vec::with_capacity(steps.len());
        for step in &steps {
            let sequence = self.sequences.remove(&step.slot);
            let mut sequence =
                sequence.unwrap_or_else(|| RunnerSequence::new(self.model.new_cache(self.format)));
            self.check_step(step, &sequence)?;
            sequence.prepare_step(step);
            sequences.push(sequence);
        }
        let mut run = self.begin_forward(groups, &mut sequences, &steps, in_detail)?;
        run.scores.iter_mut().for_each(|(index, _)| *index = order[*index]);
        run.outputs =
            order.iter().zip(&steps).map(|(index, step)| (*index, step.samples().collect())).collect();
        for (step, mut sequence) in steps.into_iter().zip(sequences) {
            sequence.length += step.length();
            self.sequences.insert(step.slot, sequence);
        }
        Ok(run)
    }

    /// Checks that a step fits the state of its sequence.
    fn check_step(&self, step: &SequenceStep, sequence: &RunnerSequence) -> Result<(), RuntimeError> {
        if sequence.length != step.offset {
            let (slot, have, offset) = (step.slot, sequence.length, step.offset);
            return Err(RuntimeError::OffsetMismatch { slot, have, offset });
        }
        // In a single stage, the other tensor ranks learn the sampled token from rank 0 while they compute.
        let from_rank_0 = !self.part.head && self.part.stages == 1;
        if step.tokens.is_empty() && (sequence.last_token.is_some() || from_rank_0) {
            Ok(())
        } else {
            self.check_tokens(&step.tokens)
        }
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), RuntimeError> {
        let largest = tokens.iter().max().copied();
        match largest {
            Some(largest) if largest < self.vocabulary => Ok(()),
            largest => {
                Err(RuntimeError::Tokens { tokens: tokens.len(), largest, vocabulary: self.vocabulary })
            }
        }
    }

    /// Starts the steps on this rank's layers.
    fn begin_forward(
        &self,
        groups: &MlxGroups,
        sequences: &mut [RunnerSequence],
        steps: &[&SequenceStep],
        in_detail: bool,
    ) -> Result<BatchRun, RuntimeError> {
        let RankPart { rank, size, stage, .. } = self.part;
        let failed = move |reason: String| RuntimeError::Mlx { rank, size, reason };
        let mlx = |error: Exception| failed(strip_source_location(error.what()));

        let length = steps.iter().map(|step| step.length() as i32).sum();
        let timing = self.profiler.begin_batch();
        let wire = |error: russet_mlx::Error| Exception::custom(error.to_string());
        let hidden = match &groups.pipeline {
            Some(pipeline) if !self.part.embedding => profiled(&self.profiler, Collective::Receive, || {
                pipeline.recv(&[1, length, self.width], self.hidden, stage as usize + 1).map_err(wire)
            })
            .map_err(mlx)?,
            _ => self.model.embed(&input_tokens(steps, sequences, &groups.tensor).map_err(mlx)?)?,
        };
        let mut timer =
            if timing { Some(PhaseTimer::begin(&self.profiler, &hidden).map_err(mlx)?) } else { None };
        let rows = sequences.iter_mut().zip(steps).map(|(sequence, step)| SequenceSlice {
            length: step.length() as i32,
            offset: sequence.length as i32,
            adapter: step.adapter,
            caches: &mut sequence.cache,
        });
        let mut rows = PackedBatch::new(rows.collect());
        let hidden = self.model.forward(hidden, &mut rows, &groups.tensor).map_err(mlx)?;
        if let Some(timer) = &mut timer {
            timer.end(StepPhase::Forward, [&hidden]).map_err(mlx)?;
        }

        let mut results = Vec::new();
        match &groups.pipeline {
            Some(pipeline) if stage > 0 => {
                let hidden = hidden.as_dtype(self.hidden).map_err(mlx)?;
                let send = || pipeline.send(&hidden, stage as usize - 1).map_err(wire);
                results.push(profiled(&self.profiler, Collective::Send, send).map_err(mlx)?);
            }
            // A collective needs every rank, so all tensor ranks finish the last layer, whether or not they
            // use its result.
            _ if !groups.tensor.is_single_rank() => results.push(hidden.clone()),
            _ => {}
        }
        let mut run = BatchRun::default();
        if self.part.head && steps.iter().any(|step| step.score.is_some()) {
            run.scores = self.scores(steps, &hidden, mlx)?;
            if let Some(timer) = &mut timer {
                timer.end(StepPhase::Sample, []).map_err(mlx)?;
            }
        }
        let choosing = sampled_positions(steps);
        if self.part.head && !choosing.is_empty() {
            let count = choosing.len() as i32;
            let behind = if steps.len() == 1 {
                hidden.try_index((.., -count.., ..))
            } else {
                hidden.take_axis(Array::from_slice(&choosing, &[count]), 1)
            };
            let logits = self.model.logits(&behind.map_err(mlx)?)?;
            let choices: Vec<SampleSpec> = steps.iter().flat_map(|step| step.samples()).collect();
            let unedited = logits.reshape(&[count, -1]).map_err(mlx)?;
            let logits = edited(&choices, &unedited).map_err(mlx)?;
            let logprobs = log_softmax(&logits).map_err(mlx)?;
            if choices.iter().any(|choice| choice.mask.is_some()) {
                // The masks are computed meanwhile.
                async_eval([&logprobs]).map_err(mlx)?;
            }
            // What clients are told is in 32 bits, like the scores of a prompt: 16 bits have two or three digits.
            let is_reported = choices.iter().any(|choice| choice.top_logprobs.is_some());
            let unedited = match is_reported {
                true => {
                    unedited.as_dtype(Dtype::Float32).and_then(|logits| log_softmax(&logits)).map_err(mlx)?
                }
                false => logprobs.clone(),
            };
            let tokens = SampledTokens::sample(&choices, &logprobs, &unedited).map_err(mlx)?;
            let mut row = 0;
            for (sequence, step) in sequences.iter_mut().zip(steps).filter(|(_, step)| step.sample.is_some())
            {
                // After draft tokens, the last sampled token may be rejected.
                let known = step.draft_tokens == 0;
                sequence.last_token = known.then(|| LastToken { ids: tokens.ids.clone(), row });
                row += 1 + step.draft_tokens as i32;
            }
            if let Some(timer) = &mut timer {
                timer.end(StepPhase::Sample, tokens.arrays()).map_err(mlx)?;
            }
            results.extend(tokens.arrays().cloned());
            run.tokens = Some(tokens);
            if in_detail {
                results.push(logprobs.clone());
                run.logprobs = Some(logprobs);
            }
        }
        // No later operation reads the result of a prefill chunk.
        for (sequence, _) in sequences.iter().zip(steps).filter(|(_, step)| step.sample.is_none()) {
            match sequence.cache.last() {
                Some(cache) => results.extend(cache.readiness_probe().map_err(mlx)?),
                // Layers that remember nothing: what they were sent has to be taken.
                None => results.push(hidden.clone()),
            }
        }
        async_eval(&results).map_err(mlx)?;
        run.results = results;
        run.vocabulary = self.vocabulary;
        run.prefills = steps.iter().any(|step| step.tokens.len() > 1 + speculative::MAX_DRAFT_TOKENS);
        run.rank_and_size = (rank, size);
        Ok(run)
    }
}

impl ModelRunner {
    /// The scores of the steps that ask for them, each with its index in `steps`, of their hidden states side by side.
    fn scores(
        &self,
        steps: &[&SequenceStep],
        hidden: &Array,
        mlx: impl Fn(Exception) -> RuntimeError,
    ) -> Result<Vec<(usize, Vec<TokenScore>)>, RuntimeError> {
        let (mut begin, mut scores) = (0, Vec::new());
        for (index, step) in steps.iter().enumerate() {
            if let Some(spec) = &step.score {
                let length = spec.tokens.len() as i32;
                let states = hidden.try_index((.., begin..begin + length, ..)).map_err(&mlx)?;
                let logits = |states: &Array| Ok(self.model.logits(states)?);
                scores.push((index, token_scores(spec, &states, self.vocabulary, logits, &mlx)?));
            }
            begin += step.length() as i32;
        }
        Ok(scores)
    }
}

/// What a batch gave, in the order of its steps.
pub(super) struct EndedBatch {
    /// For the sample specs of each.
    pub(super) outputs: Vec<DetailedOutput>,
    /// For the score spec of each.
    pub(super) scores: Vec<Vec<TokenScore>>,
}

/// Times the phases of a profiled batch, one after the other.
struct PhaseTimer<'a> {
    profiler: &'a StepProfiler,
    started: Instant,
    /// Seconds of collectives until then.
    collective: f64,
}

impl<'a> PhaseTimer<'a> {
    /// Starts once `ready` is evaluated.
    fn begin(meter: &'a StepProfiler, ready: &Array) -> Result<Self, Exception> {
        ready.eval()?;
        Ok(Self { profiler: meter, started: Instant::now(), collective: collective_seconds(meter) })
    }

    /// Evaluates `made` and records the time since the last phase, without the time of collectives.
    fn end<'b>(
        &mut self,
        phase: StepPhase,
        made: impl IntoIterator<Item = &'b Array>,
    ) -> Result<(), Exception> {
        eval(made)?;
        let between = Duration::from_secs_f64(collective_seconds(self.profiler) - self.collective);
        self.profiler.record_time(phase, self.started.elapsed().saturating_sub(between));
        (self.started, self.collective) = (Instant::now(), collective_seconds(self.profiler));
        Ok(())
    }
}

fn collective_seconds(meter: &StepProfiler) -> f64 {
    meter.totals().seconds[StepPhase::Collective as usize]
}

/// A batch in flight on MLX.
#[derive(Debug, Default)]
pub(super) struct BatchRun {
    /// For each step in compute order: its index in the batch, and its sample specs.
    outputs: Vec<(usize, Vec<SampleSpec>)>,
    /// Arrays to evaluate.
    results: Vec<Array>,
    /// The sampled tokens, one per sample spec, in compute order.
    tokens: Option<SampledTokens>,
    /// The scores of each step that has a score spec, with its index in the batch.
    scores: Vec<(usize, Vec<TokenScore>)>,
    logprobs: Option<Array>,
    vocabulary: u32,
    prefills: bool,
    /// Rank and group size.
    rank_and_size: (u32, u32),
}

impl BatchRun {
    /// Waits for the results of the steps, in the order of the batch.
    pub(super) fn end(self) -> Result<EndedBatch, RuntimeError> {
        let (rank, size) = self.rank_and_size;
        let mlx =
            |error: Exception| RuntimeError::Mlx { rank, size, reason: strip_source_location(error.what()) };
        eval(&self.results).map_err(mlx)?;
        if self.prefills {
            let _ = memory::clear_cache();
        }
        let tokens = self.tokens.map_or(Ok(Vec::new()), |tokens| tokens.read()).map_err(mlx)?;
        let logprobs = self.logprobs.map_or(Ok(Vec::new()), |numbers| numbers.to_vec_exact::<f32>());
        let logprobs =
            logprobs.map_err(|error| RuntimeError::Mlx { rank, size, reason: error.to_string() })?;
        let mut rows = logprobs.chunks_exact(self.vocabulary.max(1) as usize).map(<[f32]>::to_vec);
        let mut tokens = tokens.into_iter();
        let mut ended: Vec<DetailedOutput> = self.outputs.iter().map(|_| Vec::new()).collect();
        for (index, choices) in self.outputs {
            for (choice, token) in choices.iter().zip(tokens.by_ref()) {
                let logprobs = rows.next().unwrap_or_default();
                let token = choice.check(self.vocabulary).and(token);
                ended[index].push(token.map(|sampled| StepOutput {
                    token: sampled.id,
                    logprobs,
                    top_logprobs: sampled.logprobs,
                }));
            }
        }
        let mut scores = vec![Vec::new(); ended.len()];
        for (index, step) in self.scores {
            scores[index] = step;
        }
        Ok(EndedBatch { outputs: ended, scores })
    }
}

/// Tokens of the steps, concatenated: given tokens, and tokens that rank 0 has just sampled, which all tensor
/// ranks learn by an all-sum.
fn input_tokens(
    steps: &[&SequenceStep],
    sequences: &[RunnerSequence],
    stage: &TpGroup,
) -> Result<Array, Exception> {
    let length: i32 = steps.iter().map(|step| step.length() as i32).sum();
    let given: Vec<u32> = steps.iter().flat_map(|step| step.tokens.iter().copied()).collect();
    if given.len() == length as usize {
        return Ok(Array::from_slice(&given, &[1, length]));
    }
    let unknown = steps.iter().zip(sequences).filter(|(step, _)| step.tokens.is_empty());
    let chosen = unknown.map(|(_, sequence)| match &sequence.last_token {
        Some(LastToken { ids, row }) => ids.try_index(*row..*row + 1),
        None => Ok(Array::from_slice(&[0_u32], &[1])),
    });
    let chosen = stage.all_sum(concatenate(&chosen.collect::<Result<Vec<_>, _>>()?, 0)?)?;
    if given.is_empty() {
        return chosen.reshape(&[1, length]);
    }
    let (mut pieces, mut row) = (Vec::with_capacity(steps.len()), 0);
    for step in steps {
        if step.tokens.is_empty() {
            pieces.push(chosen.try_index(row..row + 1)?);
            row += 1;
        } else {
            pieces.push(Array::from_slice(&step.tokens, &[step.tokens.len() as i32]));
        }
    }
    concatenate(&pieces, 0)?.reshape(&[1, length])
}

/// Indices of the positions after which a token is sampled, in the concatenated steps.
fn sampled_positions(steps: &[&SequenceStep]) -> Vec<i32> {
    let mut end = 0;
    let ends = steps.iter().map(|step| {
        end += step.length() as i32;
        (step, end - 1)
    });
    let choosing = ends.filter(|(step, _)| step.sample.is_some());
    choosing.flat_map(|(step, last)| last - step.draft_tokens as i32..=last).collect()
}

/// MLX's message without the trailing source location.
fn strip_source_location(message: &str) -> String {
    match message.rsplit_once(" at /") {
        Some((words, place)) if place.contains(".cpp:") => words.to_owned(),
        _ => message.to_owned(),
    }
}

/// Log-probabilities in the model's own type, as in mlx-lm, then widened to float32.
fn log_softmax(logits: &Array) -> Result<Array, Exception> {
    logits.subtract(logsumexp_axis(logits, -1, true)?)?.as_dtype(Dtype::Float32)
}

/// Output type of the embedding, which every rank reads from the safetensors header, so that all agree on the
/// bytes between them.
fn hidden_dtype(dtype: LoadDtype, checkpoint: &Checkpoint) -> Dtype {
    // A quantised embedding is dequantised into the type of its scales. Of a model that sees, it has another name.
    let embedding = checkpoint.model().tensors.iter().find(|(tensor, _)| tensor.role == Role::Embedding);
    let source = embedding.and_then(|(tensor, _)| tensor.sources.first());
    let entry = source
        .and_then(|source| checkpoint.entry(&beside(source, "scales")).or_else(|| checkpoint.entry(source)));
    let as_stored = dtype != LoadDtype::Float32;
    match entry.map(|entry| &entry.dtype) {
        Some(safetensors::Dtype::F16) if as_stored => Dtype::Float16,
        Some(safetensors::Dtype::BF16) if as_stored => Dtype::Bfloat16,
        // Every other type was refused when the model was opened.
        _ => Dtype::Float32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mlx_messages_lose_only_the_source_location() {
        assert_eq!(strip_source_location("[ring] lost at /a/b c/transforms.cpp:73"), "[ring] lost");
        assert_eq!(strip_source_location("arrived at /tmp"), "arrived at /tmp");
    }
}
