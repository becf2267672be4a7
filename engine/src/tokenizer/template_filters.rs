//! Filters, operators and methods of Python's Jinja that minijinja lacks or has without a bound on what one call makes.
//! Not here: the budget (`template_memory`).

use std::fmt::Write as _;
use std::io;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use serde::Serialize as _;

use super::template_memory::{self, BoundedText, ITEM_BYTES, bounded_text, charge};

/// `~` as a filter of two values.
pub(super) const CONCAT: &str = "russet_concat";
/// `*` as a filter of two values.
pub(super) const MULTIPLY: &str = "russet_multiply";
/// `%` as a filter of two values.
pub(super) const REMAINDER: &str = "russet_remainder";
/// What stands where a template names another one: a filter of the name that always fails.
pub(super) const OTHER_TEMPLATE: &str = "russet_other_template";

/// Widest field that a template may ask for, in characters.
const MAX_WIDTH: usize = 1000;

/// Adds them.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(call_method);
    environment.add_filter(CONCAT, concat);
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(REMAINDER, remainder);
    environment.add_filter(OTHER_TEMPLATE, other_template);
    environment.add_filter("tojson", to_json);
    environment.add_filter("join", join);
    environment.add_filter("replace", |text: Value, old: Value, new: Value, count: Option<i64>| {
        replace(&bounded_text(&text)?, &bounded_text(&old)?, &bounded_text(&new)?, count)
    });
    environment.add_filter("wordcount", |text: String| text.split_whitespace().count());
    // Python counts what is undefined as nothing.
    environment
        .add_filter("length", |value: Value| if value.is_undefined() { Ok(0) } else { length(&value) });
    environment.add_filter("count", |value: Value| if value.is_undefined() { Ok(0) } else { length(&value) });
    // Texts are sequences of characters.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    // Templates guard `tools | length` with it, and Python's None is not iterable.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    // These write lists as text, or make something as wide as they are told.
    for (name, made_of, filter) in [
        ("upper", MadeOf::Text, Value::from_function(filters::upper)),
        ("lower", MadeOf::Text, Value::from_function(filters::lower)),
        ("title", MadeOf::Text, Value::from_function(filters::title)),
        ("capitalize", MadeOf::Text, Value::from_function(filters::capitalize)),
        ("trim", MadeOf::Text, Value::from_function(filters::trim)),
        ("string", MadeOf::Text, Value::from_function(filters::string)),
        ("escape", MadeOf::Text, Value::from_function(filters::escape)),
        ("e", MadeOf::Text, Value::from_function(filters::escape)),
        ("pprint", MadeOf::Text, Value::from_function(filters::pprint)),
        ("split", MadeOf::Text, Value::from_function(filters::split)),
        ("lines", MadeOf::Text, Value::from_function(filters::lines)),
        ("sum", MadeOf::Text, Value::from_function(filters::sum)),
        ("format", MadeOf::Fields, Value::from_function(filters::format)),
        ("indent", MadeOf::Width, Value::from_function(filters::indent)),
        ("batch", MadeOf::Width, Value::from_function(filters::batch)),
        ("slice", MadeOf::Width, Value::from_function(filters::slice)),
    ] {
        environment.add_filter(name, bounded(made_of, filter));
    }
    environment.remove_global("debug");
}

/// A filter that looks at its arguments first, and counts what it makes.
fn bounded(
    made_of: MadeOf,
    filter: Value,
) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, arguments| {
        let arguments = arguments.into_values();
        check_arguments(made_of, &arguments)?;
        let made = filter.call(state, &arguments)?;
        template_memory::charge_value(&made)?;
        Ok(made)
    }
}

/// What the size of a call's result depends on, its arguments as text aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MadeOf {
    Text,
    /// The fields of a format string, the first argument.
    Fields,
    /// A number among the arguments.
    Width,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Bounds what one call makes of its arguments, before it does.
fn check_arguments(made_of: MadeOf, arguments: &[Value]) -> Result<(), Error> {
    let lists = arguments.iter().filter(|value| !value.is_kwargs());
    for list in
        lists.filter(|value| matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable))
    {
        bounded_text(list)?;
    }
    let text = arguments.first().and_then(Value::as_str).unwrap_or_default();
    match made_of {
        MadeOf::Text => Ok(()),
        MadeOf::Fields if has_wide_field(text) => {
            Err(invalid(format!("a field is more than {MAX_WIDTH} characters wide")))
        }
        MadeOf::Fields => Ok(()),
        MadeOf::Width => {
            let mut widths: Vec<usize> = arguments.iter().skip(1).filter_map(Value::as_usize).collect();
            if let Some(last) = arguments.last().filter(|last| last.is_kwargs()) {
                let named = Kwargs::try_from(last.clone())?;
                widths.extend(named.args().filter_map(|name| named.peek::<Value>(name).ok()?.as_usize()));
            }
            let widest = widths.into_iter().max().unwrap_or(0);
            if widest > MAX_WIDTH {
                return Err(invalid(format!("{widest} is more than {MAX_WIDTH}")));
            }
            template_memory::check((text.matches('\n').count() + 1).checked_mul(widest))
        }
    }
}

