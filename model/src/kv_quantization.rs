//! How quantised KV caches group the numbers of a head: the planner adds up by it, and the engine quantises by it.

/// Group sizes that caches are quantised in, the best first: what mlx-lm takes, and the smallest that MLX has.
pub const KV_GROUPS: [u32; 2] = [64, 32];

/// So many numbers of a head share a scale and a bias in a quantised cache; `None` where heads of this width do not
/// divide into groups that MLX can quantise.
pub fn kv_group(head_dim: u32) -> Option<u32> {
    KV_GROUPS.into_iter().find(|group| head_dim > 0 && head_dim.is_multiple_of(*group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_cut_into_the_largest_groups_that_divide_them() {
        for (head_dim, group) in [
            (0, None),
            (16, None),
            (32, Some(32)),
            (64, Some(64)),
            (80, None),
            (96, Some(32)),
            (128, Some(64)),
            (192, Some(64)),
        ] {
            assert_eq!(kv_group(head_dim), group, "{head_dim}");
        }
    }
}
