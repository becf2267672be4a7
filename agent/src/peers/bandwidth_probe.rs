//! Bandwidth probe: a stream of zeros, for as long as a path is measured.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::{Body, IdleGate};

/// Maximum duration; a proper client stops reading sooner.
const MAX_DURATION: Duration = Duration::from_secs(2);
/// One frame: large enough that the cost per frame does not matter.
static ZEROS: [u8; 256 << 10] = [0; 256 << 10];

/// Zeros until the maximum duration, until the client closes or this machine is needed. A client that stops
/// reading does not hold the machine any longer either.
pub(super) fn body(permit: OwnedSemaphorePermit, idle: IdleGate) -> Body {
    let until = Instant::now() + MAX_DURATION;
    let (reading, read) = oneshot::channel::<()>();
    tokio::spawn(async move {
        // Completes with the frames, which are not polled when the client does not read.
        tokio::time::timeout_at(until, read).await.ok();
        drop(permit);
    });
    let frames = stream::unfold((reading, idle), move |(reading, idle)| async move {
        let goes_on = Instant::now() < until && *idle.granted.borrow() == 0;
        goes_on.then(|| (Ok::<_, Infallible>(Frame::data(Bytes::from_static(&ZEROS))), (reading, idle)))
    });
    StreamBody::new(frames).boxed_unsync()
}
