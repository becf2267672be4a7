//! Limit on open files and sockets of this process: the defaults of shells are too low.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More than any Russet process opens, and as much as macOS grants.
const TARGET_LIMIT: u64 = 10_240;

/// Raises the soft limit as far as is allowed without privileges. If that fails, fewer connections fit.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    if let Some(current) = raised_limit(limit) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit });
    }
}

/// The files and sockets that this process may open.
pub fn current() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(TARGET_LIMIT);
    usize::try_from(limit).unwrap_or(usize::MAX)
}

fn raised_limit(limit: Rlimit) -> Option<u64> {
    let most = limit.maximum.unwrap_or(TARGET_LIMIT).min(TARGET_LIMIT);
    (limit.current? < most).then_some(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_allowed_and_never_lowered() {
        for (current, maximum, expected) in [
            (Some(256), None, Some(TARGET_LIMIT)),
            (Some(1024), Some(1_048_576), Some(TARGET_LIMIT)),
            (Some(1024), Some(4096), Some(4096)),
            (Some(4096), Some(4096), None),
            (Some(65_536), Some(1_048_576), None),
            (None, None, None),
        ] {
            assert_eq!(raised_limit(Rlimit { current, maximum }), expected, "{current:?} of {maximum:?}");
        }
        raise();
        assert_eq!(raised_limit(getrlimit(Resource::Nofile)), None);
        assert!(current() > 0);
    }
}
