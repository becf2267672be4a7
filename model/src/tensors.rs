//! The table of a model's tensors: what a description calls for, where it is stored, how ranks share it and what is
//! made of it on loading. The engine loads by it and the cost model adds it up. Names are those that mlx-lm gives a
//! model which it converted, those of a Nemotron-H as if it were a Llama; where files have others, the table says which.

mod layout;
mod table;

use crate::{
    error::{Error, FileError, Unsupported},
    safetensors::{Dtype, Entry, Headers, shorten},
};

/// The part of a model a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Token embedding, held by the highest stage (and by rank 0 when tied).
    Embedding,
    /// Table and projection of per-layer inputs, held by the highest stage.
    PerLayerInputs,
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
    /// Each holds some of the heads that lie along this dimension, one at least: where there are fewer heads than ranks,
    /// several ranks hold the same one.
    Heads {
        /// The dimension.
        dim: usize,
        /// How many heads there are.
        heads: u32,
    },
    /// Each holds some of the equal parts of this dimension, as equally as the parts divide.
    Parts {
        /// The dimension.
        dim: usize,
        /// How many parts there are.
        parts: u64,
    },
}

impl ShardAxis {
    /// The dimension that is shared.
    pub fn dim(&self) -> Option<usize> {
        match self {
            Self::Replicated => None,
            Self::Axis { dim, .. } | Self::Heads { dim, .. } | Self::Parts { dim, .. } => Some(*dim),
        }
    }
}

/// What is made of the stored tensors on loading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// The stored tensor.
    AsIs,
    /// Stored tensors of equal shapes along a new first dimension.
    Stack,
    /// Some of one dimension of a stored tensor.
    Rows(Rows),
    /// Some rows of each head of a stored matrix, each head by itself.
    HeadRows {
        /// Rows that a head has there.
        of: u64,
        /// The first of them.
        from: u64,
        /// Whether each head is transposed.
        transposed: bool,
    },
    /// The stored tensor plus one: norms whose weight is stored as a difference from one.
    AddOne,
}

/// Some of one dimension of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The dimension.
    pub dim: usize,
    /// How many there are in the whole.
    pub of: u64,
    /// The first one.
    pub from: u64,
    /// From one to the next.
    pub step: u64,
}

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in a model that mlx-lm converted.
    pub name: String,
    /// The part of the model it belongs to.
    pub role: Role,
    /// The shape of the whole, unpacked.
    pub shape: Vec<u64>,
    /// How ranks share it.
    pub axis: ShardAxis,
    /// The stored tensors it is made of: one, unless they are stacked.
    pub sources: Vec<String>,
    /// What is made of them on loading.
    pub recipe: Recipe,
    /// Whether it may be stored packed, with scales and biases beside it.
    pub is_matrix: bool,
    /// How a matrix of plain numbers is packed while it is read; `None` where it stays as it is.
    pub packs_to: Option<Packing>,
    /// Whether what it computes goes back to the type of the other values, whatever its own.
    pub is_auxiliary: bool,
}

/// Packing: numbers of `bits` bits, of which `group_size` neighbours share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// What the numbers are.
    pub mode: PackingMode,
    /// Values that share a scale.
    pub group_size: u32,
    /// Bits of a value.
    pub bits: u32,
}

/// The modes of MLX's quantisation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PackingMode {
    /// Integers, with a scale and a bias for each group.
    #[default]
    Affine,
    /// Floating-point numbers of 4 bits in groups of 32, whose scale is a power of two.
    Mxfp4,
    /// Floating-point numbers of 8 bits in groups of 32, whose scale is a power of two.
    Mxfp8,
    /// Floating-point numbers of 4 bits in groups of 16, whose scale is one of 8 bits.
    Nvfp4,
}

impl PackingMode {
    /// MLX's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

/// What the files have of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// How the engine has it packed; `None` for plain numbers.
    pub packing: Option<Packing>,
    /// Whether it is packed while it is read, and the files have plain numbers.
    pub packs: bool,
    /// Bytes of it with its scales and biases, of the whole, as the engine has it.
    pub bytes: u64,
    /// Whether any of it is in 32 bits, which makes MLX compute in 32 bits from there on.
    pub is_wide: bool,
}

