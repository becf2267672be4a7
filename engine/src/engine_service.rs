//! The Engine gRPC service over mTLS: authorization, and events as a gRPC stream. Not here: handling of
//! requests (`scheduler`) and of follower commands (`group`).

use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use futures::{Stream, StreamExt as _};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_server::Engine;
use russet_rpc::tls;
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::group::follower::Follower;
use crate::lifecycle::Lifecycle;
use crate::prefix_cache::block_hash::{BLOCK_TOKENS, BlockHash};
use crate::prefix_cache::events::BlockEvent;
use crate::scheduler::Intake;

/// Role of this rank.
pub enum ServiceRole {
    /// Rank 0: serves requests, once the group is formed.
    Leader(Arc<OnceLock<Intake>>),
    /// Any other rank: serves rank 0.
    Follower(Arc<Follower>),
}

/// The Engine service of one rank.
pub struct EngineService {
    /// Its self-description.
    pub description: pb::EngineDescription,
    /// Its role.
    pub role: ServiceRole,
    /// Its lifecycle.
    pub life: Lifecycle,
}

/// Whether a user may generate tokens: gateways, the operator's smoke test, and nodes.
fn may_generate(user: &str) -> bool {
    user == tls::GATEWAY_USER || user == tls::OPERATOR_USER || may_lead(user)
}

/// Whether a user may lead this rank: engines of other nodes authenticate as their node.
fn may_lead(user: &str) -> bool {
    user.strip_prefix(tls::NODE_USER_PREFIX).is_some_and(|node| !node.is_empty())
}

fn authorise<T>(request: &Request<T>, verb: &str, may: fn(&str) -> bool) -> Result<(), Status> {
    match tls::peer_user(request) {
        Some(user) if may(&user) => Ok(()),
        Some(user) => Err(Status::permission_denied(format!("{user:?} may not {verb} on an engine"))),
        None => {
            Err(Status::unauthenticated("an engine talks only to peers with a certificate that names them"))
        }
    }
}

#[tonic::async_trait]
impl Engine for EngineService {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<pb::GenerateEvent, Status>> + Send>>;
    type PrefixesStream = Pin<Box<dyn Stream<Item = Result<pb::PrefixesEvent, Status>> + Send>>;
    type FollowStream = Pin<Box<dyn Stream<Item = Result<pb::FollowReply, Status>> + Send>>;

    async fn describe(
        &self,
        _: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::EngineDescription>, Status> {
        Ok(Response::new(self.description.clone()))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        authorise(&request, "generate", may_generate)?;
        let intake = match &self.role {
            ServiceRole::Leader(intake) => intake.get(),
            ServiceRole::Follower(_) => {
                let rank = self.description.rank;
                return Err(Status::failed_precondition(format!(
                    "rank {rank} answers no requests; ask rank 0"
                )));
            }
        };
        let events: Self::GenerateStream = match intake {
            Some(intake) => {
                let events = intake.prepare(request.into_inner().into()).await;
                Box::pin(UnboundedReceiverStream::new(events).map(|event| Ok(event.into())))
            }
            None => {
                let message = self
                    .life
                    .unavailable_reason()
                    .unwrap_or_else(|| "this engine is about to serve; try again".into());
                let failure =
                    GenerationEvent::Failed(GenerationFailure { kind: FailureKind::Unavailable, message });
                Box::pin(futures::stream::iter([Ok(failure.into())]))
            }
        };
        Ok(Response::new(events))
    }

    async fn prefixes(
        &self,
        request: Request<pb::PrefixesRequest>,
    ) -> Result<Response<Self::PrefixesStream>, Status> {
        authorise(&request, "ask for prefixes", may_generate)?;
        let ServiceRole::Leader(intake) = &self.role else {
            return Err(Status::failed_precondition("only rank 0 knows what its group keeps"));
        };
        let intake = intake.get().ok_or_else(|| Status::unavailable("this engine is about to serve"))?;
        let (root, news) = intake.prefixes();
        let bytes = |hashes: Vec<BlockHash>| hashes.iter().map(|hash| hash.0.to_vec()).collect();
        let events = ReceiverStream::new(news).map(move |BlockEvent { is_snapshot, delta }| {
            Ok(pb::PrefixesEvent {
                reset: is_snapshot,
                block_tokens: BLOCK_TOKENS,
                root: root.0.to_vec(),
                added: bytes(delta.added),
                evicted: bytes(delta.removed),
            })
        });
        // A subscriber is no request: it must not keep an engine alive that has ended.
        let ended = self.life.clone();
        Ok(Response::new(Box::pin(events.take_until(async move { ended.wait_ended().await }))))
    }

    async fn follow(
        &self,
        request: Request<Streaming<pb::FollowCommand>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        authorise(&request, "lead", may_lead)?;
        let ServiceRole::Follower(follower) = &self.role else {
            return Err(Status::failed_precondition("rank 0 leads its group and follows no other rank"));
        };
        let (replies, receiver) = mpsc::unbounded_channel();
        follower.clone().follow(request.into_inner(), replies).await?;
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_authorised_users_may_generate_or_lead() {
        for (user, generate, lead) in [
            ("russet:gateway", true, false),
            ("russet:operator", true, false),
            ("russet:node:a", true, true),
            ("russet:node:", false, false),
            ("russet:gatewayx", false, false),
            ("admin", false, false),
            ("", false, false),
        ] {
            assert_eq!((may_generate(user), may_lead(user)), (generate, lead), "{user}");
        }
    }
}
