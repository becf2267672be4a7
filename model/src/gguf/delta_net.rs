//! In which order a GGUF file has the heads of gated delta nets. In an MLX repository the value heads of a key head are
//! neighbours. A file of Qwen3.5 has the first one of every key head, then the second ones; one of Qwen3-Next has two
//! projections in one matrix, by key head.

use super::{
    Gguf,
    fields::Fields,
    pieces::{Reorder, TensorPiece},
};
use crate::{config::MAX_SIZE, error::Error};

/// The order of a file's value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// Those of a key head are neighbours; `ssm_ba` has the rows of `in_proj_b` and of `in_proj_a` of one key head after
    /// the other.
    Grouped,
    /// The first ones of all key heads, then the second ones, and so on.
    Tiled,
}

/// The heads of a model's gated delta nets.
#[derive(Clone, Copy, Debug)]
pub struct DeltaHeads {
    order: HeadOrder,
    keys: u64,
    /// Value heads of a key head.
    each: u64,
    key_dim: u64,
    value_dim: u64,
}

impl DeltaHeads {
    /// Those of a file; `None` for an architecture without any.
    pub fn read(gguf: &Gguf<'_>) -> Result<Option<Self>, Error> {
        let Some(order) = gguf.architecture.delta_net else { return Ok(None) };
        let mut fields = Fields::new(gguf);
        let mut numbers = [0; 4];
        let keys = ["ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size"];
        for (number, key) in numbers.iter_mut().zip(keys) {
            *number = fields.number(key)?;
            if !(1..=u64::from(MAX_SIZE)).contains(number) {
                return Err(fields.refuse(key, format!("{number} is not supported")).into());
            }
        }
        let [keys, values, key_dim, width] = numbers;
        if !values.is_multiple_of(keys) || !width.is_multiple_of(values) {
            let reason =
                format!("{values} value heads of {width} elements for {keys} key heads are not supported");
            return Err(fields.refuse("ssm.time_step_rank", reason).into());
        }
        Ok(Some(Self { order, keys, each: values / keys, key_dim, value_dim: width / values }))
    }

    /// What an MLX repository has of a layer's tensor with rows of so many columns; one piece without anything special for
    /// those whose order is the same.
    pub fn pieces(&self, tensor: &str, columns: u64) -> Vec<TensorPiece> {
        // Of a hostile file these are beyond any number; its shapes are then refused.
        let rows = |rows: u64| rows.saturating_mul(columns).max(1);
        if (self.order, tensor) == (HeadOrder::Grouped, "ssm_ba.weight") {
            let half = |tensor, begin| {
                let (head, steps) = (rows(1), [rows(1), rows(2 * self.each)]);
                let period = rows(2 * self.each * self.keys);
                let reorder = Reorder { skip: 0, head, each: self.each, begin, steps, period };
                let rows = Some(self.keys * self.each);
                TensorPiece { tensor: Some(tensor), rows, reorder: Some(reorder) }
            };
            return vec![half("ssm_beta.weight", 0), half("ssm_alpha.weight", rows(self.each))];
        }
        let is_tiled = self.order == HeadOrder::Tiled && self.each > 1;
        let reorder = self.tile(tensor, rows).filter(|_| is_tiled).map(|(skip, head)| {
            let all = |heads: u64| heads.saturating_mul(head);
            let (steps, period) = ([all(self.keys), head], all(self.keys * self.each));
            Reorder { skip, head, each: self.each, begin: 0, steps, period }
        });
        vec![TensorPiece { reorder, ..TensorPiece::WHOLE }]
    }

    /// Elements before the value heads of a tensor, and those of a head; `None` for one without such heads.
    fn tile(&self, tensor: &str, rows: impl Fn(u64) -> u64) -> Option<(u64, u64)> {
        Some(match tensor {
            "attn_qkv.weight" | "ssm_conv1d.weight" => {
                (rows(2 * self.keys * self.key_dim), rows(self.value_dim))
            }
            "attn_gate.weight" => (0, rows(self.value_dim)),
            "ssm_alpha.weight" | "ssm_beta.weight" => (0, rows(1)),
            "ssm_a" | "ssm_dt.bias" => (0, 1),
            // Heads are columns of it.
            "ssm_out.weight" => (0, self.value_dim),
            _ => return None,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub const TWO_BY_THREE: DeltaHeads =
        DeltaHeads { order: HeadOrder::Tiled, keys: 2, each: 3, key_dim: 1, value_dim: 2 };

    fn order(piece: &TensorPiece, elements: u64) -> Vec<u64> {
        (0..elements).map(|element| piece.reorder.unwrap().source(element).0).collect()
    }

    #[test]
    fn tiled_heads_become_neighbours_of_their_key_head() {
        let [gates] = &TWO_BY_THREE.pieces("ssm_a", 6)[..] else { panic!("one tensor of one") };
        // The file has heads 0 and 3, 1 and 4, 2 and 5.
        assert_eq!(order(gates, 6), [0, 2, 4, 1, 3, 5]);
        let [mixed] = &TWO_BY_THREE.pieces("attn_qkv.weight", 1)[..] else { panic!("one tensor of one") };
        // Four rows of queries and keys, then two rows a head.
        assert_eq!(order(mixed, 10), [0, 1, 2, 3, 4, 5, 8, 9, 12, 13]);
        assert_eq!(mixed.reorder.unwrap().source(1), (1, 3));
        assert_eq!(mixed.reorder.unwrap().source(7), (9, 1));
        let [back] = &TWO_BY_THREE.pieces("ssm_out.weight", 12)[..] else { panic!("one tensor of one") };
        let row = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11];
        let both: Vec<u64> = row.into_iter().chain(row.map(|column| 12 + column)).collect();
        assert_eq!(order(back, 24), both);
    }

    #[test]
    fn projections_that_lie_by_key_head_are_taken_apart() {
        let heads = DeltaHeads { order: HeadOrder::Grouped, ..TWO_BY_THREE };
        let [b, a] = &heads.pieces("ssm_ba.weight", 1)[..] else { panic!("two tensors of one") };
        assert_eq!((b.rows, order(b, 6)), (Some(6), vec![0, 1, 2, 6, 7, 8]));
        assert_eq!(order(a, 6), [3, 4, 5, 9, 10, 11]);
        assert_eq!(heads.pieces("attn_qkv.weight", 1), [TensorPiece::WHOLE]);
    }
}
