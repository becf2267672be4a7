//! Bytes that say nothing, for as long as a way is measured.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::{Body, IdleGate};

/// Who asks stops reading sooner; this bounds one who does not.
const MAX_DURATION: Duration = Duration::from_secs(2);
/// Bytes of a frame: large enough that what each costs does not count.
static ZEROS: [u8; 256 << 10] = [0; 256 << 10];

/// Zeros until it was long enough, nobody reads them or this machine is needed. Somebody who stops reading keeps the
/// machine no longer than that either.
pub(super) fn body(permit: OwnedSemaphorePermit, idle: IdleGate) -> Body {
    let until = Instant::now() + MAX_DURATION;
    let (reading, read) = oneshot::channel::<()>();
    tokio::spawn(async move {
        // Ends when the frames do, which nobody polls who is not read.
        tokio::time::timeout_at(until, read).await.ok();
        drop(permit);
    });
    let frames = stream::unfold((reading, idle), move |(reading, idle)| async move {
        let goes_on = Instant::now() < until && *idle.granted.borrow() == 0;
        goes_on.then(|| (Ok::<_, Infallible>(Frame::data(Bytes::from_static(&ZEROS))), (reading, idle)))
    });
    StreamBody::new(frames).boxed_unsync()
}
