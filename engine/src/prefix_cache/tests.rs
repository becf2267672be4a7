//! Stories of requests that arrive, share prefixes and end: what the prefix cache holds, and where.

use std::collections::{BTreeMap, HashMap};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

/// A rank that applies commands to tokens instead of KV data, and rejects invalid commands.
#[derive(Default)]
struct FakeRank {
    /// Tokens and allocation of each slot in use.
    slots: BTreeMap<u32, (Vec<u32>, u32)>,
    /// All tokens up to the end of each block.
    in_memory: HashMap<BlockHash, Vec<u32>>,
    on_disk: HashMap<BlockHash, Vec<u32>>,
    /// Most tokens that its layers go back by; `None` is any number.
    max_rewind: Option<u32>,
    /// Most tokens that the layers of a slot have seen.
    seen: HashMap<u32, usize>,
    /// Tokens of each slot before its last step, where that verified draft tokens.
    step_beginnings: HashMap<u32, usize>,
    /// Tokens of each slot's snapshot, and how many its layers had seen.
    snapshots: HashMap<u32, (Vec<u32>, usize)>,
}

impl FakeRank {
    fn apply(&mut self, order: CacheCommand) {
        match order {
            CacheCommand::Reset { slot } => {
                self.slots.remove(&slot);
                self.seen.remove(&slot);
                self.snapshots.remove(&slot);
            }
            CacheCommand::Truncate { slot, length } => {
                let (tokens, _) = self.slots.get_mut(&slot).unwrap();
                assert!(tokens.len() >= length as usize, "a slot of {} is cut to {length}", tokens.len());
                if self.max_rewind == Some(0) && self.step_beginnings.remove(&slot) == Some(length as usize) {
                    self.seen.insert(slot, length as usize);
                }
                let dropped = self.seen.get(&slot).map_or(0, |seen| seen - length as usize);
                assert!(
                    self.max_rewind.is_none_or(|most| dropped <= most as usize),
                    "{dropped} tokens dropped"
                );
                tokens.truncate(length as usize);
                if self.snapshots.get(&slot).is_some_and(|(tokens, _)| tokens.len() > length as usize) {
                    self.snapshots.remove(&slot);
                }
            }
            CacheCommand::Snapshot { slot } => {
                let tokens = self.slots[&slot].0.clone();
                self.snapshots.insert(slot, (tokens, self.seen[&slot]));
            }
            CacheCommand::Restore { slot } => {
                let (tokens, seen) = self.snapshots[&slot].clone();
                self.slots.get_mut(&slot).unwrap().0 = tokens;
                self.seen.insert(slot, seen);
            }
            CacheCommand::Fork { from, to } => {
                let copy = self.slots[&from].clone();
                assert!(self.slots.insert(to, copy).is_none(), "slot {to} was not empty");
                self.seen.insert(to, self.seen[&from]);
            }
            CacheCommand::Store { slot, blocks } => {
                for BlockCopy { index, hash: key, in_memory, on_disk } in blocks {
                    let (tokens, _) = &self.slots[&slot];
                    let end = ((index + 1) * BLOCK_TOKENS) as usize;
                    assert!(end <= tokens.len(), "block {index} of {} tokens", tokens.len());
                    if in_memory {
                        assert!(self.in_memory.insert(key, tokens[..end].to_vec()).is_none(), "kept twice");
                    }
                    if on_disk {
                        self.on_disk.insert(key, tokens[..end].to_vec());
                    }
                }
            }
            CacheCommand::Load { slot, hashes: keys } => {
                let tokens = self.in_memory[keys.last().unwrap()].clone();
                assert_eq!(tokens.len(), keys.len() * BLOCK_TOKENS as usize);
                self.load(slot, tokens);
            }
            CacheCommand::Evict { in_memory, on_disk } => {
                in_memory.iter().for_each(|key| drop(self.in_memory.remove(key).expect("it is there")));
                on_disk.iter().for_each(|key| drop(self.on_disk.remove(key)));
            }
        }
    }

