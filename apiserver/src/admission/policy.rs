//! Compiled policies and bindings, and the evaluation of a policy for one request. Pure, except for the
//! thread's CEL libraries.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use kube_cel::cel::Value as Cel;
use serde_json::{Value, json};

use super::authorizer;
use super::expression::{Expression, Roots, Session, session};
use super::inputs::{Inputs, NAMESPACE, REQUEST, value};
use super::matching::Matching;
use crate::object;

/// Longest message of an expression, in bytes.
const MAX_MESSAGE_BYTES: usize = 5 * 1024;

/// A compiled entry of `spec.validations`.
#[derive(Debug)]
struct Validation {
    expression: Expression,
    message: String,
    message_expression: Option<Expression>,
    reason: String,
}

/// A compiled policy.
#[derive(Debug)]
pub struct Policy {
    /// Errors of validations that cannot be compiled, for example of another release; they count as failed.
    unread: Vec<String>,
    /// Its name.
    pub name: String,
    /// Whether a request is denied when evaluation fails (`failurePolicy: Fail`).
    pub fails: bool,
    /// `apiVersion` and kind of its parameters, if it takes any.
    pub param_kind: Option<(String, String)>,
    /// The requests it applies to.
    pub matching: Matching,
    conditions: Vec<Expression>,
    variables: Vec<(String, Expression)>,
    validations: Vec<Validation>,
    /// The variables its match conditions use.
    condition_names: BTreeSet<String>,
    /// Those that only its other expressions use.
    other_names: BTreeSet<String>,
}

/// Why an expression of a stored policy cannot be evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field, such as `spec.validations[0].expression`.
    pub field: String,
    /// The expression.
    pub expression: String,
    /// The cause.
    pub why: String,
}

/// One failed validation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Message for people.
    pub message: String,
    /// `Forbidden`, `Invalid` and so on.
    pub reason: String,
}

/// The variables a policy's expressions may use.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// The schema of the objects, if known.
    pub object: Option<&'a Value>,
    /// Whether there are parameters.
    pub params: bool,
    /// Whether `authorizer` is available.
    pub authorizer: bool,
    /// The schema of `variables`; `None` before the first.
    pub variables: Option<&'a Value>,
}

impl<'a> Names<'a> {
    fn roots(&self) -> Roots<'a> {
        let mut roots: Roots<'a> = vec![
            ("object".into(), self.object),
            ("oldObject".into(), self.object),
            ("request".into(), Some(LazyLock::force(&REQUEST))),
            ("namespaceObject".into(), Some(LazyLock::force(&NAMESPACE))),
        ];
        if self.params {
            roots.push(("params".into(), None));
        }
        if self.authorizer {
            roots.push(("authorizer".into(), None));
        }
        if let Some(variables) = self.variables {
            roots.push(("variables".into(), Some(variables)));
        }
        roots
    }
}

fn list<'a>(spec: &'a Value, field: &str) -> impl Iterator<Item = (usize, &'a Value)> {
    spec[field].as_array().into_iter().flatten().enumerate()
}

/// Compiles one expression and checks, as far as its type is known, that its result is one of `results`.
fn read(
    source: &Value,
    field: String,
    names: &Names<'_>,
    results: &[&str],
    problems: &mut Vec<Problem>,
) -> Option<Expression> {
    let text = source.as_str().unwrap_or_default();
    let outcome = Expression::read(text, &names.roots()).and_then(|expression| match expression.result() {
        Some(result) if !results.is_empty() && !results.contains(&result) => {
            Err(format!("must evaluate to {} but got {result}", results.join(" or ")))
        }
        _ => Ok(expression),
    });
    match outcome {
        Ok(expression) => Some(expression),
        Err(why) => {
            problems.push(Problem { field, expression: text.to_string(), why });
            None
        }
    }
}

