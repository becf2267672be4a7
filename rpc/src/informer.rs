//! A watch of one kind that never ends: lists its objects, follows their changes, and lists again after every
//! loss. kube's watcher with three differences: an object that cannot be decoded is an item of its own
//! ([`ListItem`]), what is wrong is told ([`CacheStatus`]), and a watch that the server keeps refusing begins
//! anew with a list. Not here: the cache itself, which each process keeps in its own form.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _};
use kube::runtime::watcher::{self, Error, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use crate::cache_status::CacheStatus;
use crate::list_item::ListItem;

/// Seconds of one watch. A server that disappeared without closing the connection is detected when a watch
/// exceeds this.
pub const WATCH_SECONDS: u32 = 60;
/// Pause after the first failure. Short, because a restarted API server is back within seconds.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Doublings of the pause: the longest is two seconds. Informers are few, and cannot overload a server.
const MAX_DOUBLINGS: u32 = 3;
/// Refusals in a row after which the objects are listed anew. kube's watcher keeps its resourceVersion on any
/// refusal but 410, and a server whose store went back refuses that version for as long as it is in the
/// future.
const MAX_REFUSALS: u32 = 3;

/// The changes of a kind, for ever. Failures are noted in `status` and retried.
pub fn changes<K>(
    api: Api<ListItem<K>>,
    config: watcher::Config,
    status: CacheStatus,
) -> impl Stream<Item = Event<ListItem<K>>> + Send
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let kind = K::kind(&()).into_owned();
    status.start(&kind, Instant::now());
    let config = config.timeout(WATCH_SECONDS);
    let informer = Informer { api, config, status, kind, stream: None, failures: Failures::default() };
    futures::stream::unfold(informer, |mut informer| async { Some((informer.next().await, informer)) })
}

struct Informer<K> {
    api: Api<ListItem<K>>,
    config: watcher::Config,
    status: CacheStatus,
    kind: String,
    stream: Option<BoxStream<'static, Result<Event<ListItem<K>>, Error>>>,
    failures: Failures,
}

impl<K> Informer<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    async fn next(&mut self) -> Event<ListItem<K>> {
        loop {
            let stream =
                self.stream.get_or_insert_with(|| watcher(self.api.clone(), self.config.clone()).boxed());
            match stream.next().await {
                Some(Ok(event)) => {
                    // `Init` comes before the server is asked.
                    if !matches!(event, Event::Init) {
                        self.failures = Failures::default();
                    }
                    return event;
                }
                Some(Err(error)) => {
                    self.status.failed(&self.kind, describe(&error), Instant::now());
                    tracing::debug!(kind = self.kind, %error, "the watch broke and is resumed");
                    let (pause, anew) = self.failures.add(refused(&error));
                    if anew {
                        self.stream = None;
                    }
                    tokio::time::sleep(pause).await;
                }
                None => self.stream = None,
            }
        }
    }
}

/// Failures since the last event.
#[derive(Default)]
struct Failures {
    count: u32,
    refusals: u32,
}

impl Failures {
    /// Counts one more: the pause until the next attempt, and whether that begins with a list.
    fn add(&mut self, refused: bool) -> (Duration, bool) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.count.min(MAX_DOUBLINGS));
        self.count = self.count.saturating_add(1);
        self.refusals = if refused { self.refusals.saturating_add(1) } else { 0 };
        let anew = self.refusals >= MAX_REFUSALS;
        if anew {
            self.refusals = 0;
        }
        (pause, anew)
    }
}

/// Whether the server answered, and refused to watch from this version.
fn refused(error: &Error) -> bool {
    match error {
        Error::WatchStartFailed(kube::Error::Api(_)) | Error::WatchError(_) => true,
        Error::WatchFailed(kube::Error::Api(_)) => true,
        Error::InitialListFailed(_)
        | Error::WatchStartFailed(_)
        | Error::WatchFailed(_)
        | Error::NoResourceVersion => false,
    }
}

