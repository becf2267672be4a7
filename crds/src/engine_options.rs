//! What a deployment asks of its engines beyond the split: options that change how a replica computes, and not where.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the engines of a deployment compute. It travels with the plan, so that another option is another plan; what is
/// left at its default is left out everywhere, so that plans made before an option existed keep their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineOptions {
    /// In what form keys and values of conversations are kept; left out: AsComputed. Fewer bits are more context in
    /// the same memory, slower and a little less exact.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_cache: KvCacheType,
    /// Who guesses the next tokens of answers, which are then checked several at a time; left out: PromptLookup. The
    /// answers are the same.
    #[serde(default, skip_serializing_if = "is_default")]
    pub speculation: Speculation,
    /// How ranks on Metal wait for what they add up; left out: Default, which is safe.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fence: Fence,
}

/// The options that engines of this release have, by their field: agents report them, and nothing that asks for
/// another is placed on their nodes.
pub const ENGINE_OPTIONS: &[&str] = &["fence", "kvCache", "speculation", DRAFT_MODEL];

/// What agents report whose engines guess with a draft model: a deployment's `spec.draftModelRef`.
pub const DRAFT_MODEL: &str = "draftModel";

impl EngineOptions {
    /// The options that are not left at their default, by their field.
    pub fn non_default(&self) -> impl Iterator<Item = &'static str> {
        let Self { kv_cache, speculation, fence } = self;
        let asked = [
            ("fence", !is_default(fence)),
            ("kvCache", !is_default(kv_cache)),
            ("speculation", !is_default(speculation)),
        ];
        asked.into_iter().filter(|(_, asked)| *asked).map(|(field, _)| field)
    }

    /// Whether nothing is asked for.
    pub fn is_default(&self) -> bool {
        is_default(self)
    }
}

/// In what form keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvCacheType {
    /// As the model computes them, 16 or 32 bits each.
    #[default]
    AsComputed,
    /// 8 bits each, with a scale and a bias for every group of 64 of one head, or of 32 where heads are no
    /// multiple of 64 wide.
    Int8,
    /// 4 bits each, in the same groups.
    Int4,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Who guesses the next tokens of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Speculation {
    /// What followed the same tokens before, in the prompt or the answer, as far as that pays.
    #[default]
    PromptLookup,
    /// Nobody.
    Off,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// How ranks on Metal wait for a collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Fence {
    /// As MLX comes: about 180 µs for each.
    #[default]
    Default,
    /// The GPU looks for it itself (`MLX_METAL_FAST_SYNCH`), about 4 µs for each. Known to wedge GPUs now and then; the
    /// agent then kills the rank, and the group forms anew.
    Fast,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_options_serialise_only_non_default_fields() {
        let lookup = Speculation::PromptLookup;
        for (kv_cache, speculation, fence, json, asked) in [
            (KvCacheType::AsComputed, lookup, Fence::Default, "{}", vec![]),
            (KvCacheType::Int4, lookup, Fence::Default, r#"{"kvCache":"Int4"}"#, vec!["kvCache"]),
            (
                KvCacheType::Int8,
                Speculation::Off,
                Fence::Fast,
                r#"{"kvCache":"Int8","speculation":"Off","fence":"Fast"}"#,
                vec!["fence", "kvCache", "speculation"],
            ),
        ] {
            let options = EngineOptions { kv_cache, speculation, fence };
            assert_eq!(serde_json::to_string(&options).unwrap(), json);
            assert_eq!(serde_json::from_str::<EngineOptions>(json).unwrap(), options);
            assert_eq!(
                (options.non_default().collect::<Vec<_>>(), options.is_default()),
                (asked.clone(), asked.is_empty())
            );
            assert!(asked.iter().all(|option| ENGINE_OPTIONS.contains(option)));
        }
        assert_eq!(serde_json::from_str::<KvCacheType>("\"Int2\"").unwrap(), KvCacheType::Unknown);
        assert_eq!(serde_json::from_str::<Fence>("\"Electric\"").unwrap(), Fence::Unknown);
        assert_eq!(serde_json::from_str::<Speculation>("\"Oracle\"").unwrap(), Speculation::Unknown);
    }
}
