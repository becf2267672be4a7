//! Follows the routing table: closes the channels of engines that it no longer has, and follows what those engines say of
//! themselves among which requests choose, each for as long as it is there: replicas of one deployment, and deployments that
//! a ModelRoute compares with its other targets.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use russet_rpc::engine::{PrefixesEvent, PrefixesRequest};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;
use tonic::Code;

use super::{Backends, EngineChannel, EngineView, PrefixFeed};
use crate::routes::{Endpoint, RoutingTable};

/// How long until an engine whose stream has ended is asked again, the first time and at most.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Follows engines; never returns.
pub(crate) async fn follow(backends: Arc<Backends>, mut table: watch::Receiver<Arc<RoutingTable>>) {
    // All tasks end with this function.
    let mut tasks = JoinSet::new();
    let mut followed: HashMap<Endpoint, AbortHandle> = HashMap::new();
    loop {
        let latest = table.borrow_and_update().clone();
        backends.prune(&latest);
        let wanted = compared(&latest);
        followed.retain(|endpoint, task| {
            let is_wanted = wanted.contains(endpoint);
            if !is_wanted {
                task.abort();
            }
            is_wanted
        });
        for endpoint in wanted {
            if !followed.contains_key(endpoint) {
                let task = tasks.spawn(follow_engine(backends.clone(), endpoint.clone()));
                followed.insert(endpoint.clone(), task);
            }
        }
        tokio::select! {
            Ok(()) = table.changed() => {}
            Some(_) = tasks.join_next() => {}
            // Neither changes nor engines are left.
            else => std::future::pending().await,
        }
    }
}

/// The engines among which requests choose by what they say.
fn compared(table: &RoutingTable) -> HashSet<&Endpoint> {
    let routes = table.aliases.iter().map(|alias| (alias.namespace.as_str(), &alias.policy));
    let named: HashSet<(&str, &str)> = routes
        .flat_map(|(namespace, policy)| policy.scored_deployments().map(move |name| (namespace, name)))
        .collect();
    let several = table.deployments.iter().filter(|deployment| {
        deployment.endpoints.len() > 1 || named.contains(&(&*deployment.namespace, &*deployment.name))
    });
    several.flat_map(|deployment| &deployment.endpoints).collect()
}

/// Follows one engine until the task is aborted.
async fn follow_engine(backends: Arc<Backends>, endpoint: Endpoint) {
    let mut backoff = MIN_BACKOFF;
    loop {
        match read(&backends, &endpoint).await {
            Ok(()) => backoff = MIN_BACKOFF,
            // A model that embeds, or an engine of another release: it may be another one some day.
            Err(Code::FailedPrecondition | Code::Unimplemented) => backoff = MAX_BACKOFF,
            Err(code) => {
                tracing::debug!(node = &*endpoint.node, ?code, "an engine does not tell what it has cached")
            }
        }
        sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// What one stream told: forgotten with it, since it may have changed. An earlier stream that has not ended yet tells nothing
/// any more.
struct FeedOfStream {
    engine: Arc<Mutex<EngineView>>,
    number: u64,
}

impl FeedOfStream {
    fn new(engine: Arc<Mutex<EngineView>>) -> Self {
        let mut view = engine.lock();
        view.stream += 1;
        view.feed = PrefixFeed::default();
        let number = view.stream;
        drop(view);
        Self { engine, number }
    }

    fn apply(&self, event: PrefixesEvent) {
        let mut view = self.engine.lock();
        if view.stream == self.number {
            view.feed.apply(event);
        }
    }
}

impl Drop for FeedOfStream {
    fn drop(&mut self) {
        let mut view = self.engine.lock();
        if view.stream == self.number {
            view.feed = PrefixFeed::default();
        }
    }
}

/// Reads the stream of an engine until it ends.
async fn read(backends: &Backends, endpoint: &Endpoint) -> Result<(), Code> {
    let EngineChannel { mut client, engine } =
        backends.channel(endpoint).map_err(|_| Code::Unauthenticated)?;
    let mut events = client.prefixes(PrefixesRequest {}).await.map_err(|status| status.code())?.into_inner();
    let feed = FeedOfStream::new(engine);
    while let Ok(Some(event)) = events.message().await {
        feed.apply(event);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_stream_of_an_engine_counts() {
        let engine: Arc<Mutex<EngineView>> = Arc::default();
        let load = |running| russet_rpc::engine::EngineLoad { running, ..Default::default() };
        let event = |running| PrefixesEvent { load: Some(load(running)), ..Default::default() };
        let first = FeedOfStream::new(engine.clone());
        first.apply(event(1));
        assert_eq!(engine.lock().feed.load(), load(1));
        // Its route went and came again before its task had ended.
        let second = FeedOfStream::new(engine.clone());
        assert_eq!(engine.lock().feed.load(), load(0));
        second.apply(event(2));
        first.apply(event(3));
        drop(first);
        assert_eq!(engine.lock().feed.load(), load(2));
        drop(second);
        assert_eq!(engine.lock().feed.load(), load(0));
    }
}
