//! The number of open connections, over all listeners of a server: by address before a login, by user afterwards, with
//! a share of their own for nodes and controllers. When a share is used up, the user with the most connections in it
//! loses one to a newcomer. Not here: handshakes, see `server/handshakes.rs`.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::handshakes::host;
use super::unread_responses::UnreadResponses;
use crate::auth::user::User;
use crate::flow_control::{SystemUsers, UserClass};
use crate::metrics::Metrics;

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections of users and addresses without a login, or before it.
    pub anonymous: usize,
    /// Connections of users.
    pub authenticated: usize,
    /// Connections of nodes, controllers and administrators.
    pub system: usize,
    /// Concurrent TLS handshakes.
    pub handshakes: usize,
    /// A connection without a request for this long is closed.
    pub first_request_timeout: Duration,
    /// A connection without a request or an open watch for this long is closed, also if it answers pings.
    pub idle_timeout: Duration,
    /// So is one whose client takes nothing of a response for this long.
    pub unread_timeout: Duration,
}

/// Maximum connections, whatever the limit of open files: an idle one takes about 50 KB.
const MAX_CONNECTIONS: usize = 8192;
/// Concurrent handshakes. One takes milliseconds, so with this many the oldest is a silent client.
const MAX_HANDSHAKES: usize = 128;
/// Files that the process needs for everything else: its store, its logs, its own clients.
const OTHER_FILES: usize = 128;

impl ConnectionLimits {
    /// The limits for a process that may open this many files.
    pub fn for_open_files(limit: usize) -> Self {
        let handshakes = (limit / 8).clamp(1, MAX_HANDSHAKES);
        let rest = limit.saturating_sub(handshakes + OTHER_FILES.min(limit / 4));
        let connections = rest.clamp(8, MAX_CONNECTIONS);
        // A client without a login makes one request and leaves; nodes stay, and the cluster depends on them.
        let (anonymous, system) = (connections / 8, connections / 2);
        Self {
            anonymous,
            authenticated: connections - anonymous - system,
            system,
            handshakes,
            first_request_timeout: Duration::from_secs(30),
            // As in Kubernetes, and longer than clients keep idle connections: the one that closes first must not be
            // the server, just as the client sends its next request.
            idle_timeout: Duration::from_secs(120),
            unread_timeout: Duration::from_secs(60),
        }
    }

    fn of(&self, class: UserClass) -> usize {
        match class {
            UserClass::Anonymous => self.anonymous,
            UserClass::Authenticated => self.authenticated,
            UserClass::System => self.system,
        }
    }
}

impl Default for ConnectionLimits {
    /// The limits for 1,024 open files, what most systems give a process.
    fn default() -> Self {
        Self::for_open_files(1024)
    }
}

/// Counts the connections of one server.
#[derive(Debug)]
pub struct ConnectionLimiter {
    limits: ConnectionLimits,
    system: SystemUsers,
    metrics: Metrics,
    /// By number, so that the oldest come first.
    open: Mutex<BTreeMap<u64, OpenConnection>>,
}

#[derive(Debug)]
struct OpenConnection {
    class: UserClass,
    /// The host or the user.
    owner: Arc<str>,
    activity: Arc<ConnectionActivity>,
    /// Dropped when the connection has to go.
    _close: watch::Sender<()>,
}

/// The requests in progress on a connection. That one begins or ends wakes nobody: it would cost each of them a switch of
/// threads. Who waits for an idle connection looks now and then.
#[derive(Debug)]
struct ConnectionActivity(Mutex<RequestCount>);

#[derive(Debug)]
struct RequestCount {
    active: usize,
    /// Whether there was any.
    had_request: bool,
    /// When the last one ended, or when the connection was opened.
    idle_since: Instant,
}

impl ConnectionActivity {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(RequestCount { active: 0, had_request: false, idle_since: Instant::now() })))
    }

    fn requests(&self) -> MutexGuard<'_, RequestCount> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_idle(&self) -> bool {
        self.requests().active == 0
    }
}

