//! Changes of logits before a token is sampled: biases, and penalties of tokens that are there already, as vLLM and mlx-lm
//! have them. Pure; the arrays are in `sample`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use russet_wire::request::Sampling;

use crate::dry;

/// The changes of one row of logits, each token once. A logit first grows away from 0 or towards it, then a number is
/// added.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitEdits {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// By what a positive logit is divided and a negative one multiplied; 1 changes nothing.
    pub factors: Vec<f32>,
    /// What is added.
    pub added: Vec<f32>,
}

/// Follows the tokens of a sequence for its edits.
#[derive(Clone, Debug)]
pub(crate) struct LogitEditor {
    sampling: Arc<Sampling>,
    /// Tokens over which no repeated run goes on.
    breakers: BTreeSet<u32>,
    /// All tokens, where runs are looked for.
    history: Vec<u32>,
    /// Tokens of the prompt and the output, and how often they are in the output.
    counts: BTreeMap<u32, u32>,
    /// The edits of biases alone, the same for every token.
    fixed: Option<Arc<LogitEdits>>,
}

impl LogitEditor {
    /// The editor of a sequence that begins with this prompt.
    pub(crate) fn new(sampling: Arc<Sampling>, prompt: &[u32]) -> Self {
        let mut editor = Self {
            sampling,
            breakers: BTreeSet::new(),
            history: Vec::new(),
            counts: BTreeMap::new(),
            fixed: None,
        };
        if editor.penalises_runs() {
            editor.history.extend(prompt);
        }
        if editor.penalises_tokens() {
            editor.counts.extend(prompt.iter().map(|token| (*token, 0)));
        }
        if !editor.follows_tokens() && !editor.sampling.logit_bias.is_empty() {
            editor.fixed = Some(Arc::new(editor.of_counts()));
        }
        editor
    }

    /// The tokens over which no repeated run goes on.
    pub(crate) fn set_breakers(&mut self, breakers: BTreeSet<u32>) {
        self.breakers = breakers;
    }

    /// Whether the edits of a token depend on those before it, so that all of them have to be known.
    pub(crate) fn follows_tokens(&self) -> bool {
        self.penalises_tokens() || self.penalises_runs()
    }

    fn penalises_tokens(&self) -> bool {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = *self.sampling;
        repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0
    }

    fn penalises_runs(&self) -> bool {
        self.sampling.dry.is_some()
    }

    /// Counts a token of the output.
    pub(crate) fn count(&mut self, token: u32) {
        if self.penalises_tokens() {
            *self.counts.entry(token).or_default() += 1;
        }
        if self.penalises_runs() {
            self.history.push(token);
        }
    }

    /// The edits of the next token.
    pub(crate) fn edits(&self) -> Option<Arc<LogitEdits>> {
        if self.follows_tokens() { Some(Arc::new(self.of_counts())) } else { self.fixed.clone() }
    }

    fn of_counts(&self) -> LogitEdits {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, logit_bias, dry, .. } =
            &*self.sampling;
        let runs = dry.as_ref().map(|dry| dry::penalties(dry, &self.breakers, &self.history));
        let mut runs = runs.unwrap_or_default();
        let mut edits = LogitEdits::default();
        let mut edit = |token: u32, factor: f32, added: f32| {
            edits.tokens.push(token);
            edits.factors.push(factor);
            edits.added.push(added);
        };
        for (token, count) in &self.counts {
            let presence = if *count > 0 { *presence_penalty } else { 0.0 };
            let bias = logit_bias.get(token).copied().unwrap_or_default();
            let added = bias - presence - frequency_penalty * *count as f32;
            edit(*token, *repetition_penalty, added - runs.remove(token).unwrap_or_default());
        }
        for (token, bias) in logit_bias.iter().filter(|(token, _)| !self.counts.contains_key(token)) {
            edit(*token, 1.0, *bias - runs.remove(token).unwrap_or_default());
        }
        runs.into_iter().for_each(|(token, penalty)| edit(token, 1.0, -penalty));
        edits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(sampling: Sampling, prompt: &[u32], output: &[u32]) -> Vec<(u32, f32, f32)> {
        let mut editor = LogitEditor::new(Arc::new(sampling), prompt);
        output.iter().for_each(|token| editor.count(*token));
        let LogitEdits { tokens, factors, added } =
            editor.edits().map(|edits| (*edits).clone()).unwrap_or_default();
        tokens
            .into_iter()
            .zip(factors)
            .zip(added)
            .map(|((token, factor), added)| (token, factor, added))
            .collect()
    }

    #[test]
    fn penalties_count_prompt_and_output_as_vllm_does() {
        let bias: BTreeMap<u32, f32> = [(7, -100.0), (2, 1.5)].into();
        let sampling = Sampling { logit_bias: bias.clone(), ..Sampling::default() };
        assert_eq!(edits(Sampling::default(), &[1, 2], &[3]), []);
        assert_eq!(edits(sampling, &[1, 2], &[3]), [(2, 1.0, 1.5), (7, 1.0, -100.0)]);
        // Repetition counts the prompt too; presence and frequency the output alone.
        let sampling = Sampling {
            repetition_penalty: 1.25,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: bias,
            ..Sampling::default()
        };
        assert_eq!(
            edits(sampling, &[1, 2, 1], &[3, 3, 2]),
            [(1, 1.25, 0.0), (2, 1.25, 0.75), (3, 1.25, -1.0), (7, 1.0, -100.0)]
        );
    }
}
