//! When a Lease may be taken. Pure: how long a state has been seen is an argument.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;

/// What an observer remembers of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObservedLease {
    /// Who holds it; empty when nobody does.
    pub(super) holder: String,
    /// Changes with every write.
    pub(super) version: String,
    /// How long it lasts without a renewal, as its holder wrote.
    pub(super) duration: Option<Duration>,
}

impl ObservedLease {
    /// What there is to see.
    pub(super) fn from_lease(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            duration: seconds.map(Duration::from_secs),
        }
    }
}

/// What to do about a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseAction {
    /// Write ourselves into it.
    Take,
    /// Look again later.
    Wait,
}

/// Judges a Lease that has been seen unchanged for `age`. The longer of the holder's and the
/// observer's own duration counts, so that two versions with different periods are safe together.
pub(super) fn decide(seen: &ObservedLease, identity: &str, age: Duration, own: Duration) -> LeaseAction {
    let free = seen.holder.is_empty() || seen.holder == identity;
    if free || age >= seen.duration.unwrap_or_default().max(own) { LeaseAction::Take } else { LeaseAction::Wait }
}
