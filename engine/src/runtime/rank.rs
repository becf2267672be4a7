//! One rank on its MLX thread: its part of the model, its sequences, its place in the group. It decides
//! nothing; steps come in an order that all ranks share.

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
};

use super::{
    InDetail, RuntimeConfig, RuntimeError, Stepped, blocks::Blocks, groups, groups::Groups, part_of,
};
use crate::{
    cache::{KvCache, form::Form},
    compute::{Addresses, Choice, Step},
    decoder::Decoder,
    guess,
    jaccl::Devices,
    kept::{
        Order,
        chain::{BLOCK, Key},
    },
    layers::{
        batch::{Batch, Row},
        stage::{Stage, metered},
    },
    meter::{Collective, Meter, Phase},
    partition::Slice,
    sample::Tokens,
    shelf::{Record, Shelf},
    weights::{Checkpoint, LoadDtype, Weights},
};

pub(super) struct Rank {
    model: Decoder,
    part: RankPart,
    vocabulary: u32,
    width: i32,
    /// Element type of the hidden states between ranks, the same on all of them.
    hidden: Dtype,
    /// In what form layers keep keys and values.
    form: Form,
    /// `None` until joined.
    groups: Option<Groups>,
    sequences: HashMap<u32, Sequence>,
    blocks: Blocks,
    meter: Meter,
}

struct Sequence {
    cache: Vec<KvCache>,
    length: u32,
    /// The token chosen last.
    chosen: Option<Chosen>,
}

/// A token that may not be computed yet.
struct Chosen {
    /// Those of its batch.
    ids: Array,
    /// Which of them.
    row: i32,
}

impl Sequence {
    fn new(cache: Vec<KvCache>) -> Self {
        Self { cache, length: 0, chosen: None }
    }

    fn trim(&mut self, length: u32) {
        self.cache.iter_mut().for_each(|cache| cache.trim(length as i32));
        self.length = self.length.min(length);
        self.chosen = None;
    }
}

impl Rank {
    /// Reads the configuration and this rank's weights.
    pub(super) fn load(
        config: &RuntimeConfig,
        meter: Meter,
        shelf: impl FnOnce(&RankPart) -> Option<Arc<Shelf>>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self, RuntimeError> {
        let checkpoint = Checkpoint::open(&config.model_dir)?;
        let described = checkpoint.model();
        let description = &described.description;
        let part = part_of(config, description.layers.len() as u32)?;
        let units = shard_units(description, &described.tensors);
        if let Some(why) = why_indivisible(&units, part.tensor_size) {
            let (size, sizes) = (part.tensor_size, tensor_sizes(&units));
            return Err(RuntimeError::TensorSize { size, why, sizes });
        }
        let head_dim = description.attention().map_or(0, |attention| attention.key_dim);
        let form = Form::new(config.kv_cache, head_dim as usize).ok_or(RuntimeError::KvFormat { head_dim })?;
        let total_bytes = checkpoint.bytes(&part)?;
        let hidden = hidden_dtype(config.dtype, &checkpoint);
        let mut loaded_bytes = 0;
        progress(loaded_bytes, total_bytes);
        let mut count = |bytes| {
            loaded_bytes += bytes;
            progress(loaded_bytes, total_bytes);
        };
        let slice = Slice::of_part(&part);
        let mut weights = Weights::new(&checkpoint, config.dtype, slice, &mut count);
        let model = Decoder::load(description, &part, &mut weights)?;
        let _ = memory::clear_cache();
        let shelf = shelf(&part);
        Ok(Self {
            model,
            part,
            vocabulary: description.vocab_size,
            width: description.hidden_size as i32,
            hidden,
            form,
            groups: None,
            sequences: HashMap::new(),
            blocks: Blocks::new(shelf),
            meter,
        })
    }

    /// Tokens of the vocabulary.
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
        let joined = groups::join(&self.part, addresses, devices, &self.meter);
        let (rank, addresses) = (self.part.rank, addresses.clone());
        self.groups = Some(joined.map_err(|reason| RuntimeError::Join { rank, addresses, reason })?);
        Ok(())
    }

    /// Leaves the groups and forgets every sequence, and every block that is in memory.
    pub(super) fn disband(&mut self) {
        self.groups = None;
        self.sequences.clear();
        self.blocks.clear();
    }

