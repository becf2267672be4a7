//! The chat templates of a model, from every place in which Transformers looks. Most models have one; some have another for
//! conversations with tools, or for documents.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{PROCESSOR_CONFIG, TEMPLATE, TEMPLATE_JSON, TOKENIZER_CONFIG};
use crate::{error::FileError, json, object::Object};

/// The template of a conversation that asks for no other.
pub const DEFAULT: &str = "default";
/// The template of a conversation with tools.
pub const TOOL_USE: &str = "tool_use";
/// The folder with a file for each further template. Its files lie in the model's own folder, with the folder's name and a
/// dot before theirs: a name of a model's file is never a path.
pub const ADDITIONAL: &str = "additional_chat_templates";
/// Suffix of a template in a file of its own.
const SUFFIX: &str = ".jinja";

/// A template and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The file.
    pub file: String,
    /// Its text.
    pub source: String,
}

/// The file name under which a file of the folder [`ADDITIONAL`] is kept; `None` for a path that is none.
pub fn flat_name(path: &str) -> Option<String> {
    let name = path.strip_prefix(ADDITIONAL)?.strip_prefix('/')?;
    (!name.contains('/') && name.ends_with(SUFFIX) && name.len() > SUFFIX.len())
        .then(|| format!("{ADDITIONAL}.{name}"))
}

/// The templates by name. Of a name that is in several places the first place counts; an empty template is none. `names` are
/// the model's files, and `read` gives one of them, or nothing.
///
/// # Errors
/// Those of `read`, and a file that is not what it should be.
pub fn chat_templates<'a, E: From<FileError>>(
    names: &[String],
    mut read: impl FnMut(&str) -> Result<Option<Cow<'a, [u8]>>, E>,
) -> Result<BTreeMap<String, ChatTemplate>, E> {
    let mut templates = BTreeMap::new();
    let mut add = |name: String, file: &str, source: String| {
        if !source.trim().is_empty() {
            templates.entry(name).or_insert(ChatTemplate { file: file.to_owned(), source });
        }
    };
    let own = names.iter().filter_map(|file| {
        let further = file.strip_prefix(ADDITIONAL).and_then(|rest| rest.strip_prefix('.'));
        further.and_then(|rest| rest.strip_suffix(SUFFIX)).map(|name| (name, file.as_str()))
    });
    for (name, file) in std::iter::once((DEFAULT, TEMPLATE)).chain(own) {
        if let Some(bytes) = read(file)? {
            let broken = |error: std::string::FromUtf8Error| FileError::NotText {
                file: file.to_owned(),
                reason: error.to_string(),
            };
            add(name.to_owned(), file, String::from_utf8(bytes.into_owned()).map_err(broken)?);
        }
    }
    for file in [TEMPLATE_JSON, PROCESSOR_CONFIG, TOKENIZER_CONFIG] {
        if let Some(bytes) = read(file)? {
            let Object(fields): Object<Fields> = json::read(file, &bytes)?;
            let Templates(templates) = fields.chat_template.unwrap_or_default();
            templates.into_iter().for_each(|(name, source)| add(name, file, source));
        }
    }
    Ok(templates)
}

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    chat_template: Option<Templates>,
}

/// A text, a list of objects with a name and a template, or an object of them. What is neither is none.
#[derive(Default)]
struct Templates(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Templates {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TemplatesVisitor)
    }
}

struct TemplatesVisitor;

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl<'de> Visitor<'de> for TemplatesVisitor {
    type Value = Templates;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a chat template, or a list or an object of them")
    }

    fn visit_str<E>(self, text: &str) -> Result<Templates, E> {
        Ok(Templates(vec![(DEFAULT.to_owned(), text.to_owned())]))
    }

    fn visit_unit<E>(self) -> Result<Templates, E> {
        Ok(Templates::default())
    }

    fn visit_bool<E>(self, _: bool) -> Result<Templates, E> {
        Ok(Templates::default())
    }

    fn visit_u64<E>(self, _: u64) -> Result<Templates, E> {
        Ok(Templates::default())
    }

    fn visit_i64<E>(self, _: i64) -> Result<Templates, E> {
        Ok(Templates::default())
    }

    fn visit_f64<E>(self, _: f64) -> Result<Templates, E> {
        Ok(Templates::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Templates, A::Error> {
        let mut templates = Vec::new();
        while let Some(NamedTemplate { name, template }) = list.next_element()? {
            templates.push((name, template));
        }
        Ok(Templates(templates))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Templates, A::Error> {
        let mut templates = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            match map.next_value::<Text>()? {
                Text::Text(source) => templates.push((name, source)),
                Text::Other(IgnoredAny) => {}
            }
        }
        Ok(Templates(templates))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Text {
    Text(String),
    Other(IgnoredAny),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_templates_have_flat_names() {
        for (path, name) in [
            ("additional_chat_templates/tool_use.jinja", Some("additional_chat_templates.tool_use.jinja")),
            ("additional_chat_templates/a/b.jinja", None),
            ("additional_chat_templates/.jinja", None),
            ("additional_chat_templates/tool_use.py", None),
            ("additional_chat_templates.tool_use.jinja", None),
            ("other/tool_use.jinja", None),
        ] {
            assert_eq!(flat_name(path).as_deref(), name, "{path}");
        }
    }

    #[test]
    fn the_first_place_of_a_name_counts() {
        let files = [
            (TEMPLATE, "J"),
            ("additional_chat_templates.tool_use.jinja", "A"),
            (TEMPLATE_JSON, r#"{"chat_template": {"default": "F", "rag": "R", "odd": 7}}"#),
            (PROCESSOR_CONFIG, r#"{"chat_template": null}"#),
            (
                TOKENIZER_CONFIG,
                r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "x", "template": " "}]}"#,
            ),
        ];
        let names: Vec<String> = files.iter().map(|(name, _)| (*name).to_owned()).collect();
        let read = |name: &str| -> Result<_, FileError> {
            Ok(files.iter().find(|(known, _)| *known == name).map(|(_, text)| text.as_bytes().into()))
        };
        let found = chat_templates(&names, read).unwrap();
        let found: Vec<(&str, &str)> =
            found.iter().map(|(name, template)| (name.as_str(), template.source.as_str())).collect();
        assert_eq!(found, [(DEFAULT, "J"), ("rag", "R"), (TOOL_USE, "A")]);
    }
}
