//! Patch formats: applies a PATCH body to an object. One file per format, all pure functions over JSON.
//!
//! Not here: reading the live object, admission, storing the result, or which formats a resource accepts.

pub mod apply;
pub mod json;
pub mod merge;
pub mod strategic;
