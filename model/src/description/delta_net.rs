//! A gated delta net: linear attention with a state of fixed size and a convolution before it.

/// A gated delta net.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Key heads; a tensor group shares them.
    pub key_heads: u32,
    /// Value heads; a multiple of the key heads.
    pub value_heads: u32,
    /// Width of a key.
    pub key_dim: u32,
    /// Width of a value.
    pub value_dim: u32,
    /// Positions that the convolution before it sees, its own included.
    pub conv_kernel: u32,
    /// Epsilon of the norm of its output.
    pub epsilon: f32,
    /// Whether one matrix holds all projections, ordered by key heads.
    pub merged_projections: bool,
}

impl DeltaNet {
    /// Width of all keys.
    pub fn key_width(&self) -> u64 {
        u64::from(self.key_heads) * u64::from(self.key_dim)
    }

    /// Width of all values.
    pub fn value_width(&self) -> u64 {
        u64::from(self.value_heads) * u64::from(self.value_dim)
    }

    /// Width of what the convolution passes: queries, keys and values.
    pub fn conv_width(&self) -> u64 {
        2 * self.key_width() + self.value_width()
    }
}
