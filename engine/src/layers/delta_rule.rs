//! The gated delta rule: a state, a matrix for each head, that every position decays, corrects by what it recalls wrongly
//! of the position's key, and reads by its query. A few positions go one by one, many in chunks whose positions are
//! computed together:
//!
//! ```text
//! one by one:  S ← a·S;  u = b·(v - S·k);  S ← S + u·kᵀ;  o = S·q
//! in a chunk:  A_i = a_1·…·a_i,  L_ij = b_i·A_i/A_j·(k_i·k_j) for j < i,  T = (1 + L)⁻¹
//!              U = T·b·V - T·(b·A·K)·Sᵀ,  O = (A·Q)·Sᵀ + (A_i/A_j·Q·Kᵀ for j ≤ i)·U,  S ← A_C·S + Uᵀ·(A_C/A_j·K)
//! ```
//!
//! The second form is that of the paper (Gated Delta Networks, arXiv 2412.06464, section 3.3), and needs no loop within a
//! chunk: the inverse is built of blocks of twice the size each time, which rounds as forward substitution does.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{arange, broadcast_to, concatenate, indexing::TryIndexOp, select, stack, zeros_dtype},
};
use russet_model::cost;

/// Positions of a chunk; a power of two.
const CHUNK: i32 = cost::RECURRENT_CHUNK as i32;
/// From so many positions on they go in chunks.
const CHUNKED_FROM: i32 = 16;

/// What the positions of one sequence bring.
pub(super) struct DeltaInput {
    /// `[1, heads, positions, key]`.
    pub queries: Array,
    /// `[1, heads, positions, key]`.
    pub keys: Array,
    /// `[1, heads, positions, value]`.
    pub values: Array,
    /// How far the state is corrected, `[1, heads, positions]`.
    pub step: Array,
    /// The logarithm of how far it decays, `[1, heads, positions]`.
    pub decay: Array,
}

/// Heads of keys or queries, `[1, positions, heads, width]`, as `[1, count, positions, width]`: each for as many heads of
/// values as come to it.
pub(super) fn spread(all: &Array, count: i32) -> Result<Array, Exception> {
    let (positions, heads, width) = (all.dim(1), all.dim(2), all.dim(3));
    let by_head = all.transpose_axes(&[0, 2, 1, 3])?;
    if heads == count {
        return Ok(by_head);
    }
    let each = count / heads;
    broadcast_to(by_head.expand_dims(2)?, &[1, heads, each, positions, width])?
        .reshape(&[1, count, positions, width])
}

/// What the positions read, `[1, heads, positions, value]` in 32 bits, and the state after them; `state` is the one
/// before, `[1, heads, value, key]`.
pub(super) fn delta_rule(input: &DeltaInput, state: Array) -> Result<(Array, Array), Exception> {
    let wide = |all: &Array| all.as_dtype(Dtype::Float32);
    let input = DeltaInput {
        queries: wide(&input.queries)?,
        keys: wide(&input.keys)?,
        values: wide(&input.values)?,
        step: wide(&input.step)?,
        decay: wide(&input.decay)?,
    };
    if input.queries.dim(2) < CHUNKED_FROM { one_by_one(&input, state) } else { in_chunks(&input, state) }
}

fn one_by_one(input: &DeltaInput, mut state: Array) -> Result<(Array, Array), Exception> {
    let decay = input.decay.exp()?;
    let mut passed = Vec::new();
    for position in 0..input.queries.dim(2) {
        let vector = |all: &Array| all.try_index((.., .., position, ..));
        let number = |all: &Array| all.try_index((.., .., position));
        let key = vector(&input.keys)?.expand_dims(-2)?;
        let decayed = state.multiply(number(&decay)?.expand_dims_axes(&[-1, -2])?)?;
        let recalled = decayed.multiply(&key)?.sum_axis(-1, false)?;
        let wrong = vector(&input.values)?.subtract(recalled)?;
        let correction = wrong.multiply(number(&input.step)?.expand_dims(-1)?)?;
        state = decayed.add(key.multiply(correction.expand_dims(-1)?)?)?;
        passed.push(state.multiply(vector(&input.queries)?.expand_dims(-2)?)?.sum_axis(-1, false)?);
    }
    Ok((stack(&passed, 2)?, state))
}

