//! The files beside the weights that turn text into tokens: which the engine needs, and what can be said of the small
//! ones before anything is fetched. They are read by types that skip the rest; whether the tokenizer and the template
//! themselves are sound, the engine finds.

pub mod chat_templates;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::{
    Deserialize,
    de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

use crate::{
    config::CONFIG,
    error::{Error, FileError, Unsupported},
    generation_config::GenerationConfig,
    json, lfs,
    object::Object,
};
use chat_templates::ChatTemplate;

/// The tokenizer, in the form of Hugging Face's library.
pub const TOKENIZER: &str = "tokenizer.json";
/// Its special tokens and, for most models, the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Defaults of generation, of which the end tokens are used, and sampling parameters.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// The chat template in a file of its own.
pub const TEMPLATE: &str = "chat_template.jinja";
/// The same as a field of a JSON file.
pub const TEMPLATE_JSON: &str = "chat_template.json";
/// The configuration of a model's images, which may hold its chat template.
pub const PROCESSOR_CONFIG: &str = "processor_config.json";
/// Longest configuration that is judged. Tokenizers with thousands of reserved tokens list each in
/// [`TOKENIZER_CONFIG`], in 1.2 MB at most.
const MAX_JUDGED_BYTES: u64 = 4 << 20;
/// Longest file of sampling parameters that is read; published ones have some hundred bytes.
const MAX_GENERATION_BYTES: usize = 64 << 10;
/// Longest chat template that is judged; published ones have up to 40 kB.
pub const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Longest pointer of git-lfs, by its specification.
const MAX_POINTER_BYTES: u64 = 1024;
/// The small files that are judged, and how long they may be for it: of the tokenizer only whether it is one.
pub const JUDGED: [(&str, u64); 6] = [
    (TOKENIZER, MAX_POINTER_BYTES),
    (TOKENIZER_CONFIG, MAX_JUDGED_BYTES),
    (GENERATION_CONFIG, MAX_JUDGED_BYTES),
    (TEMPLATE_JSON, MAX_JUDGED_BYTES),
    (PROCESSOR_CONFIG, MAX_JUDGED_BYTES),
    (TEMPLATE, MAX_TEMPLATE_BYTES),
];
/// Most end tokens; published models have up to five.
const MAX_END_TOKENS: usize = 1000;
/// The tokenizer of SentencePiece, which is not read.
const SENTENCE_PIECE: &str = "tokenizer.model";

/// What a source holds beside the weights.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// Names of all its files.
    pub names: Vec<String>,
    /// [`CONFIG`].
    pub config: Vec<u8>,
    /// Those of [`JUDGED`] that are there, and further templates.
    pub judged: Vec<(String, Vec<u8>)>,
}

impl TokenizerFiles {
    /// Whether there is a tokenizer, which draft models need too.
    pub fn check_tokenizer(&self) -> Result<(), Error> {
        if let Some(bytes) = self.judged(TOKENIZER)
            && lfs::is_pointer(bytes)
        {
            let (file, size) = (TOKENIZER.to_owned(), bytes.len() as u64);
            return Err(FileError::LfsPointer { file, size }.into());
        }
        if !self.has(TOKENIZER) {
            let (reason, remedy) = match self.has(SENTENCE_PIECE) {
                true => (
                    format!("it is missing, and {SENTENCE_PIECE} is not read"),
                    "take a copy that has both, or convert it with Hugging Face's tokenizers",
                ),
                false => ("it is missing".to_owned(), "take it from the repository that the weights are of"),
            };
            return Err(Unsupported { place: TOKENIZER.to_owned(), reason, remedy: remedy.to_owned() }.into());
        }
        Ok(())
    }

    /// Whether the engine could answer with these files, as far as they tell. A model without a chat template continues
    /// texts.
    pub fn check_chat(&self) -> Result<(), Error> {
        let tokenizer: TokenizerConfig = self.read(TOKENIZER_CONFIG)?;
        let generation: EndTokens = self.read(GENERATION_CONFIG)?;
        let Object(config): Object<EndTokens> = json::read(CONFIG, &self.config)?;
        if generation.ids().is_empty() && config.ids().is_empty() && !is_there(&tokenizer.eos_token) {
            let reason = format!(
                "no end-of-sequence token is named (eos_token_id in {GENERATION_CONFIG} or {CONFIG}, eos_token in {TOKENIZER_CONFIG})"
            );
            let remedy = "take the files that belong to the weights, or add one".to_owned();
            return Err(Unsupported { place: GENERATION_CONFIG.to_owned(), reason, remedy }.into());
        }
        Ok(())
    }

