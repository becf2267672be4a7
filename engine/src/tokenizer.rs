//! Tokenizer: converts between text and tokens with the tokenizer, chat template and end-of-sequence tokens
//! of a model folder. All of it is data; no code of a model runs. Not here: requests and weights.

mod added_tokens;
pub mod detokenizer;
mod encoder;
mod folder;
mod literal_text;
mod prompt;
mod steps;
pub mod stop_strings;
mod templates;
mod token_length;
mod token_texts;
mod word_cuts;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use russet_chat::grammar::{GrammarError, TokenText, Vocabulary};
use russet_chat::template::TemplateError;
use russet_model::config::whole;
use russet_model::tokenizer_files::EndTokenIds;
use serde::Deserialize as _;
use serde_json::Value;
use thiserror::Error;
use tokenizers::Tokenizer;

use detokenizer::Detokenizer;
use encoder::{Encoder, MAX_PIECE_BYTES};
use folder::TokenizerFolder;
use literal_text::LiteralText;
pub use prompt::{PreparedPrompt, PromptFit, PromptLimits, PromptSource, ResponseRules};
use templates::ChatTemplates;

/// Why text and tokens cannot be converted.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// A file is missing or unreadable.
    #[error("cannot read {path}: the model's copy is incomplete; delete its ModelCopy to fetch it again")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no tokenizer.
    #[error(
        "{path} is missing, and tokenizer.model is not read; take a copy of the model that has it, or convert its tokenizer with Hugging Face's tokenizers"
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file with invalid contents.
    #[error("{path} is broken: {reason}; fix the model, or delete its ModelCopy to fetch it again")]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The draft model has a different tokenizer.
    #[error(
        "the draft model {draft} has another tokenizer than {model}: {difference}; use one of the same family, or none"
    )]
    TokenizerMismatch {
        /// Folder of the draft model.
        draft: PathBuf,
        /// Folder of the model.
        model: PathBuf,
        /// What differs.
        difference: String,
    },
    /// A token that tokenizer.json lacks cannot be added.
    #[error(
        "{path} adds token {text:?} as {id}, but tokenizer.json {instead}; fix the model, whose prompts would be wrong"
    )]
    AddedToken {
        /// The file that names it.
        path: PathBuf,
        /// How it is written.
        text: String,
        /// Its id in that file.
        id: u64,
        /// What tokenizer.json has.
        instead: String,
    },
    /// A conversation for a model without a chat template.
    #[error(
        "this model has no chat template (chat_template.jinja, chat_template.json or chat_template in tokenizer_config.json), so it takes no conversation; let it continue a text at /v1/completions, use an instruction-tuned model, or add a template"
    )]
    NoTemplate,
    /// There is no end-of-sequence token.
    #[error(
        "{0} names no end-of-sequence token (eos_token_id in generation_config.json or config.json, eos_token in tokenizer_config.json); add one"
    )]
    NoEosToken(PathBuf),
    /// The conversation cannot be rendered.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The response cannot be constrained as the request asks, or is not as it asked.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The rendered prompt cannot be tokenised.
    #[error("the tokenizer cannot encode the prompt: {0}")]
    Encode(String),
    /// The prompt fills the context, or more.
    #[error(
        "This model's maximum context length is {context_tokens} tokens. However, your messages resulted in at least {tokens} tokens. Shorten the conversation; the answer needs room too."
    )]
    ContextLength {
        /// Tokens that the prompt has at least.
        tokens: u64,
        /// Tokens of the context, the answer included.
        context_tokens: u32,
    },
    /// The prompt has a part that can only be tokenised at once, and is too long for that.
    #[error(
        "the prompt holds {bytes} bytes in a row that cannot be divided at words, and at most {MAX_PIECE_BYTES} are tokenised at once; shorten it, or put spaces or line breaks between its words"
    )]
    LongWord {
        /// Its bytes.
        bytes: usize,
    },
    /// The prompt is too long for a tokenizer whose words are not known, which takes it at once.
    #[error(
        "This model's maximum context length is reached: its tokenizer takes at most {MAX_PIECE_BYTES} bytes at once. However, your messages have {bytes} bytes. Shorten the conversation."
    )]
    Undivided {
        /// Its bytes.
        bytes: usize,
    },
    /// The caller has left, or its deadline has passed.
    #[error("the client has left, or its deadline has passed")]
    Abandoned,
    /// The tokenizer has tokens the model has no embedding for.
    #[error(
        "the prompt holds token {id} ({text:?}), but the model has only {vocabulary} (vocab_size in config.json); leave that text out, or fix the model's tokenizer"
    )]
    NotInModel {
        /// The token.
        id: u32,
        /// How it is written.
        text: String,
        /// Tokens of the model.
        vocabulary: u64,
    },
    /// An emitted token of a resumed request is outside the model's vocabulary.
    #[error(
        "token {id} of this answer is said to have been sent, but the model has only {vocabulary} tokens; another model began it"
    )]
    OutOfVocabulary {
        /// The token.
        id: u32,
        /// Tokens of the model.
        vocabulary: u64,
    },
    /// The model sampled a token that the tokenizer cannot decode.
    #[error("the tokenizer cannot decode the answer: {0}")]
    Decode(String),
}

