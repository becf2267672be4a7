//! A gRPC channel per engine and worker, open for the engine's lifetime; this gateway's requests in flight to each engine,
//! what each says of itself, and so which of several is expected to answer a request first. Not here: which deployment serves
//! a request, see `routes`.

mod follow;
mod prefix_feed;
mod score;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls::{TlsError, TlsFiles};
use russet_wire::prefix_mark::PrefixMark;
use tonic::transport::Channel;

use crate::routes::{Endpoint, RoutingTable};
use crate::serving::Session;
use crate::workers;
pub(crate) use follow::follow;
use prefix_feed::{CachedPrefix, PrefixFeed};
pub(crate) use score::ReplicaScore;
use score::{NewRequest, ReplicaState};

/// Tokens of an answer where no engine has given one yet.
const ANSWER_TOKENS: f64 = 256.0;
/// Weight of the latest answer in the average.
const LATEST_ANSWER: f64 = 0.1;
/// Tokens per byte of a prompt of which nothing is cached.
const TOKENS_PER_BYTE: f64 = 0.25;
/// Replicas whose scores differ by less, as a share or in milliseconds, are equals.
const EQUAL_SHARE: f64 = 0.02;
const EQUAL_MILLISECONDS: f64 = 1.0;

/// How one of several replicas is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicaChoice {
    /// Where the request is expected to take the least time, by what engines have cached and have to do.
    #[default]
    ExpectedTime,
    /// Where the fewest requests of this gateway are: what others do, for comparison.
    LeastRequests,
}

/// Channels to engines.
pub struct Backends {
    identity: TlsFiles,
    choice: ReplicaChoice,
    engines: Mutex<HashMap<Endpoint, KnownEngine>>,
    /// Requests sent so far.
    sent: AtomicU64,
}

/// An engine that was sent a request.
#[derive(Default)]
struct KnownEngine {
    /// Of each worker that sends to it, by the worker's number.
    clients: Vec<Option<EngineClient<Channel>>>,
    view: Arc<Mutex<EngineView>>,
}

/// An engine, and the channel of the worker that runs this.
struct EngineChannel {
    client: EngineClient<Channel>,
    engine: Arc<Mutex<EngineView>>,
}

/// What this gateway knows of an engine.
#[derive(Default)]
struct EngineView {
    in_flight: usize,
    /// Tokens of prompts that it was sent and has not begun to answer.
    unread_tokens: u64,
    /// Tokens of its answers, on average.
    answer_tokens: Option<f64>,
    /// The number of the last request that it was sent; 0 for none.
    last_sent: u64,
    feed: PrefixFeed,
    /// The number of the stream that tells the feed.
    stream: u64,
}

/// Counts one request in flight to an engine; released on drop.
pub struct InFlightGuard {
    engine: Arc<Mutex<EngineView>>,
    /// Tokens of its prompt that count as unread.
    unread_tokens: u64,
}

impl InFlightGuard {
    /// So many tokens of its prompt have to be read before its answer begins.
    pub(crate) fn reading(&mut self, tokens: u64) {
        let mut engine = self.engine.lock();
        engine.unread_tokens = engine.unread_tokens + tokens - self.unread_tokens;
        self.unread_tokens = tokens;
    }

    /// It is complete, with so many tokens.
    pub(crate) fn answered(&self, tokens: u32) {
        let mut engine = self.engine.lock();
        let (latest, before) = (f64::from(tokens), engine.answer_tokens);
        engine.answer_tokens =
            Some(before.map_or(latest, |before| before + (latest - before) * LATEST_ANSWER));
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut engine = self.engine.lock();
        engine.in_flight -= 1;
        engine.unread_tokens -= self.unread_tokens;
    }
}

/// What the endpoints are ranked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankedPrompt<'a> {
    /// Marks of the prompt.
    pub(crate) marks: &'a [PrefixMark],
    /// Most tokens of the answer.
    pub(crate) max_tokens: Option<u32>,
    /// The session that it belongs to.
    pub(crate) session: Option<Session>,
    /// Whether an engine computes all of it, whatever is cached.
    pub(crate) reads_all: bool,
}

/// An endpoint that can take a request.
#[derive(Clone, Debug)]
pub(crate) struct Candidate<'a> {
    /// The endpoint.
    pub(crate) endpoint: &'a Endpoint,
    /// How long the request is expected to take there.
    pub(crate) score: ReplicaScore,
    /// Tokens of its prompt that are cached there.
    pub(crate) cached_tokens: u32,
    /// Tokens that are not.
    pub(crate) unread_tokens: u64,
    last_sent: u64,
}

impl Backends {
    /// No channels yet; `identity` holds the client certificate shown to engines.
    pub fn new(identity: TlsFiles) -> Self {
        let (choice, sent) = (ReplicaChoice::default(), AtomicU64::default());
        Self { identity, choice, engines: Mutex::default(), sent }
    }

    /// The same, which chooses so.
    pub fn with_choice(self, choice: ReplicaChoice) -> Self {
        Self { choice, ..self }
    }

