//! HTTP server: TLS, HTTP/1.1 and HTTP/2, authentication, routing by path. Not here: sockets, see [`listen`];
//! handling of requests on resources, see [`crate::verbs`].

mod handshakes;
pub mod host;
pub mod listen;
pub mod tls;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;

use crate::auth;
use crate::auth::rbac::Attributes;
use crate::auth::user::User;
use crate::call::{Call, REQUEST_TIMEOUT};
use crate::discovery;
use crate::object;
use crate::openapi;
use crate::output::{self, Body};
use crate::request::{self, Query, RequestTarget};
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use crate::verbs;

/// The metrics' label of every method that the API does not use: a client could invent more than memory holds.
const OTHER_VERB: &str = "other";
/// Maximum body size in bytes, as in Kubernetes.
pub const BODY_LIMIT: usize = 3 * 1024 * 1024;

/// Timeout of reading a body: enough for 3 MiB over a slow link, and short for clients that only hold
/// connections open.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Handles one request. Infallible: errors become responses.
pub async fn handle(
    api: Arc<ServerState>,
    certified: Option<User>,
    request: Request<Incoming>,
) -> std::result::Result<Response<Body>, Infallible> {
    let started = Instant::now();
    let head = *request.method() == Method::HEAD;
    let yaml = output::wants_yaml(request.headers());
    let (mut verb, mut resource) = (String::new(), String::new());
    let outcome = route(&api, certified.as_ref(), request, &mut verb, &mut resource).await;
    let mut response = outcome.unwrap_or_else(|error| {
        if error.code.is_server_error() {
            tracing::warn!(%error, verb, resource, "a request failed");
        }
        output::error(&error)
    });
    if yaml && verb != "watch" {
        response = output::to_yaml(response).await;
    }
    api.metrics.request(&verb, &resource, response.status().as_u16(), started.elapsed());
    if let Ok(id) = HeaderValue::from_str(&object::new_uid()) {
        response.headers_mut().insert(HeaderName::from_static("audit-id"), id);
    }
    if head {
        let (parts, _) = response.into_parts();
        response = Response::from_parts(parts, http_body_util::Empty::new().boxed_unsync());
    }
    Ok(response)
}

async fn route(
    api: &Arc<ServerState>,
    certified: Option<&User>,
    request: Request<Incoming>,
    counted_verb: &mut String,
    counted_resource: &mut String,
) -> Result<Response<Body>> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let raw_query = parts.uri.query().unwrap_or_default();
    let user = auth::authenticate(api, certified, &parts.headers)?;
    let Some(target) = request::target(path) else {
        let verb = request::non_resource_verb(&parts.method);
        *counted_verb = verb.unwrap_or(OTHER_VERB).to_owned();
        let verb = verb.ok_or_else(ApiError::method_not_allowed)?;
        let asked = Attributes { verb, path, ..Attributes::default() };
        auth::authorize(api, &user, &asked)?;
        if !matches!(parts.method, Method::GET | Method::HEAD) {
            return Err(ApiError::method_not_allowed());
        }
        return non_resource(api, path, raw_query, &parts.headers);
    };
    let mut query = Query::parse(raw_query)?;
    query.watch |= target.watch;
    let verb = request::verb(&parts.method, &target, &query);
    *counted_verb = verb.unwrap_or(OTHER_VERB).to_owned();
    let verb = verb.ok_or_else(ApiError::method_not_allowed)?;
    let asked = Attributes {
        verb,
        group: &target.group,
        resource: &target.resource,
        subresource: &target.subresource,
        namespace: &target.namespace,
        name: &target.name,
        path: "",
    };
    auth::authorize(api, &user, &asked)?;
    let resource = api
        .kinds
        .current()
        .find(&target.group, &target.version, &target.resource)
        .ok_or_else(ApiError::no_such_path)?;
    // The metric label is set only once the resource is known to exist: clients must not invent labels.
    counted_resource.clone_from(&resource.plural);
    check_scope(&target, &resource)?;
    let reading = Limited::new(body, BODY_LIMIT).collect();
    let body = match tokio::time::timeout(BODY_TIMEOUT, reading).await {
        Err(_) => {
            let problem =
                format!("the body did not arrive within {} s; send it again", BODY_TIMEOUT.as_secs());
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "Timeout", problem));
        }
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(ApiError::too_large(BODY_LIMIT)),
        Ok(Err(error)) => return Err(ApiError::bad_request(format!("the body could not be read: {error}"))),
    };
    let RequestTarget { namespace, name, subresource, .. } = target;
    let headers = parts.headers;
    let deadline = tokio::time::Instant::now() + REQUEST_TIMEOUT;
    let call = Call { user, resource, namespace, name, subresource, query, headers, body, deadline };
    // A handler runs to completion even when its client disconnects: a durable write is also recorded.
    let (api, verb) = (api.clone(), verb);
    let handler = tokio::spawn(async move { verbs::dispatch(&api, verb, call).await });
    handler.await.unwrap_or_else(|error| Err(ApiError::internal(format!("the handler stopped: {error}"))))
}

