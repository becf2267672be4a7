//! The `authorizer` variable of expressions: checks what the request's user, or a service account, may do.
//!
//! Each step (`authorizer.group('apps').resource('things')`) is a map of the arguments so far; `check`
//! evaluates them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use kube_cel::cel::extractors::{Arguments, This};
use kube_cel::cel::objects::{Key, Map};
use kube_cel::cel::{Context, ExecutionError, ResolveResult, Value};

use crate::auth::rbac::{Attributes, Policy};
use crate::auth::user::User;

/// The name of the `authorizer.requestResource` variable.
pub const REQUEST_RESOURCE: &str = "authorizer.requestResource";
/// The key that marks a step's map, so that no data of an object is mistaken for one.
const STEP_KEY: &str = "@authorizer";

thread_local! {
    static CURRENT: RefCell<Option<(Arc<Policy>, User)>> = const { RefCell::new(None) };
}

/// Sets the user and the RBAC policy of all checks while `run` runs.
pub fn with_policy<T>(policy: Arc<Policy>, user: User, run: impl FnOnce() -> T) -> T {
    CURRENT.set(Some((policy, user)));
    let outcome = run();
    CURRENT.set(None);
    outcome
}

fn map(entries: impl IntoIterator<Item = (String, Value)>) -> Value {
    let entries: HashMap<Key, Value> =
        entries.into_iter().map(|(key, value)| (Key::String(Arc::new(key)), value)).collect();
    Value::Map(Map { map: Arc::new(entries) })
}

fn string(text: &str) -> Value {
    Value::String(Arc::new(text.to_string()))
}

/// The first step, the value of `authorizer`.
pub fn start() -> Value {
    map([(STEP_KEY.to_string(), string("authorizer"))])
}

/// The resource of the request itself.
pub fn request_resource(
    group: &str,
    resource: &str,
    subresource: &str,
    namespace: &str,
    name: &str,
) -> Value {
    let fields = [
        (STEP_KEY, "resource"),
        ("group", group),
        ("resource", resource),
        ("subresource", subresource),
        ("namespace", namespace),
        ("name", name),
    ];
    map(fields.map(|(key, value)| (key.to_string(), string(value))))
}

/// Registers the functions of the steps in a context.
pub fn register(context: &mut Context<'_>) {
    // Arguments: the step before, the function, the step it returns.
    context.add_function("path", |this: This<Value>, arguments: Arguments| {
        step(&this, &arguments, "authorizer", "path", "path")
    });
    context.add_function("group", |this: This<Value>, arguments: Arguments| {
        step(&this, &arguments, "authorizer", "group", "group")
    });
    context.add_function("resource", |this: This<Value>, arguments: Arguments| {
        step(&this, &arguments, "group", "resource", "resource")
    });
    context.add_function("subresource", |this: This<Value>, arguments: Arguments| {
        step(&this, &arguments, "resource", "subresource", "resource")
    });
    context.add_function("namespace", |this: This<Value>, arguments: Arguments| {
        step(&this, &arguments, "resource", "namespace", "resource")
    });
    context.add_function("name", |this: This<Value>, arguments: Arguments| {
        step(&this, &arguments, "resource", "name", "resource")
    });
    context.add_function("serviceAccount", |This(this): This<Value>, Arguments(arguments): Arguments| {
        expect_step(&this, "authorizer")?;
        let (namespace, name) = (argument(&arguments, 0)?, argument(&arguments, 1)?);
        let user = format!("system:serviceaccount:{namespace}:{name}");
        Ok(map([
            (STEP_KEY.to_string(), string("authorizer")),
            ("user".to_string(), string(&user)),
            ("userNamespace".to_string(), string(namespace)),
        ]))
    });
    context.add_function("check", |This(this): This<Value>, Arguments(arguments): Arguments| {
        check(&this, argument(&arguments, 0)?)
    });
    context.add_function("allowed", |This(this): This<Value>| decision(&this, "allowed"));
    context.add_function("reason", |This(this): This<Value>| decision(&this, "reason"));
    context.add_function("errored", |This(this): This<Value>| decision(&this, "errored"));
    context.add_function("error", |This(this): This<Value>| decision(&this, "error"));
}

fn field<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let Value::Map(map) = value else { return None };
    map.map.get(&Key::String(Arc::new(name.to_string())))
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    match field(value, name) {
        Some(Value::String(text)) => text,
        _ => "",
    }
}

fn expect_step(value: &Value, step: &str) -> Result<(), ExecutionError> {
    if text(value, STEP_KEY) == step { Ok(()) } else { Err(ExecutionError::NoSuchOverload) }
}

fn argument(arguments: &[Value], index: usize) -> Result<&str, ExecutionError> {
    match arguments.get(index) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(ExecutionError::NoSuchOverload),
    }
}

fn step(
    This(this): &This<Value>,
    Arguments(arguments): &Arguments,
    after: &str,
    name: &str,
    makes: &str,
) -> ResolveResult {
    expect_step(this, after)?;
    let Value::Map(before) = this else { return Err(ExecutionError::NoSuchOverload) };
    let mut entries = HashMap::clone(&before.map);
    let key = |name: &str| Key::String(Arc::new(name.to_string()));
    entries.insert(key(name), string(argument(arguments, 0)?));
    entries.insert(key(STEP_KEY), string(makes));
    Ok(Value::Map(Map { map: Arc::new(entries) }))
}

fn check(this: &Value, verb: &str) -> ResolveResult {
    let resource = expect_step(this, "resource").is_ok();
    if !resource {
        expect_step(this, "path")?;
    }
    let allowed = CURRENT.with_borrow(|asked| {
        let Some((policy, user)) = asked else { return false };
        let other;
        let user = match text(this, "user") {
            "" => user,
            name => {
                let groups = [
                    "system:serviceaccounts".into(),
                    format!("system:serviceaccounts:{}", text(this, "userNamespace")),
                ];
                other = User::authenticated(name, groups.into());
                &other
            }
        };
        policy.allows(
            user,
            &Attributes {
                verb,
                group: text(this, "group"),
                resource: text(this, "resource"),
                subresource: text(this, "subresource"),
                namespace: text(this, "namespace"),
                name: text(this, "name"),
                path: if resource { "" } else { text(this, "path") },
            },
        )
    });
    Ok(map([
        (STEP_KEY.to_string(), string("decision")),
        ("allowed".to_string(), Value::Bool(allowed)),
        ("reason".to_string(), string(if allowed { "RBAC: allowed" } else { "" })),
        ("errored".to_string(), Value::Bool(false)),
        ("error".to_string(), string("")),
    ]))
}

fn decision(this: &Value, name: &str) -> ResolveResult {
    expect_step(this, "decision")?;
    field(this, name).cloned().ok_or(ExecutionError::NoSuchOverload)
}