/// One open connection.
#[derive(Debug)]
pub struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    number: u64,
    host: Arc<str>,
    activity: Arc<ConnectionActivity>,
    unread: Arc<UnreadResponses>,
    closed: watch::Receiver<()>,
}

/// One request on a connection, until its response was sent.
#[derive(Debug)]
pub struct ActiveRequest(Arc<ConnectionActivity>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut requests = self.0.requests();
        requests.active = requests.active.saturating_sub(1);
        requests.idle_since = Instant::now();
    }
}

impl ConnectionLimiter {
    /// A limiter without connections.
    pub fn new(limits: ConnectionLimits, system: SystemUsers, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self { limits, system, metrics, open: Mutex::default() })
    }

    /// Its limits.
    pub fn limits(&self) -> ConnectionLimits {
        self.limits
    }

    /// Counts a connection from `peer`, with the user of its certificate. `None` if it has to be closed: its user has
    /// the most connections, and all are in use.
    pub fn open_connection(
        self: &Arc<Self>,
        number: u64,
        peer: IpAddr,
        certified: Option<&User>,
    ) -> Option<ConnectionPermit> {
        let host: Arc<str> = host(peer).to_string().into();
        let (class, owner) = match certified {
            Some(user) => (self.system.class(user), user.flow().into()),
            None => (UserClass::Anonymous, host.clone()),
        };
        let mut open = self.open();
        if !self.ensure_capacity(&mut open, class, &owner) {
            self.metrics.closed_connection(class.name());
            return None;
        }
        let activity = ConnectionActivity::new();
        let (close, closed) = watch::channel(());
        self.metrics.connections(class.name()).inc();
        open.insert(number, OpenConnection { class, owner, activity: activity.clone(), _close: close });
        drop(open);
        Some(ConnectionPermit {
            limiter: self.clone(),
            number,
            host,
            activity,
            unread: Arc::default(),
            closed,
        })
    }

    fn remove(&self, open: &mut BTreeMap<u64, OpenConnection>, number: u64) {
        if let Some(closed) = open.remove(&number) {
            self.metrics.connections(closed.class.name()).dec();
        }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, OpenConnection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that one more connection fits; false if it may not.
    fn ensure_capacity(
        &self,
        open: &mut BTreeMap<u64, OpenConnection>,
        class: UserClass,
        owner: &str,
    ) -> bool {
        let is_same = |connection: &OpenConnection| connection.class == class;
        if open.values().filter(|connection| is_same(connection)).count() < self.limits.of(class) {
            return true;
        }
        let candidates: Vec<(u64, &str, bool)> = open
            .iter()
            .filter(|(_, connection)| is_same(connection))
            // The operator and the gateway have a connection for each watch, and the cluster depends on them.
            .filter(|(_, connection)| {
                *connection.owner == *owner
                    || !self.system.users.iter().any(|user| **user == *connection.owner)
            })
            .map(|(number, connection)| (*number, &*connection.owner, connection.activity.is_idle()))
            .collect();
        // Without a login nothing is worth waiting for.
        match victim(&candidates, owner, class == UserClass::Anonymous) {
            Some(number) => {
                tracing::debug!(
                    owner,
                    class = class.name(),
                    "a connection was closed: as many are open as may be"
                );
                self.metrics.closed_connection(class.name());
                self.remove(open, number);
                true
            }
            None => false,
        }
    }
}

/// The connection to close in favour of a new one of `newcomer`, among (number, owner, idle), oldest first: the oldest
/// idle one of the owner that has the most, counting the new one, else the oldest of that owner. `None` if no other has
/// more than the newcomer and all are in use, unless those are closed too.
fn victim(open: &[(u64, &str, bool)], newcomer: &str, close_active: bool) -> Option<u64> {
    let mut counts: HashMap<&str, usize> = HashMap::from([(newcomer, 1)]);
    for (_, owner, _) in open {
        *counts.entry(*owner).or_default() += 1;
    }
    let most = *counts.values().max()?;
    let owner = if counts.get(newcomer) == Some(&most) {
        newcomer
    } else {
        open.iter().map(|(_, owner, _)| *owner).find(|owner| counts.get(owner) == Some(&most))?
    };
    // A newcomer without connections, while all others have one each, may take that of any.
    let from_any = counts.get(newcomer) == Some(&1) && owner == newcomer;
    let mut candidates = open.iter().filter(|(_, other, _)| from_any || *other == owner);
    let oldest = candidates.clone().next();
    let idle = candidates.find(|(_, _, idle)| *idle);
    let chosen = idle.or(oldest.filter(|_| close_active || owner != newcomer));
    chosen.map(|(number, ..)| *number)
}

