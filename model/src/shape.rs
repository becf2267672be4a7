//! What a model weighs and how it is split, as agents report it and the planner adds it up: the form of a description
//! in `ModelCopy.status.shape` and `Model.status.shape`. A status may hold any number, since every identity with the right to write it may write any.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Model,
    adapter::AdapterShape,
    config::{Document, MAX_HEADS, MAX_LAYERS, MAX_SIZE},
    cost::{ExpertCounts, Widths},
    description::{Mixer, Mlp, Task},
    divisibility::{self, ShardUnit, Sharing, shard_units},
    error::{Error, FileError},
    families,
    generation_config::GenerationConfig,
    load_quantization::LoadQuantization,
    partition::kept_together,
    safetensors::{Dtype, Entry, Headers},
    sentence_transformers::ModuleFiles,
    state::LayerState,
    tensors::{Layout, Role, ShardAxis, beside, tensor_role},
};

/// Raised with every change of what is accepted or reported, a new family among them.
pub const READER: u32 = 10;
/// Values of a group where config.json does not say it.
const DEFAULT_GROUP_SIZE: u64 = 64;

/// Sizes of a model, in bytes unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelShape {
    /// `model_type` of config.json, such as `llama`.
    #[schemars(length(max = 64))]
    pub architecture: String,
    /// What it is asked for.
    #[serde(default, skip_serializing_if = "Task::is_generate")]
    pub task: Task,
    /// Parameters held in the weight files; quantised values counted unpacked.
    pub parameters: u64,
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
    /// Longest context the model was made for, tokens.
    pub context_length: u32,
    /// Bytes of the token embedding.
    pub embedding_bytes: u64,
    /// Bytes of final norm and head; a tied head costs the embedding again on the rank that samples.
    pub head_bytes: u64,
    /// Bytes of the table and the projection of per-layer inputs, which the stage with the embedding holds; 0 without
    /// them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub per_layer_input_bytes: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Bytes of each layer, in order.
    #[schemars(length(max = MAX_LAYERS))]
    pub layer_bytes: Vec<u64>,
    /// KV-cache bytes one layer keeps for one token, in the dtype the engine computes in; the most of any layer.
    pub kv_bytes_per_token_per_layer: u64,
    /// Width of the MLP; 0 in headers that an older release read.
    #[serde(default)]
    pub intermediate_size: u32,
    /// Values that share one scale in the layers' quantised weights, the largest of all; 0 when none
    /// are quantised.
    #[serde(default)]
    pub quantization_group_size: u32,
    /// Bytes of a layer that every member of a tensor group holds whole, such as norms; the most of
    /// any layer.
    #[serde(default, rename = "wholeLayerBytes")]
    pub replicated_layer_bytes: u64,
    /// Widths of what is computed; absent in headers that an older release read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub widths: Option<Widths>,
    /// Runs of layers that are alike, in order; absent in headers that an older release read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_LAYERS))]
    pub layer_groups: Vec<LayerGroup>,
    /// What every rank of a tensor group gets an equal number of; absent in headers that an older release read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub shard_units: Vec<ShardUnit>,
    /// Its sizes where its matrices are packed while they are read, for each number of bits; absent where the files are
    /// packed already, and in headers that an older release read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub quantized: Vec<QuantizedShape>,
    /// Which reader reported this; 0 is an older release's. A newer one may know more families, or refuse what was
    /// accepted, so its report replaces this one.
    #[serde(default)]
    pub reader: u32,
    /// Why the engine does not run this model, where and what to do; absent when it runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub unsupported: Option<String>,
    /// Why the engine would not answer with it, though it runs it: its chat template does not parse, or no token ends an
    /// answer. As a draft model it needs neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub chat_unsupported: Option<String>,
    /// Sampling parameters that its makers recommend; absent where they recommend none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_config: Option<GenerationConfig>,
    /// What is known of an adapter, which runs only on a model; absent of a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterShape>,
    /// What bounds the model though the engine runs it, such as a window.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub notes: Vec<String>,
}

