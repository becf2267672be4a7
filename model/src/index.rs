//! Which files are a model's weights. The index (`model.safetensors.index.json`) is a hint: what tensors there are and
//! where they lie is what the headers of the files say.

use std::{collections::BTreeSet, fmt};

use serde::{
    Deserialize,
    de::{Deserializer, Error as _, MapAccess, Visitor},
};

use crate::{
    error::FileError, json, object::Object, safetensors::MAX_HEADER_BYTES, sentence_transformers::nested_path,
};

/// Name of the index of a model in several files.
pub const INDEX: &str = "model.safetensors.index.json";
/// Name of the weights of a model in one file.
pub const SINGLE: &str = "model.safetensors";
/// How the names of a model's weight files begin and end.
const WEIGHTS: (&str, &str) = ("model", ".safetensors");
/// Longest index read; it lists the tensors of all files, as their headers do.
pub const MAX_INDEX_BYTES: u64 = MAX_HEADER_BYTES;
/// Most weight files of a model, each of which costs a request or two: the largest published ones have some 200.
pub const MAX_FILES: usize = 1000;

/// The weight files of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightFiles {
    /// Their names, sorted.
    pub names: Vec<String>,
    /// What a person should know of the choice.
    pub note: Option<String>,
}

/// The weight files the model uses, out of `names`. The files that the index names, where they are all there; else the
/// single file; else the shards by their numbers; else what mlx-lm would load, `model*.safetensors`; else every
/// safetensors file. So an index of other files, or one that is damaged, hides no weights that mlx-lm would load.
pub fn weight_files(index: Option<&[u8]>, names: &[&str]) -> Result<WeightFiles, FileError> {
    let all: BTreeSet<&str> = names.iter().copied().filter(|name| is_weights(name)).collect();
    let (listed, broken) = match index.map(index_files) {
        // A name with a path in it could lead out of the model's folder: no exporter writes one.
        Some(Err(error @ FileError::Field { .. })) => return Err(error),
        Some(Ok(listed)) => (listed, None),
        Some(Err(error)) => (BTreeSet::new(), Some(error)),
        None => (BTreeSet::new(), None),
    };
    let absent: Vec<&String> = listed.iter().filter(|name| !all.contains(name.as_str())).collect();
    let chosen = chosen(&all, &listed, &absent)?;
    if chosen.len() > MAX_FILES {
        return Err(FileError::TooManyFiles { files: chosen.len(), limit: MAX_FILES });
    }
    let note = match (index, absent.first(), broken) {
        (None, ..) | (_, None, None) => None,
        (_, Some(file), _) => Some(format!(
            "{INDEX} names {} that are not there, such as {file}, and is passed over",
            absent.len()
        )),
        (.., Some(error)) => Some(format!("{INDEX} is passed over: {error}")),
    };
    Ok(WeightFiles { names: chosen.into_iter().map(str::to_owned).collect(), note })
}

/// Whether a file is of the model itself, not of a module behind it.
fn is_weights(name: &str) -> bool {
    name.ends_with(WEIGHTS.1) && nested_path(name).is_none()
}

fn chosen<'a>(
    all: &BTreeSet<&'a str>,
    listed: &BTreeSet<String>,
    absent: &[&String],
) -> Result<Vec<&'a str>, FileError> {
    let is_listed = |name: &&&str| listed.contains(**name);
    if !listed.is_empty() && absent.is_empty() {
        let listed: Vec<&str> = all.iter().filter(is_listed).copied().collect();
        // An index that was written of some of the shards hides none of the others.
        let count =
            listed.iter().map(|name| shard(name).map(|(_, count)| count)).reduce(|a, b| a.filter(|_| a == b));
        let own = count.flatten().map(|count| shards(all, count)).unwrap_or_default();
        let is_complete = count.flatten().is_some_and(|count| own.len() as u64 == count);
        return Ok(if is_complete { own } else { listed });
    }
    if let Some(single) = all.get(SINGLE) {
        return Ok(vec![single]);
    }
    // Some of its files are there and some are not: the copy is incomplete.
    if let Some(file) = absent.first().filter(|_| absent.len() < listed.len()) {
        return Err(missing(file, absent.len()));
    }
    if let Some((_, count)) = all.iter().find_map(|name| shard(name)) {
        let own = shards(all, count);
        let there: BTreeSet<u64> =
            own.iter().filter_map(|name| shard(name)).map(|(number, _)| number).collect();
        let lacking = count.saturating_sub(there.len() as u64);
        if lacking > 0 {
            let first = (1..=count).find(|number| !there.contains(number)).unwrap_or(count);
            let file = format!("model-{first:05}-of-{count:05}.safetensors");
            return Err(missing(&file, lacking as usize));
        }
        return Ok(own);
    }
    if all.is_empty() {
        // What the index wanted names the copy's fault better than the file that a model may have instead.
        return Err(absent.first().map_or_else(|| missing(SINGLE, 1), |file| missing(file, absent.len())));
    }
    let weights: Vec<&str> = all.iter().copied().filter(|name| name.starts_with(WEIGHTS.0)).collect();
    Ok(if weights.is_empty() { all.iter().copied().collect() } else { weights })
}

