//! Arguments as literals of a notation like JSON: Python's keyword arguments, and Gemma's members without quotes. What a
//! schema says of text and numbers is enforced as JSON, whose strings and numbers such notations read.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::forms::{Form, Kind, Member, forms, length, members, with_definitions};
use super::lark::{LarkRules, quoted, regex};
use crate::parser::tools::syntax::LiteralNotation;

/// A name that needs no quotes.
const WORD: &str = "[A-Za-z_][A-Za-z0-9_]{0,63}";

/// The arguments of a call, in the order of the schema; those that are not required may be left out.
pub(super) fn arguments(
    notation: &'static LiteralNotation,
    schema: &Value,
    rules: &mut LarkRules<'_>,
) -> String {
    let mut literals = Literals { rules, root: schema, notation, named: HashMap::new(), any: None };
    let all = schema.as_object().map(members).unwrap_or_default();
    if all.is_empty() && schema["additionalProperties"] != false {
        let (name, any) = (regex(WORD), literals.any());
        let one = format!("{name} {} {any}", quoted(notation.assign));
        return format!("({one} ({} {one})*)?", quoted(notation.between));
    }
    literals
        .row(all, |literals, key| format!("{} {}", literals.argument(key), quoted(literals.notation.assign)))
}

/// A key that the notation cannot write.
pub(super) fn unwritable(notation: &LiteralNotation, schema: &Value) -> Option<String> {
    let all = schema.as_object().map(members).unwrap_or_default();
    let key = all.iter().map(|member| member.key).find(|key| match notation.quote {
        None => !is_word(key),
        Some(quote) => key.contains(quote),
    });
    key.map(str::to_owned)
}

/// As the parsers read one.
fn is_word(key: &str) -> bool {
    let of_word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
    !key.is_empty() && key.chars().all(of_word) && !key.starts_with(|c: char| c.is_ascii_digit())
}

struct Literals<'a, 'r, 'v> {
    rules: &'r mut LarkRules<'v>,
    root: &'a Value,
    notation: &'static LiteralNotation,
    /// The rules of parts of the schema, by their places: parts may refer to each other in a circle.
    named: HashMap<*const Value, String>,
    any: Option<String>,
}

impl<'a> Literals<'a, '_, '_> {
    fn value(&mut self, schema: &'a Value) -> String {
        if let Some(name) = self.named.get(&std::ptr::from_ref(schema)) {
            return name.clone();
        }
        if self.rules.is_too_large() {
            return String::new();
        }
        let name = self.rules.reserve();
        self.named.insert(schema, name.clone());
        let alternatives: Vec<String> =
            forms(schema, self.root).into_iter().map(|form| self.form(form)).collect();
        self.rules.define(&name, &alternatives.join(" | "));
        name
    }

    fn form(&mut self, form: Form<'a>) -> String {
        let LiteralNotation { quote, words: [yes, no, none], between, .. } = *self.notation;
        match form.kind {
            Kind::Values(values) => {
                let values: Vec<String> = values.into_iter().map(|value| self.literal(value)).collect();
                values.join(" | ")
            }
            Kind::Text => match quote {
                Some(quote) if form.schema.get("pattern").or(form.schema.get("format")).is_none() => {
                    format!(
                        "{} {}",
                        self.rules.marker(quote),
                        self.rules.text_until(length(&form.schema), quote)
                    )
                }
                _ => self.rules.json(form.schema),
            },
            Kind::Number => self.rules.json(form.schema),
            Kind::Boolean => format!("{} | {}", quoted(yes), quoted(no)),
            Kind::Null => quoted(none),
            Kind::List { items, least, most } => {
                let one = self.value(items);
                format!("\"[\" {} \"]\"", list(&one, between, least, most))
            }
            Kind::Members(all) => {
                let row = self.row(all, Self::key);
                format!("\"{{\" {row} \"}}\"")
            }
            Kind::AnyMembers => self.any_members(),
            Kind::Any => self.any(),
            Kind::Other => self.rules.json(with_definitions(&form.schema, self.root)),
        }
    }

