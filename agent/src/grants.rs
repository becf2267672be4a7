//! Memory grants of this node: no byte is granted twice, and none is released before the process that used it
//! has exited. Bookkeeping only. Not here: measuring and killing.

use std::collections::BTreeMap;

use russet_plan::quantity;
use thiserror::Error;

/// The default reserve for user and system is the memory divided by this: the share that macOS itself
/// withholds from the GPU on larger machines.
const USER_SHARE: u64 = 4;
/// Maximum default reserve, however large the machine.
const MAX_USER_RESERVE: u64 = 32 << 30;

/// Memory of the machine and its bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Installed bytes, or the simulated size.
    pub total: u64,
    /// The owner's limit for all models together.
    pub serving: Option<u64>,
    /// Bytes that the owner reserves for the machine's user.
    pub user_reserve: Option<u64>,
}

impl MemoryLimits {
    /// Bytes that all Shards together may use.
    pub fn serving_limit(&self) -> u64 {
        let reserve = self.user_reserve.unwrap_or((self.total / USER_SHARE).min(MAX_USER_RESERVE));
        let limit = self.total.saturating_sub(reserve);
        self.serving.map_or(limit, |serving| serving.min(limit))
    }
}

/// Insufficient memory.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GrantRefusal {
    /// The limit would be exceeded.
    #[error(
        "needs {} ({needed} bytes), but of the {} models may take here {} are granted already; free {} or raise the node's spec.memory.servingLimit",
        quantity::write(*.needed), quantity::write(*.limit), quantity::write(*.granted),
        quantity::write(.needed.saturating_sub(.limit.saturating_sub(*.granted)))
    )]
    Limit {
        /// Bytes requested.
        needed: u64,
        /// Bytes that models may use in total.
        limit: u64,
        /// Bytes granted to others.
        granted: u64,
    },
    /// The limit allows it, but other programs use the memory.
    #[error(
        "needs {} ({needed} bytes), but only {} are free: {} available, {} of it reserved for engines that are still loading; close other programs or set spec.memory.userReserve",
        quantity::write(*.needed), quantity::write(.available.saturating_sub(*.promised)),
        quantity::write(*.available), quantity::write(*.promised)
    )]
    Available {
        /// Bytes requested.
        needed: u64,
        /// Bytes available according to the system.
        available: u64,
        /// Bytes granted but not in use yet.
        promised: u64,
    },
}

/// All grants, by holder.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    grants: BTreeMap<String, Grant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Grant {
    bytes: u64,
    used: u64,
}

impl Grants {
    /// Grants `bytes` to `holder`, or refuses. The holder's earlier grant counts as free: it requests the
    /// same memory again, and the part it already uses need not be available a second time.
    pub fn grant(
        &mut self,
        holder: &str,
        bytes: u64,
        limits: &MemoryLimits,
        available: u64,
    ) -> Result<(), GrantRefusal> {
        let others = self.grants.iter().filter(|(other, _)| *other != holder);
        let granted: u64 = others.clone().map(|(_, grant)| grant.bytes).sum();
        let promised: u64 = others.map(|(_, grant)| grant.bytes.saturating_sub(grant.used)).sum();
        let limit = limits.serving_limit();
        if bytes > limit.saturating_sub(granted) {
            return Err(GrantRefusal::Limit { needed: bytes, limit, granted });
        }
        let used = self.grants.get(holder).map_or(0, |grant| grant.used);
        if bytes.saturating_sub(used) > available.saturating_sub(promised) {
            return Err(GrantRefusal::Available { needed: bytes, available, promised });
        }
        self.grants.insert(holder.to_owned(), Grant { bytes, used });
        Ok(())
    }

    /// Restores the grant of a process that an earlier run of the agent started.
    pub fn restore(&mut self, holder: &str, bytes: u64) {
        self.grants.insert(holder.to_owned(), Grant { bytes, used: 0 });
    }

    /// Records how many bytes of its grant a holder uses, so that they do not count as still to come.
    pub fn set_used(&mut self, holder: &str, used: u64) {
        if let Some(grant) = self.grants.get_mut(holder) {
            grant.used = used;
        }
    }

    /// Releases a grant; only for holders whose process has exited.
    pub fn release(&mut self, holder: &str) {
        self.grants.remove(holder);
    }

    /// Total bytes granted.
    pub fn total(&self) -> u64 {
        self.grants.values().map(|grant| grant.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: MemoryLimits = MemoryLimits { total: 1000, serving: Some(600), user_reserve: Some(100) };

    #[test]
    fn the_smallest_bound_wins() {
        for (total, serving, user_reserve, limit) in [
            (1000, None, None, 750),
            (1000, Some(600), Some(100), 600),
            (1000, Some(950), Some(100), 900),
            (1000, None, Some(2000), 0),
            (512 << 30, None, None, 480 << 30),
        ] {
            assert_eq!(MemoryLimits { total, serving, user_reserve }.serving_limit(), limit);
        }
    }

    #[test]
    fn no_byte_is_granted_twice() {
        let mut grants = Grants::default();
        grants.grant("a", 400, &LIMITS, 10_000).unwrap();
        let refusal = grants.grant("b", 300, &LIMITS, 10_000).unwrap_err();
        assert_eq!(refusal, GrantRefusal::Limit { needed: 300, limit: 600, granted: 400 });
        assert!(
            refusal.to_string().contains("300 bytes") && refusal.to_string().contains("free 100"),
            "{refusal}"
        );
        grants.grant("a", 500, &LIMITS, 10_000).unwrap();
        assert_eq!(grants.total(), 500);
        grants.release("a");
        grants.grant("b", 600, &LIMITS, 10_000).unwrap();
    }

    #[test]
    fn granted_but_unused_memory_is_not_available() {
        let mut grants = Grants::default();
        grants.grant("a", 300, &LIMITS, 500).unwrap();
        let refusal = GrantRefusal::Available { needed: 250, available: 500, promised: 300 };
        assert_eq!(grants.grant("b", 250, &LIMITS, 500), Err(refusal));
        grants.set_used("a", 300);
        grants.grant("b", 250, &LIMITS, 250).unwrap();
    }

    #[test]
    fn renewed_grant_with_a_live_process_counts_once() {
        let mut grants = Grants::default();
        grants.grant("a", 500, &LIMITS, 500).unwrap();
        grants.set_used("a", 450);
        let refusal = GrantRefusal::Available { needed: 500, available: 40, promised: 0 };
        assert_eq!(grants.grant("a", 500, &LIMITS, 40), Err(refusal));
        grants.grant("a", 500, &LIMITS, 60).unwrap();
        assert_eq!(grants.total(), 500);
        // The used part does not count as still to come.
        grants.grant("b", 50, &LIMITS, 100).unwrap();
        // Its process has exited.
        grants.set_used("a", 0);
        assert!(grants.grant("a", 500, &LIMITS, 60).is_err());
    }
}
