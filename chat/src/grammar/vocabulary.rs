//! The tokens of a model as a grammar sees them: bytes of text, and special tokens, which no text is.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use llguidance::ParserFactory;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::GrammarError;

/// Maximum states of a response's lexer. Schemas of agents have some hundred.
const MAX_LEXER_STATES: usize = 20_000;

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenText {
    /// Bytes of the output's text, which may be a part of a character.
    Bytes(Vec<u8>),
    /// A special token of this name: no part of the text.
    Special(String),
    /// No token.
    None,
}

/// The tokens of a model, prepared for masks. Made once: it takes some hundred milliseconds.
pub struct Vocabulary {
    pub(super) factory: ParserFactory,
    /// Ids by name, of special tokens.
    pub(super) special: HashMap<String, u32>,
    /// Tokens that end an output.
    pub(super) ends: Arc<[u32]>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Vocabulary").field("special", &self.special.len()).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The end token of [`of_bytes`](Self::of_bytes).
    pub const END_OF_BYTES: u32 = 256;

    /// The smallest vocabulary of all texts: a token for each byte, and an end.
    pub fn of_bytes() -> Self {
        Self::of_bytes_and(&[])
    }

    /// The same, then special tokens of these names.
    pub(super) fn of_bytes_and(special: &[&str]) -> Self {
        let bytes = (0..=255).map(|byte| TokenText::Bytes(vec![byte]));
        let special = ["<end>"].iter().chain(special).map(|name| TokenText::Special((*name).to_owned()));
        let vocabulary = Self::new(bytes.chain(special).collect(), Arc::new([Self::END_OF_BYTES]));
        vocabulary.unwrap_or_else(|error| unreachable!("it has bytes and an end: {error}"))
    }

    /// Of tokens by id, and those that end an output, at least one.
    ///
    /// # Errors
    /// No token has bytes.
    pub fn new(tokens: Vec<TokenText>, ends: Arc<[u32]>) -> Result<Self, GrammarError> {
        let end = ends.first().copied().ok_or(GrammarError::NoBytes)?;
        // An end token that the tokenizer lacks is a token all the same.
        let size = tokens.len().max(end as usize + 1);
        let (mut words, mut special) = (vec![Vec::new(); size], HashMap::new());
        let mut has_bytes = false;
        for (id, token) in tokens.into_iter().enumerate() {
            match token {
                TokenText::Bytes(bytes) => {
                    has_bytes |= !bytes.is_empty();
                    // The marker begins no text: it is a byte that UTF-8 does not have.
                    if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                        words[id] = bytes;
                    }
                }
                TokenText::Special(name) => {
                    words[id] = [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
                    special.insert(name, id as u32);
                }
                TokenText::None => {}
            }
        }
        if !has_bytes {
            return Err(GrammarError::NoBytes);
        }
        let info = TokRxInfo::new(size as u32, end);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|_| GrammarError::NoBytes)?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // Of up to 2 kB each, for each response.
        limits.max_lexer_states = MAX_LEXER_STATES;
        Ok(Self { factory, special, ends })
    }
}
