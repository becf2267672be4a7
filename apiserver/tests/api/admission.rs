//! Admission policies through the whole server: in force once they are written, for every kind of write. The
//! expected responses are those of kube-apiserver 1.36 to the same requests.

use http::Method;
use serde_json::{Value, json};

use super::protocol::ask;
use super::support::TestServer;

const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
const BINDINGS: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const APPLY: &str = "application/apply-patch+yaml";
const MERGE: &str = "application/merge-patch+json";

async fn send(
    cluster: &TestServer,
    method: Method,
    path: &str,
    media: &str,
    body: &Value,
) -> (u16, Value, String) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let (code, headers, answer) = ask(cluster, method, path, &[("content-type", media)], &body).await;
    let warning = headers.get("warning").and_then(|value| value.to_str().ok()).unwrap_or_default();
    (code, answer, warning.to_string())
}

async fn post(cluster: &TestServer, path: &str, body: &Value) -> (u16, Value, String) {
    send(cluster, Method::POST, path, "application/json", body).await
}

/// The status code, and the message of an error without the prefix that all denials have.
async fn send_for_message(
    cluster: &TestServer,
    method: Method,
    path: &str,
    media: &str,
    body: &Value,
) -> (u16, String) {
    let (code, answer, _) = send(cluster, method, path, media, body).await;
    let message = answer["message"].as_str().unwrap_or_default();
    (code, message.rsplit("denied request: ").next().unwrap_or_default().to_string())
}

fn map(name: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": value}})
}

fn rule(operations: &[&str], resources: &[&str]) -> Value {
    json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": operations, "resources": resources})
}

/// A policy about ConfigMaps.
fn policy(name: &str, spec: Value) -> Value {
    let mut policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {"matchConstraints": {"resourceRules": [rule(&["*"], &["configmaps"])]}},
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        policy["spec"][field] = value.clone();
    }
    policy
}

fn binding(name: &str, spec: Value) -> Value {
    let mut binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]},
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        binding["spec"][field] = value.clone();
    }
    binding
}

/// Puts a policy into force.
async fn install(cluster: &TestServer, policy: Value, binding: Value) {
    let (code, answer, _) = post(cluster, POLICIES, &policy).await;
    assert_eq!(code, 201, "{answer}");
    let (code, answer, _) = post(cluster, BINDINGS, &binding).await;
    assert_eq!(code, 201, "{answer}");
}

async fn remove(cluster: &TestServer, name: &str) {
    for place in [BINDINGS, POLICIES] {
        let (code, ..) =
            send(cluster, Method::DELETE, &format!("{place}/{name}"), "application/json", &Value::Null).await;
        assert_eq!(code, 200);
    }
}