/// The shards of `count`.
fn shards<'a>(all: &BTreeSet<&'a str>, count: u64) -> Vec<&'a str> {
    all.iter().copied().filter(|name| shard(name).is_some_and(|(_, of)| of == count)).collect()
}

fn missing(file: &str, count: usize) -> FileError {
    let others = if count > 1 { format!(" (and {} more)", count - 1) } else { String::new() };
    FileError::Missing { file: format!("{file}{others}") }
}

/// The number and the count of a shard's name, `model-00001-of-00002.safetensors`.
fn shard(name: &str) -> Option<(u64, u64)> {
    let numbers = name.strip_prefix("model-")?.strip_suffix(".safetensors")?;
    let (number, count) = numbers.split_once("-of-")?;
    let digits =
        |text: &str| text.len() >= 5 && text.len() <= 6 && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits(number).then(|| number.parse().ok())??;
    let count = digits(count).then(|| count.parse().ok())??;
    (1..=count).contains(&number).then_some((number, count)).filter(|_| count <= MAX_FILES as u64)
}

/// The files an index names.
pub fn index_files(index: &[u8]) -> Result<BTreeSet<String>, FileError> {
    let bad = |problem: &str| FileError::bad_json(INDEX, problem);
    if index.len() as u64 > MAX_INDEX_BYTES {
        let (size, limit) = (index.len() as u64, MAX_INDEX_BYTES);
        return Err(FileError::TooLarge { file: INDEX.to_owned(), size, limit });
    }
    let Object(Index { weight_map }) = json::read(INDEX, index)?;
    let Some(Files(files)) = weight_map else { return Err(bad("there is no weight_map")) };
    let plain =
        |name: &&String| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    match files.iter().find(|name| !plain(name)) {
        Some(name) => {
            let found = format!(
                "{INDEX} names {:?}, which is not a plain file name",
                crate::safetensors::shorten(name)
            );
            Err(FileError::Field { field: "weight_map", found })
        }
        None => Ok(files),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Option<Files>,
}

/// The values of the weight map; its keys, the names of tensors, are skipped.
struct Files(BTreeSet<String>);

impl<'de> Deserialize<'de> for Files {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FilesVisitor)
    }
}

struct FilesVisitor;

