//! Names that a CEL rule may use: `self`, `oldSelf`, its own loop variables, and the fields that the schema
//! declares.
//!
//! Not here: type checking; a rule that adds a string to a number fails at its first evaluation.

use kube_cel::cel::Program;
use kube_cel::cel::common::ast::{EntryExpr, Expr, IdedExpr};
use serde_json::{Map, Value, json};

/// Identifiers that denote types.
const TYPES: &[&str] = &[
    "bool",
    "bytes",
    "double",
    "int",
    "list",
    "map",
    "null_type",
    "string",
    "timestamp",
    "duration",
    "type",
    "uint",
];

/// The undeclared names in `rule`, at a node with this schema. A rule that does not parse has none.
pub fn undeclared(rule: &str, node: &Value, is_root: bool) -> Vec<String> {
    let Ok(program) = Program::compile(rule) else { return Vec::new() };
    let mut node = node.clone();
    if is_root || node["x-kubernetes-embedded-resource"] == true {
        add_identity(&mut node);
    }
    problems(program.expression(), vec![("self".into(), Some(&node)), ("oldSelf".into(), Some(&node))])
}

/// The undeclared names in an expression, given `roots`, each with the schema of its value if known.
pub fn problems(expression: &IdedExpr, roots: Vec<(String, Option<&Value>)>) -> Vec<String> {
    let mut walk = ExpressionWalk { bound: roots, problems: Vec::new() };
    walk.expression(expression);
    walk.problems
}

/// A rule sees only the name in an object's metadata; the schema does not govern the rest.
fn add_identity(node: &mut Value) {
    let text = json!({"type": "string"});
    if let Some(node) = node.as_object_mut() {
        let fields = node.entry("properties").or_insert_with(|| Value::Object(Map::new()));
        fields["apiVersion"] = text.clone();
        fields["kind"] = text.clone();
        fields["metadata"] = json!({"type": "object", "properties": {"name": text, "generateName": text}});
    }
}

/// Whether a name belongs to the language: a type, or a name with a sign that the parser generated.
pub fn is_own(name: &str) -> bool {
    TYPES.contains(&name) || name.starts_with('@')
}

struct ExpressionWalk<'a> {
    /// The declared names, then loop variables, innermost last, with the schema of their values if known.
    bound: Vec<(String, Option<&'a Value>)>,
    problems: Vec<String>,
}

impl<'a> ExpressionWalk<'a> {
    fn report(&mut self, problem: String) {
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// Checks an expression; returns the schema of its value if known.
    fn expression(&mut self, expression: &IdedExpr) -> Option<&'a Value> {
        match &expression.expr {
            Expr::Unspecified | Expr::Literal(_) => None,
            Expr::Ident(name) => self.identifier(name),
            Expr::Select(select) => {
                let schema = self.expression(&select.operand)?;
                match field(schema, &select.field) {
                    FieldLookup::Declared(schema) => Some(schema),
                    FieldLookup::Unknown => None,
                    FieldLookup::Undeclared => {
                        self.report(format!("undefined field '{}'", select.field));
                        None
                    }
                }
            }
            Expr::Call(call) => {
                if let Some(target) = &call.target {
                    // `math.greatest(…)`: the target of a call may be the name of a library.
                    let library = matches!(&target.expr, Expr::Ident(name) if !self.knows(name));
                    if !library {
                        self.expression(target);
                    }
                }
                let arguments: Vec<_> = call.args.iter().map(|argument| self.expression(argument)).collect();
                match (call.func_name.as_str(), arguments.first()) {
                    ("_[_]", Some(Some(list))) => element(list),
                    _ => None,
                }
            }
            Expr::List(list) => {
                for item in &list.elements {
                    self.expression(item);
                }
                None
            }
            Expr::Map(map) => self.entries(map.entries.iter().map(|entry| &entry.expr)),
            Expr::Struct(message) => {
                // The interpreter cannot construct messages and would stop.
                self.report(format!("undeclared reference to '{}' (in container '')", message.type_name));
                self.entries(message.entries.iter().map(|entry| &entry.expr))
            }
            Expr::Comprehension(comprehension) => {
                let over = self.expression(&comprehension.iter_range);
                // Over a map the first variable is a key, for which there is no schema.
                let item = over.filter(|over| over["type"] == "array").and_then(element);
                self.expression(&comprehension.accu_init);
                let outer = self.bound.len();
                self.bound.push((comprehension.iter_var.clone(), item));
                self.bound.extend(comprehension.iter_var2.clone().map(|name| (name, None)));
                self.bound.push((comprehension.accu_var.clone(), None));
                self.expression(&comprehension.loop_cond);
                self.expression(&comprehension.loop_step);
                self.expression(&comprehension.result);
                self.bound.truncate(outer);
                None
            }
        }
    }

