//! The filter `tojson`, as Python writes JSON.

use std::fmt::Write as _;
use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize as _;

use super::super::memory::{self, BoundedText, bounded_text, charge};
use super::invalid;

/// JSON as Python's `json.dumps` writes it, which models were trained on; the built-in filter escapes for
/// HTML.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Value> = options.get("separators")?;
    let formatter = PythonFormatter {
        indent: indent.map(|width| width.min(16)),
        item: separator(separators.as_ref(), 0)?
            .unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.into()),
        key: separator(separators.as_ref(), 1)?.unwrap_or_else(|| ": ".into()),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        depth: 0,
        has_value: false,
    };
    let sort: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| match error.is_io() {
        true => memory::check(None).err().unwrap_or_else(|| invalid(error.to_string())),
        false => Error::new(ErrorKind::BadSerialization, error.to_string()),
    };
    let mut text = BoundedText::default();
    let mut serializer = serde_json::Serializer::with_formatter(BoundedWriter(&mut text), formatter);
    if sort.unwrap_or(false) {
        // Only text that is small enough to be written is turned into a tree, whose maps are sorted here.
        bounded_text(value)?;
        let tree = serde_json::to_value(value).map(sorted).map_err(failed)?;
        tree.serialize(&mut serializer).map_err(failed)?;
    } else {
        value.serialize(&mut serializer).map_err(failed)?;
    }
    charge(text.text.len())?;
    Ok(Value::from_safe_string(text.text))
}

fn separator(separators: Option<&Value>, index: usize) -> Result<Option<String>, Error> {
    let Some(separators) = separators.filter(|separators| !separators.is_none()) else { return Ok(None) };
    let separator = separators.get_item_by_index(index)?;
    separator.as_str().map(|text| Some(text.to_owned())).ok_or_else(|| invalid("separators are two texts"))
}

fn sorted(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value as Json;
    match value {
        Json::Object(fields) => {
            let mut fields: Vec<(String, Json)> = fields.into_iter().collect();
            fields.sort_by(|(one, _), (other, _)| one.cmp(other));
            Json::Object(fields.into_iter().map(|(name, value)| (name, sorted(value))).collect())
        }
        Json::Array(items) => Json::Array(items.into_iter().map(sorted).collect()),
        value => value,
    }
}

/// Bytes of a text, up to the budget.
struct BoundedWriter<'a>(&'a mut BoundedText);

impl io::Write for BoundedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A serializer writes whole texts.
        let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
        self.0.write_str(text).map_err(|_| io::Error::other("the text is too long"))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `{"a": 1, "b": [1, 2]}`: a space after every comma and colon, or lines and indentation.
struct PythonFormatter {
    indent: Option<usize>,
    item: String,
    key: String,
    ascii: bool,
    depth: usize,
    has_value: bool,
}

impl PythonFormatter {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }

    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => writer.write_all(format!("\n{}", " ".repeat(width * self.depth)).as_bytes()),
            None => Ok(()),
        }
    }
}

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        if !self.ascii {
            return writer.write_all(text.as_bytes());
        }
        for c in text.chars() {
            if c.is_ascii() {
                writer.write_all(&[c as u8])?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}
