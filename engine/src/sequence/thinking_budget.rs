//! The budget of a response's thinking: after so many tokens the block is closed as the model would close it. A function
//! of the tokens alone. Pure.

/// Counts the tokens of thinking.
#[derive(Clone, Debug, Default)]
pub struct ThinkingBudget {
    /// Tokens that are left; `None` without a budget.
    left: Option<u32>,
    /// The tokens that close a block.
    end: Vec<u32>,
    /// How many of them are written.
    written: usize,
}

impl ThinkingBudget {
    /// So many tokens; `end` closes a block. Without tokens that close it there is no budget.
    pub fn new(tokens: u32, end: Vec<u32>) -> Self {
        Self { left: Some(tokens).filter(|_| !end.is_empty()), end, written: 0 }
    }

    /// Whether the next token may be one that it decides.
    pub fn is_set(&self) -> bool {
        self.left.is_some()
    }

    /// The next token, where the budget decides it; `in_reasoning` is whether the block is open.
    pub fn forced(&self, in_reasoning: bool) -> Option<u32> {
        let is_closing = self.written > 0 || (in_reasoning && self.left == Some(0));
        self.end.get(self.written).copied().filter(|_| is_closing)
    }

    /// Takes the next token, before which the block was open or not.
    pub fn count(&mut self, token: u32, in_reasoning: bool) {
        match self.forced(in_reasoning) {
            Some(forced) if forced == token => self.written += 1,
            Some(_) => self.written = 0,
            None if in_reasoning => self.left = self.left.map(|left| left.saturating_sub(1)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a model writes that thinks in 1, if it may.
    fn written(budget: Option<u32>, opened: bool) -> Vec<u32> {
        let mut budget =
            budget.map_or_else(ThinkingBudget::default, |tokens| ThinkingBudget::new(tokens, vec![8, 9]));
        let mut tokens = Vec::new();
        while tokens.len() < 6 {
            let in_reasoning = opened && !tokens.ends_with(&[8, 9]) && !tokens.contains(&9);
            let token = budget.forced(in_reasoning).unwrap_or(1);
            budget.count(token, in_reasoning);
            tokens.push(token);
        }
        tokens
    }

    #[test]
    fn thinking_ends_after_its_budget_once() {
        assert_eq!(written(None, true), [1, 1, 1, 1, 1, 1]);
        assert_eq!(written(Some(0), true), [8, 9, 1, 1, 1, 1]);
        assert_eq!(written(Some(2), true), [1, 1, 8, 9, 1, 1]);
        assert_eq!(written(Some(2), false), [1, 1, 1, 1, 1, 1]);
        assert!(!ThinkingBudget::new(3, Vec::new()).is_set());
    }
}
