//! Validation of a ShardingStrategy: by itself, and for the models of the deployments that use it.

use std::borrow::Cow;

use russet_crds::{EngineOptions, Sharding};
use russet_model::shape::ModelShape;

use super::{RequestedSplit, shape_notes, split};
use crate::note::{self, Note};

/// Maximum number of deployments that a verdict names.
const MAX_SHOWN_DEPLOYMENTS: usize = 5;

/// The verdict on a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StrategyVerdict {
    /// It works, except for these deployments, with reasons.
    Works(Vec<String>),
    /// It never works, with reasons.
    Never(Vec<Note>),
    /// It works for none of the deployments that use it, with reasons.
    WorksForNone(Vec<String>),
}

/// Validates a strategy; `users` are the deployments that name it, each with its model if known.
pub fn judge_strategy<'a>(
    sharding: &Sharding,
    users: impl Iterator<Item = (String, &'a str, Cow<'a, ModelShape>)>,
) -> StrategyVerdict {
    let asked = RequestedSplit { source: "spec".to_owned(), sharding: sharding.clone() };
    let notes = notes(&asked, &permissive_shape(sharding));
    if !notes.is_empty() {
        return StrategyVerdict::Never(notes);
    }
    let (mut refused, mut works) = (Vec::new(), false);
    for (user, model, shape) in users {
        let mut notes = shape_notes(model, &shape);
        if notes.is_empty() {
            notes = self::notes(&asked, &shape);
        }
        match notes.is_empty() {
            true => works = true,
            false if refused.len() < MAX_SHOWN_DEPLOYMENTS => {
                refused.push(format!("ModelDeployment {user}: {}", note::join(&notes)));
            }
            false => {}
        }
    }
    if works || refused.is_empty() {
        StrategyVerdict::Works(refused)
    } else {
        StrategyVerdict::WorksForNone(refused)
    }
}

fn notes(asked: &RequestedSplit, shape: &ModelShape) -> Vec<Note> {
    let mut notes = Vec::new();
    asked.capacity(shape, EngineOptions::default(), &mut notes);
    asked.link_demand(&mut notes);
    split::split(asked, shape, &mut notes);
    notes
}

