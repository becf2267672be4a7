//! What is known of a model's files: sizes, architecture and quantization, as an agent read them from the headers. Lists
//! of models show it; no request is routed by it.

use russet_crds::conditions::{self, Type};
use russet_crds::{Model, PreloadPolicy, Task, names};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::objects::stalled_message;
use super::{DEFAULT_NAMESPACE, IMPLIED_TAG, ModelScope, RoutingTable};

/// Bits that a quantised value has besides its own, times the size of its group: a scale and a bias of 16 bits each.
const AFFINE_GROUP_BITS: f64 = 32.0;
/// Smallest group that is surely affine: mxfp4 and mxfp8 have groups of 32, nvfp4 of 16, with smaller scales.
const MIN_AFFINE_GROUP: u32 = 64;
/// What the names of GGUF's types begin with; a digit follows.
const TYPE_PREFIXES: [&str; 9] = ["Q", "IQ", "TQ", "F", "BF", "MXFP", "q", "f", "bf"];

/// A Model as lists show it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelDetails {
    /// SHA-256 in hexadecimal, which changes with the files: of the manifest where the Model pins one or a registry has
    /// one, else of the source and its commit.
    pub digest: String,
    /// `gguf` or `safetensors`; empty where the source does not say it.
    pub format: &'static str,
    /// How its weights are stored, such as `4bit` or `Q4_K_M`; empty while unknown.
    pub quantization: String,
    /// What its headers say; `None` until an agent has read them.
    pub headers: Option<ModelHeaders>,
    /// How far it is where its files are fetched without a replica that needs them; `None` where they are not.
    pub fetch: Option<FetchState>,
    /// Whether a gateway created it for a client.
    pub managed: bool,
}

/// How far a Model is whose files are fetched in advance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchState {
    /// It waits for this, or its files are on their way.
    Waiting(String),
    /// They do not come until a person acts, for this reason.
    Stalled(String),
}

impl FetchState {
    fn of(model: &Model) -> Option<Self> {
        let policy = model.spec.preload.as_ref()?.policy;
        if !matches!(policy, PreloadPolicy::Always | PreloadPolicy::Pinned) {
            return None;
        }
        let conditions = model.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        if conditions::is_true(conditions, Type::Stalled) {
            return Some(Self::Stalled(stalled_message(conditions)));
        }
        let kind = match conditions::is_true(conditions, Type::Ready) {
            true => Type::Preloaded,
            false => Type::Ready,
        };
        let waits_for = conditions::message(conditions, kind);
        Some(Self::Waiting(waits_for.unwrap_or("its headers are not read yet").to_owned()))
    }
}

/// What the headers of a model say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelHeaders {
    /// `model_type` of config.json, such as `llama`.
    pub architecture: String,
    /// What it is asked for.
    pub task: Task,
    /// Parameters, quantised ones counted unpacked.
    pub parameters: u64,
    /// Bytes of all weights.
    pub bytes: u64,
    /// Transformer layers.
    pub layers: u32,
    /// Width of the hidden state.
    pub hidden_size: u32,
    /// Query heads.
    pub attention_heads: u32,
    /// Key/value heads.
    pub key_value_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: u32,
}

impl ModelDetails {
    /// What this Model says of itself.
    pub(super) fn of(model: &Model) -> Self {
        let (source, status) = (&model.spec.source, model.status.as_ref());
        let commit = status.and_then(|status| status.commit.as_deref());
        let registry = commit.and_then(|commit| commit.strip_prefix("sha256:")).filter(|hex| is_sha256(hex));
        let derived = || {
            let revision = commit.or(source.revision.as_deref());
            hex::encode(Sha256::digest(json!([source.uri, revision]).to_string()))
        };
        let digest = source.sha256.as_deref().or(registry).map_or_else(derived, str::to_owned);
        let shape = status.and_then(|status| status.shape.as_ref());
        let headers = shape.map(|shape| ModelHeaders {
            architecture: shape.architecture.clone(),
            task: shape.task,
            parameters: shape.parameters,
            bytes: shape.total_bytes(),
            layers: shape.layers,
            hidden_size: shape.hidden_size,
            attention_heads: shape.attention_heads,
            key_value_heads: shape.key_value_heads,
            head_dim: shape.head_dim,
            vocabulary: shape.vocabulary,
        });
        let gguf = gguf_type(&source.uri);
        let stored = match (&headers, shape) {
            (Some(headers), Some(shape)) => stored_bits(headers, shape.quantization_group_size),
            _ => String::new(),
        };
        let format = match (gguf, &headers) {
            (Some(_), _) => "gguf",
            (None, Some(_)) => "safetensors",
            (None, None) => "",
        };
        Self {
            digest,
            format,
            quantization: gguf.map_or(stored, str::to_owned),
            headers,
            fetch: FetchState::of(model),
            managed: names::is_managed_by_gateway(&model.metadata),
        }
    }
}

