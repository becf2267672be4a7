//! The table of a model's tensors: what a description calls for, where it is stored, how ranks share it and what is
//! made of it on loading. The family makes the table; the engine loads by it and the cost model adds it up.

use std::borrow::Cow;

use crate::{
    description::{Attention, Dense, Description, Mixer, Mlp},
    error::{Error, FileError, Unsupported},
    safetensors::{Dtype, Entry, Headers, shorten},
};

/// The part of a model a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Token embedding, held by the highest stage (and by rank 0 when tied).
    Embedding,
    /// Final norm and head, held by rank 0.
    Head,
    /// One layer.
    Layer(u32),
}

/// How the ranks of a tensor group share a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardAxis {
    /// Every rank holds all of it.
    Replicated,
    /// Each holds an equal share of this dimension; of several projections in one tensor, of each segment.
    Axis {
        /// The dimension.
        dim: usize,
        /// Sizes of the segments; one is all of the dimension.
        segments: Vec<u64>,
    },
}

/// What is made of the stored tensors on loading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// The stored tensor.
    AsIs,
    /// Stored tensors of equal shapes along a new first dimension.
    Stack {
        /// Their names.
        names: Vec<String>,
    },
    /// A range of the first dimension of a stored tensor.
    Split {
        /// The name of the whole.
        name: String,
        /// Rows of the whole.
        rows: u64,
        /// First row.
        from: u64,
    },
    /// The stored tensor plus one: norms whose weight is stored as a difference from one.
    AddOne,
}

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, which is the stored tensor's unless the recipe says otherwise.
    pub name: String,
    /// The part of the model it belongs to.
    pub role: Role,
    /// The shape of the whole, unpacked.
    pub shape: Vec<u64>,
    /// How ranks share it.
    pub axis: ShardAxis,
    /// What is made on loading.
    pub recipe: Recipe,
    /// Whether it may be stored packed, with scales and biases beside it.
    pub is_matrix: bool,
}

/// Affine packing: integers of `bits` bits, of which `group_size` neighbours share a scale and a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Values that share a scale and a bias.
    pub group_size: u32,
    /// Bits of a value.
    pub bits: u32,
}

/// What the files have of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// How it is packed; `None` for plain numbers.
    pub packing: Option<Packing>,
    /// Bytes of it with its scales and biases, of the whole.
    pub bytes: u64,
    /// Whether any of it is in 32 bits, which makes MLX compute in 32 bits from there on.
    pub is_wide: bool,
}

impl Tensor {
    fn new(name: String, role: Role, shape: &[u64], axis: ShardAxis, is_matrix: bool) -> Self {
        Self { name, role, shape: shape.to_vec(), axis, recipe: Recipe::AsIs, is_matrix }
    }

    /// The stored tensors it is made of, and the shape each has.
    pub fn sources(&self) -> Vec<(&str, Cow<'_, [u64]>)> {
        match &self.recipe {
            Recipe::AsIs | Recipe::AddOne => vec![(&self.name, Cow::Borrowed(&self.shape[..]))],
            Recipe::Stack { names } => {
                let each = self.shape.get(1..).unwrap_or_default();
                names.iter().map(|name| (name.as_str(), Cow::Borrowed(each))).collect()
            }
            Recipe::Split { name, rows, .. } => {
                let mut whole = self.shape.clone();
                if let Some(first) = whole.first_mut() {
                    *first = *rows;
                }
                vec![(name, Cow::Owned(whole))]
            }
        }
    }

    /// What the files have of it, if that is what the description calls for and in a form the engine reads.
    pub fn stored(&self, headers: &Headers) -> Result<Stored, Error> {
        let mut stored = Stored::default();
        for (name, shape) in self.sources() {
            let source = stored_as(name, &shape, self.is_matrix, headers)?;
            stored.packing = stored.packing.or(source.packing);
            stored.is_wide |= source.is_wide;
            let share = match &self.recipe {
                // Packed or plain, rows lie together.
                Recipe::Split { rows, .. } => {
                    let own = self.shape.first().copied().unwrap_or(0);
                    source.bytes / (*rows).max(1) * own
                }
                Recipe::AsIs | Recipe::AddOne | Recipe::Stack { .. } => source.bytes,
            };
            stored.bytes = stored.bytes.saturating_add(share);
        }
        Ok(stored)
    }

    /// Parameters it stands for.
    pub fn parameters(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size))
    }
}