impl<'de> Visitor<'de> for FilesVisitor {
    type Value = Files;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object of tensors and their files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Files, A::Error> {
        let mut files = BTreeSet::new();
        while let Some((_, file)) = map.next_entry::<serde::de::IgnoredAny, String>()? {
            files.insert(file);
            if files.len() > MAX_FILES {
                return Err(A::Error::custom(format!("it names more than {MAX_FILES} files, the limit")));
            }
        }
        Ok(Files(files))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(files: &[&str]) -> Vec<u8> {
        let map: serde_json::Map<String, serde_json::Value> =
            files.iter().enumerate().map(|(at, file)| (format!("t{at}"), (*file).into())).collect();
        serde_json::json!({ "metadata": {"total_size": 1}, "weight_map": map }).to_string().into_bytes()
    }

    const ONE: &str = "model-00001-of-00002.safetensors";
    const TWO: &str = "model-00002-of-00002.safetensors";

    #[test]
    fn weight_files_follow_index_then_single_then_shards() {
        type Case<'a> = (Option<Vec<u8>>, &'a [&'a str], &'a [&'a str]);
        let cases: &[Case<'_>] = &[
            (
                Some(index(&["b.safetensors", "a.safetensors", "b.safetensors"])),
                &["a.safetensors", "b.safetensors", "extra.safetensors"],
                &["a.safetensors", "b.safetensors"],
            ),
            // Stale: the files it names are elsewhere, and the model is complete in one.
            (Some(index(&[ONE, TWO])), &[SINGLE, "tokenizer.json"], &[SINGLE]),
            (Some(index(&[SINGLE, TWO])), &[SINGLE], &[SINGLE]),
            (Some(index(&[])), &[SINGLE], &[SINGLE]),
            (Some(vec![]), &[SINGLE], &[SINGLE]),
            (Some(b"{}".to_vec()), &[SINGLE], &[SINGLE]),
            (Some(br#"[{"t":"b.safetensors"}]"#.to_vec()), &[SINGLE, "b.safetensors"], &[SINGLE]),
            (Some(index(&["old.safetensors"])), &[ONE, TWO], &[ONE, TWO]),
            (None, &[SINGLE, "adapters.safetensors", "model.fp16.safetensors"], &[SINGLE]),
            (None, &[TWO, ONE, "consolidated.safetensors", "adapters.safetensors"], &[ONE, TWO]),
            (None, &["model-00001-of-00001.safetensors"], &["model-00001-of-00001.safetensors"]),
            (None, &["weights.safetensors", "config.json"], &["weights.safetensors"]),
            // What mlx-lm globs, before what merely lies there.
            (
                None,
                &["model-1-of-2.safetensors", "model-2-of-2.safetensors", "consolidated.safetensors"],
                &["model-1-of-2.safetensors", "model-2-of-2.safetensors"],
            ),
            (Some(index(&[ONE])), &[ONE, TWO, "consolidated.safetensors"], &[ONE, TWO]),
            (
                Some(index(&[ONE, "extra.safetensors"])),
                &[ONE, TWO, "extra.safetensors"],
                &["extra.safetensors", ONE],
            ),
        ];
        for (index, names, expected) in cases {
            let found = weight_files(index.as_deref(), names).unwrap();
            assert_eq!(found.names, *expected, "{names:?}");
        }
    }

    #[test]
    fn index_that_is_passed_over_is_said() {
        for (index, names, said) in [
            (None, &[SINGLE][..], None),
            (Some(index(&[ONE, TWO])), &[ONE, TWO], None),
            (
                Some(index(&[ONE, TWO])),
                &[SINGLE],
                Some("names 2 that are not there, such as model-00001-of-00002"),
            ),
            (
                Some(b"{".to_vec()),
                &[SINGLE],
                Some("is passed over: model.safetensors.index.json is not valid JSON"),
            ),
            (
                Some(
                    b"{\"metadata\": {\"total_size\": NaN}, \"weight_map\": {\"t\": \"model.safetensors\"}}"
                        .to_vec(),
                ),
                &[SINGLE],
                None,
            ),
        ] {
            let note = weight_files(index.as_deref(), names).unwrap().note;
            assert_eq!(note.is_some(), said.is_some(), "{note:?}");
            assert!(note.is_none_or(|note| note.contains(said.unwrap())), "{said:?}");
        }
    }

    #[test]
    fn weight_files_beyond_the_limit_are_refused() {
        let names: Vec<String> = (0..=MAX_FILES).map(|at| format!("model{at}.safetensors")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(weight_files(None, &names[1..]).unwrap().names.len(), MAX_FILES);
        let error = weight_files(None, &names).unwrap_err();
        assert_eq!(error, FileError::TooManyFiles { files: MAX_FILES + 1, limit: MAX_FILES });
    }

    #[test]
    fn incomplete_copies_name_a_file_that_is_missing() {
        for (index, names, said) in [
            (Some(index(&[ONE, TWO])), &[ONE][..], TWO),
            (Some(index(&[ONE, TWO])), &["tokenizer.json"], ONE),
            (Some(index(&[ONE, TWO])), &[][..], "and 1 more"),
            (None, &[TWO], ONE),
            (None, &["tokenizer.json"], SINGLE),
            (Some(index(&["../../etc/passwd"])), &[SINGLE], "not a plain file name"),
            (Some(index(&[".hidden"])), &[SINGLE], "not a plain file name"),
        ] {
            let error = weight_files(index.as_deref(), names).unwrap_err().to_string();
            assert!(error.contains(said), "{names:?}: {error}");
        }
    }

    #[test]
    fn impossible_numbers_of_shards_cost_no_time() {
        for name in [
            "model-00001-of-999999.safetensors",
            "model-00000-of-00001.safetensors",
            "model-1-of-2.safetensors",
            "model-00003-of-00002.safetensors",
        ] {
            assert_eq!(shard(name), None, "{name}");
            assert_eq!(weight_files(None, &[name]).unwrap().names, [name]);
        }
    }
}
