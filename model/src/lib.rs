//! What a model is, from its configuration and the headers of its weights alone: which files, which layers, which
//! tensors, what each takes and how ranks share it. Agents read it before a byte of weights is copied, the planner adds
//! it up, and the engine runs it. Pure: bytes in, descriptions out; no IO, no arrays, no clock.
//!
//! ```text
//! config.json ─▶ config ─▶ families ─▶ Description ─▶ tensors ─┐
//! *.safetensors ─▶ index ─▶ safetensors ─▶ packings ─▶ Headers ─┴▶ Model ─▶ cost, divisibility ─▶ ModelShape
//! *.gguf ─▶ gguf ─▶ config.json, tokenizer.json and Headers, as if it were an MLX repository
//! ```

pub mod adapter;
pub mod config;
pub mod cost;
pub mod description;
pub mod divisibility;
pub mod error;
mod excerpt;
pub mod families;
pub mod float16;
pub mod generation_config;
pub mod gguf;
pub mod index;
pub mod json;
pub mod kv_quantization;
pub mod lfs;
pub mod load_quantization;
mod object;
pub mod packings;
pub mod partition;
pub mod safetensors;
pub mod sentence_transformers;
pub mod shape;
pub mod state;
pub mod tensors;
pub mod tokenizer_files;
pub mod value_type;

use std::collections::BTreeSet;

use crate::{
    config::{Config, Document},
    description::{Description, Mixer, Pooling, Task},
    error::{Error, FileError, Unsupported},
    load_quantization::LoadQuantization,
    packings::ConvertedWeights,
    safetensors::{Headers, shorten},
    sentence_transformers::{MODULES, ModuleFiles},
    tensors::{Layout, Role, Stored, Tensor, beside, tensor_role},
};

/// A model that the engine runs, with every tensor it calls for.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Its layers.
    pub description: Description,
    /// Its tensors, and what the files have of each.
    pub tensors: Vec<(Tensor, Stored)>,
    /// Its weights as the engine has them in memory, where that is not as the files have them.
    pub converted: Option<ConvertedWeights>,
}

impl Model {
    /// Bytes of a value as the engine computes it: one tensor in 32 bits makes MLX compute in 32 bits from there on;
    /// anything else computes in 16.
    pub fn value_bytes(&self) -> u64 {
        if self.tensors.iter().any(|(_, stored)| stored.is_wide) { 4 } else { 2 }
    }
}

/// Describes the model of a configuration and the headers of its weight files.
pub fn read(config: &[u8], headers: &Headers) -> Result<Model, Error> {
    read_as(config, headers, None)
}

/// The same of a model whose matrices are packed while they are read, if `quantization` is given. One whose files have
/// packed matrices already is refused then; what is packed in GGUF stays as it is converted.
pub fn read_as(
    config: &[u8],
    headers: &Headers,
    quantization: Option<LoadQuantization>,
) -> Result<Model, Error> {
    read_pooled(config, headers, quantization, &ModuleFiles::new())
}

/// The same of a model with the files of sentence-transformers, which say how it embeds.
pub fn read_pooled(
    config: &[u8],
    headers: &Headers,
    quantization: Option<LoadQuantization>,
    modules: &ModuleFiles,
) -> Result<Model, Error> {
    let mut document = Document::parse(config)?;
    let family = families::family(&document)?;
    document.check_quantisation()?;
    document.check_fields(family.fields)?;
    document.set_defaults(family.defaults);
    let config = Config::read(&document)?;
    let converted = packings::convert(&document, headers)?;
    let headers = converted.as_ref().map_or(headers, |converted| &converted.headers);
    let mut description = (family.describe)(&config, Layout::of(headers).has_head(headers))?;
    if let Some(pooling) = sentence_transformers::pooling(modules)? {
        give_pooling(&mut description, pooling)?;
    }
    let note = converted.as_ref().and_then(|converted| converted.note);
    description.notes.extend(note.map(str::to_owned));
    let tensors = tensors::table(&description, headers, quantization);
    check_unused(&description, &tensors, headers)?;
    let stored = |tensor: Tensor| tensor.stored(headers).map(|stored| (tensor, stored));
    let tensors: Vec<(Tensor, Stored)> = tensors.into_iter().map(stored).collect::<Result<_, _>>()?;
    if let Some(quantization) = quantization.filter(|_| !headers.is_converted()) {
        check_unpacked(quantization, &tensors)?;
    }
    Ok(Model { description, tensors, converted })
}

