//! Names for values: equal values have equal digests, on every machine and in every release that knows the same
//! fields. Spreading names is all it is for; nothing is kept secret by it.

use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// The SHA-256 of a value as JSON, in hexadecimal.
pub fn digest(value: &impl Serialize) -> String {
    // Struct fields serialise in the order of their declaration, so equal values are equal bytes.
    let canonical = serde_json::to_vec(value).unwrap_or_default();
    hex::encode(Sha256::digest(canonical))
}