impl TokenizerError {
    /// Whether loading the same files fails again whenever it is tried.
    pub(crate) fn is_refusal(&self) -> bool {
        !matches!(self, Self::Read { .. })
    }
}

/// A model's tokenizer and template.
pub struct ChatTokenizer {
    tokenizer: Arc<Tokenizer>,
    encoder: Encoder,
    literal_text: LiteralText,
    templates: Option<ChatTemplates>,
    eos_token_ids: Arc<[u32]>,
    vocabulary: Option<u64>,
    /// Made when the first response needs them: that takes some hundred milliseconds.
    token_texts: OnceLock<Arc<[TokenText]>>,
    grammar_vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
}

impl ChatTokenizer {
    /// Checks that the draft model's tokenizer equals the model's.
    pub fn check_draft(model: &Path, draft: &Path) -> Result<(), TokenizerError> {
        let vocabulary = |dir: &Path| -> Result<HashMap<String, u32>, TokenizerError> {
            Ok(added_tokens::load(&TokenizerFolder::open(dir)?)?.get_vocab(true))
        };
        let (ours, theirs) = (vocabulary(model)?, vocabulary(draft)?);
        let mut differing: Vec<(&String, &u32)> =
            ours.iter().filter(|(token, id)| theirs.get(*token) != Some(*id)).collect();
        differing.sort_by_key(|(_, id)| **id);
        let Some((token, id)) = differing.first() else { return Ok(()) };
        let there = theirs.get(*token).map_or("none".to_owned(), u32::to_string);
        let difference = format!(
            "{} of {} tokens, such as {token:?}, which is {id} in the one and {there} in the other",
            differing.len(),
            ours.len()
        );
        Err(TokenizerError::TokenizerMismatch {
            draft: draft.to_owned(),
            model: model.to_owned(),
            difference,
        })
    }

