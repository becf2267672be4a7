//! Every kind of cache, under any order of appends, rewinds, snapshots and restores, equals one that only ever saw what
//! is left of the sequence.

use mlx_rs::{Dtype, ops::indexing::TryIndexOp as _};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use russet_model::{
    description::{Attention, DeltaNet, Latent, Mamba2, Mixer, Rope, RopeScaling, ShortConv},
    state::LayerState,
};

use super::*;
use crate::{prefix_cache::CACHE_STEP, speculative::MAX_DRAFT_TOKENS};
use russet_wire::engine_options::KvCacheType;

const WINDOW: i32 = 5;
const WIDTH: i32 = 32;

/// A position's content: one number, which no other has.
type Content = i32;

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    /// To a share of the length.
    Rewind(f64),
    Snapshot,
    /// To one of the snapshots.
    Restore(usize),
}

fn steps(random: &mut StdRng) -> Vec<Step> {
    let step = |random: &mut StdRng| match random.random_range(0..12) {
        0..4 => Step::Append(random.random_range(1..7)),
        4 => Step::Append(300),
        5..8 => Step::Rewind(random.random_range(0.0..1.01)),
        8..10 => Step::Snapshot,
        _ => Step::Restore(random.random_range(0..100)),
    };
    (0..14).map(|_| step(random)).collect()
}

fn kinds() -> Vec<(StateKind, KvFormat)> {
    let format = |kind| KvFormat::new(kind, WIDTH as usize).unwrap();
    vec![
        (StateKind::KeyValue, format(KvCacheType::AsComputed)),
        (StateKind::KeyValue, format(KvCacheType::Int8)),
        (StateKind::Rotating { window: WINDOW as u32 }, KvFormat::AsComputed),
        (StateKind::Rotating { window: 1 }, KvFormat::AsComputed),
        (StateKind::Latent, KvFormat::AsComputed),
        (StateKind::Recurrent, KvFormat::AsComputed),
    ]
}

/// `[1, 1, positions, WIDTH]`.
fn array(contents: &[Content]) -> Array {
    let numbers: Vec<f32> = contents.iter().flat_map(|&number| [number as f32; WIDTH as usize]).collect();
    Array::from_slice(&numbers, &[1, 1, contents.len() as i32, WIDTH])
}

fn append(cache: &mut LayerCache, contents: &[Content]) -> Option<KvView> {
    let new = array(contents);
    match cache {
        LayerCache::Kv(_) | LayerCache::Rotating(_) => {
            return Some(cache.append(&new, &new.negative().unwrap()).unwrap());
        }
        LayerCache::Latent(cache) => {
            let part = |range: std::ops::Range<i32>| new.try_index((.., .., .., range)).unwrap();
            drop(cache.append(&part(0..WIDTH - 8), &part(WIDTH - 8..WIDTH)).unwrap());
        }
        LayerCache::Recurrent(cache) => {
            let before = cache.state().first().map_or(0.0, |state| state.as_slice::<f32>()[0]);
            // Depends on every position and on their order.
            let after = contents.iter().fold(before, |state, &number| (state * 3.0 + number as f32) % 8191.0);
            cache.advance(vec![Array::from_slice(&[after], &[1])], contents.len() as i32);
        }
    }
    None
}

/// All that a layer could see of a cache when the next position comes.
fn seen(cache: &LayerCache) -> Vec<Vec<u8>> {
    let bytes = |array: Array| {
        if array.size() == 0 {
            return Vec::new();
        }
        let bytes = array.contiguous().unwrap().view_dtype(Dtype::Uint8).unwrap();
        bytes.as_slice::<u8>().to_vec()
    };
    match cache {
        LayerCache::Recurrent(cache) => cache.state().iter().cloned().map(bytes).collect(),
        LayerCache::Rotating(_) => match append(&mut cache.clone(), &[-1]) {
            Some(KvView::AsComputed { keys, values }) => vec![bytes(keys), bytes(values)],
            _ => panic!("{cache:?}"),
        },
        LayerCache::Kv(_) | LayerCache::Latent(_) => {
            cache.slice(0..cache.offset()).unwrap().unwrap_or_default().into_iter().map(bytes).collect()
        }
    }
}

