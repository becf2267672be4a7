//! Why the files of a model are invalid, and why a valid model is not supported. Every text names the
//! object, the numbers and the remedy.

use std::fmt;

use thiserror::Error;

use crate::config::CONFIG;

/// Why files are invalid: a header, a configuration or an index that no exporter writes.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FileError {
    /// A file the model needs is not there.
    #[error("{file} is missing; the source must hold {CONFIG} and the safetensors files it belongs to")]
    Missing {
        /// The file.
        file: String,
    },
    /// The header reaches beyond the file.
    #[error(
        "{file} says its header has {length} bytes, but the file has only {size}; it is cut or no safetensors file, fetch or export it again"
    )]
    BeyondFile {
        /// The file.
        file: String,
        /// Length the file claims.
        length: u64,
        /// Size of the file.
        size: u64,
    },
    /// The file, or its header, is longer than any real one.
    #[error(
        "{file} says its header has {length} bytes, more than the limit of {limit}; it is no safetensors file, export it again"
    )]
    TooLong {
        /// The file.
        file: String,
        /// Length the file claims.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// The headers of all files together are longer than those of any real model.
    #[error(
        "{file} brings the headers of the model to {total} bytes, more than the limit of {limit}; export the model again"
    )]
    HeadersTooLong {
        /// The file with the first byte too many.
        file: String,
        /// Bytes with it.
        total: u64,
        /// The limit.
        limit: u64,
    },
    /// More weight files than any real model has.
    #[error("the model has {files} weight files, more than the limit of {limit}; export it again in fewer")]
    TooManyFiles {
        /// How many.
        files: usize,
        /// The limit.
        limit: usize,
    },
    /// A text that is not UTF-8.
    #[error("{file} is no text: {reason}; fetch or export it again")]
    NotText {
        /// The file.
        file: String,
        /// Where.
        reason: String,
    },
    /// A pointer of git-lfs stands in place of the file.
    #[error(
        "{file} is a pointer of git-lfs ({size} bytes), not the file itself; run `git lfs pull` where it was cloned, or fetch the model from its hub"
    )]
    LfsPointer {
        /// The file.
        file: String,
        /// Bytes of the pointer.
        size: u64,
    },
    /// A JSON file that is longer than any real one.
    #[error("{file} has {size} bytes, more than the limit of {limit}; fetch or export it again")]
    TooLarge {
        /// The file.
        file: String,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// More tensors than any real model has.
    #[error("{file} brings the model to more than {limit} tensors, the limit; export the model again")]
    TooMany {
        /// The file with the first tensor too many.
        file: String,
        /// The limit.
        limit: usize,
    },
    /// A file is not the JSON it should be.
    #[error("{file} is not valid JSON ({problem}); fetch or export it again")]
    BadJson {
        /// The file.
        file: String,
        /// What the parser says.
        problem: String,
    },
    /// A tensor's entry is impossible.
    #[error("{file} describes tensor {tensor} wrongly: {problem}; export the model again")]
    BadTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// The tensors do not fill the file.
    #[error(
        "{file} has {size} bytes, but its header accounts for {described}; it is cut or damaged, fetch or export it again"
    )]
    WrongSize {
        /// The file.
        file: String,
        /// Size of the file.
        size: u64,
        /// Size the header describes.
        described: u64,
    },
    /// A GGUF file is damaged, or says what no exporter writes.
    #[error("{file} is no usable GGUF file: {problem}; fetch or export it again")]
    BadGguf {
        /// The file.
        file: String,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// More than one model in GGUF.
    #[error(
        "the source holds {count} models in GGUF, such as {examples}; name one of them in source.uri, as in file:///folder/{first} or hf://owner/name/{first}"
    )]
    SeveralGguf {
        /// How many.
        count: usize,
        /// Some of them.
        examples: String,
        /// One of them.
        first: String,
    },
    /// The configuration lacks a field or has an invalid one.
    #[error(
        "{CONFIG} has no usable `{field}` ({found}); the model cannot be planned without it, take the {CONFIG} that belongs to the weights"
    )]
    Field {
        /// The field.
        field: &'static str,
        /// What is there.
        found: String,
    },
    /// An adapter's tensors do not belong together, or not to its configuration.
    #[error("the adapter is not usable: {problem}; take its configuration and weights from one training run")]
    BadAdapter {
        /// What is wrong, with numbers.
        problem: String,
    },
    /// Configuration and weights disagree.
    #[error("{CONFIG} and the weights disagree: {problem}; take both from one export")]
    Disagree {
        /// How, with numbers.
        problem: String,
    },
}

/// Longest text of a JSON parser in a message: it may quote the whole of a string, and messages go into conditions.
const MAX_PROBLEM_CHARS: usize = 200;

impl FileError {
    /// A file is not the JSON it should be, by what its parser says.
    pub fn bad_json(file: &str, problem: &str) -> Self {
        let problem = problem.chars().take(MAX_PROBLEM_CHARS).collect();
        Self::BadJson { file: file.to_owned(), problem }
    }
}

/// Something a model needs and the engine lacks.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub struct Unsupported {
    /// The file and the field, or the tensor.
    pub place: String,
    /// What is not supported, with its value.
    pub reason: String,
    /// What to do instead.
    pub remedy: String,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, reason, remedy } = self;
        write!(out, "{place}: {reason}; {remedy}")
    }
}

impl Unsupported {
    /// Of a field of config.json.
    pub fn field(field: &str, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { place: format!("{CONFIG} {field}"), reason: reason.into(), remedy: remedy.into() }
    }

    /// Of a tensor.
    pub fn tensor(name: &str, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { place: format!("tensor {name}"), reason: reason.into(), remedy: remedy.into() }
    }
}

/// Why there is no description of a model.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// The files are damaged or do not belong together.
    #[error(transparent)]
    File(#[from] FileError),
    /// The files are sound, and the engine cannot run the model.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
}
