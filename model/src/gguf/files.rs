//! Which files of a source are a model in GGUF: one, or the parts of one, `name-00001-of-00003.gguf`.

use std::collections::BTreeMap;

use crate::{error::FileError, index::MAX_FILES, safetensors::shorten};

/// How names of these files end.
pub const SUFFIX: &str = ".gguf";
/// How names begin of what a model in GGUF may have beside it: the projector of images.
const PROJECTOR: &str = "mmproj";

/// The files of the one model in GGUF among `names`, in order; `None` where there is none, or where there are weights in
/// safetensors, which are read instead.
pub fn gguf_files(names: &[&str]) -> Result<Option<Vec<String>>, FileError> {
    if names.iter().any(|name| name.ends_with(".safetensors")) {
        return Ok(None);
    }
    let mut models: BTreeMap<(&str, u32), Vec<(u32, &str)>> = BTreeMap::new();
    for &name in names.iter().filter(|name| name.ends_with(SUFFIX) && !name.starts_with(PROJECTOR)) {
        let (base, number, count) = part(name).unwrap_or((name, 1, 1));
        models.entry((base, count)).or_default().push((number, name));
    }
    let count = models.len();
    let Some(((base, parts), mut files)) = models.pop_first() else { return Ok(None) };
    if count > 1 {
        let first = shorten(files.first().map_or(base, |(_, name)| name));
        let others = models.values().filter_map(|files| files.first()).map(|(_, name)| shorten(name)).take(2);
        let examples = std::iter::once(first.clone()).chain(others).collect::<Vec<_>>().join(", ");
        return Err(FileError::SeveralGguf { count, examples, first });
    }
    files.sort_unstable();
    let lacks = |number: u32| !files.iter().any(|(own, _)| *own == number);
    if let Some(number) = (1..=parts).find(|number| lacks(*number)) {
        return Err(FileError::Missing { file: format!("{base}-{number:05}-of-{parts:05}{SUFFIX}") });
    }
    Ok(Some(files.into_iter().map(|(_, name)| name.to_owned()).collect()))
}

/// The files of the model of which `name` is one: itself, or all its parts.
pub fn parts(name: &str) -> Vec<String> {
    match part(name) {
        None => vec![name.to_owned()],
        Some((base, _, count)) => {
            (1..=count).map(|number| format!("{base}-{number:05}-of-{count:05}{SUFFIX}")).collect()
        }
    }
}

/// The name of the model, the number and the count of a part.
fn part(name: &str) -> Option<(&str, u32, u32)> {
    let (before, count) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
    let (base, number) = before.rsplit_once('-')?;
    let digits = |text: &str| -> Option<u32> {
        (text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
    };
    let (number, count) = (digits(number)?, digits(count)?);
    ((1..=count).contains(&number) && count as usize <= MAX_FILES).then_some((base, number, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_model_are_named_by_any_of_them() {
        assert_eq!(parts("x.gguf"), ["x.gguf"]);
        assert_eq!(parts("x-00002-of-00002.gguf"), ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]);
    }

    #[test]
    fn one_model_in_one_or_several_files_is_found() {
        let [one, two] = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"];
        for (names, expected) in [
            (&["x.Q4_1.gguf", "README.md", "mmproj-x.gguf"][..], Ok(Some(vec!["x.Q4_1.gguf"]))),
            (&[two, one], Ok(Some(vec![one, two]))),
            (&["x.gguf", "model.safetensors"], Ok(None)),
            (&["config.json"], Ok(None)),
            (&["x-00001-of-99999.gguf"], Ok(Some(vec!["x-00001-of-99999.gguf"]))),
            (&[one], Err("x-00002-of-00002.gguf is missing")),
            (&["a.gguf", "b.gguf"], Err("holds 2 models in GGUF, such as a.gguf, b.gguf; name one")),
            (&[one, two, "x.gguf"], Err("holds 2 models in GGUF")),
        ] {
            match (gguf_files(names), expected) {
                (Ok(found), Ok(expected)) => {
                    assert_eq!(found, expected.map(|names| names.into_iter().map(str::to_owned).collect()));
                }
                (Err(error), Err(said)) => assert!(error.to_string().contains(said), "{names:?}: {error}"),
                (found, _) => panic!("{names:?}: {found:?}"),
            }
        }
    }
}