fn check(cache: &LayerCache, kind: StateKind, format: KvFormat, contents: &[Content]) {
    let mut fresh = LayerCache::new(kind, format);
    contents.chunks(100).for_each(|some| drop(append(&mut fresh, some)));
    assert_eq!(cache.offset(), contents.len() as i32, "{kind:?}");
    let empty = |seen: &[Vec<u8>]| seen.iter().all(Vec::is_empty);
    let (seen, expected) = (seen(cache), seen(&fresh));
    assert!(seen == expected || (empty(&seen) && empty(&expected)), "{kind:?} of {contents:?}");
}

#[test]
fn caches_equal_one_that_saw_only_what_is_left() {
    for seed in 0..48 {
        let steps = steps(&mut StdRng::seed_from_u64(seed));
        for (kind, format) in kinds() {
            follow(&steps, kind, format);
        }
    }
}

/// Does the steps with a cache, and compares it after each.
fn follow(steps: &[Step], kind: StateKind, format: KvFormat) {
    let mut cache = LayerCache::new(kind, format);
    let (mut contents, mut snapshots) = (Vec::<Content>::new(), Vec::new());
    let mut next: Content = 0;
    for step in steps {
        match step {
            Step::Append(count) => {
                let new: Vec<Content> = (next..next + *count as Content).collect();
                next += *count as Content;
                append(&mut cache, &new);
                contents.extend(new);
            }
            Step::Rewind(share) => {
                let to = (contents.len() as f64 * share) as usize;
                let can = kind.can_rewind(contents.len() as u32, to as u32);
                match cache.rewind(to as i32) {
                    Rewound::Rewound => contents.truncate(to),
                    Rewound::Impossible => assert!(!can, "{kind:?} {} to {to}", contents.len()),
                }
            }
            Step::Snapshot => snapshots.push((cache.snapshot(), contents.clone())),
            Step::Restore(which) if !snapshots.is_empty() => {
                let (snapshot, then) = &snapshots[which % snapshots.len()];
                cache.restore(snapshot);
                contents.clone_from(then);
            }
            Step::Restore(_) => {}
        }
        check(&cache, kind, format, &contents);
    }
    for (snapshot, contents) in &snapshots {
        check(&snapshot.0, kind, format, contents);
    }
}

#[test]
fn drafts_are_taken_back_by_the_cache_or_by_a_snapshot() {
    for (kind, format) in kinds() {
        let mut cache = LayerCache::new(kind, format);
        let contents: Vec<Content> = (0..300).collect();
        append(&mut cache, &contents);
        let point = cache.snapshot();
        append(&mut cache, &(1000..1000 + 1 + MAX_DRAFT_TOKENS as Content).collect::<Vec<_>>());
        match cache.takes_back_drafts() {
            true => assert_eq!(cache.rewind(300), Rewound::Rewound, "{kind:?}"),
            false => {
                assert_eq!(cache.rewind(300), Rewound::Impossible, "{kind:?}");
                cache.restore(&point);
            }
        }
        check(&cache, kind, format, &contents);
    }
}

#[test]
fn rewind_beyond_the_end_is_impossible() {
    for (kind, format) in kinds() {
        let mut cache = LayerCache::new(kind, format);
        append(&mut cache, &[1, 2, 3]);
        assert_eq!(cache.rewind(4), Rewound::Impossible, "{kind:?}");
        check(&cache, kind, format, &[1, 2, 3]);
    }
}

#[test]
fn rotating_cache_takes_back_the_last_positions() {
    let kind = StateKind::Rotating { window: WINDOW as u32 };
    let mut cache = LayerCache::new(kind, KvFormat::AsComputed);
    let contents: Vec<Content> = (0..40).collect();
    append(&mut cache, &contents[..20]);
    append(&mut cache, &contents[20..29]);
    // As after draft tokens of which some are rejected.
    assert_eq!(cache.rewind(21), Rewound::Rewound);
    check(&cache, kind, KvFormat::AsComputed, &contents[..21]);
    for number in 21..2000 {
        append(&mut cache, &[number]);
    }
    assert_eq!(cache.rewind(10), Rewound::Impossible);
}