#[tokio::test]
async fn expressions_evaluate_as_on_kubernetes() {
    let cluster = TestServer::start().await;
    // A policy, and its result for a ConfigMap `one` with `a: "1"`.
    let validate = |expression: &str| json!({"validations": [{"expression": expression}]});
    let with = |expression: &str, field: &str, value: Value| {
        let mut spec = validate(expression);
        match field {
            "message" | "messageExpression" | "reason" => spec["validations"][0][field] = value,
            _ => spec[field] = value,
        }
        spec
    };
    let failed = |expression: &str| format!("failed expression: {expression}");
    let error = |expression: &str, why: &str| format!("expression '{expression}' resulted in error: {why}");
    let missing = "object.spec.x == 1";
    let condition = |expression: &str| json!([{"name": "c", "expression": expression}]);
    let lazy = json!([{"name": "a", "expression": "object.nothing.x"}]);
    let forbidden =
        json!({"validations": [{"expression": "false", "message": " no way ", "reason": "Forbidden"}]});
    let composed = json!({
        "variables": [
            {"name": "a", "expression": "object.data.a"},
            {"name": "b", "expression": "variables.a + variables.a"},
        ],
        "validations": [{"expression": "variables.b == '22'", "messageExpression": "'b is ' + variables.b"}],
    });
    let second = json!({"validations": [
        {"expression": "true"}, {"expression": "false", "message": "second"}, {"expression": "false", "message": "third"},
    ]});
    let loops = "[0,1,2,3,4,5,6,7,8,9]";
    let endless = (0..7).fold("true".to_string(), |body, level| format!("{loops}.all(v{level}, {body})"));
    for (name, spec, code, message) in [
        ("plain", validate("false"), 422, failed("false")),
        ("reason", forbidden, 403, "no way".into()),
        ("large", with("false", "reason", json!("RequestEntityTooLarge")), 413, failed("false")),
        (
            "computed",
            with("false", "messageExpression", json!("'name ' + object.metadata.name")),
            422,
            "name one".into(),
        ),
        ("blank", with("false", "messageExpression", json!("'  '")), 422, failed("false")),
        ("missing", validate(missing), 422, error(missing, "no such key: spec")),
        ("ignored", with(missing, "failurePolicy", json!("Ignore")), 201, String::new()),
        ("null", validate("has(oldObject.data)"), 422, failed("has(oldObject.data)")),
        ("absent", validate("has(request.subResource)"), 422, failed("has(request.subResource)")),
        (
            "request",
            validate(
                "request.operation == 'CREATE' && request.resource.resource == 'configmaps' && request.kind.kind == 'ConfigMap' && request.name == 'one' && !request.dryRun && 'system:masters' in request.userInfo.groups && request.options.kind == 'CreateOptions'",
            ),
            201,
            String::new(),
        ),
        (
            "namespace",
            validate(
                "namespaceObject.metadata.labels['kubernetes.io/metadata.name'] == request.namespace && object.metadata.namespace == 'default'",
            ),
            201,
            String::new(),
        ),
        (
            "condition",
            with("false", "matchConditions", condition("object.metadata.name != 'one'")),
            201,
            String::new(),
        ),
        (
            "broken",
            with("true", "matchConditions", condition(missing)),
            422,
            error(missing, "no such key: spec"),
        ),
        ("variables", composed, 422, "b is 11".into()),
        ("lazy", with("true || variables.a == '1'", "variables", lazy.clone()), 201, String::new()),
        (
            "failing",
            with("variables.a == '1'", "variables", lazy),
            422,
            error("variables.a == '1'", "composited variable \"a\" fails to evaluate: no such key: nothing"),
        ),
        ("second", second, 422, "second".into()),
        (
            "authorizer",
            validate(
                "authorizer.group('').resource('configmaps').namespace('default').check('create').allowed() && authorizer.requestResource.check('create').allowed() && !authorizer.serviceAccount('default', 'default').path('/metrics').check('get').allowed()",
            ),
            201,
            String::new(),
        ),
        (
            "endless",
            validate(&endless),
            422,
            error(&endless, "operation cancelled: actual cost limit exceeded"),
        ),
    ] {
        install(&cluster, policy(name, spec), binding(name, json!({}))).await;
        let answer =
            send_for_message(&cluster, Method::POST, MAPS, "application/json", &map("one", "1")).await;
        assert_eq!(answer, (code, message), "{name}");
        remove(&cluster, name).await;
        if code == 201 {
            let one = format!("{MAPS}/one");
            send(&cluster, Method::DELETE, &one, "application/json", &Value::Null).await;
        }
    }
    cluster.stop().await;
}

