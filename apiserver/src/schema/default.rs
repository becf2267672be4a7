//! Part of [`super::Schema`]: default.
