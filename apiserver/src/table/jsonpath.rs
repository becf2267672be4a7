//! The JSONPath subset of printer columns: fields, indexes, wildcards, filters.
//!
//! It is kubectl's dialect, not RFC 9535, which `jsonpath-rust` (in the tree through kube) reads: there
//! `.metadata.name` without `$`, `{braces}`, `.labels.a-b` and `.annotations.a\.b` are errors, and
//! `[?(@.name!="x")]` also selects elements without a name. A translation would be the parser below.
//!
//! Not here: kubectl's full dialect with templates, ranges and recursive descent, which CRDs may not use.

use serde_json::Value;

/// A parsed path.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath {
    steps: Vec<PathStep>,
}

#[derive(Debug, Clone, PartialEq)]
enum PathStep {
    Field(String),
    /// From the end when negative.
    Index(i64),
    /// All elements or values.
    Each,
    /// The elements that satisfy a comparison.
    Where(JsonPath, Compare, Value),
    /// The elements that have a field.
    Having(JsonPath),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compare {
    Equal,
    Unequal,
    Less,
    Greater,
    AtMost,
    AtLeast,
}

impl JsonPath {
    /// Parses `.spec.nodes[0]['a-b'].conditions[?(@.type=="Ready")].status`; braces around it are allowed.
    ///
    /// The error names what was expected and the position.
    pub fn parse(source: &str) -> Result<JsonPath, String> {
        let trimmed = source.trim();
        let inner = trimmed.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')).unwrap_or(trimmed);
        let inner = inner.strip_prefix(['$', '@']).unwrap_or(inner);
        let mut steps = Vec::new();
        let mut rest = inner;
        while !rest.is_empty() {
            rest = if let Some(after) = rest.strip_prefix('[') {
                let end = closing(after).ok_or_else(|| format!("unterminated [ in {source:?}"))?;
                steps.push(bracket(&after[..end])?);
                &after[end + 1..]
            } else {
                let after = rest.strip_prefix('.').unwrap_or(rest);
                let (name, after) = field_name(after);
                match name.as_str() {
                    "" if after.is_empty() && steps.is_empty() => {}
                    "" if after.starts_with('[') => {}
                    "" => return Err(format!("expected a field name in {source:?} at {rest:?}")),
                    "*" => steps.push(PathStep::Each),
                    _ => steps.push(PathStep::Field(name)),
                }
                after
            };
        }
        Ok(JsonPath { steps })
    }

    /// All values in `value` that the path selects.
    pub fn find<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        let mut found = vec![value];
        for step in &self.steps {
            found = found.into_iter().flat_map(|value| step.follow(value)).collect();
        }
        found
    }
}

impl PathStep {
    fn follow<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        match self {
            PathStep::Field(name) => value.get(name).into_iter().collect(),
            PathStep::Index(index) => {
                let Some(items) = value.as_array() else { return Vec::new() };
                let position = if *index < 0 { index + items.len() as i64 } else { *index };
                usize::try_from(position).ok().and_then(|position| items.get(position)).into_iter().collect()
            }
            PathStep::Each => elements(value),
            PathStep::Having(path) => {
                elements(value).into_iter().filter(|item| !path.find(item).is_empty()).collect()
            }
            PathStep::Where(path, compare, operand) => elements(value)
                .into_iter()
                .filter(|item| path.find(item).first().is_some_and(|found| compare.is_true(found, operand)))
                .collect(),
        }
    }
}

fn elements(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(items) => items.iter().collect(),
        Value::Object(map) => map.values().collect(),
        _ => Vec::new(),
    }
}

impl Compare {
    fn is_true(self, left: &Value, right: &Value) -> bool {
        let order = match (left, right) {
            (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
            (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
            _ => left.as_f64().zip(right.as_f64()).and_then(|(left, right)| left.partial_cmp(&right)),
        };
        match (self, order) {
            (Compare::Unequal, None) => true,
            (_, None) => false,
            (Compare::Equal, Some(order)) => order.is_eq(),
            (Compare::Unequal, Some(order)) => order.is_ne(),
            (Compare::Less, Some(order)) => order.is_lt(),
            (Compare::Greater, Some(order)) => order.is_gt(),
            (Compare::AtMost, Some(order)) => order.is_le(),
            (Compare::AtLeast, Some(order)) => order.is_ge(),
        }
    }
}

/// A name up to the next dot or bracket; a backslash escapes a dot.
fn field_name(source: &str) -> (String, &str) {
    let mut name = String::new();
    let mut letters = source.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '.' | '[' => return (name, &source[at..]),
            '\\' => name.extend(letters.next().map(|(_, letter)| letter)),
            _ => name.push(letter),
        }
    }
    (name, "")
}

