//! How long the gateway waits for the API server to take a write, which may be away. What is written is its
//! caller's.

use std::future::Future;
use std::time::Duration;

/// For one write.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a write was not taken.
pub(crate) struct Setback {
    /// For the log.
    pub why: String,
    /// Whether nothing was answered at all: then nothing else will be either.
    pub silent: bool,
}

/// What becomes of a write within its time.
pub(crate) async fn within<T>(write: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Setback> {
    match tokio::time::timeout(PATIENCE, write).await {
        Ok(Ok(written)) => Ok(written),
        Ok(Err(error)) => Err(Setback { why: crate::causes(&error), silent: false }),
        Err(_) => Err(Setback { why: format!("no answer within {} s", PATIENCE.as_secs()), silent: true }),
    }
}
