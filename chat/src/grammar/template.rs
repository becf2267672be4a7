//! Templates of calls (`CallSyntax`): their texts and what stands in the places between.

use super::lark::{LarkRules, regex};

pub(super) enum Part {
    Text(String),
    /// A placeholder that is no text.
    Place(&'static str),
}

/// A template in its parts, with these placeholders replaced by text.
pub(super) fn parts(template: &str, texts: &[(&str, &str)]) -> Vec<Part> {
    const PLACES: [&str; 5] = ["$ARGUMENTS", "$PARAMETERS", "$INDEX", "$ID", "$LINE"];
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(first) = rest.chars().next() {
        if let Some((place, value)) = texts.iter().find(|(place, _)| rest.starts_with(place)) {
            text.push_str(value);
            rest = &rest[place.len()..];
        } else if let Some(place) = PLACES.iter().find(|place| rest.starts_with(**place)) {
            parts.push(Part::Text(std::mem::take(&mut text)));
            parts.push(Part::Place(place));
            rest = &rest[place.len()..];
        } else {
            text.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    parts.push(Part::Text(text));
    parts
}

/// The parts of a template without arguments; an expression.
pub(super) fn places(parts: Vec<Part>, rules: &LarkRules<'_>) -> String {
    let expressions = parts.into_iter().map(|part| match part {
        Part::Text(text) => rules.marker(&text),
        Part::Place("$INDEX") => regex("[0-9]{1,3}"),
        Part::Place("$LINE") => "(\"\\n\")?".to_owned(),
        Part::Place(_) => regex("[a-zA-Z0-9]{9}"),
    });
    expressions.collect::<Vec<_>>().join(" ")
}
