//! Which model a name in a pull means: an entry of the catalogue, or a repository of the Hugging Face hub. No IO: whether
//! the repository exists, an agent finds out.

use std::sync::Arc;

use russet_crds::WeightQuantization;

use crate::error::{GatewayError, shown};

/// An entry of a catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogModel {
    /// Its name, one that a Model can have.
    pub name: String,
    /// `owner/name` on the hub.
    pub repository: String,
}

/// Finds the entry of a name, or says why there is none.
pub type FindCatalogModel = Arc<dyn Fn(&str) -> Result<CatalogModel, String> + Send + Sync>;

/// What a pull would serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PullSource {
    /// The name that its Model gets, unless another one has it.
    pub(super) name: String,
    /// The source of its Model.
    pub(super) uri: String,
    /// What its weights are packed to while they are loaded.
    pub(super) quantization: WeightQuantization,
}

/// How names of repositories begin: as Ollama writes them, and as Models do.
const HUB_PREFIXES: [&str; 3] = ["hf.co/", "huggingface.co/", "hf://"];
/// The end of the names of repositories with GGUF files, in lower case.
const GGUF_SUFFIX: &str = "-gguf";
/// The end of the name of a GGUF file.
const GGUF_FILE: &str = ".gguf";
/// The type of GGUF files that a name without one means, as in Ollama.
const DEFAULT_GGUF_TYPE: &str = "Q4_K_M";
/// Longest part of a repository's name on the hub, and of a file's name here.
const MAX_PART_BYTES: usize = 96;
/// Longest name made from a repository: names derived from the Model are longer.
const MAX_NAME_LENGTH: usize = 50;

/// What can be pulled, for messages.
const FORMS: &str = "a name of `russet catalog search`, hf.co/OWNER/NAME, hf.co/OWNER/NAME:4bit or :8bit, and of GGUF files \
                     hf.co/OWNER/NAME-GGUF:TYPE or hf.co/OWNER/NAME/FILE.gguf";

impl PullSource {
    /// What a name means.
    pub(super) fn parse(name: &str, find: &FindCatalogModel) -> Result<Self, GatewayError> {
        if let Some(rest) = HUB_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)) {
            return Self::of_repository(rest).ok_or_else(|| {
                let name = shown(name);
                GatewayError::field(
                    "model",
                    format!("`{name}` is no repository of the hub; pulled is {FORMS}"),
                )
            });
        }
        let found = if is_alias(name) { find(name) } else { Err(format!("`{}` is no name", shown(name))) };
        match found {
            Ok(CatalogModel { name, repository }) => Ok(Self {
                name,
                uri: format!("hf://{repository}"),
                quantization: WeightQuantization::AsStored,
            }),
            Err(why) => Err(GatewayError::field("model", format!("{why}; pulled is {FORMS}"))),
        }
    }

    /// Of `owner/name`, `owner/name:tag` or `owner/name/file.gguf`.
    fn of_repository(text: &str) -> Option<Self> {
        let (path, tag) = match text.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (text, None),
        };
        let parts: Vec<&str> = path.split('/').collect();
        if !parts.iter().all(|part| is_plain(part)) {
            return None;
        }
        let as_stored = |last: &str, uri: String| {
            Some(Self { name: slug(last)?, uri, quantization: WeightQuantization::AsStored })
        };
        match (parts.as_slice(), tag) {
            ([_, _, file], None) => {
                let stem = file.strip_suffix(GGUF_FILE)?;
                as_stored(stem, format!("hf://{path}"))
            }
            ([_, name], tag) if name.to_ascii_lowercase().ends_with(GGUF_SUFFIX) => {
                let kind = tag.unwrap_or(DEFAULT_GGUF_TYPE).to_ascii_uppercase();
                let is_type = kind.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
                if kind.is_empty() || kind.len() > MAX_PART_BYTES || !is_type {
                    return None;
                }
                // As those name the files that publish most of them.
                let stem = &name[..name.len() - GGUF_SUFFIX.len()];
                as_stored(&format!("{stem}-{kind}"), format!("hf://{path}/{stem}-{kind}{GGUF_FILE}"))
            }
            ([_, name], tag) => {
                let quantization = match tag {
                    None => WeightQuantization::AsStored,
                    Some("4bit") => WeightQuantization::Int4,
                    Some("8bit") => WeightQuantization::Int8,
                    Some(_) => return None,
                };
                Some(Self { quantization, ..as_stored(name, format!("hf://{path}"))? })
            }
            _ => None,
        }
    }
}

