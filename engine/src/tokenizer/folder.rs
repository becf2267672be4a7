//! The files of a model folder that the tokenizer is made of. Where the weights are GGUF, those that the folder lacks
//! are made of its metadata; the configuration always is, as for the weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use russet_model::config::CONFIG;
use russet_model::gguf::Gguf;
use russet_model::json;
use russet_model::tokenizer_files::chat_templates::{ADDITIONAL, flat_name};
use russet_model::tokenizer_files::{TEMPLATE, TOKENIZER, TOKENIZER_CONFIG};
use serde_json::Value;

use super::TokenizerError;
use crate::gguf_folder::{GgufFolder, GgufFolderError};

/// A model folder.
pub(super) struct TokenizerFolder {
    dir: PathBuf,
    /// What is made of a GGUF file, by name.
    made: BTreeMap<&'static str, Vec<u8>>,
}

impl TokenizerFolder {
    /// Opens a folder.
    pub fn open(dir: &Path) -> Result<Self, TokenizerError> {
        let mut folder = Self { dir: dir.to_owned(), made: BTreeMap::new() };
        if !dir.is_dir() {
            return Ok(folder);
        }
        let failed = |error| match error {
            GgufFolderError::Io { path, source } => TokenizerError::Read { path, source },
            GgufFolderError::Model(error) => {
                TokenizerError::Broken { path: dir.to_owned(), reason: error.to_string() }
            }
        };
        if let Some(gguf) = GgufFolder::open(dir).map_err(failed)? {
            let model = gguf.model().map_err(failed)?;
            folder.made.insert(CONFIG, gguf.configuration(&model).map_err(failed)?);
            folder.make(&model).map_err(|error| failed(error.into()))?;
        }
        Ok(folder)
    }

    fn make(&mut self, model: &Gguf<'_>) -> Result<(), russet_model::error::Error> {
        let is_there = |name: &str| self.dir.join(name).exists();
        let (tokenizer, config, template) =
            (is_there(TOKENIZER), is_there(TOKENIZER_CONFIG), is_there(TEMPLATE));
        if !tokenizer {
            self.made.insert(TOKENIZER, model.tokenizer()?);
        }
        if !config {
            self.made.insert(TOKENIZER_CONFIG, model.tokenizer_config());
        }
        if let Some(text) = model.chat_template()?.filter(|_| !template) {
            self.made.insert(TEMPLATE, text.as_bytes().to_vec());
        }
        Ok(())
    }

    /// Where a file is, or would be.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A file; `None` when there is none.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, TokenizerError> {
        if let Some(made) = self.made.get(name) {
            return Ok(Some(made.clone()));
        }
        let own = self.path(name);
        let further = name.strip_prefix(ADDITIONAL).and_then(|rest| rest.strip_prefix('.'));
        let path = match further {
            // A folder that nobody fetched, but copied.
            Some(file) if !own.exists() => self.path(ADDITIONAL).join(file),
            _ => own,
        };
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(TokenizerError::Read { path, source }),
        }
    }

    /// Names of the further chat templates, sorted.
    pub fn template_names(&self) -> Result<Vec<String>, TokenizerError> {
        let further = self.names(&self.path(ADDITIONAL))?;
        let further = further.iter().filter_map(|file| flat_name(&format!("{ADDITIONAL}/{file}")));
        let mut names = self.names(&self.dir)?;
        names.retain(|name| name.starts_with(ADDITIONAL));
        names.extend(further);
        names.sort();
        names.dedup();
        Ok(names)
    }

    fn names(&self, path: &Path) -> Result<Vec<String>, TokenizerError> {
        let failed = |source| TokenizerError::Read { path: path.to_owned(), source };
        let entries = match std::fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(failed(source)),
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    /// A JSON file; `None` when there is none.
    pub fn read_json(&self, name: &str) -> Result<Option<Value>, TokenizerError> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        let broken = |error: serde_json::Error| TokenizerError::Broken {
            path: self.path(name),
            reason: error.to_string(),
        };
        serde_json::from_slice(&json::plain(&bytes)).map(Some).map_err(broken)
    }
}
