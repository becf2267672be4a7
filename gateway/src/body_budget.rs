//! Memory budget for request bodies: each body is read completely, up to a size and time limit, and all
//! bodies together share one limit, the last quarter of which no single key can use up. Not here: parsing,
//! which is the dialects'.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use parking_lot::Mutex;

use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;

const MIB: usize = 1024 * 1024;
/// Largest accepted body: several times a long context.
const MAX_BODY_BYTES: usize = 16 * MIB;
/// Time for the rest of a refused body.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// Memory budget of the bodies that are being read or held for an engine.
#[derive(Clone)]
pub struct BodyBudget {
    usage: Arc<Mutex<BodyUsage>>,
    max_bytes: usize,
    /// Time limit for one body.
    timeout: Duration,
}

#[derive(Default)]
struct BodyUsage {
    total: usize,
    by_key: HashMap<Option<Arc<str>>, usize>,
}

/// The bytes one request holds in memory; released on drop.
pub struct BodyPermit {
    usage: Arc<Mutex<BodyUsage>>,
    key: Option<Arc<str>>,
    bytes: usize,
}

impl BodyPermit {
    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl std::fmt::Debug for BodyPermit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "BodyPermit({} bytes)", self.bytes)
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        let mut usage = self.usage.lock();
        usage.total -= self.bytes;
        if let Some(key_bytes) = usage.by_key.get_mut(&self.key) {
            *key_bytes -= self.bytes;
            if *key_bytes == 0 {
                usage.by_key.remove(&self.key);
            }
        }
    }
}

impl BodyBudget {
    /// A budget of `max_bytes`; the last quarter is reserved for keys that use less than a quarter. A body has to arrive
    /// within the timeout.
    pub fn new(max_bytes: usize, timeout: Duration) -> Self {
        Self { usage: Arc::default(), max_bytes, timeout }
    }

    /// Time limit for one body.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Reads the whole body; an error if it is too large, too slow, does not fit the budget, or `check` refuses one of its
    /// parts. Of a refused body no more is held, but the rest is read: a client that still sends would not see the answer.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        caller: &Caller,
        check: impl FnMut(&[u8]) -> Result<(), GatewayError>,
    ) -> Result<(Bytes, BodyPermit), GatewayError> {
        let announced = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.parse::<u64>().ok());
        if announced.is_some_and(|length| length > MAX_BODY_BYTES as u64) {
            return Err(too_large());
        }
        let read = self.collect(body, announced, caller, check);
        tokio::time::timeout(self.timeout, read).await.unwrap_or_else(|_| {
            let message =
                format!("the body did not arrive within {:?}; send the request again", self.timeout);
            Err(GatewayError::new(ErrorKind::BodyTimeout, message))
        })
    }

    /// Holds `bytes` more for a request of this caller; an error if they do not fit the budget.
    pub fn hold(&self, caller: &Caller, bytes: usize) -> Result<BodyPermit, GatewayError> {
        let mut permit = self.empty_permit(caller);
        self.reserve(&mut permit, bytes)?;
        Ok(permit)
    }

    /// Holds `bytes` more with a permit that is there; an error if they do not fit the budget.
    pub(crate) fn grow(&self, permit: &mut BodyPermit, bytes: usize) -> Result<(), GatewayError> {
        self.reserve(permit, bytes)
    }

    fn empty_permit(&self, caller: &Caller) -> BodyPermit {
        BodyPermit { usage: self.usage.clone(), key: caller.shared_key_name(), bytes: 0 }
    }

    async fn collect(
        &self,
        body: Body,
        announced: Option<u64>,
        caller: &Caller,
        mut check: impl FnMut(&[u8]) -> Result<(), GatewayError>,
    ) -> Result<(Bytes, BodyPermit), GatewayError> {
        let mut permit = self.empty_permit(caller);
        // Memory is taken as it is written; growing would copy what is there.
        let mut bytes = BytesMut::with_capacity(announced.unwrap_or_default() as usize);
        let mut body = Limited::new(body, MAX_BODY_BYTES);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => too_large(),
                None => GatewayError::new(
                    ErrorKind::InvalidRequest,
                    "the body ended before it was complete; send the request again",
                ),
            })?;
            let Some(data) = frame.data_ref() else { continue };
            if let Err(refusal) = check(data).and_then(|()| self.reserve(&mut permit, data.len())) {
                drop((bytes, permit));
                discard_rest(body).await;
                return Err(refusal);
            }
            bytes.extend_from_slice(data);
        }
        Ok((bytes.freeze(), permit))
    }

    fn reserve(&self, permit: &mut BodyPermit, bytes: usize) -> Result<(), GatewayError> {
        let mut usage = self.usage.lock();
        let key_bytes = usage.by_key.get(&permit.key).copied().unwrap_or(0) + bytes;
        let total = usage.total + bytes;
        let share = self.max_bytes / 4;
        // Without keys there are no other callers to reserve memory for.
        let over_share = permit.key.is_some() && key_bytes > share && total > self.max_bytes - share;
        if !over_share && total <= self.max_bytes {
            usage.total = total;
            usage.by_key.insert(permit.key.clone(), key_bytes);
            permit.bytes += bytes;
            return Ok(());
        }
        let mut message = format!(
            "the bodies of this gateway's requests use {} of {} MiB, and this one does not fit",
            usage.total / MIB,
            self.max_bytes / MIB
        );
        if over_share {
            message.push_str(&format!(
                "; this key uses {} MiB, and the last {} MiB are reserved for other keys",
                (key_bytes - bytes) / MIB,
                share / MIB
            ));
        }
        message.push_str("; send the request again when others have finished");
        Err(GatewayError::new(ErrorKind::GatewayFull, message).retry_after(Duration::from_secs(1)))
    }
}

/// Reads what is left of a refused body: a client that still sends would not see the answer.
async fn discard_rest(mut body: Limited<Body>) {
    let read = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}

fn too_large() -> GatewayError {
    let message = format!("the body is larger than the limit of {} MiB", MAX_BODY_BYTES / MIB);
    GatewayError::new(ErrorKind::TooLarge, message)
}
