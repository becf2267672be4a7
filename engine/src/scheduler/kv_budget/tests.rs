//! Admission and preemption: one story per line, and properties that hold for random requests.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

/// A sequence that may be preempted again, with a prompt, an output so far, and a distant length limit.
fn usage(number: u64, priority: i32, prompt: u32, generated: u32) -> SequenceUsage {
    let held = prompt + generated;
    let (limit, since) = (100_000, MIN_TOKENS_BEFORE_PREEMPTION);
    SequenceUsage {
        priority,
        number,
        prompt,
        generated,
        limit,
        tokens_since_admission: since,
        cached_tokens: held,
        ..SequenceUsage::default()
    }
}

fn preempted_often(one: SequenceUsage) -> SequenceUsage {
    SequenceUsage { preemptions: MAX_PREEMPTIONS, ..one }
}

#[test]
fn expected_tokens_follow_typical_answer_lengths() {
    let mut pool = KvBudget::new(1_000_000, 10_000);
    let limited = |limit| SequenceUsage { limit, ..usage(0, 0, 100, 0) };
    let table = |pool: &KvBudget| {
        [
            ("a new one", usage(0, 0, 100, 0)),
            ("one that names a limit", limited(10)),
            ("the last tokens of one", SequenceUsage { limit: 1005, ..usage(0, 0, 100, 1000) }),
            ("one that has come far", usage(0, 0, 100, 1000)),
            ("one that left often enough gets all it may need", preempted_often(limited(5000))),
            ("a context and no more", usage(0, 0, 9_900, 50)),
        ]
        .map(|(story, one)| (story, pool.expected_tokens(&one)))
    };
    assert_eq!(
        table(&pool),
        [
            ("a new one", 512),
            ("one that names a limit", 256),
            ("the last tokens of one", 1280),
            ("one that has come far", 1536),
            ("one that left often enough gets all it may need", 5120),
            ("a context and no more", 10_000),
        ]
    );
    for _ in 0..200 {
        pool.record_answer(2000);
    }
    assert_eq!(table(&pool).map(|(_, forecast)| forecast), [2304, 256, 1280, 3328, 5120, 10_000]);
    for _ in 0..200 {
        pool.record_answer(1);
    }
    assert_eq!(pool.expected_tokens(&usage(0, 0, 100, 0)), 512, "short answers make no promise");
    // A KV cache smaller than the context is enough for one sequence, however long.
    assert_eq!(KvBudget::new(1000, 10_000).expected_tokens(&preempted_often(usage(0, 0, 100, 0))), 1000);
}

#[test]
fn admission_preempts_only_lower_priorities() {
    let low = |number| usage(number, -1, 700, 40);
    let young = |one| SequenceUsage { tokens_since_admission: MIN_TOKENS_BEFORE_PREEMPTION - 1, ..one };
    let newcomer = usage(9, 0, 700, 0);
    // Each needs 1,024 with its expected length.
    for (story, capacity, free, running, newcomer, expected) in [
        ("an empty engine", 1024, 1, vec![], newcomer, Some(vec![])),
        ("one that needs more than expected of any", 700, 1, vec![], newcomer, Some(vec![])),
        ("there is room and a slot", 2048, 1, vec![usage(0, 0, 700, 0)], newcomer, Some(vec![])),
        ("a slot without room", 2047, 1, vec![usage(0, 0, 700, 0)], newcomer, None),
        ("room without a slot", 9999, 0, vec![usage(0, 0, 700, 0)], newcomer, None),
        ("equals stay", 9999, 0, vec![usage(0, 0, 700, 99)], newcomer, None),
        ("lower ones leave for a slot", 9999, 0, vec![low(0)], newcomer, Some(vec![0])),
        ("and for room", 1024, 1, vec![low(0)], newcomer, Some(vec![0])),
        ("the youngest first", 9999, 0, vec![low(1), low(3), low(2)], newcomer, Some(vec![1])),
        (
            "the lowest before the youngest",
            9999,
            0,
            vec![usage(1, -5, 700, 40), low(3), low(2)],
            newcomer,
            Some(vec![0]),
        ),
        ("not before they got some tokens", 9999, 0, vec![young(low(0))], newcomer, None),
        ("others do instead", 9999, 0, vec![low(0), young(low(1))], newcomer, Some(vec![0])),
        ("not for ever", 9999, 0, vec![preempted_often(low(0))], newcomer, None),
        ("several if need be", 2048, 1, vec![low(0), low(1)], usage(9, 0, 1600, 0), Some(vec![0, 1])),
        (
            "none in vain",
            2560,
            1,
            vec![usage(0, -2, 10, 40), usage(1, -1, 1500, 40)],
            usage(9, 0, 1600, 0),
            Some(vec![1]),
        ),
        (
            "nobody where it is not enough",
            2048,
            1,
            vec![low(0), usage(1, 0, 700, 0)],
            usage(9, 0, 1600, 0),
            None,
        ),
    ] {
        let entry = KvBudget::new(capacity, 10_000).admission(&newcomer, &running, free);
        assert_eq!(entry, expected.map_or(KvAdmission::Wait, KvAdmission::AfterPreempting), "{story}");
    }
}

