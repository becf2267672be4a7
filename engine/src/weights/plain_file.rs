//! A safetensors file of plain numbers, each tensor of which is read whole: of an adapter, or of a module behind a model.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use mlx_rs::{Array, Dtype};
use russet_mlx::filled::{FillError, filled};
use russet_model::{
    error::FileError,
    safetensors::{self, Headers},
};

use super::WeightsError;

/// Such a file.
#[derive(Debug)]
pub struct PlainFile {
    path: PathBuf,
    file: File,
    headers: Headers,
}

impl PlainFile {
    /// Opens the file at `path`, which errors call `name`; `wrong` says whose file it is.
    pub fn open(
        path: PathBuf,
        name: &str,
        wrong: impl Fn(FileError) -> WeightsError,
    ) -> Result<Self, WeightsError> {
        let mut headers = Headers::default();
        let file = open_with_header(&path, name, &mut headers, wrong)?;
        Ok(Self { path, file, headers })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What its header says.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// A whole tensor, of the type and shape that the header says.
    pub fn tensor(&self, name: &str) -> Result<Array, WeightsError> {
        let failed = |reason: String| WeightsError::Mlx { tensor: name.to_owned(), reason };
        let entry = self.headers.get(name).ok_or_else(|| WeightsError::NoTensor(name.to_owned()))?;
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::Float32,
            safetensors::Dtype::F16 => Dtype::Float16,
            safetensors::Dtype::BF16 => Dtype::Bfloat16,
            ref other => return Err(failed(format!("its element type {other} is not supported"))),
        };
        let dims = entry.shape.iter().map(|&dim| i32::try_from(dim)).collect::<Result<Vec<i32>, _>>();
        let dims = dims.map_err(|_| failed(format!("shape {:?} is beyond 32 bits", entry.shape)))?;
        let start = self.headers.files().get(entry.file).map_or(0, |file| file.data_start) + entry.begin;
        let array = filled(&dims, dtype, |memory| self.file.read_exact_at(memory, start));
        array.map_err(|error| match error {
            FillError::Mlx(error) => failed(error.to_string()),
            FillError::Fill(source) => WeightsError::Io { path: self.path.clone(), source },
        })
    }
}

/// Opens a safetensors file and adds its header to those of others.
pub(super) fn open_with_header(
    path: &Path,
    name: &str,
    headers: &mut Headers,
    wrong: impl Fn(FileError) -> WeightsError,
) -> Result<File, WeightsError> {
    let io = |source| WeightsError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    let mut start = vec![0; size.min(8) as usize];
    file.read_exact_at(&mut start, 0).map_err(io)?;
    let mut header = vec![0; headers.next_length(name, &start, size).map_err(&wrong)? as usize];
    file.read_exact_at(&mut header, 8).map_err(io)?;
    headers.add(name, &header, size).map_err(&wrong)?;
    Ok(file)
}
