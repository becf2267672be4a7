//! How text is split before the merges of a byte-level tokenizer, by the names that GGUF has for it. The expressions
//! are those of the models' own tokenizers; the engine divides long prompts at words where it knows them.

use serde_json::{Value, json};

/// What GPT-2 and what follows it split at.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Digits in threes, Chinese and Japanese, and all else.
const DEEPSEEK_3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
/// Where a file names nothing: punctuation, GPT-2's words, and digits in threes.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"];

/// How a byte-level tokenizer splits text.
#[derive(Debug, PartialEq)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    /// In order.
    splits: &'static [&'static str],
    /// Whether each digit is a word of its own before all else.
    digits: bool,
    /// Whether text is composed (NFC) before all else.
    composes: bool,
    /// Whether a word that is a token is not merged together.
    pub ignore_merges: bool,
}

/// Nothing but GPT-2's own splitting.
const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], splits: &[], digits: false, composes: false, ignore_merges: false };
const KNOWN: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        digits: true,
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-2", "phi-2", "olmo", "mpt", "gigachat", "granite-docling"], ..PLAIN },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        splits: &[LLAMA_3],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe"], splits: &[LLAMA_3], ..PLAIN },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        splits: &[QWEN_2],
        composes: true,
        ..PLAIN
    },
    PreTokenizer { names: &["qwen35"], splits: &[QWEN_3_5], ..PLAIN },
    PreTokenizer { names: &["tekken"], splits: &[TEKKEN], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["glm4"], splits: &[LLAMA_3], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["gpt-4o", "minimax-m2"], splits: &[GPT_4O], ..PLAIN },
    PreTokenizer { names: &["deepseek-v3"], splits: &DEEPSEEK_3, ..PLAIN },
    PreTokenizer { names: &["kimi-k2"], splits: &[KIMI_K2], ..PLAIN },
    PreTokenizer { names: &["seed-coder"], splits: &[SEED], ..PLAIN },
    PreTokenizer { names: &["default"], splits: &DEFAULT, ..PLAIN },
];

/// The one of this name.
pub(super) fn pre_tokenizer(name: &str) -> Option<&'static PreTokenizer> {
    KNOWN.iter().find(|own| own.names.contains(&name))
}

/// Every name, for messages.
pub(super) fn list() -> String {
    KNOWN.iter().flat_map(|own| own.names).copied().collect::<Vec<_>>().join(", ")
}

impl PreTokenizer {
    /// As `tokenizer.json` has the normalizer.
    pub fn normalizer(&self) -> Value {
        if self.composes { json!({"type": "NFC"}) } else { Value::Null }
    }

    /// As `tokenizer.json` has the steps.
    pub fn steps(&self) -> Value {
        let mut steps = Vec::new();
        if self.digits {
            steps.push(json!({"type": "Digits", "individual_digits": true}));
        }
        for regex in self.splits {
            steps.push(json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}));
        }
        // GPT-2's own splitting is built in.
        steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": self.splits.is_empty()}));
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
