//! Filters, operators and methods of Python's Jinja that minijinja lacks or has without a bound on what one call makes.
//! Not here: the budget (`memory`).

mod jinja;
mod methods;
mod slice;
mod to_json;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters as builtin};

use super::memory::{self, BoundedText, ITEM_BYTES, bounded_text, charge};

/// `~` as a filter of two values.
pub(super) const CONCAT: &str = "russet_concat";
/// `*` as a filter of two values.
pub(super) const MULTIPLY: &str = "russet_multiply";
/// `%` as a filter of two values.
pub(super) const REMAINDER: &str = "russet_remainder";
/// `[start:stop:step]` as a filter of four values.
pub(super) const SLICE: &str = "russet_slice";
/// What stands where a template names another one: a filter of the name that always fails.
pub(super) const OTHER_TEMPLATE: &str = "russet_other_template";

/// Widest field that a template may ask for, in characters.
const MAX_WIDTH: usize = 1000;

/// Adds them.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(methods::call_method);
    environment.add_filter(CONCAT, concat);
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(REMAINDER, remainder);
    environment.add_filter(SLICE, slice::slice);
    environment.add_filter(OTHER_TEMPLATE, other_template);
    environment.add_filter("tojson", to_json::to_json);
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
        ("upper", MadeOf::Text, Value::from_function(builtin::upper)),
        ("lower", MadeOf::Text, Value::from_function(builtin::lower)),
        ("title", MadeOf::Text, Value::from_function(builtin::title)),
        ("capitalize", MadeOf::Text, Value::from_function(builtin::capitalize)),
        ("trim", MadeOf::Text, Value::from_function(builtin::trim)),
        ("string", MadeOf::Text, Value::from_function(builtin::string)),
        ("escape", MadeOf::Text, Value::from_function(builtin::escape)),
        ("e", MadeOf::Text, Value::from_function(builtin::escape)),
        ("pprint", MadeOf::Text, Value::from_function(builtin::pprint)),
        ("split", MadeOf::Text, Value::from_function(builtin::split)),
        ("lines", MadeOf::Text, Value::from_function(builtin::lines)),
        ("sum", MadeOf::Text, Value::from_function(builtin::sum)),
        ("format", MadeOf::Fields, Value::from_function(builtin::format)),
        ("indent", MadeOf::Width, Value::from_function(builtin::indent)),
        ("batch", MadeOf::Width, Value::from_function(builtin::batch)),
        ("slice", MadeOf::Width, Value::from_function(builtin::slice)),
    ] {
        environment.add_filter(name, bounded(made_of, filter));
    }
    environment.remove_global("debug");
    jinja::add_to(environment);
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
        memory::charge_value(&made)?;
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

/// A value in a message: lists, and long texts, by their kind alone, since a list may hold all of a conversation many times.
fn shown(value: &Value) -> String {
    const MAX_SHOWN_BYTES: usize = 64;
    match value.kind() {
        ValueKind::Number | ValueKind::Bool | ValueKind::None => value.to_string(),
        kind => match value.as_str().filter(|text| text.len() <= MAX_SHOWN_BYTES) {
            Some(text) => format!("{text:?}"),
            None => format!("a {kind}"),
        },
    }
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
            memory::check((text.matches('\n').count() + 1).checked_mul(widest))
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
    let message = format!("include, import and extends of {}: there is no other template", shown(&name));
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
        memory::check(bytes)?;
        charge(bytes.unwrap_or(usize::MAX))?;
        return Ok(Value::from(text.repeat(times)));
    }
    let items = length(repeated)?.checked_mul(times).and_then(|items| items.checked_mul(ITEM_BYTES));
    memory::check(items)?;
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
    let impossible = || invalid(format!("{} {operator} {} has no value", shown(left), shown(right)));
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
    memory::check(replaced.checked_mul(new.len()).and_then(|bytes| bytes.checked_add(text.len())))?;
    let made = text.replacen(old, new, replaced);
    charge(made.len())?;
    Ok(Value::from(made))
}