    /// Carries out an order on what is cached. Blocks are kept of what is `sound` once they are computed.
    pub(super) fn arrange(&mut self, order: Order, sound: impl Fn() -> bool) -> Result<(), RuntimeError> {
        match order {
            Order::Reset { slot } => {
                if self.sequences.remove(&slot).is_some() {
                    let _ = memory::clear_cache();
                }
            }
            Order::Trim { slot, length } => {
                if let Some(sequence) = self.sequences.get_mut(&slot) {
                    sequence.trim(length);
                }
            }
            Order::Keep { slot, blocks } => {
                if let Some(sequence) = self.sequences.get(&slot) {
                    let kept = self.blocks.keep(&sequence.cache, &blocks, sound);
                    kept.map_err(|error| self.failed(&error))?;
                }
            }
            Order::Restore { slot, keys } => {
                self.fill(slot, keys.into_iter().map(|key| (key, None)).collect())?;
            }
            Order::Forget { held, shelved } => {
                self.blocks.forget(&held, &shelved);
                let _ = memory::clear_cache();
            }
        }
        Ok(())
    }

    /// Appends blocks to a slot: those in memory, else what was read from disk. How many of the first ones there were.
    pub(super) fn fill(
        &mut self,
        slot: u32,
        blocks: Vec<(Key, Option<Record>)>,
    ) -> Result<u32, RuntimeError> {
        let sequence =
            self.sequences.entry(slot).or_insert_with(|| Sequence::new(self.model.new_cache(self.form)));
        let filled = self.blocks.fill(&mut sequence.cache, blocks);
        let count = filled.map_err(|error| self.failed(&error))?;
        if let Some(sequence) = self.sequences.get_mut(&slot) {
            sequence.length += count * BLOCK;
        }
        Ok(count)
    }

    fn failed(&self, error: &Exception) -> RuntimeError {
        let RankPart { rank, size, .. } = self.part;
        RuntimeError::Mlx { rank, size, reason: without_place(error.what()) }
    }

    /// Has MLX begin to run steps of different sequences together. Only rank 0's steps choose.
    pub(super) fn begin(&mut self, batch: &[Step], in_detail: bool) -> Result<Run, RuntimeError> {
        let alone = Groups::default();
        let groups = match &self.groups {
            Some(groups) => groups,
            None if self.part.size == 1 => &alone,
            None => return Err(RuntimeError::TooEarly { rank: self.part.rank, asked: "step" }),
        };
        // A batch has its single tokens first, on every rank alike.
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.sort_by_key(|&index| batch[index].length() > 1);
        let steps: Vec<&Step> = order.iter().map(|&index| &batch[index]).collect();
        let mut sequences = Vec::with_capacity(steps.len());
        for step in &steps {
            let sequence = self.sequences.remove(&step.slot);
            let sequence = sequence.unwrap_or_else(|| Sequence::new(self.model.new_cache(self.form)));
            self.check(step, &sequence)?;
            sequences.push(sequence);
        }
        let mut run = self.compute(groups, &mut sequences, &steps, in_detail)?;
        run.answers =
            order.iter().zip(&steps).map(|(index, step)| (*index, step.choices().collect())).collect();
        for (step, mut sequence) in steps.into_iter().zip(sequences) {
            sequence.length += step.length();
            self.sequences.insert(step.slot, sequence);
        }
        Ok(run)
    }

