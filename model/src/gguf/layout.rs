//! A GGUF file as if it were a file of an MLX repository: where each converted tensor would lie, and any range of its
//! bytes, made of the blocks that it stands for. So shards are read, counted and checked as those of safetensors are.

use std::io;

use super::{
    affine::{GroupPacking, Packed, packing},
    architectures::{Architecture, is_of_configuration, mlx_name, stays_wide},
    block_type::BlockType,
    blocks::decode,
    delta_net::DeltaHeads,
    header::GgufTensor,
    pieces::{Reorder, TensorPiece, pieces},
};
use crate::{
    error::Unsupported,
    load_quantization::LoadQuantization,
    safetensors::{Dtype, Entry, shorten},
    tensors::{BYTE, beside},
    value_type::ValueType,
};

/// Neighbours that share a scale in MXFP4.
const MXFP4_GROUP: u64 = 32;
/// Bytes that are read of the file at once: what is kept beside the converted tensor.
const READ_BYTES: usize = 1 << 20;

/// What of a file's tensors is converted, and into what.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// What the file's names mean.
    pub architecture: &'static Architecture,
    /// Layers of the model. The file may have further ones, which are left out.
    pub layers: u64,
    /// Heads of its gated delta nets, if it has such.
    pub heads: Option<DeltaHeads>,
    /// The type of numbers, scales and biases.
    pub value: ValueType,
    /// Bits of what is packed anew, where they are asked for.
    pub anew: Option<LoadQuantization>,
}

/// The converted tensors of one file.
#[derive(Clone, Debug)]
pub struct Layout {
    /// One after the other from 0 on.
    regions: Vec<Region>,
}

/// The bytes of one converted tensor.
#[derive(Clone, Debug)]
struct Region {
    begin: u64,
    end: u64,
    /// Its name in the file.
    tensor: String,
    kind: BlockType,
    /// First byte of its blocks.
    start: u64,
    part: Part,
    /// Type of its numbers, or of its scales and biases.
    value: ValueType,
    /// Where its heads are in another order.
    reorder: Option<Reorder>,
}

/// What is made of blocks.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Plain numbers, each less so much.
    Plain(f32),
    /// Logarithms of what plain numbers are below zero.
    Logarithms,
    /// The integers of packed ones.
    Values(GroupPacking),
    Scales(GroupPacking),
    Biases(GroupPacking),
    /// MXFP4's own numbers of 4 bits, which MLX has in another order.
    Mxfp4Values,
    /// The exponents of their scales.
    Mxfp4Scales,
}

impl Part {
    /// Elements that share so many bytes of this part.
    fn group(self, value: ValueType) -> (u64, u64) {
        match self {
            Self::Plain(_) | Self::Logarithms => (1, value.bytes() as u64),
            Self::Values(packing) => {
                (packing.group_size.into(), u64::from(packing.group_size * packing.bits / 8))
            }
            Self::Scales(packing) | Self::Biases(packing) => {
                (packing.group_size.into(), value.bytes() as u64)
            }
            Self::Mxfp4Values => (MXFP4_GROUP, MXFP4_GROUP / 2),
            Self::Mxfp4Scales => (MXFP4_GROUP, 1),
        }
    }
}

impl Layout {
    /// The layout of a file's tensors, and the entries of a header that would describe it.
    pub(super) fn new(
        conversion: &Conversion,
        tensors: &[GgufTensor],
    ) -> Result<(Self, Vec<(String, Entry)>), Unsupported> {
        let mut layout = Self { regions: Vec::new() };
        let mut entries = Vec::new();
        for tensor in tensors.iter().filter(|tensor| !is_of_configuration(&tensor.name)) {
            let (layer, own) = match tensor.name.strip_prefix("blk.").and_then(|name| name.split_once('.')) {
                Some((layer, own)) => (Some(layer), own),
                None => (None, tensor.name.as_str()),
            };
            let index = layer.and_then(|layer| layer.parse::<u64>().ok());
            if index.is_some_and(|index| index >= conversion.layers) {
                continue;
            }
            for piece in pieces(own, tensor, conversion.heads) {
                let name = match (piece.tensor, layer) {
                    (Some(own), Some(layer)) => {
                        mlx_name(conversion.architecture, &format!("blk.{layer}.{own}"))
                    }
                    _ => mlx_name(conversion.architecture, &tensor.name),
                };
                layout.add(conversion, tensor, name, &piece, &mut entries)?;
            }
        }
        Ok((layout, entries))
    }

