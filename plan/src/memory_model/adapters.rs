//! Memory of a deployment's adapters. Each rank loads its part of each of them; how large that is follows from tensors,
//! which headers do not tell one by one. All of them whole are an upper bound, and small beside a model.

use std::fmt;

use russet_crds::Adapter;
use russet_model::adapter::AdapterShape;
use russet_model::cost::PREFILL_TOKENS;

use crate::quantity::show;

/// An adapter; every rank reserves all of it, though it loads its part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeployedAdapter {
    /// Its name, and the Model of the same namespace with its files.
    pub adapter: Adapter,
    /// Its sizes.
    pub shape: AdapterShape,
}

/// Memory that adapters add on the node of every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterOverhead {
    /// Number of adapters.
    pub adapters: usize,
    /// Bytes of their weights.
    pub weights: u64,
    /// Rows of the longest matrix that one of them changes.
    pub widest: u64,
}

impl fmt::Display for AdapterOverhead {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} for {}, on every rank", show(self.weights), count_text(self.adapters))
    }
}

impl AdapterOverhead {
    /// Bytes of one value of a piece of a prompt where a matrix is changed: in 32 bits, before and after it is scaled.
    /// Matrices are computed one after another, so the longest of all adapters counts.
    const VALUE_BYTES: u64 = 8;

    /// Of these adapters.
    pub fn of(adapters: &[DeployedAdapter]) -> Self {
        let shapes = || adapters.iter().map(|deployed| &deployed.shape);
        let weights = shapes().fold(0_u64, |sum, shape| sum.saturating_add(shape.bytes));
        let widest = shapes().map(|shape| shape.widest).max().unwrap_or(0);
        Self { adapters: adapters.len(), weights, widest }
    }

    /// Bytes of values while a piece of a prompt is computed.
    pub fn work(&self) -> u64 {
        self.widest.saturating_mul(Self::VALUE_BYTES).saturating_mul(u64::from(PREFILL_TOKENS))
    }

    /// What is said of a rank that does not fit with them; empty without adapters.
    pub fn beside(&self) -> String {
        if self.adapters == 0 { String::new() } else { format!(", with {}", count_text(self.adapters)) }
    }

    /// Their share of a memory need, as text after it; empty without adapters.
    pub fn share(&self) -> String {
        if self.adapters == 0 { String::new() } else { format!(", of it {self}") }
    }
}

fn count_text(adapters: usize) -> String {
    format!("{adapters} adapter{}", if adapters == 1 { "" } else { "s" })
}
