//! Part of [`super::Schema`]: validate.