/// The name of the scales of a packed matrix, or of its biases.
pub fn beside(weight: &str, field: &str) -> String {
    format!("{}.{field}", weight.strip_suffix(".weight").unwrap_or(weight))
}

fn stored_as(name: &str, shape: &[u64], is_matrix: bool, headers: &Headers) -> Result<Stored, Error> {
    let find = |name: &str| {
        headers
            .get(name)
            .ok_or_else(|| FileError::Disagree { problem: format!("tensor {} is missing", shorten(name)) })
    };
    let weight = find(name)?;
    let scales_name = beside(name, "scales");
    if !is_matrix || !headers.contains(&scales_name) {
        check_plain(name, weight, shape, headers)?;
        return Ok(Stored { packing: None, bytes: weight.bytes(), is_wide: weight.dtype == Dtype::F32 });
    }
    let (scales, biases_name) = (find(&scales_name)?, beside(name, "biases"));
    let packing = packing(name, weight, scales, shape)?;
    let biases = find(&biases_name)?;
    check_plain(&scales_name, scales, &scales.shape, headers)?;
    check_plain(&biases_name, biases, &scales.shape, headers)?;
    let bytes = weight.bytes().saturating_add(scales.bytes()).saturating_add(biases.bytes());
    let is_wide = scales.dtype == Dtype::F32 || biases.dtype == Dtype::F32;
    Ok(Stored { packing: Some(packing), bytes, is_wide })
}

fn check_plain(name: &str, entry: &Entry, shape: &[u64], headers: &Headers) -> Result<(), Error> {
    if !entry.dtype.is_float() {
        let reason = format!(
            "its element type {} in {} is not supported; supported are F32, F16 and BF16, and U32 for affine-quantised weights",
            entry.dtype,
            headers.file_of(entry)
        );
        return Err(Unsupported::tensor(
            &shorten(name),
            reason,
            "use the model in 16 bits, or quantised by mlx-lm",
        )
        .into());
    }
    if entry.shape != shape {
        let problem = format!(
            "tensor {} in {} has shape {:?}, but config.json calls for {shape:?}",
            shorten(name),
            headers.file_of(entry),
            entry.shape
        );
        return Err(FileError::Disagree { problem }.into());
    }
    Ok(())
}

/// Group size and bits of a packed matrix, which follow from the shapes alone: overrides per module in config.json need
/// no look-up, and cannot contradict the files.
pub fn packing(name: &str, weight: &Entry, scales: &Entry, shape: &[u64]) -> Result<Packing, Unsupported> {
    let unknown = || {
        let reason = format!(
            "it is quantised as {} {:?} with scales {} {:?} for a matrix of {shape:?}; supported is affine with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128",
            weight.dtype, weight.shape, scales.dtype, scales.shape
        );
        Unsupported::tensor(
            &shorten(name),
            reason,
            "use the model in 16 bits, or quantised by mlx-lm in mode affine",
        )
    };
    let parts = |shape: &'_ [u64]| shape.split_last().map(|(last, outer)| (outer.to_vec(), *last));
    let (Some((outer, columns)), Some((packed_outer, packed)), Some((scales_outer, groups))) =
        (parts(shape), parts(&weight.shape), parts(&scales.shape))
    else {
        return Err(unknown());
    };
    let aligned = packed_outer == outer && scales_outer == outer && groups > 0 && columns > 0;
    let Some(bits_in_row) = packed.checked_mul(32).filter(|_| aligned) else { return Err(unknown()) };
    if !columns.is_multiple_of(groups)
        || !bits_in_row.is_multiple_of(columns)
        || weight.dtype != Dtype::U32
        || !scales.dtype.is_float()
    {
        return Err(unknown());
    }
    let (group_size, bits) = (columns / groups, bits_in_row / columns);
    if !matches!(group_size, 32 | 64 | 128) || !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
        return Err(unknown());
    }
    Ok(Packing { group_size: group_size as u32, bits: bits as u32 })
}

/// The role of a tensor by its Hugging Face name; `None` for names no layout here uses, such as precomputed rotary
/// frequencies, which are not loaded.
pub fn tensor_role(name: &str) -> Option<Role> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    if let Some(rest) = name.strip_prefix("layers.") {
        let (index, field) = rest.split_once('.')?;
        if field.ends_with("rotary_emb.inv_freq") {
            return None;
        }
        return index.parse().ok().map(Role::Layer);
    }
    if name.starts_with("embed_tokens.") {
        return Some(Role::Embedding);
    }
    if name.starts_with("norm.") || name.starts_with("lm_head.") {
        return Some(Role::Head);
    }
    None
}

