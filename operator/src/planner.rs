//! Runs the planner, which is pure and may be slow, off the async threads and bounded in time; and the turn in
//! which its result is written, so that no two placements reserve the same memory. Not here: what is decided.
//!
//! ```text
//! the turn ─▶ read the server ─▶ plan ─▶ write                        the usual plan, in milliseconds
//!                                 └─ after TURN_LIMIT ─▶ give the turn up ─▶ plan on ─▶ the turn again
//!                                                                             ├─ still current ─▶ write
//!                                                                             └─ outdated ─▶ anew
//! ```
//!
//! A plan that was slow once is made without the turn at once. So one deployment, however hard to place, costs
//! the others [`TURN_LIMIT`] at most.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::MutexGuard;
use tokio::task::JoinHandle;

/// How long a plan may keep the turn: hundreds of times what a plan for a few machines takes.
const TURN_LIMIT: Duration = Duration::from_secs(1);
/// How long a plan may take. Beyond that its result describes a cluster of the past; its thread goes on, and
/// its namespace waits for it.
const PLAN_LIMIT: Duration = Duration::from_secs(30);
/// Attempts of a plan that was outdated when it was done; the next ones are made after a pause.
const MAX_ATTEMPTS: u32 = 3;
/// Remembered writes. A plan that is older than all of them counts as outdated.
const MAX_WRITES: usize = 1024;

/// Why there is no plan.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    /// It takes too long.
    #[error(
        "{object}: the planner did not decide within {} s; its namespace waits for it. Make the request simpler: fewer layers, fewer replicas, a fixed split",
        PLAN_LIMIT.as_secs()
    )]
    Overdue {
        /// Kind, namespace and name.
        object: String,
    },
    /// A plan of the same namespace takes too long.
    #[error("{object}: the planner still works on {overdue}; delete that object or make it simpler")]
    Waiting {
        /// Kind, namespace and name.
        object: String,
        /// The same of the other one.
        overdue: String,
    },
    /// The planner panicked.
    #[error("{object}: the planner panicked, which is a bug: {why}")]
    Panicked {
        /// Kind, namespace and name.
        object: String,
        /// The panic's message.
        why: String,
    },
    /// Others were placed on the same nodes meanwhile, again and again.
    #[error("{object}: {MAX_ATTEMPTS} plans in a row were outdated when they were done; it is planned again")]
    Outdated {
        /// Kind, namespace and name.
        object: String,
    },
}

/// Whose plan it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanKey {
    /// The kind.
    pub kind: &'static str,
    /// The namespace; empty for a kind without one.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl PlanKey {
    fn object(&self) -> String {
        match self.namespace.as_str() {
            "" => format!("{} {}", self.kind, self.name),
            namespace => format!("{} {namespace}/{}", self.kind, self.name),
        }
    }
}

/// The plans of a process.
pub struct Planner {
    /// [`TURN_LIMIT`].
    turn_limit: Duration,
    /// [`PLAN_LIMIT`].
    plan_limit: Duration,
    /// Objects whose last plan kept the turn for too long.
    slow: Mutex<HashSet<PlanKey>>,
    /// Overdue plans whose threads still run, by namespace.
    overdue: Arc<Mutex<HashMap<String, PlanKey>>>,
    turn: tokio::sync::Mutex<WriteLog>,
    /// The number of writes.
    writes: AtomicU64,
}

impl Default for Planner {
    fn default() -> Self {
        Self {
            turn_limit: TURN_LIMIT,
            plan_limit: PLAN_LIMIT,
            slow: Mutex::default(),
            overdue: Arc::default(),
            turn: tokio::sync::Mutex::default(),
            writes: AtomicU64::new(0),
        }
    }
}

/// The latest writes of placements.
#[derive(Default)]
struct WriteLog {
    /// The number of a write, and the nodes whose memory or files it concerns; `None` for all.
    writes: VecDeque<(u64, Option<BTreeSet<String>>)>,
}

impl WriteLog {
    /// Whether no write after `seen` concerns these nodes.
    fn is_current(&self, seen: u64, now: u64, nodes: &BTreeSet<String>) -> bool {
        let later = || self.writes.iter().filter(|(number, _)| *number > seen);
        let all_are_known = u64::try_from(later().count()).ok() == now.checked_sub(seen);
        all_are_known
            && later().all(|(_, written)| match written {
                Some(written) => written.is_disjoint(nodes),
                None => nodes.is_empty(),
            })
    }
}

