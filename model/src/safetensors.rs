//! The header of a safetensors file, checked to the last number: 8 bytes of length, a JSON object of tensors, then the
//! data that the offsets point into. It takes bytes; the caller does the reading. Every number is doubted.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use crate::{error::FileError, object::Object};

/// Longest header read. The largest published models have 20 MB of tensor names in all their files together; the
/// format itself allows 100,000,000 bytes, of which a parsed copy would take several times that.
pub const MAX_HEADER_BYTES: u64 = 32 << 20;
/// Most tensors of a model: a thousand layers of a few hundred, or a hundred layers of a thousand experts.
pub const MAX_TENSORS: usize = 500_000;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;
/// Bytes before the header: its length.
const PREFIX_BYTES: u64 = 8;

/// Element type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits.
    F16,
    /// 16 bits, the exponent of 32.
    BF16,
    /// Packed values, 32 bits at a time.
    U32,
    /// A type of the format that the engine does not compute with, and its width in bytes.
    Other(&'static str, u64),
    /// A type that this release does not know: refused when such a tensor is wanted, not before.
    Unknown(Box<str>),
}

impl Dtype {
    /// The type of this name.
    pub fn named(name: &str) -> Self {
        match name {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            "U32" => Self::U32,
            "BOOL" => Self::Other("BOOL", 1),
            "U8" => Self::Other("U8", 1),
            "I8" => Self::Other("I8", 1),
            "F8_E4M3" => Self::Other("F8_E4M3", 1),
            "F8_E5M2" => Self::Other("F8_E5M2", 1),
            "U16" => Self::Other("U16", 2),
            "I16" => Self::Other("I16", 2),
            "I32" => Self::Other("I32", 4),
            "U64" => Self::Other("U64", 8),
            "I64" => Self::Other("I64", 8),
            "F64" => Self::Other("F64", 8),
            other => Self::Unknown(other.chars().take(24).collect()),
        }
    }

    /// Bytes of an element, where they are known.
    pub fn bytes(&self) -> Option<u64> {
        Some(match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Other(_, bytes) => *bytes,
            Self::Unknown(_) => return None,
        })
    }

    /// Whether the engine computes with it.
    pub fn is_float(&self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U32 => "U32",
            Self::Other(name, _) => name,
            Self::Unknown(name) => name,
        })
    }
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which of [`Headers::files`] it lies in.
    pub file: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Its sizes, the outermost first.
    pub shape: Vec<u64>,
    /// First byte, counted from the file's data.
    pub begin: u64,
    /// Byte after the last.
    pub end: u64,
}

impl Entry {
    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.end - self.begin
    }

    /// Elements, as many as 64 bits can count.
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size))
    }
}

/// A file of weights whose header was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name.
    pub name: String,
    /// Where in the file its data begins.
    pub data_start: u64,
}

/// The headers of all files of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    files: Vec<File>,
    tensors: BTreeMap<String, Entry>,
}

/// The length of the header of a file of `size` bytes, from its first eight.
pub fn header_length(file: &str, start: &[u8], size: u64) -> Result<u64, FileError> {
    let file = file.to_owned();
    let Ok(length) = <[u8; 8]>::try_from(start).map(u64::from_le_bytes) else {
        return Err(FileError::BeyondFile { file, length: PREFIX_BYTES, size });
    };
    if length > MAX_HEADER_BYTES {
        return Err(FileError::TooLong { file, length, limit: MAX_HEADER_BYTES });
    }
    if length + PREFIX_BYTES > size {
        return Err(FileError::BeyondFile { file, length, size });
    }
    Ok(length)
}

impl Headers {
    /// Adds the tensors of a file of `size` bytes. They must fill it without overlap, and no other file may have a
    /// tensor of the same name.
    pub fn add(&mut self, file: &str, header: &[u8], size: u64) -> Result<(), FileError> {
        let data_start = PREFIX_BYTES.saturating_add(header.len() as u64);
        let data = size.saturating_sub(data_start);
        let index = self.files.len();
        let mut tensors = Vec::new();
        let reader =
            HeaderReader { limit: MAX_TENSORS.saturating_sub(self.tensors.len()), tensors: &mut tensors };
        let mut json = serde_json::Deserializer::from_slice(header);
        let read = reader.deserialize(&mut json).and_then(|complete| json.end().map(|()| complete));
        let complete = read.map_err(|error| FileError::bad_json(file, &error.to_string()))?;
        if !complete {
            return Err(FileError::TooMany { file: file.to_owned(), limit: MAX_TENSORS });
        }
        let mut spans: Vec<(u64, u64, usize)> = Vec::new();
        let mut entries = Vec::with_capacity(tensors.len());
        for (place, (name, raw)) in tensors.iter().enumerate() {
            let bad =
                |problem| FileError::BadTensor { file: file.to_owned(), tensor: shorten(name), problem };
            let entry = raw.entry(index, data).map_err(bad)?;
            if entry.end > entry.begin {
                spans.push((entry.begin, entry.end, place));
            }
            entries.push(entry);
        }
        spans.sort_unstable();
        let mut filled = 0;
        for (begin, end, place) in spans {
            if begin < filled {
                let problem = format!("its bytes {begin}..{end} overlap those before, which end at {filled}");
                let tensor = shorten(&tensors[place].0);
                return Err(FileError::BadTensor { file: file.to_owned(), tensor, problem });
            }
            filled = end;
        }
        if filled != data {
            let described = size - data + filled;
            return Err(FileError::WrongSize { file: file.to_owned(), size, described });
        }
        for ((name, _), entry) in tensors.into_iter().zip(entries) {
            if let Some(other) = self.tensors.get(&name) {
                let first = self.files.get(other.file).map_or(file, |file| &file.name);
                let problem = format!("tensor {} is in {first} and again in {file}", shorten(&name));
                return Err(FileError::Disagree { problem });
            }
            self.tensors.insert(name, entry);
        }
        self.files.push(File { name: file.to_owned(), data_start });
        Ok(())
    }

