//! Serves requests of any API dialect: quota, deadline, body, dispatch, and the response, whole or streamed.
//! The dialect parses the body and formats the response. Not here: engine selection, see `dispatch`.
//!
//! ```text
//! request ─▶ quota ─▶ deadline ─▶ body, within the budget ─▶ parse (dialect) ─▶ dispatch ─▶ events
//!              └────────┴───────────────┴───────────────────────┴────────────────┴─▶ error     │
//!                                                                                    │         ▼
//! response ◀──── Dialect::error_response ◀───────────────────────────────────────────┘   ResponseWriter
//!     ▲                                                                                        │
//!     └────────────────────────── whole_response or streamed_response ◀────────────────────────┘
//! ```

mod affinity;
mod api_state;
mod background_response;
mod choices;
mod dialect;
mod inbox;
mod kept_responses;
mod lookup;
mod model_change;
mod model_pull;
mod model_summary;
mod own_batches;
mod own_files;
mod pooling;
mod stalled_reader;
mod streamed_response;
mod token_count;
mod whole_response;
mod why;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter, on};
use bytes::Bytes;
use russet_wire::event::Usage;
use russet_wire::request::GenerationRequest;
use serde_json::Value;
use tokio::time::Instant;

use crate::body_budget::BodyPermit;
use crate::discard::discard;
use crate::dispatch::{CacheUse, Deadline, PendingRequest, PromptDigest};
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::{JsonBody, JsonBounds, check_headers};
use crate::keys::{Caller, Quota};
use crate::prompt_marks::prompt_marks;
use crate::request_id::RequestId;
use crate::request_limits::{LowestPriority, MAX_PRIORITY};
use crate::request_log::Recorder;
use crate::routes::RouteHeaders;
pub(crate) use affinity::Session;
pub(crate) use api_state::ApiState;
use choices::TotalUsage;
pub(crate) use dialect::{
    AcceptedResponse, BatchDialect, DetachedResponse, Dialect, ParseRequest, ParsedRequest, RequestContext,
    ResponseEnd, ResponseWriter,
};
pub(crate) use inbox::{InboxRequest, NewInboxRequest, OwnInbox, ReplayedResponse, kept_headers};
use kept_responses::ReplayableRequest;
pub(crate) use kept_responses::{KeptResponses, OwnResponses};
pub(crate) use lookup::lookup;
pub(crate) use model_change::{ModelChange, model_change};
pub(crate) use model_pull::{ModelPull, ParsedPull, PullProgress, model_pull};
pub(crate) use model_summary::{ModelSummary, ServedFiles};
pub(crate) use own_batches::{BatchPage, NewBatch, OwnBatches};
pub(crate) use own_files::{FileUpload, OwnFiles};
pub(crate) use pooling::{ParsedPooling, pooling};
use stalled_reader::ReadLimits;
pub(crate) use token_count::token_count;
pub(crate) use why::{is_why, why};

/// Header with the names of fields that were recognised and ignored.
const IGNORED: HeaderName = HeaderName::from_static("x-russet-ignored-parameters");

/// Header with the complexity of a request, from 0 to 1, where its ModelRoute looks at what requests are.
const COMPLEXITY: HeaderName = HeaderName::from_static("x-russet-complexity");

/// The handler of a path that generates a response: `parse` reads its request.
pub(crate) fn generation<W: ResponseWriter>(
    dialect: &'static Dialect,
    parse: ParseRequest<W>,
) -> MethodRouter<Arc<ApiState>> {
    within_quota(MethodFilter::POST, dialect, move |request| generate(dialect, request, parse))
}

/// A request within its caller's quota, and its record in the request log.
struct RecordedRequest {
    api: Arc<ApiState>,
    id: RequestId,
    caller: Caller,
    request: Request,
    recorder: Recorder,
}

