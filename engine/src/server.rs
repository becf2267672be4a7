//! The Engine service over mTLS: who may ask what, and events as a gRPC stream. What becomes of a
//! request is decided in `schedule`, what a follower does in `follow`.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use futures::{Stream, StreamExt as _};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_server::Engine;
use russet_rpc::tls;
use russet_wire::event::{Event, Failure, FailureKind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::follow::obey::Follower;
use crate::kept::chain::{BLOCK, Key};
use crate::kept::feed::News;
use crate::life::Life;
use crate::schedule::Entrance;

/// What this rank answers.
pub enum Role {
    /// Rank 0: requests, once the group is formed.
    Leader(Arc<OnceLock<Entrance>>),
    /// Any other rank: rank 0.
    Follower(Arc<Follower>),
}

/// The service of one rank.
pub struct Service {
    /// What it is.
    pub description: pb::EngineDescription,
    /// What it answers.
    pub role: Role,
    /// Its life.
    pub life: Life,
}

/// Whether a user may have tokens generated: gateways, the operator's smoke test, and nodes.
fn may_generate(user: &str) -> bool {
    user == tls::GATEWAY_USER || user == tls::OPERATOR_USER || may_lead(user)
}

/// Whether a user may lead this rank: the engines of other nodes act as their node.
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
impl Engine for Service {
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
        let entrance = match &self.role {
            Role::Leader(entrance) => entrance.get(),
            Role::Follower(_) => {
                let rank = self.description.rank;
                return Err(Status::failed_precondition(format!(
                    "rank {rank} answers no requests; ask rank 0"
                )));
            }
        };
        let events: Self::GenerateStream = match entrance {
            Some(entrance) => {
                let events = entrance.submit(request.into_inner().into());
                Box::pin(UnboundedReceiverStream::new(events).map(|event| Ok(event.into())))
            }
            None => {
                let message =
                    self.life.refusal().unwrap_or_else(|| "this engine is about to serve; try again".into());
                let failure = Event::Failed(Failure { kind: FailureKind::Unavailable, message });
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
        let Role::Leader(entrance) = &self.role else {
            return Err(Status::failed_precondition("only rank 0 knows what its group keeps"));
        };
        let entrance = entrance.get().ok_or_else(|| Status::unavailable("this engine is about to serve"))?;
        let (root, news) = entrance.prefixes();
        let bytes = |keys: Vec<Key>| keys.iter().map(|key| key.0.to_vec()).collect();
        let events = ReceiverStream::new(news).map(move |News { all, changes }| {
            Ok(pb::PrefixesEvent {
                reset: all,
                block_tokens: BLOCK,
                root: root.0.to_vec(),
                added: bytes(changes.added),
                dropped: bytes(changes.dropped),
            })
        });
        // A listener is no request: it must not keep an engine that is done.
        let ended = self.life.clone();
        Ok(Response::new(Box::pin(events.take_until(async move { ended.ended().await }))))
    }

    async fn follow(
        &self,
        request: Request<Streaming<pb::FollowCommand>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        authorise(&request, "lead", may_lead)?;
        let Role::Follower(follower) = &self.role else {
            return Err(Status::failed_precondition("rank 0 leads and follows nobody"));
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
    fn only_those_who_must_may() {
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
