//! The header of a GGUF file: magic, version, metadata and a table of tensors, then padding, then the data that the
//! table points into. Versions 2 and 3, little-endian.

use super::{
    MAX_HEADER_BYTES,
    block_type::ElementType,
    metadata::{Cursor, Metadata, Stop},
};
use crate::{error::FileError, excerpt::excerpt, lfs, safetensors::MAX_TENSORS};

const MAGIC: &[u8] = b"GGUF";
/// What every tensor begins at a multiple of, where the metadata does not say it.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment: a page of the largest machines.
const MAX_ALIGNMENT: u64 = 1 << 16;
/// Longest name of a tensor; llama.cpp writes at most 63 bytes.
const MAX_NAME_BYTES: u64 = 128;
/// Most dimensions of a tensor, by the specification.
const MAX_DIMENSIONS: u32 = 4;
/// Bytes of the shortest entry of a tensor: the length of its name, one dimension, type and offset.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Its sizes, the outermost first: the file has them the other way round.
    pub shape: Vec<u64>,
    /// How its numbers are stored.
    pub element: ElementType,
    /// First byte, counted from the file's first.
    pub begin: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// What a file says of itself.
#[derive(Debug, Default)]
pub struct GgufHeader<'a> {
    /// Keys and values.
    pub metadata: Metadata<'a>,
    /// The table, in the file's order.
    pub tensors: Vec<GgufTensor>,
}

/// What the start of a file was enough for.
#[derive(Debug)]
pub enum HeaderRead<'a> {
    /// The header.
    Whole(GgufHeader<'a>),
    /// Nothing: so many bytes from the file's first are to be read, and then all of them again.
    Needs(u64),
}

impl<'a> HeaderRead<'a> {
    /// Reads the header of a file of `size` bytes from its `start`.
    pub fn new(file: &str, start: &'a [u8], size: u64) -> Result<Self, FileError> {
        if lfs::is_pointer(start) {
            return Err(FileError::LfsPointer { file: file.to_owned(), size });
        }
        match header(&mut Cursor::new(start, size)) {
            Ok(header) => Ok(Self::Whole(header)),
            Err(Stop::Bad(problem)) => Err(FileError::BadGguf { file: file.to_owned(), problem }),
            Err(Stop::Short(end)) => {
                // As much again as there was, so that few reads are enough for a vocabulary of any length.
                let more = end.max(2 * start.len() as u64);
                Ok(Self::Needs(more.min(size).min(MAX_HEADER_BYTES).max(end)))
            }
        }
    }
}

fn header<'a>(cursor: &mut Cursor<'a>) -> Result<GgufHeader<'a>, Stop> {
    let bad = |problem: String| Err(Stop::Bad(problem));
    if cursor.take(4, "its magic")? != MAGIC {
        return bad("it does not begin with GGUF".to_owned());
    }
    match cursor.u32("its version")? {
        2 | 3 => {}
        swapped @ (0x0200_0000 | 0x0300_0000) => {
            return bad(format!("it is big-endian (version {})", swapped.swap_bytes()));
        }
        version => return bad(format!("its version is {version}; versions 2 and 3 are read")),
    }
    let (tensors, keys) = (cursor.u64("its number of tensors")?, cursor.u64("its number of keys")?);
    if tensors > MAX_TENSORS as u64 {
        return bad(format!("it has {tensors} tensors, more than the limit of {MAX_TENSORS}"));
    }
    let metadata = Metadata::read(cursor, keys)?;
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(value) => {
            let number = metadata.whole("general.alignment");
            let fits = |number: &u64| number.is_power_of_two() && *number <= MAX_ALIGNMENT;
            match number.filter(fits) {
                Some(number) => number,
                None => {
                    return bad(format!(
                        "general.alignment is {value:?}, no power of two up to {MAX_ALIGNMENT}"
                    ));
                }
            }
        }
    };
    // Before anything is kept of them.
    let shortest = tensors * MIN_ENTRY_BYTES;
    if shortest > cursor.left() {
        let left = cursor.left();
        return bad(format!("its {tensors} tensors take at least {shortest} bytes, and {left} are left"));
    }
    let tensors = (0..tensors).map(|_| tensor(cursor)).collect::<Result<Vec<_>, _>>()?;
    let data_start = cursor.at.next_multiple_of(alignment);
    place(tensors, data_start, alignment, cursor.size()).map(|tensors| GgufHeader { metadata, tensors })
}

/// An entry of the table, whose offset is still counted from the file's data.
fn tensor(cursor: &mut Cursor<'_>) -> Result<GgufTensor, Stop> {
    let name = cursor.text(MAX_NAME_BYTES, "the name of a tensor")?.to_owned();
    let bad = |problem: String| Err(Stop::Bad(format!("tensor {:?} {problem}", excerpt(&name))));
    let count = cursor.u32("a number of dimensions")?;
    if !(1..=MAX_DIMENSIONS).contains(&count) {
        return bad(format!("has {count} dimensions, not 1 to {MAX_DIMENSIONS}"));
    }
    let mut shape = (0..count).map(|_| cursor.u64("a dimension")).collect::<Result<Vec<_>, _>>()?;
    let number = cursor.u32("the type of a tensor")?;
    let begin = cursor.u64("an offset")?;
    let Some(element) = ElementType::of(number) else {
        return bad(format!("has type {number}, which this release does not know"));
    };
    let row = shape.first().copied().unwrap_or(0);
    if !row.is_multiple_of(element.block_elements()) {
        let own = element.block_elements();
        return bad(format!("has rows of {row}, which are no whole blocks of {own} as {element:?} has them"));
    }
    let elements = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
    let bytes = elements.filter(|elements| *elements > 0);
    let bytes =
        bytes.and_then(|elements| (elements / element.block_elements()).checked_mul(element.block_bytes()));
    let Some(bytes) = bytes else { return bad(format!("has impossible sizes, {shape:?}")) };
    shape.reverse();
    Ok(GgufTensor { name, shape, element, begin, bytes })
}

/// Tensors with their place in the file, each within it and none over another.
fn place(
    mut tensors: Vec<GgufTensor>,
    data_start: u64,
    alignment: u64,
    size: u64,
) -> Result<Vec<GgufTensor>, Stop> {
    for GgufTensor { name, begin, bytes, .. } in &mut tensors {
        let bad = |problem: String| Err(Stop::Bad(format!("tensor {:?} {problem}", excerpt(name))));
        if !begin.is_multiple_of(alignment) {
            return bad(format!("begins at {begin}, no multiple of {alignment}"));
        }
        let end = data_start.checked_add(*begin).and_then(|begin| begin.checked_add(*bytes));
        if end.is_none_or(|end| end > size) {
            return bad(format!(
                "has {bytes} bytes from {begin} of the data on, beyond the file's {size}; it is cut"
            ));
        }
        *begin += data_start;
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.begin);
    for pair in order.windows(2) {
        if let [first, second] = pair
            && first.begin + first.bytes > second.begin
        {
            let (first, second) = (excerpt(&first.name), excerpt(&second.name));
            return Err(Stop::Bad(format!("tensors {first:?} and {second:?} overlap")));
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests;
