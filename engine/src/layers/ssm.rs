//! The recurrence of Mamba-2: a state, a matrix for each head, that every position decays, adds to and reads. The heads
//! of a group write by the same vector and read by the same one. A few positions go one by one, many in chunks whose
//! positions are computed together:
//!
//! ```text
//! one by one:  S ← a·S + v·bᵀ;  o = S·c
//! in a chunk:  O_i = (a_1·…·a_i)·S·c_i + Σ_j≤i (a_j+1·…·a_i)·(c_i·b_j)·v_j,  S ← (a_1·…·a_C)·S + Σ_j (a_j+1·…·a_C)·v_j·b_jᵀ
//! ```
//!
//! The second form is that of the paper (Transformers are SSMs, arXiv 2405.21060, section 6).

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{
        arange, broadcast_to, concatenate,
        indexing::{Ellipsis, TryIndexOp},
        select, stack, zeros_dtype,
    },
};
use russet_model::cost;

/// Positions of a chunk.
const CHUNK: i32 = cost::RECURRENT_CHUNK as i32;
/// From so many positions on they go in chunks.
const CHUNKED_FROM: i32 = 16;

/// What the positions of one sequence bring.
pub(super) struct SsmInput {
    /// What is added to states, `[groups, heads of a group, positions, head]`.
    pub values: Array,
    /// The logarithm of how far states decay, `[groups, heads of a group, positions]`.
    pub decay: Array,
    /// What values are written by, `[groups, 1, positions, state]`.
    pub writes: Array,
    /// What states are read by, `[groups, 1, positions, state]`.
    pub reads: Array,
}

/// What the positions read, `[groups, heads of a group, positions, head]` in 32 bits, and the state after them; `state`
/// is the one before, `[groups, heads of a group, head, state]`.
pub(super) fn ssm(input: &SsmInput, state: Array) -> Result<(Array, Array), Exception> {
    let wide = |all: &Array| all.as_dtype(Dtype::Float32);
    let input = SsmInput {
        values: wide(&input.values)?,
        decay: wide(&input.decay)?,
        writes: wide(&input.writes)?,
        reads: wide(&input.reads)?,
    };
    if input.values.dim(2) < CHUNKED_FROM { one_by_one(&input, state) } else { in_chunks(&input, state) }
}

fn one_by_one(input: &SsmInput, mut state: Array) -> Result<(Array, Array), Exception> {
    let decay = input.decay.exp()?;
    let mut passed = Vec::new();
    for position in 0..input.values.dim(2) {
        let vector = |all: &Array| all.try_index((.., .., position, ..));
        let kept = state.multiply(decay.try_index((.., .., position))?.expand_dims_axes(&[-1, -2])?)?;
        let write = vector(&input.writes)?.expand_dims(-2)?;
        state = kept.add(vector(&input.values)?.expand_dims(-1)?.multiply(write)?)?;
        passed.push(state.multiply(vector(&input.reads)?.expand_dims(-2)?)?.sum_axis(-1, false)?);
    }
    Ok((stack(&passed, 2)?, state))
}