#[tokio::test]
async fn every_write_verb_is_admitted_and_denied_writes_not_stored() {
    let cluster = TestServer::start().await;
    let fixed = json!({"validations": [
        {"expression": "request.operation != 'UPDATE' || oldObject.data == object.data", "message": "data is fixed"},
        {"expression": "request.operation != 'DELETE' || object == null && oldObject.data.a != '1'", "messageExpression": "'keep ' + oldObject.metadata.name"},
        {"expression": "request.operation != 'CREATE' || object.metadata.name.size() < 9", "message": "too long"},
    ]});
    install(&cluster, policy("fixed", fixed), binding("fixed", json!({}))).await;
    let one = format!("{MAPS}/one");
    let apply =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"a": "2"}});
    let long = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "far-too-long"}});
    let (applied, applied_long) =
        (format!("{one}?fieldManager=m&force=true"), format!("{MAPS}/far-too-long?fieldManager=m"));
    let (dry, json_patch) = (format!("{MAPS}?dryRun=All"), "application/json-patch+json");
    for (what, method, path, media, body, expected) in [
        ("create", Method::POST, MAPS, "application/json", map("one", "1"), (201, "")),
        ("a bad name", Method::POST, MAPS, "application/json", long.clone(), (422, "too long")),
        (
            "a bad name, made up",
            Method::POST,
            MAPS,
            "application/json",
            json!({"metadata": {"generateName": "made-up-"}}),
            (422, "too long"),
        ),
        ("a bad name, not stored", Method::POST, &dry, "application/json", long.clone(), (422, "too long")),
        ("a bad name, applied", Method::PATCH, &applied_long, APPLY, long.clone(), (422, "too long")),
        ("merge", Method::PATCH, &one, MERGE, json!({"data": {"a": "2"}}), (422, "data is fixed")),
        (
            "patch",
            Method::PATCH,
            &one,
            json_patch,
            json!([{"op": "replace", "path": "/data/a", "value": "2"}]),
            (422, "data is fixed"),
        ),
        ("apply", Method::PATCH, &applied, APPLY, apply, (422, "data is fixed")),
        ("replace", Method::PUT, &one, "application/json", map("one", "2"), (422, "data is fixed")),
        ("label", Method::PATCH, &one, MERGE, json!({"metadata": {"labels": {"x": "y"}}}), (200, "")),
        ("delete", Method::DELETE, &one, "application/json", Value::Null, (422, "keep one")),
        (
            "delete all",
            Method::DELETE,
            &format!("{MAPS}?labelSelector=x"),
            "application/json",
            Value::Null,
            (422, "keep one"),
        ),
    ] {
        let (code, message) = send_for_message(&cluster, method, path, media, &body).await;
        assert_eq!((code, message.as_str()), expected, "{what}");
    }
    let (_, stored, _) = send(&cluster, Method::GET, &one, "application/json", &Value::Null).await;
    assert_eq!(stored["data"], json!({"a": "1"}));
    cluster.stop().await;
}