fn check_scope(target: &RequestTarget, resource: &crate::kinds::resource::Resource) -> Result<()> {
    let has_namespace = !target.namespace.is_empty();
    let of_namespaces = resource.prefix == crate::kinds::builtin::prefix("", "namespaces");
    if resource.namespaced && !has_namespace && !target.name.is_empty() {
        return Err(ApiError::no_such_path());
    }
    if !resource.namespaced && has_namespace && !of_namespaces {
        return Err(ApiError::no_such_path());
    }
    Ok(())
}

/// Handles non-resource paths.
fn non_resource(
    api: &ServerState,
    path: &str,
    query: &str,
    headers: &http::HeaderMap,
) -> Result<Response<Body>> {
    let table = api.kinds.current();
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match parts.as_slice() {
        ["healthz" | "livez" | "readyz", ..] => Ok(discovery::health(path, query, api.store.failure())),
        [".well-known", "openid-configuration"] => {
            Ok(output::value(StatusCode::OK, &discovery::openid(headers)))
        }
        ["openid", "v1", "jwks"] => {
            let mut response = output::value(StatusCode::OK, &api.signer.public_keys());
            response
                .headers_mut()
                .insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/jwk-set+json"));
            Ok(response)
        }
        ["version"] => Ok(output::value(StatusCode::OK, &discovery::version())),
        ["metrics"] => Ok(output::text(StatusCode::OK, api.metrics.render(&api.store))),
        ["openapi", "v3", ..] => api.documents.answer(&table, path, headers),
        ["openapi", "v2"] => {
            let version = discovery::version();
            let version = version["gitVersion"].as_str().unwrap_or_default();
            let mut response = output::bytes(StatusCode::OK, openapi::v2::document(version).into());
            response
                .headers_mut()
                .insert(http::header::CONTENT_TYPE, HeaderValue::from_static(openapi::v2::PROTOBUF));
            Ok(response)
        }
        ["api"] | ["apis"] => {
            let host = headers.get("host").and_then(|value| value.to_str().ok()).unwrap_or_default();
            Ok(discovery::roots(&table, path, headers, host))
        }
        ["api", version] => Ok(output::value(StatusCode::OK, &discovery::resources(&table, "", version)?)),
        ["apis", group] => Ok(output::value(StatusCode::OK, &discovery::group(&table, group)?)),
        ["apis", group, version] => {
            Ok(output::value(StatusCode::OK, &discovery::resources(&table, group, version)?))
        }
        [""] => {
            let paths = [
                "/.well-known/openid-configuration",
                "/api",
                "/apis",
                "/healthz",
                "/livez",
                "/metrics",
                "/openapi/v3",
                "/openid/v1/jwks",
                "/readyz",
                "/version",
            ];
            Ok(output::value(StatusCode::OK, &serde_json::json!({"paths": paths})))
        }
        _ => Err(ApiError::no_such_path()),
    }
}
