//! The API dialects of clients. Each is one file and one line in [`ALL`]: it parses its requests into a
//! dialect-free [`russet_wire::request::GenerationRequest`] and formats responses and errors. Engine
//! selection, holding and retries are shared by all dialects and happen in `dispatch`.

mod openai;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body_util::BodyExt as _;

use crate::dispatch::Dispatcher;
use crate::error::GatewayError;

/// One dialect.
pub struct Dialect {
    /// Its name, for logs.
    pub name: &'static str,
    /// Whether a path belongs to it, so that errors on unknown paths have its format too.
    pub owns: fn(path: &str) -> bool,
    /// Its routes.
    pub routes: fn(Arc<Dispatcher>) -> Router,
    /// Formats an error.
    pub error_response: fn(&GatewayError) -> Response,
}

/// All dialects; the first also formats errors on paths that belong to none.
pub const ALL: &[Dialect] = &[openai::DIALECT];

/// The routes of all dialects.
pub fn routes(core: &Arc<Dispatcher>) -> Router {
    ALL.iter().fold(Router::new(), |router, dialect| router.merge((dialect.routes)(core.clone())))
}

/// An error in the format of the dialect that `path` belongs to.
pub fn error_response(path: &str, refusal: &GatewayError) -> Response {
    let dialect = ALL.iter().find(|dialect| (dialect.owns)(path)).unwrap_or(&ALL[0]);
    (dialect.error_response)(refusal)
}

/// Reads the rest of a rejected request's body, if it is small. A client that is still sending when the
/// response comes may see a broken connection instead of the response.
pub(crate) async fn discard(mut body: Body) {
    const MAX_DISCARDED_BYTES: usize = 256 * 1024;
    const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);
    let read = async {
        let mut read = 0;
        while read < MAX_DISCARDED_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            read += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    // A client that sends more, or more slowly, may miss the response; it is rejected all the same.
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}