impl Tensor {
    /// The shape that each of its sources has, unpacked.
    pub fn source_shape(&self) -> Vec<u64> {
        match self.recipe {
            Recipe::AsIs | Recipe::AddOne => self.shape.clone(),
            Recipe::Stack => self.shape.get(1..).unwrap_or_default().to_vec(),
            Recipe::Rows(Rows { dim, of, .. }) => {
                let mut whole = self.shape.clone();
                if let Some(size) = whole.get_mut(dim) {
                    *size = of;
                }
                whole
            }
            Recipe::HeadRows { of, transposed, .. } => match self.shape[..] {
                [heads, rows, columns] => {
                    vec![heads.saturating_mul(of), if transposed { rows } else { columns }]
                }
                _ => self.shape.clone(),
            },
        }
    }

    /// What the files have of it, if that is what the description calls for and in a form the engine reads.
    pub fn stored(&self, headers: &Headers) -> Result<Stored, Error> {
        let mut stored = Stored::default();
        let shape = self.source_shape();
        let whole = shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size)).max(1);
        for name in &self.sources {
            let source = stored_as(name, &shape, self.is_matrix, headers)?;
            self.check_alike(name, headers)?;
            stored.packing = stored.packing.or(source.packing);
            stored.is_wide |= source.is_wide && !self.is_auxiliary;
            let share = match &self.recipe {
                // Packed or plain, each part takes as much as another.
                Recipe::Rows(_) | Recipe::HeadRows { .. } => {
                    (u128::from(source.bytes) * u128::from(self.parameters()) / u128::from(whole)) as u64
                }
                Recipe::AsIs | Recipe::AddOne | Recipe::Stack => source.bytes,
            };
            stored.bytes = stored.bytes.saturating_add(share);
        }
        if let (None, Some(packing)) = (stored.packing, self.packs_to) {
            let values = self.parameters();
            (stored.packing, stored.packs) = (Some(packing), true);
            stored.bytes = packing.bytes(values, stored.bytes / values.max(1));
        }
        Ok(stored)
    }

    /// That a source is stored as the first one: what is stacked is one array.
    fn check_alike(&self, source: &str, headers: &Headers) -> Result<(), FileError> {
        let Some(first) = self.sources.first() else { return Ok(()) };
        for name in [str::to_owned, |name: &str| beside(name, "scales"), |name: &str| beside(name, "biases")]
        {
            let (name, first) = (name(source), name(first));
            let (Some(own), Some(other)) = (headers.get(&name), headers.get(&first)) else { continue };
            if (&own.dtype, &own.shape) != (&other.dtype, &other.shape) {
                let [own, other] = [own, other].map(|entry| format!("{} {:?}", entry.dtype, entry.shape));
                let (name, first) = (shorten(&name), shorten(&first));
                let problem = format!("tensor {name} is {own}, but {first}, which belongs to it, is {other}");
                return Err(FileError::Disagree { problem });
            }
        }
        Ok(())
    }

    /// Parameters it stands for.
    pub fn parameters(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size))
    }
}

/// The name of the scales of a packed matrix, or of its biases.
pub fn beside(weight: &str, field: &str) -> String {
    // gpt-oss calls its packed experts so.
    if let Some(path) = weight.strip_suffix("_blocks") {
        return format!("{path}_{field}");
    }
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
        let is_wide = weight.dtype == Dtype::F32;
        return Ok(Stored { bytes: weight.bytes(), is_wide, ..Stored::default() });
    }
    let scales = find(&scales_name)?;
    let packing = packing(name, weight, scales, shape)?;
    let mut bytes = weight.bytes().saturating_add(scales.bytes());
    if packing.mode != PackingMode::Affine {
        return Ok(Stored { packing: Some(packing), bytes, ..Stored::default() });
    }
    let biases_name = beside(name, "biases");
    let biases = find(&biases_name)?;
    check_plain(&scales_name, scales, &scales.shape, headers)?;
    check_plain(&biases_name, biases, &scales.shape, headers)?;
    bytes = bytes.saturating_add(biases.bytes());
    let is_wide = scales.dtype == Dtype::F32 || biases.dtype == Dtype::F32;
    Ok(Stored { packing: Some(packing), bytes, is_wide, ..Stored::default() })
}