impl ConnectionPermit {
    /// How long the connection may be idle between two requests.
    pub fn idle_timeout(&self) -> Duration {
        self.limiter.limits.idle_timeout
    }

    /// The host of its client.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Counts a request until the guard is dropped.
    pub fn begin_request(&self) -> ActiveRequest {
        let mut requests = self.activity.requests();
        requests.active += 1;
        requests.had_request = true;
        drop(requests);
        ActiveRequest(self.activity.clone())
    }

    /// What its client has to read.
    pub fn unread(&self) -> Arc<UnreadResponses> {
        self.unread.clone()
    }

    /// Counts the connection to the first user who is authenticated on it.
    pub fn authenticated(&self, user: &User) {
        let class = self.limiter.system.class(user);
        if class == UserClass::Anonymous {
            return;
        }
        let mut open = self.limiter.open();
        let first = open.get(&self.number).is_some_and(|own| own.class == UserClass::Anonymous);
        if !first || !self.limiter.ensure_capacity(&mut open, class, user.flow()) {
            return;
        }
        if let Some(own) = open.get_mut(&self.number) {
            self.limiter.metrics.connections(own.class.name()).dec();
            self.limiter.metrics.connections(class.name()).inc();
            (own.class, own.owner) = (class, user.flow().into());
        }
    }

    /// Completes when the connection has to be closed in favour of another one.
    pub async fn evicted(&self) {
        let mut closed = self.closed.clone();
        while closed.changed().await.is_ok() {}
    }

