//! Filters and functions that Jinja has built in and minijinja lacks.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, HtmlEscape, Value};
use minijinja_contrib::{filters, globals};

use super::super::memory::{self, ITEM_BYTES, bounded_text, charge};
use super::{MAX_WIDTH, invalid};

/// Adds them.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter("filesizeformat", filters::filesizeformat);
    environment.add_filter("striptags", |text: String| charged(filters::striptags(text)));
    environment.add_filter("urlencode", url_encode);
    environment.add_filter("wordwrap", word_wrap);
    environment.add_filter("xmlattr", xml_attributes);
    environment.add_function("cycler", globals::cycler);
    environment.add_function("dict", dict);
    environment.add_function("joiner", globals::joiner);
}

fn charged(text: String) -> Result<Value, Error> {
    charge(text.len())?;
    Ok(Value::from(text))
}

/// A dictionary of another one, or of pairs.
fn dict(values: Option<Value>, more: Kwargs) -> Result<Value, Error> {
    let mut items = match values.filter(|values| !values.is_undefined()) {
        Some(values) => pairs(&values)?,
        None => Vec::new(),
    };
    for name in more.args() {
        items.push((Value::from(name), more.peek(name)?));
    }
    charge(items.len().saturating_mul(ITEM_BYTES))?;
    Ok(Value::from_pairs(items))
}

/// Keys and values of a dictionary, or of a list of pairs.
fn pairs(values: &Value) -> Result<Vec<(Value, Value)>, Error> {
    let pair = |item: Value| match values.kind() {
        ValueKind::Map => Ok((item.clone(), values.get_item(&item)?)),
        _ if item.len() == Some(2) => Ok((item.get_item_by_index(0)?, item.get_item_by_index(1)?)),
        _ => Err(invalid(format!("{} is no pair of a key and a value", item.kind()))),
    };
    values.try_iter()?.checked().map(|item| pair(item?)).collect()
}

/// A text as part of a URL, or a query of a dictionary or of pairs.
fn url_encode(value: Value) -> Result<Value, Error> {
    let encode = |value: &Value, is_query: bool| -> Result<String, Error> {
        let text = bounded_text(value)?;
        memory::check(text.len().checked_mul(3))?;
        let mut encoded = String::new();
        for byte in text.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    encoded.push(byte.into())
                }
                b'/' if !is_query => encoded.push('/'),
                b' ' if is_query => encoded.push('+'),
                byte => {
                    let _ = write!(encoded, "%{byte:02X}");
                }
            }
        }
        Ok(encoded)
    };
    if !matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
        return charged(encode(&value, false)?);
    }
    let mut query = String::new();
    for (key, value) in pairs(&value)? {
        let separator = if query.is_empty() { "" } else { "&" };
        let _ = write!(query, "{separator}{}={}", encode(&key, true)?, encode(&value, true)?);
        memory::check(Some(query.len()))?;
    }
    charged(query)
}

/// Lines of at most `width` characters.
fn word_wrap(text: Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let mut arguments = arguments.into_values();
    let named = arguments.pop_if(|last| last.is_kwargs()).map(Kwargs::try_from).transpose()?;
    let named = named.unwrap_or_else(|| Kwargs::from_iter(std::iter::empty::<(&str, Value)>()));
    let argument = |position: usize, name: &str| match arguments.get(position) {
        Some(value) => Ok(Some(value.clone())),
        None => named.get::<Option<Value>>(name),
    };
    let width = argument(0, "width")?.map_or(Some(79), |width| width.as_usize());
    let long = argument(1, "break_long_words")?.is_none_or(|long| long.is_true());
    let wrap = argument(2, "wrapstring")?.filter(|wrap| !wrap.is_none()).unwrap_or_else(|| Value::from("\n"));
    let hyphens = argument(3, "break_on_hyphens")?.is_none_or(|hyphens| hyphens.is_true());
    named.assert_all_used()?;
    let text = bounded_text(&text)?;
    // There are fewer line ends than characters.
    memory::check(text.len().checked_mul(1 + bounded_text(&wrap)?.len()))?;
    let Some(width) = width.filter(|width| (1..=MAX_WIDTH).contains(width)) else {
        return Err(invalid(format!("the width of lines is a number from 1 to {MAX_WIDTH}")));
    };
    let options = Kwargs::from_iter([
        ("width", Value::from(width)),
        ("break_long_words", Value::from(long)),
        ("break_on_hyphens", Value::from(hyphens)),
        ("wrapstring", wrap),
    ]);
    let wrapped = filters::wordwrap(&Value::from(text), options)?;
    memory::charge_value(&wrapped)?;
    Ok(wrapped)
}

/// Attributes of an element, without those that have no value.
fn xml_attributes(attributes: Value, autospace: Option<bool>) -> Result<Value, Error> {
    let mut text = String::new();
    for (name, value) in pairs(&attributes)? {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let (name, value) = (bounded_text(&name)?, bounded_text(&value)?);
        // An escaped character has six bytes at most.
        memory::check(name.len().checked_add(value.len()).and_then(|bytes| bytes.checked_mul(6)))?;
        if name.contains([' ', '\t', '\n', '\u{c}', '\r', '/', '>', '=']) {
            return Err(invalid("the name of an attribute has a blank, or one of />="));
        }
        let space = if text.is_empty() && !autospace.unwrap_or(true) { "" } else { " " };
        let _ = write!(text, "{space}{}=\"{}\"", HtmlEscape(&name), HtmlEscape(&value));
        memory::check(Some(text.len()))?;
    }
    charged(text)
}