fn in_chunks(input: &DeltaInput, mut state: Array) -> Result<(Array, Array), Exception> {
    let positions = input.queries.dim(2);
    let chunks = (positions + CHUNK - 1) / CHUNK;
    // What is missing of the last chunk corrects nothing and decays nothing.
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
    let [queries, keys, values] = [chunked(&input.queries)?, chunked(&input.keys)?, chunked(&input.values)?];
    let step = chunked(&input.step)?.expand_dims(-1)?;
    let decay = chunked(&input.decay)?.cumsum(-1, None, None)?;
    let own = decay.expand_dims(-1)?;
    // Logarithms of A_i/A_j; the other half would overflow and is not used.
    let places = arange::<_, i32>(0, CHUNK, None)?;
    let lower = places.reshape(&[-1, 1])?.ge(&places)?;
    let below = places.reshape(&[-1, 1])?.gt(&places)?;
    let ratios = own.subtract(decay.expand_dims(-2)?)?;
    let nothing = Array::from_f32(f32::NEG_INFINITY);
    let ratios = |half: &Array| select(half, &ratios, &nothing)?.exp();
    let transposed = keys.swap_axes(-1, -2)?;
    let alike = keys.matmul(&transposed)?.multiply(ratios(&below)?)?.multiply(&step)?;
    let solved = inverse(&alike)?;
    let decayed = own.exp()?;
    let corrections = solved.matmul(values.multiply(&step)?)?;
    let recalled = solved.matmul(keys.multiply(&step)?.multiply(&decayed)?)?;
    let scores = queries.matmul(&transposed)?.multiply(ratios(&lower)?)?;
    let read = queries.multiply(&decayed)?;
    let last = decay.try_index((.., .., .., CHUNK - 1..))?;
    let left = last.subtract(&decay)?.exp()?.expand_dims(-1)?;
    let kept = keys.multiply(left)?;
    let whole = last.exp()?;
    let mut passed = Vec::new();
    for chunk in 0..chunks {
        let at = |all: &Array| all.try_index((.., .., chunk, .., ..));
        let turned = state.swap_axes(-1, -2)?;
        let corrected = at(&corrections)?.subtract(at(&recalled)?.matmul(&turned)?)?;
        passed.push(at(&read)?.matmul(&turned)?.add(at(&scores)?.matmul(&corrected)?)?);
        let decayed = state.multiply(whole.try_index((.., .., chunk, ..))?.expand_dims(-1)?)?;
        state = decayed.add(corrected.swap_axes(-1, -2)?.matmul(at(&kept)?)?)?;
    }
    let passed = concatenate(&passed, 2)?.try_index((.., .., ..positions, ..))?;
    Ok((passed, state))
}

/// The inverse of one plus each of these matrices, `[…, CHUNK, CHUNK]`, which have nothing on and above their diagonals:
/// of `[[A, 0], [B, D]]` it is `[[A⁻¹, 0], [-D⁻¹·B·A⁻¹, D⁻¹]]`, and blocks of one are their own.
fn inverse(lower: &Array) -> Result<Array, Exception> {
    let outer = lower.shape()[..lower.ndim() - 2].to_vec();
    let shaped = |sizes: &[i32]| [&outer[..], sizes].concat();
    let mut inverses = mlx_rs::ops::ones_dtype(&shaped(&[CHUNK, 1, 1]), lower.dtype())?;
    let mut size = 1;
    while size < CHUNK {
        let pairs = CHUNK / (2 * size);
        // The blocks below the diagonal of every pair.
        let blocks = lower.reshape(&shaped(&[pairs, 2 * size, pairs, 2 * size]))?;
        let picked = mlx_rs::ops::diagonal(&blocks, 0, -4, -2)?;
        let picked = picked.try_index((mlx_rs::ops::indexing::Ellipsis, size.., ..size, ..))?;
        // The pairs are the last dimension now.
        let dimensions = picked.ndim() as i32;
        let mut axes: Vec<i32> = (0..dimensions - 3).collect();
        axes.extend([dimensions - 1, dimensions - 3, dimensions - 2]);
        let beside = picked.transpose_axes(&axes)?;
        let halves = inverses.reshape(&shaped(&[pairs, 2, size, size]))?;
        let first = halves.try_index((mlx_rs::ops::indexing::Ellipsis, 0, .., ..))?;
        let second = halves.try_index((mlx_rs::ops::indexing::Ellipsis, 1, .., ..))?;
        let corner = second.matmul(beside)?.matmul(&first)?.negative()?;
        let top = concatenate(&[first.clone(), zeros_dtype(first.shape(), first.dtype())?], -1)?;
        let bottom = concatenate(&[corner, second], -1)?;
        inverses = concatenate(&[top, bottom], -2)?;
        size *= 2;
    }
    inverses.reshape(lower.shape())
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

    /// Input of so many positions whose keys are units; with `alike`, all the same, which no state forgets.
    fn input(positions: i32, alike: bool) -> DeltaInput {
        let (heads, key, value) = (3, 8, 5);
        let keys = match alike {
            true => {
                broadcast_to(numbers(&[1, heads, 1, key], 1.0, 0.1), &[1, heads, positions, key]).unwrap()
            }
            false => numbers(&[1, heads, positions, key], 1.0, 0.1),
        };
        let norm = keys.square().unwrap().sum_axis(-1, true).unwrap().sqrt().unwrap();
        let decay = numbers(&[1, heads, positions], if alike { 0.0 } else { 2.0 }, 0.5);
        DeltaInput {
            queries: numbers(&[1, heads, positions, key], 1.0, 0.9),
            keys: keys.divide(norm).unwrap(),
            values: numbers(&[1, heads, positions, value], 1.0, 0.3),
            step: numbers(&[1, heads, positions], 0.45, 0.7).add(Array::from_f32(0.5)).unwrap(),
            decay: decay.abs().unwrap().negative().unwrap(),
        }
    }

    #[test]
    fn chunks_equal_one_position_after_the_other() {
        for (positions, alike) in
            [(1, false), (CHUNK - 1, false), (CHUNK, false), (CHUNK + 1, false), (150, false), (200, true)]
        {
            let input = input(positions, alike);
            let state = numbers(&[1, 3, 5, 8], 0.5, 0.2);
            let (one, one_state) = one_by_one(&input, state.clone()).unwrap();
            let (other, other_state) = in_chunks(&input, state).unwrap();
            let [passed, state] = [difference(&one, &other), difference(&one_state, &other_state)];
            assert!(passed < 2e-5 && state < 2e-5, "{positions}, {alike}: {passed}, {state}");
        }
    }
}
