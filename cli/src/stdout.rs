//! The only writer to standard output. A reader that closed its pipe ends the verb quietly, as it ends `cat`; a
//! full disk is the verb's error, because whoever reads the file must not take it for the whole. Not here:
//! stderr, where a line that cannot be written is dropped (`russet_telemetry::say`).

use std::io::{self, Write as _};
use std::process::ExitCode;

use thiserror::Error;

/// Exit code of a process that writes to a closed pipe: 128 and SIGPIPE, as a shell reports it.
const CLOSED_PIPE: u8 = 141;

/// Standard output does not take what a verb prints.
#[derive(Debug, Error)]
#[error("standard output cannot be written: {0}")]
pub struct StdoutError(io::Error);

/// Writes `text` and flushes it: what stays in a buffer fails when nobody looks any more.
pub fn write(text: impl AsRef<[u8]>) -> Result<(), StdoutError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_ref()).and_then(|()| stdout.flush()).map_err(StdoutError)
}

/// Whether the error is that of standard output, which no further attempt mends.
pub fn is_stdout(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<StdoutError>())
}

/// The exit code of an error that is no fault: the reader of standard output wants no more.
pub fn closed_pipe(error: &anyhow::Error) -> Option<ExitCode> {
    let StdoutError(source) = error.chain().find_map(|cause| cause.downcast_ref::<StdoutError>())?;
    (source.kind() == io::ErrorKind::BrokenPipe).then(|| ExitCode::from(CLOSED_PIPE))
}

/// As `print!`, but returns the error.
macro_rules! out {
    ($($text:tt)*) => { $crate::stdout::write(format!($($text)*)) };
}

/// As `println!`, but returns the error.
macro_rules! outln {
    ($($text:tt)*) => { $crate::stdout::write(format!($($text)*) + "\n") };
}

pub(crate) use {out, outln};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closed_standard_output_ends_quietly() {
        let pipe = || io::Error::from(io::ErrorKind::BrokenPipe);
        let full = io::Error::from(io::ErrorKind::StorageFull);
        for (error, quiet) in [
            (anyhow::Error::new(StdoutError(pipe())).context("the answer"), true),
            (anyhow::Error::new(StdoutError(full)), false),
            // A connection that broke is a fault.
            (anyhow::Error::new(pipe()), false),
        ] {
            assert_eq!(closed_pipe(&error).is_some(), quiet, "{error:#}");
        }
    }
}
