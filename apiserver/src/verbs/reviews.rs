//! Access and token reviews, answered and never stored: SelfSubjectReview, SubjectAccessReview and its
//! variants, TokenReview; and TokenRequests of service accounts.

use http::{Response, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::write;
use crate::admission;
use crate::admission::attempt::{AdmissionRequest, Operation};
use crate::auth::rbac::Attributes;
use crate::auth::tokens;
use crate::auth::user::{MASTERS, User};
use crate::call::Call;
use crate::object;
use crate::output::{self, Body};
use crate::schema::{Schema, builtin};
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};

/// Default lifetime of tokens in seconds, as in Kubernetes.
const TOKEN_SECONDS: i64 = 3600;
/// Minimum lifetime of tokens in seconds, as in Kubernetes.
const MIN_TOKEN_SECONDS: i64 = 600;
/// Maximum lifetime of tokens in seconds.
const MAX_TOKEN_SECONDS: i64 = 365 * 24 * 3600;

/// Handles the creation of a review.
pub fn create(api: &ServerState, call: &Call) -> Result<Response<Body>> {
    let (mut review, _) = write::decode(call)?;
    write::check_type(call, &mut review)?;
    check_types(call.resource.schema(), &mut review, &call.resource.kind)?;
    let spec = review["spec"].clone();
    check_review(call, &spec)?;
    let status = match call.resource.kind.as_str() {
        "SelfSubjectReview" => json!({"userInfo": call.user.to_value()}),
        "SelfSubjectAccessReview" => access(api, &call.user, &spec),
        "SelfSubjectRulesReview" => rules(api, &call.user, spec["namespace"].as_str().unwrap_or_default()),
        "SubjectAccessReview" | "LocalSubjectAccessReview" => {
            let groups = spec["groups"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let name = spec["user"].as_str().unwrap_or_default();
            let user =
                User { name: name.into(), groups: groups.map(str::to_string).collect(), ..User::default() };
            access(api, &user, &spec)
        }
        "TokenReview" => token(api, &spec),
        _ => return Err(ApiError::method_not_allowed()),
    };
    review["status"] = status;
    if review["metadata"].is_null() {
        review["metadata"] = json!({});
    }
    Ok(output::value(StatusCode::CREATED, &review))
}

/// Checks a body that no store will hold against its schema; unknown fields are dropped.
fn check_types(schema: &Schema, body: &mut Value, kind: &str) -> Result<()> {
    schema.prune(body);
    // The status is the answer.
    object::remove(body, "status");
    schema.default(body);
    match schema.validate(body, None).into_iter().find(|error| error.reason == "FieldValueTypeInvalid") {
        Some(error) => Err(ApiError::bad_request(format!("{kind} cannot be handled: {error}"))),
        None => Ok(()),
    }
}

/// Checks that a review asks one question that can be answered.
fn check_review(call: &Call, spec: &Value) -> Result<()> {
    let refuse = |reason: &str, field: &str, message: &str| {
        let cause = Cause { reason: reason.into(), message: message.into(), field: field.into() };
        Err(call.invalid(vec![cause]))
    };
    let kind = call.resource.kind.as_str();
    let local = kind == "LocalSubjectAccessReview";
    match kind {
        "SelfSubjectRulesReview" if spec["namespace"].as_str().is_none_or(str::is_empty) => {
            return Err(ApiError::bad_request("no namespace on request"));
        }
        "TokenReview" if spec["token"].as_str().is_none_or(str::is_empty) => {
            return Err(ApiError::bad_request("token is required for TokenReview in authentication"));
        }
        "SelfSubjectAccessReview" | "SubjectAccessReview" | "LocalSubjectAccessReview" => {}
        _ => return Ok(()),
    }
    match (spec["resourceAttributes"].is_object(), spec["nonResourceAttributes"].is_object()) {
        (true, true) => {
            let message = "Invalid value: cannot be specified in combination with resourceAttributes";
            return refuse("FieldValueInvalid", "spec.nonResourceAttributes", message);
        }
        (false, false) => {
            let message =
                "Invalid value: exactly one of nonResourceAttributes or resourceAttributes must be specified";
            return refuse("FieldValueInvalid", "spec.resourceAttributes", message);
        }
        (false, true) if local => {
            let message = "Invalid value: disallowed on this kind of request";
            return refuse("FieldValueInvalid", "spec.nonResourceAttributes", message);
        }
        _ => {}
    }
    if local && spec["resourceAttributes"]["namespace"] != call.namespace.as_str() {
        let message = "Invalid value: must match metadata.namespace";
        return refuse("FieldValueInvalid", "spec.resourceAttributes.namespace", message);
    }
    let anonymous = spec["user"].as_str().is_none_or(str::is_empty)
        && spec["groups"].as_array().is_none_or(Vec::is_empty);
    if kind != "SelfSubjectAccessReview" && anonymous {
        let message = "Invalid value: \"\": at least one of user or group must be specified";
        return refuse("FieldValueInvalid", "spec.user", message);
    }
    Ok(())
}

/// The status of a TokenReview: audiences are those that the token was made for and the review asks about, this API
/// server if it names none.
fn token(api: &ServerState, spec: &Value) -> Value {
    let mut audiences: Vec<&str> =
        spec["audiences"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if audiences.is_empty() {
        audiences.push(tokens::ISSUER);
    }
    match tokens::review(api, spec["token"].as_str().unwrap_or_default(), &audiences, Timestamp::now()) {
        Some((user, audiences)) => {
            json!({"authenticated": true, "user": user.to_value(), "audiences": audiences})
        }
        None => json!({
            "authenticated": false,
            "error": "the token is invalid or expired, or it was made for other audiences",
        }),
    }
}

/// The Secret that a TokenRequest binds its token to, as a claim; `None` if it names no object.
fn bound_secret(api: &ServerState, call: &Call, spec: &Value) -> Result<Option<Value>> {
    let reference = &spec["boundObjectRef"];
    if reference.is_null() {
        return Ok(None);
    }
    let text = |field: &str| reference[field].as_str().unwrap_or_default();
    if (text("apiVersion"), text("kind")) != ("v1", "Secret") {
        return Err(ApiError::bad_request(format!(
            "cannot bind token for serviceaccount to object of type {}, Kind={}; this server binds to Secrets",
            text("apiVersion"),
            text("kind")
        )));
    }
    let missing = || ApiError::not_found("", "secrets", text("name"));
    let secret = api.store.get(&tokens::secret_key(&call.namespace, text("name"))).ok_or_else(missing)?;
    let uid = object::uid(secret.object());
    if !text("uid").is_empty() && text("uid") != uid {
        let why = format!(
            "the UID in the bound object reference ({}) does not match the UID in record",
            text("uid")
        );
        return Err(ApiError::conflict("", "secrets", text("name"), &why));
    }
    Ok(Some(json!({"name": text("name"), "uid": uid})))
}

fn access(api: &ServerState, user: &User, spec: &Value) -> Value {
    let resource = &spec["resourceAttributes"];
    let path = &spec["nonResourceAttributes"];
    let text = |value: &'_ Value| value.as_str().unwrap_or_default().to_string();
    let allowed = if resource.is_object() {
        api.policies.current().allows(
            user,
            &Attributes {
                verb: &text(&resource["verb"]),
                group: &text(&resource["group"]),
                resource: &text(&resource["resource"]),
                subresource: &text(&resource["subresource"]),
                namespace: &text(&resource["namespace"]),
                name: &text(&resource["name"]),
                path: "",
            },
        )
    } else {
        let (verb, path) = (text(&path["verb"]), text(&path["path"]));
        api.policies.current().allows(user, &Attributes { verb: &verb, path: &path, ..Attributes::default() })
    };
    if allowed { json!({"allowed": true, "reason": "RBAC: allowed"}) } else { json!({"allowed": false}) }
}

fn rules(api: &ServerState, user: &User, namespace: &str) -> Value {
    let policy = api.policies.current();
    let (mut resources, mut paths) = (Vec::new(), Vec::new());
    if user.groups.iter().any(|group| group == MASTERS) {
        resources.push(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}));
        paths.push(json!({"verbs": ["*"], "nonResourceURLs": ["*"]}));
    }
    for rule in policy.rules_of(user, namespace) {
        if rule.urls.is_empty() {
            let mut shown =
                json!({"verbs": rule.verbs, "apiGroups": rule.groups, "resources": rule.resources});
            if !rule.names.is_empty() {
                shown["resourceNames"] = json!(rule.names);
            }
            resources.push(shown);
        } else {
            paths.push(json!({"verbs": rule.verbs, "nonResourceURLs": rule.urls}));
        }
    }
    json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": false})
}

