//! Where a model's files have what: the modules that its names begin with, and whether mlx-lm converted it.

use crate::safetensors::Headers;

/// The layout of a model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What names of the embedding, the layers and the last norm begin with.
    pub model: &'static str,
    /// What the head's name begins with.
    pub head: &'static str,
    /// Whether it is the original export, not one that mlx-lm converted.
    pub is_original: bool,
}

impl Layout {
    /// What names of a text model begin with, those of a model that sees first.
    pub(super) const PREFIXES: &[&str] =
        &["model.language_model.", "language_model.model.", "language_model.", "model."];

    /// The layout of these files.
    pub fn of(headers: &Headers) -> Self {
        let known =
            [("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", "")];
        let has = |(prefix, _): &&(&str, &str)| headers.contains(&format!("{prefix}embed_tokens.weight"));
        let (model, head) = known.iter().find(has).copied().unwrap_or(known[0]);
        // mlx-lm stores the channels of a convolution first and its one input last.
        let is_original = headers.iter().any(|(name, entry)| {
            name.ends_with("conv1d.weight") && entry.shape.last().is_some_and(|&last| last != 1)
        });
        Self { model, head, is_original }
    }

    /// The name of a tensor there, by the one it has in the table.
    pub fn name(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(own) => format!("{}{own}", self.model),
            None => format!("{}{name}", self.head),
        }
    }

    /// Whether there are weights of a head.
    pub fn has_head(&self, headers: &Headers) -> bool {
        headers.contains(&self.name("lm_head.weight"))
    }
}