/// The handler of a path whose requests count towards the quotas of their callers: `work` responds, or there is an error
/// where a quota is used up; both say what is left of it.
fn within_quota<F>(
    method: MethodFilter,
    dialect: &'static Dialect,
    work: impl Fn(RecordedRequest) -> F + Clone + Send + Sync + 'static,
) -> MethodRouter<Arc<ApiState>>
where
    F: Future<Output = Result<Response, GatewayError>> + Send + 'static,
{
    on(
        method,
        move |State(api): State<Arc<ApiState>>,
              Extension(id): Extension<RequestId>,
              Extension(caller): Extension<Caller>,
              request: Request| async move {
            let request = match inbox::keep_if_wanted(&api, dialect, &id, &caller, request).await {
                ControlFlow::Continue(request) => request,
                ControlFlow::Break(response) => return response,
            };
            // The request runs until the last of its recorders is gone.
            let recorder = api.log.begin(&id, &caller, dialect.name);
            if let Some(outcome) = request.extensions().get() {
                recorder.report_to(outcome);
            }
            let quota = api.take_quota(&caller);
            if let Some(quota) = &quota {
                recorder.quota(quota);
            }
            let result = match quota.as_ref().and_then(Quota::error) {
                None => {
                    let (api, id, recorder) = (api.clone(), id.clone(), recorder.for_response(0, 1));
                    // In a box: a handler's future is moved several times before it runs.
                    Box::pin(work(RecordedRequest { api, id, caller, request, recorder })).await
                }
                Some(error) => {
                    api.metrics.rejected(&error);
                    discard(request.into_body()).await;
                    Err(error)
                }
            };
            let mut response = result.unwrap_or_else(|error| {
                recorder.failed(&error);
                (dialect.error_response)(&error, &id)
            });
            if let Some(quota) = quota {
                (dialect.set_quota_headers)(&quota, response.headers_mut());
            }
            response
        },
    )
}

/// The response to a request that is within its caller's quota.
async fn generate<W: ResponseWriter>(
    dialect: &Dialect,
    RecordedRequest { api, id, caller, request, recorder }: RecordedRequest,
    parse: ParseRequest<W>,
) -> Result<Response, GatewayError> {
    let is_replayed = request.extensions().get::<ReplayedResponse>().is_some();
    let ReceivedRequest { unread, deadline, permit, session, lowest_priority, route_headers, cache_use } =
        ReceivedRequest::read(&api, &id, &caller, request).await?;
    let body_bytes = unread.body.len();
    let state = api.clone();
    let (parsed, prompts, session, facts) = unread
        .may_block(W::MAY_BE_KEPT && api.kept.is_some())
        .read(move |body, context, caller| {
            let session = session.or_else(|| Session::of_body(&body.value));
            let mut parsed = parse(body, context)?;
            let patterns = state.strip_patterns(&parsed.model, caller);
            for request in &mut parsed.requests {
                patterns.strip(request);
                if lowest_priority.is_some() {
                    request.priority = -MAX_PRIORITY;
                }
                request.cache_salt = caller.cache_salt(&request.cache_salt);
                request.prefix_marks = prompt_marks(&parsed.model, request);
            }
            let prompt = |request| PromptDigest::new(caller, &parsed.model, request);
            let prompts: Vec<PromptDigest> = parsed.requests.iter().map(prompt).collect();
            // The prompts of one request go one way.
            let mut names = std::iter::once(&parsed.model).chain(&parsed.fallback_models);
            let facts = parsed.requests.first().and_then(|request| {
                names.find_map(|name| state.facts(name, caller, &route_headers, request, session))
            });
            Ok((parsed, prompts, session, facts))
        })
        .await?;
    let ParsedRequest {
        model,
        fallback_models,
        requests,
        keep_alive,
        prompt_field,
        left_out,
        choices,
        streamed,
        mut ignored,
        mut writer,
    } = parsed;
    tracing::debug!(
        request_id = &*id.shown,
        engine_id = &*id.unique,
        dialect = dialect.name,
        model,
        streamed,
        "generate"
    );
    recorder.parsed(&model, choices * requests.len(), streamed);
    list_keep_alive(&api, &model, &caller, keep_alive, &mut ignored);
    if requests.is_empty() {
        if keep_alive == Some(Duration::ZERO) {
            api.dispatcher.unload(&model, &caller)?;
            recorder.finished(None, Usage::default());
        } else {
            let prompt = PromptDigest::of_texts(&caller, &model, std::iter::empty());
            let request = GenerationRequest { id: id.unique.to_string(), ..GenerationRequest::default() };
            let pending = PendingRequest::new(model, request, left_out, prompt, deadline, permit, caller);
            let pending = pending.with_load().with_keep_alive(keep_alive).with_recorder(recorder);
            Box::pin(api.dispatcher.load(pending)).await?;
        }
        let mut response = writer.whole(&[], Usage::default());
        list_ignored(&mut response, &ignored);
        return Ok(response);
    }
    if let Some(first) = requests.first() {
        recorder.limits(first.priority, first.max_tokens, deadline.map(|deadline| deadline.duration()));
    }
    // Each further choice holds the request once more.
    let mut permits = vec![permit];
    for _ in 1..choices * requests.len() {
        let held = api.bodies.hold(&caller, body_bytes);
        permits.push(held.inspect_err(|error| api.metrics.rejected(error))?);
    }
    let prompts = prompts.into_iter().flat_map(|prompt| std::iter::repeat_n(prompt, choices));
    let requests = choices::requests(requests, choices).into_iter().zip(prompts).zip(permits);
    let requests = requests.enumerate().map(|(response, ((request, prompt), permit))| {
        PendingRequest::new(model.clone(), request, left_out, prompt, deadline, permit, caller.clone())
            .with_prompt_field(prompt_field)
            .with_fallback_models(fallback_models.clone())
            .with_session(session)
            .with_facts(facts.clone())
            .with_cache_use(cache_use)
            .with_keep_alive(keep_alive)
            .with_recorder(recorder.for_response(response, choices))
    });
    let requests = requests.collect();
    let usage = TotalUsage::new(choices);
    let limits =
        ReadLimits { timeout: api.stream_timeouts.read, deadline: deadline.map(|one| one.with_grace()) };
    let mut response = if let Some(detached) = writer.detach().await? {
        {
            let (dispatcher, is_replayed) = (api.dispatcher.clone(), is_replayed);
            background_response::respond(dispatcher, requests, usage, writer, detached, limits, is_replayed)
                .await
        }
    } else if streamed {
        streamed_response::respond(
            api.dispatcher.clone(),
            requests,
            usage,
            writer,
            api.stream_timeouts,
            limits,
        )
        .await?
    } else {
        whole_response::respond(&api.dispatcher, requests, usage, writer).await?
    };
    list_ignored(&mut response, &ignored);
    if let Some(facts) = facts
        && let Ok(score) = HeaderValue::from_str(&format!("{:.2}", facts.complexity.score()))
    {
        response.headers_mut().insert(COMPLEXITY, score);
    }
    Ok(response)
}