#[test]
fn blocks_are_of_caches_that_tell_positions_apart() {
    for (kind, format) in kinds() {
        let mut cache = LayerCache::new(kind, format);
        append(&mut cache, &[1, 2, 3]);
        let slices = cache.slice(1..3).unwrap();
        assert_eq!(slices.as_ref().map_or(0, Vec::len), cache.block_tensors(), "{kind:?}");
        let mut other = LayerCache::new(kind, format);
        match slices {
            Some(slices) => {
                other.append_raw(slices).unwrap();
                check(&other, kind, format, &[2, 3]);
            }
            None => assert!(other.append_raw(vec![array(&[1])]).is_err(), "{kind:?}"),
        }
    }
}

#[test]
fn caches_take_the_bytes_that_are_planned() {
    let rope = Rope { width: 32, base: 1e4, traditional: false, scaling: RopeScaling::None };
    let attention =
        |window| Mixer::Attention(Attention { window, ..Attention::new(1, 1, WIDTH as u32, None) });
    let latent = Latent {
        heads: 4,
        rank: WIDTH as u32 - 8,
        query_rank: None,
        rope_dim: 8,
        nope_dim: 16,
        value_dim: 16,
        scale: 1.0,
        rope,
        epsilon: 1e-6,
        bias: false,
        query_scale: None,
    };
    let delta = DeltaNet {
        key_heads: 2,
        value_heads: 4,
        key_dim: 8,
        value_dim: 8,
        conv_kernel: 4,
        epsilon: 1e-6,
        merged_projections: false,
    };
    let conv = ShortConv { channels: 16, kernel: 4, bias: false };
    // Of the same sizes.
    let mamba = Mamba2 {
        heads: 4,
        head_dim: 8,
        groups: 4,
        state_dim: 8,
        conv_kernel: 3,
        conv_bias: true,
        bias: false,
        step_limits: [0.0, f32::INFINITY],
        epsilon: 1e-5,
    };
    let state = |shape: &[i32]| Array::zeros::<f32>(shape).unwrap();
    for (mixer, length) in [
        (attention(None), 300),
        (attention(Some(WINDOW as u32)), 300),
        (attention(Some(WINDOW as u32)), 3000),
        (Mixer::Latent(latent), 300),
        (Mixer::DeltaNet(delta), 300),
        (Mixer::ShortConv(conv), 300),
        (Mixer::Mamba2(mamba), 300),
    ] {
        let kind = StateKind::of(&mixer);
        let mut cache = LayerCache::new(kind, KvFormat::AsComputed);
        match (&mut cache, &mixer) {
            (LayerCache::Recurrent(cache), Mixer::ShortConv(_)) => {
                cache.advance(vec![state(&[1, 3, 16])], length);
            }
            (LayerCache::Recurrent(cache), _) => {
                cache.advance(vec![state(&[1, 4, 8, 8]), state(&[1, 3, 2 * 2 * 8 + 4 * 8])], length);
            }
            _ => (0..length).for_each(|number| drop(append(&mut cache, &[number]))),
        }
        // Allocated in steps, and those of a window before it is dropped what lies behind.
        let positions = (length as u64).next_multiple_of(u64::from(CACHE_STEP));
        let planned = LayerState::of(&mixer, 4).bytes(positions, 1, 1);
        // Once the cache has gone on, its snapshots hold arrays of their own: that of the prompt, and that of before a
        // step with draft tokens.
        let goes_back = [cache.rewinds_anywhere(), cache.takes_back_drafts()];
        let snapshots = goes_back.map(|goes_back| if goes_back { 0 } else { cache.snapshot().bytes() });
        let held = (cache.bytes() + snapshots.iter().sum::<usize>()) as u64;
        let is_window = matches!(kind, StateKind::Rotating { .. });
        assert!(held == planned || is_window && held < planned, "{mixer:?}: {held} of {planned}");
    }
}
