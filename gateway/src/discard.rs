//! Reads the rest of a rejected request's body. Not here: bodies that are parsed, see `body_budget`.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;

/// Largest rest of a body that is read.
const MAX_DISCARDED_BYTES: usize = 256 * 1024;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads the rest of a rejected request's body, if it is small. A client that is still sending when the
/// response comes may see a broken connection instead of the response.
pub(crate) async fn discard(mut body: Body) {
    let read = async {
        let mut bytes = 0;
        while bytes < MAX_DISCARDED_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            bytes += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    // A client that sends more, or more slowly, may miss the response; it is rejected all the same.
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}