/// Whether a format string asks for a width of more digits than [`MAX_WIDTH`] has, or for one in an argument.
fn has_wide_field(text: &str) -> bool {
    let field = text.split(['%', '{']).skip(1);
    field.into_iter().any(|field| {
        let spec = field.split(|c: char| c.is_ascii_alphabetic() || c == '}').next().unwrap_or_default();
        let digits = spec.split(|c: char| !c.is_ascii_digit());
        digits.into_iter().any(|digits| digits.trim_start_matches('0').len() > 3) || spec.contains('*')
    })
}

fn length(value: &Value) -> Result<usize, Error> {
    value.len().ok_or_else(|| invalid(format!("{} has no length", value.kind())))
}

/// A model has one template. By its own name it would run once more, without counting.
fn other_template(name: Value) -> Result<Value, Error> {
    let message = format!("include, import and extends of {name}: there is no other template");
    Err(Error::new(ErrorKind::TemplateNotFound, message))
}

fn concat(left: Value, right: Value) -> Result<Value, Error> {
    let mut text = BoundedText::default();
    text.push(&left)?;
    text.push(&right)?;
    charge(text.text.len())?;
    Ok(Value::from(text.text))
}

fn multiply(left: Value, right: Value) -> Result<Value, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    let (repeated, times) =
        if right.as_str().is_some() || is_list(&right) { (&right, &left) } else { (&left, &right) };
    if repeated.as_str().is_none() && !is_list(repeated) {
        return numbers("*", &left, &right, i128::checked_mul, |left, right| left * right);
    }
    // As in Python, a negative number repeats nothing.
    let times =
        i64::try_from(times.clone()).map_err(|_| invalid("texts and lists are multiplied by integers"))?;
    let times = usize::try_from(times).unwrap_or(0);
    if let Some(text) = repeated.as_str() {
        let bytes = text.len().checked_mul(times);
        template_memory::check(bytes)?;
        charge(bytes.unwrap_or(usize::MAX))?;
        return Ok(Value::from(text.repeat(times)));
    }
    let items = length(repeated)?.checked_mul(times).and_then(|items| items.checked_mul(ITEM_BYTES));
    template_memory::check(items)?;
    charge(items.unwrap_or(usize::MAX))?;
    let items: Vec<Value> = repeated.try_iter()?.collect();
    let all = items.iter().cloned().cycle().take(items.len() * times).collect::<Vec<_>>();
    Ok(if repeated.is_tuple() { Value::from(Tuple::from(all)) } else { Value::from(all) })
}

fn remainder(left: Value, right: Value) -> Result<Value, Error> {
    let Some(text) = left.as_str() else {
        let floor = |left: f64, right: f64| left - right * (left / right).floor();
        let floor_int = |left: i128, right: i128| {
            let rest = left.checked_rem(right)?;
            Some(if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest })
        };
        return numbers("%", &left, &right, floor_int, floor);
    };
    check_arguments(MadeOf::Fields, &[left.clone(), right.clone()])?;
    let arguments = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right] };
    let made = format(FormatStyle::Printf, text, &arguments)?;
    charge(made.len())?;
    Ok(Value::from(made))
}

fn numbers(
    operator: &str,
    left: &Value,
    right: &Value,
    integers: impl Fn(i128, i128) -> Option<i128>,
    floats: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let impossible = || invalid(format!("{left} {operator} {right} has no value"));
    let number = |value: &Value| {
        if value.kind() == ValueKind::Bool { Value::from(i64::from(value.is_true())) } else { value.clone() }
    };
    let (left, right) = (number(left), number(right));
    if left.is_integer() && right.is_integer() {
        let (left, right) = (i128::try_from(left), i128::try_from(right));
        let made = left.ok().zip(right.ok()).and_then(|(left, right)| integers(left, right));
        return made.map(Value::from).ok_or_else(impossible);
    }
    let (left, right) = (f64::try_from(left), f64::try_from(right));
    let (left, right) = left.ok().zip(right.ok()).ok_or_else(impossible)?;
    if operator == "%" && right == 0.0 { Err(impossible()) } else { Ok(Value::from(floats(left, right))) }
}

fn join(value: Value, separator: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let attribute: Option<String> = options.get("attribute")?;
    let separator = match separator {
        Some(separator) => separator,
        None => options.get::<Option<Value>>("d")?.unwrap_or_else(|| Value::from("")),
    };
    options.assert_all_used()?;
    if value.is_undefined() {
        return Ok(Value::from(""));
    }
    let items = value.try_iter()?.checked().map(|item| match (&attribute, item) {
        (Some(attribute), Ok(item)) => item.get_attr(attribute),
        (_, item) => item,
    });
    join_all(items, &separator)
}

fn join_all(items: impl Iterator<Item = Result<Value, Error>>, separator: &Value) -> Result<Value, Error> {
    let mut text = BoundedText::default();
    for (index, item) in items.enumerate() {
        if index > 0 {
            text.push(separator)?;
        }
        text.push(&item?)?;
    }
    charge(text.text.len())?;
    Ok(Value::from(text.text))
}

