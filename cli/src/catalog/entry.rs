//! Catalogue entries: the rows of `models.csv`, the search among them, and whether this release runs a model.
//! Not here: servers and the hub.

use anyhow::{Context, Result, bail, ensure};
use csv::StringRecord;
use russet_agent::grants::MemoryLimits;
use russet_model::families;
use serde::Deserialize;

/// The rows, after one line of column names.
const ROWS: &str = include_str!("models.csv");
/// Memory sizes of Macs, in GB.
const MAC_MEMORY_GIB: [u64; 12] = [8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512];
/// Numbers of machines that a model may be split over.
const SPLIT_COUNTS: [u64; 3] = [2, 4, 8];
/// Divisor of the weight bytes for the overhead: KV cache and workspace of one sequence of some thousand
/// tokens.
const OVERHEAD_DIVISOR: u64 = 10;
/// Minimum overhead, bytes.
const MIN_OVERHEAD_BYTES: u64 = 1 << 30;
/// Search word that leaves out models that this release does not run.
const RUNS_FILTER: &str = "runs";
/// Maximum number of suggestions when a name is not found.
const MAX_SUGGESTIONS: usize = 5;

/// A model that has been published for MLX.
#[derive(Clone, Debug, PartialEq)]
pub struct CatalogEntry {
    /// Name to type, and the name of the Model.
    pub name: String,
    /// `owner/name` on the hub.
    pub repository: String,
    /// Author or model family.
    pub family: String,
    /// `model_type` of its config.json.
    pub architecture: String,
    /// Parameters, in billions.
    pub parameters: f64,
    /// Active parameters per token, in billions: fewer than all for a mixture of experts.
    pub active: f64,
    /// Quantization of the weights.
    pub packing: Packing,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Source of `bytes`.
    pub origin: SizeOrigin,
    /// Maximum context length, tokens.
    pub context: u64,
    /// Licence, as its owners name it.
    pub licence: String,
}

/// Quantization of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Bits per value.
    pub bits: u32,
    /// Metadata of the values.
    pub format: PackingFormat,
}

/// Metadata of quantized values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackingFormat {
    /// A scale and an offset of 16 bits each for every group of this many values.
    Affine(u32),
    /// A scale of 8 bits for every 32 values.
    Mxfp4,
}

/// Source of a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SizeOrigin {
    /// Computed: parameters times bits per parameter, scales and offsets included.
    Computed,
    /// As a public list gives it for the repository's files.
    Listed,
}

impl Packing {
    /// Bits per parameter, with its share of scales and offsets.
    pub fn bits_per_parameter(self) -> f64 {
        let extra = match self.format {
            PackingFormat::Affine(group) => 32.0 / f64::from(group),
            PackingFormat::Mxfp4 => 0.25,
        };
        f64::from(self.bits) + extra
    }
}

impl CatalogEntry {
    /// The source URI of its Model.
    pub fn uri(&self) -> String {
        format!("hf://{}", self.repository)
    }

    /// Whether this release runs it, or why not.
    pub fn runs(&self) -> Result<(), String> {
        if !families::is_known(&self.architecture) {
            return Err(format!(
                "its architecture is {}, and this release runs {}",
                self.architecture,
                families::list()
            ));
        }
        Ok(())
    }

    /// The fewest and smallest machines whose default serving limits hold the model: their number, and the
    /// gigabytes of each. A rule of thumb; the planner knows the model's shape and the machines.
    pub fn required_machines(&self) -> Option<(u64, u64)> {
        let bytes = self.bytes + (self.bytes / OVERHEAD_DIVISOR).max(MIN_OVERHEAD_BYTES);
        let holds = |gigabytes: u64| {
            MemoryLimits { total: gigabytes << 30, ..MemoryLimits::default() }.serving_limit()
        };
        let alone = MAC_MEMORY_GIB.into_iter().find(|size| holds(*size) >= bytes).map(|size| (1, size));
        let largest = MAC_MEMORY_GIB[MAC_MEMORY_GIB.len() - 1];
        let together = || SPLIT_COUNTS.into_iter().find(|count| count * holds(largest) >= bytes);
        alone.or_else(|| Some((together()?, largest)))
    }

