//! A CEL expression of a policy: parsed, made strict, and evaluated within a cost budget.
//!
//! The CEL interpreter is lenient in two ways that would let a policy admit requests it means to deny: a
//! field of a value without fields evaluates to `false`, and loops have no cost. So an expression is
//! rewritten once when it is parsed: field selections become index operations that fail, and every loop
//! iteration is charged.
//!
//! Not here: the variables ([`super::inputs`]), and what a result means ([`super::policy`]).

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use kube_cel::KubeCelExt;
use kube_cel::cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, operators};
use kube_cel::cel::extractors::Arguments;
use kube_cel::cel::parser::Parser;
use kube_cel::cel::{Context, ExecutionError, ResolveResult, Value};

use super::authorizer;
use crate::schema::cel::declarations;

/// Longest expression in bytes: ten times as long as a reviewer would accept.
const MAX_EXPRESSION_BYTES: usize = 16 * 1024;
/// Cost limit of one evaluation of a policy. A loop iteration costs the size of its body, more for large
/// objects. A million is about a second on a slow machine, and Kubernetes' own limit is of this order.
const COST_BUDGET: i64 = 1_000_000;
/// Elements of data that add the same cost again to an iteration: a loop's body may copy the values it names.
const COST_GRANULARITY: i64 = 64;
/// The function that charges a loop iteration.
const TICK: &str = "@tick";
/// The error when the budget is used up.
const EXHAUSTED: &str = "operation cancelled: actual cost limit exceeded";

/// A parsed expression.
#[derive(Debug)]
pub struct Expression {
    /// The source text.
    pub source: String,
    root: IdedExpr,
    /// The variables it uses, such as `oldObject` or `variables.zone`.
    pub names: BTreeSet<String>,
}

/// The variables an expression may use, each with the schema of its value if known.
pub type Roots<'a> = Vec<(String, Option<&'a serde_json::Value>)>;

impl Expression {
    /// Parses an expression that may use `roots`; an error if it is invalid.
    pub fn read(source: &str, roots: &Roots<'_>) -> Result<Self, String> {
        let detail = |why: String| format!("compilation failed: {why}");
        if source.len() > MAX_EXPRESSION_BYTES {
            return Err(detail(format!(
                "the expression has {} bytes, and {MAX_EXPRESSION_BYTES} are allowed",
                source.len()
            )));
        }
        let parsed = Parser::new().enable_optional_syntax(true).parse(source);
        let mut root = parsed.map_err(|errors| detail(errors.to_string()))?;
        if let Some(problem) = declarations::problems(&root, roots.clone()).into_iter().next() {
            return Err(detail(problem));
        }
        let mut rewrite = Rewrite::default();
        rewrite.expression(&mut root);
        if let Some(problem) = rewrite.problems.into_iter().next() {
            return Err(detail(problem));
        }
        if let Some(unknown) =
            rewrite.functions.iter().find(|(any, _)| !any.iter().any(|name| is_known(name)))
        {
            return Err(detail(format!("undeclared reference to '{}' (in container '')", unknown.1)));
        }
        // The rewrite above may have taken the target of a method call for a library.
        let known = |name: &str| {
            let first = name.split('.').next().unwrap_or_default();
            roots.iter().any(|(root, _)| root == first) || declarations::is_own(first)
        };
        if let Some(unknown) = rewrite.names.iter().find(|name| !known(name)) {
            return Err(detail(format!("undeclared reference to '{unknown}' (in container '')")));
        }
        Ok(Self { source: source.to_string(), root, names: rewrite.names })
    }

