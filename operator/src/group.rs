//! ShardGroups: one Shard per rank, peers once all have claimed, a higher epoch when one is lost, and the
//! endpoint once all serve. Not here: its placement, which its deployment decides.

mod apply;
mod decide;
mod energy;
mod observe;
mod report;
mod status;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use russet_crds::ShardGroup;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;

pub use apply::operator_fields;
pub use observe::missing_files;

/// Retry delay while a cache lags.
const STALE: Duration = Duration::from_secs(1);

/// Why a group could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// A Shard was not written or deleted.
    #[error("ShardGroup {group}: Shard {shard} could not be changed")]
    Shard {
        /// The group.
        group: String,
        /// The Shard.
        shard: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The epoch was not written.
    #[error("ShardGroup {group}: epoch {epoch} could not be written")]
    Epoch {
        /// The group.
        group: String,
        /// The epoch.
        epoch: i64,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The status was not written.
    #[error("ShardGroup {group}: its status could not be written")]
    Report {
        /// The group.
        group: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one group.
pub async fn reconcile(group: Arc<ShardGroup>, context: Arc<Context>) -> Result<Action, Error> {
    if group.metadata.deletion_timestamp.is_some() {
        // Its Shards are deleted with it, by their owner references.
        return Ok(requeue_after([]));
    }
    let now = Timestamp::now();
    let observed = observe::observe(&context, &group, now);
    if observed.is_stale() {
        // The group's own watch event is on its way; if it does not come, a second is soon enough.
        return Ok(requeue_after([Some(STALE)]));
    }
    let planned = decide::decide(&observed, now);
    // The report first: why an epoch ended is known only until the next one begins.
    let group = report::report(&context, &observed, &planned).await?;
    apply::apply(&context, &observed, &group, &planned, now).await?;
    Ok(requeue_after([planned.requeue_after, observed.until_lost]))
}
