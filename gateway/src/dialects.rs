//! The dialects clients speak. Each is one file and one line in [`ALL`]: it reads its requests into
//! a dialect-free [`russet_wire::request::GenerationRequest`] and gives answers and refusals its own
//! shape. Choosing engines, waiting and retrying happen elsewhere, once for all of them.

mod openai;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body_util::BodyExt as _;

use crate::error::GatewayError;
use crate::dispatch::Dispatcher;

/// One dialect.
pub struct Dialect {
    /// Its name, for logs.
    pub name: &'static str,
    /// Whether a path belongs to it, so that even unknown paths are refused in its shape.
    pub owns: fn(path: &str) -> bool,
    /// Its paths.
    pub routes: fn(Arc<Dispatcher>) -> Router,
    /// A refusal in its shape.
    pub error_response: fn(&GatewayError) -> Response,
}

/// Every dialect; the first one speaks for paths that belong to none.
pub const ALL: &[Dialect] = &[openai::DIALECT];

/// The paths of every dialect.
pub fn routes(core: &Arc<Dispatcher>) -> Router {
    ALL.iter().fold(Router::new(), |router, dialect| router.merge((dialect.routes)(core.clone())))
}

/// A refusal in the shape of the dialect that `path` belongs to.
pub fn error_response(path: &str, refusal: &GatewayError) -> Response {
    let dialect = ALL.iter().find(|dialect| (dialect.owns)(path)).unwrap_or(&ALL[0]);
    (dialect.error_response)(refusal)
}

/// Reads what is left of a refused request, if that is little. Clients that still send when the answer
/// comes may see a broken connection instead of it.
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
    // Whoever sends more, or more slowly, has been refused all the same.
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}