    /// The type of the result, if the outermost operation determines it.
    pub fn result(&self) -> Option<&'static str> {
        match &self.root.expr {
            Expr::Literal(LiteralValue::Boolean(_)) => Some("bool"),
            Expr::Literal(LiteralValue::String(_)) => Some("string"),
            Expr::Literal(LiteralValue::Int(_)) => Some("int"),
            Expr::Literal(LiteralValue::UInt(_)) => Some("uint"),
            Expr::Literal(LiteralValue::Double(_)) => Some("double"),
            Expr::Literal(LiteralValue::Bytes(_)) => Some("bytes"),
            Expr::Literal(LiteralValue::Null) => Some("null_type"),
            Expr::List(_) => Some("list"),
            Expr::Map(_) => Some("map"),
            Expr::Select(select) if select.test => Some("bool"),
            Expr::Call(call) => match call.func_name.as_str() {
                operators::LOGICAL_AND
                | operators::LOGICAL_OR
                | operators::LOGICAL_NOT
                | operators::EQUALS
                | operators::NOT_EQUALS
                | operators::LESS
                | operators::LESS_EQUALS
                | operators::GREATER
                | operators::GREATER_EQUALS
                | operators::IN
                | "startsWith"
                | "endsWith"
                | "matches" => Some("bool"),
                "size" => Some("int"),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Makes an expression strict, and collects the names it uses.
#[derive(Default)]
struct Rewrite {
    bound: Vec<String>,
    names: BTreeSet<String>,
    /// The possible names of a function, and its name in messages.
    functions: BTreeSet<(Vec<String>, String)>,
    problems: Vec<String>,
}

impl Rewrite {
    fn is_root(&self, expression: &IdedExpr, name: &str) -> bool {
        matches!(&expression.expr, Expr::Ident(ident) if ident == name)
            && !self.bound.iter().any(|bound| bound == name)
    }

    fn expression(&mut self, expression: &mut IdedExpr) {
        let id = expression.id;
        match &mut expression.expr {
            Expr::Unspecified | Expr::Literal(_) => {}
            Expr::Ident(name) => {
                if !self.bound.contains(name) {
                    self.names.insert(name.clone());
                }
            }
            Expr::Select(select) => {
                let joined = format!("variables.{}", select.field);
                if self.is_root(&select.operand, "variables") {
                    expression.expr = if select.test {
                        Expr::Literal(LiteralValue::Boolean(true.into()))
                    } else {
                        self.names.insert(joined.clone());
                        Expr::Ident(joined)
                    };
                } else if self.is_root(&select.operand, "authorizer") && select.field == "requestResource" {
                    self.names.insert(authorizer::REQUEST_RESOURCE.into());
                    expression.expr = Expr::Ident(authorizer::REQUEST_RESOURCE.into());
                } else {
                    self.expression(&mut select.operand);
                    if !select.test {
                        let field = text(id, &select.field);
                        let operand = std::mem::take(&mut *select.operand);
                        expression.expr = call(operators::INDEX, vec![operand, field]);
                    }
                }
            }
            Expr::Call(call) => {
                if call.func_name == operators::OPT_SELECT {
                    // The interpreter's own operator fails on a missing field, which is the case it must
                    // tolerate.
                    call.func_name = operators::OPT_INDEX.into();
                }
                self.note(call);
                if let Some(target) = &mut call.target {
                    let library = matches!(&target.expr, Expr::Ident(name)
                        if !self.bound.contains(name) && is_known(&format!("{name}.{}", call.func_name)));
                    if !library {
                        self.expression(target);
                    }
                }
                for argument in &mut call.args {
                    self.expression(argument);
                }
            }
            Expr::List(list) => list.elements.iter_mut().for_each(|element| self.expression(element)),
            Expr::Map(map) => {
                for entry in &mut map.entries {
                    if let kube_cel::cel::common::ast::EntryExpr::MapEntry(entry) = &mut entry.expr {
                        self.expression(&mut entry.key);
                        self.expression(&mut entry.value);
                    }
                }
            }
            Expr::Struct(message) => self.problems.push(format!(
                "undeclared reference to '{}' (in container ''): protobuf messages cannot be constructed",
                message.type_name
            )),
            Expr::Comprehension(comprehension) => {
                self.expression(&mut comprehension.iter_range);
                self.expression(&mut comprehension.accu_init);
                let outer = self.bound.len();
                self.bound.push(comprehension.iter_var.clone());
                self.bound.extend(comprehension.iter_var2.clone());
                self.bound.push(comprehension.accu_var.clone());
                self.expression(&mut comprehension.loop_cond);
                self.expression(&mut comprehension.loop_step);
                self.expression(&mut comprehension.result);
                self.bound.truncate(outer);
                let step = std::mem::take(&mut comprehension.loop_step);
                let ident = |name: &str| IdedExpr { id, expr: Expr::Ident(name.into()) };
                let weight = IdedExpr { id, expr: Expr::Literal(LiteralValue::Int(size(&step).into())) };
                let tick = call(TICK, vec![ident(&comprehension.iter_var), weight]);
                let accumulated = ident(&comprehension.accu_var);
                let paid = call(operators::CONDITIONAL, vec![IdedExpr { id, expr: tick }, step, accumulated]);
                comprehension.loop_step = IdedExpr { id, expr: paid };
            }
        }
    }

    fn note(&mut self, call: &CallExpr) {
        // Operators have names that are no identifiers.
        if !call.func_name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
            || call.func_name.starts_with('_')
        {
            return;
        }
        let mut any = vec![call.func_name.clone()];
        if let Some(target) = &call.target
            && let Expr::Ident(prefix) = &target.expr
        {
            any.push(format!("{prefix}.{}", call.func_name));
        }
        self.functions.insert((any, call.func_name.clone()));
    }
}

fn call(function: &str, args: Vec<IdedExpr>) -> Expr {
    Expr::Call(CallExpr { func_name: function.into(), target: None, args })
}

fn text(id: u64, value: &str) -> IdedExpr {
    IdedExpr { id, expr: Expr::Literal(LiteralValue::String(value.into())) }
}

/// The number of nodes of an expression.
fn size(expression: &IdedExpr) -> i64 {
    1 + match &expression.expr {
        Expr::Unspecified | Expr::Literal(_) | Expr::Ident(_) | Expr::Struct(_) => 0,
        Expr::Select(select) => size(&select.operand),
        Expr::Call(call) => call.target.iter().map(|it| size(it)).chain(call.args.iter().map(size)).sum(),
        Expr::List(list) => list.elements.iter().map(size).sum(),
        Expr::Map(map) => map.entries.len() as i64 * 4,
        Expr::Comprehension(it) => {
            size(&it.iter_range) + size(&it.accu_init) + size(&it.loop_step) + size(&it.result)
        }
    }
}

/// The remaining budget, and the size of the largest value that an iteration may copy.
#[derive(Clone, Copy, Debug, Default)]
struct CostMeter {
    left: i64,
    largest: i64,
}

thread_local! {
    /// The libraries. Registering them costs more than most expressions, and evaluation stays on its thread.
    static LIBRARIES: Context<'static> = libraries();
    static METER: Cell<CostMeter> = const { Cell::new(CostMeter { left: 0, largest: 0 }) };
}

fn libraries() -> Context<'static> {
    let mut context = Context::default().with_all();
    context.add_function(TICK, tick);
    context.add_function("dyn", |value: Value| -> ResolveResult { Ok(value) });
    authorizer::register(&mut context);
    context
}

fn tick(Arguments(arguments): Arguments) -> ResolveResult {
    let mut meter = METER.get();
    let weight = match arguments.get(1) {
        Some(Value::Int(weight)) => *weight,
        _ => 1,
    };
    meter.largest = meter.largest.max(arguments.first().map_or(1, elements));
    meter.left = meter.left.saturating_sub(weight.saturating_mul(1 + meter.largest / COST_GRANULARITY));
    METER.set(meter);
    if meter.left < 0 { Err(ExecutionError::function_error(TICK, EXHAUSTED)) } else { Ok(Value::Bool(true)) }
}

/// The number of elements in a value.
fn elements(value: &Value) -> i64 {
    match value {
        Value::List(items) => 1 + items.iter().map(elements).sum::<i64>(),
        Value::Map(map) => 1 + map.map.values().map(elements).sum::<i64>(),
        Value::String(text) => 1 + (text.len() / 64) as i64,
        Value::Bytes(bytes) => 1 + (bytes.len() / 64) as i64,
        _ => 1,
    }
}

/// Whether a function with this name exists.
fn is_known(name: &str) -> bool {
    let asked = IdedExpr { id: 0, expr: call(name, Vec::new()) };
    LIBRARIES.with(|libraries| {
        !matches!(Value::resolve(&asked, libraries), Err(ExecutionError::UndeclaredReference(unknown)) if *unknown == name)
    })
}

/// State shared by the expressions of one evaluation: the values of variables, and the budget.
pub struct Session<'a> {
    context: Context<'a>,
    /// Errors of variables that could not be computed, raised only by expressions that use them.
    failed: BTreeMap<String, String>,
}

/// Evaluates with a full budget.
pub fn session<T>(run: impl FnOnce(&mut Session<'_>) -> T) -> T {
    LIBRARIES.with(|libraries| {
        METER.set(CostMeter { left: COST_BUDGET, largest: 1 });
        run(&mut Session { context: libraries.new_inner_scope(), failed: BTreeMap::new() })
    })
}

impl Session<'_> {
    /// Sets a variable.
    pub fn bind(&mut self, name: &str, value: Value) {
        let mut meter = METER.get();
        meter.largest = meter.largest.saturating_add(elements(&value));
        METER.set(meter);
        self.context.add_variable_from_value(name, value);
    }

    /// Evaluates a variable's expression and sets it; an error is kept for the expressions that use it.
    pub fn define(&mut self, name: &str, expression: &Expression) {
        let key = format!("variables.{name}");
        match self.evaluate(expression) {
            Ok(value) => self.bind(&key, value),
            Err(why) => {
                self.failed.insert(key, format!("composited variable \"{name}\" fails to evaluate: {why}"));
            }
        }
    }

    /// Evaluates an expression.
    pub fn run(&self, expression: &Expression) -> Result<Value, String> {
        self.evaluate(expression)
            .map_err(|why| format!("expression '{}' resulted in error: {why}", expression.source))
    }

    fn evaluate(&self, expression: &Expression) -> Result<Value, String> {
        if METER.get().left < 0 {
            return Err(EXHAUSTED.into());
        }
        let outcome = Value::resolve(&expression.root, &self.context);
        // A logical operator may have swallowed the error of an interrupted loop.
        if METER.get().left < 0 {
            return Err(EXHAUSTED.into());
        }
        outcome.map_err(|error| match error {
            ExecutionError::NoSuchKey(key) => format!("no such key: {key}"),
            ExecutionError::UndeclaredReference(name) => self
                .failed
                .get(name.as_str())
                .cloned()
                .unwrap_or_else(|| format!("no such attribute(s): {name}")),
            ExecutionError::NoSuchOverload
            | ExecutionError::UnsupportedBinaryOperator(..)
            | ExecutionError::UnsupportedUnaryOperator(..)
            | ExecutionError::UnsupportedTargetType { .. }
            | ExecutionError::UnexpectedType { .. } => "no such overload".into(),
            ExecutionError::IndexOutOfBounds(Value::Int(index)) => format!("index out of bounds: {index}"),
            ExecutionError::FunctionError { message, .. } => message,
            other => other.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::admission::inputs::value;

    fn roots() -> Roots<'static> {
        ["object", "oldObject", "authorizer", "variables"].map(|name| (name.to_string(), None)).into()
    }

    fn run(source: &str, object: &serde_json::Value) -> Result<Value, String> {
        let expression = Expression::read(source, &roots())?;
        session(|session| {
            session.bind("object", value(object));
            session.bind("oldObject", Value::Null);
            session.run(&expression)
        })
    }

    #[test]
    fn missing_fields_are_errors_and_never_false() {
        let object = json!({"metadata": {"name": "a", "namespace": "n", "labels": {"x.y/z": "1"}}, "spec": {"n": 3, "list": [1, 2]}});
        for (source, expected) in [
            ("object.spec.n == 3", Ok(true)),
            ("object.metadata.namespace == 'n'", Ok(true)),
            ("object.metadata.labels['x.y/z'] == '1'", Ok(true)),
            ("has(object.spec.n) && !has(object.spec.m)", Ok(true)),
            ("has(oldObject.spec)", Ok(false)),
            ("object.spec.m == 3", Err("no such key: m")),
            ("object.spec.n.deeper != 3", Err("no such overload")),
            ("oldObject.spec != object.spec", Err("no such overload")),
            ("object.spec.m == 3 || true", Ok(true)),
            ("object.spec.m == 3 && false", Ok(false)),
            ("object.?spec.?m.orValue(7) == 7", Ok(true)),
            ("object.?spec.?n.orValue(7) == 3", Ok(true)),
            ("object[?'spec'].?n.hasValue()", Ok(true)),
            ("object.spec.list.all(x, x > 0)", Ok(true)),
            ("object.spec.list.exists(x, x.y)", Err("no such overload")),
            ("object.spec.list.map(x, x * 2).exists(x, x == 4)", Ok(true)),
            ("object.metadata.name.matches('^[a-z]+$')", Ok(true)),
            ("dyn(object.spec.n) == 3", Ok(true)),
        ] {
            let got = run(source, &object);
            match expected {
                Ok(expected) => assert_eq!(got, Ok(Value::Bool(expected)), "{source}"),
                Err(expected) => {
                    assert!(got.clone().is_err_and(|detail| detail.contains(expected)), "{source}: {got:?}")
                }
            }
        }
    }

    #[test]
    fn invalid_expressions_fail_to_compile() {
        for (source, expected) in [
            ("object.spec.n ==", "Syntax error"),
            ("nothing.here", "undeclared reference to 'nothing'"),
            ("object.spec.invented()", "undeclared reference to 'invented'"),
            ("invented(object)", "undeclared reference to 'invented'"),
            ("math.invented(1)", "undeclared reference to 'invented'"),
            ("Thing{a: 1}.a == 1", "undeclared reference to 'Thing'"),
            ("cel.bind(x, 1, x == 1)", "undeclared reference to"),
            (&format!("'{}' == ''", "x".repeat(MAX_EXPRESSION_BYTES)), "are allowed"),
        ] {
            let detail = Expression::read(source, &roots()).unwrap_err();
            assert!(
                detail.starts_with("compilation failed: ") && detail.contains(expected),
                "{source}: {detail}"
            );
        }
    }

    #[test]
    fn no_expression_runs_beyond_its_budget() {
        let object = json!({"list": (0..2000).collect::<Vec<i64>>(), "big": "x".repeat(100_000)});
        for source in [
            "object.list.all(a, object.list.all(b, object.list.all(c, a + b + c >= 0)))",
            // The error of an interrupted loop is not swallowed.
            "object.list.all(a, object.list.all(b, object.list.all(c, a + b + c >= 0))) || true",
            // Copies of copies are charged, too.
            "[object.big].map(a, [a+a+a+a]).map(b, [b,b,b,b]).map(c, [c,c,c,c]).map(d, [d,d,d,d]).map(e, [e,e,e,e]).map(f, [f,f,f,f]).map(g, [g,g,g,g]).size() == 1 && object.list.all(x, object.list.all(y, true))",
        ] {
            assert!(run(source, &object).is_err_and(|detail| detail.ends_with(EXHAUSTED)), "{source}");
        }
        assert_eq!(run("object.list.all(a, a >= 0)", &object), Ok(Value::Bool(true)));
    }

    #[test]
    fn failed_variable_fails_only_expressions_that_use_it() {
        let read = |source: &str| Expression::read(source, &roots()).unwrap();
        session(|session| {
            session.bind("object", value(&json!({"n": 1})));
            session.define("good", &read("object.n + 1"));
            session.define("bad", &read("object.m"));
            session.define("worse", &read("variables.bad + 1"));
            assert_eq!(
                session.run(&read("variables.good == 2 || variables.bad == 3")),
                Ok(Value::Bool(true))
            );
            assert_eq!(session.run(&read("has(variables.good)")), Ok(Value::Bool(true)));
            let detail = session.run(&read("variables.worse == 1")).unwrap_err();
            assert!(
                detail.contains("composited variable \"worse\"") && detail.contains("no such key: m"),
                "{detail}"
            );
        });
    }
}