/// The right to write placements; others wait meanwhile.
pub struct PlacementTurn<'a> {
    log: MutexGuard<'a, WriteLog>,
    writes: &'a AtomicU64,
}

impl PlacementTurn<'_> {
    /// Notes a write that concerns these nodes, or all. Call it before writing: a write that fails half way
    /// counts.
    pub fn note_write(&mut self, nodes: Option<BTreeSet<String>>) {
        let number = self.writes.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.log.writes.push_back((number, nodes));
        if self.log.writes.len() > MAX_WRITES {
            self.log.writes.pop_front();
        }
    }
}

/// A plan in progress.
struct PlanTask<T> {
    key: PlanKey,
    thread: JoinHandle<T>,
}

impl<T> PlanTask<T> {
    /// The result, or `None` if it takes longer than that.
    async fn within(&mut self, limit: Duration) -> Option<Result<T, PlanError>> {
        let done = tokio::time::timeout(limit, &mut self.thread).await.ok()?;
        Some(done.map_err(|error| PlanError::Panicked {
            object: self.key.object(),
            why: match error.try_into_panic() {
                Ok(panic) => panic_message(panic.as_ref()),
                Err(cancelled) => cancelled.to_string(),
            },
        }))
    }
}

/// The message of a panic.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

impl Planner {
    /// Plans on another thread, without the turn.
    pub async fn plan<T: Send + 'static>(
        &self,
        key: PlanKey,
        plan: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PlanError> {
        self.finish(self.start(key, plan)?).await
    }

    /// Reads the server, plans on another thread, and returns the plan with the turn to write it. `nodes` are
    /// those whose memory or disk a plan takes.
    pub async fn plan_in_turn<T, O, E, F>(
        &self,
        key: PlanKey,
        observe: impl Fn() -> F,
        decide: impl Fn(O) -> T + Clone + Send + 'static,
        nodes: impl Fn(&T) -> BTreeSet<String>,
    ) -> Result<(T, PlacementTurn<'_>), E>
    where
        T: Send + 'static,
        O: Send + 'static,
        E: From<PlanError>,
        F: Future<Output = Result<O, E>>,
    {
        for _ in 0..MAX_ATTEMPTS {
            let is_slow = self.slow.lock().contains(&key);
            let mut turn = if is_slow { None } else { Some(self.turn().await) };
            // Before the server is read: a write in between is seen as one after it.
            let seen = self.writes.load(Ordering::Acquire);
            let observed = observe().await?;
            let decide = decide.clone();
            let mut task = self.start(key.clone(), move || decide(observed))?;
            let plan = match task.within(self.turn_limit).await {
                Some(plan) => {
                    self.slow.lock().remove(&key);
                    plan?
                }
                None => {
                    turn = None;
                    self.slow.lock().insert(key.clone());
                    self.finish(task).await?
                }
            };
            if let Some(turn) = turn {
                return Ok((plan, turn));
            }
            let turn = self.turn().await;
            if turn.log.is_current(seen, self.writes.load(Ordering::Acquire), &nodes(&plan)) {
                return Ok((plan, turn));
            }
        }
        Err(PlanError::Outdated { object: key.object() }.into())
    }

    async fn turn(&self) -> PlacementTurn<'_> {
        PlacementTurn { log: self.turn.lock().await, writes: &self.writes }
    }