    /// The chat templates, by name.
    pub fn chat_templates(&self) -> Result<BTreeMap<String, ChatTemplate>, FileError> {
        chat_templates::chat_templates(&self.names, |name| Ok(self.judged(name).map(Cow::Borrowed)))
    }

    /// Sampling parameters that the model's makers recommend.
    pub fn generation_config(&self) -> Option<GenerationConfig> {
        let bytes = self.judged(GENERATION_CONFIG).filter(|bytes| bytes.len() <= MAX_GENERATION_BYTES)?;
        let fields: Value = json::read(GENERATION_CONFIG, bytes).ok()?;
        GenerationConfig::read(&fields)
    }

    fn judged(&self, file: &str) -> Option<&[u8]> {
        self.judged.iter().find(|(name, _)| name == file).map(|(_, bytes)| bytes.as_slice())
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    fn read<T: for<'de> Deserialize<'de> + Default>(&self, file: &str) -> Result<T, FileError> {
        match self.judged(file) {
            Some(bytes) => json::read(file, bytes).map(|Object(value)| value),
            None => Ok(T::default()),
        }
    }
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    eos_token: Option<Named>,
}

#[derive(Default, Deserialize)]
struct EndTokens {
    #[serde(default)]
    eos_token_id: Option<EndTokenIds>,
}

impl EndTokens {
    fn ids(&self) -> &[u32] {
        self.eos_token_id.as_ref().map_or(&[], |EndTokenIds(ids)| ids)
    }
}

/// Whether a text stands there in one of its forms: as text that is not empty, or within an object or a list. Which of
/// several is used, the engine decides.
struct Named(bool);

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NamedVisitor)
    }
}

struct NamedVisitor;

