//! adapter_config.json, as mlx-lm or PEFT writes it.

use serde_json::{Map, Value};

use super::{ADAPTER_CONFIG, AdapterKind};
use crate::{
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
};

/// Fields of PEFT that change what an adapter computes in ways that the engine does not know, where they are set.
const UNSUPPORTED: &[&str] = &[
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
];

/// What the product of an adapter's matrices is multiplied by, and what else is known of it.
#[derive(Debug)]
pub(super) enum AdapterConfig {
    /// mlx-lm's.
    Mlx {
        /// What it is.
        kind: AdapterKind,
        /// The factor.
        scale: f32,
    },
    /// PEFT's.
    Peft {
        /// What it is.
        kind: AdapterKind,
        /// Divided by the rank, or by its root.
        alpha: f64,
        /// That of some modules, by the end of their paths.
        alpha_of: Vec<(String, f64)>,
        /// Whether it is divided by the root.
        by_root: bool,
    },
}

impl AdapterConfig {
    /// Reads the file.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let fields: Map<String, Value> = serde_json::from_slice(bytes)
            .map_err(|error| FileError::bad_json(ADAPTER_CONFIG, &error.to_string()))?;
        if fields.contains_key("peft_type") { Self::peft(&fields) } else { Self::mlx(&fields) }
    }

    /// What it is.
    pub fn kind(&self) -> AdapterKind {
        match self {
            Self::Mlx { kind, .. } | Self::Peft { kind, .. } => *kind,
        }
    }

    /// What the product of `rank` columns of the module at `path` is multiplied by.
    pub fn scale(&self, path: &str, rank: u64) -> f32 {
        match self {
            Self::Mlx { scale, .. } => *scale,
            Self::Peft { alpha, alpha_of, by_root, .. } => {
                let own = alpha_of.iter().find(|(end, _)| is_end(path, end)).map_or(*alpha, |(_, own)| *own);
                let rank = rank.max(1) as f64;
                (own / if *by_root { rank.sqrt() } else { rank }) as f32
            }
        }
    }

    fn mlx(fields: &Map<String, Value>) -> Result<Self, Error> {
        let kind = match fields.get("fine_tune_type").and_then(Value::as_str) {
            None | Some("lora") => AdapterKind::Lora,
            Some("dora") => AdapterKind::Dora,
            Some(other) => {
                let reason = format!("{:?} is not supported; supported are lora and dora", excerpt(other));
                return Err(unsupported("fine_tune_type", reason, "fuse it into the model with mlx_lm.fuse"));
            }
        };
        let parameters = fields.get("lora_parameters");
        let scale = parameters.and_then(|parameters| parameters.get("scale")).and_then(Value::as_f64);
        let Some(scale) = scale.map(|scale| scale as f32).filter(|scale| scale.is_finite()) else {
            let reason = "it is missing or no number, and neither is peft_type there";
            let remedy = "take the files of one adapter, as mlx-lm or PEFT wrote them";
            return Err(unsupported("lora_parameters.scale", reason, remedy));
        };
        Ok(Self::Mlx { kind, scale })
    }

    fn peft(fields: &Map<String, Value>) -> Result<Self, Error> {
        let kind = fields.get("peft_type").and_then(Value::as_str).unwrap_or_default();
        if kind != "LORA" {
            let reason = format!("{:?} is not supported; supported is LORA", excerpt(kind));
            return Err(unsupported("peft_type", reason, "merge it into the model, or use a LoRA"));
        }
        let asked = |field: &&&str| fields.get(**field).is_some_and(is_set);
        if let Some(field) = UNSUPPORTED.iter().find(asked) {
            let reason = format!("{} is not supported", short(fields.get(*field)));
            return Err(unsupported(field, reason, "train it without, or merge it into the model"));
        }
        if let Some(bias) = fields.get("bias").filter(|bias| bias.as_str() != Some("none") && is_set(bias)) {
            let reason = format!("{} is not supported; supported is none", short(Some(bias)));
            return Err(unsupported("bias", reason, "train it without, or merge it into the model"));
        }
        let number = |value: &Value| value.as_f64().filter(|number| (*number as f32).is_finite());
        let Some(alpha) = fields.get("lora_alpha").and_then(number) else {
            let reason = format!("{} is no number", short(fields.get("lora_alpha")));
            return Err(unsupported("lora_alpha", reason, "take the file that PEFT wrote"));
        };
        let mut alpha_of = Vec::new();
        for (end, alpha) in fields.get("alpha_pattern").and_then(Value::as_object).into_iter().flatten() {
            // PEFT takes them for regular expressions; in real files they are names.
            let is_name = end.chars().all(|letter| letter.is_ascii_alphanumeric() || "._".contains(letter));
            let Some(alpha) = number(alpha).filter(|_| is_name) else {
                let reason = format!("{:?} is no name of modules with a number", excerpt(end));
                return Err(unsupported("alpha_pattern", reason, "merge it into the model"));
            };
            alpha_of.push((end.clone(), alpha));
        }
        let flag = |field: &str| fields.get(field).and_then(Value::as_bool).unwrap_or(false);
        let kind = if flag("use_dora") { AdapterKind::Dora } else { AdapterKind::Lora };
        Ok(Self::Peft { kind, alpha, alpha_of, by_root: flag("use_rslora") })
    }
}

/// Whether a path ends in these names.
fn is_end(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether a value says anything: null, false and what is empty do not.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

fn short(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".to_owned(), |value| excerpt(&value.to_string()))
}

fn unsupported(field: &str, reason: impl Into<String>, remedy: &str) -> Error {
    let place = format!("{ADAPTER_CONFIG} {field}");
    Unsupported { place, reason: reason.into(), remedy: remedy.to_owned() }.into()
}
