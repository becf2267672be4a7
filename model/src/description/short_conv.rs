//! A short convolution: each channel of a position sees the last few positions, between two gates of the input.

/// A short convolution: `out(c · convolution(b · x))`, where `b`, `c` and `x` are projected from the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConv {
    /// Channels, each convolved by itself; a tensor group shares them.
    pub channels: u32,
    /// Positions that the convolution sees, its own included.
    pub kernel: u32,
    /// Whether the projections and the convolution have biases.
    pub bias: bool,
}
