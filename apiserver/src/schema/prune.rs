//! Part of [`super::Schema`]: prune.