    /// Whether every word occurs in its names, regardless of dots and dashes.
    pub fn matches(&self, words: &[String]) -> bool {
        let text = normalize(
            &[&self.name, &self.repository, &self.family, &self.architecture].map(String::as_str).join(" "),
        );
        words.iter().all(|word| match word.as_str() {
            RUNS_FILTER => self.runs().is_ok(),
            word => text.contains(&normalize(word)),
        })
    }
}

/// Lower case, with dashes instead of dots and underscores.
fn normalize(text: &str) -> String {
    text.to_lowercase().replace(['.', '_'], "-")
}

/// Every entry, by name.
pub fn all() -> Result<Vec<CatalogEntry>> {
    parse_rows(ROWS)
}

/// The entry of a name or repository.
pub fn require<'a>(entries: &'a [CatalogEntry], name: &str) -> Result<&'a CatalogEntry> {
    if let Some(entry) = find(entries, name) {
        return Ok(entry);
    }
    let near = suggestions(entries, name);
    let near = match near.is_empty() {
        true => "`russet catalog search` lists them".to_owned(),
        false => format!("there are {}", near.join(", ")),
    };
    bail!(
        "none of the {} entries of the catalogue is named {name}; {near}; `russet catalog search --hub {name}` asks the hub",
        entries.len()
    )
}

/// The entry of a name or repository, if there is one.
pub fn find<'a>(entries: &'a [CatalogEntry], name: &str) -> Option<&'a CatalogEntry> {
    let normalized = normalize(name);
    let found =
        entries.iter().find(|entry| entry.name == normalized || normalize(&entry.repository) == normalized);
    found.or_else(|| {
        let compact = compact_tagged(name)?;
        let is_it = |entry: &&CatalogEntry| {
            let own = compact_name(&entry.name);
            own == compact || own.strip_suffix(DEFAULT_PACKING) == Some(compact.as_str())
        };
        entries.iter().find(is_it)
    })
}

/// The packing of an entry that a name of Ollama without one means, as in Ollama.
const DEFAULT_PACKING: &str = "4bit";

/// A name with a tag, as Ollama's, without what separates its words: `qwen2.5:7b` is `qwen2-5-7b`.
fn compact_tagged(name: &str) -> Option<String> {
    let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:-_".contains(&byte));
    (is_name && name.contains(':')).then(|| compact_name(name))
}

fn compact_name(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase()).collect()
}

/// Suggestions for a name: entries with that prefix, else those with all of its words, else those with its
/// first word.
fn suggestions<'a>(entries: &'a [CatalogEntry], name: &str) -> Vec<&'a str> {
    let names = entries.iter().map(|entry| entry.name.as_str());
    let begin: Vec<&str> =
        names.filter(|known| known.starts_with(&normalize(name))).take(MAX_SUGGESTIONS).collect();
    if !begin.is_empty() {
        return begin;
    }
    let words: Vec<String> = normalize(name).split(['-', '/', ' ']).map(str::to_owned).collect();
    let having = |words: &[String]| -> Vec<&'a str> {
        let found = entries.iter().filter(|entry| entry.matches(words));
        found.map(|entry| entry.name.as_str()).take(MAX_SUGGESTIONS).collect()
    };
    let all = having(&words);
    if all.is_empty() { having(&words[..words.len().min(1)]) } else { all }
}