    /// Members with something between two of them; an expression. From the last to the first: what may follow a member
    /// is another rule where a member is before it.
    fn row(&mut self, members: Vec<Member<'a>>, before: impl Fn(&Self, &str) -> String) -> String {
        let between = quoted(self.notation.between);
        let (mut first, mut next) = (String::new(), String::new());
        for Member { key, schema, required } in members.into_iter().rev() {
            let one = format!("{} {}", before(self, key), self.value(schema));
            let one = self.rules.rule("", &one);
            first = match (required, first.is_empty()) {
                (true, _) => format!("{one} {next}"),
                (false, true) => format!("({one} {next})?"),
                (false, false) => format!("({one} {next} | {first})"),
            };
            next = if required {
                format!("{between} {one} {next}")
            } else {
                format!("({between} {one})? {next}")
            };
            first = self.rules.rule("", &first);
            next = self.rules.rule("", &next);
        }
        first
    }

    fn argument(&self, key: &str) -> String {
        match self.notation.quote {
            None => quoted(key),
            Some(quote) => self.key_in(quote, key),
        }
    }

    /// A key of an object, with what stands before its value.
    fn key(&self, key: &str) -> String {
        let end = quoted(self.notation.key_end);
        match self.notation.quote {
            None => format!("{} {end}", quoted(&quoted(key))),
            Some(quote) => format!("{} {end}", self.key_in(quote, key)),
        }
    }

    fn key_in(&self, quote: &str, key: &str) -> String {
        if is_word(key) { quoted(key) } else { self.text(quote, key) }
    }

    fn text(&self, quote: &str, text: &str) -> String {
        let text = if text.is_empty() { String::new() } else { quoted(text) };
        format!("{} {text} {}", self.rules.marker(quote), self.rules.marker(quote))
    }

    /// A value that the schema has; an expression.
    fn literal(&self, value: &Value) -> String {
        let LiteralNotation { quote, words: [yes, no, none], between, .. } = *self.notation;
        let between = format!(" {} ", quoted(between));
        match (value, quote) {
            (Value::Null, _) => quoted(none),
            (Value::Bool(value), _) => quoted(if *value { yes } else { no }),
            (Value::String(text), Some(quote)) if !text.contains(quote) => self.text(quote, text),
            (Value::Number(_) | Value::String(_), _) => quoted(&value.to_string()),
            (Value::Array(items), _) => {
                let items: Vec<String> = items.iter().map(|item| self.literal(item)).collect();
                format!("\"[\" {} \"]\"", items.join(&between))
            }
            (Value::Object(fields), _) => {
                let fields =
                    fields.iter().map(|(key, value)| format!("{} {}", self.key(key), self.literal(value)));
                format!("\"{{\" {} \"}}\"", fields.collect::<Vec<_>>().join(&between))
            }
        }
    }

    fn any(&mut self) -> String {
        if let Some(name) = &self.any {
            return name.clone();
        }
        let name = self.rules.reserve();
        self.any = Some(name.clone());
        let LiteralNotation { quote, words, between, .. } = *self.notation;
        let text = match quote {
            None => self.rules.json(json!({"type": "string"})),
            Some(quote) => format!("{} {}", self.rules.marker(quote), self.rules.until(quote)),
        };
        let number = self.rules.json(json!({"type": "number"}));
        let words = words.map(quoted).join(" | ");
        let list = list(&name, between, 0, None);
        let members = self.any_members();
        self.rules.define(&name, &format!("{text} | {number} | {words} | \"[\" {list} \"]\" | {members}"));
        name
    }

    fn any_members(&mut self) -> String {
        let key = match self.notation.quote {
            None => self.rules.json(json!({"type": "string"})),
            Some(_) => regex(WORD),
        };
        let one = format!("{key} {} {}", quoted(self.notation.key_end), self.any());
        format!("\"{{\" ({one} ({} {one})*)? \"}}\"", quoted(self.notation.between))
    }
}

/// So many of `one`; an expression.
fn list(one: &str, between: &str, least: u64, most: Option<u64>) -> String {
    let more = format!("({} {one})", quoted(between));
    let more = match (least.saturating_sub(1), most.map(|most| most.saturating_sub(1))) {
        (_, Some(0)) => String::new(),
        (0, None) => format!("{more}*"),
        (least, None) => format!("{more}{{{least},}}"),
        (least, Some(most)) => format!("{more}{{{least},{most}}}"),
    };
    match (least, most) {
        (_, Some(0)) => String::new(),
        (0, _) => format!("({one} {more})?"),
        _ => format!("{one} {more}"),
    }
}
