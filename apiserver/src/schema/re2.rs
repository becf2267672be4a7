//! Patterns of schemas: RE2's syntax, as Go's `regexp` reads it, translated to that of the `regex` crate.
//!
//! Both match in linear time and mean the same by most of the syntax. They differ in classes (`[`, `&`, `~` and `-` are
//! literal in RE2), in `\d`, `\w`, `\s` and `\b` (ASCII in RE2), in `\Q…\E`, octal escapes and escaped punctuation (literal
//! in RE2), and in what RE2 refuses. Not here: matching.

use std::fmt;

use regex::{Regex, RegexBuilder};

/// Maximum of a repetition, also of nested ones together, as in RE2.
const MAX_REPEAT: u64 = 1000;

/// Most bytes of a compiled pattern: what RE2 takes, such as a class of Unicode a thousand times, stays below.
const MAX_COMPILED_BYTES: usize = 64 << 20;

/// A compiled pattern, which shows its source.
#[derive(Clone, Debug)]
pub struct Pattern {
    source: String,
    regex: Regex,
}

impl Pattern {
    /// Compiles a pattern; the error says what RE2 does not accept.
    pub fn new(source: &str) -> Result<Self, String> {
        let translated = translate(source)?;
        let regex = RegexBuilder::new(&translated).size_limit(MAX_COMPILED_BYTES).build();
        let regex = regex.map_err(|error| error.to_string())?;
        Ok(Self { source: source.to_owned(), regex })
    }

    /// Whether the pattern matches somewhere in `text`.
    pub fn is_match(&self, text: &str) -> bool {
        self.regex.is_match(text)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}

fn refused(what: &str, text: &str) -> String {
    format!("error parsing regexp: {what}: `{text}`")
}

/// What was read last: whether and how it may be repeated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    /// Nothing that can be repeated.
    Nothing,
    /// Something that matches, in which repetitions multiply to this number at most.
    Atom(u64),
    /// A repetition, which takes no other; its product, for the group around it.
    Repetition(u64),
}

/// An open group.
struct Group {
    /// The largest product of repetitions in it.
    largest: u64,
}

struct Translation<'a> {
    source: &'a str,
    at: usize,
    out: String,
}

fn translate(source: &str) -> Result<String, String> {
    let mut translation = Translation { source, at: 0, out: String::with_capacity(source.len() + 16) };
    translation.run()?;
    Ok(translation.out)
}

