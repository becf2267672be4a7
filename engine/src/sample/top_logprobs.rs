//! Log-probabilities that a client asks for: of the sampled token and of the most probable ones.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{argsort_axis, indexing::TryIndexOp},
};

use crate::executor::{SampleSpec, TopLogprobs};

/// Those of each row, not read yet.
#[derive(Debug)]
pub(super) struct TopRows {
    /// `[rows, 1 + most]`: the sampled token, then the most probable ones.
    ids: Array,
    logprobs: Array,
    /// How many of the most probable ones a row asks for; `None` where it asks for nothing.
    asked: Vec<Option<usize>>,
}

impl TopRows {
    /// Of `logprobs`, `[rows, vocabulary]`, where tokens were sampled; `None` where no row asks for any.
    pub(super) fn of(
        choices: &[SampleSpec],
        logprobs: &Array,
        sampled: &Array,
    ) -> Result<Option<Self>, Exception> {
        let asked: Vec<Option<usize>> =
            choices.iter().map(|choice| choice.top_logprobs.map(|count| count as usize)).collect();
        let Some(most) = asked.iter().flatten().max() else { return Ok(None) };
        let most = (*most as i32).min(logprobs.dim(1));
        let sampled = sampled.as_dtype(Dtype::Uint32)?.reshape(&[choices.len() as i32, 1])?;
        let ids = if most == 0 {
            sampled
        } else {
            let best = argsort_axis(logprobs.negative()?, -1)?.try_index((.., 0..most))?;
            mlx_rs::ops::concatenate(&[sampled, best.as_dtype(Dtype::Uint32)?], -1)?
        };
        let logprobs = logprobs.take_along_axis(&ids, -1)?;
        Ok(Some(Self { ids, logprobs, asked }))
    }

    pub(super) fn arrays(&self) -> [&Array; 2] {
        [&self.ids, &self.logprobs]
    }

    /// Waits for them, row by row.
    pub(super) fn read(&self) -> Result<Vec<Option<TopLogprobs>>, Exception> {
        let ids = self.ids.to_vec_exact::<u32>().map_err(|error| Exception::custom(error.to_string()))?;
        let logprobs = self.logprobs.to_vec_exact::<f32>();
        let logprobs = logprobs.map_err(|error| Exception::custom(error.to_string()))?;
        let width = (ids.len() / self.asked.len().max(1)).max(1);
        let rows = ids.chunks_exact(width).zip(logprobs.chunks_exact(width)).zip(&self.asked);
        Ok(rows
            .map(|((ids, logprobs), asked)| {
                let mut pairs = ids.iter().copied().zip(logprobs.iter().copied());
                let (_, sampled) = pairs.next()?;
                Some(TopLogprobs { sampled, top: pairs.take((*asked)?).collect() })
            })
            .collect())
    }
}
