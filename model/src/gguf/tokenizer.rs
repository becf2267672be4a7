//! `tokenizer.json`, `tokenizer_config.json` and the chat template from the vocabulary of a GGUF file. Three
//! kinds of vocabularies are read: byte-level merges (`gpt2`), SentencePiece's with scores (`llama`), and its pieces with
//! merges (`gemma4`).

use serde_json::{Map, Value, json};

use super::{
    Gguf,
    metadata::{MetaValue, Metadata},
    pre_tokenizers::{self, PreTokenizer, pre_tokenizer},
    refuse, sentence_piece,
};
use crate::{
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
    tokenizer_files::{MAX_TEMPLATE_BYTES, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TokenizerFiles},
};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
/// Most tokens of a vocabulary; the largest published ones have 262,000.
const MAX_TOKENS: u64 = 1 << 20;
/// Most merges, for byte-level vocabularies of twice as many tokens as any has.
const MAX_MERGES: u64 = 1 << 20;
/// Most tokens that are found in text before it is split; Gemma's vocabulary has 6,400.
const MAX_ADDED: usize = 1 << 16;
/// Longest template; published ones have up to 20 kB.
/// Tokens that end a turn, whatever `eos_token_id` says: some files name only what ends a document.
const TURN_ENDS: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    // What a tool answers comes next.
    "<|tool_response>",
];

/// What a token is for, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    /// A piece of text.
    Normal,
    /// What stands for text that there is no token for.
    Unknown,
    /// Written by templates alone.
    Control,
    /// Found in text before it is split.
    UserDefined,
    /// Nothing.
    Unused,
    /// One byte.
    Byte,
}

/// The tokens of a vocabulary in the order of their ids.
pub(super) struct Vocabulary<'a> {
    pub tokens: Vec<(&'a str, TokenType)>,
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &Gguf<'a>) -> Result<Self, FileError> {
        let bad = |problem: String| FileError::BadGguf { file: gguf.files[0].0.clone(), problem };
        let list =
            gguf.metadata().list(TOKENS).ok_or_else(|| bad(format!("its metadata has no {TOKENS}")))?;
        if list.count > MAX_TOKENS {
            return Err(bad(format!(
                "its vocabulary has {} tokens, more than the limit of {MAX_TOKENS}",
                list.count
            )));
        }
        let types = gguf.metadata().list(TYPES);
        if let Some(types) = types.filter(|types| types.count != list.count) {
            return Err(bad(format!("it has {} tokens and types of {}", list.count, types.count)));
        }
        let mut types = types.map(|types| types.numbers().map(token_type));
        let mut tokens = Vec::with_capacity(list.count as usize);
        for text in list.texts() {
            let text = text.ok_or_else(|| bad(format!("token {} is no UTF-8", tokens.len())))?;
            let kind = types.as_mut().and_then(Iterator::next).unwrap_or(TokenType::Normal);
            tokens.push((text, kind));
        }
        if tokens.len() as u64 != list.count {
            return Err(bad(format!("{TOKENS} is no list of texts")));
        }
        Ok(Self { tokens })
    }

    /// The tokens that are found before text is split.
    fn added(&self) -> impl Iterator<Item = (usize, &'a str, bool)> {
        let added = |kind: TokenType| {
            matches!(kind, TokenType::Control | TokenType::UserDefined | TokenType::Unknown)
        };
        let tokens = self.tokens.iter().enumerate();
        tokens
            .filter(move |(_, (text, kind))| added(*kind) && !text.is_empty())
            .map(|(id, (text, kind))| (id, *text, *kind != TokenType::UserDefined))
    }
}

fn token_type(number: f64) -> TokenType {
    match number as i64 {
        2 => TokenType::Unknown,
        3 => TokenType::Control,
        4 => TokenType::UserDefined,
        5 => TokenType::Unused,
        6 => TokenType::Byte,
        _ => TokenType::Normal,
    }
}