/// Whether a model with these files embeds or scores texts, as far as they tell: it has no chat template then.
pub fn pools(config: &[u8], modules: &ModuleFiles) -> Result<bool, Error> {
    let mut document = Document::parse(config)?;
    let family = families::family(&document)?;
    document.set_defaults(family.defaults);
    let mut description = (family.describe)(&Config::read(&document)?, false)?;
    if let Some(pooling) = sentence_transformers::pooling(modules)? {
        give_pooling(&mut description, pooling)?;
    }
    Ok(!description.task().is_generate())
}

/// Makes a model one that embeds. Its head, if it has one, is not loaded.
fn give_pooling(description: &mut Description, pooling: Pooling) -> Result<(), Error> {
    if description.task() == Task::Rerank {
        return Ok(());
    }
    let is_attention =
        |mixer: &Mixer| matches!(mixer, Mixer::Attention(_)) && mixer.shares_cache_of().is_none();
    let all_attend = description.layers.iter().all(|layer| layer.mixer.as_ref().is_some_and(is_attention));
    if !all_attend || description.per_layer_inputs.is_some() {
        let reason = format!("a {} model that embeds is not supported", description.model_type);
        let remedy = "use a model whose layers all attend to keys and values of their own".to_owned();
        return Err(Unsupported { place: MODULES.to_owned(), reason, remedy }.into());
    }
    let widths = pooling.dense.iter().map(|dense| (dense.inputs, dense.outputs));
    let mut width = description.hidden_size;
    for (inputs, outputs) in widths {
        if inputs != width {
            let problem = format!("a projection of {MODULES} reads {inputs} values, but is given {width}");
            return Err(FileError::Disagree { problem }.into());
        }
        width = outputs;
    }
    if let Some(tokens) = pooling.max_tokens {
        description.context_length = description.context_length.min(tokens);
    }
    description.tied = true;
    description.pooling = Some(pooling);
    Ok(())
}

/// That no matrix is packed in the files.
fn check_unpacked(quantization: LoadQuantization, tensors: &[(Tensor, Stored)]) -> Result<(), Unsupported> {
    let packed =
        tensors.iter().find_map(|(tensor, stored)| Some((tensor, stored.packing?)).filter(|_| !stored.packs));
    packed.map_or(Ok(()), |(tensor, packing)| Err(quantization.refuse(&tensor.name, packing)))
}

/// Tensors that nothing calls for and that change what a layer computes: biases, norms, and whole layers.
fn check_unused(description: &Description, tensors: &[Tensor], headers: &Headers) -> Result<(), Error> {
    let mut used: BTreeSet<String> = BTreeSet::new();
    for tensor in tensors {
        for name in &tensor.sources {
            used.insert(name.clone());
            used.insert(beside(name, "biases"));
        }
    }
    for (name, _) in headers.iter() {
        let Some(Role::Layer(index)) = tensor_role(name) else { continue };
        let layers = description.layers.len();
        if (layers..layers + description.unused_layers as usize).contains(&(index as usize)) {
            continue;
        }
        if index as usize >= layers {
            let problem = format!("{} is of layer {index}, but num_hidden_layers is {layers}", shorten(name));
            return Err(FileError::Disagree { problem }.into());
        }
        // Exports have a norm of keys even where a layer reads those of another.
        let is_dropped =
            description.shares_cache_of(index).is_some() && name.ends_with("self_attn.k_norm.weight");
        let matters = name.ends_with(".bias") || name.ends_with("norm.weight");
        if matters && !is_dropped && !used.contains(name) {
            let reason = format!(
                "{} models have no such tensor by this config.json, and it would change the answers",
                description.model_type
            );
            return Err(Unsupported::tensor(
                &shorten(name),
                reason,
                "take the config.json that belongs to the weights, or another model",
            )
            .into());
        }
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "a test module")]
mod peak_memory;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
