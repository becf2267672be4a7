//! Queries that grow with their position, beyond the context that a model was first trained for.

use mlx_rs::{Array, Dtype, error::Exception};
use russet_model::description::QueryScale;

/// What queries at these positions are multiplied by, one number each, in the type of `queries`.
pub fn query_scales(scale: QueryScale, positions: &Array, queries: &Array) -> Result<Array, Exception> {
    let QueryScale { beta, original } = scale;
    let number = Array::from_f32;
    let exceeded = positions.as_dtype(Dtype::Float32)?.divide(number(original))?.floor()?;
    let grown = number(1.0).add(exceeded)?.log()?.multiply(number(beta))?;
    number(1.0).add(grown)?.as_dtype(queries.dtype())
}