/// Whether agents accept it as a part of a source.
fn is_plain(part: &str) -> bool {
    !part.is_empty()
        && part.len() <= MAX_PART_BYTES
        && !part.starts_with('.')
        && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Whether a client may give a model this name. Patterns, empty parts and folders are none.
pub(super) fn is_alias(name: &str) -> bool {
    const MAX_ALIAS_BYTES: usize = 253;
    name.len() <= MAX_ALIAS_BYTES && name.split([':', '/']).all(is_plain)
}

/// A name of an object made from a text; `None` where nothing of it can be in one.
pub(super) fn slug(text: &str) -> Option<String> {
    let letters = text.chars().map(|letter| match letter.to_ascii_lowercase() {
        letter if letter.is_ascii_alphanumeric() => letter,
        _ => '-',
    });
    let name: String = letters.take(MAX_NAME_LENGTH).collect();
    let name = name.trim_matches('-');
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A catalogue with one entry.
    pub(in crate::managed_models) fn catalog() -> FindCatalogModel {
        Arc::new(|name| match name {
            "qwen3-4b-4bit" | "qwen3:4b" => Ok(CatalogModel {
                name: "qwen3-4b-4bit".into(),
                repository: "mlx-community/Qwen3-4B-4bit".into(),
            }),
            _ => Err(format!("no entry is named {name}")),
        })
    }

    #[test]
    fn a_name_means_an_entry_or_a_repository() {
        use WeightQuantization::{AsStored, Int4, Int8};
        for (name, expected) in [
            ("qwen3:4b", ("qwen3-4b-4bit", "hf://mlx-community/Qwen3-4B-4bit", AsStored)),
            ("hf.co/o/My_Model.v2", ("my-model-v2", "hf://o/My_Model.v2", AsStored)),
            ("huggingface.co/o/n", ("n", "hf://o/n", AsStored)),
            ("hf://o/n", ("n", "hf://o/n", AsStored)),
            ("hf.co/o/n:4bit", ("n", "hf://o/n", Int4)),
            ("hf.co/o/n:8bit", ("n", "hf://o/n", Int8)),
            ("hf.co/o/N-GGUF", ("n-q4-k-m", "hf://o/N-GGUF/N-Q4_K_M.gguf", AsStored)),
            ("hf.co/o/N-gguf:q8_0", ("n-q8-0", "hf://o/N-gguf/N-Q8_0.gguf", AsStored)),
            ("hf.co/o/n/x.Q6_K.gguf", ("x-q6-k", "hf://o/n/x.Q6_K.gguf", AsStored)),
        ] {
            let source = PullSource::parse(name, &catalog()).unwrap();
            assert_eq!((source.name.as_str(), source.uri.as_str(), source.quantization), expected, "{name}");
        }
    }

    #[test]
    fn hostile_names_mean_nothing_and_errors_say_what_does() {
        let long = format!("hf.co/o/{}", "n".repeat(1000));
        for name in [
            "nobody-has-this",
            "*",
            "qwen*",
            "a/../b",
            "",
            "ü",
            "hf://",
            "hf.co/o",
            "hf.co/o/",
            "hf.co//n",
            "hf.co/../n",
            "hf.co/o/..",
            "hf.co/o/n/..",
            "hf.co/o/n/x.bin",
            "hf.co/o/n/x/y.gguf",
            "hf.co/o/n:Q4_K_M",
            "hf.co/o/n:",
            "hf.co/o/N-GGUF:../x",
            "hf.co/o/N-GGUF:",
            "hf.co/o/n/x.gguf:Q4",
            "hf.co/o/ñ",
            "hf.co/o/n\n",
            "hf.co/o/n?x=1",
            "hf.co/o/n%2f",
            "hf.co/o/n*",
            "file:///etc/passwd",
            "https://internal/x",
            &long,
        ] {
            let error = PullSource::parse(name, &catalog()).unwrap_err();
            assert!(error.message.contains("russet catalog") && error.message.len() < 600, "{error}");
            assert_eq!(error.param.as_deref(), Some("model"), "{name}");
        }
    }

    #[test]
    fn aliases_are_names_without_patterns_and_folders() {
        for (name, expected) in [
            ("gpt-4", true),
            ("qwen3:4b", true),
            ("team/fast:latest", true),
            ("a*", false),
            ("a//b", false),
            ("a/../b", false),
            ("/a", false),
            ("a:", false),
            (" a", false),
            ("é", false),
        ] {
            assert_eq!(is_alias(name), expected, "{name}");
        }
        assert!(is_alias(&"a/b".repeat(84)) && !is_alias(&"a/b".repeat(85)));
        assert_eq!((slug("…"), slug(&"x".repeat(99)).map(|name| name.len())), (None, Some(50)));
    }
}
