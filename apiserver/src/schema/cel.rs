//! Part of [`super::Schema`]: cel.
