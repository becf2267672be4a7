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
        let limit = self.total.saturating_sub(self.reserve());
        self.serving.map_or(limit, |serving| serving.min(limit))
    }

    /// Bytes set aside for the machine's user and system.
    fn reserve(&self) -> u64 {
        self.user_reserve.unwrap_or((self.total / USER_SHARE).min(MAX_USER_RESERVE))
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
        "needs {} ({needed} bytes), but only {} are free: {} available, {} of it reserved for engines that are still loading; {}",
        quantity::write(*.needed), quantity::write(.available.saturating_sub(*.promised)),
        quantity::write(*.available), quantity::write(*.promised), .others.remedy()
    )]
    Available {
        /// Bytes requested.
        needed: u64,
        /// Bytes available according to the system.
        available: u64,
        /// Bytes granted but not in use yet.
        promised: u64,
        /// What the machine's other programs use.
        others: OtherPrograms,
    },
}

/// Memory of programs that are no engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherPrograms {
    /// Bytes in use.
    pub used: u64,
    /// Bytes that are set aside for them, and that the planner therefore leaves alone.
    pub reserved: u64,
}

impl OtherPrograms {
    /// A larger reserve frees nothing, but nothing is placed here any more that does not fit.
    fn remedy(self) -> String {
        match self.used > self.reserved {
            true => format!(
                "other programs use {}, and {} are set aside for them: close some, or set the node's spec.memory.userReserve to {}, so that less is placed here",
                quantity::write(self.used),
                quantity::write(self.reserved),
                quantity::write(self.used)
            ),
            false => "close other programs".to_owned(),
        }
    }
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
            let engines: u64 = self.grants.values().map(|grant| grant.used).sum();
            let used = limits.total.saturating_sub(available).saturating_sub(engines);
            let others = OtherPrograms { used, reserved: limits.reserve() };
            return Err(GrantRefusal::Available { needed: bytes, available, promised, others });
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
        let others = OtherPrograms { used: 500, reserved: 100 };
        let refusal = GrantRefusal::Available { needed: 250, available: 500, promised: 300, others };
        assert_eq!(grants.grant("b", 250, &LIMITS, 500), Err(refusal.clone()));
        assert!(refusal.to_string().contains("other programs use 500, and 100 are set aside"), "{refusal}");
        assert!(refusal.to_string().contains("userReserve to 500"), "{refusal}");
        grants.set_used("a", 300);
        grants.grant("b", 250, &LIMITS, 250).unwrap();
    }

    #[test]
    fn renewed_grant_with_a_live_process_counts_once() {
        let mut grants = Grants::default();
        grants.grant("a", 500, &LIMITS, 500).unwrap();
        grants.set_used("a", 450);
        let others = OtherPrograms { used: 510, reserved: 100 };
        let refusal = GrantRefusal::Available { needed: 500, available: 40, promised: 0, others };
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
