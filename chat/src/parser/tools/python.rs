//! Python's literals and calls with keyword arguments, written as JSON text. No expressions, no positional
//! arguments, no variables.

use super::json::{ObjectText, quoted};
use super::{MAX_NESTING, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const THREE_QUOTES: &str = "\"\"\"";

/// The JSON text of a Python literal.
pub(super) fn literal(text: &str) -> Option<String> {
    let mut cursor = PythonCursor { rest: text };
    let value = cursor.value(0)?;
    cursor.space();
    cursor.rest.is_empty().then_some(value)
}

/// The calls of `[f(a=1), g()]`, or of calls without the brackets; those need no comma between them.
pub(super) fn calls(text: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    calls_by(text, |cursor| cursor.call(tools, |name| name))
}

/// The same where a call may be that of a module, `default_api.f()`, and an argument of `print`.
pub(super) fn printed_calls(text: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    calls_by(text, |cursor| cursor.printed_call(tools))
}

/// The one call of `f.call(a=1)`.
pub(super) fn call_of_method(text: &str, tools: &[Tool]) -> Option<ToolCall> {
    let mut cursor = PythonCursor { rest: text.trim() };
    let call = cursor.call(tools, |name| name.strip_suffix(".call").unwrap_or(name))?;
    cursor.rest.is_empty().then_some(call)
}

fn calls_by(text: &str, read: impl Fn(&mut PythonCursor<'_>) -> Option<ToolCall>) -> Option<Vec<ToolCall>> {
    let mut cursor = PythonCursor { rest: text.trim() };
    let is_list = cursor.take('[');
    if is_list {
        cursor.rest = cursor.rest.strip_suffix(']')?;
    }
    let mut calls = Vec::new();
    loop {
        cursor.space();
        if cursor.rest.is_empty() {
            return Some(calls);
        }
        calls.push(read(&mut cursor)?);
        cursor.space();
        if !cursor.take(',') && is_list && !cursor.rest.is_empty() {
            return None;
        }
    }
}

struct PythonCursor<'a> {
    rest: &'a str,
}

impl<'a> PythonCursor<'a> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, c: char) -> bool {
        let rest = self.rest.strip_prefix(c);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn take_while(&mut self, accepted: fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !accepted(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn word(&mut self) -> &'a str {
        self.take_while(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
    }

    fn name(&mut self) -> Option<&'a str> {
        let name = self.word();
        (!name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit())).then_some(name)
    }

    fn printed_call(&mut self, tools: &[Tool]) -> Option<ToolCall> {
        let printed = self.rest.strip_prefix("print(").filter(|_| offered(tools, "print").is_none());
        self.rest = printed.unwrap_or(self.rest).trim_start();
        let call = self.call(tools, |name| name.strip_prefix("default_api.").unwrap_or(name))?;
        self.space();
        (printed.is_none() || self.take(')')).then_some(call)
    }

    /// A call of a tool, under its own name or as `plain` has it.
    fn call(&mut self, tools: &[Tool], plain: fn(&str) -> &str) -> Option<ToolCall> {
        // A tool's name may begin with a digit.
        let name = self.word();
        let name = offered(tools, name).or_else(|| offered(tools, plain(name)))?.name.clone();
        let mut arguments = ObjectText::default();
        if !self.take('(') {
            return None;
        }
        loop {
            self.space();
            if self.take(')') {
                return Some(ToolCall { id: String::new(), name, arguments: arguments.into_text() });
            }
            let key = self.name()?;
            self.space();
            if !self.take('=') || arguments.contains(key) {
                return None;
            }
            let value = self.value(0)?;
            arguments.insert(key, value);
            self.space();
            if !self.take(',') && !self.rest.starts_with(')') {
                return None;
            }
        }
    }

    fn value(&mut self, depth: usize) -> Option<String> {
        self.space();
        match self.rest.chars().next()? {
            '"' | '\'' => Some(quoted(&self.string()?)),
            '[' | '(' | '{' if depth >= MAX_NESTING => None,
            '[' => self.items('[', ']', depth),
            '(' => self.items('(', ')', depth),
            '{' => self.dict(depth),
            '-' | '.' | '0'..='9' => self.number(),
            _ => match self.name()? {
                "True" | "true" => Some("true".to_owned()),
                "False" | "false" => Some("false".to_owned()),
                "None" | "null" => Some("null".to_owned()),
                _ => None,
            },
        }
    }

    fn items(&mut self, open: char, close: char, depth: usize) -> Option<String> {
        self.take(open);
        let mut items = Vec::new();
        loop {
            self.space();
            if self.take(close) {
                return Some(format!("[{}]", items.join(", ")));
            }
            items.push(self.value(depth + 1)?);
            self.space();
            if !self.take(',') && !self.rest.starts_with(close) {
                return None;
            }
        }
    }

