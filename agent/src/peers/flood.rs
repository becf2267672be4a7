//! Bytes that say nothing, for as long as a way is measured.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::{Body, Idle};

/// Who asks stops reading sooner; this bounds one who does not.
const LONGEST: Duration = Duration::from_secs(2);
/// Bytes of a frame: large enough that what each costs does not count.
static ZEROS: [u8; 256 << 10] = [0; 256 << 10];

/// Zeros until it was long enough, nobody reads them or this machine is needed.
pub(super) fn body(permit: OwnedSemaphorePermit, idle: Idle) -> Body {
    let until = Instant::now() + LONGEST;
    let frames = stream::unfold((permit, idle), move |(permit, idle)| async move {
        let goes_on = Instant::now() < until && *idle.granted.borrow() == 0;
        goes_on.then(|| (Ok::<_, Infallible>(Frame::data(Bytes::from_static(&ZEROS))), (permit, idle)))
    });
    StreamBody::new(frames).boxed_unsync()
}
