//! SmolLM3, of which every fourth layer encodes no positions.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { traditional_rope: true, ..plain("smollm3", "smollm3") };
