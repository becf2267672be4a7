//! Compacts etcd's history. All servers wake at the same interval and try to write the revision they saw into
//! one key. The winner compacts to the revision of its own last attempt, so that one interval of history
//! always remains. There is no leader election: a server that loses only learns the key's version.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Txn, TxnOp, TxnOpResponse};

use super::EtcdShared;
use super::members::EtcdFailure;

/// The key that holds the revision.
const KEY: &str = "/compaction";

/// State of a server since its last attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CompactionState {
    /// The key's version.
    version: i64,
    /// etcd's revision at that time.
    revision: i64,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug)]
struct CompactionReply {
    won: bool,
    /// The key's version when another server won.
    version: i64,
    revision: i64,
}

/// The new state, and the revision to compact to, if any.
fn decide(last: CompactionState, answer: CompactionReply) -> (CompactionState, Option<i64>) {
    if !answer.won {
        // Another server compacts this time.
        return (CompactionState { version: answer.version, revision: answer.revision }, None);
    }
    let next = CompactionState { version: last.version + 1, revision: answer.revision };
    (next, (last.revision > 0).then_some(last.revision))
}

/// Tries to compact every `period`.
pub(super) async fn run(shared: Arc<EtcdShared>, period: Duration) {
    let mut last = CompactionState::default();
    loop {
        tokio::time::sleep(period).await;
        match try_compact(&shared, last).await {
            Ok(next) => last = next,
            Err(failure) => {
                tracing::warn!(?failure, "etcd's history could not be compacted; this is retried")
            }
        }
    }
}

async fn try_compact(shared: &EtcdShared, last: CompactionState) -> Result<CompactionState, EtcdFailure> {
    let key = shared.key(KEY);
    let compare = Compare::version(key.clone(), CompareOp::Equal, last.version);
    let put = TxnOp::put(key.clone(), last.revision.to_string(), None);
    let txn = Txn::new().when([compare]).and_then([put]).or_else([TxnOp::get(key, None)]);
    let answer = shared
        .members
        .request(|mut kv| {
            let txn = txn.clone();
            async move { kv.txn(txn).await }
        })
        .await?;
    let version = answer.value.op_responses().into_iter().find_map(|response| match response {
        TxnOpResponse::Get(got) => got.kvs().first().map(etcd_client::KeyValue::version),
        _ => None,
    });
    let answer = CompactionReply {
        won: answer.value.succeeded(),
        version: version.unwrap_or_default(),
        revision: answer.value.header().map_or(0, |header| header.revision()),
    };
    let (next, upto) = decide(last, answer);
    if let Some(revision) = upto {
        let compacted =
            shared.members.request(|mut kv| async move { kv.compact(revision, None).await }).await;
        match compacted {
            Ok(_) => tracing::debug!(revision, "etcd's history was compacted"),
            // Another tool has compacted before.
            Err(EtcdFailure::Compacted) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_winner_compacts_to_its_previous_revision() {
        let won = |revision| CompactionReply { won: true, version: 0, revision };
        let lost = |version, revision| CompactionReply { won: false, version, revision };
        let (first, none) = decide(CompactionState::default(), won(100));
        assert_eq!(
            (first, none),
            (CompactionState { version: 1, revision: 100 }, None),
            "a first turn knows no earlier one"
        );
        let (second, upto) = decide(first, won(250));
        assert_eq!((second, upto), (CompactionState { version: 2, revision: 250 }, Some(100)));
        let (other, none) = decide(CompactionState::default(), lost(2, 251));
        assert_eq!(
            (other, none),
            (CompactionState { version: 2, revision: 251 }, None),
            "it has learnt the version"
        );
        assert_eq!(decide(other, won(400)).1, Some(251), "and takes over when the winner is gone");
    }
}
