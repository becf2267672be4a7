//! The number of tokens of a prompt: one call to an engine, one answer. Not here: engine selection, see `attempt_loop`.

use russet_rpc::engine as pb;
use russet_wire::request::GenerationRequest;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_stream::{AttemptError, LostWork, acquire, answer, failure_error};
use crate::routes::{Deployment, Endpoint};

/// Asks one engine, within the deadline.
pub(super) async fn token_count(
    dispatcher: &Dispatcher,
    deployment: &Deployment,
    endpoint: &Endpoint,
    request: GenerationRequest,
    prompt_field: &str,
    deadline: Option<Deadline>,
) -> Result<u32, AttemptError> {
    let (mut client, _in_flight) = acquire(dispatcher, endpoint)?;
    let active = dispatcher.demand.start(deployment);
    let call = client.count_tokens(pb::GenerateRequest::from(request));
    let pb::CountTokensReply { failed, prompt_tokens } =
        answer(dispatcher, endpoint, deadline, std::pin::pin!(call)).await?;
    active.first_token();
    match failed {
        None => Ok(prompt_tokens),
        Some(failed) => Err(failure_error(failed.into(), prompt_field, deadline, LostWork::None)),
    }
}