fn in_chunks(input: &SsmInput, mut state: Array) -> Result<(Array, Array), Exception> {
    let positions = input.values.dim(2);
    let chunks = (positions + CHUNK - 1) / CHUNK;
    // What is missing of the last chunk adds nothing and decays nothing.
    let chunked = |all: &Array| {
        let mut shape = all.shape().to_vec();
        shape[2] = chunks * CHUNK - positions;
        let padded = match shape[2] {
            0 => all.clone(),
            _ => concatenate(&[all.clone(), zeros_dtype(&shape, all.dtype())?], 2)?,
        };
        shape[2] = chunks;
        shape.insert(3, CHUNK);
        padded.reshape(&shape)
    };
    let [values, writes, reads] = [chunked(&input.values)?, chunked(&input.writes)?, chunked(&input.reads)?];
    let decay = chunked(&input.decay)?;
    let places = arange::<_, i32>(0, CHUNK, None)?;
    let lower = places.reshape(&[-1, 1])?.ge(&places)?;
    let below = places.reshape(&[-1, 1])?.gt(&places)?;
    let nothing = Array::from_f32(0.0);
    // Logarithms of a_j+1·…·a_i, each summed by itself: differences of longer sums would lose digits.
    let square = [decay.shape(), &[CHUNK]].concat();
    let each = select(&below, broadcast_to(decay.expand_dims(-1)?, &square)?, &nothing)?;
    let between = each.cumsum(-2, None, None)?.exp()?;
    let scores = reads.matmul(writes.swap_axes(-1, -2)?)?.multiply(&between)?;
    let inside = select(&lower, scores, &nothing)?.matmul(&values)?;
    let since = decay.cumsum(-1, None, None)?.exp()?.expand_dims(-1)?;
    let left = between.try_index((Ellipsis, CHUNK - 1, ..))?.expand_dims(-1)?;
    let written = values.multiply(left)?.swap_axes(-1, -2)?;
    let mut passed = Vec::new();
    for chunk in 0..chunks {
        let at = |all: &Array| all.try_index((.., .., chunk, .., ..));
        let since = at(&since)?;
        let recalled = at(&reads)?.matmul(state.swap_axes(-1, -2)?)?;
        passed.push(at(&inside)?.add(recalled.multiply(&since)?)?);
        let whole = since.try_index((.., .., CHUNK - 1.., ..))?;
        state = state.multiply(whole)?.add(at(&written)?.matmul(at(&writes)?)?)?;
    }
    let passed = concatenate(&passed, 2)?.try_index((.., .., ..positions, ..))?;
    Ok((passed, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(shape: &[i32], scale: f32, shift: f32) -> Array {
        let count: i32 = shape.iter().product();
        let values: Vec<f32> =
            (0..count).map(|place| (place as f32 * 0.7391 + shift).sin() * scale).collect();
        Array::from_slice(&values, shape)
    }

    fn difference(one: &Array, other: &Array) -> f32 {
        assert_eq!(one.shape(), other.shape());
        one.subtract(other).unwrap().abs().unwrap().max(None).unwrap().item_exact::<f32>()
    }

    #[test]
    fn one_position_decays_adds_and_reads() {
        let input = SsmInput {
            values: Array::from_slice(&[3.0_f32], &[1, 1, 1, 1]),
            decay: Array::from_slice(&[0.5_f32.ln()], &[1, 1, 1]),
            writes: Array::from_slice(&[1.0_f32, 2.0], &[1, 1, 1, 2]),
            reads: Array::from_slice(&[10.0_f32, 1.0], &[1, 1, 1, 2]),
        };
        let (passed, state) = ssm(&input, Array::from_slice(&[4.0_f32, 8.0], &[1, 1, 1, 2])).unwrap();
        assert_eq!(state.as_slice::<f32>(), [0.5 * 4.0 + 3.0, 0.5 * 8.0 + 6.0]);
        assert_eq!(passed.as_slice::<f32>(), [10.0 * 5.0 + 10.0]);
    }

    #[test]
    fn chunks_equal_one_position_after_the_other() {
        let (groups, heads, head, width) = (2, 3, 5, 8);
        for (positions, slow) in
            [(1, false), (CHUNK - 1, false), (CHUNK, true), (CHUNK + 1, false), (150, true), (300, false)]
        {
            let decay = numbers(&[groups, heads, positions], if slow { 0.02 } else { 2.0 }, 0.5);
            let input = SsmInput {
                values: numbers(&[groups, heads, positions, head], 0.5, 0.3),
                decay: decay.abs().unwrap().negative().unwrap(),
                writes: numbers(&[groups, 1, positions, width], 0.5, 0.1),
                reads: numbers(&[groups, 1, positions, width], 0.5, 0.9),
            };
            let state = numbers(&[groups, heads, head, width], 0.5, 0.2);
            let (one, one_state) = one_by_one(&input, state.clone()).unwrap();
            let (other, other_state) = in_chunks(&input, state).unwrap();
            let [passed, state] = [difference(&one, &other), difference(&one_state, &other_state)];
            assert!(passed < 2e-5 && state < 2e-5, "{positions}, {slow}: {passed}, {state}");
        }
    }
}
