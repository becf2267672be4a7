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

use super::{RuntimeConfig, RuntimeError, Stepped, groups, groups::Groups, part_of};
use crate::{
    cache::KvCache,
    compute::{Addresses, Step},
    jaccl::Devices,
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

    /// `Some` exactly when the step has a choice, which only rank 0's have.
    pub(super) fn step(&mut self, step: &Step) -> Result<Option<Stepped>, RuntimeError> {
        let alone = Groups::default();
        let groups = match &self.groups {
            Some(groups) => groups,
            None if self.part.size == 1 => &alone,
            None => return Err(RuntimeError::TooEarly { rank: self.part.rank, asked: "step" }),
        };
        self.check_tokens(&step.tokens)?;
        let mut sequence = self
            .sequences
            .remove(&step.slot)
            .unwrap_or_else(|| Sequence { cache: self.model.new_cache(), length: 0 });
        if sequence.length != step.offset {
            return Err(RuntimeError::OutOfStep {
                slot: step.slot,
                have: sequence.length,
                wanted: step.offset,
            });
        }
        let logprobs = self.compute(groups, &mut sequence, step)?;
        sequence.length += step.tokens.len() as u32;
        self.sequences.insert(step.slot, sequence);
        match (&step.choice, logprobs) {
            (Some(choice), Some(logprobs)) => {
                let sampled = sample::choose(choice, &mut logprobs.clone())?;
                Ok(Some(Stepped { sampled, logprobs }))
            }
            _ => Ok(None),
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

    /// Runs the step through this rank's layers, and evaluates. On rank 0 the log-probabilities of the
    /// last position come back, if the step has a choice to make.
    fn compute(
        &self,
        groups: &Groups,
        sequence: &mut Sequence,
        step: &Step,
    ) -> Result<Option<Vec<f32>>, RuntimeError> {
        let Part { rank, size, stage, .. } = self.part;
        let failed = |reason: String| RuntimeError::Mlx { rank, size, reason };
        let mlx = |error: Exception| failed(without_place(error.what()));
        let wire = |error: russet_mlx::Error| failed(error.to_string());

        let length = step.tokens.len() as i32;
        let hidden = match &groups.pipeline {
            Some(pipeline) if !self.part.embedding => {
                pipeline.recv(&[1, length, self.width], self.hidden, stage as usize + 1).map_err(wire)?
            }
            _ => self.model.embed(&Array::from_slice(&step.tokens, &[1, length]))?,
        };
        let hidden = self.model.forward(hidden, &mut sequence.cache, &groups.stage).map_err(mlx)?;

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
        if self.part.head && step.choice.is_some() {
            let last = hidden.try_index((.., -1.., ..)).map_err(mlx)?;
            logprobs = Some(normalised(&self.model.logits(&last)?).map_err(mlx)?);
        }
        results.extend(logprobs.clone());
        // The caches are part of the result: a prompt's chunk is read by nothing else.
        eval(results.iter().chain(sequence.cache.iter().flat_map(KvCache::arrays))).map_err(mlx)?;
        if step.tokens.len() > 1 {
            let _ = memory::clear_cache();
        }
        logprobs
            .map(|logprobs| logprobs.to_vec_exact::<f32>().map_err(|error| failed(error.to_string())))
            .transpose()
    }
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
    let flat = logits.flatten(None, None)?;
    flat.subtract(logsumexp_axis(&flat, -1, true)?)?.as_dtype(Dtype::Float32)
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