impl RoutingTable {
    /// Namespace and name of the Model of this name, alone or behind its namespace, that the caller sees.
    pub(crate) fn undeployed_model(&self, name: &str, scope: &ModelScope) -> Option<(&str, &str)> {
        let name = name.strip_suffix(IMPLIED_TAG).unwrap_or(name);
        let visible = self.models.keys().filter(|(namespace, _)| scope.sees_namespace(namespace));
        let named = visible.filter(|(namespace, model)| {
            name == model || name.split_once('/') == Some((namespace.as_str(), model.as_str()))
        });
        let first = named.min_by_key(|(namespace, _)| namespace != DEFAULT_NAMESPACE)?;
        scope.allows(name).then_some((first.0.as_str(), first.1.as_str()))
    }
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The type of a GGUF file by its name, as llama.cpp's tools write it: `…-Q4_K_M.gguf`. Empty where the name has none,
/// `None` where it is no GGUF file.
fn gguf_type(uri: &str) -> Option<&str> {
    let stem = uri.strip_suffix(".gguf")?;
    let is_type = |part: &&str| {
        let rest = TYPE_PREFIXES.iter().find_map(|prefix| part.strip_prefix(prefix));
        rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    // Of several files the name goes on with `-00001-of-00002`.
    Some(stem.rsplit(['-', '.', '/']).take(4).find(is_type).unwrap_or_default())
}

/// Bits of a stored value, such as `4bit`: the mean, so that a few tensors in more do not matter.
fn stored_bits(headers: &ModelHeaders, group_size: u32) -> String {
    if headers.parameters == 0 {
        return String::new();
    }
    let mean = headers.bytes as f64 * 8.0 / headers.parameters as f64;
    let bits = match group_size {
        0 => [16_u32, 32].into_iter().find(|bits| (mean - f64::from(*bits)).abs() < 1.0),
        _ => {
            let bits = (mean - AFFINE_GROUP_BITS / f64::from(group_size)).round();
            [2, 3, 4, 5, 6, 8]
                .into_iter()
                .find(|allowed| group_size >= MIN_AFFINE_GROUP && f64::from(*allowed) == bits)
        }
    };
    bits.map(|bits| format!("{bits}bit")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use russet_crds::{ModelSource, ModelSpec};

    use super::*;

    fn model(uri: &str, status: serde_json::Value) -> Model {
        let source = ModelSource { uri: uri.into(), ..ModelSource::default() };
        let mut model = Model::new("m", ModelSpec { source, preload: None });
        model.status = Some(serde_json::from_value(status).unwrap());
        model
    }

    fn shape(parameters: u64, layer: u64, group: u32) -> serde_json::Value {
        json!({
            "architecture": "llama", "parameters": parameters, "layers": 1, "hiddenSize": 8, "attentionHeads": 4,
            "keyValueHeads": 2, "headDim": 2, "vocabulary": 10, "contextLength": 64, "embeddingBytes": 0,
            "headBytes": 0, "tied": true, "layerBytes": [layer], "kvBytesPerTokenPerLayer": 4,
            "quantizationGroupSize": group,
        })
    }

    #[test]
    fn a_preloaded_model_says_what_its_files_wait_for() {
        let condition = |kind: &str, status: &str, message: &str| {
            json!({
                "type": kind, "status": status, "reason": "InProgress", "message": message,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            })
        };
        let waiting = |message: &str| Some(FetchState::Waiting(message.into()));
        for (policy, conditions, expected) in [
            ("OnDemand", json!([]), None),
            ("Always", json!([]), waiting("its headers are not read yet")),
            ("Pinned", json!([condition("Ready", "False", "node a reads")]), waiting("node a reads")),
            (
                "Always",
                json!([
                    condition("Ready", "True", "2 layers"),
                    condition("Preloaded", "False", "0 of 1 node")
                ]),
                waiting("0 of 1 node"),
            ),
            (
                "Always",
                json!([condition("Ready", "False", "no such repository"), condition("Stalled", "True", "")]),
                Some(FetchState::Stalled("no such repository".into())),
            ),
        ] {
            let mut model = model("hf://a/b", json!({"conditions": conditions}));
            model.spec.preload = Some(serde_json::from_value(json!({"policy": policy})).unwrap());
            assert_eq!(ModelDetails::of(&model).fetch, expected, "{policy}");
        }
        assert_eq!(ModelDetails::of(&model("hf://a/b", json!({}))).fetch, None);
    }

    #[test]
    fn bits_of_values_are_shown_where_they_are_sure() {
        let bits = |parameters, layer, group| {
            ModelDetails::of(&model("hf://a/b", json!({"shape": shape(parameters, layer, group)})))
                .quantization
        };
        for (parameters, bytes, group, expected) in [
            // 4.5 bits a value: four of its own, and half a bit of its group.
            (1_000_000, 562_500, 64, "4bit"),
            (1_000_000, 580_000, 64, "4bit"),
            (1_000_000, 531_250, 128, "4bit"),
            (1_000_000, 1_062_500, 64, "8bit"),
            (1_000_000, 2_000_000, 0, "16bit"),
            (1_000_000, 4_000_000, 0, "32bit"),
            // mxfp4 has 4.25, which three affine bits in groups of 32 are near.
            (1_000_000, 531_250, 32, ""),
            (1_000_000, 3_000_000, 0, ""),
            (0, 10, 0, ""),
        ] {
            assert_eq!(bits(parameters, bytes, group), expected, "{parameters} {bytes} {group}");
        }
    }

    #[test]
    fn gguf_file_says_its_type_by_its_name() {
        for (uri, expected) in [
            ("hf://a/b/model-Q4_K_M.gguf", ("gguf", "Q4_K_M")),
            ("file:///m/model.q8_0.gguf", ("gguf", "q8_0")),
            ("https://h/model-BF16.gguf", ("gguf", "BF16")),
            ("https://h/model-instruct.gguf", ("gguf", "")),
            ("hf://a/b/model-IQ2_XS-00001-of-00002.gguf", ("gguf", "IQ2_XS")),
            ("hf://a/model-Q4_K_M", ("", "")),
        ] {
            let details = ModelDetails::of(&model(uri, json!({})));
            assert_eq!((details.format, details.quantization.as_str()), expected, "{uri}");
        }
    }

    #[test]
    fn undeployed_model_is_found_within_the_scope_of_a_key() {
        let mut table = RoutingTable::default();
        for (namespace, name) in [("default", "a"), ("lab", "a"), ("lab", "b")] {
            table.models.insert((namespace.into(), name.into()), ModelDetails::default());
        }
        let only = |models: &[&str]| {
            ModelScope::new("lab", &models.iter().map(|&model| model.to_owned()).collect::<Vec<_>>())
        };
        for (name, scope, expected) in [
            ("a", ModelScope::ALL, Some(("default", "a"))),
            ("a:latest", ModelScope::ALL, Some(("default", "a"))),
            ("lab/a", ModelScope::ALL, Some(("lab", "a"))),
            ("b", ModelScope::ALL, Some(("lab", "b"))),
            ("c", ModelScope::ALL, None),
            ("a", only(&[]), Some(("lab", "a"))),
            ("default/a", only(&[]), None),
            ("a", only(&["b"]), None),
        ] {
            assert_eq!(table.undeployed_model(name, &scope), expected, "{name} {scope:?}");
        }
    }

    #[test]
    fn a_digest_is_the_manifest_s_or_changes_with_the_commit() {
        let digest =
            |uri: &str, commit: &str| ModelDetails::of(&model(uri, json!({"commit": commit}))).digest;
        let manifest = "ab".repeat(32);
        assert_eq!(digest("oci://r/n:t", &format!("sha256:{manifest}")), manifest);
        let first = digest("hf://a/b", "0123");
        assert!(is_sha256(&first) && first == digest("hf://a/b", "0123"), "{first}");
        assert_ne!(first, digest("hf://a/b", "0124"));
        assert_ne!(first, digest("hf://a/c", "0123"));
        let mut pinned = model("hf://a/b", json!({"commit": "0123"}));
        pinned.spec.source.sha256 = Some(manifest.clone());
        assert_eq!(ModelDetails::of(&pinned).digest, manifest);
    }
}