    /// Completes when the connection was idle for too long, or its client does not read.
    pub async fn idle(&self) {
        let ConnectionLimits { first_request_timeout, idle_timeout, unread_timeout, .. } =
            self.limiter.limits;
        let interval = (unread_timeout / 2).max(Duration::from_millis(1));
        loop {
            let wait = {
                let requests = self.activity.requests();
                let timeout = if requests.had_request { idle_timeout } else { first_request_timeout };
                let idle = requests.idle_since.elapsed();
                if requests.active > 0 {
                    interval
                } else if idle >= timeout {
                    return;
                } else {
                    interval.min(timeout - idle)
                }
            };
            if self.unread.is_stalled(unread_timeout) {
                return;
            }
            tokio::time::sleep(wait).await;
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limiter.remove(&mut self.limiter.open(), self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_with_the_most_connections_loses_one() {
        let open = |text: &'static str| -> Vec<(u64, &'static str, bool)> {
            (0..).zip(text.split_whitespace()).map(|(n, one)| (n, &one[..1], one.len() == 1)).collect()
        };
        // An owner in one letter; `+` is a connection with a request in progress.
        for (others, newcomer, close_active, expected) in [
            ("a a b", "c", false, Some(0)),
            ("b a a", "c", false, Some(1)),
            ("b a+ a", "c", false, Some(2)),
            ("b a+ a+", "c", false, Some(1)),
            ("b a+ a+", "a", false, None),
            ("b a+ a+", "a", true, Some(1)),
            ("b a+ a", "a", false, Some(2)),
            ("a+ b c+", "d", false, Some(1)),
            ("a+ b+ c+", "d", false, None),
            ("a+ b+ c+", "d", true, Some(0)),
            ("a b c", "b", false, Some(1)),
            ("", "a", false, None),
        ] {
            assert_eq!(victim(&open(others), newcomer, close_active), expected, "{others} and {newcomer}");
        }
    }

    #[test]
    fn shares_are_derived_from_the_limit_of_open_files() {
        for limit in [0, 64, 256, 1024, 10_240, 1 << 20] {
            let limits = ConnectionLimits::for_open_files(limit);
            let all = limits.anonymous + limits.authenticated + limits.system;
            assert!(limits.anonymous > 0 && limits.handshakes > 0 && all <= MAX_CONNECTIONS, "{limits:?}");
            assert!(limit < 64 || all + limits.handshakes < limit, "{limits:?} in {limit}");
            assert!(limits.system >= all / 2 && limits.authenticated >= limits.anonymous, "{limits:?}");
        }
        let limits = ConnectionLimits::default();
        assert_eq!((limits.anonymous, limits.authenticated, limits.system), (96, 288, 384));
    }

    fn limiter(limits: ConnectionLimits, system: SystemUsers) -> Arc<ConnectionLimiter> {
        ConnectionLimiter::new(limits, system, Metrics::new(prometheus::Registry::new()).unwrap())
    }

    /// Connections without a login, of users, and of the system.
    fn count(limiter: &ConnectionLimiter) -> [i64; 3] {
        [UserClass::Anonymous, UserClass::Authenticated, UserClass::System]
            .map(|class| limiter.metrics.connections(class.name()).get())
    }

    #[tokio::test]
    async fn connections_are_counted_by_host_then_by_user() {
        let system = SystemUsers { users: vec!["operator".into()], groups: Vec::new() };
        let limits =
            ConnectionLimits { anonymous: 2, authenticated: 1, system: 1, ..ConnectionLimits::default() };
        let limiter = limiter(limits, system);
        let (flood, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let open = |number, peer, user: Option<&User>| limiter.open_connection(number, peer, user);
        let first = open(1, flood, None).unwrap();
        let second = open(2, flood, None).unwrap();
        let third = open(3, other, None).unwrap();
        first.evicted().await;
        assert_eq!(count(&limiter)[0], 2);
        let user = User::authenticated("u", Vec::new());
        third.authenticated(&user);
        assert_eq!(count(&limiter), [1, 1, 0]);
        let request = third.begin_request();
        assert!(open(4, flood, Some(&user)).is_none(), "its only connection is in use");
        second.authenticated(&user);
        assert_eq!(count(&limiter), [1, 1, 0], "it stays where it was");
        drop(request);
        let fifth = open(5, flood, Some(&user)).unwrap();
        third.evicted().await;
        let operator = open(6, flood, Some(&User::authenticated("operator", Vec::new()))).unwrap();
        drop((first, second, third, fifth, operator));
        assert_eq!(count(&limiter), [0, 0, 0]);
    }

    #[tokio::test]
    async fn only_connections_without_requests_are_idle() {
        let zero = Duration::ZERO;
        let limits = ConnectionLimits {
            first_request_timeout: zero,
            idle_timeout: zero,
            // Half of it is the interval of looking.
            unread_timeout: Duration::from_millis(2),
            ..ConnectionLimits::default()
        };
        let limiter = limiter(limits, SystemUsers::default());
        let permit = limiter.open_connection(1, IpAddr::from([10, 0, 0, 1]), None).unwrap();
        permit.idle().await;
        let request = permit.begin_request();
        let mut idle = Box::pin(permit.idle());
        assert!(futures::poll!(&mut idle).is_pending(), "a watch is open");
        drop(request);
        idle.await;
    }

    #[tokio::test]
    async fn connection_whose_client_does_not_read_is_closed() {
        let limits = ConnectionLimits { unread_timeout: Duration::ZERO, ..ConnectionLimits::default() };
        let limiter = limiter(limits, SystemUsers::default());
        let permit = limiter.open_connection(1, IpAddr::from([10, 0, 0, 1]), None).unwrap();
        let _request = permit.begin_request();
        let mut idle = Box::pin(permit.idle());
        assert!(futures::poll!(&mut idle).is_pending(), "its handler is at work");
        let response = permit.unread().begin();
        response.touch();
        idle.await;
        drop(response);
        assert!(!permit.unread.is_stalled(Duration::ZERO));
    }
}