/// What differs of a model whose matrices are packed while they are read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuantizedShape {
    /// How they are packed.
    pub quantization: LoadQuantization,
    /// Bytes of the token embedding.
    pub embedding_bytes: u64,
    /// Bytes of final norm and head.
    pub head_bytes: u64,
    /// Bytes of the inputs of all layers that the rank with the embedding makes.
    #[serde(default)]
    pub per_layer_input_bytes: u64,
    /// Values that share one scale in the layers' quantised weights, the largest of all.
    #[serde(default)]
    pub quantization_group_size: u32,
    /// Runs of layers that are alike, in order.
    #[schemars(length(max = MAX_LAYERS))]
    pub layer_groups: Vec<LayerGroup>,
    /// What every rank of a tensor group gets an equal number of.
    #[schemars(length(max = 256))]
    pub shard_units: Vec<ShardUnit>,
}

/// A run of layers that are alike.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LayerGroup {
    /// How many.
    pub count: u32,
    /// Bytes of the weights of each.
    pub weight_bytes: u64,
    /// Bytes of these that every rank of a tensor group holds.
    #[serde(default)]
    pub replicated_bytes: u64,
    /// Bytes of these that make keys and values: ranks of a tensor group that repeat KV heads repeat them, too.
    #[serde(default)]
    pub kv_bytes: u64,
    /// What each remembers of a sequence.
    #[serde(default)]
    pub state: LayerState,
    /// Its experts; absent where every token passes all weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertGroup>,
    /// The earlier layer whose keys and values each reads, and on whose stage it is; absent where each has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares_cache_of: Option<u32>,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExpertGroup {
    /// How many there are.
    pub count: u32,
    /// How many a token passes.
    pub used: u32,
    /// Bytes of all of them.
    pub weight_bytes: u64,
}

impl QuantizedShape {
    /// The sizes of a model whose matrices are packed so while they are read.
    fn of(quantization: LoadQuantization, model: &Model) -> Self {
        let shape = ModelShape::of(model);
        Self {
            quantization,
            embedding_bytes: shape.embedding_bytes,
            head_bytes: shape.head_bytes,
            per_layer_input_bytes: shape.per_layer_input_bytes,
            quantization_group_size: shape.quantization_group_size,
            layer_groups: shape.layer_groups,
            shard_units: shape.shard_units,
        }
    }
}

impl ModelShape {
    /// The shape of a model whose headers were read. An error is a damaged file; a sound model that the engine does
    /// not run has a shape that says so.
    pub fn read(config: &[u8], headers: &Headers) -> Result<Self, FileError> {
        Self::read_pooled(config, headers, &ModuleFiles::new())
    }

    /// The same of a model with the files of sentence-transformers.
    pub fn read_pooled(config: &[u8], headers: &Headers, modules: &ModuleFiles) -> Result<Self, FileError> {
        Self::read_with(config, headers, |quantization| {
            crate::read_pooled(config, headers, quantization, modules)
        })
    }

    /// The same where `read` says what the model is, as it is or with its matrices packed while they are read.
    pub fn read_with(
        config: &[u8],
        headers: &Headers,
        read: impl Fn(Option<LoadQuantization>) -> Result<Model, Error>,
    ) -> Result<Self, FileError> {
        let document = Document::parse(config)?;
        let names = Self::by_names(&document, headers)?;
        match read(None) {
            Ok(model) => {
                let shape = Self::of(&model);
                drop(model);
                let sizes =
                    |quantization| Some(QuantizedShape::of(quantization, &read(Some(quantization)).ok()?));
                Ok(Self { quantized: LoadQuantization::ALL.into_iter().filter_map(sizes).collect(), ..shape })
            }
            Err(Error::Unsupported(why)) => Ok(Self { unsupported: Some(why.to_string()), ..names }),
            Err(Error::File(why)) => Ok(Self { unsupported: Some(why.to_string()), ..names }),
        }
    }

