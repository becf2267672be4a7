//! Headers of a model in GGUF: its metadata takes the place of the small files of other models, and a vocabulary is part
//! of it, so a header is read in a few parts, each as long as all before.

use std::ops::Range;

use russet_model::error::{Error, FileError};
use russet_model::gguf::files::SUFFIX;
use russet_model::gguf::header::{GgufHeader, HeaderRead};
use russet_model::gguf::{FIRST_READ_BYTES, Gguf};
use russet_model::safetensors::MAX_MODEL_HEADER_BYTES;
use russet_model::shape::ModelShape;
use russet_model::tokenizer_files::TokenizerFiles;

use super::StoreError;
use super::source::{SourceListing, blocking, describe_chat};

/// A file and its first bytes, with the whole header.
struct GgufStart {
    name: String,
    size: u64,
    bytes: Vec<u8>,
}

/// Reads the headers of `names`, the files of one model, and drops other weights.
pub(super) async fn read_headers(
    mut source: SourceListing,
    names: Vec<String>,
) -> Result<(SourceListing, ModelShape), StoreError> {
    source.files.retain(|file| !file.name.ends_with(SUFFIX) || names.contains(&file.name));
    let (mut starts, mut total) = (Vec::new(), 0);
    for name in names {
        let start = read_start(&source, name).await?;
        total += start.bytes.len() as u64;
        // The first bytes of each are read whatever its header takes.
        if total > MAX_MODEL_HEADER_BYTES + FIRST_READ_BYTES * (starts.len() as u64 + 1) {
            let (file, limit) = (start.name, MAX_MODEL_HEADER_BYTES);
            return Err(FileError::HeadersTooLong { file, total, limit }.into());
        }
        starts.push(start);
    }
    let (starts, factors) = blocking(move || {
        let range = rope_factors(&starts)?;
        Ok((starts, range))
    })
    .await?;
    let factors = match factors {
        Some((name, range)) => {
            Some(source.read(source.file(&name)?, range.start, range.end - range.start).await?)
        }
        None => None,
    };
    let tokenizer = source.tokenizer_files(&[]).await?;
    let shape = blocking(move || shape(&starts, factors.as_deref(), tokenizer)).await?;
    Ok((source, shape))
}

async fn read_start(source: &SourceListing, name: String) -> Result<GgufStart, StoreError> {
    let file = source.file(&name)?;
    let mut start = GgufStart { name, size: file.size, bytes: Vec::new() };
    let mut needs = FIRST_READ_BYTES.min(file.size);
    loop {
        let read = start.bytes.len() as u64;
        start.bytes.extend(source.read(file, read, needs - read).await?);
        let parsed = blocking(move || {
            let needs = match HeaderRead::new(&start.name, &start.bytes, start.size)? {
                HeaderRead::Whole(_) => None,
                HeaderRead::Needs(more) => Some(more),
            };
            Ok((start, needs))
        });
        match parsed.await? {
            (start, None) => return Ok(start),
            (own, Some(more)) => (start, needs) = (own, more),
        }
    }
}

fn headers(starts: &[GgufStart]) -> Result<Vec<(String, GgufHeader<'_>)>, FileError> {
    let mut files = Vec::new();
    for start in starts {
        if let HeaderRead::Whole(header) = HeaderRead::new(&start.name, &start.bytes, start.size)? {
            files.push((start.name.clone(), header));
        }
    }
    Ok(files)
}

/// The file and the bytes of it that the configuration needs beside the metadata.
fn rope_factors(starts: &[GgufStart]) -> Result<Option<(String, Range<u64>)>, FileError> {
    let files = headers(starts)?;
    let names: Vec<String> = files.iter().map(|(name, _)| name.clone()).collect();
    let found = match Gguf::new(files) {
        Ok(gguf) => gguf.rope_factors(),
        Err(Error::File(error)) => return Err(error),
        // Why it is not supported, the shape says.
        Err(Error::Unsupported(_)) => None,
    };
    Ok(found.and_then(|(at, range)| Some((names.get(at)?.clone(), range))))
}

fn shape(
    starts: &[GgufStart],
    factors: Option<&[u8]>,
    mut tokenizer: TokenizerFiles,
) -> Result<ModelShape, FileError> {
    let files = headers(starts)?;
    let names = Gguf::shape_by_names(&files);
    let unsupported = |why: Error| match why {
        Error::File(error) => Err(error),
        Error::Unsupported(why) => Ok(ModelShape { unsupported: Some(why.to_string()), ..names.clone() }),
    };
    let gguf = match Gguf::new(files) {
        Ok(gguf) => gguf,
        Err(why) => return unsupported(why),
    };
    let weights =
        gguf.configuration(factors).and_then(|config| Ok((config, gguf.weights(gguf.value_type(), None)?)));
    let (config, weights) = match weights {
        Ok(weights) => weights,
        Err(why) => return unsupported(why),
    };
    let mut shape = ModelShape::read_with(&config, &weights.headers, |quantization| {
        let weights = gguf.weights(gguf.value_type(), quantization)?;
        russet_model::read_as(&config, &weights.headers, quantization)
    })?;
    shape.notes.push(gguf.note());
    tokenizer.config = config;
    if let Err(why) = gguf.complete(&mut tokenizer).and_then(|()| tokenizer.check_tokenizer()) {
        shape.unsupported = shape.unsupported.or(Some(why.to_string()));
    }
    describe_chat(&tokenizer, &mut shape)?;
    Ok(shape)
}

#[cfg(test)]
mod tests;
