//! Disk space of the store: free bytes, reservations of other copies, and the owner's reserve. Checked before
//! the first byte of a copy, because a full disk affects everything else on the machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::StoreError;
use super::model_dirs::ModelDirs;

/// By default a twentieth of the disk stays free: logs, updates and the system's own files grow with the
/// machine. At least 1 GiB even on a small disk, and at most 10 GiB on a large one.
const RESERVE_DIVISOR: u64 = 20;
const MIN_RESERVE_BYTES: u64 = 1 << 30;
const MAX_RESERVE_BYTES: u64 = 10 << 30;

/// The disk under the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Total bytes.
    pub total: u64,
    /// Bytes free.
    pub free: u64,
    /// Bytes that the store uses.
    pub models: u64,
    /// Bytes to keep free.
    pub reserve: u64,
}

impl DiskUsage {
    /// Bytes that all models together may use.
    pub fn limit(&self) -> u64 {
        self.free.saturating_add(self.models).saturating_sub(self.reserve)
    }
}

/// The owner's reserve. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct DiskReserve(Arc<Mutex<Option<u64>>>);

impl DiskReserve {
    /// Sets the owner's reserve; returns whether it changed.
    pub fn set(&self, bytes: Option<u64>) -> bool {
        std::mem::replace(&mut *lock(&self.0), bytes) != bytes
    }

    /// Reserved bytes of a disk of this size.
    pub fn bytes_for(&self, total: u64) -> u64 {
        lock(&self.0).unwrap_or_else(|| (total / RESERVE_DIVISOR).clamp(MIN_RESERVE_BYTES, MAX_RESERVE_BYTES))
    }
}

/// Copies in progress, with their final size in bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskReservations(Arc<Mutex<BTreeMap<String, u64>>>);

/// A reservation for one copy; released when dropped.
#[derive(Debug)]
pub(super) struct DiskReservation {
    reservations: DiskReservations,
    key: String,
}

impl DiskReservations {
    /// Reserves space for all `total` bytes of a copy.
    pub fn reserve(
        &self,
        dirs: &ModelDirs,
        reserve: &DiskReserve,
        key: &str,
        total: u64,
    ) -> Result<DiskReservation, StoreError> {
        // Locked until the reservation is recorded: two concurrent requests must not get the same bytes.
        let mut promised = lock(&self.0);
        let need = total.saturating_sub(dirs.partial_bytes(key));
        check_space(&promised, dirs, reserve, key, need)?;
        promised.insert(key.to_owned(), total);
        Ok(DiskReservation { reservations: self.clone(), key: key.to_owned() })
    }

    /// Whether this many more bytes fit.
    pub fn check(
        &self,
        dirs: &ModelDirs,
        reserve: &DiskReserve,
        key: &str,
        need: u64,
    ) -> Result<(), StoreError> {
        check_space(&lock(&self.0), dirs, reserve, key, need)
    }
}

impl Drop for DiskReservation {
    fn drop(&mut self) {
        lock(&self.reservations.0).remove(&self.key);
    }
}

fn check_space(
    promised: &BTreeMap<String, u64>,
    dirs: &ModelDirs,
    reserve: &DiskReserve,
    key: &str,
    need: u64,
) -> Result<(), StoreError> {
    let (total, free) = dirs.disk()?;
    let others = promised.iter().filter(|(other, _)| *other != key);
    let promised = others.map(|(other, bytes)| bytes.saturating_sub(dirs.partial_bytes(other))).sum();
    decide_space(dirs.root(), key, SpaceRequest { free, need, promised, reserve: reserve.bytes_for(total) })
}

struct SpaceRequest {
    free: u64,
    need: u64,
    promised: u64,
    reserve: u64,
}

fn decide_space(path: &Path, key: &str, ask: SpaceRequest) -> Result<(), StoreError> {
    let SpaceRequest { free, need, promised, reserve } = ask;
    if need == 0 || free >= need.saturating_add(promised).saturating_add(reserve) {
        return Ok(());
    }
    let (path, key) = (path.to_owned(), key.to_owned());
    Err(StoreError::DiskPressure { path, key, free, need, promised, reserve })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_pressure_error_shows_the_numbers() {
        let judge = |free, need, promised, reserve| {
            decide_space(Path::new("/d"), "k", SpaceRequest { free, need, promised, reserve })
                .map_err(|it| it.to_string())
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
    fn disk_reserve_is_configured_or_derived_from_disk_size() {
        let reserve = DiskReserve::default();
        for (total, bytes) in [(8, 1), (20, 1), (100, 5), (252, 10), (8000, 10)] {
            assert_eq!(reserve.bytes_for(total << 30), bytes << 30, "{total}");
        }
        assert!(reserve.set(Some(7)) && !reserve.set(Some(7)));
        assert_eq!(reserve.bytes_for(100 << 30), 7);
    }

    #[test]
    fn disk_space_is_reserved_once() {
        let folder = tempfile::tempdir().unwrap();
        let dirs = ModelDirs::open(folder.path().join("models")).unwrap();
        let (_, free) = dirs.disk().unwrap();
        let (promises, reserve) = (DiskReservations::default(), DiskReserve::default());
        // Other programs may use the disk during the test, so the halves leave a wide margin.
        reserve.set(Some(free / 4));
        let half = free / 2;
        let first = promises.reserve(&dirs, &reserve, "a", half).unwrap();
        let refused = promises.reserve(&dirs, &reserve, "b", half).err().unwrap();
        assert!(matches!(refused, StoreError::DiskPressure { .. }), "{refused}");
        assert!(promises.check(&dirs, &reserve, "a", half).is_ok(), "one's own promise is in nobody's way");
        drop(first);
        assert!(promises.reserve(&dirs, &reserve, "b", half).is_ok());
    }
}
