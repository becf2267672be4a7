//! The part of a test's cases that one run has; the other parts come with other commits, and a proof has all.

/// Every `parts`-th case, counted from a number that `cargo xtask test` derives from the commit (`RUSSET_SLICE`); without
/// a number, all of them.
pub fn of_this_run<T>(cases: Vec<T>, parts: usize) -> Vec<T> {
    match std::env::var("RUSSET_SLICE").ok().and_then(|number| number.parse::<usize>().ok()) {
        Some(number) => cases.into_iter().skip(number % parts).step_by(parts).collect(),
        None => cases,
    }
}
