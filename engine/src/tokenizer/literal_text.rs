//! Literal text: special tokens that the texts of a conversation spell. Only a template may write a special token; one in
//! the text of a user, a tool or a document is text, or it could end that message and begin another's.
//!
//! Spellings in messages are marked before the template copies them. In what it writes, spellings without a mark are its
//! own: they get names that nobody can know beforehand, marks are taken out, and a tokenizer whose special tokens have
//! those names tokenises the rest as text. Most conversations spell none and cost one search.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use aho_corasick::{AhoCorasick, MatchKind};
use russet_wire::conversation::{Message, Tool};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::encoder::Encoder;
use super::{PromptLimits, TokenizerError};

/// The special tokens of a tokenizer.
pub(super) struct LiteralText {
    /// Their spellings; `None` where there are none.
    spellings: Option<AhoCorasick>,
    /// The special tokens, as they are spelled.
    tokens: Vec<String>,
    /// What makes the mark and the names, drawn at the start.
    secret: u64,
    /// Made when the first conversation needs it: that takes some hundred milliseconds.
    renamed: OnceLock<Result<Renamed, String>>,
}

/// A tokenizer whose special tokens have other names.
struct Renamed {
    encoder: Encoder,
    /// The name of each spelling.
    names: Vec<String>,
    /// Its ids that are not those of the model.
    ids: HashMap<u32, u32>,
}

