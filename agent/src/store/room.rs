//! Whether files may begin to come: what is free, what other files on their way were promised, and what the
//! machine's owner wants left. Asked before the first byte, because a disk that runs full takes everything
//! else on the machine with it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::StoreError;
use super::publish::Shelf;

/// Where the owner says nothing, a twentieth of the disk stays free: logs, updates and the system's own
/// files grow with the machine. Less than 1 GiB is nothing even on a small disk, and more than 10 GiB
/// nobody misses on a large one.
const SHARE: u64 = 20;
const LEAST: u64 = 1 << 30;
const MOST: u64 = 10 << 30;

/// The disk under the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Bytes in all.
    pub total: u64,
    /// Bytes free.
    pub free: u64,
    /// Bytes the store has.
    pub models: u64,
    /// Bytes that stay free.
    pub reserve: u64,
}

impl Disk {
    /// Bytes all models together may take.
    pub fn limit(&self) -> u64 {
        self.free.saturating_add(self.models).saturating_sub(self.reserve)
    }
}

/// What the owner wants left. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Reserve(Arc<Mutex<Option<u64>>>);

impl Reserve {
    /// Takes the owner's word; returns whether it is another one.
    pub fn set(&self, bytes: Option<u64>) -> bool {
        std::mem::replace(&mut *locked(&self.0), bytes) != bytes
    }

    /// Bytes of a disk of that size.
    pub fn of(&self, total: u64) -> u64 {
        locked(&self.0).unwrap_or_else(|| (total / SHARE).clamp(LEAST, MOST))
    }
}

/// Files on their way, and their bytes when they are whole.
#[derive(Clone, Debug, Default)]
pub(super) struct Promises(Arc<Mutex<BTreeMap<String, u64>>>);

/// Room for one copy, until it is dropped.
#[derive(Debug)]
pub(super) struct Promise {
    promises: Promises,
    key: String,
}

impl Promises {
    /// Promises room for all `total` bytes of a copy.
    pub fn give(
        &self,
        shelf: &Shelf,
        reserve: &Reserve,
        key: &str,
        total: u64,
    ) -> Result<Promise, StoreError> {
        // Held until the promise is written down: two who ask at once must not get the same bytes.
        let mut promised = locked(&self.0);
        let need = total.saturating_sub(shelf.partial_bytes(key));
        fits(&promised, shelf, reserve, key, need)?;
        promised.insert(key.to_owned(), total);
        Ok(Promise { promises: self.clone(), key: key.to_owned() })
    }

    /// Whether that many more bytes would fit.
    pub fn fits(&self, shelf: &Shelf, reserve: &Reserve, key: &str, need: u64) -> Result<(), StoreError> {
        fits(&locked(&self.0), shelf, reserve, key, need)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        locked(&self.promises.0).remove(&self.key);
    }
}

fn fits(
    promised: &BTreeMap<String, u64>,
    shelf: &Shelf,
    reserve: &Reserve,
    key: &str,
    need: u64,
) -> Result<(), StoreError> {
    let (total, free) = shelf.disk()?;
    let others = promised.iter().filter(|(other, _)| *other != key);
    let promised = others.map(|(other, bytes)| bytes.saturating_sub(shelf.partial_bytes(other))).sum();
    judge(shelf.root(), key, Ask { free, need, promised, reserve: reserve.of(total) })
}

struct Ask {
    free: u64,
    need: u64,
    promised: u64,
    reserve: u64,
}

fn judge(path: &Path, key: &str, ask: Ask) -> Result<(), StoreError> {
    let Ask { free, need, promised, reserve } = ask;
    if need == 0 || free >= need.saturating_add(promised).saturating_add(reserve) {
        return Ok(());
    }
    let (path, key) = (path.to_owned(), key.to_owned());
    Err(StoreError::DiskPressure { path, key, free, need, promised, reserve })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_in_numbers() {
        let judge = |free, need, promised, reserve| {
            judge(Path::new("/d"), "k", Ask { free, need, promised, reserve }).map_err(|it| it.to_string())
        };
        let gib = 1 << 30;
        assert_eq!(judge(6 * gib, 5 * gib, 0, gib), Ok(()));
        assert_eq!(judge(0, 0, 9, gib), Ok(()), "what is complete needs no room");
        assert_eq!(judge(6 * gib, 6 * gib, 0, 0), Ok(()), "an owner may want nothing left");
        assert!(judge(u64::MAX, u64::MAX, 1, 1).is_ok(), "sizes that no machine has");
        for (free, need, promised, words) in [
            (
                5 * gib,
                5 * gib,
                0,
                ["/d has 5.0 GiB free", "5.0 GiB more are needed", "1.0 GiB stay reserved"],
            ),
            (
                9 * gib,
                5 * gib,
                4 * gib,
                ["9.0 GiB free", "4.0 GiB are promised to other copies", "spec.disk.reserve"],
            ),
        ] {
            let error = judge(free, need, promised, gib).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }

    #[test]
    fn the_owner_says_what_stays_free_and_else_the_size_of_the_disk_does() {
        let reserve = Reserve::default();
        for (total, bytes) in [(8, 1), (20, 1), (100, 5), (252, 10), (8000, 10)] {
            assert_eq!(reserve.of(total << 30), bytes << 30, "{total}");
        }
        assert!(reserve.set(Some(7)) && !reserve.set(Some(7)));
        assert_eq!(reserve.of(100 << 30), 7);
    }

    #[test]
    fn room_is_promised_once() {
        let folder = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(folder.path().join("models")).unwrap();
        let (_, free) = shelf.disk().unwrap();
        let (promises, reserve) = (Promises::default(), Reserve::default());
        // Something else may use the disk meanwhile, so the halves leave a lot between them.
        reserve.set(Some(free / 4));
        let half = free / 2;
        let first = promises.give(&shelf, &reserve, "a", half).unwrap();
        let refused = promises.give(&shelf, &reserve, "b", half).err().unwrap();
        assert!(matches!(refused, StoreError::DiskPressure { .. }), "{refused}");
        assert!(promises.fits(&shelf, &reserve, "a", half).is_ok(), "one's own promise is in nobody's way");
        drop(first);
        assert!(promises.give(&shelf, &reserve, "b", half).is_ok());
    }
}
