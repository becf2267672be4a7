//! Stub: being written.
fn main() {}