impl<'de> Visitor<'de> for NamedVisitor {
    type Value = Named;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a text, an object or a list")
    }

    fn visit_str<E>(self, text: &str) -> Result<Named, E> {
        Ok(Named(!text.is_empty()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Named, E> {
        Ok(Named(false))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Named, E> {
        Ok(Named(false))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Named, A::Error> {
        let mut any = false;
        while list.next_element::<IgnoredAny>()?.is_some() {
            any = true;
        }
        Ok(Named(any))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Named, A::Error> {
        let mut any = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            any = true;
        }
        Ok(Named(any))
    }
}

fn is_there(text: &Option<Named>) -> bool {
    matches!(text, Some(Named(true)))
}

/// The tokens that end an answer, as `eos_token_id` names them: one id or several, each a whole number, which a fraction
/// of zero does not change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokenIds(pub Vec<u32>);

impl<'de> Deserialize<'de> for EndTokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EndTokenVisitor)
    }
}

struct EndTokenVisitor;

impl<'de> Visitor<'de> for EndTokenVisitor {
    type Value = EndTokenIds;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a token id or a list of them in eos_token_id")
    }

    fn visit_unit<E>(self) -> Result<EndTokenIds, E> {
        Ok(EndTokenIds::default())
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<EndTokenIds, E> {
        let unexpected = serde::de::Unexpected::Unsigned(number);
        u32::try_from(number).map(|id| EndTokenIds(vec![id])).map_err(|_| E::invalid_value(unexpected, &self))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<EndTokenIds, E> {
        let is_whole = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
        let id = is_whole.then_some(number as u32);
        let unexpected = serde::de::Unexpected::Float(number);
        id.map(|id| EndTokenIds(vec![id])).ok_or_else(|| E::invalid_value(unexpected, &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<EndTokenIds, A::Error> {
        let mut ids = Vec::new();
        while let Some(EndTokenIds(own)) = list.next_element()? {
            ids.extend(own);
            if ids.len() > MAX_END_TOKENS {
                return Err(A::Error::custom(format!(
                    "eos_token_id has more than {MAX_END_TOKENS} tokens, the limit"
                )));
            }
        }
        Ok(EndTokenIds(ids))
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<EndTokenIds, A::Error> {
        Err(A::Error::invalid_type(serde::de::Unexpected::Map, &self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATE_FIELD: &str = r#"{"chat_template": "{{ messages }}", "eos_token": "</s>"}"#;

    fn files(names: &[&str], config: &str, judged: &[(&str, &str)]) -> TokenizerFiles {
        TokenizerFiles {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            config: config.as_bytes().to_vec(),
            judged: judged
                .iter()
                .map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec()))
                .collect(),
        }
    }

    #[test]
    fn files_the_engine_would_refuse_are_known_before() {
        let both = &[TOKENIZER, TEMPLATE][..];
        for (files, said) in [
            (files(both, r#"{"eos_token_id": 2}"#, &[]), ""),
            (files(both, r#"{"eos_token_id": 2.0}"#, &[]), ""),
            (files(both, r#"{"eos_token_id": [2, 3.0]}"#, &[]), ""),
            (files(both, "{}", &[(GENERATION_CONFIG, r#"{"eos_token_id": 2, "temperature": NaN}"#)]), ""),
            (files(&[TOKENIZER], "{}", &[(TOKENIZER_CONFIG, TEMPLATE_FIELD)]), ""),
            (
                files(
                    &[TOKENIZER],
                    "{}",
                    &[(
                        TOKENIZER_CONFIG,
                        r#"{"eos_token": {"content": "x"}, "chat_template": [{"name": "default", "template": "x"}]}"#,
                    )],
                ),
                "",
            ),
            (
                files(
                    &[TOKENIZER],
                    r#"{"eos_token_id": 2}"#,
                    &[(TEMPLATE_JSON, r#"{"chat_template": "x"}"#)],
                ),
                "",
            ),
            (
                files(&["tokenizer.model"], "{}", &[]),
                "tokenizer.json: it is missing, and tokenizer.model is not read",
            ),
            (files(&[], "{}", &[]), "tokenizer.json: it is missing; "),
            (files(&[TOKENIZER], r#"{"eos_token_id": 2}"#, &[]), ""),
            (
                files(both, r#"{"eos_token_id": null}"#, &[(GENERATION_CONFIG, "{}")]),
                "no end-of-sequence token",
            ),
            (files(both, r#"{"eos_token_id": []}"#, &[]), "no end-of-sequence token"),
            (
                files(both, r#"{"eos_token_id": "two"}"#, &[]),
                "config.json is not valid JSON (invalid type: string \"two\", expected a token id",
            ),
            (files(both, r#"{"eos_token_id": 2.5}"#, &[]), "floating point `2.5`"),
            (files(both, r#"{"eos_token_id": true}"#, &[]), "boolean `true`"),
            (files(both, r#"{"eos_token_id": {"a": 1}}"#, &[]), "invalid type: map"),
            (files(both, "{}", &[(GENERATION_CONFIG, "{")]), "generation_config.json is not valid JSON"),
            (
                files(
                    both,
                    r#"{"eos_token_id": 2}"#,
                    &[(TOKENIZER, "version https://git-lfs.github.com/spec/v1\n")],
                ),
                "tokenizer.json is a pointer of git-lfs",
            ),
            (
                files(both, "{}", &[(TOKENIZER_CONFIG, "version https://git-lfs.github.com/spec/v1\n")]),
                "tokenizer_config.json is a pointer of git-lfs",
            ),
        ] {
            match files.check_tokenizer().and_then(|()| files.check_chat()) {
                Ok(()) => assert_eq!(said, "", "{files:?}"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!said.is_empty() && error.contains(said), "{files:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn long_lists_of_end_tokens_are_refused() {
        let list = format!(r#"{{"eos_token_id": [{}1]}}"#, "1,".repeat(MAX_END_TOKENS));
        let error = files(&[TOKENIZER, TEMPLATE], &list, &[]).check_chat().unwrap_err().to_string();
        assert!(error.contains("more than 1000 tokens") && error.len() < 1000, "{error}");
    }
}
