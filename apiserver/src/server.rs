//! HTTP server: TLS, HTTP/1.1 and HTTP/2, authentication, routing by path. Not here: sockets, see [`listen`];
//! handling of requests on resources, see [`crate::verbs`].

pub mod connection_limit;
mod guarded_body;
mod handshakes;
pub mod host;
pub mod listen;
pub mod tls;
mod unread_responses;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited, StreamBody};
use hyper::body::{Frame, Incoming};

use crate::auth;
use crate::auth::rbac::Attributes;
use crate::auth::user::User;
use crate::call::{Call, REQUEST_TIMEOUT};
use crate::discovery;
use crate::flow_control::fair_queue::QueuePermit;
use crate::flow_control::watch_limit::WatchPermit;
use crate::flow_control::{PriorityLevel, RequestInfo, UserClass, priority_level};
use crate::object;
use crate::openapi;
use crate::output::{self, Body};
use crate::request::{self, Query, RequestTarget};
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use crate::{store, verbs};
use connection_limit::ConnectionPermit;

/// The metrics' label of every method that the API does not use: a client could invent more than memory holds.
const OTHER_VERB: &str = "other";
/// Maximum body size in bytes, as in Kubernetes.
pub const BODY_LIMIT: usize = 3 * 1024 * 1024;

/// Largest body, and largest stored object to change, in bytes, that is worked on between other requests: this takes
/// about a millisecond.
const MAX_INLINE_BYTES: usize = 16 * 1024;

/// How long a large body is worked on before its client is answered: longer than any that is within the bounds of
/// `schema/bounds.rs` takes, and half of what kubectl waits.
const WORK_TIMEOUT: Duration = Duration::from_secs(15);

/// Handles one request. Infallible: errors become responses.
pub async fn handle(
    api: Arc<ServerState>,
    connection: Arc<ConnectionPermit>,
    certified: Option<User>,
    request: Request<Incoming>,
) -> std::result::Result<Response<Body>, Infallible> {
    let active = connection.begin_request();
    let started = Instant::now();
    let head = *request.method() == Method::HEAD;
    let yaml = output::wants_yaml(request.headers());
    let mut routed = RoutedRequest::default();
    let outcome = route(&api, &connection, certified.as_ref(), request, yaml, &mut routed).await;
    let RoutedRequest { verb, resource, watch } = routed;
    let mut response = match outcome {
        Ok(response) => response,
        Err(error) => {
            if error.code.is_server_error() {
                tracing::warn!(%error, verb, resource, "a request failed");
            }
            let response = as_asked(yaml, Ok(output::error(&error))).await;
            response.unwrap_or_else(|error| output::error(&error))
        }
    };
    api.metrics.request(&verb, &resource, response.status().as_u16(), started.elapsed());
    if let Ok(id) = HeaderValue::from_str(&object::new_uid()) {
        response.headers_mut().insert(HeaderName::from_static("audit-id"), id);
    }
    if head {
        let (parts, _) = response.into_parts();
        response = Response::from_parts(parts, http_body_util::Empty::new().boxed_unsync());
    }
    Ok(guarded_body::keep(response, (active, watch), connection.unread(), verb == "watch"))
}

/// What is known of a request once it is routed, also where it fails then.
#[derive(Default)]
struct RoutedRequest {
    /// For the metrics.
    verb: String,
    /// For the metrics: the plural of a resource that exists.
    resource: String,
    /// Of an open watch.
    watch: Option<WatchPermit>,
}

