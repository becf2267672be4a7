//! The bodies of requests: each is read whole, within bounds of its own, and what all of them hold in memory
//! has one bound, the last part of which no key takes from the others. What they say is the dialects' business.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use parking_lot::Mutex;

use crate::keys::Caller;
use crate::refusal::{Kind, Refusal};

const MIB: usize = 1024 * 1024;
/// Largest body taken: a long context several times over.
const LARGEST: usize = 16 * MIB;
/// A body that takes longer than this holds memory for nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// The bodies being read or waiting for an engine.
pub struct Bodies {
    taken: Arc<Mutex<Taken>>,
    most: usize,
}

#[derive(Default)]
struct Taken {
    all: usize,
    of: HashMap<Option<String>, usize>,
}

/// What one request holds in memory, given back when dropped.
pub struct Held {
    taken: Arc<Mutex<Taken>>,
    key: Option<String>,
    bytes: usize,
}

impl Held {
    /// How much it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        taken.all -= self.bytes;
        if let Some(of) = taken.of.get_mut(&self.key) {
            *of -= self.bytes;
            if *of == 0 {
                taken.of.remove(&self.key);
            }
        }
    }
}

impl Bodies {
    /// Room for `most` bytes, of which the last quarter is for keys that have less than that.
    pub fn new(most: usize) -> Self {
        Self { taken: Arc::default(), most }
    }

    /// The whole body, if it is small and quick enough and there is room for what came of it.
    pub async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        caller: &Caller,
    ) -> Result<(Bytes, Held), Refusal> {
        let announced = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.parse::<u64>().ok());
        if announced.is_some_and(|length| length > LARGEST as u64) {
            return Err(too_large());
        }
        tokio::time::timeout(PATIENCE, self.collect(body, caller)).await.unwrap_or_else(|_| {
            let message = format!("the body did not arrive within {} s", PATIENCE.as_secs());
            Err(Refusal::new(Kind::BodyTimeout, message))
        })
    }

    async fn collect(&self, body: Body, caller: &Caller) -> Result<(Bytes, Held), Refusal> {
        let key = match caller {
            Caller::Anyone => None,
            Caller::Key(key) => Some(key.full_name()),
        };
        let mut held = Held { taken: self.taken.clone(), key, bytes: 0 };
        let mut read = BytesMut::new();
        let mut body = Limited::new(body, LARGEST);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => too_large(),
                None => Refusal::new(Kind::InvalidRequest, "the body broke off before its end"),
            })?;
            if let Some(data) = frame.data_ref() {
                self.take(&mut held, data.len())?;
                read.extend_from_slice(data);
            }
        }
        Ok((read.freeze(), held))
    }

    fn take(&self, held: &mut Held, bytes: usize) -> Result<(), Refusal> {
        let mut taken = self.taken.lock();
        let of = taken.of.get(&held.key).copied().unwrap_or(0) + bytes;
        let all = taken.all + bytes;
        let share = self.most / 4;
        // Without keys there is nobody to leave anything to.
        let greedy = held.key.is_some() && of > share && all > self.most - share;
        if !greedy && all <= self.most {
            taken.all = all;
            taken.of.insert(held.key.clone(), of);
            held.bytes += bytes;
            return Ok(());
        }
        let mut message = format!(
            "the requests this gateway is reading, or holds until an engine takes them, leave no room for \
             this one: {} of {} MiB are taken",
            taken.all / MIB,
            self.most / MIB
        );
        if greedy {
            message.push_str(&format!(
                ", {} by this key, and the last {} are for other keys",
                (of - bytes) / MIB,
                share / MIB
            ));
        }
        message.push_str("; try again in a moment");
        Err(Refusal::new(Kind::Full, message).retry_after(Duration::from_secs(1)))
    }
}

fn too_large() -> Refusal {
    let message = format!("the body is larger than {} MiB, the most this gateway takes", LARGEST / MIB);
    Refusal::new(Kind::TooLarge, message)
}