    fn load(&mut self, slot: u32, tokens: Vec<u32>) {
        let room = tokens.len() as u32;
        assert!(self.slots.insert(slot, (tokens, room)).is_none(), "slot {slot} was not empty");
    }

    /// Number of blocks loaded from memory or disk.
    fn fetch(&mut self, slot: u32, keys: &[BlockHash]) -> u32 {
        let found: Vec<&Vec<u32>> =
            keys.iter().map_while(|key| self.in_memory.get(key).or(self.on_disk.get(key))).collect();
        let tokens = found.last().map(|tokens| (*tokens).clone()).unwrap_or_default();
        let loaded = found.len() as u32;
        self.load(slot, tokens);
        loaded
    }

    fn run(&mut self, slot: u32, new: &[u32]) {
        let (tokens, room) = self.slots.entry(slot).or_default();
        tokens.extend(new);
        *room = (*room).max(tokens.len() as u32);
        let seen = self.seen.entry(slot).or_default();
        *seen = (*seen).max(tokens.len());
    }

    fn tokens(&self) -> u64 {
        let slots = self.slots.values().map(|(_, room)| u64::from(room.next_multiple_of(CACHE_STEP)));
        slots.sum::<u64>() + self.in_memory.len() as u64 * u64::from(BLOCK_TOKENS)
    }
}

fn capacity(slots: u32, tokens: u64, disk: bool) -> CacheCapacity {
    CacheCapacity { slots, tokens, disk, enabled: true, blocks: true, max_rewind: None }
}

fn cache(slots: u32, tokens: u64, disk: bool) -> PrefixCache {
    PrefixCache::new(BlockHash::root(b"m"), capacity(slots, tokens, disk), &[])
}

/// The scope of a salt, without an adapter.
fn salted(salt: &str) -> PrefixScope<'_> {
    PrefixScope { adapter: "", salt }
}

/// Runs a request without a salt to its end; returns how many of its tokens were cached.
fn serve(cache: &mut PrefixCache, rank: &mut FakeRank, prompt: &[u32], answer: &[u32]) -> u32 {
    serve_salted(cache, rank, prompt, answer, "")
}

/// Runs a request to its end; returns how many of its tokens were cached.
fn serve_salted(
    cache: &mut PrefixCache,
    rank: &mut FakeRank,
    prompt: &[u32],
    answer: &[u32],
    salt: &str,
) -> u32 {
    let SlotAssignment { slot, cached, fetch_from_disk: fetch, .. } =
        cache.admit(prompt, salted(salt)).unwrap();
    cache.take_commands().into_iter().for_each(|order| rank.apply(order));
    assert_eq!(rank.fetch_if(slot, &fetch), fetch.len() as u32);
    assert_eq!(rank.slots.get(&slot).map_or(&[][..], |(tokens, _)| tokens), &prompt[..cached as usize]);
    let mut tokens = prompt.to_vec();
    for (end, read) in [(prompt.len(), true), (prompt.len() + answer.len(), false)] {
        cache.grow(slot, end as u32);
        cache.take_commands().into_iter().for_each(|order| rank.apply(order));
        let have = rank.slots.get(&slot).map_or(0, |(tokens, _)| tokens.len());
        tokens = [prompt, answer].concat()[..end].to_vec();
        rank.run(slot, &tokens[have..]);
        if read {
            cache.store_prompt(slot, prompt);
        }
    }
    cache.release(slot, tokens);
    cache.take_commands().into_iter().for_each(|order| rank.apply(order));
    cached
}

impl FakeRank {
    fn fetch_if(&mut self, slot: u32, keys: &[BlockHash]) -> u32 {
        if keys.is_empty() { 0 } else { self.fetch(slot, keys) }
    }
}

fn text(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|place| seed * 1000 + place).collect()
}

