//! Phi-3, 3.5 and 4.

use super::{Architecture, Rotated, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    rotated: Rotated::Share,
    // Gate and input in one matrix.
    modules: &[("ffn_up", "mlp.gate_up_proj")],
    fields: |fields| fields.set_window().map(drop),
    ..plain("phi3", "phi3")
};
