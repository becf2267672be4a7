//! Tensors of a GGUF file of which an MLX repository has several, or whose elements it has in another order.

use super::{delta_net::DeltaHeads, header::GgufTensor};
use crate::error::Unsupported;

/// What an MLX repository has of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPiece {
    /// The name in a layer that a file with this piece alone has for it, where it is not the tensor's own.
    pub tensor: Option<&'static str>,
    /// Its rows, where they are some of the tensor's.
    pub rows: Option<u64>,
    /// Where its elements are in another order, or with others between them.
    pub reorder: Option<Reorder>,
}

impl TensorPiece {
    /// All of a tensor, as it is.
    pub const WHOLE: Self = Self { tensor: None, rows: None, reorder: None };
}

/// Heads, and the elements between them, in a tensor whose heads an MLX repository has in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reorder {
    /// Elements before the heads, which lie as they are.
    pub skip: u64,
    /// Elements of a head that lie together.
    pub head: u64,
    /// Heads that are neighbours.
    pub each: u64,
    /// Where the first one begins in the file, after what is skipped.
    pub begin: u64,
    /// From one head to its neighbour in the file, and from the first of some neighbours to that of the next ones.
    pub steps: [u64; 2],
    /// Elements after which all of it repeats.
    pub period: u64,
}

impl Reorder {
    /// Where an element lies in the file, and how many from it on lie together.
    pub fn source(&self, element: u64) -> (u64, u64) {
        let Some(after) = element.checked_sub(self.skip) else { return (element, self.skip - element) };
        let within = after % self.period;
        let (head, offset) = (within / self.head, within % self.head);
        let neighbour = (head % self.each).saturating_mul(self.steps[0]);
        let first = (head / self.each).saturating_mul(self.steps[1]);
        let before = self.skip + (after - within);
        let source = [self.begin, neighbour, first, offset].into_iter().fold(before, u64::saturating_add);
        (source, self.head - offset)
    }

    /// That heads are whole groups of a packing, which cannot be taken apart.
    pub fn check_groups(&self, tensor: &str, group: u64) -> Result<(), Unsupported> {
        let Self { skip, head, .. } = self;
        if skip.is_multiple_of(group) && head.is_multiple_of(group) {
            return Ok(());
        }
        let reason = format!("heads of {head} elements are not whole groups of {group}");
        Err(Unsupported::tensor(tensor, reason, "use the model as an MLX repository"))
    }
}

/// What an MLX repository has of a layer's tensor, whose name in it is `own`; `heads` are those of gated delta nets.
pub fn pieces(own: &str, tensor: &GgufTensor, heads: Option<DeltaHeads>) -> Vec<TensorPiece> {
    match tensor.shape[..] {
        [experts, rows, columns] if own == "ffn_gate_up_exps.weight" => {
            merged_experts(experts, rows, columns)
        }
        _ => heads.map_or_else(
            || vec![TensorPiece::WHOLE],
            |heads| heads.pieces(own, tensor.shape.last().copied().unwrap_or(0)),
        ),
    }
}

/// Of each expert, rows of the gate and then as many of the projection up.
fn merged_experts(experts: u64, rows: u64, columns: u64) -> Vec<TensorPiece> {
    // Of a hostile file these are beyond any number; its shapes are then refused.
    let width = rows / 2;
    let elements = |rows: u64| rows.saturating_mul(columns).max(1);
    let half = |tensor, begin| {
        let head = elements(width);
        // From one expert to the next.
        let (steps, period) = ([0, elements(rows)], head.saturating_mul(experts).max(1));
        let reorder = Reorder { skip: 0, head, each: 1, begin, steps, period };
        TensorPiece { tensor: Some(tensor), rows: Some(width), reorder: Some(reorder) }
    };
    vec![half("ffn_gate_exps.weight", 0), half("ffn_up_exps.weight", elements(width))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::block_type::ElementType;

    #[test]
    fn experts_whose_projections_lie_together_are_taken_apart() {
        let tensor = |shape: Vec<u64>| GgufTensor {
            name: "blk.0.ffn_gate_up_exps.weight".to_owned(),
            shape,
            element: ElementType::of(0).unwrap(),
            begin: 0,
            bytes: 0,
        };
        let found = pieces("ffn_gate_up_exps.weight", &tensor(vec![2, 4, 3]), None);
        let [gate, up] = &found[..] else { panic!("two tensors of one") };
        assert_eq!((gate.tensor, gate.rows), (Some("ffn_gate_exps.weight"), Some(2)));
        assert_eq!((up.tensor, up.rows), (Some("ffn_up_exps.weight"), Some(2)));
        let order = |piece: &TensorPiece| -> Vec<u64> {
            (0..12).map(|element| piece.reorder.unwrap().source(element).0).collect()
        };
        assert_eq!(order(gate), [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]);
        assert_eq!(order(up), [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23]);
        assert_eq!(up.reorder.unwrap().source(7), (19, 5));
        for hostile in [vec![u64::MAX; 3], vec![0, 0, 0], vec![1, 1, 1]] {
            for piece in pieces("ffn_gate_up_exps.weight", &tensor(hostile), None) {
                piece.reorder.unwrap().source(u64::MAX);
            }
        }
        assert_eq!(pieces("ffn_gate_up_exps.weight", &tensor(vec![4, 3]), None), [TensorPiece::WHOLE]);
    }
}