/// A model that can be split in every way that a strategy's numbers allow: a strategy that is invalid for
/// this one is invalid for every model.
fn permissive_shape(sharding: &Sharding) -> ModelShape {
    let Sharding { ranks, tensor_size, layers_per_rank, .. } = sharding;
    let parts = ranks.unwrap_or(1).saturating_mul(tensor_size.unwrap_or(1)).clamp(1, super::MAX_RANKS.pow(2));
    // Without numbers, enough parts that every usual size divides them.
    let parts = if parts == 1 { 64 } else { parts };
    let layers = layers_per_rank
        .as_ref()
        .map_or(4096, |layers| layers.iter().fold(0_u32, |sum, &count| sum.saturating_add(count)));
    ModelShape {
        layers,
        attention_heads: parts,
        key_value_heads: parts,
        head_dim: 1,
        intermediate_size: parts,
        ..ModelShape::default()
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::{BackendChoice, KvCapacity, ShardingMode};

    use super::*;

    fn verdict_text(sharding: &Sharding, users: &[(&str, &ModelShape)]) -> String {
        let users = users.iter().map(|(user, shape)| ((*user).to_owned(), "m", Cow::Borrowed(*shape)));
        match judge_strategy(sharding, users) {
            StrategyVerdict::Works(refused) => format!("works {}", refused.join("; ")),
            StrategyVerdict::Never(notes) => format!("never {}", note::join(&notes)),
            StrategyVerdict::WorksForNone(refused) => format!("nobody {}", refused.join("; ")),
        }
    }

    #[test]
    fn a_strategy_that_contradicts_itself_can_never_work() {
        use ShardingMode::*;
        let of = |mode, ranks, tensor_size, layers: &[u32], backend| Sharding {
            mode,
            ranks,
            tensor_size,
            layers_per_rank: (!layers.is_empty()).then(|| layers.to_vec()),
            backend,
            ..Sharding::default()
        };
        let auto = BackendChoice::Auto;
        for (sharding, expected) in [
            (Sharding::default(), "works "),
            (of(Tensor, Some(2), None, &[], auto), "works "),
            (of(Tensor, Some(7), Some(7), &[], auto), "works "),
            (of(Tensor, None, None, &[], auto), "works "),
            (of(Hybrid, Some(12), None, &[], auto), "works "),
            (of(Hybrid, Some(4), Some(2), &[44, 36], auto), "works "),
            (of(Hybrid, None, None, &[], auto), "works "),
            (of(Pipeline, Some(64), None, &[], auto), "works "),
            (of(Pipeline, None, None, &[3, 2, 1], auto), "works "),
            (of(Single, None, None, &[], auto), "works "),
            (of(Tensor, Some(8), None, &[], BackendChoice::Jaccl), "works "),
            (of(Tensor, Some(4), Some(2), &[], auto), "never spec.tensorSize: 2 differs from the 4 of ranks"),
            (
                of(Pipeline, None, None, &[3, 0], auto),
                "never spec.layersPerRank: rank 1 would hold no layers",
            ),
            (of(Single, Some(2), None, &[], auto), "never spec.mode: Single runs on one rank, not 2"),
            (
                of(Hybrid, Some(6), Some(4), &[], auto),
                "never spec.ranks: 6 ranks do not make two or more stages",
            ),
            (
                of(Pipeline, None, None, &[], BackendChoice::Jaccl),
                "never spec.backend: Jaccl carries the sums",
            ),
            (
                of(Tensor, Some(16), None, &[], BackendChoice::Jaccl),
                "never spec.backend: Jaccl joins at most 8 ranks, and every stage has 16",
            ),
            (of(Unknown, None, None, &[], auto), "never spec.mode is a word of a newer release"),
        ] {
            let said = verdict_text(&sharding, &[]);
            assert!(said.starts_with(expected), "{sharding:?}: {said}");
        }
        let kv = KvCapacity { context_tokens: 0, ..KvCapacity::default() };
        assert!(
            verdict_text(&Sharding { kv, ..Sharding::default() }, &[])
                .starts_with("never spec.kv.contextTokens: 0")
        );
        let fast = Some("99999999T".to_owned());
        let said = verdict_text(&Sharding { min_bits_per_second: fast, ..Sharding::default() }, &[]);
        assert!(said.starts_with("never spec.minBitsPerSecond:"), "{said}");
    }

    #[test]
    fn strategy_is_valid_while_it_works_for_one_deployment() {
        let model = |heads| ModelShape {
            architecture: "llama".to_owned(),
            layers: 2,
            layer_bytes: vec![1; 2],
            attention_heads: heads,
            key_value_heads: heads,
            head_dim: 8,
            intermediate_size: 240,
            ..ModelShape::default()
        };
        let three = Sharding { mode: ShardingMode::Tensor, ranks: Some(3), ..Sharding::default() };
        let (six, eight) = (model(6), model(8));
        let alien = ModelShape { architecture: "mamba".to_owned(), ..model(6) };
        let no = "ModelDeployment ns/b: spec.ranks: 8 KV heads cannot be cut into 3; use 1, 2, 4 or 8";
        assert_eq!(verdict_text(&three, &[("ns/a", &six)]), "works ");
        assert_eq!(verdict_text(&three, &[("ns/a", &six), ("ns/b", &eight)]), format!("works {no}"));
        assert_eq!(verdict_text(&three, &[("ns/b", &eight)]), format!("nobody {no}"));
        let said = verdict_text(&three, &[("ns/c", &alien)]);
        assert!(
            said.starts_with("nobody ModelDeployment ns/c: Model \"m\" has the architecture \"mamba\""),
            "{said}"
        );
    }
}
