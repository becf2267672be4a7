//! A response body that keeps something until it was sent or its client is gone. Its data is passed on in pieces, each of
//! which counts as unread until the connection has sent it. Not here: who closes a connection whose client does not
//! read, see `connection_limit.rs`.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};

use super::unread_responses::{UnreadResponse, UnreadResponses};
use crate::output::Body;

/// Most bytes of a piece. A client takes one within the timeout, however slow its link.
const PIECE_BYTES: usize = 64 * 1024;

struct GuardedBody<G> {
    body: Body,
    /// What is left of the last frame.
    rest: Bytes,
    guard: Arc<G>,
    /// What the client of this connection has not read.
    unread: Arc<UnreadResponses>,
    /// The response itself, until its next piece is taken; `None` of a watch, which waits for events.
    next: Option<UnreadResponse>,
}

/// A piece of a body, until it was sent.
struct Piece<G> {
    bytes: Bytes,
    _unread: UnreadResponse,
    _guard: Arc<G>,
}

impl<G> AsRef<[u8]> for Piece<G> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl<G: Send + Sync + 'static> hyper::body::Body for GuardedBody<G> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(next) = &self.next {
            next.touch();
        }
        while self.rest.is_empty() {
            match std::task::ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                ended => return Poll::Ready(ended),
            }
        }
        let length = self.rest.len().min(PIECE_BYTES);
        let piece = Piece {
            bytes: self.rest.split_to(length),
            _unread: self.unread.begin(),
            _guard: self.guard.clone(),
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let upper = hint.upper();
        hint.set_lower(hint.lower() + rest);
        if let Some(upper) = upper {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

/// The response with a body that keeps `guard`; its client has to read all of it, or of a watch each event.
pub fn keep<G: Send + Sync + 'static>(
    response: Response<Body>,
    guard: G,
    unread: Arc<UnreadResponses>,
    is_watch: bool,
) -> Response<Body> {
    let (guard, next) = (Arc::new(guard), (!is_watch).then(|| unread.begin()));
    response.map(|body| GuardedBody { body, rest: Bytes::new(), guard, unread, next }.boxed_unsync())
}
