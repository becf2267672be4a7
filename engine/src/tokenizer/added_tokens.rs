//! The tokens of a model folder: those of tokenizer.json, and added ones that only other files name. A template writes
//! them, so a file that is not read makes prompts wrong in silence. Ids are as the files say, or the model is refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use russet_chat::template::SpecialTokens;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::folder::TokenizerFolder;
use super::{TokenizerError, load_tokenizer, special_token};

/// Names of special tokens in tokenizer_config.json and special_tokens_map.json.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// The lists of further ones; the second is Transformers' newer name.
const MORE_SPECIAL_TOKENS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The tokenizer of a folder with all added tokens.
pub(super) fn load(folder: &TokenizerFolder) -> Result<Tokenizer, TokenizerError> {
    let mut tokenizer = load_tokenizer(folder)?;
    let config = folder.path("tokenizer_config.json");
    let fields = folder.read_json("tokenizer_config.json")?.unwrap_or_default();
    let decoder = fields["added_tokens_decoder"].as_object().into_iter().flatten();
    let decoder = decoder.filter_map(|(id, token)| Some((id.parse::<u64>().ok()?, token_of(token)?)));
    // In the order of their ids, which are given in this order too.
    add(&mut tokenizer, &config, decoder.collect())?;
    let path = folder.path("added_tokens.json");
    let added = folder.read_json("added_tokens.json")?.unwrap_or_default();
    let added = added.as_object().into_iter().flatten();
    let added = added.filter_map(|(text, id)| Some((id.as_u64()?, AddedToken::from(text.clone(), false))));
    add(&mut tokenizer, &path, added.collect())?;
    let map = folder.read_json("special_tokens_map.json")?.unwrap_or_default();
    // Without an id these only say which tokens of the vocabulary are special.
    let special = special_tokens(&fields).chain(special_tokens(&map));
    let special = special.filter(|text| tokenizer.token_to_id(text).is_some() && !is_added(&tokenizer, text));
    let special: Vec<AddedToken> = special.map(|text| AddedToken::from(text, true)).collect();
    insert(&mut tokenizer, special);
    Ok(tokenizer)
}

/// Adds those tokens that the tokenizer does not have, under their ids.
fn add(
    tokenizer: &mut Tokenizer,
    path: &Path,
    tokens: BTreeMap<u64, AddedToken>,
) -> Result<(), TokenizerError> {
    let missing: Vec<AddedToken> =
        tokens.values().filter(|token| !is_added(tokenizer, &token.content)).cloned().collect();
    insert(tokenizer, missing);
    for (id, token) in tokens {
        let given = tokenizer.token_to_id(&token.content);
        if given.map(u64::from) != Some(id) {
            let instead = match given {
                Some(given) => format!("gives it {given}"),
                None => "cannot have it".to_owned(),
            };
            let (path, text) = (PathBuf::from(path), token.content);
            return Err(TokenizerError::AddedToken { path, text, id, instead });
        }
    }
    Ok(())
}

fn insert(tokenizer: &mut Tokenizer, tokens: Vec<AddedToken>) {
    // It fails for a normalizer that fails; what needs an id checks it.
    let _ = tokenizer.add_tokens(tokens);
}

fn is_added(tokenizer: &Tokenizer, text: &str) -> bool {
    tokenizer.get_added_vocabulary().get_vocab().contains_key(text)
}

/// An entry of `added_tokens_decoder`; flags that are left out are off, as Transformers has them.
fn token_of(token: &Value) -> Option<AddedToken> {
    let flag = |name: &str| token[name].as_bool();
    let special = flag("special").unwrap_or(false);
    let content = special_token(token).filter(|text| !text.is_empty())?;
    Some(
        AddedToken::from(content, special)
            .normalized(flag("normalized").unwrap_or(!special))
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false)),
    )
}

fn special_tokens(fields: &Value) -> impl Iterator<Item = String> {
    let more = MORE_SPECIAL_TOKENS.iter().flat_map(|name| match &fields[name] {
        Value::Array(tokens) => tokens.iter().filter_map(special_token).collect(),
        Value::Object(named) => named.values().filter_map(special_token).collect(),
        _ => Vec::new(),
    });
    let named = SPECIAL_TOKENS.iter().filter_map(|name| special_token(&fields[name]));
    named.chain(more).filter(|text| !text.is_empty()).collect::<Vec<_>>().into_iter()
}

