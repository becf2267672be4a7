//! Timeout of writes to the API server, which may be unavailable. Not here: what is written.

use std::future::Future;
use std::time::Duration;

/// Timeout of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a write failed.
pub(crate) struct WriteError {
    /// For the log.
    pub cause: String,
    /// Whether no response came at all; then further writes would time out too.
    pub timed_out: bool,
}

/// The result of a write, within the timeout.
pub(crate) async fn with_timeout<T>(
    write: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, WriteError> {
    match tokio::time::timeout(WRITE_TIMEOUT, write).await {
        Ok(Ok(written)) => Ok(written),
        Ok(Err(error)) => {
            Err(WriteError { cause: russet_telemetry::errors::chain(&error), timed_out: false })
        }
        Err(_) => Err(WriteError {
            cause: format!("no response within {} s", WRITE_TIMEOUT.as_secs()),
            timed_out: true,
        }),
    }
}
