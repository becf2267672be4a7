//! An answer being given, as one whoever gives it: what breaks off with its engine goes on with another. How another
//! is found is not its business.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};

use super::line::{Line, Setback};
use super::search::Asked;
use super::{Core, Piece};
use crate::metrics::Tracker;
use crate::refusal::{Kind, Refusal};

/// An answer being given. Dropping it tells the engine to stop.
pub struct Answer(Pin<Box<dyn Stream<Item = Result<Piece, Refusal>> + Send>>);

impl Answer {
    /// The next part; `None` after the end or a refusal. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Piece, Refusal>> {
        self.0.next().await
    }

    /// The answer to what was asked, whose first part came on this line.
    pub(super) fn new(
        core: Arc<Core>,
        mut asked: Asked,
        first: Piece,
        mut line: Line,
        mut tracker: Tracker,
    ) -> Self {
        Self(Box::pin(async_stream::stream! {
            let mut piece = Ok(first);
            loop {
                let refusal = match piece {
                    Ok(Piece::End { reason, usage }) => {
                        tracker.finished(usage);
                        line.hang_up();
                        yield Ok(Piece::End { reason, usage });
                        return;
                    }
                    Ok(text) => {
                        yield Ok(text);
                        piece = next(&mut line).await;
                        continue;
                    }
                    Err(Setback::Refused(refusal)) => refusal,
                    Err(Setback::Busy(message)) => Refusal::new(Kind::Overloaded, message),
                    Err(Setback::Lost { message, .. }) => {
                        match core.go_on(&mut asked, line, message, &mut tracker).await {
                            Ok((more, other)) => {
                                (piece, line) = (Ok(more), other);
                                continue;
                            }
                            Err(refusal) => refusal,
                        }
                    }
                };
                tracker.refused(&refusal);
                yield Err(refusal);
                return;
            }
        }))
    }
}

/// The next part that comes on this line.
async fn next(line: &mut Line) -> Result<Piece, Setback> {
    loop {
        let event = line.event().await?;
        if let Some(piece) = line.judge(event) {
            return piece;
        }
    }
}
