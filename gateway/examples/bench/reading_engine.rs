//! An engine that takes the time of a real one, at many times its speed: it reads prompts one after the other, keeps what it
//! has read in blocks, evicts the least recently used, and tells gateways of them. It computes nothing.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use russet_rpc::engine as pb;
use russet_rpc::engine::engine_server::{Engine, EngineServer};
use russet_rpc::tls::TlsFiles;
use russet_wire::event::{Delta, FinishReason, GenerationEvent, Usage};
use russet_wire::prefix_mark::PrefixMark;
use russet_wire::request::GenerationRequest;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::roles::EventStream;

/// How many times as quick as a machine of usual speed.
pub const SPEED: f64 = 20.0;
/// Tokens a second of that machine.
const PROMPT_RATE: f64 = 1000.0;
const ANSWER_RATE: f64 = 40.0;
const ANSWER_TOKENS: u32 = 64;
/// Its KV cache. The conversations of three agents fit, those of eight do not.
const CACHED_BLOCKS: usize = 64_000 / BLOCK_TOKENS;
const BLOCK_TOKENS: usize = 64;
/// A token is so many bytes.
const TOKEN_BYTES: usize = 4;
const SLOTS: u32 = 8;

#[derive(Clone)]
struct ReadingEngine {
    state: Arc<Mutex<EngineState>>,
    /// Held by the prompt that is read.
    reading: Arc<tokio::sync::Mutex<()>>,
    events: broadcast::Sender<pb::PrefixesEvent>,
}

#[derive(Default)]
struct EngineState {
    /// Hash of each block, and when it was last used.
    blocks: BTreeMap<u64, u64>,
    marks: BTreeMap<u64, pb::MarkedBlock>,
    clock: u64,
    load: pb::EngineLoad,
}

/// Serves until it is dropped.
pub async fn serve(listener: TcpListener, files: TlsFiles) {
    let (events, _) = broadcast::channel(4096);
    let load = pb::EngineLoad {
        slots: SLOTS,
        prompt_tokens_per_second: PROMPT_RATE * SPEED,
        tokens_per_second: ANSWER_RATE * SPEED,
        ..pb::EngineLoad::default()
    };
    let state = Arc::new(Mutex::new(EngineState { load, ..EngineState::default() }));
    let engine = ReadingEngine { state, reading: Arc::default(), events };
    let incoming = files.incoming_grpc(listener).unwrap();
    let server = tonic::transport::Server::builder().add_service(EngineServer::new(engine));
    server.serve_with_incoming(incoming).await.unwrap();
}

/// When the block of this index was used. A block is of no use without those before it: the last ones of a prompt are evicted
/// first.
fn used(clock: u64, index: usize) -> u64 {
    clock * 1_000_000 - index as u64
}

fn bytes(hash: u64) -> Vec<u8> {
    hash.to_le_bytes().to_vec()
}

/// The hash of each whole block of a prompt and all before it, and the tokens of the prompt.
fn block_hashes(request: &GenerationRequest) -> (Vec<u64>, usize) {
    let texts =
        request.messages.iter().flat_map(|message| [message.role.as_bytes(), message.content.as_bytes()]);
    let text: Vec<u8> = texts.flatten().copied().collect();
    let mut hash = DefaultHasher::new();
    let blocks = text.chunks_exact(BLOCK_TOKENS * TOKEN_BYTES).map(|block| {
        block.hash(&mut hash);
        hash.finish()
    });
    (blocks.collect(), text.len() / TOKEN_BYTES)
}

impl ReadingEngine {
    /// Blocks of this prompt that are cached; they count as used.
    fn cached(&self, blocks: &[u64]) -> usize {
        let mut state = self.state.lock().unwrap();
        state.clock += 1;
        let clock = state.clock;
        let known = blocks.iter().take_while(|block| state.blocks.contains_key(block)).count();
        for (index, block) in blocks[..known].iter().enumerate() {
            state.blocks.insert(*block, used(clock, index));
        }
        known
    }