impl Policy {
    /// Compiles a policy and returns the expressions that are invalid. `schema` describes the objects, if
    /// known.
    pub fn read(policy: &Value, schema: Option<&Value>) -> (Self, Vec<Problem>) {
        let spec = &policy["spec"];
        let mut problems = Vec::new();
        let params = spec["paramKind"].is_object();
        let mut shape = json!({"type": "object", "properties": {}});
        let plain = Names { object: schema, params, authorizer: true, variables: None };
        let conditions = list(spec, "matchConditions").filter_map(|(index, condition)| {
            let field = format!("spec.matchConditions[{index}].expression");
            read(&condition["expression"], field, &plain, &["bool"], &mut problems)
        });
        let conditions = conditions.collect();
        let mut variables = Vec::new();
        for (index, variable) in list(spec, "variables") {
            let field = format!("spec.variables[{index}].expression");
            let names = Names { variables: Some(&shape), ..plain };
            let name = variable["name"].as_str().unwrap_or_default().to_string();
            let expression = read(&variable["expression"], field, &names, &[], &mut problems);
            shape["properties"][&name] = json!({});
            variables.extend(expression.map(|expression| (name, expression)));
        }
        let composed = !variables.is_empty();
        let names = Names { variables: composed.then_some(&shape), ..plain };
        let mut validations = Vec::new();
        for (index, validation) in list(spec, "validations") {
            let field = |name: &str| format!("spec.validations[{index}].{name}");
            let expression =
                read(&validation["expression"], field("expression"), &names, &["bool"], &mut problems);
            let silent = Names { authorizer: false, ..names };
            let problem = &validation["messageExpression"];
            let message_expression = (!problem.is_null())
                .then(|| read(problem, field("messageExpression"), &silent, &["string"], &mut problems));
            let text = |name: &str| validation[name].as_str().unwrap_or_default().trim().to_string();
            validations.extend(expression.map(|expression| Validation {
                expression,
                message: text("message"),
                message_expression: message_expression.flatten(),
                reason: Some(text("reason")).filter(|it| !it.is_empty()).unwrap_or_else(|| "Invalid".into()),
            }));
        }
        for (index, annotation) in list(spec, "auditAnnotations") {
            let field = format!("spec.auditAnnotations[{index}].valueExpression");
            read(&annotation["valueExpression"], field, &names, &["string", "null_type"], &mut problems);
        }
        let is_validation =
            |it: &&Problem| it.field.starts_with("spec.validations[") && it.field.ends_with("].expression");
        let unread = problems.iter().filter(is_validation).map(|it| format!("{}: {}", it.field, it.why));
        let mut read = Self {
            unread: unread.collect(),
            name: object::name(policy).to_string(),
            fails: spec["failurePolicy"] != "Ignore",
            param_kind: params.then(|| {
                let text = |name: &str| spec["paramKind"][name].as_str().unwrap_or_default().to_string();
                (text("apiVersion"), text("kind"))
            }),
            matching: Matching::read(&spec["matchConstraints"]),
            conditions,
            variables,
            validations,
            condition_names: BTreeSet::new(),
            other_names: BTreeSet::new(),
        };
        read.condition_names = read.conditions.iter().flat_map(|it| it.names.iter().cloned()).collect();
        let others = read.judging().flat_map(|it| it.names.iter().cloned());
        read.other_names = others.filter(|name| !read.condition_names.contains(name)).collect();
        (read, problems)
    }

    /// The expressions that are evaluated once the policy applies.
    fn judging(&self) -> impl Iterator<Item = &Expression> {
        let validations = self.validations.iter();
        let variables = self.variables.iter().map(|(_, expression)| expression);
        variables
            .chain(validations.flat_map(|it| std::iter::once(&it.expression).chain(&it.message_expression)))
    }

    /// Binds those of the variables of a request that these expressions use.
    fn bind(
        names: &BTreeSet<String>,
        session: &mut Session<'_>,
        inputs: &Inputs<'_>,
        params: Option<&Value>,
    ) {
        for (name, input) in [
            ("object", &inputs.object),
            ("oldObject", &inputs.old_object),
            ("request", &inputs.request),
            ("namespaceObject", &inputs.namespace),
        ] {
            if names.contains(name) {
                session.bind(name, Cel::clone(input));
            }
        }
        if names.contains("params") {
            session.bind("params", params.map_or(Cel::Null, value));
        }
        if names.contains("authorizer") {
            session.bind("authorizer", authorizer::start());
        }
        if names.contains(authorizer::REQUEST_RESOURCE) {
            let text = |field: &Value| field.as_str().unwrap_or_default().to_string();
            let request = &inputs.request_json;
            let resource = &request["requestResource"];
            let own = authorizer::request_resource(
                &text(&resource["group"]),
                &text(&resource["resource"]),
                &text(&request["requestSubResource"]),
                &text(&request["namespace"]),
                &text(&request["name"]),
            );
            session.bind(authorizer::REQUEST_RESOURCE, own);
        }
    }