/// A packed matrix as the engine computes with it, 32 bits at a time: exports of others have bytes, those of a group
/// along a dimension of their own.
pub fn packed_entry(entry: &Entry, dimensions: usize) -> Entry {
    let mut view = entry.clone();
    if entry.dtype == BYTE && entry.shape.len() == dimensions + 1 {
        let group = view.shape.pop().unwrap_or(0);
        if let Some(last) = view.shape.last_mut() {
            *last = last.saturating_mul(group) / 4;
        }
        view.dtype = Dtype::U32;
    }
    view
}

/// The type of bytes.
pub(crate) const BYTE: Dtype = Dtype::Other("U8", 1);

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
    // A dimension of one more or less lies there alike: exports differ in where they have it.
    let sizes = |shape: &[u64]| shape.iter().copied().filter(|&size| size != 1).collect::<Vec<_>>();
    if sizes(&entry.shape) != sizes(shape) {
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

/// Mode, group size and bits of a packed matrix, which follow from the shapes and the type of scales alone: overrides
/// per module in config.json need no look-up, and cannot contradict the files.
pub fn packing(name: &str, weight: &Entry, scales: &Entry, shape: &[u64]) -> Result<Packing, Unsupported> {
    let unknown = || {
        let reason = format!(
            "it is quantised as {} {:?} with scales {} {:?} for a matrix of {shape:?}; supported are affine with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4, mxfp8 and nvfp4",
            weight.dtype, weight.shape, scales.dtype, scales.shape
        );
        Unsupported::tensor(&shorten(name), reason, "use the model in 16 bits, or quantised by mlx-lm")
    };
    let weight = &packed_entry(weight, shape.len());
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
        || !(scales.dtype.is_float() || scales.dtype == BYTE)
    {
        return Err(unknown());
    }
    let (group_size, bits) = (columns / groups, bits_in_row / columns);
    let mode = match (scales.dtype == BYTE, group_size, bits) {
        (false, 32 | 64 | 128, 2 | 3 | 4 | 5 | 6 | 8) => PackingMode::Affine,
        (true, 32, 4) => PackingMode::Mxfp4,
        (true, 32, 8) => PackingMode::Mxfp8,
        (true, 16, 4) => PackingMode::Nvfp4,
        _ => return Err(unknown()),
    };
    Ok(Packing { mode, group_size: group_size as u32, bits: bits as u32 })
}

/// The name of a tensor or a module without what stands before the text model's own names.
pub(crate) fn without_prefix(name: &str) -> &str {
    Layout::PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// The role of a tensor by its Hugging Face name; `None` for names no layout here uses, such as precomputed rotary
/// frequencies, which are not loaded.
pub fn tensor_role(name: &str) -> Option<Role> {
    let name = without_prefix(name);
    if let Some(rest) = name.strip_prefix("layers.").or_else(|| name.strip_prefix("encoder.layer.")) {
        let (index, field) = rest.split_once('.')?;
        if field.ends_with("rotary_emb.inv_freq") {
            return None;
        }
        return index.parse().ok().map(Role::Layer);
    }
    if ["embed_tokens.", "embeddings.", "embed_positions.", "embed_token_types.", "embed_norm."]
        .iter()
        .any(|own| name.starts_with(own))
    {
        return Some(Role::Embedding);
    }
    if ["embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm."]
        .iter()
        .any(|own| name.starts_with(own))
    {
        return Some(Role::PerLayerInputs);
    }
    if ["norm.", "embedding_norm.", "norm_f.", "lm_head.", "score.", "classifier.", "pooler."]
        .iter()
        .any(|own| name.starts_with(own))
    {
        return Some(Role::Head);
    }
    None
}

pub use layout::Layout;
pub use table::table;

#[cfg(test)]
mod tests;