    /// Whether a step can follow what the sequence has.
    fn check(&self, step: &Step, sequence: &Sequence) -> Result<(), RuntimeError> {
        if sequence.length != step.offset {
            let (slot, have, wanted) = (step.slot, sequence.length, step.offset);
            return Err(RuntimeError::OutOfStep { slot, have, wanted });
        }
        // Other members of a single stage are told by rank 0 what it chose, while they compute.
        let told = !self.part.head && self.part.stages == 1;
        if step.tokens.is_empty() && (sequence.chosen.is_some() || told) {
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

    /// Begins to run the steps through this rank's layers.
    fn compute(
        &self,
        groups: &Groups,
        sequences: &mut [Sequence],
        steps: &[&Step],
        in_detail: bool,
    ) -> Result<Run, RuntimeError> {
        let RankPart { rank, size, stage, .. } = self.part;
        let failed = move |reason: String| RuntimeError::Mlx { rank, size, reason };
        let mlx = |error: Exception| failed(without_place(error.what()));

        let length = steps.iter().map(|step| step.length() as i32).sum();
        let timing = self.meter.begin();
        let wire = |error: russet_mlx::Error| Exception::custom(error.to_string());
        let hidden = match &groups.pipeline {
            Some(pipeline) if !self.part.embedding => metered(&self.meter, Collective::Receive, || {
                pipeline.recv(&[1, length, self.width], self.hidden, stage as usize + 1).map_err(wire)
            })
            .map_err(mlx)?,
            _ => self.model.embed(&inputs(steps, sequences, &groups.stage).map_err(mlx)?)?,
        };
        let mut lap = if timing { Some(Lap::begin(&self.meter, &hidden).map_err(mlx)?) } else { None };
        let rows = sequences.iter_mut().zip(steps).map(|(sequence, step)| Row {
            length: step.length() as i32,
            offset: sequence.length as i32,
            caches: &mut sequence.cache,
        });
        let mut rows = Batch::new(rows.collect());
        let hidden = self.model.forward(hidden, &mut rows, &groups.stage).map_err(mlx)?;
        if let Some(lap) = &mut lap {
            lap.end(Phase::Forward, [&hidden]).map_err(mlx)?;
        }

        let mut results = Vec::new();
        match &groups.pipeline {
            Some(pipeline) if stage > 0 => {
                let hidden = hidden.as_dtype(self.hidden).map_err(mlx)?;
                let send = || pipeline.send(&hidden, stage as usize - 1).map_err(wire);
                results.push(metered(&self.meter, Collective::Send, send).map_err(mlx)?);
            }
            // A sum is only a sum when every member takes part, so all of them finish the last layer,
            // whether or not its result is of use to them.
            _ if !groups.stage.is_alone() => results.push(hidden.clone()),
            _ => {}
        }
        let mut run = Run::default();
        let choosing = choosing(steps);
        if self.part.head && !choosing.is_empty() {
            let count = choosing.len() as i32;
            let behind = if steps.len() == 1 {
                hidden.try_index((.., -count.., ..))
            } else {
                hidden.take_axis(Array::from_slice(&choosing, &[count]), 1)
            };
            let logits = self.model.logits(&behind.map_err(mlx)?)?;
            let logprobs = normalised(&logits.reshape(&[count, -1]).map_err(mlx)?).map_err(mlx)?;
            let choices: Vec<Choice> = steps.iter().flat_map(|step| step.choices()).collect();
            let tokens = Tokens::choose(&choices, &logprobs).map_err(mlx)?;
            let mut row = 0;
            for (sequence, step) in sequences.iter_mut().zip(steps).filter(|(_, step)| step.choice.is_some())
            {
                // Behind guesses the last one chosen is not known to count.
                let known = step.guesses == 0;
                sequence.chosen = known.then(|| Chosen { ids: tokens.ids.clone(), row });
                row += 1 + step.guesses as i32;
            }
            if let Some(lap) = &mut lap {
                lap.end(Phase::Sample, tokens.arrays()).map_err(mlx)?;
            }
            results.extend(tokens.arrays().cloned());
            run.tokens = Some(tokens);
            if in_detail {
                results.push(logprobs.clone());
                run.logprobs = Some(logprobs);
            }
        }
        // A prompt's piece is read by nothing else.
        for (sequence, _) in sequences.iter().zip(steps).filter(|(_, step)| step.choice.is_none()) {
            if let Some(cache) = sequence.cache.last() {
                results.extend(cache.witness().map_err(mlx)?);
            }
        }
        async_eval(&results).map_err(mlx)?;
        run.results = results;
        run.vocabulary = self.vocabulary;
        run.reads_prompt = steps.iter().any(|step| step.tokens.len() > 1 + guess::MOST);
        run.place = (rank, size);
        Ok(run)
    }
}

/// The parts of a batch that is timed, one after the other.
struct Lap<'a> {
    meter: &'a Meter,
    begun: Instant,
    /// Seconds between ranks until then.
    collective: f64,
}

impl<'a> Lap<'a> {
    /// Begins once `ready` is there.
    fn begin(meter: &'a Meter, ready: &Array) -> Result<Self, Exception> {
        ready.eval()?;
        Ok(Self { meter, begun: Instant::now(), collective: collective(meter) })
    }

    /// What was made since then is waited for; the time between ranks is not this part's.
    fn end<'b>(&mut self, phase: Phase, made: impl IntoIterator<Item = &'b Array>) -> Result<(), Exception> {
        eval(made)?;
        let between = Duration::from_secs_f64(collective(self.meter) - self.collective);
        self.meter.took(phase, self.begun.elapsed().saturating_sub(between));
        (self.begun, self.collective) = (Instant::now(), collective(self.meter));
        Ok(())
    }
}

fn collective(meter: &Meter) -> f64 {
    meter.totals().seconds[Phase::Collective as usize]
}

/// A batch that MLX works on.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// For each step as computed: its place in the batch as asked, and its choices.
    answers: Vec<(usize, Vec<Choice>)>,
    /// What has to be computed.
    results: Vec<Array>,
    /// One for each choice, as computed.
    tokens: Option<Tokens>,
    logprobs: Option<Array>,
    vocabulary: u32,
    reads_prompt: bool,
    /// Rank, and size of the group.
    place: (u32, u32),
}

