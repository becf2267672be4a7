//! The chat templates of a model folder, from every place in which Transformers looks. Most models have one; some have
//! another for conversations with tools.

use std::collections::BTreeMap;
use std::path::PathBuf;

use russet_chat::parser::OutputFormat;
use russet_chat::template::{Prompt, SpecialTokens, Template};
use serde_json::Value;

use super::TokenizerError;
use super::folder::TokenizerFolder;

/// The template of a conversation that asks for no other.
const DEFAULT: &str = "default";
/// The template of a conversation with tools.
const TOOL_USE: &str = "tool_use";
/// The folder with a file for each further template.
const MORE: &str = "additional_chat_templates";

/// The templates of a model.
pub(super) struct ChatTemplates {
    default: (Template, OutputFormat),
    tool_use: Option<(Template, OutputFormat)>,
}

/// Where a template is from, and its text.
type TemplateSource = (PathBuf, String);

impl ChatTemplates {
    /// Reads and parses them.
    pub fn load(
        folder: &TokenizerFolder,
        tokenizer_config: &Value,
        special: &SpecialTokens,
    ) -> Result<Self, TokenizerError> {
        let mut sources = sources(folder, tokenizer_config)?;
        let parse = |(path, source): TemplateSource| -> Result<_, TokenizerError> {
            let template = Template::new(&source, special.clone());
            let template =
                template.map_err(|error| TokenizerError::Broken { path, reason: error.to_string() })?;
            Ok((template, OutputFormat::of_template(&source)))
        };
        let default = sources.remove(DEFAULT).ok_or_else(|| TokenizerError::NoTemplate(folder.path("")))?;
        Ok(Self { default: parse(default)?, tool_use: sources.remove(TOOL_USE).map(parse).transpose()? })
    }

    /// The template of a prompt, and how its answer is written.
    pub fn of(&self, prompt: &Prompt<'_>) -> (&Template, &OutputFormat) {
        let (template, format) =
            self.tool_use.as_ref().filter(|_| !prompt.tools.is_empty()).unwrap_or(&self.default);
        (template, format)
    }
}

/// The templates by name. Of a name that is in several places the first place counts; an empty template is none.
fn sources(
    folder: &TokenizerFolder,
    tokenizer_config: &Value,
) -> Result<BTreeMap<String, TemplateSource>, TokenizerError> {
    let mut sources = BTreeMap::new();
    let mut add = |name: String, path: PathBuf, text: String| {
        if !text.trim().is_empty() {
            sources.entry(name).or_insert((path, text));
        }
    };
    let text = |path: &PathBuf, bytes: Vec<u8>| {
        let broken = |error: std::string::FromUtf8Error| TokenizerError::Broken {
            path: path.clone(),
            reason: error.to_string(),
        };
        String::from_utf8(bytes).map_err(broken)
    };
    if let Some(bytes) = folder.read("chat_template.jinja")? {
        let path = folder.path("chat_template.jinja");
        let source = text(&path, bytes)?;
        add(DEFAULT.to_owned(), path, source);
    }
    for name in folder.names(MORE)? {
        let Some(template) = name.strip_suffix(".jinja") else { continue };
        let file = format!("{MORE}/{name}");
        if let Some(bytes) = folder.read(&file)? {
            let path = folder.path(&file);
            let source = text(&path, bytes)?;
            add(template.to_owned(), path, source);
        }
    }
    let mut add_all = |file: &str, value: &Value| match value {
        Value::Array(named) => named.iter().for_each(|one| {
            if let (Some(name), Some(text)) = (one["name"].as_str(), one["template"].as_str()) {
                add(name.to_owned(), folder.path(file), text.to_owned());
            }
        }),
        Value::Object(named) => named.iter().for_each(|(name, text)| {
            if let Some(text) = text.as_str() {
                add(name.clone(), folder.path(file), text.to_owned());
            }
        }),
        value => {
            if let Some(text) = value.as_str() {
                add(DEFAULT.to_owned(), folder.path(file), text.to_owned());
            }
        }
    };
    for file in ["chat_template.json", "processor_config.json"] {
        if let Some(fields) = folder.read_json(file)? {
            add_all(file, &fields["chat_template"]);
        }
    }
    add_all("tokenizer_config.json", &tokenizer_config["chat_template"]);
    Ok(sources)
}