    fn dict(&mut self, depth: usize) -> Option<String> {
        self.take('{');
        let mut members = ObjectText::default();
        loop {
            self.space();
            if self.take('}') {
                return Some(members.into_text());
            }
            let key = match self.rest.chars().next()? {
                '"' | '\'' => self.string()?,
                _ => self.number()?,
            };
            self.space();
            if !self.take(':') {
                return None;
            }
            let value = self.value(depth + 1)?;
            members.insert(&key, value);
            self.space();
            if !self.take(',') && !self.rest.starts_with('}') {
                return None;
            }
        }
    }

    fn number(&mut self) -> Option<String> {
        let text = self.take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.'));
        if json::is_json(text) {
            return Some(text.to_owned());
        }
        // Python writes `1.` and `.5` where JSON wants a digit on both sides.
        let number: f64 = text.parse().ok()?;
        serde_json::Number::from_f64(number).filter(|_| text.contains('.')).map(|number| number.to_string())
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.rest.chars().next()?;
        let three = if quote == '"' { THREE_QUOTES } else { "'''" };
        // Three quotes that nothing closes are an empty string and text that forgot its escape.
        let is_long = self.rest.strip_prefix(three).is_some_and(|rest| rest.contains(three));
        let fence = if is_long { three } else { &three[..1] };
        self.rest = &self.rest[fence.len()..];
        let mut value = String::new();
        loop {
            match self.next()? {
                '\\' => self.escape(&mut value)?,
                c if c == quote && self.closes(&fence[1..]) => return Some(value),
                c => value.push(c),
            }
        }
    }

    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        Some(c)
    }

    /// Models forget to escape a quote in a string; a quote without a delimiter behind it is text.
    /// `quotes` are those that a string in three quotes has besides.
    fn closes(&mut self, quotes: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(quotes) else { return false };
        let next = rest.trim_start().chars().next();
        let closes = next.is_none_or(|c| matches!(c, ',' | ')' | ']' | '}' | ':'));
        if closes {
            self.rest = rest;
        }
        closes
    }

    fn escape(&mut self, value: &mut String) -> Option<()> {
        let c = self.next()?;
        let escaped = match c {
            '\n' => return Some(()),
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            '0' => '\0',
            '\\' | '\'' | '"' => c,
            'x' => char::from_u32(self.hex(2)?)?,
            'U' => char::from_u32(self.hex(8)?)?,
            'u' => {
                let high = self.hex(4)?;
                if (0xD800..0xDC00).contains(&high) {
                    self.rest = self.rest.strip_prefix("\\u")?;
                    let low = self.hex(4)?.checked_sub(0xDC00).filter(|low| *low < 0x400)?;
                    char::from_u32(0x10000 + ((high - 0xD800) << 10) + low)?
                } else {
                    char::from_u32(high)?
                }
            }
            // As in Python, an unknown escape is text.
            _ => {
                value.push('\\');
                c
            }
        };
        value.push(escaped);
        Some(())
    }

    fn hex(&mut self, digits: usize) -> Option<u32> {
        let text =
            self.rest.get(..digits).filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        self.rest = &self.rest[digits..];
        u32::from_str_radix(text, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::literal;

    #[test]
    fn python_literals_become_json() {
        for (python, json) in [
            ("'it\\'s'", Some(r#""it's""#)),
            ("'it's'", Some(r#""it's""#)),
            (r#""a\tb\x41\u00e9\U0001F642\ud83d\ude42\d""#, Some(r#""a\tbAé🙂🙂\\d""#)),
            ("[1, -2.5, 1e3, (True, None), []]", Some("[1, -2.5, 1e3, [true, null], []]")),
            ("{'a': {1: 'x',}, \"b\": false}", Some(r#"{"a": {"1": "x"}, "b": false}"#)),
            ("'''a 'b', \n\"c\"'''", Some(r#""a 'b', \n\"c\"""#)),
            (r#"["", """x"""]"#, Some(r#"["", "x"]"#)),
            ("1.", Some("1.0")),
            ("-.5", Some("-0.5")),
            ("", None),
            ("1 2", None),
            ("1x", None),
            ("--1", None),
            ("-inf", None),
            ("f(1)", None),
            ("[1", None),
            ("{1}", None),
            ("'a", None),
            ("'\\ud83d'", None),
            ("'\\x4'", None),
            ("1 + 1", None),
        ] {
            assert_eq!(literal(python).as_deref(), json, "{python}");
        }
        assert_eq!(literal(&"[".repeat(100_000)), None);
    }
}