impl Run {
    /// Waits for what came of each step, in their order.
    pub(super) fn end(self) -> Result<Vec<InDetail>, RuntimeError> {
        let (rank, size) = self.place;
        let mlx = |error: Exception| RuntimeError::Mlx { rank, size, reason: without_place(error.what()) };
        eval(&self.results).map_err(mlx)?;
        if self.reads_prompt {
            let _ = memory::clear_cache();
        }
        let tokens = self.tokens.map_or(Ok(Vec::new()), |tokens| tokens.read()).map_err(mlx)?;
        let logprobs = self.logprobs.map_or(Ok(Vec::new()), |numbers| numbers.to_vec_exact::<f32>());
        let logprobs =
            logprobs.map_err(|error| RuntimeError::Mlx { rank, size, reason: error.to_string() })?;
        let mut rows = logprobs.chunks_exact(self.vocabulary.max(1) as usize).map(<[f32]>::to_vec);
        let mut tokens = tokens.into_iter();
        let mut ended: Vec<InDetail> = self.answers.iter().map(|_| Vec::new()).collect();
        for (index, choices) in self.answers {
            for (choice, token) in choices.iter().zip(tokens.by_ref()) {
                let logprobs = rows.next().unwrap_or_default();
                let token = choice.check(self.vocabulary).and(token);
                ended[index].push(token.map(|token| Stepped { token, logprobs }));
            }
        }
        Ok(ended)
    }
}

/// Tokens of the steps, one behind the other: those that were told, and those that rank 0 chose just now, which all
/// members of its stage get to know by adding them up.
fn inputs(steps: &[&Step], sequences: &[Sequence], stage: &Stage) -> Result<Array, Exception> {
    let length: i32 = steps.iter().map(|step| step.length() as i32).sum();
    let told: Vec<u32> = steps.iter().flat_map(|step| step.tokens.iter().copied()).collect();
    if told.len() == length as usize {
        return Ok(Array::from_slice(&told, &[1, length]));
    }
    let unknown = steps.iter().zip(sequences).filter(|(step, _)| step.tokens.is_empty());
    let chosen = unknown.map(|(_, sequence)| match &sequence.chosen {
        Some(Chosen { ids, row }) => ids.try_index(*row..*row + 1),
        None => Ok(Array::from_slice(&[0_u32], &[1])),
    });
    let chosen = stage.sum(concatenate(&chosen.collect::<Result<Vec<_>, _>>()?, 0)?)?;
    if told.is_empty() {
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

/// The positions behind which something is chosen, of steps that lie one behind the other.
fn choosing(steps: &[&Step]) -> Vec<i32> {
    let mut end = 0;
    let ends = steps.iter().map(|step| {
        end += step.length() as i32;
        (step, end - 1)
    });
    let choosing = ends.filter(|(step, _)| step.choice.is_some());
    choosing.flat_map(|(step, last)| last - step.guesses as i32..=last).collect()
}

/// MLX's message without the place in its source that it ends with.
fn without_place(message: &str) -> String {
    match message.rsplit_once(" at /") {
        Some((words, place)) if place.contains(".cpp:") => words.to_owned(),
        _ => message.to_owned(),
    }
}

/// Log-probabilities in the model's own type, as mlx-lm computes them, then widened.
fn normalised(logits: &Array) -> Result<Array, Exception> {
    logits.subtract(logsumexp_axis(logits, -1, true)?)?.as_dtype(Dtype::Float32)
}

/// The type of the embedding's output, read from the header by every rank, so that all agree on the
/// bytes between them.
fn hidden_dtype(dtype: LoadDtype, checkpoint: &Checkpoint) -> Dtype {
    // Packed, it is unpacked into the type of its scales.
    let stored = ["model.embed_tokens.scales", "model.embed_tokens.weight"];
    let entry = stored.iter().find_map(|tensor| checkpoint.entry(tensor));
    match (dtype, entry.map(|entry| &entry.dtype)) {
        (LoadDtype::AsStored, Some(safetensors::Dtype::F16)) => Dtype::Float16,
        (LoadDtype::AsStored, Some(safetensors::Dtype::BF16)) => Dtype::Bfloat16,
        // Opening the model refused every other type.
        _ => Dtype::Float32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lose_the_place_but_not_the_words() {
        assert_eq!(without_place("[ring] lost at /a/b c/transforms.cpp:73"), "[ring] lost");
        assert_eq!(without_place("arrived at /tmp"), "arrived at /tmp");
    }
}
