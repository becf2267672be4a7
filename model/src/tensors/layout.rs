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

/// What names of a Nemotron-H begin with. Its embedding and last norm have names of their own, and one module of each
/// layer is all that the layer has.
const BACKBONE: &str = "backbone.";

impl Layout {
    /// What names of a text model begin with, those of a model that sees first.
    pub(super) const PREFIXES: &[&str] =
        &["model.language_model.", "language_model.model.", "language_model.", "model.", BACKBONE];

    /// The layout of these files.
    pub fn of(headers: &Headers) -> Self {
        let known = [
            ("model.", ""),
            ("language_model.model.", "language_model."),
            ("model.language_model.", ""),
            (BACKBONE, ""),
        ];
        // mlx-lm stores the channels of a convolution first and its one input last.
        let is_original = headers.iter().any(|(name, entry)| {
            name.ends_with("conv1d.weight") && entry.shape.last().is_some_and(|&last| last != 1)
        });
        let mut layouts = known.iter().map(|&(model, head)| Self { model, head, is_original });
        let has = |layout: &Self| headers.contains(&layout.name("model.embed_tokens.weight"));
        layouts.find(has).unwrap_or(Self { model: known[0].0, head: known[0].1, is_original })
    }

    /// The name of a tensor there, by the one it has in the table.
    pub fn name(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(own) if self.model == BACKBONE => format!("{BACKBONE}{}", in_backbone(own)),
            Some(own) => format!("{}{own}", self.model),
            None => format!("{}{name}", self.head),
        }
    }

    /// Whether there are weights of a head.
    pub fn has_head(&self, headers: &Headers) -> bool {
        headers.contains(&self.name("lm_head.weight"))
    }
}

/// The name of a Nemotron-H's tensor, by the one it has in the table.
fn in_backbone(name: &str) -> String {
    let (module, field) = name.split_once('.').unwrap_or((name, ""));
    match (module, field.split('.').collect::<Vec<_>>().as_slice()) {
        ("embed_tokens", _) => format!("embeddings.{field}"),
        ("norm", _) => format!("norm_f.{field}"),
        ("layers", [layer, "self_attn" | "mamba" | "mlp", own @ ..]) => {
            format!("layers.{layer}.mixer.{}", own.join("."))
        }
        _ => name.to_owned(),
    }
}
