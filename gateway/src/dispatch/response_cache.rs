//! Answers to requests that were answered before, where the ModelRoute wants that: of requests whose answer is the same
//! each time, to the caller that had it first, and to nobody else. Of equal requests at once one is answered by an engine,
//! and the others wait for that. In memory, bounded by bytes; a gateway that restarts has none.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, header};
use moka::Expiry;
use moka::sync::Cache;
use parking_lot::Mutex;
use russet_wire::event::{Delta, FinishReason, GenerationEvent, PromptToken, Usage};
use russet_wire::request::{GenerationRequest, Sampling};
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_stream::shutdown_error;
use super::pending_request::PendingRequest;
use crate::error::GatewayError;
use crate::routes::{Deployment, ModelAlias, Resolution, Resolved, RoutingTable};

/// Bytes of the largest answer that is kept.
const MAX_ENTRY_BYTES: usize = 1 << 20;
/// Bytes of an event besides its texts.
const EVENT_BYTES: usize = size_of::<GenerationEvent>();

/// Bytes of the log-probabilities of a token, with some of the tokens beside it.
const LOGPROBS_BYTES: usize = 512;

/// Bytes of a token of a prompt, and of each one beside it.
const PROMPT_TOKEN_BYTES: usize = 96;

/// What a request says of answers that are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CacheUse {
    /// It takes one.
    #[default]
    Take,
    /// It wants a new one, which is kept.
    Refresh,
    /// It takes none, and leaves none.
    Never,
}

impl CacheUse {
    /// As the header `cache-control` says.
    pub(crate) fn of_headers(headers: &HeaderMap) -> Self {
        let text = headers.get(header::CACHE_CONTROL).and_then(|value| value.to_str().ok()).unwrap_or("");
        let has = |directive: &str| text.split(',').any(|one| one.trim().eq_ignore_ascii_case(directive));
        match (has("no-store"), has("no-cache")) {
            (true, _) => Self::Never,
            (false, true) => Self::Refresh,
            (false, false) => Self::Take,
        }
    }
}

/// SHA-256 of all that an answer depends on, and of who may have it.
type CacheKey = [u8; 32];

/// An answer, all of it.
#[derive(Debug)]
pub(super) struct CachedResponse {
    events: Vec<GenerationEvent>,
    bytes: usize,
    ttl: Duration,
    made: Instant,
}

impl CachedResponse {
    /// Its events. All of its prompt was cached, as it is billed.
    pub(super) fn events(&self) -> impl Iterator<Item = GenerationEvent> + use<> {
        self.events.clone().into_iter().map(|event| match event {
            GenerationEvent::Finished { reason, usage } => {
                GenerationEvent::Finished { reason, usage: all_cached(usage) }
            }
            other => other,
        })
    }

    /// How it ended.
    pub(super) fn end(&self) -> Option<(FinishReason, Usage)> {
        match self.events.last()? {
            GenerationEvent::Finished { reason, usage } => Some((*reason, all_cached(*usage))),
            _ => None,
        }
    }

    /// How old it is.
    pub(super) fn age(&self) -> Duration {
        self.made.elapsed()
    }
}

fn all_cached(usage: Usage) -> Usage {
    Usage { cached_tokens: usage.prompt_tokens, ..usage }
}

/// Each answer is kept as long as its route says.
struct ByRoute;

impl Expiry<CacheKey, Arc<CachedResponse>> for ByRoute {
    fn expire_after_create(
        &self,
        _: &CacheKey,
        response: &Arc<CachedResponse>,
        _: Instant,
    ) -> Option<Duration> {
        Some(response.ttl)
    }

    fn expire_after_update(
        &self,
        _: &CacheKey,
        response: &Arc<CachedResponse>,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(response.ttl)
    }
}

/// The answers, and which are on their way.
pub(super) struct ResponseCache {
    answers: Cache<CacheKey, Arc<CachedResponse>>,
    running: Mutex<HashMap<CacheKey, watch::Receiver<()>>>,
}

impl ResponseCache {
    /// A cache of so many bytes.
    pub(super) fn new(max_bytes: u64) -> Arc<Self> {
        let weight =
            |_: &CacheKey, response: &Arc<CachedResponse>| u32::try_from(response.bytes).unwrap_or(u32::MAX);
        let answers = Cache::builder().max_capacity(max_bytes).weigher(weight).expire_after(ByRoute).build();
        Arc::new(Self { answers, running: Mutex::default() })
    }