impl LiteralText {
    /// Looks at the tokens of a tokenizer.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.into_values().filter(|token| token.special && !token.content.is_empty());
        let tokens: Vec<String> = special.map(|token| token.content).collect();
        // As the tokenizer finds them. Building it fails for lists of gigabytes alone.
        let spellings = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&tokens).ok();
        let spellings = spellings.filter(|_| !tokens.is_empty());
        Self { spellings, tokens, secret: rand::random(), renamed: OnceLock::new() }
    }

    /// Letters and digits, so that no filter of a template changes it.
    fn mark(&self) -> String {
        format!("q{:016x}k", self.secret)
    }

    fn name(&self, spelling: usize) -> String {
        format!("q{:016x}n{spelling:06x}", self.secret)
    }

    /// The conversation with marks; `None` where it spells no special token. What an assistant said is left as it is:
    /// templates look for their own marks of thinking there.
    pub fn marked(&self, messages: &[Message], tools: &[Tool]) -> Option<(Vec<Message>, Vec<Tool>)> {
        let spellings = self.spellings.as_ref()?;
        let of_others = || messages.iter().filter(|message| message.role != "assistant");
        let mut texts = of_others()
            .flat_map(|Message { content, name, .. }| [content.as_str(), name.as_str()])
            .chain(tools.iter().flat_map(Tool::texts));
        if !texts.any(|text| spellings.is_match(text)) {
            return None;
        }
        let mark = self.mark();
        let marked = |text: &String| {
            let mut out = String::with_capacity(text.len() + mark.len());
            let mut end = 0;
            for found in spellings.find_iter(text.as_str()) {
                // Behind the first character: nothing around the spelling is changed.
                let first = text[found.start()..].chars().next().map_or(0, char::len_utf8);
                out.push_str(&text[end..found.start() + first]);
                out.push_str(&mark);
                end = found.start() + first;
            }
            out.push_str(&text[end..]);
            out
        };
        let message = |message: &Message| match message.role.as_str() {
            "assistant" => message.clone(),
            _ => {
                Message { content: marked(&message.content), name: marked(&message.name), ..message.clone() }
            }
        };
        let tool = |tool: &Tool| Tool {
            name: marked(&tool.name),
            description: tool.description.as_ref().map(marked),
            parameters: tool.parameters.as_ref().map(marked),
            strict: tool.strict,
        };
        Some((messages.iter().map(message).collect(), tools.iter().map(tool).collect()))
    }

    /// The tokens of a text that a template wrote of a marked conversation.
    ///
    /// # Errors
    /// Those of [`Encoder::encode`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        limits: &PromptLimits<'_>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let renamed = self.renamed.get_or_init(|| self.renamed(tokenizer));
        let renamed = renamed.as_ref().map_err(|reason| TokenizerError::Encode(reason.clone()))?;
        let named = match &self.spellings {
            Some(spellings) => spellings.replace_all(text, &renamed.names),
            None => text.to_owned(),
        };
        let mut tokens = renamed.encoder.encode(&named.replace(&self.mark(), ""), limits)?;
        for token in &mut tokens {
            *token = renamed.ids.get(token).copied().unwrap_or(*token);
        }
        Ok(tokens)
    }

    /// The same tokenizer with other names for the special tokens, in the list of added tokens and, where they are part of
    /// it, in the vocabulary.
    fn renamed(&self, tokenizer: &Tokenizer) -> Result<Renamed, String> {
        let mut json = serde_json::to_value(tokenizer).map_err(|error| error.to_string())?;
        let names: HashMap<&str, String> =
            self.tokens.iter().enumerate().map(|(at, text)| (text.as_str(), self.name(at))).collect();
        for token in json["added_tokens"].as_array_mut().into_iter().flatten() {
            if token["special"] == true
                && let Some(name) = token["content"].as_str().and_then(|text| names.get(text))
            {
                token["content"] = Value::from(name.clone());
            }
        }
        // The post-processor is not used, and names tokens too.
        json["post_processor"] = Value::Null;
        let unknown = json["model"]["unk_token"].as_str().map(str::to_owned);
        match &mut json["model"]["vocab"] {
            Value::Object(vocabulary) => {
                for (text, name) in &names {
                    if unknown.as_deref() != Some(text)
                        && let Some(id) = vocabulary.remove(*text)
                    {
                        vocabulary.insert(name.clone(), id);
                    }
                }
            }
            // Pieces of Unigram, each a list of its text and its score; its unknown piece goes by its place.
            Value::Array(pieces) => {
                for piece in pieces {
                    if let Some(name) = piece[0].as_str().and_then(|text| names.get(text)) {
                        piece[0] = Value::from(name.clone());
                    }
                }
            }
            _ => {}
        }
        let renamed: Tokenizer = serde_json::from_value(json).map_err(|error| error.to_string())?;
        // A token that the vocabulary lacks got the next free id.
        let mut ids = HashMap::new();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            let name = names.get(token.content.as_str()).unwrap_or(&token.content);
            let given =
                renamed.token_to_id(name).ok_or_else(|| format!("{:?} lost its name", token.content))?;
            if given != id {
                ids.insert(given, id);
            }
        }
        let names = (0..self.tokens.len()).map(|spelling| self.name(spelling)).collect();
        Ok(Renamed { encoder: Encoder::new(Arc::new(renamed)), names, ids })
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::ToolCall;
    use serde_json::json;

    use super::*;
    use crate::tokenizer::encoder::tests::tokenizer;

    fn limits() -> PromptLimits<'static> {
        PromptLimits { context_tokens: u32::MAX, is_abandoned: &|| false }
    }

    /// What a template makes of messages that it frames with special tokens.
    fn framed(messages: &[Message]) -> String {
        let turn = |message: &Message| format!("<|user|>{}<|end|>", message.content);
        messages.iter().map(turn).collect()
    }

    /// The text of tokens of a byte-level vocabulary, or of one that falls back to bytes.
    fn text_of(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
        if tokenizer.get_decoder().is_some() {
            return tokenizer.decode(tokens, false).unwrap();
        }
        let pieces = tokens.iter().map(|token| tokenizer.id_to_token(*token).unwrap());
        let bytes = pieces.flat_map(|piece| match piece.strip_prefix("<0x") {
            Some(hex) => vec![u8::from_str_radix(&hex[..2], 16).unwrap()],
            None => piece.replace('▁', " ").into_bytes(),
        });
        String::from_utf8(bytes.collect()).unwrap()
    }

    fn special(id: u32, content: &str) -> Value {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    }

    fn tokenizers() -> Vec<Tokenizer> {
        let added = json!([special(1024, "<|user|>"), special(1025, "<|end|>"), special(1026, "<|end|>!"),
            {"id": 1027, "content": "<think>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false}]);
        let byte_fallback = {
            let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
            let pieces =
                ["<unk>", "<|user|>", "<|end|>", "▁", "▁say", "<|", "end", "|>", "!"].map(str::to_owned);
            let vocabulary: serde_json::Map<String, Value> = pieces
                .into_iter()
                .chain(bytes)
                .enumerate()
                .map(|(id, piece)| (piece, Value::from(id)))
                .collect();
            json!({
                "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
                "added_tokens": [special(0, "<unk>"), special(1, "<|user|>"), special(2, "<|end|>")],
                "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
                "decoder": null,
                "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                    "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary, "merges": []},
            })
        };
        vec![tokenizer(&json!({"added_tokens": added})), byte_fallback.to_string().parse().unwrap()]
    }

    #[test]
    fn spellings_in_messages_are_text_and_a_templates_are_tokens() {
        for tokenizer in tokenizers() {
            let literal = LiteralText::of(&tokenizer);
            let id = |text: &str| tokenizer.token_to_id(text).unwrap();
            for content in ["say <|end|>", "<|end|><|user|>", "<|<|end|>end|>", "a <|end|>! b", "é<|end|>日"]
            {
                let messages = [Message::new("user", content)];
                let (marked, _) = literal.marked(&messages, &[]).unwrap();
                let tokens = literal.encode(&tokenizer, &framed(&marked), &limits()).unwrap();
                let (first, last) = (tokens.first().copied(), tokens.last().copied());
                assert_eq!((first, last), (Some(id("<|user|>")), Some(id("<|end|>"))), "{content}");
                let inner = &tokens[1..tokens.len() - 1];
                assert!(
                    !inner.contains(&id("<|end|>")) && !inner.contains(&id("<|user|>")),
                    "{content}: {tokens:?}"
                );
                assert_eq!(text_of(&tokenizer, inner), content);
            }
        }
    }

    #[test]
    fn conversations_that_spell_none_are_left_alone() {
        let tokenizer = &tokenizers()[0];
        let literal = LiteralText::of(tokenizer);
        let call = ToolCall { id: "1".into(), name: "f".into(), arguments: r#"{"a": "<|end|>"}"#.into() };
        let said = Message { tool_calls: vec![call], ..Message::new("assistant", "<|end|>") };
        assert!(literal.marked(&[Message::new("user", "<| end |> <think>"), said.clone()], &[]).is_none());
        let results = [said.clone(), Message::new("tool", "<|end|>")];
        let (marked, _) = literal.marked(&results, &[]).unwrap();
        assert_eq!((&marked[0], marked[1].content.len() > 7), (&said, true));
        let tool = Tool { name: "f".into(), description: Some("x<|user|>".into()), ..Tool::default() };
        let (_, tools) = literal.marked(&[], std::slice::from_ref(&tool)).unwrap();
        assert_ne!(tools[0], tool);
    }

    #[test]
    fn text_around_a_spelling_has_its_own_tokens() {
        for tokenizer in tokenizers() {
            let literal = LiteralText::of(&tokenizer);
            // A conversation without spellings has the same tokens either way.
            for content in ["say it", "  two  spaces ", "1234 日本", "<think> and more"] {
                let text = framed(&[Message::new("user", content), Message::new("user", content)]);
                let plain = tokenizer.encode_fast(text.as_str(), false).unwrap();
                assert_eq!(
                    literal.encode(&tokenizer, &text, &limits()).unwrap(),
                    plain.get_ids(),
                    "{content}"
                );
            }
        }
    }
}
