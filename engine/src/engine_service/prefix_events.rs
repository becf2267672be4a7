//! What gateways learn of an engine that they may send a prompt to: its cached blocks, and how much it has to do.

use std::time::Duration;

use futures::{Stream, StreamExt as _, future, stream};
use russet_rpc::engine as pb;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tokio_stream::wrappers::{IntervalStream, ReceiverStream};

use crate::prefix_cache::block_hash::{BLOCK_TOKENS, BlockHash};
use crate::prefix_cache::events::{BlockEvent, MarkedBlock};
use crate::scheduler::Intake;

/// How often the load is looked at. A gateway counts its own requests meanwhile.
const LOAD_INTERVAL: Duration = Duration::from_millis(100);

/// The cached blocks with the load, then every change of either.
pub(super) fn stream(intake: Box<Intake>) -> impl Stream<Item = pb::PrefixesEvent> {
    let (root, news) = intake.prefixes();
    let base = pb::PrefixesEvent {
        block_tokens: BLOCK_TOKENS,
        root: root.0.to_vec(),
        ..pb::PrefixesEvent::default()
    };
    let of_blocks = base.clone();
    let first = intake.load();
    let blocks = ReceiverStream::new(news).map(move |BlockEvent { is_snapshot, delta, marked }| {
        Some(pb::PrefixesEvent {
            reset: is_snapshot,
            added: bytes(&delta.added),
            evicted: bytes(&delta.removed),
            marked: marked.iter().map(marked_block).collect(),
            load: is_snapshot.then_some(first),
            ..of_blocks.clone()
        })
    });
    let mut ticks = interval_at(Instant::now() + LOAD_INTERVAL, LOAD_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let loads = IntervalStream::new(ticks).map(move |_| intake.load()).scan(first, |last, load| {
        let is_new = load != *last;
        *last = load;
        future::ready(Some(is_new.then_some(load)))
    });
    let loads = loads.map(move |load| Some(pb::PrefixesEvent { load: Some(load?), ..base.clone() }));
    // A subscriber that is too slow is cut off: the loads end with its blocks.
    let blocks = blocks.map(Some).chain(stream::once(future::ready(None)));
    let all = stream::select(blocks, loads.map(Some));
    all.take_while(|event| future::ready(event.is_some())).filter_map(|event| future::ready(event.flatten()))
}

fn bytes(hashes: &[BlockHash]) -> Vec<Vec<u8>> {
    hashes.iter().map(|hash| hash.0.to_vec()).collect()
}

fn marked_block(&MarkedBlock { key, block, tokens }: &MarkedBlock) -> pb::MarkedBlock {
    pb::MarkedBlock { key, block: block.0.to_vec(), tokens }
}