    fn entries<'e>(&mut self, entries: impl Iterator<Item = &'e EntryExpr>) -> Option<&'a Value> {
        for entry in entries {
            match entry {
                EntryExpr::StructField(field) => {
                    self.expression(&field.value);
                }
                EntryExpr::MapEntry(entry) => {
                    self.expression(&entry.key);
                    self.expression(&entry.value);
                }
            }
        }
        None
    }

    fn knows(&self, name: &str) -> bool {
        self.bound.iter().any(|(bound, _)| bound == name)
    }

    fn identifier(&mut self, name: &str) -> Option<&'a Value> {
        if let Some((_, schema)) = self.bound.iter().rev().find(|(bound, _)| bound == name) {
            return *schema;
        }
        if !is_own(name) {
            self.report(format!("undeclared reference to '{name}' (in container '')"));
        }
        None
    }
}

enum FieldLookup<'a> {
    Declared(&'a Value),
    Undeclared,
    /// The schema allows other fields, or the name contains escapes.
    Unknown,
}

fn field<'a>(schema: &'a Value, name: &str) -> FieldLookup<'a> {
    if let Some(field) = schema["properties"].get(name) {
        return FieldLookup::Declared(field);
    }
    match &schema["additionalProperties"] {
        Value::Object(_) => return FieldLookup::Declared(&schema["additionalProperties"]),
        Value::Bool(true) => return FieldLookup::Unknown,
        _ => {}
    }
    let closed = schema["type"] == "object" && schema["x-kubernetes-preserve-unknown-fields"] != true;
    if closed && !name.contains("__") { FieldLookup::Undeclared } else { FieldLookup::Unknown }
}

fn element(container: &Value) -> Option<&Value> {
    ["items", "additionalProperties"]
        .into_iter()
        .find_map(|name| container.get(name))
        .filter(|schema| schema.is_object())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::undeclared;

    #[test]
    fn rules_may_name_what_is_declared_and_nothing_else() {
        let node = json!({"type": "object", "properties": {
            "a": {"type": "integer"},
            "list": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "string"}}}},
            "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"c": {"type": "string"}}}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
        }});
        for (rule, expected) in [
            ("self.a > 0 && oldSelf.a > 0", None),
            ("a > 0", Some("undeclared reference to 'a' (in container '')")),
            ("self.b > 0", Some("undefined field 'b'")),
            ("has(self.b)", Some("undefined field 'b'")),
            ("self.list.all(x, x.b == 'y')", None),
            ("self.list.all(x, x.c == 'y')", Some("undefined field 'c'")),
            ("self.list.exists(x, y.b == 'z')", Some("undeclared reference to 'y' (in container '')")),
            ("self.list[0].b == 'x'", None),
            ("self.list[0].c == 'x'", Some("undefined field 'c'")),
            ("self.map['k'].c == 'x' && self.map.k.c == 'x'", None),
            ("self.map.k.d == 'x'", Some("undefined field 'd'")),
            ("self.map.all(k, self.map[k].c != '')", None),
            ("self.free.whatever.below == 1", None),
            ("type(self.a) == int && size(self.list) < 3", None),
            ("self.list.map(x, x.b).join(',') == ''", None),
            ("self.metadata.name == 'x' && self.kind != ''", None),
            ("self.metadata.labels.size() > 0", Some("undefined field 'labels'")),
            ("self.list.filter(x, x.b.startsWith('a')).size() == {'k': self.a}.size()", None),
        ] {
            let found = undeclared(rule, &node, true);
            assert_eq!(found.first().map(String::as_str), expected, "{rule}: {found:?}");
        }
        assert_eq!(undeclared("self.metadata.name == 'x'", &node, false), ["undefined field 'metadata'"]);
    }
}
