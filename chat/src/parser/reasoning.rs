//! How models mark their reasoning: one table. Not the scan itself, which is the scanner's, and not
//! harmony's channels.

/// The markers of a thinking block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReasoningFormat {
    /// The names of this format; the first is the one that is shown.
    pub names: &'static [&'static str],
    pub begin: &'static str,
    pub end: &'static str,
    /// Special tokens that are only a part of a marker.
    pub tokens: &'static [&'static str],
    /// Markers around the answer that are dropped.
    pub dropped: &'static [&'static str],
}

const fn format(names: &'static [&'static str], begin: &'static str, end: &'static str) -> ReasoningFormat {
    ReasoningFormat { names, begin, end, tokens: &[], dropped: &[] }
}

/// A new format is one row here, and one in `templates::REASONING_RULES` if a template shows it.
static FORMATS: &[ReasoningFormat] = &[
    format(
        &[
            "think",
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "qwen3",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "minimax_m2_append_think",
            "nemotron_v3",
            "nano_v3",
            "step3",
            "step3p5",
            "holo2",
            "olmo3",
            "mimo",
        ],
        "<think>",
        "</think>",
    ),
    format(&["mistral"], "[THINK]", "[/THINK]"),
    format(&["seed_oss"], "<seed:think>", "</seed:think>"),
    // Gemma 4 names the channel in its first line; the newline after it is whitespace after the marker.
    ReasoningFormat {
        names: &["gemma4"],
        begin: "<|channel>thought",
        end: "<channel|>",
        tokens: &["<|channel>"],
        dropped: &[],
    },
    format(&["cohere", "cohere_command3"], "<|START_THINKING|>", "<|END_THINKING|>"),
    format(&["minimax_m3"], "<mm:think>", "</mm:think>"),
    format(&["hy_v3"], "<think:opensource>", "</think:opensource>"),
    format(&["thinking", "apriel"], "<thinking>", "</thinking>"),
    format(&["apertus"], "<|inner_prefix|>", "<|inner_suffix|>"),
    // The prompt ends with this sentence, so the model writes the end alone.
    format(&["apriel_final"], "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    // Solar Open thinks in a message of its own; the header of the next one belongs to the marker.
    ReasoningFormat {
        names: &["solar_open"],
        begin: "<|think|>",
        end: "<|end|><|begin|>assistant",
        tokens: &["<|begin|>", "<|end|>"],
        dropped: &[],
    },
    // Granite 3.2 marks its parts with sentences, Granite 3.3 with tags.
    format(&["granite"], "Here is my thought process:", "Here is my response:"),
    ReasoningFormat {
        names: &["hunyuan_a13b"],
        begin: "<think>",
        end: "</think>",
        tokens: &[],
        dropped: &["<answer>", "</answer>"],
    },
    ReasoningFormat {
        names: &["granite33", "ernie45"],
        begin: "<think>",
        end: "</think>",
        tokens: &[],
        dropped: &["<response>", "</response>"],
    },
    ReasoningFormat {
        names: &["kimi_k3"],
        begin: "<|open|>think<|sep|>",
        end: "<|close|>think<|sep|>",
        tokens: &["<|open|>", "<|close|>", "<|sep|>"],
        dropped: &["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"],
    },
];

impl ReasoningFormat {
    /// The markers that a detokenizer must keep.
    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        [self.begin, self.end]
            .into_iter()
            .chain(self.dropped.iter().copied())
            .chain(self.tokens.iter().copied())
    }
}

/// The format `name`.
pub(super) fn by_name(name: &str) -> Option<&'static ReasoningFormat> {
    FORMATS.iter().find(|format| format.names.contains(&name))
}

#[cfg(test)]
pub(crate) fn all() -> &'static [ReasoningFormat] {
    FORMATS
}