#[test]
fn shared_prefix_is_prefilled_once() {
    let question = |seed| [text(1, 300), text(seed, 20)].concat();
    for (story, slots, tokens, disk, then, expected) in [
        ("the conversation goes on in its own slot", 4, 4096, false, [question(2), text(3, 9)].concat(), 320),
        ("another question on the same text takes the slot over", 4, 4096, false, question(4), 300),
        ("also without room for blocks", 1, 512, false, question(4), 300),
        (
            "one that shares little of it comes from blocks",
            4,
            4096,
            false,
            [text(1, 150), text(4, 9)].concat(),
            128,
        ),
        ("and is read where there are none", 1, 512, false, [text(1, 150), text(4, 9)].concat(), 0),
        ("something else shares nothing", 4, 4096, false, text(9, 300), 0),
        ("the same again reads its last token", 4, 4096, false, question(2), 319),
        ("a short prompt is less than a block", 4, 4096, false, text(1, 40), 0),
    ] {
        let (mut cache, mut rank) = (cache(slots, tokens, disk), FakeRank::default());
        assert_eq!(serve(&mut cache, &mut rank, &question(2), &[]), 0, "{story}");
        let cached = serve(&mut cache, &mut rank, &then, &[7]);
        assert!(cached == expected, "{story}: {cached} of {expected}");
    }
}

#[test]
fn prefix_cache_loads_disk_blocks_after_a_restart() {
    let (mut first, mut rank) = (cache(2, 4096, true), FakeRank::default());
    serve(&mut first, &mut rank, &text(1, 300), &[]);
    let mut rank = FakeRank { on_disk: rank.on_disk, ..FakeRank::default() };
    let on_disk: Vec<BlockHash> =
        block_hashes(BlockHash::root(b"m"), &text(1, 300)).into_iter().rev().collect();
    let limits = capacity(2, 4096, true);
    let mut again = PrefixCache::new(BlockHash::root(b"m"), limits, &on_disk);
    assert_eq!(serve(&mut again, &mut rank, &text(1, 300), &[]), 256);

    // One file is damaged: the slot is empty, and that block and the later ones, useless without it, are
    // forgotten.
    let mut third = PrefixCache::new(BlockHash::root(b"m"), limits, &on_disk);
    let SlotAssignment { slot, fetch_from_disk: fetch, .. } = third.admit(&text(1, 300), salted("")).unwrap();
    third.finish_fetch(slot, &fetch, 2);
    assert_eq!(
        third.take_commands(),
        [
            CacheCommand::Reset { slot },
            CacheCommand::Evict { in_memory: vec![], on_disk: fetch[2..].to_vec() }
        ]
    );
    third.discard(slot);
    assert_eq!(third.admit(&text(1, 300), salted("")).unwrap().cached, 128);
}

#[test]
fn another_salt_finds_no_cached_prefix() {
    let root = BlockHash::root(b"m");
    let prompt = text(1, 300);
    // Slots alone, blocks in memory, and blocks on disk after a restart.
    for (slots, tokens, disk) in [(4, 512, false), (1, 4096, false), (4, 4096, true)] {
        for (first, then, expected) in
            [("", "", true), ("a", "a", true), ("", "a", false), ("a", "", false), ("a", "b", false)]
        {
            let story =
                format!("{first:?}, then {then:?}, in {slots} slots of {tokens} tokens, on disk: {disk}");
            let (mut cache, mut rank) = (cache(slots, tokens, disk), FakeRank::default());
            assert_eq!(serve_salted(&mut cache, &mut rank, &prompt, &[7], first), 0, "{story}");
            let cached = serve_salted(&mut cache, &mut rank, &[&prompt[..], &[8]].concat(), &[7], then);
            assert_eq!(cached > 0, expected, "{story}: {cached}");
            if !disk {
                continue;
            }
            let on_disk = block_hashes(root.scoped(salted(first)), &prompt);
            assert!(on_disk.iter().all(|hash| rank.on_disk.contains_key(hash)), "{story}");
            let limits = capacity(slots, tokens, disk);
            let mut rank = FakeRank { on_disk: rank.on_disk, ..FakeRank::default() };
            let mut again = PrefixCache::new(root, limits, &on_disk);
            let cached = serve_salted(&mut again, &mut rank, &prompt, &[], then);
            assert_eq!(cached > 0, expected, "{story}: {cached} after a restart");
        }
    }
}

