//! The bytes of each token. A tokenizer says how tokens become text; most vocabularies spell bytes in one of two ways.

use std::collections::HashMap;
use std::sync::LazyLock;

use russet_chat::grammar::TokenText;
use serde_json::Value;
use tokenizers::Tokenizer;

/// How tokens spell bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// A character for each byte, as in GPT-2.
    ByteLevel,
    /// Characters, with a mark for spaces, and `<0x0A>` for single bytes, as in SentencePiece.
    Pieces { space: Option<char> },
}

/// What each token is, by id; empty where the tokenizer spells no bytes.
pub(super) fn token_texts(tokenizer: &Tokenizer) -> Vec<TokenText> {
    let decoder = serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default();
    let Some(spelling) = spelling(&decoder) else { return Vec::new() };
    let added = tokenizer.get_added_vocabulary();
    let of_added = added.get_added_tokens_decoder();
    let vocabulary = tokenizer.get_vocab(true);
    let size = vocabulary.values().max().map_or(0, |id| *id as usize + 1);
    let mut texts = vec![TokenText::None; size];
    for (token, id) in vocabulary {
        texts[id as usize] = match of_added.get(&id) {
            Some(_) if added.is_special_token(&token) => TokenText::Special(token),
            // Added tokens are text as they stand.
            Some(_) => TokenText::Bytes(token.into_bytes()),
            None => spelling.bytes(&token).map_or(TokenText::None, TokenText::Bytes),
        };
    }
    texts
}

/// By the tokenizer's decoders.
fn spelling(decoder: &Value) -> Option<Spelling> {
    let nested = decoder["decoders"].as_array().into_iter().flatten();
    let all: Vec<&Value> = std::iter::once(decoder).chain(nested).collect();
    let of = |kind: &str| all.iter().find(|one| one["type"] == kind);
    if of("ByteLevel").is_some() {
        return Some(Spelling::ByteLevel);
    }
    let single = |text: &Value| {
        let mut characters = text.as_str()?.chars();
        characters.next().filter(|_| characters.next().is_none())
    };
    if let Some(space) = of("Metaspace").and_then(|one| single(&one["replacement"])) {
        return Some(Spelling::Pieces { space: Some(space) });
    }
    let space =
        of("Replace").filter(|one| one["content"] == " ").and_then(|one| single(&one["pattern"]["String"]));
    (of("ByteFallback").is_some() || space.is_some()).then_some(Spelling::Pieces { space })
}

impl Spelling {
    fn bytes(self, token: &str) -> Option<Vec<u8>> {
        match self {
            Self::ByteLevel => token.chars().map(|c| BYTE_CHARACTERS.get(&c).copied()).collect(),
            Self::Pieces { space } => {
                let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                if let Some(byte) = byte.filter(|byte| byte.len() == 2) {
                    return u8::from_str_radix(byte, 16).ok().map(|byte| vec![byte]);
                }
                Some(space.map_or_else(|| token.to_owned(), |space| token.replace(space, " ")).into_bytes())
            }
        }
    }
}

/// GPT-2's characters: bytes that are printable stand for themselves, the others follow behind U+00FF.
static BYTE_CHARACTERS: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let is_itself = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..);
    let own = (0..=255).filter(is_itself).map(|byte| (char::from(byte), byte));
    let others = (0..=255).filter(|byte| !is_itself(byte));
    let others = (0x100..).filter_map(char::from_u32).zip(others);
    own.chain(others).collect()
});
