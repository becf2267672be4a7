//! The types of a tool's parameters, for formats that write values as plain text. Not a validator: it finds
//! which types a value may have and writes the value as the first of them that it parses as.

use serde_json::Value;

use super::{json, python};
use russet_wire::conversation::Tool;

/// How many parts of a schema are visited for one value: references may go in circles.
const MAX_PARTS: usize = 256;

const ALTERNATIVES: [&str; 3] = ["anyOf", "oneOf", "allOf"];

/// The types that a schema allows.
#[derive(Clone, Copy, Default)]
struct TypeSet {
    string: bool,
    integer: bool,
    number: bool,
    boolean: bool,
    object: bool,
    array: bool,
    null: bool,
}

/// The parameters of one tool.
pub(super) struct Schema {
    root: Value,
}

impl Schema {
    /// Of `tool`; a schema that is not valid JSON says nothing, so that all values are strings.
    pub(super) fn of(tool: &Tool) -> Self {
        let root = tool.parameters.as_deref().and_then(|text| serde_json::from_str(text).ok());
        Self { root: root.unwrap_or_default() }
    }

    /// JSON text of the value that the model wrote as `text` for `key`. Text that parses as none of the
    /// declared types is a string, and so is a value of a key without a schema.
    pub(super) fn value(&self, key: &str, text: &str) -> String {
        self.value_as(self.property(&self.root, key), text)
    }

    /// The same for the value that `schema` describes, a part of this one.
    pub(super) fn value_as(&self, schema: Option<&Value>, text: &str) -> String {
        typed(text, self.types(schema)).unwrap_or_else(|| json::quoted(text))
    }

    /// The schema of the whole object.
    pub(super) fn root(&self) -> &Value {
        &self.root
    }

    /// The schema of the member `key` of what `schema` describes.
    pub(super) fn property<'a>(&'a self, schema: &'a Value, key: &str) -> Option<&'a Value> {
        self.part(schema, &mut 0, &|schema| schema.get("properties")?.get(key))
    }

    /// The schema of the items of what `schema` describes.
    pub(super) fn items<'a>(&'a self, schema: &'a Value) -> Option<&'a Value> {
        self.part(schema, &mut 0, &|schema| schema.get("items"))
    }

    /// Whether the value is a collection, and then whether it is an array.
    pub(super) fn is_array(&self, schema: Option<&Value>) -> Option<bool> {
        let types = self.types(schema);
        (types.array != types.object).then_some(types.array)
    }

    fn types(&self, schema: Option<&Value>) -> TypeSet {
        let mut types = TypeSet::default();
        if let Some(schema) = schema {
            self.collect(schema, &mut 0, &mut types);
        }
        types
    }

    fn part<'a>(
        &'a self,
        schema: &'a Value,
        visited: &mut usize,
        find: &dyn Fn(&'a Value) -> Option<&'a Value>,
    ) -> Option<&'a Value> {
        *visited += 1;
        if *visited > MAX_PARTS {
            return None;
        }
        find(schema).or_else(|| {
            let target = self.target(schema).into_iter();
            let alternatives = ALTERNATIVES.iter().filter_map(|name| schema.get(name)?.as_array());
            target.chain(alternatives.flatten()).find_map(|schema| self.part(schema, visited, find))
        })
    }

    /// What the schema refers to.
    fn target(&self, schema: &Value) -> Option<&Value> {
        self.root.pointer(schema.get("$ref")?.as_str()?.strip_prefix('#')?)
    }

    /// Whether the tool declares this parameter.
    pub(super) fn has(&self, key: &str) -> bool {
        self.property(&self.root, key).is_some()
    }

    fn collect(&self, schema: &Value, visited: &mut usize, types: &mut TypeSet) {
        *visited += 1;
        if *visited > MAX_PARTS {
            return;
        }
        match schema.get("type") {
            Some(Value::String(name)) => types.add(name),
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).for_each(|name| types.add(name))
            }
            _ => self.collect_untyped(schema, visited, types),
        }
        types.null |= schema.get("nullable") == Some(&Value::Bool(true));
    }

    fn collect_untyped(&self, schema: &Value, visited: &mut usize, types: &mut TypeSet) {
        let alternatives = ALTERNATIVES.iter().filter_map(|name| schema.get(name)?.as_array()).flatten();
        let parts = self.target(schema).into_iter().chain(alternatives);
        parts.for_each(|schema| self.collect(schema, visited, types));
        let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        values.chain(schema.get("const")).for_each(|value| types.add_of(value));
        types.object |= schema.get("properties").is_some();
        types.array |= schema.get("items").is_some();
    }
}