    /// Loads tokenizer and template from `dir`. Takes some hundred milliseconds for a large vocabulary.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let folder = TokenizerFolder::open(dir)?;
        let tokenizer = added_tokens::load(&folder)?;
        let config = folder.read_json("tokenizer_config.json")?.unwrap_or_default();
        let special = added_tokens::named(&folder, &config)?;
        let mut ends = BTreeSet::new();
        for file in ["generation_config.json", "config.json"] {
            let ids = &folder.read_json(file)?.unwrap_or_default()["eos_token_id"];
            ends.extend(parse_eos_ids(&folder.path(file), ids)?);
        }
        ends.extend(special.get("eos_token").and_then(|token| tokenizer.token_to_id(token)));
        if ends.is_empty() {
            return Err(TokenizerError::NoEosToken(dir.to_owned()));
        }
        let templates = ChatTemplates::load(&folder, &special)?;
        let vocabulary = folder.read_json("config.json")?.and_then(|config| whole(&config["vocab_size"]));
        let tokenizer = Arc::new(tokenizer);
        Ok(Self {
            encoder: Encoder::new(tokenizer.clone()),
            literal_text: LiteralText::of(&tokenizer),
            tokenizer,
            templates,
            eos_token_ids: ends.into_iter().collect(),
            vocabulary,
            token_texts: OnceLock::new(),
            grammar_vocabulary: OnceLock::new(),
        })
    }

    /// Whether it takes conversations.
    pub fn has_chat_template(&self) -> bool {
        self.templates.is_some()
    }

    /// Checks that all emitted tokens of a resumed request are in the vocabulary.
    pub fn check_emitted(&self, emitted: &[u32]) -> Result<(), TokenizerError> {
        self.first_out_of_vocabulary(emitted)
            .map_or(Ok(()), |(id, vocabulary)| Err(TokenizerError::OutOfVocabulary { id, vocabulary }))
    }

    /// The first token outside the model's vocabulary, and the size of the vocabulary: one request must not
    /// fail the rank and with it all other requests.
    fn first_out_of_vocabulary(&self, tokens: &[u32]) -> Option<(u32, u64)> {
        let vocabulary = self.vocabulary?;
        tokens.iter().find(|&&id| u64::from(id) >= vocabulary).map(|&id| (id, vocabulary))
    }

    /// What each token is, by id; empty where the tokenizer spells no bytes.
    pub fn token_texts(&self) -> Arc<[TokenText]> {
        self.token_texts.get_or_init(|| token_texts::token_texts(&self.tokenizer).into()).clone()
    }

    /// The last tokens of these texts, each behind other text.
    ///
    /// # Errors
    /// The tokenizer failed.
    pub fn last_tokens(&self, texts: &[String]) -> Result<BTreeSet<u32>, TokenizerError> {
        let last = |text: &String| Ok(self.encode_marker(&format!("a{text}"))?.last().copied());
        texts.iter().filter_map(|text| last(text).transpose()).collect()
    }

    /// The tokens as a grammar sees them.
    fn grammar_vocabulary(&self) -> Result<Arc<Vocabulary>, GrammarError> {
        let make = || {
            let vocabulary = Vocabulary::new(self.token_texts().to_vec(), self.eos_token_ids.clone());
            vocabulary.map(Arc::new)
        };
        self.grammar_vocabulary.get_or_init(make).clone()
    }

    /// The tokens of a short text, special ones among them.
    ///
    /// # Errors
    /// The tokenizer failed.
    pub fn encode_marker(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.tokenizer.encode(text, false);
        let encoding = encoding.map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A decoder for one output.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(self.tokenizer.clone())
    }

    /// Whether the tokenizer can decode a token: a model may have more tokens.
    pub fn has_token(&self, token: u32) -> bool {
        self.tokenizer.id_to_token(token).is_some()
    }

    /// End-of-sequence tokens.
    pub fn eos_token_ids(&self) -> &Arc<[u32]> {
        &self.eos_token_ids
    }
}

/// The tokenizer of a folder with all added tokens and no template.
pub(crate) fn load_plain(dir: &Path) -> Result<Tokenizer, TokenizerError> {
    added_tokens::load(&TokenizerFolder::open(dir)?)
}

fn load_tokenizer(folder: &TokenizerFolder) -> Result<Tokenizer, TokenizerError> {
    let path = folder.path("tokenizer.json");
    let Some(bytes) = folder.read("tokenizer.json")? else { return Err(TokenizerError::Missing { path }) };
    let broken = |reason: String| TokenizerError::Broken { path: path.clone(), reason };
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| broken(error.to_string()))?;
    // Both are for training; a prompt is neither truncated nor padded.
    tokenizer.with_truncation(None).map_err(|error| broken(error.to_string()))?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// A token written as its text, or as an object with its text and its flags.
