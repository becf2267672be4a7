//! Timeout of writes to the API server, which may be unavailable. Not here: what is written.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use kube::core::{ObjectMeta, Status};
use serde::de::DeserializeOwned;

/// Timeout of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a write failed.
pub(crate) struct WriteError {
    /// For the log.
    pub cause: String,
    /// Whether no response came at all; then further writes would time out too.
    pub timed_out: bool,
    /// The API server's answer.
    pub status: Option<Box<Status>>,
}

impl WriteError {
    /// The HTTP status of the API server's answer.
    pub(crate) fn code(&self) -> Option<u16> {
        self.status.as_ref().map(|status| status.code)
    }
}

/// Deletes the object with this name and uid, if it is still there; 409 where another one has the name.
pub(crate) async fn delete_exactly<K>(api: &Api<K>, metadata: &ObjectMeta) -> Result<(), WriteError>
where
    K: Clone + Debug + DeserializeOwned,
{
    let preconditions = Preconditions { uid: metadata.uid.clone(), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match with_timeout(api.delete(metadata.name.as_deref().unwrap_or_default(), &params)).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some(404) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The result of a write, within the timeout.
pub(crate) async fn with_timeout<T>(
    write: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, WriteError> {
    match tokio::time::timeout(WRITE_TIMEOUT, write).await {
        Ok(Ok(written)) => Ok(written),
        Ok(Err(error)) => {
            let cause = russet_telemetry::errors::chain(&error);
            let status = match error {
                kube::Error::Api(status) => Some(status),
                _ => None,
            };
            Err(WriteError { cause, timed_out: false, status })
        }
        Err(_) => Err(WriteError {
            cause: format!("no response within {} s", WRITE_TIMEOUT.as_secs()),
            timed_out: true,
            status: None,
        }),
    }
}
