//! Budgets in memory, for tests and benchmarks: what an API server does with them, without one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use russet_crds::Budget;

use super::BudgetApi;
use crate::api_timeout::WriteError;

/// An API server that has Budgets alone, of one namespace.
#[derive(Clone, Default)]
pub(crate) struct MemoryBudgets {
    pub(super) objects: Arc<Mutex<BTreeMap<String, Budget>>>,
    /// Writes of a version that was not the latest.
    pub(super) conflicts: Arc<AtomicU64>,
    /// Whether it answers nothing.
    pub(super) is_down: Arc<AtomicBool>,
}

impl MemoryBudgets {
    /// One with these.
    pub(crate) fn of(objects: impl IntoIterator<Item = Budget>) -> Self {
        let memory = Self::default();
        for mut object in objects {
            let name = object.metadata.name.clone().unwrap_or_default();
            object.metadata.uid.get_or_insert_with(|| format!("uid-{name}"));
            object.metadata.resource_version.get_or_insert_with(|| "1".to_owned());
            memory.objects.lock().insert(name, object);
        }
        memory
    }

    fn failure(cause: &str, code: u16) -> WriteError {
        let status = kube::core::Status::failure(cause, "Failure").with_code(code);
        WriteError { cause: cause.to_owned(), timed_out: false, status: Some(Box::new(status)) }
    }
}

impl BudgetApi for MemoryBudgets {
    fn read<'a>(&'a self, _: &'a str, name: &'a str) -> BoxFuture<'a, Result<Budget, WriteError>> {
        let found = self.objects.lock().get(name).cloned();
        std::future::ready(found.ok_or_else(|| Self::failure("there is none", 404))).boxed()
    }

    fn write_status<'a>(&'a self, budget: &'a Budget) -> BoxFuture<'a, Result<Budget, WriteError>> {
        async move {
            // Others write between what is read and what is written.
            tokio::task::yield_now().await;
            if self.is_down.load(Ordering::Relaxed) {
                return Err(WriteError { cause: "it is down".into(), timed_out: true, status: None });
            }
            let mut objects = self.objects.lock();
            let stored = budget.metadata.name.as_deref().and_then(|name| objects.get_mut(name));
            let stored = stored.ok_or_else(|| Self::failure("there is none", 404))?;
            let version = &mut stored.metadata.resource_version;
            if *version != budget.metadata.resource_version {
                self.conflicts.fetch_add(1, Ordering::Relaxed);
                return Err(Self::failure("it is another version", 409));
            }
            let number: u64 = version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0);
            *version = Some((number + 1).to_string());
            stored.status.clone_from(&budget.status);
            Ok(stored.clone())
        }
        .boxed()
    }
}
