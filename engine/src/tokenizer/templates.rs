//! The chat templates of a model folder, parsed. Most models have one; some have another for conversations with tools.

use std::borrow::Cow;

use russet_chat::parser::OutputFormat;
use russet_chat::template::{Prompt, SpecialTokens, Template};
use russet_model::error::FileError;
use russet_model::tokenizer_files::chat_templates::{ChatTemplate, DEFAULT, TOOL_USE, chat_templates};

use super::TokenizerError;
use super::folder::TokenizerFolder;

/// The templates of a model.
pub(super) struct ChatTemplates {
    default: (Template, OutputFormat),
    tool_use: Option<(Template, OutputFormat)>,
}

/// Why the templates cannot be read.
enum SourceError {
    Folder(TokenizerError),
    File(FileError),
}

impl From<FileError> for SourceError {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl ChatTemplates {
    /// Reads and parses them; `None` where there is none for a plain conversation.
    pub fn load(folder: &TokenizerFolder, special: &SpecialTokens) -> Result<Option<Self>, TokenizerError> {
        let names = folder.template_names()?;
        let read =
            |name: &str| folder.read(name).map(|bytes| bytes.map(Cow::Owned)).map_err(SourceError::Folder);
        let mut sources = chat_templates(&names, read).map_err(|error| match error {
            SourceError::Folder(error) => error,
            SourceError::File(error) => {
                TokenizerError::Broken { path: folder.path(""), reason: error.to_string() }
            }
        })?;
        let parse = |ChatTemplate { file, source }| -> Result<_, TokenizerError> {
            let template = Template::new(&source, special.clone());
            let broken = |reason: String| TokenizerError::Broken { path: folder.path(&file), reason };
            let template = template.map_err(|error| broken(error.to_string()))?;
            Ok((template, OutputFormat::of_template(&source)))
        };
        let Some(default) = sources.remove(DEFAULT) else { return Ok(None) };
        let tool_use = sources.remove(TOOL_USE).map(parse).transpose()?;
        Ok(Some(Self { default: parse(default)?, tool_use }))
    }

    /// The template of a prompt, and how its answer is written.
    pub fn of(&self, prompt: &Prompt<'_>) -> (&Template, &OutputFormat) {
        let (template, format) =
            self.tool_use.as_ref().filter(|_| !prompt.tools.is_empty()).unwrap_or(&self.default);
        (template, format)
    }
}