/// Handles a TokenRequest.
pub fn service_account_token(api: &ServerState, call: &Call) -> Result<Response<Body>> {
    let record = api.store.get(&call.key()).ok_or_else(|| call.not_found())?;
    let account = record.object();
    let (mut request, _) = write::decode(call)?;
    write::check_maps(&request, "TokenRequest")?;
    let group = "authentication.k8s.io";
    if let Some(schema) = builtin::builtin_schema(group, "v1", "TokenRequest") {
        check_types(schema, &mut request, "TokenRequest")?;
    }
    let lifetime = &request["spec"]["expirationSeconds"];
    let problem = match lifetime.as_i64() {
        Some(seconds) if seconds < MIN_TOKEN_SECONDS => "may not specify a duration less than 10 minutes",
        Some(seconds) if seconds > 1 << 32 => "may not specify a duration larger than 2^32 seconds",
        _ => "",
    };
    if !problem.is_empty() {
        let message = format!("Invalid value: {lifetime}: {problem}");
        return Err(ApiError::invalid_field(group, "TokenRequest", "", "spec.expirationSeconds", message));
    }
    admission::admit(
        api,
        &AdmissionRequest {
            call,
            operation: Operation::Create,
            new: Some(&request),
            old: None,
            dry_run: call.query.dry_run,
        },
    )?;
    let now = Timestamp::now().as_second();
    let requested = request["spec"]["expirationSeconds"].as_i64().unwrap_or(TOKEN_SECONDS);
    let seconds = requested.clamp(MIN_TOKEN_SECONDS, MAX_TOKEN_SECONDS);
    let audiences = match &request["spec"]["audiences"] {
        Value::Array(audiences) if !audiences.is_empty() => json!(audiences),
        _ => json!([tokens::ISSUER]),
    };
    let mut claims = json!({
        "iss": tokens::ISSUER, "aud": audiences, "iat": now, "nbf": now, "exp": now + seconds,
        "jti": object::new_uid(),
        "sub": format!("system:serviceaccount:{}:{}", call.namespace, call.name),
        "kubernetes.io": {
            "namespace": call.namespace,
            "serviceaccount": {"name": call.name, "uid": object::uid(account)},
        },
    });
    let mut granted = json!({"audiences": audiences, "expirationSeconds": seconds});
    if let Some(secret) = bound_secret(api, call, &request["spec"])? {
        claims["kubernetes.io"]["secret"] = secret;
        granted["boundObjectRef"] = request["spec"]["boundObjectRef"].clone();
    }
    let token =
        api.signer.sign(&claims).ok_or_else(|| ApiError::internal("the token could not be signed"))?;
    let expires = Timestamp::from_second(now + seconds).map(object::timestamp).unwrap_or_default();
    request = json!({
        "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"name": call.name, "namespace": call.namespace},
        "spec": granted,
        "status": {"token": token, "expirationTimestamp": expires},
    });
    Ok(output::value(StatusCode::CREATED, &request))
}
