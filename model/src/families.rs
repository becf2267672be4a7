//! The families of models this release runs: one file each, and one line in [`FAMILIES`]. A family turns config.json
//! into a [`Description`]; it touches no arrays and no weights. The planner refuses other models before a node is
//! asked, and the engine runs what a family describes.

mod bert;
mod deepseek_v3;
mod gemma3;
mod gemma4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod lfm2;
mod llama;
mod minimax;
mod ministral3;
mod mistral;
mod mistral4;
mod nemotron_h;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
mod seed_oss;
mod shared;
mod smollm3;

use crate::{
    config::{Config, Document},
    description::Description,
    error::{Error, Unsupported},
};

/// Every family.
pub const FAMILIES: &[Family] = &[
    bert::FAMILY,
    deepseek_v3::FAMILY,
    gemma3::FAMILY,
    gemma4::FAMILY,
    glm4_moe::FAMILY,
    gpt_oss::FAMILY,
    granite::FAMILY,
    lfm2::FAMILY,
    llama::FAMILY,
    minimax::FAMILY,
    ministral3::FAMILY,
    mistral::FAMILY,
    mistral4::FAMILY,
    nemotron_h::FAMILY,
    olmo2::FAMILY,
    phi3::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_moe::FAMILY,
    qwen3_next::FAMILY,
    seed_oss::FAMILY,
    smollm3::FAMILY,
];

/// Models that see, too: their `model_type`, and that of their text part where it does not say one itself.
const WRAPPERS: &[(&str, &str)] = &[
    ("gemma3", "gemma3_text"),
    ("gemma4", "gemma4_text"),
    ("gemma4_unified", "gemma4_text"),
    ("kimi_k25", "kimi_k2"),
    ("mistral3", "mistral"),
    ("qwen3_5", "qwen3_5_text"),
    ("qwen3_5_moe", "qwen3_5_moe_text"),
];

/// How one family's configuration is read.
#[derive(Debug)]
pub struct Family {
    /// Each `model_type` of config.json that is of this family.
    pub model_types: &'static [&'static str],
    /// Fields of config.json that this family reads beside those that all do.
    pub fields: &'static [&'static str],
    /// What its files leave out.
    pub defaults: &'static [(&'static str, f64)],
    /// Describes the model; `has_head` says whether there are weights of a head.
    pub describe: fn(config: &Config, has_head: bool) -> Result<Description, Error>,
}

/// Every supported `model_type`, in order.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    let of_families = FAMILIES.iter().flat_map(|family| family.model_types.iter().copied());
    let mut types: Vec<&str> = of_families.chain(WRAPPERS.iter().map(|(outer, _)| *outer)).collect();
    types.sort_unstable();
    types.dedup();
    types.into_iter()
}

/// Whether models of this `model_type` are supported.
pub fn is_known(model_type: &str) -> bool {
    model_types().any(|known| known == model_type)
}

/// The supported `model_type`s, for messages.
pub fn list() -> String {
    model_types().collect::<Vec<_>>().join(", ")
}

/// The family of a configuration.
pub fn family(document: &Document) -> Result<&'static Family, Unsupported> {
    let Document { model_type, text_type, .. } = document;
    let inner = WRAPPERS.iter().find(|(outer, _)| outer == text_type).map(|(_, inner)| *inner);
    let found = inner.unwrap_or(text_type);
    FAMILIES.iter().find(|family| family.model_types.contains(&found)).ok_or_else(|| {
        let part = if found == model_type { String::new() } else { format!(" (its text part is {found:?})") };
        let nearest = nearest(found).map(|name| format!("; the nearest name is {name}")).unwrap_or_default();
        let reason =
            format!("model_type {model_type:?} is not supported{part}; supported are {}{nearest}", list());
        Unsupported::field("model_type", reason, "use a model of one of these")
    })
}

/// The supported name that shares most with this one, if that is more than half of it.
fn nearest(name: &str) -> Option<&'static str> {
    let distance = |other: &str| {
        let other: Vec<char> = other.chars().collect();
        let mut row: Vec<usize> = (0..=other.len()).collect();
        for (line, letter) in name.chars().enumerate() {
            let mut corner = row[0];
            row[0] = line + 1;
            for (column, own) in other.iter().enumerate() {
                let replaced = corner + usize::from(*own != letter);
                corner = row[column + 1];
                row[column + 1] = replaced.min(row[column] + 1).min(corner + 1);
            }
        }
        row.last().copied().unwrap_or(0)
    };
    let length = name.chars().count();
    model_types()
        .map(|known| (distance(known), known))
        .min()
        .filter(|(edits, _)| *edits * 2 <= length)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests;
