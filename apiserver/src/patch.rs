//! What a PATCH body does to an object: one file per patch format, all pure functions over JSON.
//!
//! Not here: reading the live object, admission, storing the result, or deciding which formats a resource takes.

pub mod apply;
pub mod json;
pub mod merge;
pub mod strategic;