#[test]
fn kv_shortage_picks_the_lowest_and_youngest_victim() {
    let grown = |number| usage(number, 0, 500, 12);
    for (story, capacity, running, more, expected) in [
        ("there is room", 1536, vec![grown(0), grown(1), grown(2)], [0; 3], None),
        ("the youngest", 1791, vec![grown(0), grown(1), grown(2)], [0, 1, 0], Some(2)),
        ("also when it is the one that grows", 1791, vec![grown(0), grown(1), grown(2)], [0, 0, 1], Some(2)),
        ("wherever it stands", 1791, vec![grown(3), grown(1), grown(2)], [0, 0, 1], Some(0)),
        ("the lowest first", 1791, vec![usage(0, -1, 500, 12), grown(1), grown(2)], [1, 0, 0], Some(0)),
        (
            "whose slot is being filled stays",
            1791,
            vec![grown(0), grown(1), SequenceUsage { is_pinned: true, ..grown(2) }],
            [1, 0, 0],
            Some(1),
        ),
        (
            "who left often enough stays",
            1791,
            vec![grown(0), grown(1), preempted_often(grown(2))],
            [1, 0, 0],
            Some(1),
        ),
    ] {
        assert_eq!(KvBudget::new(capacity, 10_000).victim(&running, &more), expected, "{story}");
    }
    assert_eq!(KvBudget::new(1, 10_000).victim(&[grown(0)], &[1]), None, "the last one stays");
}

#[test]
fn a_prompt_that_fills_the_cache_is_refused_with_the_numbers() {
    assert_eq!(max_answer_tokens(10, 90, 100), Ok(90));
    assert_eq!(max_answer_tokens(10, 90, 50), Ok(40));
    assert_eq!(max_answer_tokens(10, 90, u64::MAX), Ok(90));
    assert_eq!(max_answer_tokens(51, 0, 51), Ok(0), "no answer is asked for");
    assert_eq!(max_answer_tokens(52, 0, 51).unwrap_err().kind, FailureKind::ContextLengthExceeded);
    let failure = max_answer_tokens(51, 90, 51).unwrap_err();
    assert_eq!(failure.kind, FailureKind::ContextLengthExceeded);
    assert!(failure.message.contains("length is 51 tokens, all that the KV cache"), "{}", failure.message);
}

/// Sequences arrive, grow, get preempted and resume at random, one token per round.
#[test]
fn kv_budget_is_never_exceeded_and_every_sequence_ends() {
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let context = random.random_range(1..3000);
        let capacity = random.random_range(1..10_000);
        let slots = random.random_range(1..12);
        let mut pool = KvBudget::new(capacity, context);
        let mut waiting: Vec<(SequenceUsage, u32)> = (0..random.random_range(1..30))
            .filter_map(|number| {
                let prompt = random.random_range(1..=context);
                let limit =
                    max_answer_tokens(prompt, context - prompt, capacity).ok().filter(|limit| *limit > 0)?;
                // Clients mostly set no limit; the output ends where it does.
                let length = random.random_range(1..=limit);
                let priority = random.random_range(-1..=1);
                Some((SequenceUsage { priority, number, prompt, limit, ..SequenceUsage::default() }, length))
            })
            .collect();
        let mut running: Vec<(SequenceUsage, u32)> = Vec::new();
        let (mut rounds, work) = (0, waiting.iter().map(|(one, length)| one.prompt + length).sum::<u32>());
        while !(waiting.is_empty() && running.is_empty()) {
            let back = |mut all: Vec<(SequenceUsage, u32)>,
                        index: usize,
                        waiting: &mut Vec<(SequenceUsage, u32)>| {
                let (one, length) = all.remove(index);
                assert!(one.preemptions < MAX_PREEMPTIONS, "{one:?} leaves once more");
                waiting.push((
                    SequenceUsage {
                        preemptions: one.preemptions + 1,
                        cached_tokens: 0,
                        tokens_since_admission: 0,
                        ..one
                    },
                    length,
                ));
                all
            };
            waiting.sort_by_key(|(one, _)| (Reverse(one.priority), one.number));
            while let Some((newcomer, length)) = waiting.first().copied() {
                let tenants: Vec<SequenceUsage> = running.iter().map(|(one, _)| *one).collect();
                let KvAdmission::AfterPreempting(leave) =
                    pool.admission(&newcomer, &tenants, slots - running.len())
                else {
                    break;
                };
                waiting.remove(0);
                for index in leave.into_iter().rev() {
                    assert!(running[index].0.priority < newcomer.priority);
                    running = back(running, index, &mut waiting);
                }
                running.push((newcomer, length));
                waiting.sort_by_key(|(one, _)| (Reverse(one.priority), one.number));
            }
            assert!(!running.is_empty() && running.len() <= slots);
            // Prompts in chunks, outputs one token at a time.
            let more = |one: &SequenceUsage| (one.prompt + one.generated - one.cached_tokens).clamp(1, 300);
            loop {
                let tenants: Vec<SequenceUsage> = running.iter().map(|(one, _)| *one).collect();
                let grows: Vec<u32> = tenants.iter().map(more).collect();
                let Some(index) = pool.victim(&tenants, &grows) else { break };
                running = back(running, index, &mut waiting);
            }
            for (one, _) in &mut running {
                one.cached_tokens += more(one);
                if one.cached_tokens >= one.prompt + one.generated {
                    one.generated += 1;
                    one.tokens_since_admission += 1;
                }
            }
            let taken: u64 = running.iter().map(|(one, _)| pool.reserved_tokens(one.cached_tokens)).sum();
            assert!(taken <= capacity, "{taken} of {capacity} tokens are taken");
            running.retain(|(one, length)| {
                let over = one.generated >= *length;
                if over {
                    pool.record_answer(one.generated);
                }
                !over
            });
            rounds += 1;
            assert!(rounds < 10 * work + 100, "seed {seed} comes to no end");
        }
    }
}