#[tokio::test]
async fn binding_narrows_the_match_of_its_policy() {
    let cluster = TestServer::start().await;
    let labelled = |labels: Value| {
        let mut labelled = map("one", "1");
        labelled["metadata"]["labels"] = labels;
        labelled
    };
    let namespace = |name: &str, labels: Value| json!({"metadata": {"name": name, "labels": labels}});
    for (name, labels) in [("gold", json!({"tier": "gold"})), ("plain", json!({}))] {
        post(&cluster, "/api/v1/namespaces", &namespace(name, labels)).await;
    }
    let gold = json!({"matchLabels": {"tier": "gold"}});
    let maps = |namespace: &str| format!("/api/v1/namespaces/{namespace}/configmaps?dryRun=All");
    let constrain = |constraints: Value| json!({"matchConstraints": constraints, "validations": [{"expression": "false"}]});
    let all = rule(&["*"], &["configmaps"]);
    let named = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"], "resources": ["configmaps"], "resourceNames": ["two"]});
    for (what, spec, bound, place, object, expected) in [
        (
            "everything",
            constrain(json!({"resourceRules": [all]})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            422,
        ),
        (
            "other operations",
            constrain(json!({"resourceRules": [rule(&["UPDATE"], &["configmaps"])]})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "other resources",
            constrain(json!({"resourceRules": [rule(&["*"], &["secrets", "configmaps/status"])]})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "any resource",
            constrain(json!({"resourceRules": [rule(&["*"], &["*"])]})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            422,
        ),
        (
            "an exception",
            constrain(json!({"resourceRules": [rule(&["*"], &["*"])], "excludeResourceRules": [all]})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "another name",
            constrain(json!({"resourceRules": [named]})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "its name",
            constrain(json!({"resourceRules": [named]})),
            json!({}),
            maps("plain"),
            map("two", "1"),
            422,
        ),
        (
            "a namespace",
            constrain(json!({"resourceRules": [all], "namespaceSelector": gold})),
            json!({}),
            maps("gold"),
            map("one", "1"),
            422,
        ),
        (
            "another namespace",
            constrain(json!({"resourceRules": [all], "namespaceSelector": gold})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "objects",
            constrain(json!({"resourceRules": [all], "objectSelector": gold})),
            json!({}),
            maps("plain"),
            labelled(json!({"tier": "gold"})),
            422,
        ),
        (
            "other objects",
            constrain(json!({"resourceRules": [all], "objectSelector": gold})),
            json!({}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "a binding",
            constrain(json!({"resourceRules": [all]})),
            json!({"matchResources": {"namespaceSelector": gold}}),
            maps("gold"),
            map("one", "1"),
            422,
        ),
        (
            "another binding",
            constrain(json!({"resourceRules": [all]})),
            json!({"matchResources": {"namespaceSelector": gold}}),
            maps("plain"),
            map("one", "1"),
            201,
        ),
        (
            "the same under another version",
            constrain(
                json!({"resourceRules": [{"apiGroups": ["events.k8s.io"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["events"]}]}),
            ),
            json!({}),
            "/api/v1/namespaces/plain/events?dryRun=All".to_string(),
            json!({"metadata": {"name": "e"}, "involvedObject": {"name": "x", "namespace": "plain"}}),
            422,
        ),
        (
            "another version, exactly",
            constrain(
                json!({"matchPolicy": "Exact", "resourceRules": [{"apiGroups": ["events.k8s.io"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["events"]}]}),
            ),
            json!({}),
            "/api/v1/namespaces/plain/events?dryRun=All".to_string(),
            json!({"metadata": {"name": "e"}, "involvedObject": {"name": "x", "namespace": "plain"}}),
            201,
        ),
        (
            "a token",
            constrain(json!({"resourceRules": [rule(&["CREATE"], &["serviceaccounts/token"])]})),
            json!({}),
            "/api/v1/namespaces/default/serviceaccounts/default/token".to_string(),
            json!({"spec": {}}),
            422,
        ),
    ] {
        install(&cluster, policy("about", spec), binding("about", bound)).await;
        let (code, answer, _) = post(&cluster, &place, &object).await;
        assert_eq!(code, expected, "{what}: {answer}");
        remove(&cluster, "about").await;
    }
    // Policies do not apply to policies, so one that denies everything can be deleted.
    let everything =
        json!({"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*/*"]});
    install(
        &cluster,
        policy("all", constrain(json!({"resourceRules": [everything]}))),
        binding("all", json!({})),
    )
    .await;
    let (code, ..) = post(&cluster, MAPS, &map("one", "1")).await;
    assert_eq!(code, 422);
    remove(&cluster, "all").await;
    let (code, ..) = post(&cluster, MAPS, &map("one", "1")).await;
    assert_eq!(code, 201);
    cluster.stop().await;
}

#[tokio::test]
async fn parameters_are_found_and_a_binding_may_only_warn() {
    let cluster = TestServer::start().await;
    let spec = json!({
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConditions": [{"name": "no-parameter", "expression": "!object.metadata.name.startsWith('par')"}],
        "validations": [{"expression": "object.data.a == params.data.a", "messageExpression": "'want ' + params.data.a"}],
    });
    let by_name = |name: &str| json!({"paramRef": {"name": name, "parameterNotFoundAction": "Deny"}});
    let dry = format!("{MAPS}?dryRun=All");
    let ask =
        async || send_for_message(&cluster, Method::POST, &dry, "application/json", &map("one", "1")).await;
    install(&cluster, policy("params", spec.clone()), binding("params", by_name("nowhere"))).await;
    let none =
        "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction";
    assert_eq!(ask().await, (422, none.into()));
    remove(&cluster, "params").await;
    post(&cluster, MAPS, &map("par", "2")).await;
    install(&cluster, policy("params", spec.clone()), binding("params", by_name("par"))).await;
    assert_eq!(ask().await, (422, "want 2".into()));
    let one = format!("{MAPS}/par");
    send(&cluster, Method::PATCH, &one, MERGE, &json!({"data": {"a": "1"}})).await;
    assert_eq!(ask().await, (201, String::new()));
    remove(&cluster, "params").await;

    let by_label =
        json!({"paramRef": {"selector": {"matchLabels": {"p": "y"}}, "parameterNotFoundAction": "Allow"}});
    install(&cluster, policy("params", spec), binding("params", by_label)).await;
    assert_eq!(ask().await, (201, String::new()), "nothing is selected");
    for (name, value) in [("par-1", "1"), ("par-3", "3")] {
        let mut parameter = map(name, value);
        parameter["metadata"]["labels"] = json!({"p": "y"});
        post(&cluster, MAPS, &parameter).await;
    }
    assert_eq!(ask().await, (422, "want 3".into()), "each of them must hold");
    remove(&cluster, "params").await;

    let beware = json!({"validations": [{"expression": "false", "message": "beware \"you\""}]});
    install(
        &cluster,
        policy("warn", beware),
        binding("warn", json!({"validationActions": ["Warn", "Audit"]})),
    )
    .await;
    let (code, _, warning) = post(&cluster, MAPS, &map("one", "1")).await;
    let expected = "299 - \"Validation failed for ValidatingAdmissionPolicy 'warn' with binding 'warn': beware \\\"you\\\"\"";
    assert_eq!((code, warning.as_str()), (201, expected));
    let (code, _, warning) =
        send(&cluster, Method::DELETE, &format!("{MAPS}/one"), "application/json", &Value::Null).await;
    assert_eq!((code, warning.as_str()), (200, expected));
    cluster.stop().await;
}

#[tokio::test]
async fn policy_errors_are_reported_on_write() {
    let cluster = TestServer::start().await;
    let validate = |validation: Value| json!({"validations": [validation]});
    let plain = validate(json!({"expression": "true"}));
    let with = |field: &str, value: Value| {
        let mut spec = plain.clone();
        spec[field] = value;
        spec
    };
    for (spec, field, words) in [
        (
            validate(json!({"expression": "object.x ="})),
            "spec.validations[0].expression",
            "compilation failed",
        ),
        (
            validate(json!({"expression": "nothing == 1"})),
            "spec.validations[0].expression",
            "undeclared reference to 'nothing'",
        ),
        (
            validate(json!({"expression": "variables.x == 1"})),
            "spec.validations[0].expression",
            "undeclared reference to 'variables'",
        ),
        (
            validate(json!({"expression": "params.x == 1"})),
            "spec.validations[0].expression",
            "undeclared reference to 'params'",
        ),
        (
            validate(json!({"expression": "request.nothing == 1"})),
            "spec.validations[0].expression",
            "undefined field 'nothing'",
        ),
        (
            validate(json!({"expression": "1"})),
            "spec.validations[0].expression",
            "must evaluate to bool but got int",
        ),
        (
            validate(json!({"expression": "object.invented()"})),
            "spec.validations[0].expression",
            "undeclared reference to 'invented'",
        ),
        (
            validate(json!({"expression": ""})),
            "spec.validations[0].expression",
            "Required value: expression is not specified",
        ),
        (
            validate(json!({"expression": "true", "reason": "Nope"})),
            "spec.validations[0].reason",
            "supported values: \"Forbidden\", \"Invalid\", \"RequestEntityTooLarge\"",
        ),
        (
            validate(json!({"expression": "true", "message": "a\nb"})),
            "spec.validations[0].message",
            "must not contain line breaks",
        ),
        (
            validate(json!({"expression": "true", "messageExpression": "1"})),
            "spec.validations[0].messageExpression",
            "must evaluate to string but got int",
        ),
        (
            validate(
                json!({"expression": "true", "messageExpression": "authorizer.path('/').check('get').reason()"}),
            ),
            "spec.validations[0].messageExpression",
            "undeclared reference to 'authorizer'",
        ),
        (json!({}), "spec.validations", "must contain at least one item"),
        (
            with("failurePolicy", json!("Maybe")),
            "spec.failurePolicy",
            "supported values: \"Fail\", \"Ignore\"",
        ),
        (
            with("matchConditions", json!([{"name": "x", "expression": "variables.a == 1"}])),
            "spec.matchConditions[0].expression",
            "undeclared reference to 'variables'",
        ),
        (
            with("variables", json!([{"name": "1a", "expression": "true"}])),
            "spec.variables[0].name",
            "must be a valid CEL identifier",
        ),
        (
            with(
                "variables",
                json!([{"name": "b", "expression": "variables.c"}, {"name": "c", "expression": "1"}]),
            ),
            "spec.variables[0].expression",
            "undefined field 'c'",
        ),
        (with("matchConstraints", json!({})), "spec.matchConstraints.resourceRules", "Required value"),
        (
            with("matchConstraints", json!({"resourceRules": [rule(&["SMILE"], &["*"])]})),
            "spec.matchConstraints.resourceRules[0].operations[0]",
            "Unsupported value: \"SMILE\"",
        ),
        (
            with(
                "matchConstraints",
                json!({"resourceRules": [rule(&["*"], &["*"])], "objectSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}),
            ),
            "spec.matchConstraints.objectSelector.matchExpressions[0].operator",
            "not a valid selector operator",
        ),
    ] {
        let (code, answer, _) = post(&cluster, POLICIES, &policy("bad", spec.clone())).await;
        assert_eq!(code, 422, "{spec}: {answer}");
        let cause = &answer["details"]["causes"][0];
        assert_eq!(cause["field"], field, "{spec}: {answer}");
        assert!(cause["message"].as_str().unwrap().contains(words), "{spec}: {answer}");
    }
    for (spec, words) in [
        (json!({"validationActions": []}), "at least one validation action is required"),
        (json!({"validationActions": ["Deny", "Warn"]}), "must not contain both Deny and Warn"),
        (json!({"validationActions": ["Shout"]}), "supported values: \"Audit\", \"Deny\", \"Warn\""),
        (json!({"paramRef": {"name": "a"}}), "spec.paramRef.parameterNotFoundAction: Required value"),
        (
            json!({"paramRef": {"parameterNotFoundAction": "Deny"}}),
            "one of name or selector must be specified",
        ),
    ] {
        let (code, answer, _) = post(&cluster, BINDINGS, &binding("bad", spec.clone())).await;
        assert_eq!(code, 422, "{spec}: {answer}");
        assert!(answer["message"].as_str().unwrap().contains(words), "{spec}: {answer}");
    }
    // A valid policy is defaulted, gets a generation and a status.
    let (_, written, _) = post(&cluster, POLICIES, &policy("good", plain.clone())).await;
    assert_eq!(written["spec"]["failurePolicy"], "Fail");
    assert_eq!(written["spec"]["matchConstraints"]["matchPolicy"], "Equivalent");
    assert_eq!(written["spec"]["matchConstraints"]["resourceRules"][0]["scope"], "*");
    assert_eq!(written["status"], json!({"observedGeneration": 1, "typeChecking": {}}));
    let path = format!("{POLICIES}/good");
    let (_, edited, _) =
        send(&cluster, Method::PATCH, &path, MERGE, &json!({"spec": {"failurePolicy": "Ignore"}})).await;
    assert_eq!(
        (&edited["metadata"]["generation"], &edited["status"]["observedGeneration"]),
        (&json!(2), &json!(2))
    );
    cluster.stop().await;
}