    /// The shape of the model with its matrices packed while they are read; an error says why they cannot be.
    pub fn quantised(&self, quantization: LoadQuantization) -> Result<Self, &'static str> {
        let Some(own) = self.quantized.iter().find(|own| own.quantization == quantization) else {
            return Err(match self.reader < READER {
                true => {
                    "its headers were read by an older release, which did not ask for that; create the Model anew"
                }
                false => "its files are packed already; leave it out, or use the model in 16 bits",
            });
        };
        let bytes = |group: &LayerGroup| vec![group.weight_bytes; group.count.min(MAX_LAYERS) as usize];
        let layer_bytes: Vec<u64> = own.layer_groups.iter().flat_map(bytes).collect();
        if layer_bytes.len() != self.layer_bytes.len() {
            return Err("its headers tell of other layers than its sizes; create the Model anew");
        }
        let QuantizedShape {
            quantization: _,
            embedding_bytes,
            head_bytes,
            per_layer_input_bytes,
            quantization_group_size,
            layer_groups,
            shard_units,
        } = own.clone();
        let replicated = layer_groups.iter().map(|group| group.replicated_bytes).max();
        Ok(Self {
            embedding_bytes,
            head_bytes,
            per_layer_input_bytes,
            layer_bytes,
            quantization_group_size,
            replicated_layer_bytes: replicated.unwrap_or(0),
            layer_groups,
            shard_units,
            ..self.clone()
        })
    }

    /// The shape of a model that the engine runs.
    pub fn of(model: &Model) -> Self {
        let Model { description, tensors, converted: _ } = model;
        let value_bytes = model.value_bytes();
        let mut shape = Self {
            architecture: description.model_type.clone(),
            task: description.task(),
            layers: description.layers.len() as u32,
            hidden_size: description.hidden_size,
            vocabulary: description.vocab_size,
            context_length: description.context_length,
            tied: description.tied,
            layer_bytes: vec![0; description.layers.len()],
            reader: READER,
            shard_units: shard_units(description, tensors),
            notes: description.notes.clone(),
            widths: Some(description.widths(value_bytes)),
            ..Self::default()
        };
        if let Some(attention) = description.attention() {
            shape.attention_heads = attention.heads;
            shape.key_value_heads = attention.kv_heads;
            shape.head_dim = attention.key_dim.max(attention.value_dim);
        } else if let Some(Mixer::Latent(latent)) = description.mixers().next() {
            // The latent is as one head that all share.
            shape.attention_heads = latent.heads;
            shape.key_value_heads = 1;
            shape.head_dim = latent.rank.saturating_add(latent.rope_dim);
        }
        shape.intermediate_size = description.mlps().map(Mlp::width).max().unwrap_or(0);
        let mut groups: Vec<LayerGroup> = (0..description.layers.len())
            .map(|index| LayerGroup {
                count: 1,
                state: description.state(index, value_bytes),
                shares_cache_of: description.shares_cache_of(index as u32),
                experts: description.experts(index).map(|ExpertCounts { count, used }| ExpertGroup {
                    count,
                    used,
                    weight_bytes: 0,
                }),
                ..LayerGroup::default()
            })
            .collect();
        for (tensor, stored) in tensors {
            shape.parameters = shape.parameters.saturating_add(tensor.parameters());
            match tensor.role {
                Role::Embedding => shape.embedding_bytes = shape.embedding_bytes.saturating_add(stored.bytes),
                Role::PerLayerInputs => {
                    shape.per_layer_input_bytes = shape.per_layer_input_bytes.saturating_add(stored.bytes);
                }
                Role::Head => shape.head_bytes = shape.head_bytes.saturating_add(stored.bytes),
                Role::Layer(index) => {
                    let Some(group) = groups.get_mut(index as usize) else { continue };
                    group.weight_bytes = group.weight_bytes.saturating_add(stored.bytes);
                    match tensor.axis {
                        ShardAxis::Replicated => {
                            group.replicated_bytes = group.replicated_bytes.saturating_add(stored.bytes);
                        }
                        ShardAxis::Heads { .. } => {
                            group.kv_bytes = group.kv_bytes.saturating_add(stored.bytes);
                        }
                        ShardAxis::Axis { .. } | ShardAxis::Parts { .. } => {}
                    }
                    let shared = tensor.axis != ShardAxis::Replicated;
                    if let Some(packing) = stored.packing.filter(|_| shared) {
                        shape.quantization_group_size = shape.quantization_group_size.max(packing.group_size);
                    }
                    // Weights of experts are the matrices of three dimensions that are no mixer's.
                    let is_expert =
                        tensor.shape.len() == 3 && tensor.is_matrix && !tensor.name.contains("_attn.");
                    if let Some(experts) = group.experts.as_mut().filter(|_| is_expert) {
                        experts.weight_bytes = experts.weight_bytes.saturating_add(stored.bytes);
                    }
                }
            }
        }
        if let Some(pooling) = &description.pooling {
            shape.head_bytes = shape.head_bytes.saturating_add(pooling.bytes());
        }
        for (bytes, group) in shape.layer_bytes.iter_mut().zip(&groups) {
            *bytes = group.weight_bytes;
        }
        shape.replicated_layer_bytes = groups.iter().map(|group| group.replicated_bytes).max().unwrap_or(0);
        shape.kv_bytes_per_token_per_layer =
            groups.iter().map(|group| group.state.per_token_bytes).max().unwrap_or(0);
        shape.layer_groups = runs(groups);
        shape
    }

    /// What the names of the tensors say, for models that the engine does not run: enough to show its size.
    fn by_names(document: &Document, headers: &Headers) -> Result<Self, FileError> {
        let known = families::is_known(&document.model_type);
        let number = |field, limit| match document.number(field, limit) {
            Err(_) if !known => Ok(0),
            result => result,
        };
        let optional = |field, limit| match document.optional(field, limit) {
            Err(_) if !known => Ok(None),
            result => result,
        };
        let layers = number("num_hidden_layers", MAX_LAYERS)?;
        let unused = optional("num_nextn_predict_layers", MAX_LAYERS)?.unwrap_or(0);
        let hidden_size = number("hidden_size", MAX_SIZE)?;
        let attention_heads = number("num_attention_heads", MAX_HEADS)?;
        let own_width = hidden_size.checked_div(attention_heads).unwrap_or(0);
        let mut shape = Self {
            architecture: document.model_type.clone(),
            reader: READER,
            layers,
            hidden_size,
            attention_heads,
            key_value_heads: optional("num_key_value_heads", MAX_HEADS)?.unwrap_or(attention_heads),
            head_dim: optional("head_dim", MAX_HEADS)?.unwrap_or(own_width),
            vocabulary: number("vocab_size", MAX_SIZE)?,
            context_length: optional("max_position_embeddings", 1 << 29)?
                .unwrap_or(crate::config::DEFAULT_CONTEXT_LENGTH),
            intermediate_size: optional("intermediate_size", MAX_SIZE)?.unwrap_or(0),
            layer_bytes: vec![0; layers as usize],
            ..Self::default()
        };
        let disagree = |problem: String| if known { Err(FileError::Disagree { problem }) } else { Ok(()) };
        let mut is_wide = false;
        for (name, entry) in headers.iter() {
            let role = tensor_role(name);
            let bytes = match role {
                Some(Role::Layer(index)) => match shape.layer_bytes.get_mut(index as usize) {
                    Some(bytes) => bytes,
                    None if index < layers.saturating_add(unused) => continue,
                    None => {
                        disagree(format!(
                            "{} is of layer {index}, but num_hidden_layers is {layers}",
                            crate::safetensors::shorten(name)
                        ))?;
                        &mut shape.head_bytes
                    }
                },
                Some(Role::Embedding) => &mut shape.embedding_bytes,
                Some(Role::PerLayerInputs) => &mut shape.per_layer_input_bytes,
                Some(Role::Head) => &mut shape.head_bytes,
                None if known => continue,
                None => &mut shape.head_bytes,
            };
            *bytes = bytes.saturating_add(entry.bytes());
            is_wide |= entry.dtype == Dtype::F32;
            shape.parameters = shape.parameters.saturating_add(parameters(document, headers, name, entry));
        }
        if let Some(index) = shape.layer_bytes.iter().position(|&bytes| bytes == 0) {
            disagree(format!("num_hidden_layers is {layers}, but layer {index} has no tensors"))?;
        }
        if shape.embedding_bytes == 0 {
            disagree("there is no token embedding (embed_tokens)".to_owned())?;
        }
        let value_bytes = if is_wide { 4 } else { 2 };
        let heads = u64::from(shape.key_value_heads) * u64::from(shape.head_dim);
        shape.kv_bytes_per_token_per_layer = heads.saturating_mul(2 * value_bytes);
        let tied = document.choice("tie_word_embeddings").ok().flatten();
        shape.tied = tied.unwrap_or(!Layout::of(headers).has_head(headers));
        Ok(shape)
    }

    /// Bytes of all weights on disk.
    pub fn total_bytes(&self) -> u64 {
        let ends = [self.embedding_bytes, self.per_layer_input_bytes, self.head_bytes];
        let ends = ends.into_iter().fold(0, u64::saturating_add);
        self.layer_bytes.iter().fold(ends, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// KV-cache bytes the whole model keeps for one token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.groups().iter().fold(0, |sum, group| {
            sum.saturating_add(group.state.per_token_bytes.saturating_mul(u64::from(group.count)))
        })
    }

    /// Runs of layers that are alike; of headers that an older release read, from what they say of each layer.
    pub fn groups(&self) -> Vec<LayerGroup> {
        let fits = |groups: &[LayerGroup]| {
            let mut layers = 0_u64;
            groups.iter().all(|group| {
                let own = (layers..layers.saturating_add(u64::from(group.count)))
                    .all(|layer| self.layer_bytes.get(layer as usize) == Some(&group.weight_bytes));
                layers += u64::from(group.count);
                own && group.count > 0
            }) && layers == self.layer_bytes.len() as u64
        };
        if !self.layer_groups.is_empty() && fits(&self.layer_groups) {
            return self.layer_groups.clone();
        }
        let state =
            LayerState { per_token_bytes: self.kv_bytes_per_token_per_layer, ..LayerState::default() };
        let group = |&weight_bytes: &u64| {
            let replicated_bytes = self.replicated_layer_bytes.min(weight_bytes);
            LayerGroup { count: 1, weight_bytes, replicated_bytes, state, ..LayerGroup::default() }
        };
        runs(self.layer_bytes.iter().map(group))
    }

    /// Runs of layers that one stage holds, since some read the keys and values of others: disjoint and in order. A model
    /// that does not generate is held by one rank.
    pub fn kept_together(&self) -> Vec<Range<u32>> {
        if !self.task.is_generate() && self.layers > 1 {
            let all = 0..self.layers;
            return vec![all];
        }
        let mut first = 0_u32;
        kept_together(self.groups().iter().filter_map(|group| {
            first = first.saturating_add(group.count);
            // Of a run that reads one layer, the last is the furthest from it.
            Some((first.saturating_sub(1), group.shares_cache_of?))
        }))
    }

    /// Most stages of a pipeline: one for each layer, less those that stay with others.
    pub fn max_stages(&self) -> u32 {
        let kept = self.kept_together();
        kept.iter().fold(self.layers, |stages, run| stages.saturating_sub(run.len() as u32 - 1))
    }

    /// Every number of ranks that can share a layer, in order; 1 always can.
    pub fn tensor_sizes(&self) -> Vec<u32> {
        self.units().map_or_else(|_| vec![1], |units| divisibility::tensor_sizes(&units))
    }

    /// Ranks of a tensor group of `size` that have keys and values of their own: fewer than all where KV heads are
    /// repeated. Where layers differ, as if all had the fewest.
    pub fn kv_ranks(&self, size: u32) -> u32 {
        let heads = self.shared(Sharing::Repeated).min();
        heads.map_or(size, |heads| size.min(heads)).max(1)
    }

    /// The largest share that one of `size` ranks has of what is shared unevenly: so many of so many parts.
    pub fn largest_share(&self, size: u32) -> (u32, u32) {
        let uneven = self.shared(Sharing::Uneven).filter(|count| *count >= size);
        // With fewer parts, one more is a larger share.
        uneven
            .filter(|count| !count.is_multiple_of(size))
            .min()
            .map_or((1, size), |count| (count.div_ceil(size), count))
    }

    fn shared(&self, sharing: Sharing) -> impl Iterator<Item = u32> {
        self.shard_units.iter().filter(move |unit| unit.sharing == sharing).map(|unit| unit.count)
    }

    /// Why `size` ranks cannot share a layer; `None` when they can.
    pub fn why_indivisible(&self, size: u32) -> Option<String> {
        if size == 1 {
            return None;
        }
        match self.units() {
            Ok(units) => divisibility::why_indivisible(&units, size),
            Err(why) => Some(why.to_owned()),
        }
    }

    /// What ranks of a tensor group share; of headers that an older release read, from their numbers.
    fn units(&self) -> Result<Vec<ShardUnit>, &'static str> {
        if !self.shard_units.is_empty() {
            return Ok(self.shard_units.clone());
        }
        if self.intermediate_size == 0 {
            return Err(
                "its headers were read by an older release, which did not ask for the MLP's width; create the Model anew",
            );
        }
        let mut units = vec![
            ShardUnit::new(self.key_value_heads, "KV heads"),
            ShardUnit::new(self.attention_heads, "attention heads"),
            ShardUnit::new(self.intermediate_size, "columns of the MLP"),
        ];
        if let Some(group) = Some(self.quantization_group_size).filter(|&group| group > 1) {
            let attention = self.attention_heads.saturating_mul(self.head_dim);
            units.push(ShardUnit::new(
                attention / group,
                format!("groups of {group} quantised attention columns"),
            ));
            let mlp = self.intermediate_size / group;
            units.push(ShardUnit::new(mlp, format!("groups of {group} quantised MLP columns")));
        }
        Ok(units)
    }

    /// Bytes of a value as the model computes it, by what its keys and values take.
    pub fn value_bytes(&self) -> u64 {
        if let Some(widths) = self.widths {
            return widths.value_bytes;
        }
        let keys = u64::from(self.key_value_heads).saturating_mul(u64::from(self.head_dim));
        self.kv_bytes_per_token_per_layer.checked_div(keys.saturating_mul(2)).unwrap_or(4)
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Parameters that a stored tensor stands for. Of a packed matrix the scales tell, one for each group.
fn parameters(document: &Document, headers: &Headers, name: &str, entry: &Entry) -> u64 {
    let path = |field| name.strip_suffix(field).map(|path| format!("{path}.weight"));
    let is_packed = |weight: &str| headers.get(weight).is_some_and(|weight| weight.dtype == Dtype::U32);
    if path(".biases").is_some_and(|weight| is_packed(&weight))
        || path(".scales").is_some_and(|weight| is_packed(&weight))
    {
        return 0;
    }
    match headers.get(&beside(name, "scales")).filter(|_| entry.dtype == Dtype::U32) {
        None => entry.elements(),
        Some(scales) => {
            let quantisation =
                document.value("quantization").or_else(|| document.value("quantization_config"));
            let group = quantisation.and_then(|fields| fields.get("group_size")?.as_u64());
            scales.elements().saturating_mul(group.unwrap_or(DEFAULT_GROUP_SIZE))
        }
    }
}

/// Equal neighbours together.
fn runs(groups: impl IntoIterator<Item = LayerGroup>) -> Vec<LayerGroup> {
    let mut runs: Vec<LayerGroup> = Vec::new();
    for group in groups {
        let alike = |last: &LayerGroup| LayerGroup { count: group.count, ..last.clone() } == group;
        match runs.last_mut().filter(|last| alike(last)) {
            Some(last) => last.count = last.count.saturating_add(group.count),
            None => runs.push(group),
        }
    }
    runs
}

#[cfg(test)]
mod tests;