fn special_token(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// One id or several.
fn parse_eos_ids(path: &Path, value: &Value) -> Result<Vec<u32>, TokenizerError> {
    EndTokenIds::deserialize(value).map(|EndTokenIds(ids)| ids).map_err(|_| TokenizerError::Broken {
        path: path.to_owned(),
        reason: format!("eos_token_id is {value}, not a token id or a list of them"),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use jiff::Zoned;
    use russet_chat::template::Prompt;
    use russet_wire::conversation::Message;

    use super::*;
    use crate::fixture;

    /// The prompt of one message from a user.
    fn prompt(tokens: &ChatTokenizer, content: &str) -> Result<Vec<u32>, TokenizerError> {
        let limits = PromptLimits { context_tokens: u32::MAX, is_abandoned: &|| false };
        tokens.prompt(&prompt_of(&say(content)), &limits)
    }

    fn prompt_of(messages: &[Message]) -> Prompt<'_> {
        static NOW: LazyLock<Zoned> = LazyLock::new(Zoned::now);
        Prompt::new(messages, &NOW)
    }

    fn say(content: &str) -> Vec<Message> {
        vec![Message::new("user", content)]
    }

    #[test]
    fn detokenizer_restores_text_without_split_characters() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let mut stream = tokens.detokenizer();
        let mut output = String::new();
        // The tokenizer knows single bytes only, so é takes two tokens, 日 three, 🙂 four.
        for (byte, expected) in "aé日🙂".bytes().zip(["a", "", "é", "", "", "日", "", "", "", "🙂"]) {
            let text = stream.push(fixture::token_of_byte(byte)).unwrap();
            assert_eq!(text, expected);
            output.push_str(&text);
        }
        assert_eq!(stream.flush().unwrap(), "");
        assert_eq!(output, "aé日🙂");
    }

    #[test]
    fn detokenizer_emits_invalid_bytes_as_replacements() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let mut stream = tokens.detokenizer();
        let mut output = String::new();
        for _ in 0..100 {
            output.push_str(&stream.push(fixture::token_of_byte(0xE6)).unwrap());
            assert!(stream.clone().flush().unwrap().chars().count() <= 16);
        }
        output.push_str(&stream.push(fixture::token_of_byte(b'a')).unwrap());
        output.push_str(&stream.flush().unwrap());
        assert!(output.ends_with('a'), "{output}");
        assert!(output.contains('\u{FFFD}'));
    }

    #[test]
    fn detokenizer_keeps_spaces_with_byte_fallback_vocabularies() {
        let vocabulary = ["<unk>", "▁Hello", "▁world", "<0xE6>", "<0x97>", "<0xA5>", "!"];
        let vocabulary: serde_json::Map<_, _> =
            vocabulary.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                      "vocab": vocabulary, "merges": []},
        });
        let mut stream = Detokenizer::new(Arc::new(tokenizer.to_string().parse().unwrap()));
        for (token, expected) in [
            (1, "Hello"),
            (2, " world"),
            (3, ""),
            (4, ""),
            (5, "日"),
            (3, ""),
            (4, ""),
            (5, "日"),
            (6, "!"),
            (2, " world"),
        ] {
            assert_eq!(stream.push(token).unwrap(), expected);
        }
        assert_eq!(stream.flush().unwrap(), "");
    }

    #[test]
    fn a_prompt_is_the_rendered_template_in_tokens() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let ids = prompt(&tokens, "hi").unwrap();
        let mut expected = vec![fixture::BEGIN, fixture::USER];
        expected.extend("hi".bytes().map(fixture::token_of_byte));
        expected.extend([fixture::END, fixture::ASSISTANT]);
        assert_eq!(ids, expected);
        assert_eq!(tokens.eos_token_ids().as_ref(), [fixture::END]);
    }

    #[test]
    fn out_of_vocabulary_token_fails_the_request_not_the_rank() {
        let dir = fixture::model_dir();
        let specials = [fixture::BEGIN, fixture::USER, fixture::END, fixture::ASSISTANT];
        let id = specials.into_iter().max().unwrap();
        for (vocabulary, fits) in [(id + 1, true), (id, false)] {
            let config = format!(r#"{{"eos_token_id": 2, "vocab_size": {vocabulary}}}"#);
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            let prompt = prompt(&ChatTokenizer::load(dir.path()).unwrap(), "h");
            assert_eq!(prompt.is_ok(), fits, "{prompt:?}");
            let expected = format!("token {id} (");
            assert!(fits || prompt.unwrap_err().to_string().contains(&expected));
        }
    }

    #[test]
    fn eos_tokens_come_from_all_config_files() {
        for (config, generation, tokenizer_config, expected) in [
            (r#"{"eos_token_id": 2}"#, r#"{"eos_token_id": [5, 7]}"#, r#"{}"#, &[2, 5, 7][..]),
            (
                r#"{"eos_token_id": null}"#,
                r#"{}"#,
                r#"{"eos_token": {"content": "<|end|>"}}"#,
                &[fixture::END],
            ),
            (r#"{}"#, r#"{"eos_token_id": 9}"#, r#"{"eos_token": "not a token"}"#, &[9]),
            // As Python writes and reads it.
            (r#"{"eos_token_id": 2.0}"#, r#"{"eos_token_id": [5.0], "x": NaN}"#, "\u{feff}{}", &[2, 5]),
        ] {
            let dir = fixture::model_dir();
            for (file, text) in [
                ("config.json", config),
                ("generation_config.json", generation),
                ("tokenizer_config.json", tokenizer_config),
            ] {
                std::fs::write(dir.path().join(file), text).unwrap();
            }
            assert_eq!(ChatTokenizer::load(dir.path()).unwrap().eos_token_ids().as_ref(), expected);
        }
    }

    #[test]
    fn broken_tokenizer_files_are_named() {
        for (file, content, expected) in [
            ("tokenizer.json", "{\"version\": \"1.0\"", "tokenizer.json is broken"),
            ("tokenizer.json", "{}", "tokenizer.json is broken"),
            ("config.json", "[", "config.json is broken"),
            ("config.json", r#"{"eos_token_id": "two"}"#, "config.json is broken: eos_token_id is \"two\""),
            ("chat_template.jinja", "{% if %}", "chat_template.jinja is broken"),
        ] {
            let dir = fixture::model_dir();
            std::fs::write(dir.path().join(file), content).unwrap();
            let error = ChatTokenizer::load(dir.path()).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let dir = fixture::model_dir();
        std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
        let error = ChatTokenizer::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json is missing, and tokenizer.model is not read"), "{error}");
    }

    #[test]
    fn chat_templates_are_read_in_every_form() {
        let named = r#"[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]"#;
        for (jinja, json, config, expected) in [
            (Some("J"), Some(r#""F""#), r#""C""#, Some("J")),
            (None, Some(r#""F""#), r#""C""#, Some("F")),
            (None, None, r#""C""#, Some("C")),
            (None, None, named, Some("D")),
            (None, None, r#"{"default": "D", "rag": "R"}"#, Some("D")),
            (None, Some(r#"{"default": "D"}"#), "null", Some("D")),
            // An empty one is none.
            (Some("\n"), None, r#""C""#, Some("C")),
            (None, Some(r#""""#), r#""C""#, Some("C")),
            (None, None, r#""""#, None),
            (None, None, r#"{"rag": "R"}"#, None),
        ] {
            let dir = fixture::model_dir();
            std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
            let template = |text: &str| format!(r#"{{"chat_template": {text}, "eos_token": "<|end|>"}}"#);
            let files = [
                ("chat_template.jinja", jinja.map(str::to_owned)),
                ("chat_template.json", json.map(template)),
                ("tokenizer_config.json", Some(template(config))),
            ];
            for (file, text) in files {
                text.iter().for_each(|text| std::fs::write(dir.path().join(file), text).unwrap());
            }
            let tokens = ChatTokenizer::load(dir.path()).unwrap();
            let messages = say("hi");
            let chat = prompt_of(&messages);
            let said =
                tokens.templates.as_ref().map(|templates| templates.of(&chat).0.render(&chat).unwrap());
            assert_eq!(said.as_deref(), expected);
            assert_eq!(tokens.has_chat_template(), expected.is_some());
            let refused = matches!(prompt(&tokens, "hi"), Err(TokenizerError::NoTemplate));
            assert_eq!(refused, expected.is_none());
        }
    }

    #[test]
    fn draft_model_must_share_the_tokenizer() {
        let (model, same, other) = (fixture::model_dir(), fixture::model_dir(), fixture::model_dir());
        assert!(ChatTokenizer::check_draft(model.path(), same.path()).is_ok());
        let path = other.path().join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
        let id = vocabulary.remove("a").unwrap();
        vocabulary.insert("a as well".into(), id);
        std::fs::write(&path, json.to_string()).unwrap();
        let error = ChatTokenizer::check_draft(model.path(), other.path()).unwrap_err().to_string();
        assert!(error.contains("has another tokenizer than") && error.contains("1 of "), "{error}");
        assert!(error.contains("\"a\", which is") && error.contains("and none in the other"), "{error}");
    }
}
