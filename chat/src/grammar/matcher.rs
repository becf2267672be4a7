//! The state of one output's grammar.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;

use super::{GrammarError, Vocabulary};

/// The tokens that may follow, one bit for each, the first in the lowest bit. Tokens beyond it may not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask(Vec<u32>);

impl TokenMask {
    /// That allows one token.
    pub fn only(token: u32) -> Self {
        let mut mask = Self(vec![0; token as usize / 32 + 1]);
        mask.set(token, true);
        mask
    }

    /// Whether a token may follow.
    pub fn allows(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Its words, of 32 tokens each.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    fn set(&mut self, token: u32, allowed: bool) {
        let place = token as usize / 32;
        if allowed && place >= self.0.len() {
            self.0.resize(place + 1, 0);
        }
        if let Some(word) = self.0.get_mut(place) {
            let bit = 1 << (token % 32);
            *word = if allowed { *word | bit } else { *word & !bit };
        }
    }
}

/// Follows the tokens of one output.
pub struct GrammarMatcher {
    matcher: Matcher,
    ends: Arc<[u32]>,
    tokens: usize,
}

impl fmt::Debug for GrammarMatcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GrammarMatcher").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl GrammarMatcher {
    /// At the beginning of an output; `what` is what the request has.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        grammar: TopLevelGrammar,
        what: &str,
    ) -> Result<Self, GrammarError> {
        let refused =
            |reason: String| GrammarError::Refused { what: what.to_owned(), reason: brief(&reason) };
        // A stranger's grammar is built here: what it does to the library must not end the engine.
        let parser = catch_unwind(AssertUnwindSafe(|| vocabulary.factory.create_parser(grammar)));
        let parser = match parser {
            Ok(parser) => parser.map_err(|error| refused(format!("{error:#}")))?,
            Err(_) => return Err(refused("it cannot be compiled".to_owned())),
        };
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(reason) => Err(refused(reason)),
            None => Ok(Self { matcher, ends: vocabulary.ends.clone(), tokens: 0 }),
        }
    }

    /// The tokens that may follow. An end token may where the output may end.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`].
    pub fn mask(&mut self) -> Result<TokenMask, GrammarError> {
        let mask = self.matcher.compute_mask_or_eos();
        let mask = mask.map_err(|error| GrammarError::TooComplex { reason: brief(&error.to_string()) })?;
        let mut mask = TokenMask(mask.as_slice().to_vec());
        let may_end = self.ends.first().is_some_and(|end| mask.allows(*end));
        for end in self.ends.iter() {
            mask.set(*end, may_end);
        }
        Ok(mask)
    }

    /// The tokens that may follow, then those that may follow each of these tokens, all of which are
    /// [allowed](Self::allowed). The state does not change.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`].
    pub fn masks(&mut self, drafts: &[u32]) -> Result<Vec<TokenMask>, GrammarError> {
        let mut masks = vec![self.mask()?];
        let mut taken = 0;
        for token in drafts {
            // It says how many it took; one that may not follow leaves the state as it is.
            if self.ends.contains(token) || !matches!(self.matcher.try_consume_tokens(&[*token]), Ok(1)) {
                break;
            }
            taken += 1;
            masks.push(self.mask()?);
        }
        if taken > 0 {
            let back = self.matcher.rollback(taken);
            back.map_err(|error| GrammarError::TooComplex { reason: brief(&error.to_string()) })?;
        }
        Ok(masks)
    }

    /// How many of these tokens may follow one after the other, end tokens not among them.
    pub fn allowed(&mut self, tokens: &[u32]) -> usize {
        let texts = tokens.iter().position(|token| self.ends.contains(token)).unwrap_or(tokens.len());
        self.matcher.validate_tokens(&tokens[..texts]).unwrap_or_default()
    }

    /// Takes the next token, which is no end token.
    ///
    /// # Errors
    /// [`GrammarError::Left`]: it may not follow.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        let index = self.tokens;
        let left = |reason: String| GrammarError::Left { index, reason: brief(&reason) };
        match self.matcher.try_consume_tokens(&[token]) {
            Ok(1) => {}
            Ok(_) => return Err(left(format!("token {token} may not follow"))),
            Err(error) => return Err(left(error.to_string())),
        }
        self.tokens += 1;
        Ok(())
    }

    /// Whether nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }

    /// Whether the output may end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or_default()
    }
}

/// The first line of a message, without what names the library's own state and options.
fn brief(message: &str) -> String {
    const MAX: usize = 400;
    let line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let line = line.replace(" without 'referencing' feature", "");
    let line = line.split(". Enable '").next().unwrap_or_default();
    let short: String = line.chars().take(MAX).collect();
    short.trim().trim_end_matches('.').to_owned()
}