/// The special tokens that have a name, for chat templates: of tokenizer_config.json, then of special_tokens_map.json.
pub(super) fn named(folder: &TokenizerFolder, config: &Value) -> Result<SpecialTokens, TokenizerError> {
    let map = folder.read_json("special_tokens_map.json")?.unwrap_or_default();
    let mut named = SpecialTokens::new();
    for fields in [config, &map] {
        let more = MORE_SPECIAL_TOKENS.iter().filter_map(|name| fields[name].as_object()).flatten();
        let tokens = SPECIAL_TOKENS.iter().map(|name| (*name, &fields[name]));
        for (name, token) in tokens.chain(more.map(|(name, token)| (name.as_str(), token))) {
            if let Some(text) = special_token(token) {
                named.entry(name.to_owned()).or_insert(text);
            }
        }
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, ASSISTANT, BEGIN, END, USER, token_of_byte};
    use serde_json::json;

    fn load_folder(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        load(&TokenizerFolder::open(dir)?)
    }

    /// A folder whose tokenizer.json lacks the last `count` of its four added tokens, with other files beside.
    fn folder(count: usize, files: &[(&str, Value)]) -> tempfile::TempDir {
        let dir = fixture::model_dir();
        let path = dir.path().join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let added = json["added_tokens"].as_array_mut().unwrap();
        added.truncate(added.len() - count);
        for (file, fields) in
            [("tokenizer.json", &json)].into_iter().chain(files.iter().map(|(file, json)| (*file, json)))
        {
            std::fs::write(dir.path().join(file), fields.to_string()).unwrap();
        }
        dir
    }

    #[test]
    fn added_tokens_of_every_file_are_one_token() {
        let decoder = |ids: [u32; 2]| {
            json!({"added_tokens_decoder": {
                ids[0].to_string(): {"content": "<|assistant|>", "special": true},
                ids[1].to_string(): {"content": "<|end|>", "special": true}}})
        };
        for files in [
            vec![("tokenizer_config.json", decoder([ASSISTANT, END]))],
            vec![("added_tokens.json", json!({"<|end|>": END, "<|assistant|>": ASSISTANT}))],
            vec![
                ("tokenizer_config.json", decoder([ASSISTANT, END])),
                ("added_tokens.json", json!({"<|end|>": END})),
            ],
        ] {
            let tokenizer = load_folder(folder(2, &files).path()).unwrap();
            let text = "<|begin|><|user|>a<|end|><|assistant|>";
            let ids = tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
            assert_eq!(ids, [BEGIN, USER, token_of_byte(b'a'), END, ASSISTANT], "{files:?}");
        }
        for (file, fields, said) in [
            (
                "tokenizer_config.json",
                decoder([ASSISTANT, 300]),
                "\"<|end|>\" as 300, but tokenizer.json gives it 259",
            ),
            ("added_tokens.json", json!({"a": 7}), "\"a\" as 7, but tokenizer.json gives it 97"),
        ] {
            let error = load_folder(folder(2, &[(file, fields)]).path()).unwrap_err().to_string();
            assert!(error.contains(file) && error.contains(said), "{error}");
        }
    }

    #[test]
    fn templates_know_special_tokens_by_their_names() {
        let dir = folder(
            0,
            &[
                ("special_tokens_map.json", json!({"bos_token": "<m>", "unk_token": {"content": "<u>"}})),
                (
                    "tokenizer_config.json",
                    json!({"bos_token": "<b>", "extra_special_tokens": {"image_token": "<i>"}}),
                ),
            ],
        );
        let folder = TokenizerFolder::open(dir.path()).unwrap();
        let config = folder.read_json("tokenizer_config.json").unwrap().unwrap();
        let named = named(&folder, &config).unwrap();
        let named: Vec<(&str, &str)> =
            named.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert_eq!(named, [("bos_token", "<b>"), ("image_token", "<i>"), ("unk_token", "<u>")]);
    }

    #[test]
    fn special_tokens_map_marks_tokens_of_the_vocabulary() {
        for (file, fields) in [
            ("special_tokens_map.json", json!({"additional_special_tokens": ["a", {"content": "b"}]})),
            ("tokenizer_config.json", json!({"extra_special_tokens": {"one": "a"}, "pad_token": "b"})),
        ] {
            let tokenizer = load_folder(folder(0, &[(file, fields)]).path()).unwrap();
            let ids: Vec<u32> = "abc".bytes().map(token_of_byte).collect();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), "c", "{file}");
        }
        // One that no file gives an id is none.
        let unknown = json!({"additional_special_tokens": ["<|unknown|>"]});
        let tokenizer = load_folder(folder(0, &[("special_tokens_map.json", unknown)]).path()).unwrap();
        assert_eq!(tokenizer.token_to_id("<|unknown|>"), None);
    }
}
