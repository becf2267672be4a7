//! The Engine gRPC service over mTLS: authorization, and events as a gRPC stream. Not here: handling of
//! requests (`scheduler`) and of follower commands (`group`).

mod prefix_events;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use futures::{Stream, StreamExt as _};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_server::Engine;
use russet_rpc::tls;
use russet_wire::engine_config::EngineConfig;
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::group::follower::Follower;
use crate::lifecycle::Lifecycle;
use crate::pooling::{PooledTexts, PoolingIntake, invalid};
use crate::scheduler::Intake;

/// Role of this rank.
pub enum ServiceRole {
    /// Rank 0: serves requests, once the group is formed.
    Leader(Arc<OnceLock<LeaderIntake>>),
    /// Any other rank: serves rank 0.
    Follower(Arc<Follower>),
}

/// What takes the requests of a group.
#[derive(Clone)]
pub enum LeaderIntake {
    /// Of a model that generates.
    Generate(Box<Intake>),
    /// Of one that embeds or scores.
    Pool(PoolingIntake),
}

/// The Engine service of one rank.
pub struct EngineService {
    /// Its self-description.
    pub description: pb::EngineDescription,
    /// Its role.
    pub role: ServiceRole,
    /// Nodes of its group.
    pub nodes: GroupNodes,
    /// Its lifecycle.
    pub life: Lifecycle,
}

/// The nodes of a group, which decide who may ask a rank for what. Nodes are no class: one node's engine serves
/// nothing to the nodes of other groups.
#[derive(Clone, Debug, Default)]
pub struct GroupNodes {
    /// The node of rank 0.
    leader: Option<String>,
    all: BTreeSet<String>,
}

impl GroupNodes {
    /// The nodes that a rank's configuration names.
    pub fn of(config: &EngineConfig) -> Self {
        Self {
            leader: config.peers.iter().find(|peer| peer.rank == 0).map(|peer| peer.node.clone()),
            all: config.peers.iter().map(|peer| peer.node.clone()).collect(),
        }
    }

    /// Whether a user may ask for tokens, or for the prefix cache's blocks: gateways, and nodes of the group.
    fn may_generate(&self, user: &str) -> bool {
        user == tls::GATEWAY_USER || node_of(user).is_some_and(|node| self.all.contains(node))
    }

    /// Whether a user may lead this rank: the node of its rank 0 alone.
    fn may_lead(&self, user: &str) -> bool {
        self.leader.is_some() && node_of(user) == self.leader.as_deref()
    }
}

/// Why a model that pools generates nothing.
const GENERATES_NONE: &str = "the model embeds or scores texts and generates none; send the request to /v1/embeddings or /v1/rerank, or name a model that generates";

/// The node that a user is, if it is one: engines authenticate as their node.
fn node_of(user: &str) -> Option<&str> {
    user.strip_prefix(tls::NODE_USER_PREFIX).filter(|node| !node.is_empty())
}

fn authorise<T>(request: &Request<T>, verb: &str, may: impl Fn(&str) -> bool) -> Result<(), Status> {
    match tls::peer_user(request) {
        Some(user) if may(&user) => Ok(()),
        Some(user) => Err(Status::permission_denied(format!(
            "{user:?} may not {verb} on this engine; the gateway and the nodes of its group may, and only rank 0's node leads it"
        ))),
        None => {
            Err(Status::unauthenticated("an engine talks only to peers with a certificate that names them"))
        }
    }
}

impl EngineService {
    /// What takes requests, or why nothing does yet; an error on another rank.
    fn intake(&self) -> Result<Result<LeaderIntake, GenerationFailure>, Status> {
        let ServiceRole::Leader(intake) = &self.role else {
            let rank = self.description.rank;
            return Err(Status::failed_precondition(format!("rank {rank} answers no requests; ask rank 0")));
        };
        Ok(intake.get().cloned().ok_or_else(|| {
            let reason = self.life.unavailable_reason();
            let message = reason.unwrap_or_else(|| "this engine is about to serve; try again".into());
            GenerationFailure { kind: FailureKind::Unavailable, message }
        }))
    }

    /// The same of a model that embeds or scores.
    fn pooling_intake(&self) -> Result<Result<PoolingIntake, GenerationFailure>, Status> {
        Ok(match self.intake()? {
            Ok(LeaderIntake::Pool(intake)) => Ok(intake),
            Ok(LeaderIntake::Generate(_)) => Err(invalid(
                "the model generates text and neither embeds nor scores any; send the request to /v1/chat/completions, or name a model that embeds or reranks".to_owned(),
            )),
            Err(failure) => Err(failure),
        })
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
        authorise(&request, "generate", |user| self.nodes.may_generate(user))?;
        let failed = |failure: GenerationFailure| {
            let failure = GenerationEvent::Failed(failure);
            Box::pin(futures::stream::iter([Ok(failure.into())]))
        };
        let events: Self::GenerateStream = match self.intake()? {
            Ok(LeaderIntake::Pool(_)) => failed(invalid(GENERATES_NONE.to_owned())),
            Ok(LeaderIntake::Generate(intake)) => {
                let events = intake.prepare(request.into_inner().into()).await;
                Box::pin(UnboundedReceiverStream::new(events).map(|sent| Ok(sent.event.into())))
            }
            Err(failure) => failed(failure),
        };
        Ok(Response::new(events))
    }