/// The kind of a vocabulary.
enum Kind {
    ByteLevel(&'static PreTokenizer),
    /// Merges follow of scores.
    SentencePiece,
    /// The same pieces, with merges.
    Pieces,
}

fn kind(metadata: &Metadata<'_>) -> Result<Kind, Unsupported> {
    match metadata.text(MODEL) {
        Some("gpt2") => {
            let name = metadata.text(PRE).unwrap_or("default");
            let known = pre_tokenizer(name).ok_or_else(|| {
                let list = pre_tokenizers::list();
                refuse(PRE, format!("{:?} is not supported; supported are {list}", excerpt(name)))
            });
            known.map(Kind::ByteLevel)
        }
        Some("llama") => Ok(Kind::SentencePiece),
        Some("gemma4") => Ok(Kind::Pieces),
        Some(other) => {
            let reason =
                format!("{:?} is not supported; supported are gpt2, llama and gemma4", excerpt(other));
            Err(refuse(MODEL, reason))
        }
        None => Err(refuse(MODEL, "it is missing".to_owned())),
    }
}

/// The tokens that end an answer.
pub(super) fn end_tokens(metadata: &Metadata<'_>) -> Vec<u64> {
    let named = ["eos", "eot", "eom"].map(|name| metadata.whole(&format!("tokenizer.ggml.{name}_token_id")));
    let mut ends: Vec<u64> = named.into_iter().flatten().filter(|id| *id < MAX_TOKENS).collect();
    if let (Some(tokens), Some(types)) = (metadata.list(TOKENS), metadata.list(TYPES)) {
        let tokens =
            tokens.texts().zip(types.numbers().map(token_type)).enumerate().take(MAX_TOKENS as usize);
        let is_end = |text: Option<&str>, kind| {
            text.is_some_and(|text| TURN_ENDS.contains(&text))
                && matches!(kind, TokenType::Control | TokenType::UserDefined)
        };
        ends.extend(
            tokens.filter(|(_, (text, kind))| is_end(*text, *kind)).map(|(id, _)| id as u64).take(100),
        );
    }
    ends.sort_unstable();
    ends.dedup();
    ends
}

impl Gguf<'_> {
    /// Whether a tokenizer can be made of it, without making it.
    pub fn check_tokenizer(&self) -> Result<(), Error> {
        kind(self.metadata())?;
        Vocabulary::read(self)?;
        Ok(())
    }

