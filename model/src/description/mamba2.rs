//! Mamba-2: a state space of fixed size with a convolution before it.

/// A Mamba-2 mixer.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2 {
    /// Heads; a multiple of the groups.
    pub heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Groups of heads, each of which writes and reads its states by the same vectors; a tensor group shares them.
    pub groups: u32,
    /// Width of these vectors: each element of a head has a state as wide.
    pub state_dim: u32,
    /// Positions that the convolution before it sees, its own included.
    pub conv_kernel: u32,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projections have biases.
    pub bias: bool,
    /// The shortest and the longest time step.
    pub step_limits: [f32; 2],
    /// Epsilon of the norm of its output, which each group passes by itself.
    pub epsilon: f32,
}

impl Mamba2 {
    /// Width of all heads.
    pub fn inner_width(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_dim)
    }

    /// Width of what all groups write by, or read by.
    pub fn group_width(&self) -> u64 {
        u64::from(self.groups) * u64::from(self.state_dim)
    }

    /// Widths of what the convolution passes: of all heads, and of what groups write and read by.
    pub fn conv_widths(&self) -> [u64; 3] {
        [self.inner_width(), self.group_width(), self.group_width()]
    }
}
