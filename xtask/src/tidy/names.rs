//! Names of types, modules, limits and tests: the field's words, each for one thing. The words are in
//! `vocabulary.rs`.

use std::collections::{BTreeMap, BTreeSet};

use super::vocabulary::{COMMON_TYPES, IDENTIFIERS, LIMITS, MODULES, TYPES};
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

/// The code of a file, with spaces for its comments and for the contents of its literals.
fn code(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let raw =
            rest.strip_prefix('r').and_then(|after| after.find(|c| c != '#').map(|hashes| (after, hashes)));
        let length = match raw {
            _ if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            _ if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |end| end + 2),
            _ if next == '"' => 1 + end_of_string(&rest[1..]),
            Some((after, hashes)) if after[hashes..].starts_with('"') && !code.ends_with(is_word) => {
                let close = format!("\"{}", "#".repeat(hashes));
                let body = 1 + hashes + 1;
                rest[body..].find(&close).map_or(rest.len(), |end| body + end + close.len())
            }
            _ => 0,
        };
        if length == 0 {
            code.push(next);
            rest = &rest[next.len_utf8()..];
            // A quote in a character is not the beginning of a string.
            for quote in ["\"'", "\\\"'"] {
                if next == '\'' && rest.starts_with(quote) {
                    rest = &rest[quote.len()..];
                }
            }
        } else {
            code.extend(rest[..length].chars().map(|c| if c == '\n' { c } else { ' ' }));
            rest = &rest[length..];
        }
    }
    code
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where a string ends, its quote included.
fn end_of_string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            '\\' => escaped = !escaped,
            '"' if !escaped => return at + 1,
            _ => escaped = false,
        }
    }
    text.len()
}

/// Functions, fields and variables with a part that [`IDENTIFIERS`] forbids.
pub fn private_identifiers(sources: &[TidySource]) -> Findings {
    let mut findings = Vec::new();
    for source in sources {
        for (number, line) in (1..).zip(code(&source.text).lines()) {
            for name in line.split(|c| !is_word(c)).filter(|name| name.starts_with(char::is_lowercase)) {
                let Some((part, word)) =
                    name.split('_').find_map(|part| Some((part, instead(IDENTIFIERS, part)?)))
                else {
                    continue;
                };
                let path = source.path.display();
                findings.push(format!(
                    "{path}:{number}: `{part}` in `{name}` is no word of the field; use {word}"
                ));
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

/// Tests whose names are longer than [`MAX_TEST_NAME`]: functions, and names that a table gives to libtest-mimic.
pub fn long_test_names(sources: &[TidySource]) -> Findings {
    let mut findings = Vec::new();
    for source in sources {
        let mut is_test = false;
        // Scenarios are tables of names and functions, in the file that runs them or beside it.
        let has_table = source.path.starts_with("tests")
            || ["libtest_mimic", "Scenario"].iter().any(|word| source.text.contains(word));
        for (number, line) in (1..).zip(source.text.lines()) {
            let code = line.trim_start();
            let mut names = Vec::new();
            if code.starts_with("#[test]") || code.starts_with("#[tokio::test") {
                is_test = true;
            } else if let (true, Some(Defined::Function(name))) = (is_test, defined(line)) {
                is_test = false;
                names.push(name);
            }
            if has_table {
                let literals = code.split('"').skip(1).step_by(2);
                // The module before it is not the name.
                let names_of = literals.map(|text| text.rsplit_once("::").map_or(text, |(_, name)| name));
                names.extend(names_of.filter(|name| identifier(name) == *name));
            }
            for name in names.into_iter().filter(|name| name.len() > MAX_TEST_NAME) {
                let (path, length) = (source.path.display(), name.len());
                findings.push(format!(
                    "{path}:{number}: test `{name}` has {length} characters; at most {MAX_TEST_NAME}"
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{
        COMMON_TYPES, Defined, IDENTIFIERS, MODULES, TYPES, TidySource, defined, long_test_names, odd_limits,
        private_identifiers, private_words, repeated_types,
    };

    fn source(path: &str, text: &str) -> TidySource {
        TidySource { path: path.into(), text: text.to_owned() }
    }

    #[test]
    fn lines_define_types_modules_limits_and_functions() {
        for (line, expected) in [
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
            assert_eq!(defined(line), expected, "{line}");
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
    fn private_identifiers_are_found_in_code_alone() {
        let text = concat!(
            "// told in a comment\n",
            "let said = \"told in a \\\" string\"; /* told\n again */ let told_first = 1;\n",
            "let raw = r#\"told \" raw\"#; let quote = '\"'; let shelf = 2; let retold = 3;\n",
        );
        assert_eq!(
            private_identifiers(&[source("a.rs", text)]),
            [
                "a.rs:3: `told` in `told_first` is no word of the field; use what it is: message, report, expected",
                "a.rs:4: `shelf` in `shelf` is no word of the field; use disk_cache, dirs"
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
        for (path, table, count) in
            [("a.rs", "type Scenario = u8;\n", 1), ("a.rs", "", 0), ("tests/conformance/steps.rs", "", 1)]
        {
            let text = format!("{table}(\"m::{long}\", |c| run(c)),\n(\"m::{short}\", |c| run(c)),\n");
            assert_eq!(long_test_names(&[source(path, &text)]).len(), count, "{path} {text}");
        }
    }

    #[test]
    fn no_word_is_listed_twice_or_recommended_against_the_list() {
        for list in [TYPES, MODULES, IDENTIFIERS, COMMON_TYPES] {
            for (index, (word, _)) in list.iter().enumerate() {
                assert!(list[..index].iter().all(|(other, _)| other != word), "{word} is listed twice");
            }
        }
        for (word, instead) in TYPES {
            for name in instead.split(", ") {
                assert!(TYPES.iter().all(|(other, _)| *other != name), "{word}: {name} is forbidden as well");
            }
        }
        for (word, instead) in IDENTIFIERS {
            let parts = instead.split(", ").flat_map(|name| name.split('_'));
            for part in parts {
                assert!(
                    IDENTIFIERS.iter().all(|(other, _)| *other != part),
                    "{word}: {part} is forbidden as well"
                );
            }
        }
        for (word, _) in COMMON_TYPES {
            assert!(TYPES.iter().all(|(other, _)| other != word), "{word} is forbidden and allowed");
        }
    }
}