#[test]
fn slot_whose_blocks_were_lost_keeps_its_salt() {
    let limits = capacity(2, 4096, true);
    let (root, prompt) = (BlockHash::root(b"m"), text(1, 300));
    let mut cache = PrefixCache::new(root, limits, &block_hashes(root.scoped(salted("a")), &prompt));
    let SlotAssignment { slot, fetch_from_disk: fetch, .. } = cache.admit(&prompt, salted("a")).unwrap();
    cache.finish_fetch(slot, &fetch, 0);
    cache.grow(slot, 300);
    cache.release(slot, prompt.clone());
    assert_eq!(cache.admit(&prompt, salted("")).unwrap().cached, 0);
    assert_eq!(cache.admit(&prompt, salted("a")).unwrap().cached, 299);
}

#[test]
fn disabled_prefix_cache_stores_nothing() {
    let limits = CacheCapacity { enabled: false, ..capacity(1, 4096, true) };
    let mut cache = PrefixCache::new(BlockHash::root(b"m"), limits, &[]);
    for _ in 0..2 {
        let entry = cache.admit(&text(1, 300), salted("")).unwrap();
        assert_eq!((entry.cached, entry.fetch_from_disk), (0, vec![]));
        cache.grow(0, 300);
        cache.store_prompt(0, &text(1, 300));
        cache.release(0, text(1, 300));
        assert_eq!(cache.take_commands(), [CacheCommand::Reset { slot: 0 }]);
    }
}

