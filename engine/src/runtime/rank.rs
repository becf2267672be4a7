//! One rank on its MLX thread: its part of the model, its sequences, its place in the group. It decides
//! nothing; steps come in an order that all ranks share.

use std::collections::HashMap;

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    memory,
    ops::{indexing::TryIndexOp, logsumexp_axis},
    transforms::eval,
};
use russet_wire::{partition::Part, shape::role_of};

use super::{InDetail, RuntimeConfig, RuntimeError, Stepped, groups, groups::Groups, part_of};
use crate::{
    cache::KvCache,
    compute::{Addresses, Step},
    jaccl::Devices,
    layers::batch::{Batch, Row},
    models::{self, Model},
    partition::{Slice, holds},
    sample,
    weights::{Checkpoint, LoadDtype, WeightsError},
};

pub(super) struct Rank {
    model: Box<dyn Model>,
    part: Part,
    vocabulary: u32,
    width: i32,
    /// Element type of the hidden states between ranks, the same on all of them.
    hidden: Dtype,
    /// `None` until joined.
    groups: Option<Groups>,
    sequences: HashMap<u32, Sequence>,
}

struct Sequence {
    cache: Vec<KvCache>,
    length: u32,
}

impl Rank {
    /// Reads the configuration and this rank's weights.
    pub(super) fn load(
        config: &RuntimeConfig,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self, RuntimeError> {
        russet_mlx::install_error_handler();
        russet_mlx::blas::set_threads(config.blas_threads);
        let configuration = models::configure(&config.model_dir)?;
        let part = part_of(config, configuration.layers())?;
        configuration.check_members(part.tensor_size)?;
        let mut checkpoint = Checkpoint::open(&config.model_dir)?;
        let tied = configuration.tied(&mut checkpoint)?;

        let mut total_bytes = 0;
        for name in checkpoint.names()? {
            if role_of(&name).is_some_and(|role| holds(&part, tied, role)) {
                total_bytes += checkpoint.bytes(&name, Slice::of_part(&part))?;
            }
        }
        let hidden = hidden_dtype(config.dtype, &mut checkpoint)?;
        let mut loaded_bytes = 0;
        progress(loaded_bytes, total_bytes);
        let mut count = |bytes| {
            loaded_bytes += bytes;
            progress(loaded_bytes, total_bytes);
        };
        let model = models::load(configuration.as_ref(), &mut checkpoint, &part, config.dtype, &mut count)?;
        let _ = memory::clear_cache();
        Ok(Self {
            model,
            part,
            vocabulary: configuration.vocabulary() as u32,
            width: configuration.width() as i32,
            hidden,
            groups: None,
            sequences: HashMap::new(),
        })
    }

    pub(super) fn join(
        &mut self,
        addresses: &Addresses,
        devices: Option<&Devices>,
    ) -> Result<(), RuntimeError> {
        if self.groups.is_some() {
            return Ok(());
        }
        let joined = groups::join(&self.part, addresses, devices);
        let (rank, addresses) = (self.part.rank, addresses.clone());
        self.groups = Some(joined.map_err(|reason| RuntimeError::Join { rank, addresses, reason })?);
        Ok(())
    }

    pub(super) fn reset(&mut self, slot: u32) {
        if self.sequences.remove(&slot).is_some() {
            let _ = memory::clear_cache();
        }
    }

    /// Runs steps of different sequences together; what came of each, in their order. Only rank 0's steps choose.
    pub(super) fn run(&mut self, batch: &[Step]) -> Result<Vec<InDetail>, RuntimeError> {
        let alone = Groups::default();
        let groups = match &self.groups {
            Some(groups) => groups,
            None if self.part.size == 1 => &alone,
            None => return Err(RuntimeError::TooEarly { rank: self.part.rank, asked: "step" }),
        };
        // A batch has its single tokens first, on every rank alike.
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.sort_by_key(|&index| batch[index].tokens.len() > 1);
        let steps: Vec<&Step> = order.iter().map(|&index| &batch[index]).collect();
        let mut sequences = Vec::with_capacity(steps.len());
        for step in &steps {
            self.check_tokens(&step.tokens)?;
            let sequence = self
                .sequences
                .remove(&step.slot)
                .unwrap_or_else(|| Sequence { cache: self.model.new_cache(), length: 0 });
            if sequence.length != step.offset {
                let (slot, have, wanted) = (step.slot, sequence.length, step.offset);
                return Err(RuntimeError::OutOfStep { slot, have, wanted });
            }
            sequences.push(sequence);
        }
        let mut logprobs = self.compute(groups, &mut sequences, &steps)?.into_iter();
        let mut answers: Vec<InDetail> = batch.iter().map(|_| Ok(None)).collect();
        for ((index, step), mut sequence) in order.into_iter().zip(steps).zip(sequences) {
            sequence.length += step.tokens.len() as u32;
            self.sequences.insert(step.slot, sequence);
            if let Some(choice) = &step.choice
                && let Some(logprobs) = logprobs.next()
            {
                let sampled = sample::choose(choice, &mut logprobs.clone());
                answers[index] = sampled.map(|sampled| Some(Stepped { sampled, logprobs }));
            }
        }
        Ok(answers)
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

    /// Runs the steps through this rank's layers, and evaluates. On rank 0 the log-probabilities of the last
    /// position come back of each step that has a choice to make.
    fn compute(
        &self,
        groups: &Groups,
        sequences: &mut [Sequence],
        steps: &[&Step],
    ) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let Part { rank, size, stage, .. } = self.part;
        let failed = |reason: String| RuntimeError::Mlx { rank, size, reason };
        let mlx = |error: Exception| failed(without_place(error.what()));
        let wire = |error: russet_mlx::Error| failed(error.to_string());

        let tokens: Vec<u32> = steps.iter().flat_map(|step| step.tokens.iter().copied()).collect();
        let length = tokens.len() as i32;
        let hidden = match &groups.pipeline {
            Some(pipeline) if !self.part.embedding => {
                pipeline.recv(&[1, length, self.width], self.hidden, stage as usize + 1).map_err(wire)?
            }
            _ => self.model.embed(&Array::from_slice(&tokens, &[1, length]))?,
        };
        let rows = sequences.iter_mut().zip(steps).map(|(sequence, step)| Row {
            length: step.tokens.len() as i32,
            offset: sequence.length as i32,
            caches: &mut sequence.cache,
        });
        let mut rows = Batch::new(rows.collect());
        let hidden = self.model.forward(hidden, &mut rows, &groups.stage).map_err(mlx)?;

        let mut results = Vec::new();
        let mut logprobs = None;
        match &groups.pipeline {
            Some(pipeline) if stage > 0 => {
                let hidden = hidden.as_dtype(self.hidden).map_err(mlx)?;
                results.push(pipeline.send(&hidden, stage as usize - 1).map_err(wire)?);
            }
            // A sum is only a sum when every member takes part, so all of them finish the last layer,
            // whether or not its result is of use to them.
            _ if !groups.stage.is_alone() => results.push(hidden.clone()),
            _ => {}
        }
        let choosing = choosing(steps);
        if self.part.head && !choosing.is_empty() {
            let last = if steps.len() == 1 {
                hidden.try_index((.., -1.., ..))
            } else {
                hidden.take_axis(Array::from_slice(&choosing, &[choosing.len() as i32]), 1)
            };
            logprobs = Some(normalised(&self.model.logits(&last.map_err(mlx)?)?).map_err(mlx)?);
        }
        results.extend(logprobs.clone());
        // The caches are part of the result: a prompt's chunk is read by nothing else.
        let caches = sequences.iter().flat_map(|sequence| &sequence.cache);
        eval(results.iter().chain(caches.flat_map(KvCache::arrays))).map_err(mlx)?;
        if steps.iter().any(|step| step.tokens.len() > 1) {
            let _ = memory::clear_cache();
        }
        let Some(logprobs) = logprobs else { return Ok(Vec::new()) };
        let numbers = logprobs.to_vec_exact::<f32>().map_err(|error| failed(error.to_string()))?;
        Ok(numbers.chunks_exact(self.vocabulary.max(1) as usize).map(<[f32]>::to_vec).collect())
    }
}

/// The last positions of the steps that choose, of steps that lie one behind the other.
fn choosing(steps: &[&Step]) -> Vec<i32> {
    let mut end = 0;
    let ends = steps.iter().map(|step| {
        end += step.tokens.len() as i32;
        (step, end - 1)
    });
    ends.filter(|(step, _)| step.choice.is_some()).map(|(_, last)| last).collect()
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
fn hidden_dtype(dtype: LoadDtype, checkpoint: &mut Checkpoint) -> Result<Dtype, WeightsError> {
    if dtype == LoadDtype::Float32 {
        return Ok(Dtype::Float32);
    }
    let scales = "model.embed_tokens.scales";
    let tensor = if checkpoint.contains(scales)? { scales } else { "model.embed_tokens.weight" };
    let (entry, file) = checkpoint.entry(tensor)?;
    match entry.dtype.as_str() {
        "F32" => Ok(Dtype::Float32),
        "F16" => Ok(Dtype::Float16),
        "BF16" => Ok(Dtype::Bfloat16),
        _ => Err(WeightsError::Dtype { tensor: tensor.to_owned(), file, dtype: entry.dtype }),
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