/// The tensors of a model whose names are those Hugging Face gives a Llama.
pub fn hugging_face(description: &Description) -> Vec<Tensor> {
    let Description { hidden_size, vocab_size, tied, layers, .. } = description;
    let (hidden, vocabulary) = (u64::from(*hidden_size), u64::from(*vocab_size));
    let whole = ShardAxis::Replicated;
    let mut tensors = vec![Tensor::new(
        "model.embed_tokens.weight".to_owned(),
        Role::Embedding,
        &[vocabulary, hidden],
        whole.clone(),
        true,
    )];
    for (index, layer) in layers.iter().enumerate() {
        let mut module = Module {
            path: format!("model.layers.{index}"),
            role: Role::Layer(index as u32),
            tensors: &mut tensors,
        };
        module.vector("input_layernorm.weight", hidden);
        if let Mixer::Attention(attention) = &layer.mixer {
            module.attention(attention, hidden);
        }
        module.vector("post_attention_layernorm.weight", hidden);
        if let Mlp::Dense(Dense { intermediate, bias }) = layer.mlp {
            module.gated("mlp", hidden, u64::from(intermediate), bias);
        }
    }
    tensors.push(Tensor::new("model.norm.weight".to_owned(), Role::Head, &[hidden], whole.clone(), false));
    if !tied {
        tensors.push(Tensor::new(
            "lm_head.weight".to_owned(),
            Role::Head,
            &[vocabulary, hidden],
            whole,
            true,
        ));
    }
    tensors
}

/// Writes the tensors of one layer.
struct Module<'a> {
    path: String,
    role: Role,
    tensors: &'a mut Vec<Tensor>,
}

impl Module<'_> {
    fn push(&mut self, field: &str, shape: &[u64], dim: Option<usize>, is_matrix: bool) {
        let segments = |dim: usize| shape.get(dim).copied().into_iter().collect();
        let axis = dim.map_or(ShardAxis::Replicated, |dim| ShardAxis::Axis { dim, segments: segments(dim) });
        self.tensors.push(Tensor::new(format!("{}.{field}", self.path), self.role, shape, axis, is_matrix));
    }

    fn vector(&mut self, field: &str, width: u64) {
        self.push(field, &[width], None, false);
    }

    /// A projection whose outputs are shared, and the bias with them.
    fn column_parallel(&mut self, field: &str, outputs: u64, inputs: u64, bias: bool) {
        self.push(&format!("{field}.weight"), &[outputs, inputs], Some(0), true);
        if bias {
            self.push(&format!("{field}.bias"), &[outputs], Some(0), false);
        }
    }

    /// A projection whose inputs are shared and whose outputs are then summed: its bias is added after the sum.
    fn row_parallel(&mut self, field: &str, outputs: u64, inputs: u64, bias: bool) {
        self.push(&format!("{field}.weight"), &[outputs, inputs], Some(1), true);
        if bias {
            self.vector(&format!("{field}.bias"), outputs);
        }
    }

    fn attention(&mut self, attention: &Attention, hidden: u64) {
        let Attention { heads, kv_heads, key_dim, value_dim, head_norm, bias, .. } = *attention;
        let [heads, kv_heads, key_dim, value_dim] = [heads, kv_heads, key_dim, value_dim].map(u64::from);
        self.column_parallel("self_attn.q_proj", heads * key_dim, hidden, bias);
        self.column_parallel("self_attn.k_proj", kv_heads * key_dim, hidden, bias);
        self.column_parallel("self_attn.v_proj", kv_heads * value_dim, hidden, bias);
        self.row_parallel("self_attn.o_proj", hidden, heads * value_dim, bias);
        if head_norm.is_some() {
            self.vector("self_attn.q_norm.weight", key_dim);
            self.vector("self_attn.k_norm.weight", key_dim);
        }
    }

    fn gated(&mut self, path: &str, hidden: u64, width: u64, bias: bool) {
        self.column_parallel(&format!("{path}.gate_proj"), width, hidden, bias);
        self.column_parallel(&format!("{path}.up_proj"), width, hidden, bias);
        self.row_parallel(&format!("{path}.down_proj"), hidden, width, bias);
    }
}

#[cfg(test)]
mod tests;
