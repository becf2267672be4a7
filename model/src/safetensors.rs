//! The header of a safetensors file, checked to the last number: 8 bytes of length, a JSON object of tensors, then the
//! data that the offsets point into. It takes bytes; the caller does the reading. Every number is doubted.

use std::{
    collections::{BTreeMap, btree_map},
    fmt,
};

use serde::{
    Deserialize,
    de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use crate::{error::FileError, lfs, object::Object};

/// Longest header read of one file. The format itself allows 100,000,000 bytes; the largest published models have 20 MB
/// of tensor names in all their files together.
pub const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Longest headers read of all files of a model together.
pub const MAX_MODEL_HEADER_BYTES: u64 = 64 << 20;
/// Most tensors of a model, those without bytes counted as well: 61 layers of 384 experts that were quantised one by one
/// have 210,000.
pub const MAX_TENSORS: usize = 300_000;
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
    /// Bytes of the headers so far.
    bytes: u64,
    /// Whether they stand for files of another format, whose packed numbers are converted.
    is_converted: bool,
}

impl Headers {
    /// The length of the header of one more file, of `size` bytes, from its first eight; an error before anything long
    /// is read.
    pub fn next_length(&self, file: &str, start: &[u8], size: u64) -> Result<u64, FileError> {
        let name = file.to_owned();
        if lfs::is_pointer(start) {
            return Err(FileError::LfsPointer { file: name, size });
        }
        let Ok(length) = <[u8; 8]>::try_from(start).map(u64::from_le_bytes) else {
            return Err(FileError::BeyondFile { file: name, length: PREFIX_BYTES, size });
        };
        if length > MAX_HEADER_BYTES {
            return Err(FileError::TooLong { file: name, length, limit: MAX_HEADER_BYTES });
        }
        let total = self.bytes.saturating_add(length);
        if total > MAX_MODEL_HEADER_BYTES {
            return Err(FileError::HeadersTooLong { file: name, total, limit: MAX_MODEL_HEADER_BYTES });
        }
        if length + PREFIX_BYTES > size {
            return Err(FileError::BeyondFile { file: name, length, size });
        }
        Ok(length)
    }

    /// Adds the tensors of a file of `size` bytes. They must end where it ends and not overlap, and no other file may
    /// have a tensor of the same name. Bytes between two tensors are passed over, as MLX does. After an error the headers
    /// are of no use.
    pub fn add(&mut self, file: &str, header: &[u8], size: u64) -> Result<(), FileError> {
        let data_start = PREFIX_BYTES.saturating_add(header.len() as u64);
        let data = size.saturating_sub(data_start);
        let mut spans = Vec::new();
        let mut failure = None;
        let reader = HeaderReader {
            file,
            files: &self.files,
            data,
            limit: MAX_TENSORS,
            tensors: &mut self.tensors,
            spans: &mut spans,
            failure: &mut failure,
        };
        let mut json = serde_json::Deserializer::from_slice(header);
        let read = reader.deserialize(&mut json).and_then(|()| json.end());
        if let Some(failure) = failure {
            return Err(failure);
        }
        read.map_err(|error| FileError::bad_json(file, &error.to_string()))?;
        spans.sort_unstable();
        let mut filled = 0;
        for (begin, end) in spans {
            if begin < filled {
                let own = |entry: &Entry| entry.file == self.files.len() && entry.begin == begin;
                let tensor = self.tensors.iter().find(|(_, entry)| own(entry));
                let tensor = tensor.map(|(name, _)| shorten(name)).unwrap_or_default();
                let problem = format!("its bytes {begin}..{end} overlap those before, which end at {filled}");
                return Err(FileError::BadTensor { file: file.to_owned(), tensor, problem });
            }
            filled = end;
        }
        if filled != data {
            let described = size - data + filled;
            return Err(FileError::WrongSize { file: file.to_owned(), size, described });
        }
        self.files.push(File { name: file.to_owned(), data_start });
        self.bytes = self.bytes.saturating_add(header.len() as u64);
        Ok(())
    }

