//! A GGUF file as if it were a file of an MLX repository: where each converted tensor would lie, and any range of its
//! bytes, made of the blocks that it stands for. So shards are read, counted and checked as those of safetensors are.

use std::io;

use super::{
    affine::{GroupPacking, Packed, packing},
    block_type::BlockType,
    blocks::decode,
    header::GgufTensor,
    names::{Architecture, ROPE_FACTORS, mlx_name},
};
use crate::{
    error::Unsupported,
    load_quantization::LoadQuantization,
    safetensors::{Dtype, Entry, shorten},
    tensors::beside,
    value_type::ValueType,
};

/// Bytes that are read of the file at once: what is kept beside the converted tensor.
const READ_BYTES: usize = 1 << 20;

/// The converted tensors of one file.
#[derive(Clone, Debug)]
pub struct Layout {
    value: ValueType,
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
}

/// What is made of blocks.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Plain numbers, each less so much.
    Plain(f32),
    /// The integers of packed ones.
    Values(GroupPacking),
    Scales(GroupPacking),
    Biases(GroupPacking),
}

impl Part {
    /// Elements that share so many bytes of this part.
    fn group(self, value: ValueType) -> (u64, u64) {
        match self {
            Self::Plain(_) => (1, value.bytes() as u64),
            Self::Values(packing) => {
                (packing.group_size.into(), u64::from(packing.group_size * packing.bits / 8))
            }
            Self::Scales(packing) | Self::Biases(packing) => {
                (packing.group_size.into(), value.bytes() as u64)
            }
        }
    }
}

impl Layout {
    /// The layout of a file's tensors, and the entries of a header that would describe it.
    pub(super) fn new(
        architecture: &Architecture,
        tensors: &[GgufTensor],
        value: ValueType,
        anew: Option<LoadQuantization>,
    ) -> Result<(Self, Vec<(String, Entry)>), Unsupported> {
        let mut layout = Self { value, regions: Vec::new() };
        let mut entries = Vec::new();
        for tensor in tensors.iter().filter(|tensor| tensor.name != ROPE_FACTORS) {
            let refuse =
                |reason: String, remedy: &str| Unsupported::tensor(&shorten(&tensor.name), reason, remedy);
            let Some(name) = mlx_name(architecture, &tensor.name) else {
                let reason = "this release does not know what it is for".to_owned();
                return Err(refuse(reason, "use the model as an MLX repository"));
            };
            let Some(kind) = tensor.element.block_type() else {
                let reason = format!(
                    "its type {:?} is not read; read are {}",
                    tensor.element,
                    super::block_type::list()
                );
                return Err(refuse(reason, "use a file of another quantisation, such as Q4_K_M or Q8_0"));
            };
            let columns = tensor.shape.last().copied().unwrap_or(0);
            let packing = packing(kind, columns, anew).filter(|_| tensor.shape.len() > 1);
            let mut add = |name: String, dtype: Dtype, columns: u64, bytes: u64, part: Part| {
                let mut shape = tensor.shape.clone();
                shape.pop();
                shape.push(columns);
                let begin = layout.regions.last().map_or(0, |region| region.end);
                // At most 8 times what is in the file, whose bytes are counted in 64 bits.
                let end = begin.saturating_add(bytes);
                let (tensor, start) = (tensor.name.clone(), tensor.begin);
                layout.regions.push(Region { begin, end, tensor, kind, start, part });
                entries.push((name, Entry { file: 0, dtype, shape, begin, end }));
            };
            let elements = tensor.shape.iter().fold(1_u64, |product, &size| product.saturating_mul(size));
            let bytes = |part: Part| {
                let (group, bytes) = part.group(value);
                (elements / group).saturating_mul(bytes)
            };
            match packing {
                None => {
                    let less = if name.ends_with("norm.weight") { architecture.norm_offset } else { 0.0 };
                    add(name, value.dtype(), columns, bytes(Part::Plain(less)), Part::Plain(less));
                }
                Some(own) => {
                    let groups = columns / u64::from(own.group_size);
                    let words = columns / 32 * u64::from(own.bits);
                    let (scales, biases) = (beside(&name, "scales"), beside(&name, "biases"));
                    add(name, Dtype::U32, words, bytes(Part::Values(own)), Part::Values(own));
                    add(scales, value.dtype(), groups, bytes(Part::Scales(own)), Part::Scales(own));
                    add(biases, value.dtype(), groups, bytes(Part::Biases(own)), Part::Biases(own));
                }
            }
        }
        Ok((layout, entries))
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
        region.read(self.value, offset - region.begin, out, read)
    }
}

impl Region {
    fn read(
        &self,
        value: ValueType,
        offset: u64,
        mut out: &mut [u8],
        read: &dyn Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (group, group_bytes) = self.part.group(value);
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
            read(self.start + number * raw_unit, &mut raw)?;
            converted.clear();
            self.convert(value, &raw, &mut converted)?;
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
    fn convert(&self, value: ValueType, raw: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let beyond = |found: f32| value.beyond(&self.tensor, found);
        let packed = |own: GroupPacking| {
            let mut packed = Packed::default();
            packed.add(self.kind, raw, own, value);
            packed
        };
        match self.part {
            Part::Plain(less) => {
                let mut values = vec![0.0; self.kind.block_elements()];
                for block in raw.chunks_exact(self.kind.block_bytes()) {
                    decode(self.kind, block, &mut values);
                    values.iter_mut().for_each(|number| *number -= less);
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
        }
    }
}

#[cfg(test)]
mod tests;