    /// Begins an answer; what to wait for where another request has begun it.
    fn lead(self: &Arc<Self>, key: CacheKey) -> Result<Leading, watch::Receiver<()>> {
        match self.running.lock().entry(key) {
            Entry::Occupied(running) => Err(running.get().clone()),
            Entry::Vacant(free) => {
                let (ended, running) = watch::channel(());
                free.insert(running);
                Ok(Leading { cache: self.clone(), key, _ended: ended })
            }
        }
    }
}

/// The request that others wait for; they go on when it is gone.
struct Leading {
    cache: Arc<ResponseCache>,
    key: CacheKey,
    _ended: watch::Sender<()>,
}

impl Drop for Leading {
    fn drop(&mut self) {
        self.cache.running.lock().remove(&self.key);
    }
}

/// Records the answer to a request, to keep it.
pub(super) struct ResponseRecording {
    leading: Leading,
    /// `namespace/name` of the deployment that has to answer.
    deployment: String,
    ttl: Duration,
    events: Vec<GenerationEvent>,
    bytes: usize,
}

impl ResponseRecording {
    /// Whether this deployment's answer is to be kept.
    pub(super) fn is_of(&self, deployment: Option<&str>) -> bool {
        deployment == Some(&self.deployment)
    }

    /// The next event; `None` where the answer is kept or too long. Others that wait go on then.
    pub(super) fn push(mut self, event: &GenerationEvent) -> Option<Self> {
        self.bytes += EVENT_BYTES + text_bytes(event);
        if self.bytes > MAX_ENTRY_BYTES {
            return None;
        }
        self.events.push(event.clone());
        if matches!(event, GenerationEvent::Finished { .. }) {
            let Self { leading, events, bytes, ttl, .. } = self;
            let response = CachedResponse { events, bytes, ttl, made: Instant::now() };
            leading.cache.answers.insert(leading.key, Arc::new(response));
            return None;
        }
        Some(self)
    }
}

fn text_bytes(event: &GenerationEvent) -> usize {
    let delta = match event {
        GenerationEvent::Prompt { tokens } => {
            let numbers =
                |token: &PromptToken| token.logprobs.as_ref().map_or(0, |logprobs| logprobs.top.len());
            return tokens.iter().map(|token| PROMPT_TOKEN_BYTES * (1 + numbers(token))).sum();
        }
        GenerationEvent::Token { delta, .. } => delta,
        GenerationEvent::Started { .. } | GenerationEvent::Finished { .. } | GenerationEvent::Failed(_) => {
            return 0;
        }
    };
    let Delta { text, reasoning, tool_calls, logprobs } = delta;
    let calls: usize =
        tool_calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len()).sum();
    text.len() + reasoning.len() + calls + logprobs.len() * LOGPROBS_BYTES
}

/// Whether a request is answered from the cache.
pub(super) enum CacheOutcome {
    /// It has nothing to do with it.
    Off,
    /// With this answer.
    Hit(Arc<CachedResponse>),
    /// It is not; its answer is kept.
    Miss(ResponseRecording),
}

impl Dispatcher {
    /// Looks for the answer to a request, and waits for it where another request has begun the same.
    pub(super) async fn cached(&self, pending: &PendingRequest) -> Result<CacheOutcome, GatewayError> {
        let table = self.table();
        let Some(Cacheable { alias, deployment, adapter, ttl }) = cacheable(&table, pending) else {
            return Ok(CacheOutcome::Off);
        };
        let mut request = pending.request.clone();
        deployment.defaults.complete(&mut request, &pending.asked);
        if !is_deterministic(&request) {
            return Ok(CacheOutcome::Off);
        }
        let key = key(&table, deployment, adapter, &pending.caller.owner(), request);
        loop {
            if pending.cache_use == CacheUse::Take
                && let Some(response) = self.response_cache.answers.get(&key)
            {
                self.metrics.response_cache("hit");
                pending.recorder().route(alias, pending.facts());
                return Ok(CacheOutcome::Hit(response));
            }
            let mut running = match self.response_cache.lead(key) {
                Ok(leading) => {
                    self.metrics.response_cache("miss");
                    let (deployment, events) = (deployment.full_name(), Vec::new());
                    return Ok(CacheOutcome::Miss(ResponseRecording {
                        leading,
                        deployment,
                        ttl,
                        events,
                        bytes: 0,
                    }));
                }
                // What it gets would be older than this request.
                Err(_) if pending.cache_use == CacheUse::Refresh => return Ok(CacheOutcome::Off),
                Err(running) => running,
            };
            // Its headers need not wait for it.
            pending.is_not_prepared();
            tokio::select! {
                () = async { while running.changed().await.is_ok() {} } => {}
                () = Deadline::passed(pending.deadline) => {}
                () = self.closing.cancelled() => return Err(shutdown_error()),
            }
            if let Some(deadline) = pending.deadline
                && deadline.remaining().is_none()
            {
                return Err(deadline.exceeded("an equal request had no answer by then"));
            }
        }
    }
}