    /// Adds a file of another format, of which these are the tensors as the engine has them in memory.
    pub(crate) fn add_converted(
        &mut self,
        file: &str,
        entries: impl IntoIterator<Item = (String, Entry)>,
    ) -> Result<(), FileError> {
        self.files.push(File { name: file.to_owned(), data_start: 0 });
        self.is_converted = true;
        for (tensor, entry) in entries {
            let limit = MAX_TENSORS;
            if self.tensors.len() >= limit {
                return Err(FileError::TooMany { file: file.to_owned(), limit });
            }
            self.insert(tensor, Entry { file: self.files.len() - 1, ..entry })?;
        }
        Ok(())
    }

    /// The same files without tensors. Offsets of those that are added count from the start of a file.
    pub(crate) fn without_tensors(&self) -> Self {
        let files = self.files.iter().map(|file| File { data_start: 0, ..file.clone() }).collect();
        Self { files, bytes: self.bytes, ..Self::default() }
    }

    /// Adds a tensor of one of the files.
    pub(crate) fn insert(&mut self, tensor: String, entry: Entry) -> Result<(), FileError> {
        if self.tensors.contains_key(&tensor) {
            let (tensor, file) = (shorten(&tensor), self.file_of(&entry));
            let problem = format!("tensor {tensor} is there twice, the second time in {file}");
            return Err(FileError::Disagree { problem });
        }
        self.tensors.insert(tensor, entry);
        Ok(())
    }

    /// Whether they stand for files of another format, whose packed numbers are converted.
    pub(crate) fn is_converted(&self) -> bool {
        self.is_converted
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

/// Reads the object of a header, one tensor after the other, into the tensors of the model.
struct HeaderReader<'a> {
    file: &'a str,
    /// The files before it.
    files: &'a [File],
    /// Bytes of data in the file.
    data: u64,
    limit: usize,
    tensors: &'a mut BTreeMap<String, Entry>,
    /// Where the tensors with bytes lie.
    spans: &'a mut Vec<(u64, u64)>,
    /// Why it stopped, where it is not the JSON's fault.
    failure: &'a mut Option<FileError>,
}

impl<'de> DeserializeSeed<'de> for HeaderReader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderReader<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { file, files, data, limit, tensors, spans, failure } = self;
        let mut fail = |why: FileError| {
            *failure = Some(why);
            A::Error::custom("")
        };
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if tensors.len() >= limit {
                return Err(fail(FileError::TooMany { file: file.to_owned(), limit }));
            }
            let Object(raw) = map
                .next_value::<Object<RawEntry>>()
                .map_err(|error| A::Error::custom(format!("tensor {}: {error}", shorten(&name))))?;
            let entry = raw.entry(files.len(), data).map_err(|problem| {
                fail(FileError::BadTensor { file: file.to_owned(), tensor: shorten(&name), problem })
            })?;
            let span = (entry.begin, entry.end);
            match tensors.entry(name) {
                btree_map::Entry::Vacant(place) => place.insert(entry),
                btree_map::Entry::Occupied(known) => {
                    let first = files.get(known.get().file).map_or(file, |file| &file.name);
                    let tensor = shorten(known.key());
                    let problem = format!("tensor {tensor} is in {first} and again in {file}");
                    return Err(fail(FileError::Disagree { problem }));
                }
            };
            if span.1 > span.0 {
                spans.push(span);
            }
        }
        Ok(())
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
    fn entry(self, file: usize, data: u64) -> Result<Entry, String> {
        let dtype = match &self.dtype {
            Field::Text(name) => Dtype::named(name),
            Field::Absent => return Err("its dtype is absent".into()),
            _ => return Err("its dtype is no text".into()),
        };
        let Field::Numbers(shape) = self.shape else { return Err("its shape is no list of sizes".into()) };
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
        Ok(Entry { file, dtype, shape, begin, end })
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
        // As many as a matrix has: exact for nearly all, and a vector of its own size each.
        let mut numbers = Vec::with_capacity(2);
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