async fn route(
    api: &Arc<ServerState>,
    connection: &ConnectionPermit,
    certified: Option<&User>,
    request: Request<Incoming>,
    yaml: bool,
    routed: &mut RoutedRequest,
) -> Result<Response<Body>> {
    let arrived = tokio::time::Instant::now();
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let raw_query = parts.uri.query().unwrap_or_default();
    let user = auth::authenticate(api, certified, &parts.headers)?;
    connection.authenticated(&user);
    let class = api.flow.system.class(&user);
    // Without a login the host counts.
    let flow = if class == UserClass::Anonymous { connection.host() } else { user.flow() }.to_owned();
    let Some(target) = request::target(path) else {
        let verb = request::non_resource_verb(&parts.method);
        routed.verb = verb.unwrap_or(OTHER_VERB).to_owned();
        let verb = verb.ok_or_else(ApiError::method_not_allowed)?;
        let info = RequestInfo { verb, path, ..RequestInfo::default() };
        let _permit = api.flow.admit(priority_level(class, &user, info), &flow).await?;
        let asked = Attributes { verb, path, ..Attributes::default() };
        auth::authorize(api, &user, &asked)?;
        if !matches!(parts.method, Method::GET | Method::HEAD) {
            return Err(ApiError::method_not_allowed());
        }
        return as_asked(yaml, non_resource(api, path, raw_query, &parts.headers)).await;
    };
    let mut query = Query::parse(raw_query)?;
    query.watch |= target.watch;
    let verb = request::verb(&parts.method, &target, &query);
    routed.verb = verb.unwrap_or(OTHER_VERB).to_owned();
    let verb = verb.ok_or_else(ApiError::method_not_allowed)?;
    let info = RequestInfo { verb, resource: &target.resource, subresource: &target.subresource, path };
    // Before the body is read, so that a request that waits holds nothing but its head.
    let level = priority_level(class, &user, info);
    let permit = api.flow.admit(level, &flow).await?;
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
    routed.resource.clone_from(&resource.plural);
    check_scope(&target, &resource)?;
    if verb == "watch" {
        routed.watch = Some(api.flow.open_watch(class, &flow)?);
    }
    // Events are JSON.
    let yaml = yaml && verb != "watch";
    let reading = Limited::new(body, BODY_LIMIT).collect();
    let body = match tokio::time::timeout(level.body_timeout(), reading).await {
        Err(_) => {
            let problem =
                format!("the body did not arrive within {} s; send it again", level.body_timeout().as_secs());
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "Timeout", problem));
        }
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(ApiError::too_large(BODY_LIMIT)),
        Ok(Err(error)) => return Err(ApiError::bad_request(format!("the body could not be read: {error}"))),
    };
    let RequestTarget { namespace, name, subresource, .. } = target;
    let headers = parts.headers;
    // What waited in a queue counts for components: a leader that lost its term must write nothing afterwards.
    let is_component = matches!(level, PriorityLevel::NodeHigh | PriorityLevel::System);
    let in_time = |timeout| {
        if is_component { arrived + REQUEST_TIMEOUT } else { tokio::time::Instant::now() + timeout }
    };
    let deadline = in_time(REQUEST_TIMEOUT);
    let call = Call { user, resource, namespace, name, subresource, query, headers, body, deadline };
    if is_large(api, verb, &call, yaml) {
        let permits = (permit, api.flow.admit_large_body(class, &flow).await?);
        let deadline = in_time(WORK_TIMEOUT);
        handle_large(api.clone(), verb, Call { deadline, ..call }, yaml, permits).await
    } else {
        // A handler runs to completion even when its client disconnects: a durable write is also recorded. So the permit
        // is given back by the handler, not by its client.
        let api = api.clone();
        let handler = tokio::spawn(async move {
            let response = as_asked(yaml, verbs::dispatch(&api, verb, call).await).await;
            drop(permit);
            response
        });
        handler.await.unwrap_or_else(|error| Err(stopped_handler(&error)))
    }
}

/// The response in the media type that the client asked for.
async fn as_asked(yaml: bool, response: Result<Response<Body>>) -> Result<Response<Body>> {
    if yaml { output::to_yaml(response?).await } else { response }
}

/// Whether decoding, patching, validating or writing YAML may take long.
fn is_large(api: &ServerState, verb: &str, call: &Call, yaml: bool) -> bool {
    call.body.len() > MAX_INLINE_BYTES
        || (yaml && verb == "list")
        || ((matches!(verb, "patch" | "update") || (yaml && verb == "get"))
            && api.store.get(&call.key()).is_some_and(|record| record.value.len() > MAX_INLINE_BYTES))
}

/// Handles a request on a thread that may be blocked. After the timeout the client is answered, and the thread is given
/// up only once the work ends: its user gets no other one before.
async fn handle_large(
    api: Arc<ServerState>,
    verb: &'static str,
    call: Call,
    yaml: bool,
    permits: (Option<QueuePermit>, QueuePermit),
) -> Result<Response<Body>> {
    let runtime = tokio::runtime::Handle::current();
    let handler = tokio::task::spawn_blocking(move || {
        let response =
            runtime.block_on(async { as_asked(yaml, verbs::dispatch(&api, verb, call).await).await });
        drop(permits);
        response
    });
    match tokio::time::timeout(WORK_TIMEOUT, handler).await {
        Ok(handled) => handled.unwrap_or_else(|error| Err(stopped_handler(&error))),
        Err(_) => Err(ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            "Timeout",
            format!(
                "the request needs more work than {} s; split the object, and read it before trying again",
                WORK_TIMEOUT.as_secs()
            ),
        )),
    }
}

fn stopped_handler(error: &tokio::task::JoinError) -> ApiError {
    ApiError::internal(format!("the handler stopped: {error}"))
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

/// Every object at one revision, Secrets included: only who may `get` every non-resource path reads it.
fn backup(api: &ServerState) -> Result<Response<Body>> {
    let snapshot = api.store.range("/", None, None).map_err(verbs::list::storage_error)?;
    let lines = store::backup::lines(snapshot).map(|line| Ok(Frame::data(line)));
    let mut response = Response::new(StreamBody::new(futures::stream::iter(lines)).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
    Ok(response)
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
        ["backup"] => backup(api),
        ["metrics"] => Ok(output::text(StatusCode::OK, api.metrics.render(&api.store))),
        ["openapi", "v3", ..] => api.documents.answer(&table, path, headers),
        ["openapi", "v2"] => {
            let version = discovery::version();
            let version = version["gitVersion"].as_str().unwrap_or_default();
            let mut response = output::bytes(StatusCode::OK, openapi::v2::document(version).into());
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(openapi::v2::PROTOBUF));
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