    /// Evaluates the validations for a request; returns the failed ones in order.
    pub fn evaluate(&self, inputs: &Inputs<'_>, params: Option<&Value>) -> Vec<Denial> {
        session(|session| {
            Self::bind(&self.condition_names, session, inputs, params);
            match self.applies(session) {
                Ok(true) => {}
                Ok(false) => return Vec::new(),
                Err(message) => return self.failure(message).into_iter().collect(),
            }
            Self::bind(&self.other_names, session, inputs, params);
            for (name, expression) in &self.variables {
                session.define(name, expression);
            }
            let unread = self.unread.iter().filter_map(|why| self.failure(why.clone()));
            let judged =
                self.validations.iter().filter_map(|validation| match session.run(&validation.expression) {
                    Ok(Cel::Bool(true)) => None,
                    Ok(_) => Some(validation.denial(session)),
                    Err(message) => self.failure(message),
                });
            unread.chain(judged).collect()
        })
    }

    /// Whether all match conditions hold. A condition that does not hold takes precedence over one that
    /// fails.
    fn applies(&self, session: &Session<'_>) -> Result<bool, String> {
        let mut failed = Vec::new();
        for condition in &self.conditions {
            match session.run(condition) {
                Ok(Cel::Bool(true)) => {}
                Ok(Cel::Bool(false)) => return Ok(false),
                Ok(_) => failed.push(format!("expression '{}' is not a bool", condition.source)),
                Err(why) => failed.push(why),
            }
        }
        match failed.as_slice() {
            [] => Ok(true),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }

    /// The effect of an error under the failure policy.
    fn failure(&self, message: String) -> Option<Denial> {
        self.fails.then(|| Denial { message, reason: "Invalid".into() })
    }
}

impl Validation {
    fn denial(&self, session: &Session<'_>) -> Denial {
        let computed =
            self.message_expression.as_ref().and_then(|expression| match session.run(expression) {
                Ok(Cel::String(text)) => {
                    let text = text.trim();
                    let usable = !text.is_empty() && text.len() <= MAX_MESSAGE_BYTES && !text.contains('\n');
                    usable.then(|| text.to_string())
                }
                _ => None,
            });
        let message = computed.unwrap_or_else(|| {
            if self.message.is_empty() {
                format!("failed expression: {}", self.expression.source.trim())
            } else {
                self.message.clone()
            }
        });
        Denial { message, reason: self.reason.clone() }
    }
}

/// A binding's action on a failed validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValidationAction {
    /// Denies the request.
    Deny,
    /// Admits it with a warning.
    Warn,
    /// Admits it and logs.
    Audit,
}

/// A binding, which puts a policy into force.
#[derive(Clone, Debug)]
pub struct Binding {
    /// Its name.
    pub name: String,
    /// The policy's name.
    pub policy: String,
    /// Its match resources; `None` for everything that the policy matches.
    pub matching: Option<Matching>,
    /// The reference to the parameters.
    pub param_ref: Option<Value>,
    /// Its actions.
    pub actions: Vec<ValidationAction>,
}

impl Binding {
    /// Compiles a binding.
    pub fn read(binding: &Value) -> Self {
        let spec = &binding["spec"];
        let actions = spec["validationActions"].as_array().into_iter().flatten();
        Self {
            name: object::name(binding).to_string(),
            policy: spec["policyName"].as_str().unwrap_or_default().to_string(),
            matching: spec["matchResources"].is_object().then(|| Matching::read(&spec["matchResources"])),
            param_ref: Some(spec["paramRef"].clone()).filter(Value::is_object),
            actions: actions
                .filter_map(|action| match action.as_str() {
                    Some("Deny") => Some(ValidationAction::Deny),
                    Some("Warn") => Some(ValidationAction::Warn),
                    Some("Audit") => Some(ValidationAction::Audit),
                    _ => None,
                })
                .collect(),
        }
    }
}