    fn start<T: Send + 'static>(
        &self,
        key: PlanKey,
        plan: impl FnOnce() -> T + Send + 'static,
    ) -> Result<PlanTask<T>, PlanError> {
        if let Some(overdue) = self.overdue.lock().get(&key.namespace) {
            return Err(PlanError::Waiting { object: key.object(), overdue: overdue.object() });
        }
        Ok(PlanTask { key, thread: tokio::task::spawn_blocking(plan) })
    }

    async fn finish<T: Send + 'static>(&self, mut task: PlanTask<T>) -> Result<T, PlanError> {
        if let Some(plan) = task.within(self.plan_limit).await {
            return plan;
        }
        let PlanTask { key, thread } = task;
        self.overdue.lock().insert(key.namespace.clone(), key.clone());
        let overdue = self.overdue.clone();
        let error = PlanError::Overdue { object: key.object() };
        // It cannot be ended; when it ends, its namespace is planned again.
        tokio::spawn(async move {
            let _ = thread.await;
            overdue.lock().remove(&key.namespace);
        });
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn key(namespace: &str) -> PlanKey {
        PlanKey { kind: "ModelDeployment", namespace: namespace.to_owned(), name: "chat".to_owned() }
    }

    fn on(nodes: &[&str]) -> BTreeSet<String> {
        nodes.iter().map(|&node| node.to_owned()).collect()
    }

    /// A plan in the turn that ends when the sender is dropped, and is for these nodes.
    async fn place(
        planner: &Planner,
        namespace: &str,
        waits: Vec<mpsc::Receiver<()>>,
        nodes: &[&str],
    ) -> Result<u32, PlanError> {
        let waits = Arc::new(Mutex::new(waits));
        let attempts = Arc::new(AtomicU64::new(0));
        let counted = attempts.clone();
        let decide = move |()| {
            counted.fetch_add(1, Ordering::Relaxed);
            let wait = waits.lock().pop();
            if let Some(wait) = wait {
                let _ = wait.recv();
            }
        };
        let observe = || std::future::ready(Ok::<_, PlanError>(()));
        let ((), mut turn) = planner.plan_in_turn(key(namespace), observe, decide, |()| on(nodes)).await?;
        turn.note_write(Some(on(nodes)));
        Ok(u32::try_from(attempts.load(Ordering::Relaxed)).unwrap())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_slow_plan_gives_its_turn_up_and_is_checked() {
        let planner = Planner { turn_limit: Duration::from_millis(20), ..Planner::default() };
        let planner = Arc::new(planner);
        for (story, other_node, attempts) in [("the same node", "a", 2), ("another node", "b", 1)] {
            let (release, wait) = mpsc::channel::<()>();
            let slow = tokio::spawn({
                let planner = planner.clone();
                async move { place(&planner, "slow", vec![wait], &["a"]).await }
            });
            while !planner.slow.lock().contains(&key("slow")) {
                tokio::task::yield_now().await;
            }
            // While the slow one is planned, another is placed.
            assert_eq!(place(&planner, "quick", Vec::new(), &[other_node]).await, Ok(1), "{story}");
            drop(release);
            assert_eq!(slow.await.unwrap(), Ok(attempts), "{story}");
            planner.slow.lock().clear();
        }
    }

    #[tokio::test]
    async fn a_panic_of_the_planner_is_an_error_of_its_object() {
        let planner = Planner::default();
        let failed = planner.plan::<()>(key("a"), || panic!("no such layer")).await;
        let error = failed.unwrap_err().to_string();
        assert!(error.contains("ModelDeployment a/chat") && error.contains("no such layer"), "{error}");
        assert_eq!(planner.plan(key("a"), || 7).await, Ok(7));
    }

    #[tokio::test]
    async fn an_overdue_plan_stops_its_namespace_alone() {
        let mut planner = Planner { plan_limit: Duration::from_millis(1), ..Planner::default() };
        let (release, wait) = mpsc::channel::<()>();
        let endless = planner.plan(key("a"), move || wait.recv().is_ok()).await;
        planner.plan_limit = PLAN_LIMIT;
        assert_eq!(endless, Err(PlanError::Overdue { object: "ModelDeployment a/chat".to_owned() }));
        let waiting = planner.plan(key("a"), || true).await;
        assert!(matches!(waiting, Err(PlanError::Waiting { .. })), "{waiting:?}");
        assert_eq!(planner.plan(key("b"), || true).await, Ok(true));
        drop(release);
        while !planner.overdue.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(planner.plan(key("a"), || true).await, Ok(true));
    }

    #[test]
    fn a_plan_is_current_while_its_nodes_are_untouched() {
        let writes = [(1, Some(on(&["a"]))), (2, Some(on(&["b"]))), (3, None)].into();
        let mut log = WriteLog { writes, ..WriteLog::default() };
        for (story, seen, now, nodes, current) in [
            ("nothing was written since", 3, 3, on(&["a"]), true),
            ("something for all nodes", 2, 3, on(&["a"]), false),
            ("a plan without nodes", 0, 3, on(&[]), true),
        ] {
            assert_eq!(log.is_current(seen, now, &nodes), current, "{story}");
        }
        log.writes.pop_back();
        for (story, seen, nodes, current) in [
            ("another node", 1, on(&["a"]), true),
            ("the same node", 1, on(&["b", "c"]), false),
            ("both are seen", 0, on(&["a"]), false),
        ] {
            assert_eq!(log.is_current(seen, 2, &nodes), current, "{story}");
        }
        log.writes.pop_front();
        assert!(!log.is_current(0, 2, &on(&["c"])), "a write that is forgotten");
    }
}
