//! Makes the headers of a model's converted tensors, and their layout, one tensor after the other.

use super::{
    cast::Cast,
    layout::{ConvertedTensor, Layout, Part},
    matrix::StoredMatrix,
};
use crate::{
    error::FileError,
    safetensors::{Dtype, Entry, Headers, shorten},
    value_type::ValueType,
};

/// A conversion under way.
pub(super) struct Conversion<'a> {
    /// What the files have.
    pub source: &'a Headers,
    converted: Headers,
    layout: Layout,
    /// Where in each file the next converted tensor lies: behind its end.
    ends: Vec<u64>,
}

impl<'a> Conversion<'a> {
    pub fn new(source: &'a Headers) -> Self {
        let mut ends: Vec<u64> = source.files().iter().map(|file| file.data_start).collect();
        for (_, entry) in source.iter() {
            if let (Some(end), Some(file)) = (ends.get_mut(entry.file), source.files().get(entry.file)) {
                *end = (*end).max(file.data_start.saturating_add(entry.end));
            }
        }
        let layout = Layout { files: vec![Vec::new(); ends.len()] };
        Self { source, converted: source.without_tensors(), layout, ends }
    }

    /// A stored tensor that belongs to another one.
    pub fn find(&self, tensor: &str) -> Result<&'a Entry, FileError> {
        let missing = || FileError::Disagree { problem: format!("tensor {} is missing", shorten(tensor)) };
        self.source.get(tensor).ok_or_else(missing)
    }

    /// That a stored tensor is not what its packing has.
    pub fn wrong(&self, tensor: &str, entry: &Entry, expected: &str) -> FileError {
        let problem = format!("it is {} {:?}, not {expected}", entry.dtype, entry.shape);
        FileError::BadTensor { file: self.source.file_of(entry).to_owned(), tensor: shorten(tensor), problem }
    }

    /// The type of a tensor of numbers in this shape.
    pub fn value(&self, tensor: &str, entry: &Entry, shape: &[u64]) -> Result<ValueType, FileError> {
        let value = ValueType::of(&entry.dtype).filter(|_| entry.shape == shape);
        value.ok_or_else(|| self.wrong(tensor, entry, &format!("F16, BF16 or F32 {shape:?}")))
    }

    /// That a tensor is of packed integers in this shape.
    pub fn check_words(&self, tensor: &str, entry: &Entry, shape: &[u64]) -> Result<(), FileError> {
        match is_words(entry) && entry.shape == shape {
            true => Ok(()),
            false => Err(self.wrong(tensor, entry, &format!("I32 {shape:?}"))),
        }
    }

    /// Rows and columns of a matrix of packed integers.
    pub fn words(&self, tensor: &str, entry: &Entry) -> Result<(u64, u64), FileError> {
        match entry.shape[..] {
            [rows, columns] if is_words(entry) && rows > 0 && columns > 0 => Ok((rows, columns)),
            _ => Err(self.wrong(tensor, entry, "a matrix of I32")),
        }
    }

    /// Where a stored tensor lies; its last dimension is the row.
    pub fn matrix(&self, entry: &Entry) -> StoredMatrix {
        let rows = entry.elements() / entry.shape.last().copied().unwrap_or(1).max(1);
        let data_start = self.source.files().get(entry.file).map_or(0, |file| file.data_start);
        let begin = data_start.saturating_add(entry.begin);
        StoredMatrix { file: entry.file, begin, row_bytes: entry.bytes() / rows.max(1) }
    }

    /// A tensor as it is stored, as another one.
    pub fn keep_as(&mut self, name: String, dtype: Dtype, entry: &Entry) -> Result<(), FileError> {
        let begin = self.matrix(entry).begin;
        let end = begin.saturating_add(entry.bytes());
        let shape = entry.shape.clone();
        self.converted.insert(name, Entry { dtype, shape, begin, end, file: entry.file })
    }

    /// A tensor as it is stored.
    pub fn keep(&mut self, name: &str, entry: &Entry) -> Result<(), FileError> {
        self.keep_as(name.to_owned(), entry.dtype.clone(), entry)
    }

    /// A tensor of plain numbers in this type; any other as it is stored.
    pub fn keep_in(&mut self, value: ValueType, name: &str, entry: &Entry) -> Result<(), FileError> {
        match ValueType::of(&entry.dtype).filter(|stored| *stored != value) {
            None => self.keep(name, entry),
            Some(stored) => {
                let part = Part::Cast(Cast { from: self.matrix(entry), stored, value });
                self.add(name.to_owned(), value.dtype(), entry.shape.clone(), (entry.file, part))
            }
        }
    }

    /// A tensor that is made of others, the first of them in this file.
    pub fn add(
        &mut self,
        name: String,
        dtype: Dtype,
        shape: Vec<u64>,
        (file, part): (usize, Part),
    ) -> Result<(), FileError> {
        let element_bytes = dtype.bytes().unwrap_or(1);
        let columns = shape.last().copied().unwrap_or(1);
        let bytes = shape.iter().fold(element_bytes, |bytes, &size| bytes.saturating_mul(size));
        let mut begin = 0;
        if let (Some(end), Some(tensors)) = (self.ends.get_mut(file), self.layout.files.get_mut(file)) {
            begin = std::mem::replace(end, end.saturating_add(bytes));
            let own = name.as_str().into();
            tensors.push(ConvertedTensor { name: own, begin, end: *end, columns, element_bytes, part });
        }
        self.converted.insert(name, Entry { file, dtype, shape, begin, end: begin.saturating_add(bytes) })
    }

    pub fn finish(self) -> (Headers, Layout) {
        (self.converted, self.layout)
    }
}

/// Whether a tensor is of numbers of 32 bits that integers are packed in.
fn is_words(entry: &Entry) -> bool {
    matches!(entry.dtype, Dtype::U32 | Dtype::Other("I32", _))
}