/// Requests arrive, grow and end in random order, with shared prefixes and vanishing files: the ranks never
/// hold more than the capacity, and every slot holds its request's tokens.
#[test]
fn random_operations_keep_slots_correct_and_within_capacity() {
    let (mut reused, mut fetches, mut restored, mut shared, mut forked, mut rejected) = (0, 0, 0, 0, 0, 0);
    for seed in 0..700 {
        let mut random = StdRng::seed_from_u64(seed);
        // Layers of all kinds, those of a window, and those with a state.
        let max_rewind = [None, None, Some(64), Some(0)][seed as usize % 4];
        let slots = random.random_range(1..5);
        let context: u32 = random.random_range(200..1500);
        // The planner's reservation, rounded like slots.
        let limit = u64::from(context.next_multiple_of(CACHE_STEP)) * u64::from(slots);
        let blocks = max_rewind.is_none();
        let capacity = CacheCapacity { blocks, max_rewind, ..capacity(slots, limit, random.random()) };
        let mut cache = PrefixCache::new(BlockHash::root(b"m"), capacity, &[]);
        let mut rank = FakeRank { max_rewind, ..FakeRank::default() };
        let mut running: Vec<(u32, Vec<u32>, usize, Checkpoints)> = Vec::new();
        let mut known = std::collections::BTreeSet::new();
        let mut earlier: Vec<u32> = Vec::new();
        for _ in 0..120 {
            let what = random.random_range(0..10);
            if what < 4 {
                let share = random.random_range(0..context.min(900));
                let own = random.random_range(1..=context - share);
                let mut prompt =
                    [text(random.random_range(0..3), share), text(random.random_range(10..99), own)].concat();
                if random.random_range(0..3) == 0 {
                    // One that ended goes on, but for what it ended with.
                    let kept = earlier.len().saturating_sub(random.random_range(0..200));
                    prompt = [&earlier[..kept], &prompt[share as usize..]].concat();
                    prompt.truncate(context as usize);
                }
                if let Some(SlotAssignment { slot, cached, fetch_from_disk: fetch, checkpoints }) =
                    cache.admit(&prompt, salted(["", "", "", "a"][random.random_range(0..4)]))
                {
                    reused += u32::from(cached > 0);
                    let mut cached = cached as usize;
                    for order in cache.take_commands() {
                        restored += u32::from(matches!(order, CacheCommand::Restore { .. }));
                        forked += u32::from(matches!(order, CacheCommand::Fork { .. }));
                        rank.apply(order);
                    }
                    if !fetch.is_empty() {
                        fetches += 1;
                        let loaded = rank.fetch(slot, &fetch);
                        if (loaded as usize) < fetch.len() {
                            cache.finish_fetch(slot, &fetch, loaded);
                            cached = 0;
                        }
                    }
                    running.push((slot, prompt, cached, checkpoints));
                } else {
                    assert_eq!(running.len(), slots as usize, "seed {seed}: a slot was refused");
                }
            } else if what < 8 && !running.is_empty() {
                let which = random.random_range(0..running.len());
                let (slot, tokens, cached, checkpoints) = &mut running[which];
                let here = checkpoints.take(*cached as u32);
                if here.fork_at.is_some() {
                    shared += 1;
                    cache.fork(*slot, &tokens[..*cached]);
                }
                if here.snapshot_at.is_some() {
                    cache.snapshot(*slot);
                }
                let more = random.random_range(1..300).min(context as usize - *cached);
                let next = checkpoints.tokens_to_next(*cached as u32);
                let to = *cached + next.map_or(more, |tokens| more.min(tokens as usize));
                let longer = text(random.random_range(0..99), 300);
                tokens.extend(&longer[..to.saturating_sub(tokens.len())]);
                cache.grow(*slot, to as u32);
                cache.take_commands().into_iter().for_each(|order| rank.apply(order));
                rank.run(*slot, &tokens[*cached..to]);
                // All of the step is taken back, or a part of it. Slots are copied less often then.
                let kept = if max_rewind == Some(0) { *cached } else { to.saturating_sub(8).max(*cached) };
                let is_rejected = seed >= 600 && random.random_range(0..4) == 0;
                let to = if is_rejected { kept } else { to };
                if is_rejected {
                    rank.step_beginnings.insert(*slot, kept);
                    cache.shrink(*slot, kept as u32);
                    cache.take_commands().into_iter().for_each(|order| rank.apply(order));
                    rank.step_beginnings.remove(slot);
                    rejected += 1;
                }
                *cached = to;
                if random.random() {
                    cache.store_prompt(*slot, &tokens[..to]);
                }
            } else if what < 9 && !running.is_empty() {
                let (slot, tokens, ..) = running.swap_remove(random.random_range(0..running.len()));
                earlier.clone_from(&tokens);
                if random.random_range(0..5) == 0 { cache.discard(slot) } else { cache.release(slot, tokens) }
            } else {
                rank.on_disk.retain(|_, _| random.random_range(0..4) > 0);
            }
            cache.take_commands().into_iter().for_each(|order| rank.apply(order));
            assert!(rank.tokens() <= limit, "seed {seed}: {} tokens in room for {limit}", rank.tokens());
            assert!(rank.tokens() <= cache.used_tokens(), "seed {seed}: more is there than is counted");
            for (slot, tokens, cached, _) in &running {
                let held = rank.slots.get(slot).map_or(&[][..], |(held, _)| held);
                assert_eq!(held, &tokens[..*cached], "seed {seed}: slot {slot}");
            }
            let BlockDelta { added, removed: dropped } = cache.take_delta();
            added.iter().for_each(|key| assert!(known.insert(*key), "seed {seed}: added twice"));
            dropped.iter().for_each(|key| assert!(known.remove(key), "seed {seed}: dropped twice"));
        }
        let mut all = cache.stored_blocks();
        all.sort();
        assert!(all.iter().all(|key| known.contains(key)), "seed {seed}: what is known was reported");
    }
    println!(
        "{reused} prompts began with what was kept, {fetches} of them on disk, {restored} in a snapshot; {shared} began like another, {forked} with a copy of that"
    );
    assert!(reused > 500 && fetches > 20 && restored > 20 && shared > 100 && forked > 4 && rejected > 100);
}