    /// The endpoints for a prompt, the quickest first; of equals the one that its session prefers, or that was sent a request
    /// least recently.
    pub(crate) fn ranked<'a>(
        &self,
        endpoints: impl IntoIterator<Item = &'a Endpoint>,
        prompt: &RankedPrompt<'_>,
    ) -> Vec<Candidate<'a>> {
        let RankedPrompt { marks, max_tokens, session, reads_all } = *prompt;
        let engines = self.engines.lock();
        let mut answers = Vec::new();
        let seen = endpoints.into_iter().map(|endpoint| {
            let engine = engines.get(endpoint).map(|engine| engine.view.lock());
            let Some(EngineView { in_flight, unread_tokens, answer_tokens, last_sent, feed, stream: _ }) =
                engine.as_deref()
            else {
                return (endpoint, ReplicaState::default(), CachedPrefix::default(), 0);
            };
            answers.extend(*answer_tokens);
            let (in_flight, unread_tokens) = (*in_flight, *unread_tokens);
            let state = ReplicaState { in_flight, unread_tokens, load: feed.load() };
            (endpoint, state, feed.cached_prefix(marks), *last_sent)
        });
        let seen: Vec<_> = seen.collect();
        // The same of all: they run one model, and a new one has given none.
        let answer_tokens = match answers.len() {
            0 => ANSWER_TOKENS,
            count => answers.iter().sum::<f64>() / count as f64,
        };
        let answer_tokens = max_tokens.map_or(answer_tokens, |most| answer_tokens.min(f64::from(most)));
        let tokens = prompt_tokens(marks, seen.iter().map(|(_, _, cached, _)| *cached));
        let candidates = seen.into_iter().map(|(endpoint, state, cached, last_sent)| {
            let cached_tokens = if reads_all { 0 } else { cached.tokens };
            let unread_tokens = tokens.saturating_sub(cached_tokens.into());
            let score = match self.choice {
                ReplicaChoice::ExpectedTime => {
                    ReplicaScore::new(&state, &NewRequest { unread_tokens, answer_tokens })
                }
                ReplicaChoice::LeastRequests => ReplicaScore::of_requests(state.in_flight),
            };
            Candidate { endpoint, score, cached_tokens, unread_tokens, last_sent }
        });
        by_score(candidates.collect(), session)
    }

    /// A client for `endpoint`, and a guard that counts the request.
    pub fn acquire(&self, endpoint: &Endpoint) -> Result<(EngineClient<Channel>, InFlightGuard), TlsError> {
        let EngineChannel { client, engine } = self.channel(endpoint)?;
        let number = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let mut view = engine.lock();
        view.in_flight += 1;
        view.last_sent = number;
        drop(view);
        Ok((client, InFlightGuard { engine, unread_tokens: 0 }))
    }

    fn channel(&self, endpoint: &Endpoint) -> Result<EngineChannel, TlsError> {
        let mut engines = self.engines.lock();
        let known = match engines.get_mut(endpoint) {
            Some(known) => known,
            None => engines.entry(endpoint.clone()).or_default(),
        };
        let worker = workers::current();
        if known.clients.len() <= worker {
            known.clients.resize(worker + 1, None);
        }
        let client = match &mut known.clients[worker] {
            Some(client) => client.clone(),
            client => {
                // Read again for each channel, so that a renewed certificate is used without a restart.
                let channel = self.identity.channel(&endpoint.address, &endpoint.node)?;
                client.insert(EngineClient::new(channel)).clone()
            }
        };
        Ok(EngineChannel { client, engine: known.view.clone() })
    }

    /// Removes the channels of engines that are not in `table`; running requests keep theirs.
    fn prune(&self, table: &RoutingTable) {
        let mut engines = self.engines.lock();
        engines.retain(|endpoint, _| {
            table.deployments.iter().any(|deployment| deployment.endpoints.contains(endpoint))
        });
    }
}

/// Tokens of a prompt with these marks, by the longest beginning of it that an engine has cached.
fn prompt_tokens(marks: &[PrefixMark], cached: impl Iterator<Item = CachedPrefix>) -> u64 {
    let bytes = marks.last().map_or(0, |last| last.bytes);
    let longest = cached.max_by_key(|cached| cached.bytes).filter(|longest| longest.bytes > 0);
    let (known, per_byte) = match longest {
        Some(longest) => (longest, f64::from(longest.tokens) / longest.bytes as f64),
        None => (CachedPrefix::default(), TOKENS_PER_BYTE),
    };
    u64::from(known.tokens) + (bytes.saturating_sub(known.bytes) as f64 * per_byte) as u64
}

