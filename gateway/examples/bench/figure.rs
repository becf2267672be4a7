//! A figure of the benchmark, as a line of JSON.

use serde_json::{Value, json};

/// A figure without its numbers.
pub struct Figure(Value);

/// What was measured.
pub fn figure(what: &str) -> Figure {
    Figure(json!({"what": what}))
}

impl Figure {
    /// Ours and the peer's; a goal is about their ratio.
    pub fn peer(self, ours: f64, peer: f64, unit: &str) -> Self {
        self.numbers(ours, peer, unit, true)
    }

    /// Ours, to which a goal applies, and another one beside it.
    pub fn beside(self, ours: f64, other: f64, unit: &str) -> Self {
        self.numbers(ours, other, unit, false)
    }

    pub fn at_least(self, bound: f64) {
        self.print("at_least", json!(bound));
    }

    pub fn at_most(self, bound: f64) {
        self.print("at_most", json!(bound));
    }

    pub fn no_goal(self) {
        self.print("no_goal", Value::Null);
    }

    fn numbers(mut self, ours: f64, peer: f64, unit: &str, by_ratio: bool) -> Self {
        for (name, value) in [
            ("ours", json!(ours)),
            ("peer", json!(peer)),
            ("unit", json!(unit)),
            ("by_ratio", json!(by_ratio)),
        ] {
            self.0[name] = value;
        }
        self
    }

    fn print(mut self, goal: &str, bound: Value) {
        self.0[goal] = bound;
        println!("{}", self.0);
    }
}