/// Runs a request on layers that go back by at most `most` tokens to its end, one step ahead of it; returns how many of
/// its tokens were cached.
fn serve_with_snapshots(cache: &mut PrefixCache, rank: &mut FakeRank, prompt: &[u32], answer: &[u32]) -> u32 {
    let assignment = cache.admit(prompt, salted("")).unwrap();
    serve_assigned(cache, rank, assignment, prompt, answer)
}

/// The same of one that has its slot.
fn serve_assigned(
    cache: &mut PrefixCache,
    rank: &mut FakeRank,
    assignment: SlotAssignment,
    prompt: &[u32],
    answer: &[u32],
) -> u32 {
    let SlotAssignment { slot, cached, mut checkpoints, .. } = assignment;
    cache.take_commands().into_iter().for_each(|order| rank.apply(order));
    let tokens = [prompt, answer].concat();
    let mut have = cached as usize;
    assert_eq!(rank.slots.get(&slot).map_or(&[][..], |(tokens, _)| tokens), &tokens[..have]);
    while have < tokens.len() {
        let here = checkpoints.take(have as u32);
        if here.fork_at.is_some() {
            cache.fork(slot, &tokens[..have]);
        }
        if here.snapshot_at.is_some() {
            cache.snapshot(slot);
        }
        let end = checkpoints.tokens_to_next(have as u32).map_or(tokens.len(), |next| have + next as usize);
        cache.grow(slot, end as u32);
        cache.take_commands().into_iter().for_each(|order| rank.apply(order));
        rank.run(slot, &tokens[have..end]);
        have = end;
    }
    cache.release(slot, tokens);
    cache.take_commands().into_iter().for_each(|order| rank.apply(order));
    cached
}

#[test]
fn prompt_admitted_to_an_empty_slot_is_reused_like_others() {
    for most in [0, 64] {
        let capacity = CacheCapacity { blocks: false, max_rewind: Some(most), ..capacity(4, 8192, false) };
        let mut cache = PrefixCache::new(BlockHash::root(b"m"), capacity, &[]);
        let mut rank = FakeRank { max_rewind: Some(most), ..FakeRank::default() };
        let prompt = text(1, 500);
        let assignment = cache.admit_empty(&prompt, salted("")).unwrap();
        assert_eq!(serve_assigned(&mut cache, &mut rank, assignment, &prompt, &text(2, 200)), 0);
        // Another answer, and so another conversation.
        let longer = [prompt.clone(), text(3, 200)].concat();
        let cached = serve_with_snapshots(&mut cache, &mut rank, &longer, &text(4, 10));
        assert_eq!(cached, 500 - SNAPSHOT_MARGIN, "layers that go back by {most}");
        // What two prompts begin with is known of it too.
        let other = [text(1, 500), text(5, 100)].concat();
        let assignment = cache.admit_empty(&other, salted("")).unwrap();
        assert!(assignment.checkpoints.fork_at.is_some(), "{assignment:?}");
    }
}

#[test]
fn conversation_goes_on_from_the_snapshot_of_its_last_prompt() {
    for most in [0, 64] {
        let capacity = CacheCapacity { blocks: false, max_rewind: Some(most), ..capacity(2, 8192, false) };
        let mut cache = PrefixCache::new(BlockHash::root(b"m"), capacity, &[]);
        let mut rank = FakeRank { max_rewind: Some(most), ..FakeRank::default() };
        let mut history = text(1, 500);
        for turn in 0..4 {
            // The template begins an answer with a mark, and the next prompt has neither the mark nor the thoughts.
            let prompt = [history.clone(), text(70, 2)].concat();
            let thoughts = text(80 + turn, 1000);
            let cached = serve_with_snapshots(&mut cache, &mut rank, &prompt, &thoughts);
            let expected = if turn == 0 { 0 } else { history.len() as u32 - 20 + 2 - SNAPSHOT_MARGIN };
            assert_eq!(cached, expected, "turn {turn}, layers that go back by {most}");
            history.extend(text(90 + turn, 20));
        }
        // A conversation that repeats everything goes on where it was.
        let prompt = [history.clone(), text(70, 2)].concat();
        serve_with_snapshots(&mut cache, &mut rank, &prompt, &text(95, 100));
        let longer = [prompt.clone(), text(95, 100), text(96, 10)].concat();
        let cached = serve_with_snapshots(&mut cache, &mut rank, &longer, &text(97, 10));
        assert_eq!(cached as usize, prompt.len() + 100);
    }
}

