//! The number of open watches, in all and for each user. Not here: watches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::UserClass;

/// Limits of open watches.
#[derive(Clone, Copy, Debug)]
pub struct WatchLimits {
    /// Watches of one user. A controller has one for each kind, and kubectl one for each `-w`.
    pub per_user: usize,
    /// Watches of all users that are no components of the cluster.
    pub users: usize,
    /// Watches of all components: nodes, operator, gateway, administrators.
    pub system: usize,
}

impl Default for WatchLimits {
    fn default() -> Self {
        // A watch takes a few KB: a cursor into the history, and a chunk that its client has not read.
        Self { per_user: 256, users: 4096, system: 32_768 }
    }
}

/// Which limit allows no further watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchLimit {
    /// That of the user.
    User(usize),
    /// That of all users of its class.
    All(usize),
}

impl WatchLimit {
    /// How many watches it allows.
    pub fn count(self) -> usize {
        match self {
            Self::User(count) | Self::All(count) => count,
        }
    }
}

/// Counts open watches.
#[derive(Debug)]
pub struct WatchLimiter {
    limits: WatchLimits,
    open: Mutex<HashMap<(UserClass, Arc<str>), usize>>,
}

/// One open watch.
#[derive(Debug)]
pub struct WatchPermit {
    limiter: Arc<WatchLimiter>,
    key: (UserClass, Arc<str>),
}

impl WatchLimiter {
    /// A limiter without watches.
    pub fn new(limits: WatchLimits) -> Arc<Self> {
        Arc::new(Self { limits, open: Mutex::default() })
    }

    /// Counts one more watch of this user, unless that exceeds a limit; then the limit is returned.
    pub fn open(self: &Arc<Self>, class: UserClass, user: &str) -> Result<WatchPermit, WatchLimit> {
        let key = (class, Arc::<str>::from(user));
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let own = open.get(&key).copied().unwrap_or_default();
        if own >= self.limits.per_user {
            return Err(WatchLimit::User(self.limits.per_user));
        }
        let is_system = |class: UserClass| class == UserClass::System;
        let all: usize = open
            .iter()
            .filter(|((other, _), _)| is_system(*other) == is_system(class))
            .map(|(_, count)| count)
            .sum();
        let most = if is_system(class) { self.limits.system } else { self.limits.users };
        if all >= most {
            return Err(WatchLimit::All(most));
        }
        open.insert(key.clone(), own + 1);
        drop(open);
        Ok(WatchPermit { limiter: self.clone(), key })
    }
}

impl Drop for WatchPermit {
    fn drop(&mut self) {
        let mut open = self.limiter.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_limited_by_user_and_in_all() {
        let limiter = WatchLimiter::new(WatchLimits { per_user: 2, users: 3, system: 1 });
        let open = |class, user| limiter.open(class, user);
        let own =
            [open(UserClass::Authenticated, "a").unwrap(), open(UserClass::Authenticated, "a").unwrap()];
        assert_eq!(open(UserClass::Authenticated, "a").unwrap_err(), WatchLimit::User(2));
        let other = open(UserClass::Authenticated, "b").unwrap();
        assert_eq!(open(UserClass::Authenticated, "c").unwrap_err(), WatchLimit::All(3));
        let node = open(UserClass::System, "node").unwrap();
        assert_eq!(open(UserClass::System, "node2").unwrap_err(), WatchLimit::All(1));
        drop(own);
        drop(open(UserClass::Authenticated, "a").unwrap());
        drop((other, node));
        assert!(limiter.open.lock().unwrap().is_empty(), "nothing is kept of users");
    }
}