/// The candidates, the best first. Equals go by session or by turns.
fn by_score(mut candidates: Vec<Candidate<'_>>, session: Option<Session>) -> Vec<Candidate<'_>> {
    candidates.sort_by(|one, other| one.score.total().total_cmp(&other.score.total()));
    let Some(best) = candidates.first().map(|best| best.score.total()) else { return candidates };
    let limit = (best * (1.0 + EQUAL_SHARE)).max(best + EQUAL_MILLISECONDS);
    let equals = candidates.partition_point(|candidate| candidate.score.total() <= limit);
    let equals = &mut candidates[..equals];
    match session {
        Some(session) => equals.sort_by_key(|one| Reverse(session.preference(&one.endpoint.group))),
        None => equals.sort_by_key(|one| one.last_sent),
    }
    candidates
}

#[cfg(test)]
mod tests {
    use russet_rpc::engine as pb;

    use super::*;
    use crate::routes::Deployment;
    use crate::routes::fixtures::{self, endpoint};

    fn backends(dir: &std::path::Path) -> Backends {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["a".into()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(dir.join("tls.crt"), certificate.pem()).unwrap();
        std::fs::write(dir.join("tls.key"), key.serialize_pem()).unwrap();
        std::fs::write(dir.join("ca.crt"), certificate.pem()).unwrap();
        Backends::new(TlsFiles::in_dir(dir))
    }

    #[tokio::test]
    async fn the_quickest_engine_is_next_and_removed_ones_are_pruned() {
        let dir = tempfile::tempdir().unwrap();
        let backends = backends(dir.path());
        let (one, two) = (endpoint("127.0.0.1:1"), endpoint("127.0.0.1:2"));
        let both = [one.clone(), two.clone()];
        let best = |backends: &Backends| backends.ranked(&both, &RankedPrompt::default())[0].endpoint.clone();
        assert_eq!(best(&backends), one);
        let first = backends.acquire(&one).unwrap();
        assert_eq!(best(&backends), two);
        let second = backends.acquire(&two).unwrap();
        let _third = backends.acquire(&two).unwrap();
        assert_eq!(best(&backends), one);
        drop(first);
        assert_eq!(best(&backends), one);
        drop((second, _third));
        assert_eq!(best(&backends), one, "it was sent a request less recently");
        drop(backends.acquire(&one).unwrap());
        assert_eq!(best(&backends), two, "by turns");
        assert!(backends.ranked(&[], &RankedPrompt::default()).is_empty());

        backends.prune(&RoutingTable {
            synced: true,
            deployments: vec![Deployment {
                endpoints: vec![two.clone()],
                ..fixtures::deployment("default", "m")
            }],
            ..RoutingTable::default()
        });
        let remaining: Vec<Endpoint> = backends.engines.lock().keys().cloned().collect();
        assert_eq!(remaining, [two]);
    }

    #[tokio::test]
    async fn a_prompt_goes_where_its_beginning_is_unless_much_waits_there() {
        let dir = tempfile::tempdir().unwrap();
        let backends = backends(dir.path());
        let (one, two) = (endpoint("127.0.0.1:1"), endpoint("127.0.0.1:2"));
        let both = [one.clone(), two.clone()];
        let marks = [(1, 40_000), (2, 50_000)].map(|(key, bytes)| PrefixMark { key, bytes });
        let prompt = RankedPrompt { marks: &marks, ..RankedPrompt::default() };
        let marked = vec![pb::MarkedBlock { key: 1, block: vec![7], tokens: 10_000 }];
        let event = pb::PrefixesEvent { added: vec![vec![7]], marked, ..Default::default() };
        backends.channel(&two).unwrap().engine.lock().feed.apply(event);
        let ranked = backends.ranked(&both, &prompt);
        let shown = |candidate: &Candidate<'_>| {
            let Candidate { endpoint, cached_tokens, unread_tokens, .. } = candidate;
            (endpoint.address.clone(), *cached_tokens, *unread_tokens)
        };
        let expected = [(two.address.clone(), 10_000, 2_500), (one.address.clone(), 0, 12_500)];
        assert_eq!(ranked.iter().map(shown).collect::<Vec<_>>(), expected);
        // 12,500 tokens take 12.5 s there as well, once another prompt of 9,000 is read before it, beside its answer.
        let (_client, mut guard) = backends.acquire(&two).unwrap();
        guard.reading(8_000);
        assert_eq!(backends.ranked(&both, &prompt)[0].endpoint, &two);
        guard.reading(9_000);
        assert_eq!(backends.ranked(&both, &prompt)[0].endpoint, &one);
        guard.reading(0);
        assert_eq!(backends.ranked(&both, &prompt)[0].endpoint, &two);
    }

    #[tokio::test]
    async fn answers_are_expected_to_be_as_long_as_those_before() {
        let dir = tempfile::tempdir().unwrap();
        let backends = backends(dir.path());
        let one = endpoint("127.0.0.1:1");
        let (_client, guard) = backends.acquire(&one).unwrap();
        for _ in 0..100 {
            guard.answered(30);
        }
        drop(guard);
        // Also at an engine that has given none.
        let two = endpoint("127.0.0.1:2");
        let scores = |prompt: RankedPrompt<'_>| {
            let ranked = backends.ranked([&one, &two], &prompt);
            ranked.iter().map(|candidate| candidate.score.total()).collect::<Vec<_>>()
        };
        assert_eq!(scores(RankedPrompt::default()), [1000.0; 2]);
        assert_eq!(scores(RankedPrompt { max_tokens: Some(3), ..RankedPrompt::default() }), [100.0; 2]);
    }
}
