//! Engine options of a deployment: how a replica computes, apart from its split. They are the field `engine` of
//! the kinds and the field `options` of an engine's configuration. A new option is a field here and its use in
//! the engine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the engines of a deployment compute. The options are part of the plan: another option is another plan.
/// Defaults are omitted when serialised, so that plans made before an option existed keep their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineOptions {
    /// Format of the KV cache; default: AsComputed. Fewer bits allow more context in the same memory, at some
    /// cost in speed and accuracy.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_cache: KvCacheType,
    /// Format of the weights in memory; default: AsStored. Int8 and Int4 pack the matrices of a repository in 16 or 32
    /// bits while it is read, as mlx-lm's `convert` does: less memory and faster answers, at some cost in accuracy and
    /// a longer start. A repository that is packed already is refused with it; of GGUF it says the bits of what is
    /// packed anew. A draft model stays as it is stored.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quantization: WeightQuantization,
    /// Speculative decoding: the source of draft tokens; default: PromptLookup. The output is the same.
    #[serde(default, skip_serializing_if = "is_default")]
    pub speculation: Speculation,
    /// How ranks on Metal wait for a collective operation; default: Default, which is safe.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fence: Fence,
    /// Whether the first rank of a tensor group chooses the experts for all of them; default: Auto.
    #[serde(default, skip_serializing_if = "is_default")]
    pub router_broadcast: RouterBroadcast,
    /// Maximum number of requests of a replica that wait for a slot of `kv.maxSequences`; default: 64. Beyond it a request
    /// goes to another replica, or is refused as `rate_limit_exceeded`. With 0 none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub max_waiting_requests: Option<u32>,
}

/// Maximum number of waiting requests of an engine whose options name none.
pub const DEFAULT_MAX_WAITING_REQUESTS: u32 = 64;

/// Options that engines of this release support, by field. Agents report them; a deployment that asks for
/// another option is not placed on their nodes.
pub const ENGINE_OPTIONS: &[&str] = &[
    "fence",
    "kvCache",
    MAX_WAITING_REQUESTS,
    "quantization",
    "routerBroadcast",
    "speculation",
    ADAPTERS,
    DRAFT_MODEL,
];

const MAX_WAITING_REQUESTS: &str = "maxWaitingRequests";

/// Reported by agents whose engines support adapters: a deployment's `spec.adapters`.
pub const ADAPTERS: &str = "adapters";

/// Reported by agents whose engines support a draft model: a deployment's `spec.draftModelRef`.
pub const DRAFT_MODEL: &str = "draftModel";

impl EngineOptions {
    /// The options that differ from their defaults, by field.
    pub fn non_default(&self) -> impl Iterator<Item = &'static str> {
        let Self { kv_cache, quantization, speculation, fence, router_broadcast, max_waiting_requests } =
            self;
        let asked = [
            ("fence", !is_default(fence)),
            ("kvCache", !is_default(kv_cache)),
            (MAX_WAITING_REQUESTS, max_waiting_requests.is_some()),
            ("quantization", !is_default(quantization)),
            ("routerBroadcast", !is_default(router_broadcast)),
            ("speculation", !is_default(speculation)),
        ];
        asked.into_iter().filter(|(_, asked)| *asked).map(|(field, _)| field)
    }

    /// The field with a value that only newer releases know.
    pub fn unknown(&self) -> Option<&'static str> {
        let Self { kv_cache, quantization, speculation, fence, router_broadcast, max_waiting_requests: _ } =
            self;
        let fields = [
            ("kvCache", *kv_cache == KvCacheType::Unknown),
            ("quantization", *quantization == WeightQuantization::Unknown),
            ("speculation", *speculation == Speculation::Unknown),
            ("fence", *fence == Fence::Unknown),
            ("routerBroadcast", *router_broadcast == RouterBroadcast::Unknown),
        ];
        fields.into_iter().find(|(_, unknown)| *unknown).map(|(field, _)| field)
    }

    /// Whether all options have their defaults.
    pub fn is_default(&self) -> bool {
        is_default(self)
    }
}

/// Format of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvCacheType {
    /// As the model computes it, 16 or 32 bits per value.
    #[default]
    AsComputed,
    /// 8 bits per value, with a scale and a bias for every group of 64 values of a head, or of 32 where the
    /// head dimension is not a multiple of 64.
    Int8,
    /// 4 bits per value, in the same groups.
    Int4,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Format of the weights in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WeightQuantization {
    /// As the model's files have them.
    #[default]
    AsStored,
    /// 8 bits per value, with a scale and a bias for every group of 64 values of a row. Matrices whose rows do not
    /// divide into such groups, norms and biases stay as they are.
    Int8,
    /// 4 bits per value, in the same groups; what mlx-lm's `convert` keeps in 8 bits, such as routers, has 8.
    Int4,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Source of draft tokens for speculative decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Speculation {
    /// Prompt lookup: the tokens that followed the same n-gram earlier in the prompt or output, while that
    /// pays off.
    #[default]
    PromptLookup,
    /// No speculative decoding.
    Off,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// How ranks on Metal wait for a collective operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Fence {
    /// MLX's default: about 180 µs each.
    #[default]
    Default,
    /// The GPU polls for the result itself (`MLX_METAL_FAST_SYNCH`), about 4 µs each. Known to hang GPUs
    /// occasionally; the agent then kills the rank, and the group re-forms.
    Fast,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether the first rank of a tensor group chooses the experts for all of them. Ranks that choose by themselves choose
/// alike where they round alike; it costs one more sum over the ranks in each layer with experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RouterBroadcast {
    /// Where the ranks have unequal chips.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
            let options = EngineOptions { kv_cache, speculation, fence, ..EngineOptions::default() };
            assert_eq!(serde_json::to_string(&options).unwrap(), json);
            assert_eq!(serde_json::from_str::<EngineOptions>(json).unwrap(), options);
            assert_eq!(
                (options.non_default().collect::<Vec<_>>(), options.is_default()),
                (asked.clone(), asked.is_empty())
            );
            assert!(asked.iter().all(|option| ENGINE_OPTIONS.contains(option)));
        }
    }

    #[test]
    fn engine_options_name_the_field_of_a_newer_value() {
        for (json, field) in [
            ("{}", None),
            (r#"{"kvCache":"Int2"}"#, Some("kvCache")),
            (r#"{"fence":"Electric","kvCache":"Int8"}"#, Some("fence")),
            (r#"{"speculation":"Oracle"}"#, Some("speculation")),
            (r#"{"routerBroadcast":"Sometimes"}"#, Some("routerBroadcast")),
            (r#"{"quantization":"Int4","kvCache":"Int8","maxWaitingRequests":0}"#, None),
            (r#"{"quantization":"Int2"}"#, Some("quantization")),
        ] {
            assert_eq!(serde_json::from_str::<EngineOptions>(json).unwrap().unknown(), field, "{json}");
        }
        assert_eq!(serde_json::from_str::<KvCacheType>("\"Int2\"").unwrap(), KvCacheType::Unknown);
        assert_eq!(serde_json::from_str::<Fence>("\"Electric\"").unwrap(), Fence::Unknown);
        assert_eq!(serde_json::from_str::<Speculation>("\"Oracle\"").unwrap(), Speculation::Unknown);
    }

    #[test]
    fn agents_report_every_engine_option() {
        let schema = schemars::schema_for!(EngineOptions).to_value();
        let mut fields: BTreeSet<&str> =
            schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
        fields.extend([ADAPTERS, DRAFT_MODEL]);
        assert_eq!(fields, ENGINE_OPTIONS.iter().copied().collect());
    }
}
