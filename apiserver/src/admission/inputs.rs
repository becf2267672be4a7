//! Variables of a policy's expressions, in the formats Kubernetes documents: `request`, `object`,
//! `oldObject`, `namespaceObject`.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use kube_cel::cel::Value as Cel;
use kube_cel::cel::objects::{Key, Map};
use serde_json::{Value, json};

use super::attempt::{AdmissionRequest, Operation};
use crate::kinds::resource::Resource;

/// A value that is made when the first expression needs it: most policies look at who asks, and at nothing else.
type LazyValue<'a> = LazyCell<Cel, Box<dyn FnOnce() -> Cel + 'a>>;

/// All variables of a request.
pub struct Inputs<'a> {
    /// The requested state; null for a deletion.
    pub object: LazyValue<'a>,
    /// The state before; null for a creation.
    pub old_object: LazyValue<'a>,
    /// The `request` variable, as JSON.
    pub request_json: Rc<Value>,
    /// The `request` variable.
    pub request: LazyValue<'a>,
    /// The namespace of the object; null for cluster-scoped objects.
    pub namespace: LazyValue<'a>,
}

impl<'a> Inputs<'a> {
    /// The variables of a request, for a policy that matched it as `resource`.
    pub fn new(
        attempt: &AdmissionRequest<'a>,
        resource: Arc<Resource>,
        namespace: impl FnOnce() -> Option<Value> + 'a,
    ) -> Self {
        let request_json = Rc::new(request(attempt, &resource));
        let same = attempt.is_of(&resource);
        let shown = |object: Option<&'a Value>| -> LazyValue<'a> {
            let resource = resource.clone();
            LazyCell::new(Box::new(move || match object {
                None => Cel::Null,
                Some(object) if same => value(object),
                Some(object) => value(&resource.convert(object.clone())),
            }))
        };
        let json = request_json.clone();
        Self {
            object: shown(attempt.new),
            old_object: shown(attempt.old),
            request_json,
            request: LazyCell::new(Box::new(move || value(&json))),
            namespace: LazyCell::new(Box::new(move || namespace().as_ref().map_or(Cel::Null, value))),
        }
    }
}

/// `request`. Empty fields are omitted, as in Kubernetes: an expression tests with `has` first.
fn request(attempt: &AdmissionRequest<'_>, resource: &Resource) -> Value {
    let call = attempt.call;
    let kind = |resource: &Resource| json!({"group": resource.group, "version": resource.version, "kind": resource.kind});
    let plural = |resource: &Resource| json!({"group": resource.group, "version": resource.version, "resource": resource.plural});
    let options = match attempt.operation {
        Operation::Create => "CreateOptions",
        Operation::Update => "UpdateOptions",
        Operation::Delete => "DeleteOptions",
    };
    let mut request = json!({
        "uid": "",
        "kind": kind(resource), "resource": plural(resource),
        "requestKind": kind(&call.resource), "requestResource": plural(&call.resource),
        "operation": attempt.operation.as_str(),
        "userInfo": call.user.to_value(),
        "dryRun": attempt.dry_run,
        "options": {"kind": options, "apiVersion": "meta.k8s.io/v1"},
    });
    let optional = [
        ("subResource", call.subresource.as_str()),
        ("requestSubResource", call.subresource.as_str()),
        ("name", call.name.as_str()),
        ("namespace", call.namespace.as_str()),
    ];
    for (field, value) in optional {
        if !value.is_empty() {
            request[field] = json!(value);
        }
    }
    request
}

/// The schema of `request`, against which field names are checked when a policy is written.
pub static REQUEST: LazyLock<Value> = LazyLock::new(|| {
    let text = || json!({"type": "string"});
    let texts = || json!({"type": "array", "items": {"type": "string"}});
    let fields = |fields: Value| json!({"type": "object", "properties": fields});
    let kind = fields(json!({"group": text(), "version": text(), "kind": text()}));
    let resource = fields(json!({"group": text(), "version": text(), "resource": text()}));
    let user = fields(json!({
        "username": text(), "uid": text(), "groups": texts(),
        "extra": {"type": "object", "additionalProperties": texts()},
    }));
    fields(json!({
        "kind": kind, "resource": resource, "subResource": text(),
        "requestKind": kind, "requestResource": resource, "requestSubResource": text(),
        "name": text(), "namespace": text(), "operation": text(), "userInfo": user,
        "dryRun": {"type": "boolean"}, "options": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
    }))
});

/// The schema of `namespaceObject`.
pub static NAMESPACE: LazyLock<Value> = LazyLock::new(|| {
    let fields = |fields: Value| json!({"type": "object", "properties": fields});
    let text = || json!({"type": "string"});
    let map = || json!({"type": "object", "additionalProperties": {"type": "string"}});
    let list = |items: Value| json!({"type": "array", "items": items});
    let condition = fields(json!({
        "type": text(), "status": text(), "reason": text(), "message": text(), "lastTransitionTime": text(),
    }));
    fields(json!({
        "metadata": fields(json!({
            "name": text(), "generateName": text(), "namespace": text(), "labels": map(), "annotations": map(),
            "uid": text(), "resourceVersion": text(), "creationTimestamp": text(), "deletionTimestamp": text(),
            "deletionGracePeriodSeconds": {"type": "integer"}, "generation": {"type": "integer"},
            "finalizers": list(text()),
        })),
        "spec": fields(json!({"finalizers": list(text())})),
        "status": fields(json!({"phase": text(), "conditions": list(condition)})),
    }))
});

/// JSON as a CEL value.
pub fn value(json: &Value) -> Cel {
    match json {
        Value::Null => Cel::Null,
        Value::Bool(value) => Cel::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(value), _) => Cel::Int(value),
            (None, Some(value)) => Cel::UInt(value),
            (None, None) => Cel::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => Cel::String(Arc::new(text.clone())),
        Value::Array(items) => Cel::List(Arc::new(items.iter().map(value).collect())),
        Value::Object(fields) => {
            let map: HashMap<Key, Cel> = fields
                .iter()
                .map(|(key, field)| (Key::String(Arc::new(key.clone())), value(field)))
                .collect();
            Cel::Map(Map { map: Arc::new(map) })
        }
    }
}
