//! Digests of values: equal values have equal digests, on every machine and in every release with the same
//! fields. They only spread names; they protect no secret.

use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// The SHA-256 of a value as JSON, in hexadecimal.
pub fn digest(value: &impl Serialize) -> String {
    // Struct fields are serialised in the order of their declaration, so equal values are equal bytes.
    let canonical = serde_json::to_vec(value).unwrap_or_default();
    hex::encode(Sha256::digest(canonical))
}