#[test]
fn conversation_goes_on_behind_a_step_that_was_taken_back() {
    let capacity = CacheCapacity { blocks: false, max_rewind: Some(0), ..capacity(2, 8192, false) };
    let mut cache = PrefixCache::new(BlockHash::root(b"m"), capacity, &[]);
    let prompt = text(1, 300);
    let SlotAssignment { slot, .. } = cache.admit(&prompt, salted("")).unwrap();
    cache.grow(slot, 300);
    // A step with more draft tokens than the answer has left.
    cache.grow(slot, 309);
    cache.shrink(slot, 300);
    assert_eq!(cache.take_commands(), [CacheCommand::Truncate { slot, length: 300 }]);
    cache.grow(slot, 303);
    let answered = [prompt, text(2, 3)].concat();
    cache.release(slot, answered.clone());
    assert_eq!(cache.admit(&[answered, text(3, 9)].concat(), salted("")).unwrap().cached, 303);
}

#[test]
fn prompts_that_begin_alike_get_copies_of_what_they_share() {
    for most in [0, 64] {
        let limits = CacheCapacity { blocks: false, max_rewind: Some(most), ..capacity(4, 16384, false) };
        let mut cache = PrefixCache::new(BlockHash::root(b"m"), limits, &[]);
        let mut rank = FakeRank { max_rewind: Some(most), ..FakeRank::default() };
        // What they share ends within a block.
        let prompt = |own| [text(1, 1000), text(own, 300)].concat();
        let cached: Vec<u32> = (2..12)
            .map(|own| serve_with_snapshots(&mut cache, &mut rank, &prompt(own), &text(50, 20)))
            .collect();
        // The second says what they share, and every further one has it.
        assert_eq!(cached, [vec![0, 0], vec![960; 8]].concat(), "layers that go back by {most}");
        // A conversation goes on in its own slot.
        let longer = [prompt(11), text(50, 20), text(60, 40)].concat();
        assert_eq!(serve_with_snapshots(&mut cache, &mut rank, &longer, &text(61, 20)), 1320);
        assert_eq!(serve_with_snapshots(&mut cache, &mut rank, &prompt(12), &text(50, 20)), 960);
        // Another beginning that two share.
        let other = |own| [text(40, 700), text(own, 300)].concat();
        let cached: Vec<u32> = (2..6)
            .map(|own| serve_with_snapshots(&mut cache, &mut rank, &other(own), &text(50, 20)))
            .collect();
        assert_eq!(cached, [0, 0, 640, 640]);
    }
}

#[test]
fn a_template_that_has_no_room_beside_it_is_taken() {
    let limits = CacheCapacity { blocks: false, max_rewind: Some(0), ..capacity(4, 2048, false) };
    let mut cache = PrefixCache::new(BlockHash::root(b"m"), limits, &[]);
    let mut rank = FakeRank { max_rewind: Some(0), ..FakeRank::default() };
    let prompt = |own| [text(1, 900), text(own, 100)].concat();
    let cached: Vec<u32> =
        (2..6).map(|own| serve_with_snapshots(&mut cache, &mut rank, &prompt(own), &text(50, 20))).collect();
    println!("{cached:?}");
    assert_eq!(cached[..2], [0, 0]);
    assert!(cached[2..].contains(&896));
}