/// Lists a `keep_alive` among the ignored fields where no deployment of the model scales to zero.
fn list_keep_alive(
    api: &ApiState,
    model: &str,
    caller: &Caller,
    keep_alive: Option<Duration>,
    ignored: &mut Vec<String>,
) {
    if keep_alive.is_some() && !api.dispatcher.honours_keep_alive(model, caller) {
        ignored.push("keep_alive".to_owned());
        ignored.sort_unstable();
    }
}

/// Lists ignored fields in a header.
fn list_ignored(response: &mut Response, ignored: &[String]) {
    if let Ok(value) = HeaderValue::from_str(&ignored.join(","))
        && !ignored.is_empty()
    {
        response.headers_mut().insert(IGNORED, value);
    }
}

/// Now, in seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The decoded body of a request that no engine serves, and the memory that it takes.
pub(crate) async fn read_json(
    api: &Arc<ApiState>,
    id: &RequestId,
    caller: &Caller,
    request: Request,
) -> Result<(Value, BodyPermit), GatewayError> {
    read_parsed(api, id, caller, request, |body| Ok(body.value)).await
}

/// The same, parsed.
async fn read_parsed<T: Send + 'static>(
    api: &Arc<ApiState>,
    id: &RequestId,
    caller: &Caller,
    request: Request,
    parse: fn(JsonBody<'_>) -> Result<T, GatewayError>,
) -> Result<(T, BodyPermit), GatewayError> {
    let ReceivedRequest { unread, permit, .. } = ReceivedRequest::read(api, id, caller, request).await?;
    let parsed = unread.read(move |body, _, _| parse(body)).await?;
    Ok((parsed, permit))
}

/// The body of a request as it came, and the memory that it takes.
pub(crate) async fn read_bytes(
    api: &ApiState,
    caller: &Caller,
    request: Request,
) -> Result<(Bytes, BodyPermit), GatewayError> {
    let (parts, body) = request.into_parts();
    if let Err(error) = check_headers(&parts.headers) {
        discard(body).await;
        return Err(error);
    }
    api.bodies.read(&parts.headers, body, caller, |_| Ok(())).await
}

