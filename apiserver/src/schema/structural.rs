//! Part of [`super::Schema`]: structural.
