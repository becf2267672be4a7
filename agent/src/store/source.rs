//! Listing of a source: its files, the location of each, and their headers.

use std::path::{Path, PathBuf};

use russet_model::config::{CONFIG, MAX_CONFIG_BYTES};
use russet_model::error::FileError;
use russet_model::index::{INDEX, MAX_INDEX_BYTES, weight_files};
use russet_model::safetensors::{Headers, header_length};
use russet_model::shape::ModelShape;

use super::object::RemoteObject;
use super::verify::Digest;
use super::web::WebClient;
use super::{Manifest, StoreError, builtin, file};

/// A model's files as its source lists them.
pub struct SourceListing {
    /// Commit the listing belongs to.
    pub commit: Option<String>,
    /// The allowed files, sorted by name.
    pub files: Vec<SourceFile>,
    pub(super) web: Option<WebClient>,
}

/// One file of a source.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Its name; never a path.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Expected digest.
    pub digest: Option<Digest>,
    pub(super) location: FileLocation,
}

/// Location of a file.
#[derive(Clone, Debug)]
pub(super) enum FileLocation {
    Disk(PathBuf),
    BuiltIn(&'static [u8]),
    Web(reqwest::Url),
    Object(RemoteObject),
}

/// Reads configuration, index and the headers of the weight files, and drops weight files that the
/// model does not use.
pub(super) async fn read_headers(
    mut source: SourceListing,
) -> Result<(SourceListing, ModelShape), StoreError> {
    let config = source.read_small(CONFIG, MAX_CONFIG_BYTES).await?;
    let index = match source.files.iter().any(|file| file.name == INDEX) {
        true => Some(source.read_small(INDEX, MAX_INDEX_BYTES).await?),
        false => None,
    };
    let names: Vec<&str> = source.files.iter().map(|file| file.name.as_str()).collect();
    let weights = weight_files(index.as_deref(), &names)?;
    source.files.retain(|file| !file.name.ends_with(".safetensors") || weights.contains(&file.name));

    let mut headers = Headers::default();
    for name in &weights {
        let file = source.file(name)?;
        let start = source.read(file, 0, 8.min(file.size)).await?;
        let length = header_length(name, &start, file.size)?;
        let json = source.read(file, 8, length).await?;
        headers.add(name, &json, file.size)?;
    }
    let shape = ModelShape::read(&config, &headers)?;
    Ok((source, shape))
}

impl SourceListing {
    /// A listing of files that are in a folder of this machine: received or published.
    pub(super) fn from_folder(folder: &Path, manifest: &Manifest) -> Self {
        let files = manifest.files.iter().map(|file| SourceFile {
            name: file.name.clone(),
            size: file.size,
            digest: None,
            location: FileLocation::Disk(folder.join(&file.name)),
        });
        Self { commit: None, files: files.collect(), web: None }
    }

    /// Bytes of all files, saturating: a source may announce any sizes.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.size))
    }

    fn file(&self, name: &str) -> Result<&SourceFile, StoreError> {
        self.files
            .iter()
            .find(|file| file.name == name)
            .ok_or_else(|| FileError::Missing { file: name.to_owned() }.into())
    }

    /// Reads a small file, such as the configuration.
    async fn read_small(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        let file = self.file(name)?;
        if file.size > limit {
            return Err(FileError::TooLarge { file: name.to_owned(), size: file.size, limit }.into());
        }
        self.read(file, 0, file.size).await
    }

    /// `length` bytes of a file from `offset` on.
    pub(super) async fn read(
        &self,
        file: &SourceFile,
        offset: u64,
        length: u64,
    ) -> Result<Vec<u8>, StoreError> {
        if length == 0 {
            return Ok(Vec::new());
        }
        match (&file.location, &self.web) {
            (FileLocation::Disk(path), _) => file::read(path, offset, length).await,
            (FileLocation::BuiltIn(bytes), _) => builtin::read(bytes, offset, length),
            (FileLocation::Web(url), Some(web)) => web.read(url, offset, length, file.size).await,
            (FileLocation::Object(object), _) => object.read(offset, length).await,
            (FileLocation::Web(url), None) => Err(StoreError::Unreachable {
                what: url.to_string(),
                detail: "the listing carries no web client; report this as a bug".into(),
            }),
        }
    }
}
