//! Queries that grow with their position, beyond the context that a model was first trained for.

use mlx_rs::{Array, Dtype, error::Exception, ops::arange};
use russet_model::description::QueryScale;

/// What queries at these positions are multiplied by, one number each, in the type of `queries`.
pub fn query_scales(scale: QueryScale, positions: &Array, queries: &Array) -> Result<Array, Exception> {
    let QueryScale { beta, original } = scale;
    let number = Array::from_f32;
    let exceeded = positions.as_dtype(Dtype::Float32)?.divide(number(original))?.floor()?;
    let grown = number(1.0).add(exceeded)?.log()?.multiply(number(beta))?;
    number(1.0).add(grown)?.as_dtype(queries.dtype())
}

/// The same for the positions of one sequence from `offset` on, to be multiplied with `queries`, `[1, heads, positions,
/// width]`.
pub fn sequence_scales(scale: QueryScale, offset: i32, queries: &Array) -> Result<Array, Exception> {
    let length = queries.dim(2);
    let positions = arange::<_, i32>(offset, offset + length, None)?;
    query_scales(scale, &positions, queries)?.reshape(&[1, 1, length, 1])
}
