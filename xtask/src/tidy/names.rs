//! Names of types, modules, limits and tests: the field's words, each for one thing. The words are in
//! `vocabulary.rs`.

use std::collections::{BTreeMap, BTreeSet};

use super::vocabulary::{COMMON_TYPES, LIMITS, MODULES, TYPES};
use super::{Findings, TidySource};

/// What a column of test names shows without wrapping, and what a reader takes in at once.
const MAX_TEST_NAME: usize = 60;

/// A type name that more crates define means a different thing in each.
const MAX_CRATES: usize = 2;

/// A name that a line defines.
#[derive(Debug, PartialEq)]
enum Defined<'a> {
    Type(&'a str),
    Module(&'a str),
    Constant(&'a str),
    Function(&'a str),
}

/// The identifier at the beginning of `text`.
fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// What a line of code defines. Associated types of traits and impls are not definitions of ours.
fn defined(line: &str) -> Option<Defined<'_>> {
    let mut rest = line.trim_start();
    let indented = rest.len() < line.len();
    if let Some(after) = rest.strip_prefix("pub(") {
        rest = after.split_once(") ")?.1;
    }
    for word in ["pub ", "async ", "unsafe "] {
        rest = rest.strip_prefix(word).unwrap_or(rest);
    }
    let (keyword, name) = rest.split_once(' ')?;
    let name = identifier(name.trim_start_matches("r#"));
    if name.is_empty() {
        return None;
    }
    match keyword {
        "struct" | "enum" | "trait" => Some(Defined::Type(name)),
        "type" if !indented => Some(Defined::Type(name)),
        "mod" => Some(Defined::Module(name)),
        "const" | "static" => Some(Defined::Constant(name)),
        "fn" => Some(Defined::Function(name)),
        _ => None,
    }
}

/// Every definition of a file with the number of its line.
fn definitions(text: &str) -> impl Iterator<Item = (usize, Defined<'_>)> {
    (1..).zip(text.lines()).filter_map(|(number, line)| Some((number, defined(line)?)))
}

/// The word of a list for a name.
fn instead<'a>(list: &[(&'a str, &'a str)], name: &str) -> Option<&'a str> {
    list.iter().find(|(word, _)| *word == name).map(|(_, instead)| *instead)
}

/// Types and modules with names that [`TYPES`] and [`MODULES`] forbid.
pub fn private_words(sources: &[TidySource]) -> Findings {
    let mut findings = Vec::new();
    for source in sources {
        for (number, defined) in definitions(&source.text) {
            let (kind, name, word) = match defined {
                Defined::Type(name) => ("type", name, instead(TYPES, name)),
                Defined::Module(name) => ("module", name, instead(MODULES, name)),
                Defined::Constant(_) | Defined::Function(_) => continue,
            };
            if let Some(word) = word {
                let path = source.path.display();
                findings
                    .push(format!("{path}:{number}: {kind} `{name}` is no word of the field; use {word}"));
            }
        }
    }
    findings
}

/// The crate of a file of shipped code; tests, benches, examples and the harness name things for themselves.
fn shipping_crate(source: &TidySource) -> Option<String> {
    let mut parts: Vec<String> = source.path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let file = parts.pop()?;
    let folder = parts.iter().position(|part| part == "src")?;
    let is_test = file == "tests.rs" || parts[folder..].iter().any(|part| part == "tests");
    let name = parts[..folder].join("/");
    (!is_test && name != "xtask" && !name.starts_with("tests")).then_some(name)
}

/// Types that more than [`MAX_CRATES`] crates define.
pub fn repeated_types(sources: &[TidySource]) -> Findings {
    let mut crates: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for source in sources {
        let Some(folder) = shipping_crate(source) else { continue };
        let code = source.text.split("#[cfg(test)]\nmod tests").next().unwrap_or("");
        for (_, defined) in definitions(code) {
            if let Defined::Type(name) = defined {
                crates.entry(name).or_default().insert(folder.clone());
            }
        }
    }
    crates
        .into_iter()
        .filter(|(name, crates)| crates.len() > MAX_CRATES && instead(COMMON_TYPES, name).is_none())
        .map(|(name, crates)| {
            let crates: Vec<String> = crates.into_iter().collect();
            format!("{} define `{name}`; at most {MAX_CRATES} may: qualify it", crates.join(", "))
        })
        .collect()
}

/// Limits that are not `MAX_…` or `MIN_…`.
pub fn odd_limits(sources: &[TidySource]) -> Findings {
    let mut findings = Vec::new();
    for source in sources {
        for (number, defined) in definitions(&source.text) {
            let Defined::Constant(name) = defined else { continue };
            if let Some(word) = instead(LIMITS, name.split('_').next().unwrap_or(name)) {
                let path = source.path.display();
                findings.push(format!("{path}:{number}: limit `{name}` should be `{word}_…`"));
            }
        }
    }
    findings
}

/// Tests whose names are longer than [`MAX_TEST_NAME`].
pub fn long_test_names(sources: &[TidySource]) -> Findings {
    let mut findings = Vec::new();
    for source in sources {
        let mut is_test = false;
        for (number, line) in (1..).zip(source.text.lines()) {
            let code = line.trim_start();
            if code.starts_with("#[test]") || code.starts_with("#[tokio::test") {
                is_test = true;
            } else if let (true, Some(Defined::Function(name))) = (is_test, defined(line)) {
                is_test = false;
                if name.len() > MAX_TEST_NAME {
                    let path = source.path.display();
                    let length = name.len();
                    findings.push(format!(
                        "{path}:{number}: test `{name}` has {length} characters; at most {MAX_TEST_NAME}"
                    ));
                }
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{
        COMMON_TYPES, Defined, MODULES, TYPES, TidySource, defined, long_test_names, odd_limits,
        private_words, repeated_types,
    };

    fn source(path: &str, text: &str) -> TidySource {
        TidySource { path: path.into(), text: text.to_owned() }
    }

    #[test]
    fn lines_define_types_modules_limits_and_functions() {
        for (line, wanted) in [
            ("pub(crate) struct Held<T>(T);", Some(Defined::Type("Held"))),
            ("    enum Way {", Some(Defined::Type("Way"))),
            ("pub trait Room {", Some(Defined::Type("Room"))),
            ("type Told = u8;", Some(Defined::Type("Told"))),
            ("    type Error = Told;", None),
            ("mod kept;", Some(Defined::Module("kept"))),
            ("pub const MOST: u8 = 1;", Some(Defined::Constant("MOST"))),
            ("    pub async fn ask(&self) {", Some(Defined::Function("ask"))),
            ("// struct Held", None),
            ("use crate::kept::Held;", None),
        ] {
            assert_eq!(defined(line), wanted, "{line}");
        }
    }

    #[test]
    fn private_words_are_found_with_the_fields_word() {
        let found =
            private_words(&[source("engine/src/lib.rs", "mod kept;\npub struct Shelf;\nstruct Slot;\n")]);
        assert_eq!(
            found,
            [
                "engine/src/lib.rs:1: module `kept` is no word of the field; use prefix_cache",
                "engine/src/lib.rs:2: type `Shelf` is no word of the field; use DiskCache, ModelDirs"
            ]
        );
    }

    #[test]
    fn a_type_of_three_crates_is_found_unless_it_is_common() {
        let define = |path| source(path, "struct Peer;\nstruct Error;\n");
        let two = [define("agent/src/a.rs"), define("engine/src/a.rs"), define("engine/src/b.rs")];
        assert!(repeated_types(&two).is_empty());
        let [a, b, c] = two;
        let tests = define("gateway/src/a/tests.rs");
        let example = define("gateway/examples/a.rs");
        assert!(repeated_types(&[a, b, c, tests, example]).is_empty());
        let three = [define("agent/src/a.rs"), define("engine/src/a.rs"), define("engine/mlx/src/a.rs")];
        assert_eq!(
            repeated_types(&three),
            ["agent, engine, engine/mlx define `Peer`; at most 2 may: qualify it"]
        );
    }

    #[test]
    fn limits_are_max_or_min() {
        let text = "const MOST_STOPS: u8 = 4;\nconst MAX_STOPS: u8 = 4;\npub const LEAST: u8 = 1;\n";
        assert_eq!(
            odd_limits(&[source("a.rs", text)]),
            ["a.rs:1: limit `MOST_STOPS` should be `MAX_…`", "a.rs:3: limit `LEAST` should be `MIN_…`"]
        );
    }

    #[test]
    fn test_names_are_bounded_and_other_functions_are_not() {
        let long = "x".repeat(61);
        let text = format!("#[tokio::test(start_paused = true)]\nasync fn {long}() {{}}\nfn {long}() {{}}\n");
        assert_eq!(long_test_names(&[source("a.rs", &text)]).len(), 1);
        let short = "x".repeat(60);
        assert!(long_test_names(&[source("a.rs", &format!("#[test]\nfn {short}() {{}}\n"))]).is_empty());
    }

    #[test]
    fn no_word_is_listed_twice_or_recommended_against_the_list() {
        for list in [TYPES, MODULES, COMMON_TYPES] {
            for (index, (word, _)) in list.iter().enumerate() {
                assert!(list[..index].iter().all(|(other, _)| other != word), "{word} is listed twice");
            }
        }
        for (word, instead) in TYPES {
            for name in instead.split(", ") {
                assert!(TYPES.iter().all(|(other, _)| *other != name), "{word}: {name} is forbidden as well");
            }
        }
        for (word, _) in COMMON_TYPES {
            assert!(TYPES.iter().all(|(other, _)| other != word), "{word} is forbidden and allowed");
        }
    }
}