    /// The files, in the order in which they were added.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// What the headers say of a tensor.
    pub fn get(&self, tensor: &str) -> Option<&Entry> {
        self.tensors.get(tensor)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Every tensor, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// The name of the file that a tensor lies in.
    pub fn file_of(&self, entry: &Entry) -> &str {
        self.files.get(entry.file).map_or("", |file| &file.name)
    }
}

/// A name for a message: never the whole of a name that fills a header.
pub(crate) fn shorten(name: &str) -> String {
    name.chars().take(120).collect()
}

/// Reads the object of a header, and says whether it read all of it: `false` at the first tensor beyond the limit.
struct HeaderReader<'a> {
    limit: usize,
    tensors: &'a mut Vec<(String, RawEntry)>,
}

impl<'de> DeserializeSeed<'de> for HeaderReader<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderReader<'_> {
    type Value = bool;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut complete = true;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" || !complete {
                map.next_value::<IgnoredAny>()?;
            } else if self.tensors.len() >= self.limit {
                complete = false;
                map.next_value::<IgnoredAny>()?;
            } else {
                let Object(entry) = map
                    .next_value()
                    .map_err(|error| A::Error::custom(format!("tensor {}: {error}", shorten(&name))))?;
                self.tensors.push((name, entry));
            }
        }
        Ok(complete)
    }
}

/// A tensor's entry as it stands there.
#[derive(Deserialize)]
struct RawEntry {
    #[serde(default)]
    dtype: Field,
    #[serde(default)]
    shape: Field,
    #[serde(default)]
    data_offsets: Field,
}

impl RawEntry {
    /// The entry, if its numbers agree with each other and with the `data` bytes of the file.
    fn entry(&self, file: usize, data: u64) -> Result<Entry, String> {
        let dtype = match &self.dtype {
            Field::Text(name) => Dtype::named(name),
            Field::Absent => return Err("its dtype is absent".into()),
            _ => return Err("its dtype is no text".into()),
        };
        let Field::Numbers(shape) = &self.shape else { return Err("its shape is no list of sizes".into()) };
        let Field::Numbers(offsets) = &self.data_offsets else {
            return Err("its data_offsets are no pair of numbers".into());
        };
        let &[begin, end] = &offsets[..] else {
            return Err("its data_offsets are no pair of numbers".into());
        };
        if begin > end || end > data {
            return Err(format!("its bytes {begin}..{end} lie outside the {data} bytes of data"));
        }
        let elements = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
        let bytes = dtype.bytes().map(|width| elements.and_then(|elements| elements.checked_mul(width)));
        if bytes.is_some_and(|bytes| bytes != Some(end - begin)) {
            let bytes = end - begin;
            return Err(format!(
                "shape {shape:?} of {dtype} does not take the {bytes} bytes of {begin}..{end}"
            ));
        }
        Ok(Entry { file, dtype, shape: shape.clone(), begin, end })
    }
}

/// A value of an entry. What is none of these is skipped, not kept.
#[derive(Default)]
enum Field {
    #[default]
    Absent,
    Text(String),
    Number(u64),
    Numbers(Vec<u64>),
    Other,
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldVisitor)
    }
}

struct FieldVisitor;

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = Field;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a text, a number or a list of numbers")
    }

    fn visit_str<E>(self, text: &str) -> Result<Field, E> {
        Ok(Field::Text(text.chars().take(24).collect()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Field, E> {
        Ok(Field::Number(number))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Field, E> {
        Ok(Field::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Field, E> {
        Ok(Field::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Field, E> {
        Ok(Field::Other)
    }

    fn visit_unit<E>(self) -> Result<Field, E> {
        Ok(Field::Absent)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Field, A::Error> {
        let mut numbers = Vec::new();
        while let Some(field) = list.next_element::<Field>()? {
            match field {
                Field::Number(number) if numbers.len() < MAX_DIMENSIONS => numbers.push(number),
                _ => {
                    while list.next_element::<IgnoredAny>()?.is_some() {}
                    return Ok(Field::Other);
                }
            }
        }
        Ok(Field::Numbers(numbers))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Field, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Field::Other)
    }
}

#[cfg(test)]
mod tests;
