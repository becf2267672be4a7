//! Priority and fairness: no user's requests, watches or large bodies keep those of others waiting. A request belongs
//! to a priority level, as in Kubernetes' API priority and fairness, and to a user within it; levels do not borrow
//! from each other. Not here: connections, see `server/connection_limit.rs`.

pub mod fair_queue;
pub mod unsent_bytes;
pub mod watch_limit;

use std::sync::Arc;
use std::time::Duration;

use crate::auth::user::{MASTERS, User};
use crate::metrics::Metrics;
use crate::status::{ApiError, Result};
use fair_queue::{FairQueue, QueueError, QueueLimits, QueuePermit};
use unsent_bytes::UnsentBytes;
use watch_limit::{WatchLimit, WatchLimiter, WatchLimits, WatchPermit};

/// The users and groups that the cluster itself consists of: its nodes and controllers.
#[derive(Clone, Debug)]
pub struct SystemUsers {
    /// Users.
    pub users: Vec<String>,
    /// Groups.
    pub groups: Vec<String>,
}

impl Default for SystemUsers {
    fn default() -> Self {
        Self { users: Vec::new(), groups: vec![MASTERS.into(), "system:nodes".into()] }
    }
}

/// How far a user is trusted with the server's resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UserClass {
    /// Not authenticated, or not yet.
    Anonymous,
    /// Any other user.
    Authenticated,
    /// One of [`SystemUsers`], or an administrator.
    System,
}

impl UserClass {
    /// All classes.
    pub const ALL: [Self; 3] = [Self::Anonymous, Self::Authenticated, Self::System];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Anonymous => "anonymous",
            Self::Authenticated => "authenticated",
            Self::System => "system",
        }
    }
}

impl SystemUsers {
    /// The class of a user.
    pub fn class(&self, user: &User) -> UserClass {
        if user.is_anonymous() {
            UserClass::Anonymous
        } else if self.users.contains(&user.name)
            || user.groups.iter().any(|group| self.groups.contains(group))
        {
            UserClass::System
        } else {
            UserClass::Authenticated
        }
    }
}

/// The priority level of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorityLevel {
    /// Never waits: administrators, and probes of the server's health.
    Exempt,
    /// Leases and statuses that components write: without them nodes count as lost, and a leader loses its term.
    NodeHigh,
    /// Other requests of components.
    System,
    /// Requests of all other users.
    GlobalDefault,
    /// Requests without a login.
    CatchAll,
}

impl PriorityLevel {
    /// All levels that may wait.
    pub const LIMITED: [Self; 4] = [Self::NodeHigh, Self::System, Self::GlobalDefault, Self::CatchAll];

    /// Its name, as Kubernetes has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exempt => "exempt",
            Self::NodeHigh => "node-high",
            Self::System => "system",
            Self::GlobalDefault => "global-default",
            Self::CatchAll => "catch-all",
        }
    }

    /// How long the body of a request may take to arrive, while it keeps others waiting: shorter than these wait. It is
    /// enough for a heartbeat of a KiB, and for 3 MiB over a slow link.
    pub fn body_timeout(self) -> Duration {
        Duration::from_secs(if self == Self::NodeHigh { 5 } else { 10 })
    }

    /// How much of the server it gets.
    fn limits(self) -> QueueLimits {
        // A read takes less than a millisecond and a write one commit, so these many at a time are thousands a second.
        // A queue is longer than a client's burst and shorter than its patience: kubectl gives up after 30 s.
        // An operator that starts reports on everything it finds, so a component may queue more. It takes eight users
        // to fill a level.
        let (concurrency, per_user, queued_per_user) = match self {
            Self::Exempt => (usize::MAX, usize::MAX, 0),
            Self::NodeHigh => (128, 16, 1024),
            Self::System => (128, 16, 1024),
            Self::GlobalDefault => (128, 16, 50),
            Self::CatchAll => (16, 2, 50),
        };
        QueueLimits { concurrency, per_user, queued_per_user, queued: 8192, timeout: Duration::from_secs(15) }
    }
}

/// What decides about a request's level.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestInfo<'a> {
    /// Such as `update`.
    pub verb: &'a str,
    /// Such as `leases`; empty for a path that is no resource.
    pub resource: &'a str,
    /// Such as `status`, or empty.
    pub subresource: &'a str,
    /// The path.
    pub path: &'a str,
}

/// The level of a request by a user.
pub fn priority_level(class: UserClass, user: &User, request: RequestInfo<'_>) -> PriorityLevel {
    let RequestInfo { verb, resource, subresource, path } = request;
    let is_probe =
        resource.is_empty() && ["/healthz", "/livez", "/readyz"].iter().any(|probe| path.starts_with(probe));
    if is_probe || user.groups.iter().any(|group| group == MASTERS) {
        return PriorityLevel::Exempt;
    }
    let is_heartbeat = (resource == "leases" || subresource == "status")
        && !matches!(verb, "list" | "watch" | "deletecollection");
    match class {
        UserClass::System if is_heartbeat => PriorityLevel::NodeHigh,
        UserClass::System => PriorityLevel::System,
        UserClass::Authenticated => PriorityLevel::GlobalDefault,
        UserClass::Anonymous => PriorityLevel::CatchAll,
    }
}

/// The limits of one server's requests.
#[derive(Debug)]
pub struct FlowControl {
    /// Whose requests come first.
    pub system: SystemUsers,
    levels: [Arc<FairQueue>; PriorityLevel::LIMITED.len()],
    watches: Arc<WatchLimiter>,
    /// What watches have encoded and not sent.
    pub unsent: UnsentBytes,
    /// Large bodies of components, and of all others: these take processors, not only permits.
    large_bodies: [Arc<FairQueue>; 2],
    metrics: Metrics,
}

