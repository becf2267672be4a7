//! Manifests: objects in YAML files, folders and on standard input, for `russet apply` and `russet plan`. A
//! list is expanded to its items. Not here: the content of objects.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize as _;
use serde_json::Value;

/// The path that means standard input.
pub const STANDARD_INPUT: &str = "-";

/// An object and its location.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The file.
    pub file: PathBuf,
    /// Number of the document in the file, from 1.
    number: usize,
    /// Number of the item in the list, from 1.
    item: Option<usize>,
    /// The object.
    pub object: Value,
}

impl fmt::Display for Document {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}, document {}", display_path(&self.file), self.number)?;
        self.item.map_or(Ok(()), |item| write!(out, ", item {item}"))
    }
}

/// The objects of files, of folders of files and of standard input, in order.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Document>> {
    let mut found = Vec::new();
    for path in paths {
        for file in files(path)? {
            let bytes = match is_standard_input(&file) {
                true => {
                    let mut bytes = Vec::new();
                    std::io::stdin().read_to_end(&mut bytes).map(|_| bytes)
                }
                false => std::fs::read(&file),
            };
            let text = bytes.and_then(|bytes| decode(&bytes));
            let text = text.with_context(|| format!("cannot read {}", display_path(&file)))?;
            found.extend(parse(&file, &text)?);
        }
    }
    Ok(found)
}

/// The text of a file: UTF-8 with or without a byte order mark, or UTF-16 with one, as editors on Windows and
/// PowerShell's `>` write them.
fn decode(bytes: &[u8]) -> std::io::Result<String> {
    let invalid = |what: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, what.to_owned());
    let utf16 = |bytes: &[u8], unit: fn([u8; 2]) -> u16| {
        let units = bytes.chunks(2).map(|pair| pair.try_into().map(unit));
        let units: Option<Vec<u16>> = units.map(Result::ok).collect();
        units
            .and_then(|units| String::from_utf16(&units).ok())
            .ok_or_else(|| invalid("it is not valid UTF-16"))
    };
    match bytes {
        [0xef, 0xbb, 0xbf, rest @ ..] => String::from_utf8(rest.to_vec()),
        [0xff, 0xfe, rest @ ..] => return utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => return utf16(rest, u16::from_be_bytes),
        _ => String::from_utf8(bytes.to_vec()),
    }
    .map_err(|_| invalid("it is not UTF-8"))
}

/// Whether a path means standard input.
pub fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == STANDARD_INPUT
}

fn display_path(file: &Path) -> String {
    if is_standard_input(file) { "standard input".to_owned() } else { file.display().to_string() }
}

/// The YAML files of a path, without `kustomization.yaml`, which is for kustomize.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if is_standard_input(path) || !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("{}", path.display()))? {
        let file = entry?.path();
        let is_yaml = file
            .extension()
            .is_some_and(|extension| extension == "yaml" || extension == "yml" || extension == "json");
        if is_yaml && file.file_stem().is_some_and(|stem| stem != "kustomization") {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}

fn parse(file: &Path, text: &str) -> Result<Vec<Document>> {
    let mut found = Vec::new();
    for (index, document) in serde_norway::Deserializer::from_str(text).enumerate() {
        let number = index + 1;
        let object = Value::deserialize(document)
            .with_context(|| format!("{}, document {number} is not valid YAML", display_path(file)))?;
        let one = |item, object| Document { file: file.to_owned(), number, item, object };
        match (list_of(&object), object) {
            (_, Value::Null) => {}
            (Some(kind), Value::Object(mut list)) => {
                let (version, items) = (list.get("apiVersion").cloned(), list.remove("items"));
                let items = items.as_ref().and_then(Value::as_array).cloned().unwrap_or_default();
                for (item, mut object) in items.into_iter().enumerate() {
                    if let (Some(fields), false) = (object.as_object_mut(), kind.is_empty()) {
                        // A server names the kind only once in a list of one kind.
                        fields.entry("kind").or_insert_with(|| Value::String(kind.clone()));
                        fields.entry("apiVersion").or_insert_with(|| version.clone().unwrap_or_default());
                    }
                    found.push(one(Some(item + 1), object));
                }
            }
            (_, object) => found.push(one(None, object)),
        }
    }
    Ok(found)
}

/// The kind of a list's items, empty if each item names its own; `None` if the object is no list.
fn list_of(object: &Value) -> Option<String> {
    let kind = object["kind"].as_str()?.strip_suffix("List")?;
    (kind.is_empty() || object["items"].is_array()).then(|| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_lists_and_lists_of_one_kind_are_their_objects() {
        let text = "---\nkind: Model\n---\n---\nkind: List\nitems: [{kind: Shard}, 7]\n---\n\
                    kind: NodePoolList\napiVersion: russet.dev/v1alpha1\nitems:\n- metadata: {name: p}\n---\nkind: AllowList\n";
        let found = parse(Path::new("a.yaml"), text).unwrap();
        let shown: Vec<String> = found.iter().map(|it| format!("{it}: {}", it.object)).collect();
        let place = |rest: &str| format!("a.yaml, document {rest}");
        assert_eq!(
            shown,
            [
                place(r#"1: {"kind":"Model"}"#),
                place(r#"3, item 1: {"kind":"Shard"}"#),
                place("3, item 2: 7"),
                place(
                    r#"4, item 1: {"metadata":{"name":"p"},"kind":"NodePool","apiVersion":"russet.dev/v1alpha1"}"#
                ),
                place(r#"5: {"kind":"AllowList"}"#),
            ]
        );
        let error = format!("{:#}", parse(Path::new("-"), "kind: Model\n---\na: [").unwrap_err());
        assert!(error.starts_with("standard input, document 2 is not valid YAML: "), "{error}");
    }

    #[test]
    fn files_may_begin_with_a_byte_order_mark() {
        let utf16 = |mark: &[u8], bytes: fn(u16) -> [u8; 2]| {
            [mark, &"kind: Mödel".encode_utf16().flat_map(bytes).collect::<Vec<u8>>()].concat()
        };
        for bytes in [
            "kind: Mödel".as_bytes().to_vec(),
            "\u{feff}kind: Mödel".as_bytes().to_vec(),
            utf16(&[0xff, 0xfe], u16::to_le_bytes),
            utf16(&[0xfe, 0xff], u16::to_be_bytes),
        ] {
            let found = parse(Path::new("a.yaml"), &decode(&bytes).unwrap()).unwrap();
            assert_eq!(found[0].object["kind"], "Mödel", "{bytes:?}");
        }
        for bytes in [&b"kind: M\xf6del"[..], b"\xff\xfek", b"\xff\xfe\x00\xd8"] {
            assert!(decode(bytes).unwrap_err().to_string().contains("UTF-"), "{bytes:?}");
        }
    }
}