impl TypeSet {
    /// Names beside JSON Schema's are those that tools written for Python use.
    fn add(&mut self, name: &str) {
        match name.to_ascii_lowercase().as_str() {
            "string" | "str" | "text" => self.string = true,
            "integer" | "int" => self.integer = true,
            "number" | "float" | "double" => self.number = true,
            "boolean" | "bool" => self.boolean = true,
            "object" | "dict" => self.object = true,
            "array" | "list" => self.array = true,
            "null" => self.null = true,
            _ => {}
        }
    }

    fn add_of(&mut self, value: &Value) {
        match value {
            Value::Null => self.null = true,
            Value::Bool(_) => self.boolean = true,
            Value::Number(_) => self.number = true,
            Value::String(_) => self.string = true,
            Value::Array(_) => self.array = true,
            Value::Object(_) => self.object = true,
        }
    }
}

/// `text` as the most special of `types` that it can be; `None` for a string.
fn typed(text: &str, types: TypeSet) -> Option<String> {
    let trimmed = text.trim();
    if types.null && matches!(trimmed, "null" | "None") {
        return Some("null".to_owned());
    }
    // Templates that write a value through Jinja's `string` show the model Python's names.
    if types.boolean {
        match trimmed {
            "true" | "True" => return Some("true".to_owned()),
            "false" | "False" => return Some("false".to_owned()),
            _ => {}
        }
    }
    let digits = trimmed.strip_prefix('-').unwrap_or(trimmed);
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit()) && json::is_json(trimmed);
    let is_integer = is_number && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number && (types.number || (types.integer && is_integer)) {
        return Some(trimmed.to_owned());
    }
    let (open, close) = (trimmed.chars().next()?, trimmed.chars().next_back()?);
    if (types.object && (open, close) == ('{', '}')) || (types.array && (open, close) == ('[', ']')) {
        return if json::is_json(trimmed) { Some(trimmed.to_owned()) } else { python::literal(trimmed) };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_take_the_type_of_their_schema() {
        let parameters = r##"{"type": "object", "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
            "o": {"type": "object"}, "a": {"type": "array"}, "si": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "e": {"enum": ["1", "2"]},
            "en": {"enum": [1, 2]}, "r": {"$ref": "#/$defs/R"}, "loop": {"$ref": "#/properties/loop"},
            "p": {"properties": {}}, "wide": {"anyOf": [{"$ref": "#/properties/wide"}, {"$ref": "#/properties/wide"}]}, "odd": 3, "unknown": {"type": "date"}
        }, "$defs": {"R": {"type": "object"}}}"##;
        let tool = Tool { parameters: Some(parameters.to_owned()), ..Tool::default() };
        let schema = Schema::of(&tool);
        for (key, text, expected) in [
            ("s", "5", r#""5""#),
            ("s", " a\n\"b\" ", r#"" a\n\"b\" ""#),
            ("s", "null", r#""null""#),
            ("i", "5", "5"),
            ("i", " -12 ", "-12"),
            ("i", "5.5", r#""5.5""#),
            ("i", "05", r#""05""#),
            ("i", "five", r#""five""#),
            ("i", "null", r#""null""#),
            ("n", "5", "5"),
            ("n", "1.50e3", "1.50e3"),
            ("n", "-", r#""-""#),
            ("b", "True", "true"),
            ("b", "false", "false"),
            ("b", "yes", r#""yes""#),
            ("o", r#"{"b": 1, "a": 2.0}"#, r#"{"b": 1, "a": 2.0}"#),
            ("o", "{'b': True}", r#"{"b": true}"#),
            ("o", "{b}", r#""{b}""#),
            ("o", "[1]", r#""[1]""#),
            ("a", "[1, \"x\"]", "[1, \"x\"]"),
            ("a", "['x', None]", r#"["x", null]"#),
            ("a", "", r#""""#),
            ("si", "null", "null"),
            ("si", "nul", r#""nul""#),
            ("any", "7", "7"),
            ("any", "None", "null"),
            ("e", "1", r#""1""#),
            ("en", "1", "1"),
            ("r", r#"{"x": {}}"#, r#"{"x": {}}"#),
            ("loop", "1", r#""1""#),
            ("wide", "1", r#""1""#),
            ("p", "{}", "{}"),
            ("odd", "1", r#""1""#),
            ("unknown", "1", r#""1""#),
            ("absent", "1", r#""1""#),
        ] {
            assert_eq!(schema.value(key, text), expected, "{key}: {text}");
        }
    }
}