/// The position of the closing bracket, skipping quotes and nested brackets.
fn closing(source: &str) -> Option<usize> {
    let (mut depth, mut quote) = (0, None);
    for (at, letter) in source.char_indices() {
        match (quote, letter) {
            (Some(open), _) if open == letter => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(letter),
            (None, '[' | '(') => depth += 1,
            (None, ']') if depth == 0 => return Some(at),
            (None, ']' | ')') => depth -= 1,
            _ => {}
        }
    }
    None
}

fn bracket(source: &str) -> Result<PathStep, String> {
    let source = source.trim();
    if source == "*" {
        return Ok(PathStep::Each);
    }
    if let Some(name) = quoted(source) {
        return Ok(PathStep::Field(name.to_owned()));
    }
    if let Some(filter) = source.strip_prefix("?(").and_then(|filter| filter.strip_suffix(')')) {
        return self::filter(filter.trim());
    }
    source
        .parse()
        .map(PathStep::Index)
        .map_err(|_| format!("expected an index, a quoted name, * or ?(…), got {source:?}"))
}

fn filter(source: &str) -> Result<PathStep, String> {
    for (sign, compare) in [
        ("==", Compare::Equal),
        ("!=", Compare::Unequal),
        ("<=", Compare::AtMost),
        (">=", Compare::AtLeast),
        ("<", Compare::Less),
        (">", Compare::Greater),
    ] {
        let Some((left, right)) = source.split_once(sign) else { continue };
        let right = right.trim();
        let operand = match quoted(right) {
            Some(text) => Value::from(text),
            None => serde_json::from_str(right)
                .map_err(|_| format!("expected a value after {sign}, got {right:?}"))?,
        };
        return Ok(PathStep::Where(JsonPath::parse(left)?, compare, operand));
    }
    Ok(PathStep::Having(JsonPath::parse(source)?))
}

fn quoted(source: &str) -> Option<&str> {
    ['\'', '"'].into_iter().find_map(|quote| source.strip_prefix(quote)?.strip_suffix(quote))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::JsonPath;

    #[test]
    fn jsonpaths_resolve_as_in_kubectl() {
        let object = json!({
            "metadata": {"name": "n", "annotations": {"a.b/c": "d"}},
            "spec": {"nodes": [{"name": "x", "load": 1}, {"name": "y", "load": 2}], "map": {"k": "v"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]},
        });
        for (path, expected) in [
            (".metadata.name", json!(["n"])),
            ("{.metadata.name}", json!(["n"])),
            ("metadata.name", json!(["n"])),
            (".metadata.annotations['a.b/c']", json!(["d"])),
            (r".metadata.annotations.a\.b/c", json!(["d"])),
            (".spec.nodes[1].name", json!(["y"])),
            (".spec.nodes[-1].name", json!(["y"])),
            (".spec.nodes[*].name", json!(["x", "y"])),
            (".spec.map.*", json!(["v"])),
            (r#".status.conditions[?(@.type=="Ready")].status"#, json!(["True"])),
            (".status.conditions[?(@.type == 'Other')].status", json!(["False"])),
            (".spec.nodes[?(@.load>1)].name", json!(["y"])),
            (".spec.nodes[?(@.missing)].name", json!([])),
            (".spec.nothing.below", json!([])),
            (".spec.nodes[7]", json!([])),
        ] {
            let found: Vec<Value> =
                JsonPath::parse(path).expect(path).find(&object).into_iter().cloned().collect();
            assert_eq!(Value::from(found), expected, "{path}");
        }
    }

    #[test]
    fn a_broken_path_says_what_was_expected() {
        for path in [".a[", ".a[x]", ".a..b", ".a[?(@.b==)]"] {
            assert!(JsonPath::parse(path).is_err(), "{path}");
        }
    }
}
