//! KV-cache capacity: reserved for all sequences at full length, or for the requested number of tokens.

use super::*;

const MIB: u64 = 1 << 20;

/// Four layers of 1 GiB, and 4 GiB of KV cache for a context of 1,024 tokens.
fn wide(gib: u64) -> Snapshot {
    let mut view = view(&[("a", gib)], 4);
    view.models.values_mut().for_each(|shape| shape.kv_bytes_per_token_per_layer = MIB);
    view
}

fn spec_with_kv(max_sequences: u32, kv_tokens: Option<u64>) -> ModelDeploymentSpec {
    let mut spec = spec(ShardingMode::Auto, None, 1);
    let kv = &mut spec.sharding.as_mut().unwrap().kv;
    (kv.max_sequences, kv.kv_tokens) = (max_sequences, kv_tokens);
    spec
}

#[test]
fn kv_tokens_fit_more_sequences_than_full_contexts() {
    let view = wide(20);
    for (sequences, kv_tokens, planned) in [
        (2, None, Some((None, 8))),
        (8, None, None),
        (8, Some(2048), Some((Some(2048), 8))),
        (8, Some(1024), Some((Some(1024), 4))),
        (8, Some(8192), None),
        (2, Some(9000), Some((None, 8))), // more than all can have
    ] {
        let (placement, notes) = checked(&view, &desired(&view, &spec_with_kv(sequences, kv_tokens)));
        let plan =
            placement.create.first().map(|new| (new.plan.kv_tokens, new.plan.members[0].kv_bytes / GIB));
        assert_eq!(plan, planned, "{sequences} {kv_tokens:?}: {notes}");
    }
}

#[test]
fn another_kv_capacity_is_another_group() {
    let before = wide(40);
    let old = desired(&before, &spec_with_kv(4, Some(2048)));
    let now = ready(checked(&before, &old).0.apply(&before, &old));
    for (kv_tokens, unchanged) in
        [(Some(2048), true), (Some(1024), false), (Some(2049), false), (None, false)]
    {
        let (placement, notes) = checked(&now, &desired(&now, &spec_with_kv(4, kv_tokens)));
        assert_eq!(placement.is_empty(), unchanged, "{kv_tokens:?}: {notes}");
    }
}
