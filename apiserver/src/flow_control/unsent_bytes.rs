//! Bytes that the watches of one user have encoded and not sent: a client that does not read, with many watches of large
//! objects, would hold each of them many times. Not here: watches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::{Bytes, BytesMut};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one user.
const MAX_UNSENT_BYTES: usize = 32 << 20;
/// Bytes that a permit stands for.
const UNIT: usize = 1024;

/// The bytes of every user.
#[derive(Debug, Default)]
pub struct UnsentBytes(Mutex<HashMap<Arc<str>, Weak<Semaphore>>>);

/// The bytes of one user.
#[derive(Clone, Debug)]
pub struct UnsentBudget(Arc<Semaphore>);

/// Room for bytes that will be sent.
#[derive(Debug)]
pub struct UnsentPermit(OwnedSemaphorePermit);

impl UnsentBytes {
    /// The budget that all watches of a user share.
    pub fn of(&self, user: &str) -> UnsentBudget {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(budget) = users.get(user).and_then(Weak::upgrade) {
            return UnsentBudget(budget);
        }
        users.retain(|_, budget| budget.strong_count() > 0);
        let budget = Arc::new(Semaphore::new(MAX_UNSENT_BYTES / UNIT));
        users.insert(user.into(), Arc::downgrade(&budget));
        UnsentBudget(budget)
    }
}

impl UnsentBudget {
    /// Waits for room; more than there is in all waits until nothing else is unsent.
    pub async fn reserve(&self, bytes: usize) -> Option<UnsentPermit> {
        let units = bytes.div_ceil(UNIT).clamp(1, MAX_UNSENT_BYTES / UNIT);
        let permit = self.0.clone().acquire_many_owned(units as u32).await;
        permit.ok().map(UnsentPermit)
    }
}

impl UnsentPermit {
    /// Bytes that hold the room of their whole buffer until they are sent or dropped. A buffer that is larger than this
    /// room is left for one of the length of its bytes.
    pub fn keep_with(mut self, buffer: BytesMut) -> Bytes {
        let room = self.0.num_permits() * UNIT;
        let (held, bytes) = match buffer.capacity() <= room.max(buffer.len()) {
            true => (buffer.capacity(), buffer.freeze()),
            false => (buffer.len(), Bytes::copy_from_slice(&buffer)),
        };
        drop(self.0.split((room / UNIT).saturating_sub(held.div_ceil(UNIT))));
        Bytes::from_owner(Unsent { bytes, _permit: self })
    }
}

struct Unsent {
    bytes: Bytes,
    _permit: UnsentPermit,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_of_a_user_wait_until_others_were_sent() {
        let all = UnsentBytes::default();
        let (user, same, other) = (all.of("a"), all.of("a"), all.of("b"));
        let large = BytesMut::from(&vec![b'x'; MAX_UNSENT_BYTES][..]);
        let sent = user.reserve(MAX_UNSENT_BYTES * 2).await.unwrap().keep_with(large);
        let mut waits = Box::pin(same.reserve(1));
        assert!(futures::poll!(&mut waits).is_pending());
        assert!(other.reserve(1).await.is_some(), "another user has its own");
        assert_eq!(sent.len(), MAX_UNSENT_BYTES);
        drop(sent);
        assert!(waits.await.is_some());
        let small = user.reserve(MAX_UNSENT_BYTES).await.unwrap().keep_with(BytesMut::from("x"));
        assert!(same.reserve(MAX_UNSENT_BYTES / 2).await.is_some(), "what was encoded counts");
        let mut buffer = BytesMut::with_capacity(MAX_UNSENT_BYTES / 2 + 2 * UNIT);
        buffer.extend_from_slice(b"x");
        let spare = user.reserve(MAX_UNSENT_BYTES * 2 / 3).await.unwrap().keep_with(buffer);
        assert!(
            futures::poll!(Box::pin(same.reserve(MAX_UNSENT_BYTES / 2))).is_pending(),
            "its buffer counts"
        );
        drop(spare);
        let buffer = BytesMut::with_capacity(4 * UNIT);
        let copied = user.reserve(UNIT).await.unwrap().keep_with(buffer);
        assert_eq!(user.0.available_permits(), MAX_UNSENT_BYTES / UNIT - 1, "an empty copy holds nothing");
        drop(copied);
        drop((user, same, other, small));
        all.of("c");
        assert_eq!(all.0.lock().unwrap().len(), 1, "users without watches are forgotten");
    }
}