impl Translation<'_> {
    fn rest(&self) -> &str {
        &self.source[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// The source from `start` to here.
    fn since(&self, start: usize) -> &str {
        &self.source[start..self.at]
    }

    fn literal(&mut self, letter: char) {
        push_literal(&mut self.out, letter);
    }

    fn run(&mut self) -> Result<(), String> {
        let mut groups = vec![Group { largest: 1 }];
        let mut last = Last::Nothing;
        let mut repetition_start = 0;
        while let Some(letter) = self.peek() {
            let start = self.at;
            let product = match last {
                Last::Nothing => 1,
                Last::Atom(product) | Last::Repetition(product) => product,
            };
            if let Some(group) = groups.last_mut() {
                group.largest = group.largest.max(product);
            }
            let repeated = match letter {
                '*' | '+' | '?' => {
                    self.next();
                    Some((letter.to_string(), 1))
                }
                '{' => self.count()?,
                _ => None,
            };
            if let Some((operator, times)) = repeated {
                let lazy = self.take("?");
                match last {
                    Last::Nothing => {
                        return Err(refused("missing argument to repetition operator", self.since(start)));
                    }
                    Last::Repetition(_) => {
                        let both = self.since(repetition_start);
                        return Err(refused("invalid nested repetition operator", both));
                    }
                    Last::Atom(product) if times >= 2 && product.saturating_mul(times) > MAX_REPEAT => {
                        return Err(refused("invalid repeat count", self.since(start)));
                    }
                    Last::Atom(product) => {
                        self.out.push_str(&operator);
                        if lazy {
                            self.out.push('?');
                        }
                        last = Last::Repetition(product.saturating_mul(times.max(1)));
                        repetition_start = start;
                    }
                }
                continue;
            }
            match letter {
                '(' => {
                    self.next();
                    if self.open(start)? {
                        groups.push(Group { largest: 1 });
                    }
                    last = Last::Nothing;
                }
                ')' => {
                    self.next();
                    self.out.push(')');
                    let group = groups.pop().filter(|_| !groups.is_empty());
                    let group = group.ok_or_else(|| refused("unexpected )", self.source))?;
                    last = Last::Atom(group.largest);
                }
                '|' => {
                    self.next();
                    self.out.push('|');
                    last = Last::Nothing;
                }
                '[' => {
                    self.class()?;
                    last = Last::Atom(1);
                }
                '.' | '^' | '$' => {
                    self.next();
                    self.out.push(letter);
                    last = Last::Atom(1);
                }
                '\\' if self.take("\\Q") => {
                    let end = self.rest().find("\\E");
                    let quoted = end.map_or(self.rest(), |end| &self.rest()[..end]).to_owned();
                    self.at += quoted.len() + end.map_or(0, |_| 2);
                    quoted.chars().for_each(|letter| self.literal(letter));
                    if !quoted.is_empty() {
                        last = Last::Atom(1);
                    } else if let Last::Repetition(product) = last {
                        last = Last::Atom(product);
                    }
                }
                '\\' => {
                    self.escape()?;
                    last = Last::Atom(1);
                }
                letter => {
                    self.next();
                    self.literal(letter);
                    last = Last::Atom(1);
                }
            }
        }
        if groups.len() > 1 {
            return Err(refused("missing closing )", self.source));
        }
        Ok(())
    }

    /// A repetition in braces and how often it repeats; anything else that begins with a brace is literal.
    fn count(&mut self) -> Result<Option<(String, u64)>, String> {
        let start = self.at;
        let inner =
            self.rest()[1..].bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b',').count();
        let end = inner + 1;
        if self.rest().as_bytes().get(end) != Some(&b'}') {
            return Ok(None);
        }
        let inner = self.rest()[1..end].to_owned();
        let (least, most) = match inner.split_once(',') {
            None => (inner.as_str(), inner.as_str()),
            Some((least, most)) => (least, most),
        };
        let is_number = |text: &str| {
            !text.is_empty()
                && text.bytes().all(|byte| byte.is_ascii_digit())
                && (text.len() == 1 || !text.starts_with('0'))
        };
        if !is_number(least) || !(most.is_empty() || is_number(most)) {
            return Ok(None);
        }
        self.at += end + 1;
        let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
        let least = number(least);
        let most = if most.is_empty() { None } else { Some(number(most)) };
        if least > MAX_REPEAT || most.is_some_and(|most| most > MAX_REPEAT || most < least) {
            return Err(refused("invalid repeat count", self.since(start)));
        }
        Ok(Some((format!("{{{inner}}}"), most.unwrap_or(least))))
    }

    /// What follows an opening parenthesis; whether it opens a group, and does not only set flags.
    fn open(&mut self, start: usize) -> Result<bool, String> {
        if !self.take("?") {
            // Nothing reads what a group matched.
            self.out.push_str("(?:");
            return Ok(true);
        }
        if self.take("P<") || self.take("<") {
            let end = self.rest().find('>');
            let name = end.map_or("", |end| &self.rest()[..end]).to_owned();
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                return Err(refused("invalid named capture", &self.source[start..]));
            }
            self.at += name.len() + 1;
            self.out.push_str("(?:");
            return Ok(true);
        }
        let (mut flags, mut any) = (String::new(), false);
        while let Some(letter) = self.next() {
            match letter {
                'i' | 'm' | 's' | 'U' => {
                    flags.push(letter);
                    any = true;
                }
                '-' if !flags.contains('-') => {
                    flags.push('-');
                    any = false;
                }
                ':' | ')' if any || !flags.contains('-') => {
                    let group = letter == ':';
                    if group || !flags.is_empty() {
                        self.out.push_str(&format!("(?{}{letter}", without_repeats(&flags)));
                    }
                    return Ok(group);
                }
                _ => break,
            }
        }
        Err(refused("invalid or unsupported Perl syntax", self.since(start)))
    }

    /// An escape outside of a class.
    fn escape(&mut self) -> Result<(), String> {
        let start = self.at;
        self.next();
        let Some(letter) = self.peek() else {
            return Err(refused("trailing backslash at end of expression", ""));
        };
        let simple = match letter {
            'A' | 'z' => Some(if letter == 'A' { r"\A" } else { r"\z" }),
            'b' => Some(r"(?-u:\b)"),
            'B' => Some(r"(?-u:\B)"),
            _ => perl_class(letter),
        };
        if let Some(simple) = simple {
            self.next();
            self.out.push_str(simple);
            return Ok(());
        }
        if matches!(letter, 'p' | 'P') {
            return self.property(start);
        }
        let literal = self.escaped(start)?;
        self.literal(literal);
        Ok(())
    }

    /// The character that an escape stands for; the backslash is read.
    fn escaped(&mut self, start: usize) -> Result<char, String> {
        let bad = |this: &Self| refused("invalid escape sequence", this.since(start));
        let Some(letter) = self.next() else {
            return Err(refused("trailing backslash at end of expression", ""));
        };
        Ok(match letter {
            'a' => '\x07',
            'f' => '\x0c',
            't' => '\t',
            'n' => '\n',
            'r' => '\r',
            'v' => '\x0b',
            '0'..='7' => {
                let octal = |next: Option<char>| next.and_then(|next| next.to_digit(8));
                if letter != '0' && octal(self.peek()).is_none() {
                    return Err(bad(self));
                }
                let mut code = letter.to_digit(8).unwrap_or_default();
                for _ in 0..2 {
                    let Some(digit) = octal(self.peek()) else { break };
                    self.next();
                    code = code * 8 + digit;
                }
                char::from_u32(code).ok_or_else(|| bad(self))?
            }
            'x' => {
                let digits = if self.take("{") {
                    let end = self.rest().find('}').ok_or_else(|| bad(self))?;
                    let digits = self.rest()[..end].to_owned();
                    self.at += end + 1;
                    digits
                } else {
                    let digits: String = self.rest().chars().take(2).collect();
                    self.at += digits.len();
                    if digits.chars().count() < 2 {
                        return Err(bad(self));
                    }
                    digits
                };
                let is_hex = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
                let code = is_hex.then(|| u32::from_str_radix(&digits, 16).ok()).flatten();
                code.and_then(char::from_u32).ok_or_else(|| bad(self))?
            }
            letter if letter.is_ascii() && !letter.is_ascii_alphanumeric() => letter,
            _ => return Err(bad(self)),
        })
    }

    /// `\pL`, `\p{Greek}`, `\P{^Greek}`; the backslash is read.
    fn property(&mut self, start: usize) -> Result<(), String> {
        let negated = self.next() == Some('P');
        let bad = |this: &Self| refused("invalid character class range", this.since(start));
        let name = if self.take("{") {
            let end = self.rest().find('}').ok_or_else(|| bad(self))?;
            let name = self.rest()[..end].to_owned();
            self.at += end + 1;
            name
        } else {
            self.next().ok_or_else(|| bad(self))?.to_string()
        };
        let (name, negated) = match name.strip_prefix('^') {
            Some(name) => (name, !negated),
            None => (name.as_str(), negated),
        };
        let named = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        if name.is_empty() || !name.chars().all(named) {
            return Err(bad(self));
        }
        self.out.push_str(&format!("\\{}{{{name}}}", if negated { 'P' } else { 'p' }));
        Ok(())
    }

    /// A class in brackets.
    fn class(&mut self) -> Result<(), String> {
        let start = self.at;
        let unclosed = |this: &Self| refused("missing closing ]", &this.source[start..]);
        self.next();
        self.out.push('[');
        if self.take("^") {
            self.out.push('^');
        }
        let mut first = true;
        let last_name = self.source.rfind(":]");
        loop {
            let Some(letter) = self.peek() else { return Err(unclosed(self)) };
            if letter == ']' && !first {
                self.next();
                self.out.push(']');
                return Ok(());
            }
            first = false;
            let item = self.at;
            // Looked for once: a pattern of many openings would otherwise be searched to its end for each.
            if self.rest().starts_with("[:")
                && last_name.is_some_and(|last| last >= self.at + 2)
                && let Some(end) = self.rest()[2..].find(":]")
            {
                let name = self.rest()[..end + 4].to_owned();
                self.at += name.len();
                if !POSIX
                    .contains(&name.trim_start_matches("[:").trim_start_matches('^').trim_end_matches(":]"))
                {
                    return Err(refused("invalid character class range", &name));
                }
                self.out.push_str(&name);
                continue;
            }
            if letter == '\\' {
                let named = self.rest()[1..].chars().next();
                if let Some(class) = named.and_then(perl_class) {
                    self.at += 2;
                    self.out.push_str(class);
                    continue;
                }
                if matches!(named, Some('p' | 'P')) {
                    self.next();
                    self.property(item)?;
                    continue;
                }
            }
            let low = self.class_letter()?;
            let mut high = low;
            if self.rest().starts_with('-') && !self.rest()[1..].starts_with(']') {
                self.next();
                high = self.class_letter()?;
            }
            if high < low {
                return Err(refused("invalid character class range", self.since(item)));
            }
            self.literal(low);
            if high != low {
                self.out.push('-');
                self.literal(high);
            }
        }
    }

    fn class_letter(&mut self) -> Result<char, String> {
        let start = self.at;
        match self.next() {
            Some('\\') => self.escaped(start),
            Some(letter) => Ok(letter),
            None => Err(refused("missing closing ]", self.source)),
        }
    }
}

