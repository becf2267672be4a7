//! A model folder whose weights are GGUF: the headers of its files, and what is made of them in place of the files of a
//! Hugging Face folder. Not here: the weights.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use russet_model::{
    error::Error,
    gguf::{FIRST_READ_BYTES, Gguf, files::gguf_files, header::HeaderRead},
};
use thiserror::Error;

/// Why such a folder cannot be read.
#[derive(Debug, Error)]
pub enum GgufFolderError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The files are damaged, or the engine does not run the model.
    #[error(transparent)]
    Model(#[from] Error),
}

/// The files of a model in GGUF.
#[derive(Debug)]
pub struct GgufFolder {
    parts: Vec<GgufPart>,
}

#[derive(Debug)]
struct GgufPart {
    name: String,
    path: PathBuf,
    file: File,
    size: u64,
    /// Its first bytes, with the whole header.
    start: Vec<u8>,
}

impl GgufFolder {
    /// Opens the model in GGUF of a folder; `None` where there is none, or where there are safetensors files.
    pub fn open(dir: &Path) -> Result<Option<Self>, GgufFolderError> {
        let io = |source| GgufFolderError::Io { path: dir.to_owned(), source };
        let entries = std::fs::read_dir(dir).map_err(io)?;
        let names =
            entries.map(|entry| entry.map(|entry| entry.file_name().into_string().unwrap_or_default()));
        let names: Vec<String> = names.collect::<Result<_, _>>().map_err(io)?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let Some(names) = gguf_files(&names).map_err(Error::from)? else { return Ok(None) };
        let parts = names.into_iter().map(|name| GgufPart::open(dir, name)).collect::<Result<_, _>>()?;
        Ok(Some(Self { parts }))
    }

    /// The model.
    pub fn model(&self) -> Result<Gguf<'_>, GgufFolderError> {
        let mut files = Vec::new();
        for part in &self.parts {
            if let HeaderRead::Whole(header) =
                HeaderRead::new(&part.name, &part.start, part.size).map_err(Error::from)?
            {
                files.push((part.name.clone(), header));
            }
        }
        Ok(Gguf::new(files)?)
    }

    /// `config.json` of the model.
    pub fn configuration(&self, model: &Gguf<'_>) -> Result<Vec<u8>, GgufFolderError> {
        let factors = model.rope_factors().and_then(|(at, range)| Some((self.parts.get(at)?, range)));
        let factors =
            factors.map(|(part, range)| part.read(range.start, range.end - range.start)).transpose()?;
        Ok(model.configuration(factors.as_deref())?)
    }

    /// The open files, in order.
    pub fn into_files(self) -> impl Iterator<Item = (PathBuf, File)> {
        self.parts.into_iter().map(|part| (part.path, part.file))
    }
}

impl GgufPart {
    fn open(dir: &Path, name: String) -> Result<Self, GgufFolderError> {
        let path = dir.join(&name);
        let io = |source| GgufFolderError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut part = Self { name, path: path.clone(), file, size, start: Vec::new() };
        let mut needs = FIRST_READ_BYTES.min(size);
        loop {
            let read = part.start.len() as u64;
            part.start.extend(part.read(read, needs - read)?);
            match HeaderRead::new(&part.name, &part.start, size).map_err(Error::from)? {
                HeaderRead::Whole(_) => return Ok(part),
                HeaderRead::Needs(more) => needs = more,
            }
        }
    }

    fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, GgufFolderError> {
        let mut bytes = vec![0; length as usize];
        let read = self.file.read_exact_at(&mut bytes, offset);
        read.map_err(|source| GgufFolderError::Io { path: self.path.clone(), source })?;
        Ok(bytes)
    }
}