    /// Adds what one tensor, or a piece of it, becomes.
    fn add(
        &mut self,
        conversion: &Conversion,
        tensor: &GgufTensor,
        name: Option<String>,
        piece: &TensorPiece,
        entries: &mut Vec<(String, Entry)>,
    ) -> Result<(), Unsupported> {
        let refuse =
            |reason: String, remedy: &str| Unsupported::tensor(&shorten(&tensor.name), reason, remedy);
        let Some(name) = name else {
            let reason = "this release does not know what it is for".to_owned();
            return Err(refuse(reason, "use the model as an MLX repository"));
        };
        let Some(kind) = tensor.element.block_type() else {
            let reason =
                format!("its type {:?} is not read; read are {}", tensor.element, super::block_type::list());
            return Err(refuse(reason, "use a file of another quantisation, such as Q4_K_M or Q8_0"));
        };
        let mut shape = tensor.shape.clone();
        if let (Some(rows), Some(own)) = (piece.rows, shape.iter_mut().rev().nth(1)) {
            *own = rows;
        }
        let elements = shape.iter().fold(1_u64, |product, &size| product.saturating_mul(size));
        let columns = shape.pop().unwrap_or(0);
        let is_matrix = !shape.is_empty();
        let is_wide = kind == BlockType::F32 && stays_wide(&name);
        let value = if is_wide { ValueType::F32 } else { conversion.value };
        for (name, dtype, columns, part) in parts(conversion, name, kind, columns, is_matrix, value) {
            let mut shape = shape.clone();
            shape.push(columns);
            let shape = in_repository(&name, shape);
            let begin = self.regions.last().map_or(0, |region| region.end);
            let (group, bytes) = part.group(value);
            if let Some(reorder) = piece.reorder {
                reorder.check_groups(&shorten(&tensor.name), group)?;
            }
            // At most 8 times what is in the file, whose bytes are counted in 64 bits.
            let end = begin.saturating_add((elements / group).saturating_mul(bytes));
            let (tensor, start, reorder) = (tensor.name.clone(), tensor.begin, piece.reorder);
            self.regions.push(Region { begin, end, tensor, kind, start, part, value, reorder });
            entries.push((name, Entry { file: 0, dtype, shape, begin, end }));
        }
        Ok(())
    }

    /// Fills `out` with the converted bytes from `offset` on, which lie in one tensor; `read` fills bytes of the file
    /// from an offset on.
    pub fn read(
        &self,
        offset: u64,
        out: &mut [u8],
        read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = offset.saturating_add(out.len() as u64);
        let index = self.regions.partition_point(|region| region.end <= offset);
        let region = self.regions.get(index).filter(|region| region.begin <= offset && end <= region.end);
        let Some(region) = region else {
            let problem =
                format!("bytes {offset}..{end} of the converted tensors lie in none; report this as a bug");
            return Err(io::Error::other(problem));
        };
        region.read(offset - region.begin, out, read)
    }
}

/// The shape of a tensor in an MLX repository. A file has no dimensions of one; of state spaces it has what is one number
/// a head as a column, and the norm as a row for each group.
fn in_repository(name: &str, mut shape: Vec<u64>) -> Vec<u64> {
    // mlx-lm has the one input of each channel last.
    if name.ends_with("conv1d.weight") {
        shape.push(1);
    }
    if name.ends_with("shared_expert_gate.weight") && shape.len() == 1 {
        shape.insert(0, 1);
    }
    if [".mamba.A_log", ".mamba.D", ".mamba.norm.weight"].iter().any(|field| name.ends_with(field)) {
        shape = vec![shape.iter().fold(1, |product, &size| product.saturating_mul(size))];
    }
    shape
}

/// What a tensor of this name becomes: names, types, columns, and how each is made.
fn parts(
    conversion: &Conversion,
    name: String,
    kind: BlockType,
    columns: u64,
    is_matrix: bool,
    value: ValueType,
) -> Vec<(String, Dtype, u64, Part)> {
    let (scales, biases) = (beside(&name, "scales"), beside(&name, "biases"));
    match packing(kind, columns, conversion.anew) {
        Some(own) if is_matrix => {
            let groups = columns / u64::from(own.group_size);
            let words = columns / 32 * u64::from(own.bits);
            vec![
                (name, Dtype::U32, words, Part::Values(own)),
                (scales, value.dtype(), groups, Part::Scales(own)),
                (biases, value.dtype(), groups, Part::Biases(own)),
            ]
        }
        None if is_matrix && kind == BlockType::Mxfp4 => vec![
            (name, Dtype::U32, columns / 8, Part::Mxfp4Values),
            (scales, BYTE, columns / MXFP4_GROUP, Part::Mxfp4Scales),
        ],
        Some(_) | None if name.ends_with(".A_log") => vec![(name, value.dtype(), columns, Part::Logarithms)],
        Some(_) | None => {
            let less = if name.ends_with("norm.weight") { conversion.architecture.norm_offset } else { 0.0 };
            vec![(name, value.dtype(), columns, Part::Plain(less))]
        }
    }
}