/// Whose answers to a request are kept.
struct Cacheable<'t> {
    /// The name of the route that keeps them.
    alias: &'t ModelAlias,
    deployment: &'t Deployment,
    /// The adapter that answers; empty where the model itself does.
    adapter: &'t str,
    ttl: Duration,
}

/// Whose answers to this request are kept, if anybody's are.
fn cacheable<'t>(table: &'t RoutingTable, pending: &PendingRequest) -> Option<Cacheable<'t>> {
    if pending.cache_use == CacheUse::Never || table.aliases.is_empty() {
        return None;
    }
    let (model, scope) = (pending.model(), pending.scope());
    let Resolution { resolved, adapter, alias, .. } = table.resolve_request(model, scope, pending.facts());
    let (alias, _) = alias?;
    let ttl = alias.cache_ttl?;
    let Resolved::Targets(targets) = resolved else { return None };
    Some(Cacheable { alias, deployment: targets.first()?.deployment()?, adapter, ttl })
}

/// Whether the same request has the same answer each time. Tools make an agent of it, whose next request is another one.
fn is_deterministic(request: &GenerationRequest) -> bool {
    let sampling = &request.sampling;
    let is_greedy = sampling.temperature == 0.0 || sampling.top_k == 1;
    is_greedy && sampling.xtc_probability == 0.0 && request.tools.is_empty() && request.emitted.is_empty()
}

