//! Lines on stderr for people, beside the log. A line that cannot be written is dropped: a full disk or a reader
//! that is gone must not end a daemon, as `eprintln!` would. Not here: stdout, whose failure is a verb's error.

use std::fmt;
use std::io::Write as _;

/// Writes one line to stderr, or drops it. Use it as [`say!`](crate::say).
pub fn line(text: fmt::Arguments<'_>) {
    // One write a line, so that lines of several threads do not mix.
    let line = format!("{text}\n");
    // Nobody is left to be told.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

/// As `eprintln!`, but a line that cannot be written is dropped instead of a panic.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::stderr::line(format_args!($($text)*)) };
}
