//! The bodies of requests: each is read whole, within bounds of its own, and what all of them hold in memory
//! has one bound. What they say is the dialects' business.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::refusal::{Kind, Refusal};

const MIB: usize = 1024 * 1024;
/// Largest body taken: a long context several times over.
const LARGEST: usize = 16 * MIB;
/// A body that takes longer than this holds memory for nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// The bodies being read or waiting for an engine.
pub struct Bodies {
    room: Arc<Semaphore>,
    most: usize,
}

/// What one request holds in memory, given back when dropped.
pub struct Held {
    _bytes: OwnedSemaphorePermit,
}

impl Bodies {
    /// Room for `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(most)), most }
    }

    /// The whole body, if it is small and quick enough and there is room for what came of it.
    pub async fn read(&self, headers: &HeaderMap, body: Body) -> Result<(Bytes, Held), Refusal> {
        let announced = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.parse::<u64>().ok());
        if announced.is_some_and(|length| length > LARGEST as u64) {
            return Err(too_large());
        }
        tokio::time::timeout(PATIENCE, self.collect(body)).await.unwrap_or_else(|_| {
            let message = format!("the body did not arrive within {} s", PATIENCE.as_secs());
            Err(Refusal::new(Kind::BodyTimeout, message))
        })
    }

    async fn collect(&self, body: Body) -> Result<(Bytes, Held), Refusal> {
        let mut held = self.take(0)?;
        let mut read = BytesMut::new();
        let mut body = Limited::new(body, LARGEST);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => too_large(),
                None => Refusal::new(Kind::InvalidRequest, "the body broke off before its end"),
            })?;
            if let Some(data) = frame.data_ref() {
                held.merge(self.take(data.len())?);
                read.extend_from_slice(data);
            }
        }
        Ok((read.freeze(), Held { _bytes: held }))
    }

    fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.room.clone().try_acquire_many_owned(count).map_err(|_| {
            let message = format!(
                "the requests this gateway is reading, or holds until an engine takes them, leave no room for \
                 this one: {} of {} MiB are taken; try again in a moment",
                (self.most - self.room.available_permits().min(self.most)) / MIB,
                self.most / MIB
            );
            Refusal::new(Kind::Full, message).retry_after(Duration::from_secs(1))
        })
    }
}

fn too_large() -> Refusal {
    let message = format!("the body is larger than {} MiB, the most this gateway takes", LARGEST / MIB);
    Refusal::new(Kind::TooLarge, message)
}
