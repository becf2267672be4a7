//! A response body that keeps something until it was sent or its client is gone.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};

use crate::flow_control::watch_limit::WatchPermit;
use crate::output::Body;

/// What is kept.
pub trait BodyGuard {
    /// The connection takes the next part of the body.
    fn polled(&mut self) {}
}

impl BodyGuard for WatchPermit {}

struct GuardedBody<G> {
    body: Body,
    guard: G,
}

impl<G: BodyGuard + Unpin> hyper::body::Body for GuardedBody<G> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.guard.polled();
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The response with a body that keeps `guard`.
pub fn keep<G: BodyGuard + Unpin + Send + 'static>(response: Response<Body>, guard: G) -> Response<Body> {
    response.map(|body| GuardedBody { body, guard }.boxed_unsync())
}
