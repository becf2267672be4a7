//! How long the gateway waits for the API server to take a write, which may be away. What is written is its
//! caller's.

use std::future::Future;
use std::time::Duration;

/// For one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a write was not taken.
pub(crate) struct WriteError {
    /// For the log.
    pub why: String,
    /// Whether nothing was answered at all: then nothing else will be either.
    pub timed_out: bool,
}

/// What becomes of a write within its time.
pub(crate) async fn with_timeout<T>(write: impl Future<Output = Result<T, kube::Error>>) -> Result<T, WriteError> {
    match tokio::time::timeout(WRITE_TIMEOUT, write).await {
        Ok(Ok(written)) => Ok(written),
        Ok(Err(error)) => Err(WriteError { why: crate::causes(&error), timed_out: false }),
        Err(_) => Err(WriteError { why: format!("no answer within {} s", WRITE_TIMEOUT.as_secs()), timed_out: true }),
    }
}
