//! SentencePiece's vocabularies: pieces with scores, of which the merges follow. The pair that makes the piece of the
//! highest score is merged first, so a piece has a merge for each way to cut it into two others.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    metadata::{MetaList, Metadata},
    tokenizer::{TokenType, Vocabulary},
};

pub(super) const SCORES: &str = "tokenizer.ggml.scores";
/// What stands for a space in pieces.
const SPACE: &str = "\u{2581}";
/// Longest piece: SentencePiece makes them of up to 16 characters, and Gemma's has runs of 31 spaces.
const MAX_PIECE_BYTES: usize = 128;
/// Most merges for each piece, on average; published vocabularies have two.
const MAX_MERGES_EACH: usize = 8;

/// Whether a space is put before the text.
pub(super) fn has_prefix(metadata: &Metadata<'_>) -> bool {
    metadata.get("tokenizer.ggml.add_space_prefix") != Some(super::metadata::MetaValue::Flag(false))
}

/// Normalizer and decoder, as `tokenizer.json` has them.
pub(super) fn steps(has_prefix: bool) -> (Value, Value) {
    let replace =
        |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", SPACE)];
    let mut decoders = vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if has_prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    (
        json!({"type": "Sequence", "normalizers": normalizers}),
        json!({"type": "Sequence", "decoders": decoders}),
    )
}

/// The merges, each as the ids of its two pieces, the first one first.
pub(super) fn merges(
    vocabulary: &Vocabulary<'_>,
    scores: Option<MetaList<'_>>,
) -> Result<Vec<(u32, u32)>, String> {
    let tokens = &vocabulary.tokens;
    let scores: Vec<f32> = scores.into_iter().flat_map(MetaList::numbers).map(|score| score as f32).collect();
    if scores.len() != tokens.len() {
        return Err(format!("it has {} tokens and scores of {}", tokens.len(), scores.len()));
    }
    let is_piece = |kind: TokenType| matches!(kind, TokenType::Normal | TokenType::UserDefined);
    let pieces = || tokens.iter().zip(0_u32..).filter(|((_, kind), _)| is_piece(*kind));
    let ids: HashMap<&str, u32> = pieces().map(|((text, _), id)| (*text, id)).collect();
    let mut merges = Vec::new();
    for ((text, kind), id) in pieces() {
        if *kind == TokenType::UserDefined {
            // Found before text is merged.
            continue;
        }
        if text.len() > MAX_PIECE_BYTES {
            return Err(format!(
                "token {id} has {} bytes, more than the limit of {MAX_PIECE_BYTES}",
                text.len()
            ));
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                merges.push((id, left, right));
            }
        }
        let limit = tokens.len().saturating_mul(MAX_MERGES_EACH);
        if merges.len() > limit {
            return Err(format!("its {} tokens have more than {limit} merges, the limit", tokens.len()));
        }
    }
    let score = |id: u32| scores.get(id as usize).copied().unwrap_or(0.0);
    merges.sort_by(|a, b| score(b.0).total_cmp(&score(a.0)).then(a.cmp(b)));
    Ok(merges.into_iter().map(|(_, left, right)| (left, right)).collect())
}