    async fn embed(&self, request: Request<pb::EmbedRequest>) -> Result<Response<pb::EmbedReply>, Status> {
        authorise(&request, "embed", |user| self.nodes.may_generate(user))?;
        let result = match self.pooling_intake()? {
            Ok(intake) => intake.embed(request.into_inner()).await,
            Err(failure) => Err(failure),
        };
        Ok(Response::new(match result {
            Ok((dimensions, PooledTexts { vectors, tokens, engine_microseconds })) => {
                let values = vectors.iter().flatten().flat_map(|number| number.to_le_bytes()).collect();
                pb::EmbedReply {
                    failed: None,
                    dimensions,
                    values,
                    prompt_tokens: tokens,
                    engine_microseconds: Some(engine_microseconds),
                }
            }
            Err(failure) => pb::EmbedReply { failed: Some(failure.into()), ..pb::EmbedReply::default() },
        }))
    }

    async fn rerank(&self, request: Request<pb::RerankRequest>) -> Result<Response<pb::RerankReply>, Status> {
        authorise(&request, "rerank", |user| self.nodes.may_generate(user))?;
        let result = match self.pooling_intake()? {
            Ok(intake) => intake.rerank(request.into_inner()).await,
            Err(failure) => Err(failure),
        };
        Ok(Response::new(match result {
            Ok(PooledTexts { vectors, tokens, engine_microseconds }) => pb::RerankReply {
                failed: None,
                scores: vectors.concat(),
                prompt_tokens: tokens,
                engine_microseconds: Some(engine_microseconds),
            },
            Err(failure) => pb::RerankReply { failed: Some(failure.into()), ..pb::RerankReply::default() },
        }))
    }

    async fn count_tokens(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::CountTokensReply>, Status> {
        authorise(&request, "count tokens", |user| self.nodes.may_generate(user))?;
        let result = match self.intake()? {
            Ok(LeaderIntake::Generate(intake)) => intake.count_tokens(request.into_inner().into()).await,
            Ok(LeaderIntake::Pool(_)) => Err(invalid(GENERATES_NONE.to_owned())),
            Err(failure) => Err(failure),
        };
        Ok(Response::new(match result {
            Ok(prompt_tokens) => pb::CountTokensReply { failed: None, prompt_tokens },
            Err(failure) => pb::CountTokensReply { failed: Some(failure.into()), prompt_tokens: 0 },
        }))
    }

    async fn prefixes(
        &self,
        request: Request<pb::PrefixesRequest>,
    ) -> Result<Response<Self::PrefixesStream>, Status> {
        authorise(&request, "ask for prefixes", |user| self.nodes.may_generate(user))?;
        let ServiceRole::Leader(intake) = &self.role else {
            return Err(Status::failed_precondition("only rank 0 knows what its group keeps"));
        };
        let intake = intake.get().ok_or_else(|| Status::unavailable("this engine is about to serve"))?;
        let LeaderIntake::Generate(intake) = intake else {
            return Err(Status::failed_precondition("a model that embeds or scores keeps no prefixes"));
        };
        // A subscriber is no request: it must not keep an engine alive that has ended.
        let ended = self.life.clone();
        let events =
            prefix_events::stream(intake.clone()).take_until(async move { ended.wait_ended().await });
        Ok(Response::new(Box::pin(events.map(Ok))))
    }

    async fn follow(
        &self,
        request: Request<Streaming<pb::FollowCommand>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        authorise(&request, "lead", |user| self.nodes.may_lead(user))?;
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
    use russet_wire::engine_config::PeerRank;

    use super::*;

    #[test]
    fn users_may_do_what_their_place_in_the_group_allows() {
        let peer = |(rank, node): (u32, &str)| PeerRank {
            rank,
            address: ([127, 0, 0, 1], 1).into(),
            node: node.into(),
        };
        let group = |nodes: &[(u32, &str)]| {
            let peers = nodes.iter().copied().map(peer).collect();
            GroupNodes::of(&EngineConfig { peers, ..EngineConfig::default() })
        };
        let (pair, alone) = (group(&[(1, "b"), (0, "a")]), group(&[]));
        for (user, of_pair, of_alone) in [
            ("russet:gateway", (true, false), (true, false)),
            ("russet:node:a", (true, true), (false, false)),
            ("russet:node:b", (true, false), (false, false)),
            ("russet:node:c", (false, false), (false, false)),
            ("russet:node:", (false, false), (false, false)),
            ("russet:operator", (false, false), (false, false)),
            ("russet:gatewayx", (false, false), (false, false)),
            ("a", (false, false), (false, false)),
            ("", (false, false), (false, false)),
        ] {
            for (nodes, expected) in [(&pair, of_pair), (&alone, of_alone)] {
                assert_eq!((nodes.may_generate(user), nodes.may_lead(user)), expected, "{user} {nodes:?}");
            }
        }
    }
}