/// The error with its causes, in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use k8s_openapi::api::coordination::v1::Lease;
    use kube::ResourceExt as _;
    use kube::client::Body;

    use super::*;

    /// An API server that answers requests by these texts in turn, and none after the last; and what was asked.
    fn server(answers: Vec<(u16, String)>) -> (kube::Client, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answers = Arc::new(Mutex::new(answers.into_iter()));
        let heard = asked.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let watches = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            heard.lock().unwrap().push(if watches { "watch" } else { "list" }.to_owned());
            let answer = answers.lock().unwrap().next();
            async move {
                match answer {
                    Some((status, text)) => {
                        let body = Body::from(text.into_bytes());
                        Ok::<_, std::io::Error>(Response::builder().status(status).body(body).unwrap())
                    }
                    None => std::future::pending().await,
                }
            }
        });
        (kube::Client::new(service, "default"), asked)
    }

    fn lease(name: &str, levels: usize) -> String {
        let (open, close) = (r#"{"f:a":"#.repeat(levels), "}".repeat(levels));
        format!(
            r#"{{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {{"name": "{name}", "namespace": "n", "resourceVersion": "7", "managedFields": [{{"manager": "m", "operation": "Update", "fieldsV1": {open}{{}}{close}}}]}}}}"#
        )
    }

    fn list(items: &[String]) -> (u16, String) {
        let items = items.join(", ");
        let text = format!(
            r#"{{"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1", "metadata": {{"resourceVersion": "9"}}, "items": [{items}]}}"#
        );
        (200, text)
    }

    /// The next events, each as its name, and `?` for what cannot be decoded.
    async fn events(
        stream: &mut (impl Stream<Item = Event<ListItem<Lease>>> + Unpin),
        status: &CacheStatus,
        count: usize,
    ) -> Vec<String> {
        let mut shown = Vec::new();
        while shown.len() < count {
            let event = stream.next().await.unwrap();
            status.observe(&event);
            let item = |word: &str, item: &ListItem<Lease>| {
                let mark = if item.0.is_ok() { "" } else { "?" };
                format!("{word} {}{mark}", item.name_any())
            };
            shown.push(match &event {
                Event::Init => "init".to_owned(),
                Event::InitApply(listed) => item("lists", listed),
                Event::InitDone => "done".to_owned(),
                Event::Apply(changed) => item("applies", changed),
                Event::Delete(gone) => item("deletes", gone),
            });
        }
        shown
    }

    #[tokio::test]
    async fn an_undecodable_object_stops_no_list_and_no_watch() {
        let watched = format!(
            "{{\"type\":\"MODIFIED\",\"object\":{}}}\n{{\"type\":\"ADDED\",\"object\":{}}}\n",
            lease("a", 200),
            lease("c", 1)
        );
        let (client, asked) =
            server(vec![list(&[lease("a", 1), lease("deep", 200), lease("b", 1)]), (200, watched)]);
        let status = CacheStatus::default();
        let changes = changes::<Lease>(Api::all(client), watcher::Config::default(), status.clone());
        let mut changes = Box::pin(changes);
        assert_eq!(
            events(&mut changes, &status, 7).await,
            ["init", "lists a", "lists deep?", "lists b", "done", "applies a?", "applies c"]
        );
        assert_eq!(*asked.lock().unwrap(), ["list", "watch"]);
    }

    #[tokio::test]
    async fn a_watch_refused_three_times_lists_anew() {
        let refusal = r#"{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "Too large resource version", "reason": "Timeout", "code": 504}"#;
        let refused = || (504, refusal.to_owned());
        let first = list(&[lease("lost", 1)]);
        let (client, asked) = server(vec![first, refused(), refused(), refused(), list(&[lease("kept", 1)])]);
        let status = CacheStatus::default();
        let changes = changes::<Lease>(Api::all(client), watcher::Config::default(), status.clone());
        let mut changes = Box::pin(changes);
        assert_eq!(
            events(&mut changes, &status, 6).await,
            ["init", "lists lost", "done", "init", "lists kept", "done"]
        );
        assert_eq!(*asked.lock().unwrap(), ["list", "watch", "watch", "watch", "list"]);
    }

    #[test]
    fn a_watch_that_is_refused_lists_anew_after_three_times() {
        let mut failures = Failures::default();
        let attempts: Vec<(u128, bool)> = [true, true, true, true, false, true, true]
            .map(|refused| failures.add(refused))
            .map(|(pause, anew)| (pause.as_millis(), anew))
            .to_vec();
        let pauses = [250, 500, 1000, 2000, 2000, 2000, 2000];
        let anew = [false, false, true, false, false, false, false];
        assert_eq!(attempts, pauses.into_iter().zip(anew).collect::<Vec<_>>());
    }
}