    /// The prompt has been read.
    fn keep(&self, blocks: &[u64], tokens: usize, request: &GenerationRequest) {
        let mut state = self.state.lock().unwrap();
        state.clock += 1;
        let clock = state.clock;
        let new = blocks.iter().enumerate();
        let new = new.filter(|(index, block)| state.blocks.insert(**block, used(clock, *index)).is_none());
        let added = new.map(|(_, block)| bytes(*block)).collect();
        let mut event = pb::PrefixesEvent { added, ..Default::default() };
        while state.blocks.len() > CACHED_BLOCKS
            && let Some((oldest, _)) =
                state.blocks.iter().min_by_key(|(_, used)| **used).map(|(block, used)| (*block, *used))
        {
            state.blocks.remove(&oldest);
            event.evicted.push(bytes(oldest));
        }
        for (key, tokens) in PrefixMark::tokens(&request.prefix_marks, tokens as u32) {
            if let Some(block) =
                (tokens as usize / BLOCK_TOKENS).checked_sub(1).and_then(|index| blocks.get(index))
            {
                let marked = pb::MarkedBlock { key, block: bytes(*block), tokens };
                state.marks.insert(key, marked.clone());
                event.marked.push(marked);
            }
        }
        // Nobody may listen.
        let _ = self.events.send(event);
    }

    fn change_load(&self, change: impl FnOnce(&mut pb::EngineLoad)) {
        let mut state = self.state.lock().unwrap();
        change(&mut state.load);
        let _ = self.events.send(pb::PrefixesEvent { load: Some(state.load), ..Default::default() });
    }

    async fn answer(
        self,
        request: GenerationRequest,
        events: mpsc::Sender<Result<pb::GenerateEvent, Status>>,
    ) {
        let (blocks, tokens) = block_hashes(&request);
        let waiting = self.cached(&blocks);
        let expected = (tokens - waiting * BLOCK_TOKENS) as u64;
        self.change_load(|load| {
            load.running += 1;
            load.unread_tokens += expected;
        });
        let cached = {
            let _turn = self.reading.lock().await;
            // Another prompt may have brought more by now.
            let cached = self.cached(&blocks) * BLOCK_TOKENS;
            pause((tokens - cached) as f64 / PROMPT_RATE).await;
            self.keep(&blocks, tokens, &request);
            cached
        };
        self.change_load(|load| load.unread_tokens -= expected);
        let prompt_tokens = tokens as u32;
        let usage = Usage { prompt_tokens, completion_tokens: ANSWER_TOKENS, cached_tokens: cached as u32 };
        let token = |id| GenerationEvent::Token { id, delta: Delta::text(" word") };
        let _ = events.send(Ok(GenerationEvent::Started { prompt_tokens, emitted_tokens: 0 }.into())).await;
        let _ = events.send(Ok(token(0).into())).await;
        pause(f64::from(ANSWER_TOKENS) / ANSWER_RATE).await;
        for id in 1..ANSWER_TOKENS {
            let _ = events.send(Ok(token(id).into())).await;
        }
        let _ = events.send(Ok(GenerationEvent::Finished { reason: FinishReason::Stop, usage }.into())).await;
        self.change_load(|load| load.running -= 1);
    }
}

/// Seconds of a machine of usual speed.
async fn pause(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds / SPEED)).await;
}

#[tonic::async_trait]
impl Engine for ReadingEngine {
    type GenerateStream = EventStream<pb::GenerateEvent>;
    type FollowStream = EventStream<pb::FollowReply>;
    type PrefixesStream = EventStream<pb::PrefixesEvent>;

    async fn describe(
        &self,
        _: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::EngineDescription>, Status> {
        Err(Status::unimplemented("not called by gateways"))
    }

    async fn count_tokens(
        &self,
        _: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::CountTokensReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn embed(&self, _: Request<pb::EmbedRequest>) -> Result<Response<pb::EmbedReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn rerank(&self, _: Request<pb::RerankRequest>) -> Result<Response<pb::RerankReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn follow(
        &self,
        _: Request<Streaming<pb::FollowCommand>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        Err(Status::unimplemented("not called by gateways"))
    }

    async fn prefixes(
        &self,
        _: Request<pb::PrefixesRequest>,
    ) -> Result<Response<Self::PrefixesStream>, Status> {
        let state = self.state.lock().unwrap();
        let mut events = self.events.subscribe();
        let snapshot = pb::PrefixesEvent {
            reset: true,
            added: state.blocks.keys().map(|block| bytes(*block)).collect(),
            marked: state.marks.values().cloned().collect(),
            load: Some(state.load),
            ..Default::default()
        };
        Ok(Response::new(Box::pin(async_stream::stream! {
            yield Ok(snapshot);
            while let Ok(event) = events.recv().await {
                yield Ok(event);
            }
        })))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (sender, events) = mpsc::channel(1024);
        tokio::spawn(self.clone().answer(request.into_inner().into(), sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }
}