/// The named ASCII classes.
const POSIX: &[&str] = &[
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space",
    "upper", "word", "xdigit",
];

/// The class of `\d` and its like.
fn perl_class(letter: char) -> Option<&'static str> {
    Some(match letter {
        'd' => "[0-9]",
        'D' => "[^0-9]",
        's' => r"[\t\n\x0C\r\x20]",
        'S' => r"[^\t\n\x0C\r\x20]",
        'w' => "[0-9A-Za-z_]",
        'W' => "[^0-9A-Za-z_]",
        _ => return None,
    })
}

/// Appends a character that stands for itself, in a class and outside.
fn push_literal(out: &mut String, letter: char) {
    if letter.is_ascii() && !letter.is_ascii_alphanumeric() {
        out.push_str(&format!("\\x{:02X}", u32::from(letter)));
    } else {
        out.push(letter);
    }
}

/// Flags, each once on either side of the minus: the `regex` crate refuses repeated ones.
fn without_repeats(flags: &str) -> String {
    let (on, off) = flags.split_once('-').unwrap_or((flags, ""));
    let mut kept = String::new();
    for flag in on.chars().filter(|flag| !off.contains(*flag)) {
        if !kept.contains(flag) {
            kept.push(flag);
        }
    }
    if !off.is_empty() {
        kept.push('-');
        for flag in off.chars() {
            if !kept.contains(flag) {
                kept.push(flag);
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn patterns_match_as_in_go() {
        for (pattern, matching, others) in [
            (r"^\d+$", &["12"][..], &["١٢", ""][..]),
            (r"^\w+$", &["a_1"], &["é"]),
            (r"^\s$", &[" ", "\t", "\x0c"], &["\u{a0}", "\x0b", "\u{2003}"]),
            (r"^\D\S\W$", &["é\u{a0}é"], &["1a-"]),
            (r"\bé", &["aé"], &["é", " é"]),
            (r"^é\B", &["é", "éé"], &["éa"]),
            (r"^[[]$", &["["], &["]"]),
            (r"^[a[]$", &["a", "["], &["b"]),
            (r"^[[:a]$", &["[", ":", "a"], &["b"]),
            (r"^[a&&b]$", &["a", "&", "b"], &["c"]),
            (r"^[a~~b]$", &["a", "~", "b"], &["c"]),
            (r"^[+--]$", &["+", ",", "-"], &["a", "."]),
            (r"^[\d-z]$", &["5", "-", "z"], &["a"]),
            (r"^[-a]$", &["-", "a"], &["b"]),
            (r"^[]a]$", &["]", "a"], &["b"]),
            (r"^[^]a]$", &["b"], &["]", "a"]),
            (r"^[^\D]$", &["1", "9"], &["a"]),
            (r"^[[:alpha:]_\d]$", &["a", "_", "1"], &["é", "-"]),
            (r"^[[:^alpha:]]$", &["1", "é"], &["a"]),
            (r"^[\101-\x43]$", &["A", "C"], &["D"]),
            (r"^\Qa.b*\E+$", &["a.b**"], &["a.b", "aXb*"]),
            (r"^\Q[a$", &["[a$"], &["[a"]),
            (r"^\101\08$", &["A\x008"], &["A8"]),
            (r"^\<\_\>$", &["<_>"], &["_", "a"]),
            (r"^a{,3}$", &["a{,3}"], &["aa", ""]),
            (r"^a{$", &["a{"], &["a"]),
            (r"^a{01}}$", &["a{01}}"], &["a}"]),
            (r"^]}# $", &["]}# "], &[""]),
            (r"^(?P<1n>a)(?<b>b)$", &["ab"], &["a"]),
            (r"^(?i)stra(?-i:S)E$", &["STRASe"], &["strase"]),
            (r"^(?ii)(?)a$", &["A"], &["b"]),
            (r"^\p{Greek}\pL\P{^Lu}$", &["αbC"], &["abC", "αbc"]),
            (r"^(|a)*^*$", &["", "aa"], &["b"]),
            // Contour's HTTPProxy: a bracket within a class.
            (r"^((\[[A-Fa-f0-9:]+\])|([^\[\]:[]+))(:[0-9]+)?$", &["[::1]:80", "host:80"], &["a[b"]),
            ("^\\\n[\\v]$", &["\n\x0b"], &["n"]),
        ] {
            let compiled = Pattern::new(pattern).unwrap_or_else(|error| panic!("{pattern}: {error}"));
            assert_eq!(compiled.to_string(), pattern);
            for text in matching {
                assert!(compiled.is_match(text), "{pattern} matches {text:?}");
            }
            for text in others {
                assert!(!compiled.is_match(text), "{pattern} does not match {text:?}");
            }
        }
    }

    #[test]
    fn patterns_that_go_refuses_are_refused() {
        for (pattern, reason) in [
            ("a**", "invalid nested repetition operator: `**`"),
            ("a*?*", "invalid nested repetition operator: `*?*`"),
            ("a++", "invalid nested repetition operator: `++`"),
            ("a???", "invalid nested repetition operator: `???`"),
            ("x{2}{3}", "invalid nested repetition operator: `{2}{3}`"),
            ("(?i:a){2}*", "invalid nested repetition operator: `{2}*`"),
            ("a{1001}", "invalid repeat count: `{1001}`"),
            ("a{2,1}", "invalid repeat count: `{2,1}`"),
            ("a{99999999999999999999}", "invalid repeat count"),
            ("(a{100}){11}", "invalid repeat count: `{11}`"),
            ("((a{10}){10}){11}", "invalid repeat count: `{11}`"),
            ("(a{1000}|b){2}", "invalid repeat count: `{2}`"),
            ("*", "missing argument to repetition operator: `*`"),
            ("a|*", "missing argument to repetition operator: `*`"),
            ("(*)", "missing argument to repetition operator: `*`"),
            ("(?i)+", "missing argument to repetition operator: `+`"),
            (r"\Q\E*", "missing argument to repetition operator: `*`"),
            (r"\8", r"invalid escape sequence: `\8`"),
            (r"\1", r"invalid escape sequence: `\1`"),
            (r"\Z", "invalid escape sequence"),
            (r"\C", "invalid escape sequence"),
            (r"\G", "invalid escape sequence"),
            (r"\e", "invalid escape sequence"),
            (r"\é", "invalid escape sequence"),
            (r"\x{}", "invalid escape sequence"),
            (r"\x4", "invalid escape sequence"),
            (r"\x{110000}", "invalid escape sequence"),
            (r"[\b]", r"invalid escape sequence: `\b`"),
            (r"[a-\d]", r"invalid escape sequence: `\d`"),
            (r"[\Qa\E]", "invalid escape sequence"),
            (r"\p{L", "invalid character class range"),
            (r"\p", "invalid character class range"),
            (r"\p{NoSuch}", "Unicode property"),
            ("[a--b]", "invalid character class range: `a--`"),
            ("[z-a]", "invalid character class range: `z-a`"),
            ("[[:foo:]]", "invalid character class range: `[:foo:]`"),
            ("[]", "missing closing ]"),
            ("[a", "missing closing ]"),
            ("[a-", "missing closing ]"),
            ("(", "missing closing )"),
            (")", "unexpected )"),
            ("(?x)a", "invalid or unsupported Perl syntax: `(?x`"),
            ("(?-)a", "invalid or unsupported Perl syntax"),
            ("(?i-)a", "invalid or unsupported Perl syntax"),
            ("(?=a)", "invalid or unsupported Perl syntax"),
            ("(?#c)", "invalid or unsupported Perl syntax"),
            ("(?P=n)", "invalid or unsupported Perl syntax"),
            ("(?<=a)", "invalid named capture"),
            ("(?P<a-b>x)", "invalid named capture"),
            (r"\", "trailing backslash"),
        ] {
            let error = Pattern::new(pattern).expect_err(pattern);
            assert!(error.contains(reason), "{pattern}: {error}");
        }
        for pattern in
            ["a{1000}", "(a{100}){10}", "a{0}", "a{0,}", "(a{500})?", r"a*\Q\E*", r"\b+", "()", "(?U)a+"]
        {
            assert!(Pattern::new(pattern).is_ok(), "{pattern}");
        }
    }
}