impl Region {
    /// The same whatever the order of its heads.
    fn read(
        &self,
        offset: u64,
        mut out: &mut [u8],
        read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(reorder) = self.reorder else { return self.read_in_order(offset, out, read) };
        let (group, bytes) = self.part.group(self.value);
        let mut at = offset;
        while !out.is_empty() {
            let (source, together) = reorder.source(at / bytes * group);
            let skip = at % bytes;
            let length = ((together / group).saturating_mul(bytes) - skip).min(out.len() as u64);
            let (head, tail) = out.split_at_mut(length as usize);
            let source = (source / group).saturating_mul(bytes).saturating_add(skip);
            self.read_in_order(source, head, read)?;
            (out, at) = (tail, at + length);
        }
        Ok(())
    }

    fn read_in_order(
        &self,
        offset: u64,
        mut out: &mut [u8],
        read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (group, group_bytes) = self.part.group(self.value);
        // What is decoded together: whole blocks and whole groups. Both are powers of two.
        let unit = group.max(self.kind.block_elements() as u64);
        let (block, block_bytes) = (self.kind.block_elements() as u64, self.kind.block_bytes() as u64);
        let unit_bytes = unit / group * group_bytes;
        let raw_unit = unit / block * block_bytes;
        let at_once = (READ_BYTES as u64 / raw_unit).max(1);
        let (mut number, mut skip) = (offset / unit_bytes, (offset % unit_bytes) as usize);
        let (mut raw, mut converted) = (Vec::new(), Vec::new());
        while !out.is_empty() {
            let units = ((skip + out.len()) as u64).div_ceil(unit_bytes).min(at_once);
            raw.resize((units * raw_unit) as usize, 0);
            read(self.start.saturating_add(number.saturating_mul(raw_unit)), &mut raw)?;
            converted.clear();
            self.convert(&raw, &mut converted)?;
            let own = converted.get(skip..).unwrap_or_default();
            let length = own.len().min(out.len());
            if length == 0 {
                return Err(io::Error::other(format!(
                    "tensor {} converts to nothing; report this as a bug",
                    self.tensor
                )));
            }
            let (head, tail) = out.split_at_mut(length);
            head.copy_from_slice(&own[..length]);
            (out, number, skip) = (tail, number + units, 0);
        }
        Ok(())
    }

    /// Adds what whole blocks become.
    fn convert(&self, raw: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let value = self.value;
        let beyond = |found: f32| value.beyond(&self.tensor, found);
        let packed = |own: GroupPacking| {
            let mut packed = Packed::default();
            packed.add(self.kind, raw, own, value);
            packed
        };
        match self.part {
            Part::Plain(_) | Part::Logarithms => {
                let mut values = vec![0.0; self.kind.block_elements()];
                for block in raw.chunks_exact(self.kind.block_bytes()) {
                    decode(self.kind, block, &mut values);
                    values.iter_mut().for_each(|number| {
                        *number =
                            if let Part::Plain(less) = self.part { *number - less } else { (-*number).ln() };
                    });
                    value.write(&values, out).map_err(beyond)?;
                }
                Ok(())
            }
            Part::Values(own) => {
                out.extend(packed(own).values);
                Ok(())
            }
            Part::Scales(own) => value.write(&packed(own).scales, out).map_err(beyond),
            Part::Biases(own) => value.write(&packed(own).biases, out).map_err(beyond),
            Part::Mxfp4Values => {
                out.extend(raw.chunks_exact(self.kind.block_bytes()).flat_map(mxfp4_values));
                Ok(())
            }
            Part::Mxfp4Scales => {
                out.extend(raw.chunks_exact(self.kind.block_bytes()).map(|block| block[0]));
                Ok(())
            }
        }
    }
}

/// The numbers of a block in their order, the first of two in the lower half of a byte. The block has an exponent, and
/// bytes with a number of its first half and one of its second half.
fn mxfp4_values(block: &[u8]) -> [u8; MXFP4_GROUP as usize / 2] {
    let number = |at: usize| if at < 16 { block[1 + at] & 15 } else { block[1 + at - 16] >> 4 };
    std::array::from_fn(|pair| number(2 * pair) | number(2 * pair + 1) << 4)
}

#[cfg(test)]
mod tests;
