//! Rules for taking a Lease. Pure: the age of an observed state is an argument.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;

/// The observed state of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObservedLease {
    /// The holder; empty if there is none.
    pub(super) holder: String,
    /// Changes with every write.
    pub(super) version: String,
    /// Its duration without a renewal, as its holder wrote it.
    pub(super) duration: Option<Duration>,
}

impl ObservedLease {
    /// The state of a Lease.
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
    /// Take it.
    Take,
    /// Check again later.
    Wait,
}

/// Decides for a Lease that has been observed unchanged for `age`. The longer of the holder's and the
/// observer's own duration counts, so that two versions with different periods are safe together.
pub(super) fn decide(seen: &ObservedLease, identity: &str, age: Duration, own: Duration) -> LeaseAction {
    let free = seen.holder.is_empty() || seen.holder == identity;
    if free || age >= seen.duration.unwrap_or_default().max(own) {
        LeaseAction::Take
    } else {
        LeaseAction::Wait
    }
}