/// The names of the queues of large bodies in metrics.
const LARGE_BODIES: &str = "large-bodies";
const LARGE_BODIES_SYSTEM: &str = "large-bodies-system";
/// Seconds after which a rejected client should try again: queues are short, so most are empty by then.
const RETRY_AFTER: u64 = 1;

impl FlowControl {
    /// No requests yet.
    pub fn new(system: SystemUsers, metrics: Metrics) -> Self {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let large_bodies = QueueLimits {
            // One user's never takes all processors, and half of them remain for everything else.
            concurrency: (processors / 2).clamp(2, 8),
            per_user: 1,
            queued_per_user: 50,
            queued: 1024,
            timeout: Duration::from_secs(30),
        };
        Self {
            system,
            levels: PriorityLevel::LIMITED
                .map(|level| FairQueue::new(level.limits(), metrics.queue(level.name()))),
            watches: WatchLimiter::new(WatchLimits::default()),
            unsent: UnsentBytes::default(),
            // A component writes large statuses in one go; a tenant's bodies are as hostile as they can be.
            large_bodies: [(LARGE_BODIES_SYSTEM, 2), (LARGE_BODIES, 1)].map(|(name, per_user)| {
                FairQueue::new(QueueLimits { per_user, ..large_bodies }, metrics.queue(name))
            }),
            metrics,
        }
    }

    /// Waits until a request of this level may be handled; `flow` is its user, or its host without a login. 429 if that
    /// takes too long.
    pub async fn admit(&self, level: PriorityLevel, flow: &str) -> Result<Option<QueuePermit>> {
        let started = std::time::Instant::now();
        let place = PriorityLevel::LIMITED.iter().position(|limited| *limited == level);
        let Some(queue) = place.and_then(|place| self.levels.get(place)) else {
            self.metrics.dispatched(level.name(), started.elapsed());
            return Ok(None);
        };
        match queue.acquire(flow).await {
            Ok(permit) => {
                self.metrics.dispatched(level.name(), started.elapsed());
                Ok(Some(permit))
            }
            Err(error) => {
                self.metrics.rejected(level.name(), error.reason());
                Err(too_many(&format!("{} waits for its requests already ({error})", user_text(flow))))
            }
        }
    }

    /// Waits until a large body of this user may be worked on.
    pub async fn admit_large_body(&self, class: UserClass, user: &str) -> Result<QueuePermit> {
        let [system, users] = &self.large_bodies;
        let (queue, level) =
            if class == UserClass::System { (system, LARGE_BODIES_SYSTEM) } else { (users, LARGE_BODIES) };
        queue.acquire(user).await.map_err(|error: QueueError| {
            self.metrics.rejected(level, error.reason());
            too_many(&format!("large bodies of {} are worked on one at a time ({error})", user_text(user)))
        })
    }

    /// Counts a watch for as long as the permit lives; 429 if the user has too many.
    pub fn open_watch(&self, class: UserClass, user: &str) -> Result<WatchPermit> {
        self.watches.open(class, user).map_err(|limit| {
            self.metrics.rejected("watches", "concurrency-limit");
            let whose = match limit {
                WatchLimit::User(_) => format!(" of {}; close some", user_text(user)),
                WatchLimit::All(_) => " at this server".to_owned(),
            };
            too_many(&format!("{} watches are open, as many as may be{whose}", limit.count()))
        })
    }
}

fn user_text(user: &str) -> String {
    format!("user \"{}\"", user.chars().take(128).collect::<String>())
}

/// 429: the client has to wait.
pub fn too_many(why: &str) -> ApiError {
    let message = format!("too many requests, please try again later: {why}");
    let mut error = ApiError::new(http::StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message);
    error.retry_after = Some(RETRY_AFTER);
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_level_of_their_user_and_meaning() {
        let system = SystemUsers { users: vec!["operator".into()], groups: vec!["nodes".into()] };
        let user = |name: &str, group: &str| User::authenticated(name, vec![group.into()]);
        let (node, operator, tenant) = (user("n", "nodes"), user("operator", ""), user("t", "nodes2"));
        let (admin, anonymous) = (user("a", MASTERS), User::anonymous());
        let request = |verb, resource, subresource, path| RequestInfo { verb, resource, subresource, path };
        let lease = request("update", "leases", "", "/apis/coordination.k8s.io/v1/leases/x");
        let status = request("patch", "shards", "status", "");
        let leases = request("list", "leases", "", "");
        let probe = request("get", "", "", "/livez");
        let version = request("get", "", "", "/version");
        let disguised = request("get", "things", "", "/livez");
        for (user, request, expected) in [
            (&node, lease, PriorityLevel::NodeHigh),
            (&operator, lease, PriorityLevel::NodeHigh),
            (&node, status, PriorityLevel::NodeHigh),
            (&node, leases, PriorityLevel::System),
            (&tenant, lease, PriorityLevel::GlobalDefault),
            (&admin, leases, PriorityLevel::Exempt),
            (&anonymous, probe, PriorityLevel::Exempt),
            (&anonymous, version, PriorityLevel::CatchAll),
            (&anonymous, disguised, PriorityLevel::CatchAll),
        ] {
            assert_eq!(
                priority_level(system.class(user), user, request),
                expected,
                "{} {request:?}",
                user.name
            );
        }
    }
}
