//! Methods of Python's types, of which minijinja-contrib's pycompat lacks some, and others have no bound.

use minijinja::value::{Tuple, from_args};
use minijinja::{Error, State, Value};

use super::super::memory::{self, charge};
use super::{MAX_WIDTH, MadeOf, check_arguments, invalid, join_all, replace};

/// Methods of Python's types.
pub(super) fn call_method(
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
    memory::charge_value(&made)?;
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
            memory::check(text.matches('\t').count().checked_mul(size))?;
            Value::from(expand_tabs(text, size))
        }
        _ => return Ok(None),
    };
    memory::charge_value(&made)?;
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