/// A row of `models.csv`, by its columns' names.
#[derive(Deserialize)]
struct Row {
    name: String,
    repo: String,
    family: String,
    architecture: String,
    parameters: f64,
    active: f64,
    bits: u32,
    format: RowFormat,
    bytes: u64,
    from: SizeOrigin,
    context: u64,
    licence: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RowFormat {
    Affine,
    Affine32,
    Mxfp4,
}

fn parse_rows(text: &str) -> Result<Vec<CatalogEntry>> {
    let mut rows = csv::Reader::from_reader(text.as_bytes());
    let columns = rows.headers().context("models.csv has no line of column names")?.clone();
    let row = |(index, row): (usize, csv::Result<StringRecord>)| {
        let line = || format!("models.csv, line {}", index + 2);
        let row = row.with_context(line)?;
        let entry = row.deserialize(Some(&columns)).map_err(Into::into).and_then(entry);
        entry.with_context(|| format!("{}: {}", line(), row.iter().collect::<Vec<_>>().join(",")))
    };
    rows.records().enumerate().map(row).collect()
}

fn entry(row: Row) -> Result<CatalogEntry> {
    let Row {
        name,
        repo: repository,
        family,
        architecture,
        parameters,
        active,
        bits,
        format,
        bytes,
        from: origin,
        context,
        licence,
    } = row;
    let format = match format {
        RowFormat::Affine => PackingFormat::Affine(64),
        RowFormat::Affine32 => PackingFormat::Affine(32),
        RowFormat::Mxfp4 => PackingFormat::Mxfp4,
    };
    ensure!(
        0.0 < active && active <= parameters,
        "{active} of {parameters} billion parameters cannot be active"
    );
    let packing = Packing { bits, format };
    Ok(CatalogEntry {
        name,
        repository,
        family,
        architecture,
        parameters,
        active,
        packing,
        bytes,
        origin,
        context,
        licence,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether agents accept it as `hf://owner/name` (agent/src/store/hub.rs), and the CRD as a URI.
    fn is_repository(repository: &str) -> bool {
        let plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        let uri = format!("hf://{repository}").len();
        (8..=2048).contains(&uri)
            && matches!(repository.split('/').collect::<Vec<_>>()[..], [owner, name] if plain(owner) && plain(name))
    }

    fn is_label(name: &str) -> bool {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        name.len() <= 63
            && name.bytes().all(|byte| inner(byte) || byte == b'-')
            && name.bytes().next().is_some_and(inner)
            && name.bytes().last().is_some_and(inner)
    }

    #[test]
    fn catalog_rows_are_unique_and_bytes_match_the_parameters() {
        let entries = all().unwrap();
        assert!(entries.len() >= 60, "{} entries", entries.len());
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert!(names.is_sorted_by(|one, other| one < other), "names are sorted and unique");
        let mut repositories: Vec<&str> = entries.iter().map(|entry| entry.repository.as_str()).collect();
        repositories.sort_unstable();
        assert!(repositories.is_sorted_by(|one, other| one < other), "repositories are unique");
        for entry in &entries {
            let name = &entry.name;
            assert!(is_label(name), "{name}");
            assert!(is_repository(&entry.repository), "{name}: {}", entry.repository);
            let computed = entry.parameters * 1e9 * entry.packing.bits_per_parameter() / 8.0;
            // Listed sizes include vision towers, sometimes embeddings, at 16 bits, and a tokenizer.
            let bounds = match entry.origin {
                SizeOrigin::Computed => 0.999..=1.001,
                SizeOrigin::Listed => 0.95..=1.45,
            };
            let ratio = entry.bytes as f64 / computed;
            assert!(bounds.contains(&ratio), "{name}: {} bytes are {ratio:.3} of {computed:.0}", entry.bytes);
            assert!((1024..=16 << 20).contains(&entry.context), "{name}: {}", entry.context);
            let marked = name.contains(&format!("-{}bit", entry.packing.bits)) || !name.contains("bit");
            assert!(marked, "{name} says other bits than {}", entry.packing.bits);
            assert!(!entry.licence.is_empty() && !entry.family.is_empty(), "{name}");
        }
    }

    #[test]
    fn names_with_tags_are_those_of_ollama() {
        let entries = all().unwrap();
        for (name, expected) in [
            ("qwen3:4b", Some("qwen3-4b-4bit")),
            ("qwen2.5:0.5b", Some("qwen2-5-0-5b-4bit")),
            ("llama3.2:1b", Some("llama-3-2-1b-4bit")),
            ("gemma3:27b", Some("gemma-3-27b-4bit")),
            ("gpt-oss:20b", Some("gpt-oss-20b")),
            ("qwen3:8b-8bit", Some("qwen3-8b-8bit")),
            ("qwen34b", None),
            ("qwen3:", None),
            ("qwen3:4b*", None),
            ("qwen3:4b/", None),
        ] {
            assert_eq!(find(&entries, name).map(|entry| entry.name.as_str()), expected, "{name}");
        }
        let mut compact: Vec<String> = entries.iter().map(|entry| compact_name(&entry.name)).collect();
        compact.sort();
        assert!(
            compact.is_sorted_by(|one, other| one < other),
            "two entries are one name without separators"
        );
    }

    #[test]
    fn entry_runs_if_the_engine_has_its_architecture() {
        let entries = all().unwrap();
        for entry in &entries {
            assert_eq!(entry.runs().is_ok(), families::is_known(&entry.architecture), "{}", entry.name);
        }
        for name in [
            "llama-3-2-1b-4bit",
            "mistral-7b-4bit",
            "qwen3-8b-4bit",
            "qwen3-30b-a3b-4bit",
            "gpt-oss-120b",
            "kimi-k2-thinking",
            "glm-4-7-flash-4bit",
            "gemma-3-27b-4bit",
            "gemma-4-26b-a4b-4bit",
            "gemma-4-e2b-4bit",
            "devstral-small-2-24b-4bit",
        ] {
            assert_eq!(require(&entries, name).unwrap().runs(), Ok(()), "{name}");
        }
        let mut unknown = require(&entries, "llama-3-2-1b-4bit").unwrap().clone();
        unknown.architecture = "abacus".to_owned();
        assert!(unknown.runs().unwrap_err().contains("abacus"));
    }

    #[test]
    fn names_match_in_any_spelling_and_near_ones_are_suggested() {
        let entries = all().unwrap();
        for name in ["llama-3-2-1b-4bit", "Llama-3.2-1B-4bit", "mlx-community/Llama-3.2-1B-Instruct-4bit"] {
            assert_eq!(require(&entries, name).unwrap().name, "llama-3-2-1b-4bit", "{name}");
        }
        for (name, expected) in
            [("qwen3-8b", "qwen3-8b-4bit"), ("qwen3-9000b", "qwen3-"), ("zzz", "russet catalog search")]
        {
            let error = require(&entries, name).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(name), "{error}");
        }
        let count = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            entries.iter().filter(|entry| entry.matches(&words)).count()
        };
        assert_eq!(count(&[]), entries.len());
        assert!(count(&["qwen2.5", "coder"]) >= 3 && count(&["Coder"]) > count(&["qwen2.5", "coder"]));
        assert!((1..entries.len()).contains(&count(&["runs"])));
    }

    #[test]
    fn malformed_catalog_row_is_named() {
        let good = "a-4bit,o/a,A,llama,1,1,4,affine,562500000,computed,2048,MIT";
        let columns = ROWS.lines().next().unwrap();
        assert_eq!(parse_rows(&format!("{columns}\n{good}")).unwrap().len(), 1);
        for (row, expected) in [
            ("a,b", "2 fields"),
            (&good.replace("affine", "zip"), "`zip`"),
            (&good.replace("computed", "estimated"), "`estimated`"),
            (&good.replace("1,1,4", "1,2,4"), "2 of 1 billion"),
            (&good.replace("2048", "x"), "invalid digit"),
        ] {
            let error = format!("{:#}", parse_rows(&format!("{columns}\n{good}\n{row}")).unwrap_err());
            assert!(error.starts_with("models.csv, line 3: ") && error.contains(expected), "{error}");
        }
    }
}