fn replace(text: &str, old: &str, new: &str, count: Option<i64>) -> Result<Value, Error> {
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let replaced = text.matches(old).take(count).count();
    template_memory::check(replaced.checked_mul(new.len()).and_then(|bytes| bytes.checked_add(text.len())))?;
    let made = text.replacen(old, new, replaced);
    charge(made.len())?;
    Ok(Value::from(made))
}

/// Methods of Python's types.
fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if method == "format" {
        check_arguments(MadeOf::Fields, &[std::slice::from_ref(value), arguments].concat())?;
    }
    let made = match value.as_str() {
        Some(text) => match text_method(text, method, arguments)? {
            Some(made) => return Ok(made),
            None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)?,
        },
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)?,
    };
    template_memory::charge_value(&made)?;
    // The texts of a list that `split` makes are copies.
    if method.contains("split") {
        charge(value.as_str().map_or(0, str::len))?;
    }
    Ok(made)
}

/// Methods of texts that pycompat lacks, or has without a bound; `None` for the others.
fn text_method(text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let made = match method {
        "join" => {
            let (values,): (&Value,) = from_args(arguments)?;
            return join_all(values.try_iter()?.checked(), &Value::from(text)).map(Some);
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            return replace(text, old, new, count).map(Some);
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            if separator.is_empty() {
                return Err(invalid("the separator is empty"));
            }
            let found =
                if method == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            charge(text.len())?;
            Value::from(Tuple::from(parts.map(Value::from).to_vec()))
        }
        "rsplit" => {
            let (separator, count): (Option<&str>, Option<i64>) = from_args(arguments)?;
            let count =
                count.and_then(|count| usize::try_from(count).ok()).map_or(usize::MAX, |count| count + 1);
            let mut parts: Vec<Value> = match separator {
                Some("") => return Err(invalid("the separator is empty")),
                Some(separator) => text.rsplitn(count, separator).map(Value::from).collect(),
                None => rsplit_whitespace(text, count).into_iter().map(Value::from).collect(),
            };
            parts.reverse();
            charge(text.len())?;
            Value::from(parts)
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(arguments)?;
            let missing = width.min(MAX_WIDTH).saturating_sub(text.chars().count());
            // As Python does, which puts the odd one left of texts of odd width.
            let left = match method {
                "ljust" => 0,
                "rjust" => missing,
                _ => missing / 2 + (missing & width & 1),
            };
            let character = fill.and_then(|fill| fill.chars().next()).unwrap_or(' ');
            let fill = |count: usize| character.to_string().repeat(count);
            Value::from(format!("{}{text}{}", fill(left), fill(missing - left)))
        }
        "zfill" => {
            let (width,): (usize,) = from_args(arguments)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let missing = width.min(MAX_WIDTH).saturating_sub(text.chars().count());
            Value::from(format!("{sign}{}{digits}", "0".repeat(missing)))
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(arguments)?;
            let found = if method == "index" { text.find(part) } else { text.rfind(part) };
            let found = found.ok_or_else(|| invalid("substring not found"))?;
            Value::from(text[..found].chars().count())
        }
        "swapcase" => {
            let () = from_args(arguments)?;
            let swapped = |c: char| -> String {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            };
            Value::from(text.chars().map(swapped).collect::<String>())
        }
        "casefold" => {
            let () = from_args(arguments)?;
            Value::from(text.to_lowercase().replace('ß', "ss"))
        }
        "istitle" => {
            let () = from_args(arguments)?;
            Value::from(is_title(text))
        }
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(arguments)?;
            let size = size.unwrap_or(8).min(MAX_WIDTH);
            template_memory::check(text.matches('\t').count().checked_mul(size))?;
            Value::from(expand_tabs(text, size))
        }
        _ => return Ok(None),
    };
    template_memory::charge_value(&made)?;
    Ok(Some(made))
}

/// The last `count - 1` words, last first, and what is before them.
fn rsplit_whitespace(text: &str, count: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        if parts.len() + 1 == count {
            parts.push(rest);
            break;
        }
        let start = rest.char_indices().rev().find(|(_, c)| c.is_whitespace());
        let start = start.map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end();
    }
    parts
}

/// Whether capital letters follow only what is no letter, and others only letters.
fn is_title(text: &str) -> bool {
    let (mut within_word, mut some) = (false, false);
    for c in text.chars() {
        if (c.is_uppercase() && within_word) || (c.is_lowercase() && !within_word) {
            return false;
        }
        within_word = c.is_uppercase() || c.is_lowercase();
        some |= within_word;
    }
    some
}

fn expand_tabs(text: &str, size: usize) -> String {
    let (mut expanded, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let spaces = size - column % size;
                expanded.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            c => {
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                expanded.push(c);
            }
        }
    }
    expanded
}

/// JSON as Python's `json.dumps` writes it, which models were trained on; the built-in filter escapes for
/// HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
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
        true => template_memory::check(None).err().unwrap_or_else(|| invalid(error.to_string())),
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