/// A request whose body has arrived.
struct ReceivedRequest {
    unread: UnreadRequest,
    deadline: Option<Deadline>,
    permit: BodyPermit,
    /// The session that its headers name.
    session: Option<Session>,
    /// Whether it is of a batch.
    lowest_priority: Option<LowestPriority>,
    /// What its headers say of its way.
    route_headers: RouteHeaders,
    /// What they say of answers that are kept.
    cache_use: CacheUse,
}

impl ReceivedRequest {
    /// Reads the body within the budget.
    async fn read(
        api: &Arc<ApiState>,
        id: &RequestId,
        caller: &Caller,
        request: Request,
    ) -> Result<Self, GatewayError> {
        // The time the body takes to arrive counts towards the request's timeout.
        let arrived = Instant::now();
        let (parts, body) = request.into_parts();
        let limits = caller.limits();
        let read_headers = || {
            check_headers(&parts.headers)?;
            Ok((limits.timeout(&parts.headers)?, RouteHeaders::read(&parts.headers)?))
        };
        let (timeout, route_headers) = match read_headers() {
            Ok(read) => read,
            Err(error) => {
                discard(body).await;
                return Err(error);
            }
        };
        let deadline = timeout.map(|timeout| Deadline::new(arrived, timeout));
        let mut bounds = JsonBounds::default();
        let read = api.bodies.read(&parts.headers, body, caller, |part| bounds.feed(part)).await;
        let (body, permit) = read.inspect_err(|error| api.metrics.rejected(error))?;
        let lowest_priority = parts.extensions.get().copied();
        let session = Session::of_headers(&parts.headers);
        let cache_use = CacheUse::of_headers(&parts.headers);
        let unread = UnreadRequest {
            api: api.clone(),
            id: id.clone(),
            caller: caller.clone(),
            head: parts,
            body,
            bounds,
            may_block: false,
        };
        Ok(Self { unread, deadline, permit, session, lowest_priority, route_headers, cache_use })
    }
}

/// Largest body that is decoded on the thread that serves connections: it takes a fraction of a millisecond.
const MAX_INLINE_BYTES: usize = 64 * 1024;

/// A request whose body is not decoded yet.
struct UnreadRequest {
    api: Arc<ApiState>,
    id: RequestId,
    caller: Caller,
    head: Parts,
    body: Bytes,
    /// Of the body.
    bounds: JsonBounds,
    /// Whether parsing may block.
    may_block: bool,
}

impl UnreadRequest {
    /// Parsing may block.
    fn may_block(self, may_block: bool) -> Self {
        Self { may_block, ..self }
    }

    /// Decodes and parses the body, a large one on a thread of its own.
    async fn read<T: Send + 'static>(
        self,
        parse: impl FnOnce(JsonBody<'_>, &RequestContext<'_>, &Caller) -> Result<T, GatewayError> + Send + 'static,
    ) -> Result<T, GatewayError> {
        if self.body.len() <= MAX_INLINE_BYTES && !self.may_block {
            return self.decode(parse);
        }
        tokio::task::spawn_blocking(move || self.decode(parse)).await.unwrap_or_else(|_| {
            Err(GatewayError::new(ErrorKind::Internal, "the gateway could not decode the body; see its log"))
        })
    }

    fn decode<T>(
        self,
        parse: impl FnOnce(JsonBody<'_>, &RequestContext<'_>, &Caller) -> Result<T, GatewayError>,
    ) -> Result<T, GatewayError> {
        let Self { api, id, caller, head, body, bounds, may_block } = self;
        let scan = bounds.finish(&body)?;
        // Held while the values are there; what is left of them is no larger than the body.
        let held = api.bodies.hold(&caller, scan.decoded_bytes);
        let _values = held.inspect_err(|error| api.metrics.rejected(error))?;
        let request = || ReplayableRequest {
            id: id.clone(),
            path: head.uri.path().to_owned(),
            headers: kept_headers(&head.headers),
            body: body.clone(),
        };
        let kept = may_block.then(|| api.own_responses(&caller)).flatten();
        let replayed = head.extensions.get::<ReplayedResponse>();
        let kept = kept.map(|own| if replayed.is_none() { own.with_request(request()) } else { own });
        let context = RequestContext {
            id: &id,
            unix_seconds: replayed.map_or_else(unix_seconds, |replayed| replayed.created),
            limits: caller.limits(),
            kept: kept.as_ref(),
        };
        parse(scan.decode(&body)?, &context, &caller)
    }
}
