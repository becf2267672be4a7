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
    /// Where an encoder has its classifier; `None` in other models.
    encoder: Option<ClassifierNames>,
}

/// How the two layers of a classifier are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClassifierNames {
    /// `pooler.dense`, which is of the encoder, and `classifier`.
    Bert,
    /// `classifier.dense` and `classifier.out_proj`.
    Roberta,
}

/// What names of an encoder begin with.
const ENCODERS: [&str; 3] = ["bert.", "roberta.", ""];
/// Modules of an encoder, by those of the table.
const ENCODER_MODULES: [(&str, &str); 12] = [
    ("embed_tokens.", "embeddings.word_embeddings."),
    ("embed_positions.", "embeddings.position_embeddings."),
    ("embed_token_types.", "embeddings.token_type_embeddings."),
    ("embed_norm.", "embeddings.LayerNorm."),
    ("self_attn.q_proj.", "attention.self.query."),
    ("self_attn.k_proj.", "attention.self.key."),
    ("self_attn.v_proj.", "attention.self.value."),
    ("self_attn.o_proj.", "attention.output.dense."),
    ("post_attention_layernorm.", "attention.output.LayerNorm."),
    ("mlp.up_proj.", "intermediate.dense."),
    ("mlp.down_proj.", "output.dense."),
    ("post_feedforward_layernorm.", "output.LayerNorm."),
];

/// What names of a Nemotron-H begin with. Its embedding and last norm have names of their own, and one module of each
/// layer is all that the layer has.
const BACKBONE: &str = "backbone.";

impl Layout {
    /// What names of a text model begin with, those of a model that sees first.
    pub(super) const PREFIXES: &[&str] = &[
        "model.language_model.",
        "language_model.model.",
        "language_model.",
        "model.",
        BACKBONE,
        "bert.",
        "roberta.",
    ];

    /// The layout of these files.
    pub fn of(headers: &Headers) -> Self {
        let known = [
            ("model.", ""),
            ("language_model.model.", "language_model."),
            ("model.language_model.", ""),
            (BACKBONE, ""),
            // Models that embed are exported without their head, and without what holds it.
            ("", ""),
        ];
        if let Some(prefix) = ENCODERS.into_iter().find(|prefix| headers.contains(&word_embeddings(prefix))) {
            let is_roberta = headers.contains("classifier.out_proj.weight");
            let encoder = Some(if is_roberta { ClassifierNames::Roberta } else { ClassifierNames::Bert });
            return Self { model: prefix, head: "", is_original: true, encoder };
        }
        // mlx-lm stores the channels of a convolution first and its one input last.
        let is_original = headers.iter().any(|(name, entry)| {
            name.ends_with("conv1d.weight") && entry.shape.last().is_some_and(|&last| last != 1)
        });
        let mut layouts = known.iter().map(|&(model, head)| Self { model, head, is_original, encoder: None });
        let has = |layout: &Self| headers.contains(&layout.name("model.embed_tokens.weight"));
        layouts.find(has).unwrap_or(Self { model: known[0].0, head: known[0].1, is_original, encoder: None })
    }

    /// The name of a tensor there, by the one it has in the table.
    pub fn name(&self, name: &str) -> String {
        if let Some(classifier) = self.encoder {
            return in_encoder(self.model, classifier, name);
        }
        match name.strip_prefix("model.") {
            Some(own) if self.model == BACKBONE => format!("{BACKBONE}{}", in_backbone(own)),
            Some(own) => format!("{}{own}", self.model),
            None => format!("{}{name}", self.head),
        }
    }

    /// Whether there are weights of a head: of an encoder, a classifier.
    pub fn has_head(&self, headers: &Headers) -> bool {
        let head = if self.encoder.is_some() { "score.out_proj.weight" } else { "lm_head.weight" };
        headers.contains(&self.name(head))
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

/// Where an encoder with this prefix has the embedding of its tokens.
fn word_embeddings(prefix: &str) -> String {
    format!("{prefix}embeddings.word_embeddings.weight")
}

/// The name of an encoder's tensor, by the one it has in the table.
fn in_encoder(prefix: &str, classifier: ClassifierNames, name: &str) -> String {
    let renamed = |name: &str| {
        let known = ENCODER_MODULES.iter().find_map(|(own, there)| Some((there, name.strip_prefix(own)?)));
        known.map_or_else(|| name.to_owned(), |(there, field)| format!("{there}{field}"))
    };
    if let Some(field) = name.strip_prefix("score.dense.") {
        return match classifier {
            ClassifierNames::Bert => format!("{prefix}pooler.dense.{field}"),
            ClassifierNames::Roberta => format!("classifier.dense.{field}"),
        };
    }
    if let Some(field) = name.strip_prefix("score.out_proj.") {
        return match classifier {
            ClassifierNames::Bert => format!("classifier.{field}"),
            ClassifierNames::Roberta => format!("classifier.out_proj.{field}"),
        };
    }
    let own = name.strip_prefix("model.").unwrap_or(name);
    match own.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((index, field)) => format!("{prefix}encoder.layer.{index}.{}", renamed(field)),
        None => format!("{prefix}{}", renamed(own)),
    }
}