    /// `tokenizer.json`.
    pub fn tokenizer(&self) -> Result<Vec<u8>, Error> {
        let kind = kind(self.metadata())?;
        let vocabulary = Vocabulary::read(self)?;
        let bad = |problem: String| FileError::BadGguf { file: self.files[0].0.clone(), problem };
        let count = vocabulary.added().count();
        if count > MAX_ADDED {
            let problem =
                format!("{count} of its tokens are no pieces of text, more than the limit of {MAX_ADDED}");
            return Err(bad(problem).into());
        }
        // Written as text: as values, a vocabulary would take ten times its bytes.
        let mut out = String::from(r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":["#);
        for (number, (id, text, special)) in vocabulary.added().enumerate() {
            let token = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                               "normalized": false, "special": special});
            separate(&mut out, number);
            out += &token.to_string();
        }
        out.push(']');
        let first_token = self.first_token(&kind, &vocabulary);
        let mut steps = |normalizer: Value, pre_tokenizer: Value, decoder: Value, model: Value| {
            for (name, step) in [
                ("normalizer", normalizer),
                ("pre_tokenizer", pre_tokenizer),
                ("post_processor", first_token.clone()),
                ("decoder", decoder),
            ] {
                out += &format!(",\"{name}\":{step}");
            }
            // The model stays open for its vocabulary and its merges.
            out += &format!(",\"model\":{}", model.to_string().trim_end_matches('}'));
        };
        let model = |more: Value| {
            let mut model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false});
            if let (Value::Object(model), Value::Object(more)) = (&mut model, more) {
                model.extend(more);
            }
            model
        };
        match kind {
            Kind::ByteLevel(pre) => {
                let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
                steps(
                    pre.normalizer(),
                    pre.steps(),
                    decoder,
                    model(json!({"ignore_merges": pre.ignore_merges})),
                );
            }
            Kind::SentencePiece | Kind::Pieces => {
                let has_prefix =
                    matches!(kind, Kind::SentencePiece) && sentence_piece::has_prefix(self.metadata());
                let unknown = vocabulary.tokens.iter().find(|(_, kind)| *kind == TokenType::Unknown);
                let more = json!({"unk_token": unknown.map(|(text, _)| text), "fuse_unk": true, "byte_fallback": true});
                let (normalizer, decoder) = sentence_piece::steps(has_prefix);
                steps(normalizer, Value::Null, decoder, model(more));
            }
        }
        write_vocabulary(&mut out, &vocabulary);
        if let Kind::SentencePiece = kind {
            let scores = self.metadata().list(sentence_piece::SCORES);
            let text = |id: u32| vocabulary.tokens.get(id as usize).map_or("", |(text, _)| text);
            let merges = sentence_piece::merges(&vocabulary, scores).map_err(bad)?;
            for (number, (left, right)) in merges.into_iter().enumerate() {
                write_merge(&mut out, number, text(left), text(right));
            }
        } else {
            self.write_merges(&mut out)?;
        }
        out += "]}}";
        Ok(out.into_bytes())
    }

    /// What puts the token that begins every text before it, where the file says so; SentencePiece's does unless it says
    /// that it does not, as in llama.cpp. Templates write that token themselves.
    fn first_token(&self, kind: &Kind, vocabulary: &Vocabulary<'_>) -> Value {
        let added = match self.metadata().get(ADD_BOS) {
            Some(MetaValue::Flag(added)) => added,
            _ => !matches!(kind, Kind::ByteLevel(_)),
        };
        let id = self.metadata().whole("tokenizer.ggml.bos_token_id").filter(|_| added);
        let text = id.and_then(|id| vocabulary.tokens.get(usize::try_from(id).ok()?)).map(|(text, _)| text);
        let (Some(id), Some(text)) = (id, text) else { return Value::Null };
        let (token, text_itself) = (
            json!({"SpecialToken": {"id": text, "type_id": 0}}),
            json!({"Sequence": {"id": "A", "type_id": 0}}),
        );
        let second = json!({"Sequence": {"id": "B", "type_id": 1}});
        json!({
            "type": "TemplateProcessing",
            "single": [token, text_itself],
            "pair": [token, text_itself, second],
            "special_tokens": {(*text): {"id": text, "ids": [id], "tokens": [text]}},
        })
    }

    /// Writes the merges that the file has.
    fn write_merges(&self, out: &mut String) -> Result<(), FileError> {
        let bad = |problem: String| FileError::BadGguf { file: self.files[0].0.clone(), problem };
        let merges = self.metadata().list(MERGES);
        let merges = merges.ok_or_else(|| bad(format!("its metadata has no {MERGES}")))?;
        if merges.count > MAX_MERGES {
            return Err(bad(format!("it has {} merges, more than the limit of {MAX_MERGES}", merges.count)));
        }
        for (number, merge) in merges.texts().enumerate() {
            let pair = merge.and_then(|merge| merge.split_once(' '));
            let (left, right) = pair.ok_or_else(|| bad(format!("merge {number} is no pair of tokens")))?;
            write_merge(out, number, left, right);
        }
        Ok(())
    }

    /// `tokenizer_config.json`: the special tokens that templates write.
    pub fn tokenizer_config(&self) -> Vec<u8> {
        let mut config = Map::new();
        for (field, key) in
            [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
        {
            let id = self.metadata().whole(&format!("tokenizer.ggml.{key}_token_id"));
            let tokens = self.metadata().list(TOKENS);
            let text =
                id.zip(tokens).and_then(|(id, tokens)| tokens.texts().nth(usize::try_from(id).ok()?)?);
            if let Some(text) = text.filter(|text| !text.is_empty() && text.len() < 1000) {
                config.insert(field.to_owned(), text.into());
            }
        }
        Value::from(config).to_string().into_bytes()
    }

    /// The chat template.
    pub fn chat_template(&self) -> Result<Option<&str>, FileError> {
        let template = self.metadata().text(CHAT_TEMPLATE).filter(|text| !text.trim().is_empty());
        if let Some(size) = template.map(str::len).filter(|size| *size as u64 > MAX_TEMPLATE_BYTES) {
            let (file, size, limit) = (TEMPLATE.to_owned(), size as u64, MAX_TEMPLATE_BYTES);
            return Err(FileError::TooLarge { file, size, limit });
        }
        Ok(template)
    }

    /// What stands beside the weights: the files of the source, and what is made of the metadata where it has none.
    pub fn complete(&self, files: &mut TokenizerFiles) -> Result<(), Error> {
        let has = |files: &TokenizerFiles, name: &str| files.names.iter().any(|own| own == name);
        if !has(files, TOKENIZER) {
            self.check_tokenizer()?;
            files.names.push(TOKENIZER.to_owned());
        }
        if !has(files, TOKENIZER_CONFIG) {
            files.judged.push((TOKENIZER_CONFIG.to_owned(), self.tokenizer_config()));
        }
        if !has(files, TEMPLATE)
            && let Some(template) = self.chat_template()?
        {
            files.names.push(TEMPLATE.to_owned());
            files.judged.push((TEMPLATE.to_owned(), template.as_bytes().to_vec()));
        }
        Ok(())
    }
}

fn separate(out: &mut String, number: usize) {
    if number > 0 {
        out.push(',');
    }
}

fn text(out: &mut String, text: &str) {
    // Texts always have a form in JSON.
    *out += &serde_json::to_string(text).unwrap_or_default();
}

/// Writes the vocabulary and opens the merges.
fn write_vocabulary(out: &mut String, vocabulary: &Vocabulary<'_>) {
    *out += ",\"vocab\":{";
    for (id, (token, _)) in vocabulary.tokens.iter().enumerate() {
        separate(out, id);
        text(out, token);
        *out += &format!(":{id}");
    }
    *out += "},\"merges\":[";
}

fn write_merge(out: &mut String, number: usize, left: &str, right: &str) {
    separate(out, number);
    out.push('[');
    text(out, left);
    out.push(',');
    text(out, right);
    out.push(']');
}
