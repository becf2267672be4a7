//! A response that is sent when it is complete.

use std::sync::Arc;

use axum::response::Response;
use russet_wire::event::{Delta, FinishReason, GenerationEvent};

use super::choices::{Choices, TotalUsage};
use super::dialect::ResponseWriter;
use crate::dispatch::{Dispatcher, PendingRequest};
use crate::error::{ErrorKind, GatewayError};

/// The complete responses to the requests of all choices.
pub(super) async fn respond<W: ResponseWriter>(
    dispatcher: &Arc<Dispatcher>,
    requests: Vec<PendingRequest>,
    mut usage: TotalUsage,
    mut writer: W,
) -> Result<Response, GatewayError> {
    let mut choices: Vec<(Delta, Option<FinishReason>)> = vec![(Delta::default(), None); requests.len()];
    let mut events = Choices::open(dispatcher.clone(), requests).await?;
    while let Some((choice, event)) = events.next().await {
        let Some((response, finished)) = choices.get_mut(choice) else { continue };
        match event? {
            GenerationEvent::Prompt { tokens } => writer.observe_prompt(choice, tokens),
            GenerationEvent::Token { id: _, delta } => {
                writer.observe(choice, &delta);
                response.append(delta);
            }
            GenerationEvent::Finished { reason, usage: tokens } => {
                *finished = Some(reason);
                usage.add(choice, tokens);
            }
            // Dispatch keeps the first to itself and turns the second into an error.
            GenerationEvent::Started { .. } | GenerationEvent::Failed(_) => {}
        }
    }
    let whole: Option<Vec<(Delta, FinishReason)>> =
        choices.into_iter().map(|(response, finished)| Some((response, finished?))).collect();
    match whole {
        Some(choices) => {
            let reason = choices.first().map_or(FinishReason::Stop, |(_, reason)| *reason);
            writer.keep(Ok((reason, usage.total()))).await?;
            Ok(writer.whole(&choices, usage.total()))
        }
        None => Err(GatewayError::new(ErrorKind::Internal, "the response ended without a finish reason")),
    }
}