/// The key of an answer: all of the request but what changes no answer, with what answers it, and who has it.
fn key(
    table: &RoutingTable,
    deployment: &Deployment,
    adapter: &str,
    owner: &str,
    mut request: GenerationRequest,
) -> CacheKey {
    #[derive(Serialize)]
    struct Parts<'a> {
        owner: &'a str,
        deployment: String,
        /// The Model and what its files are known by, of the deployment and of the adapter.
        models: [(&'a str, &'a str); 2],
        request: &'a GenerationRequest,
    }
    request.id.clear();
    request.sampling.seed = None;
    // Of all tokens the most probable one is taken, however many are left to choose from.
    let Sampling { temperature, top_p, top_k, min_p, typical_p, .. } = Sampling::default();
    request.sampling = Sampling { temperature, top_p, top_k, min_p, typical_p, ..request.sampling };
    request.priority = 0;
    request.deadline_milliseconds = None;
    request.prefix_marks.clear();
    adapter.clone_into(&mut request.adapter);
    let model = |name: &'_ str| {
        let details = table.models.get(&(deployment.namespace.clone(), name.to_owned()));
        details.map_or("", |details| details.digest.as_str())
    };
    let adapter_model = deployment.adapters.get(adapter).map_or("", String::as_str);
    let parts = Parts {
        owner,
        deployment: deployment.full_name(),
        models: [(&deployment.model, model(&deployment.model)), (adapter_model, model(adapter_model))],
        request: &request,
    };
    // Only texts, numbers and lists: serialising them into memory cannot fail.
    Sha256::digest(serde_json::to_vec(&parts).unwrap_or_default()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str) -> GenerationEvent {
        GenerationEvent::Token { id: 1, delta: Delta::text(text) }
    }

    const USAGE: Usage = Usage { prompt_tokens: 7, completion_tokens: 2, cached_tokens: 0 };

    fn finished() -> GenerationEvent {
        GenerationEvent::Finished { reason: FinishReason::Stop, usage: USAGE }
    }

    fn recording(cache: &Arc<ResponseCache>, key: u8) -> ResponseRecording {
        let Ok(leading) = cache.lead([key; 32]) else { panic!("{key} is running") };
        let (deployment, ttl) = ("default/m".to_owned(), Duration::from_secs(60));
        ResponseRecording { leading, deployment, ttl, events: Vec::new(), bytes: 0 }
    }

    #[test]
    fn headers_say_whether_an_answer_is_taken() {
        for (value, expected) in [
            ("", CacheUse::Take),
            ("max-age=0", CacheUse::Take),
            ("max-age=0, No-Cache", CacheUse::Refresh),
            ("no-cache,no-store", CacheUse::Never),
        ] {
            let headers = HeaderMap::from_iter([(header::CACHE_CONTROL, value.parse().unwrap())]);
            assert_eq!(CacheUse::of_headers(&headers), expected, "{value}");
        }
        assert_eq!(CacheUse::of_headers(&HeaderMap::new()), CacheUse::Take);
    }

    #[test]
    fn only_whole_answers_of_bounded_size_are_kept() {
        let cache = ResponseCache::new(1 << 30);
        let begun = recording(&cache, 1).push(&token("a")).unwrap();
        assert!(cache.lead([1; 32]).is_err() && cache.answers.get(&[1; 32]).is_none());
        assert!(begun.push(&finished()).is_none());
        let kept = cache.answers.get(&[1; 32]).unwrap();
        let all_cached = Usage { cached_tokens: 7, ..USAGE };
        let expected =
            [token("a"), GenerationEvent::Finished { reason: FinishReason::Stop, usage: all_cached }];
        assert_eq!(kept.events().collect::<Vec<_>>(), expected);
        assert_eq!(kept.end(), Some((FinishReason::Stop, all_cached)));
        assert!(cache.running.lock().is_empty());
        // One that breaks off, and one that is too long, leave nothing and keep nobody waiting.
        drop(recording(&cache, 2).push(&token("a")));
        assert!(recording(&cache, 3).push(&token(&"a".repeat(MAX_ENTRY_BYTES))).is_none());
        assert!(cache.running.lock().is_empty());
        assert!(cache.answers.get(&[2; 32]).is_none() && cache.answers.get(&[3; 32]).is_none());
    }

    #[test]
    fn the_oldest_answers_make_room() {
        let cache = ResponseCache::new(1 << 20);
        for key in 0..64 {
            let text = token(&"a".repeat(100_000));
            assert!(recording(&cache, key).push(&text).unwrap().push(&finished()).is_none());
        }
        cache.answers.run_pending_tasks();
        assert!(cache.answers.weighted_size() <= 1 << 20 && cache.answers.entry_count() >= 8);
    }

    #[test]
    fn a_key_is_that_of_the_answer_and_of_who_has_it() {
        let deployment = |name: &str| Deployment {
            adapters: [("a".to_owned(), "m-a".to_owned())].into(),
            ..crate::routes::fixtures::deployment("default", name)
        };
        let table = RoutingTable::default();
        let base = GenerationRequest { id: "1".into(), ..GenerationRequest::default() };
        let of = |deployment: &Deployment, adapter: &str, owner: &str, request: &GenerationRequest| {
            key(&table, deployment, adapter, owner, request.clone())
        };
        let (m, other) = (deployment("m"), deployment("n"));
        let first = of(&m, "", "default/anna", &base);
        let mut same = GenerationRequest {
            id: "2".into(),
            priority: -5,
            deadline_milliseconds: Some(3),
            ..base.clone()
        };
        same.sampling.seed = Some(8);
        assert_eq!(of(&m, "", "default/anna", &same), first);
        (same.sampling.temperature, same.sampling.top_k, same.sampling.top_p) = (1.0, 1, 0.5);
        assert_eq!(of(&m, "", "default/anna", &same), first);
        let longer = GenerationRequest { max_tokens: Some(9), ..base.clone() };
        let salted = GenerationRequest { cache_salt: "s".into(), ..base.clone() };
        let mut known = table.clone();
        let details = crate::routes::ModelDetails { digest: "d".into(), ..Default::default() };
        known.models.insert(("default".into(), "small".into()), details);
        for (case, found) in [
            ("another deployment", of(&other, "", "default/anna", &base)),
            ("an adapter", of(&m, "a", "default/anna", &base)),
            ("another caller", of(&m, "", "default/berta", &base)),
            ("another length", of(&m, "", "default/anna", &longer)),
            ("another salt", of(&m, "", "default/anna", &salted)),
            ("other files of the Model", key(&known, &m, "", "default/anna", base.clone())),
        ] {
            assert_ne!(found, first, "{case}");
        }
    }

    #[test]
    fn only_requests_with_one_answer_are_kept() {
        let request = |change: &dyn Fn(&mut GenerationRequest)| {
            let mut request = GenerationRequest::default();
            change(&mut request);
            is_deterministic(&request)
        };
        assert!(request(&|_| {}));
        assert!(request(&|one| (one.sampling.temperature, one.sampling.top_k) = (1.0, 1)));
        assert!(!request(&|one| one.sampling.temperature = 0.1));
        assert!(!request(&|one| one.sampling.xtc_probability = 0.1));
        assert!(!request(&|one| one.tools.push(Default::default())));
        assert!(!request(&|one| one.emitted.push(1)));
    }
}
