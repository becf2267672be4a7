//! Rules in `llguidance`'s variant of Lark.

use std::collections::HashMap;
use std::fmt::Write as _;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};

use serde_json::Value;

use super::output::json_schema;
use super::{GrammarError, Vocabulary};

/// Bytes of all rules and schemas of a grammar: those of a request have at most 256 KiB, and each argument that is JSON
/// repeats the definitions of its schema.
const MAX_BYTES: usize = 8 << 20;
/// All text.
const ANY: &str = "(?s:.*)";

/// Rules, and further grammars that they refer to.
pub(super) struct LarkRules<'v> {
    vocabulary: &'v Vocabulary,
    rules: String,
    count: usize,
    grammars: Vec<GrammarWithLexer>,
    /// The grammars of JSON Schemas, by their text: many arguments have the same.
    schemas: HashMap<String, String>,
    /// Bytes of these.
    bytes: usize,
}

impl<'v> LarkRules<'v> {
    pub(super) fn new(vocabulary: &'v Vocabulary) -> Self {
        let (rules, grammars, schemas) = (String::new(), Vec::new(), HashMap::new());
        Self { vocabulary, rules, count: 0, grammars, schemas, bytes: 0 }
    }

    /// The grammar whose output is this expression; `what` is what the request has.
    ///
    /// # Errors
    /// It is too large.
    pub(super) fn start(self, expression: &str, what: &str) -> Result<TopLevelGrammar, GrammarError> {
        if self.is_too_large() {
            let reason = format!(
                "its grammar has more than {MAX_BYTES} bytes; name fewer definitions, or use each less"
            );
            return Err(GrammarError::Refused { what: what.to_owned(), reason });
        }
        let rules = format!("start: {expression}\n{}", self.rules);
        let mut grammars = vec![GrammarWithLexer::from_lark(rules)];
        grammars.extend(self.grammars);
        Ok(TopLevelGrammar { grammars, max_tokens: None })
    }

    /// Whether it is too large already: nothing that is added then is kept, and its end is an error.
    pub(super) fn is_too_large(&self) -> bool {
        self.bytes + self.rules.len() > MAX_BYTES
    }

    /// A grammar of its own; an expression.
    pub(super) fn grammar(&mut self, grammar: GrammarWithLexer) -> String {
        let name = format!("part_{}", self.grammars.len());
        self.grammars.push(GrammarWithLexer { name: Some(name.clone()), ..grammar });
        format!("@{name}")
    }

    /// JSON of a schema; an expression.
    pub(super) fn json(&mut self, schema: Value) -> String {
        if self.is_too_large() {
            return String::new();
        }
        let text = schema.to_string();
        if let Some(part) = self.schemas.get(&text) {
            return part.clone();
        }
        self.bytes += text.len();
        if self.is_too_large() {
            return String::new();
        }
        let part = self.grammar(json_schema(schema));
        self.schemas.insert(text, part.clone());
        part
    }

    /// A named rule; an expression.
    pub(super) fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = self.reserve();
        if !self.is_too_large() {
            let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        }
        name
    }

    /// The name of a rule that is defined later: it may refer to itself.
    pub(super) fn reserve(&mut self) -> String {
        self.count += 1;
        format!("rule_{}", self.count)
    }

    /// The rule of a name that was reserved.
    pub(super) fn define(&mut self, name: &str, body: &str) {
        if !self.is_too_large() {
            let _ = writeln!(self.rules, "{name}: {body}");
        }
    }

    /// This text exactly, special tokens among it; an expression.
    pub(super) fn marker(&self, text: &str) -> String {
        let pieces: Vec<String> = self.pieces(text).iter().map(MarkerPiece::expression).collect();
        pieces.join(" ")
    }

    /// Whether the vocabulary has a special token of this name.
    pub(super) fn has_special(&self, name: &str) -> bool {
        self.vocabulary.special.contains_key(name)
    }

    /// Any text up to a marker, and the marker; an expression.
    pub(super) fn until(&mut self, marker: &str) -> String {
        self.text_until((0, None), marker)
    }

    /// Text of so many characters up to a marker, and the marker; an expression.
    pub(super) fn text_until(&mut self, (least, most): (u64, Option<u64>), marker: &str) -> String {
        let text = match (least, most) {
            (0, None) => ANY.to_owned(),
            (least, None) => format!("(?s:.{{{least},}})"),
            (least, Some(most)) => format!("(?s:.{{{least},{most}}})"),
        };
        let pieces = self.pieces(marker);
        let Some((first, rest)) = pieces.split_first() else { return regex(&text) };
        let begin = match first {
            // No text is a special token.
            MarkerPiece::Special(_) => format!("{} {}", regex(&text), first.expression()),
            MarkerPiece::Text(suffix) => self.rule(&format!("[suffix={}]", quoted(suffix)), &regex(&text)),
        };
        let rest: Vec<String> = rest.iter().map(MarkerPiece::expression).collect();
        format!("{begin} {}", rest.join(" ")).trim_end().to_owned()
    }

    /// Any text in which none of these markers begins; an expression.
    pub(super) fn without(&mut self, markers: &[&str]) -> String {
        let texts = markers.iter().filter_map(|marker| match self.pieces(marker).into_iter().next() {
            Some(MarkerPiece::Text(text)) => Some(format!("{ANY}{}{ANY}", escaped(&text))),
            Some(MarkerPiece::Special(_)) | None => None,
        });
        let texts: Vec<String> = texts.map(|pattern| format!(" & ~{}", regex(&pattern))).collect();
        self.count += 1;
        let name = format!("TEXT_{}", self.count);
        let _ = writeln!(self.rules, "{name}: {}{}", regex(ANY), texts.concat());
        // A text of nothing is no token.
        format!("({name})?")
    }

    /// A marker in special tokens and the text between them.
    fn pieces(&self, marker: &str) -> Vec<MarkerPiece> {
        let mut pieces: Vec<MarkerPiece> = Vec::new();
        let mut rest = marker;
        while let Some(first) = rest.chars().next() {
            let names = self.vocabulary.special.iter();
            let longest = names.filter(|(name, _)| !name.is_empty() && rest.starts_with(name.as_str()));
            if let Some((name, id)) = longest.max_by_key(|(name, _)| name.len()) {
                pieces.push(MarkerPiece::Special(*id));
                rest = &rest[name.len()..];
                continue;
            }
            match pieces.last_mut() {
                Some(MarkerPiece::Text(text)) => text.push(first),
                Some(MarkerPiece::Special(_)) | None => pieces.push(MarkerPiece::Text(first.to_string())),
            }
            rest = &rest[first.len_utf8()..];
        }
        pieces
    }
}

enum MarkerPiece {
    Text(String),
    Special(u32),
}

impl MarkerPiece {
    fn expression(&self) -> String {
        match self {
            Self::Text(text) => quoted(text),
            Self::Special(id) => format!("<[{id}]>"),
        }
    }
}

/// A text as it stands in rules.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A regular expression as it stands in rules.
pub(super) fn regex(pattern: &str) -> String {
    format!("/{}/", pattern.replace('/', "\\/"))
}

/// A text in a regular expression, each character as a code point.
fn escaped(text: &str) -> String {
    text.chars().map(|c| format!("\\x{{{:X}}}", u32::from(c))).collect()
}
