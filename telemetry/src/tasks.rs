//! The tasks of a process that must all live: the first one that ends or panics is reported, so that its process
//! ends and is started again. A process whose tasks are gone but whose pid is there is restarted by no
//! supervisor. Not here: tasks that may end, such as connections.

use std::collections::HashMap;
use std::future::Future;

use thiserror::Error;
use tokio::task::{Id, JoinError, JoinSet};

/// A task that must live is gone.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the task {name:?} {how}; the process ends, so that it is started again")]
pub struct TaskEnded {
    /// Name of the task.
    pub name: &'static str,
    /// How it ended: "returned", or "panicked" with the panic's message.
    pub how: String,
}

impl TaskEnded {
    /// The end of a task that failed.
    pub fn new(name: &'static str, error: JoinError) -> Self {
        Self { name, how: how(error) }
    }
}

/// Tasks that must live until the set is dropped, which aborts them.
#[derive(Debug, Default)]
pub struct TaskSet {
    running: JoinSet<()>,
    names: HashMap<Id, &'static str>,
}

impl TaskSet {
    /// Starts a task.
    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let handle = self.running.spawn(task);
        self.names.insert(handle.id(), name);
    }

    /// Waits until one of the tasks ends; forever if there are none. Cancel safe.
    pub async fn ended(&mut self) -> TaskEnded {
        let Some(joined) = self.running.join_next_with_id().await else {
            return std::future::pending().await;
        };
        let (id, how) = match joined {
            Ok((id, ())) => (id, "returned".to_owned()),
            Err(error) => (error.id(), how(error)),
        };
        TaskEnded { name: self.names.remove(&id).unwrap_or("unnamed"), how }
    }

    /// Whether no task was started.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Aborts all tasks and waits until they are gone.
    pub async fn shutdown(&mut self) {
        self.running.shutdown().await;
    }
}

/// How a task failed.
fn how(error: JoinError) -> String {
    if !error.is_panic() {
        return "was aborted".to_owned();
    }
    let payload = error.into_panic();
    let message = payload.downcast_ref::<String>().map(String::as_str);
    match message.or_else(|| payload.downcast_ref::<&str>().copied()) {
        Some(message) => format!("panicked: {message}"),
        None => "panicked".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_task_to_end_is_named_with_its_panic() {
        for (panics, how) in [(false, "returned"), (true, "panicked: no room for 7")] {
            let mut tasks = TaskSet::default();
            tasks.spawn("lease", std::future::pending());
            tasks.spawn("reports", async move { assert!(!panics, "no room for {}", 7) });
            assert_eq!(tasks.ended().await, TaskEnded { name: "reports", how: how.into() });
        }
    }

    #[tokio::test]
    async fn task_set_without_ended_tasks_waits() {
        let mut tasks = TaskSet::default();
        assert!(is_pending(&mut tasks).await, "an empty set has no ended task");
        tasks.spawn("lease", std::future::pending());
        assert!(is_pending(&mut tasks).await);
        tasks.shutdown().await;
    }

    async fn is_pending(tasks: &mut TaskSet) -> bool {
        tokio::select! {
            biased;
            _ = tasks.ended() => false,
            () = tokio::task::yield_now() => true,
        }
    }
}
