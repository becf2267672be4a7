//! Certificates with a lifetime of seconds: open streams outlive the certificates they began with, and new
//! connections need the renewed ones, on both sides and without a restart.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::engine::engine_server::{Engine, EngineServer};
use russet_rpc::tls::{self, TlsFiles, identity_dir};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Lifetime of the first certificates: long enough for a handshake on a busy machine.
const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(5);

type EventSender = mpsc::UnboundedSender<Result<pb::GenerateEvent, Status>>;

/// A stub engine whose streams the test feeds; it records the users of its clients.
#[derive(Clone, Default)]
struct StubEngine {
    streams: Arc<Mutex<Vec<EventSender>>>,
    peer_users: Arc<Mutex<Vec<String>>>,
}

type Stream<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Engine for StubEngine {
    type GenerateStream = Stream<pb::GenerateEvent>;
    type FollowStream = Stream<pb::FollowReply>;
    type PrefixesStream = Stream<pb::PrefixesEvent>;

    async fn prefixes(
        &self,
        _: Request<pb::PrefixesRequest>,
    ) -> Result<Response<Self::PrefixesStream>, Status> {
        Err(Status::unimplemented("nothing is kept here"))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        assert_eq!(tls::peer_user(&request).as_deref(), Some(tls::GATEWAY_USER));
        let certificates = request.peer_certs().unwrap();
        self.peer_users.lock().unwrap().push(format!("{:?}", certificates.first().unwrap().as_ref()));
        let (sender, receiver) = mpsc::unbounded_channel();
        self.streams.lock().unwrap().push(sender);
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver))))
    }

    async fn count_tokens(
        &self,
        _: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::CountTokensReply>, Status> {
        Err(Status::unimplemented("nothing is counted here"))
    }

    async fn embed(&self, _: Request<pb::EmbedRequest>) -> Result<Response<pb::EmbedReply>, Status> {
        Err(Status::unimplemented("nothing embeds here"))
    }

    async fn rerank(&self, _: Request<pb::RerankRequest>) -> Result<Response<pb::RerankReply>, Status> {
        Err(Status::unimplemented("nothing scores here"))
    }

    async fn follow(
        &self,
        _: Request<Streaming<pb::FollowCommand>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        Err(Status::unimplemented("nobody follows here"))
    }

    async fn describe(
        &self,
        _: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::EngineDescription>, Status> {
        Err(Status::unimplemented("nobody asks here"))
    }
}

/// Writes an identity of `user` that expires at `end`, into a directory that may hold one already.
fn issue(ca: &CertifiedIssuer<'_, KeyPair>, dir: &Path, user: &str, names: Vec<String>, end: SystemTime) {
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
    params.not_after = end.into();
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, ca).unwrap();
    let files = [
        (identity_dir::CERTIFICATE, certificate.pem()),
        (identity_dir::KEY, key.serialize_pem()),
        (identity_dir::CA, ca.pem()),
    ];
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, text)| (*name, text.as_bytes())).collect();
    identity_dir::publish(dir, &files).unwrap();
}

async fn ask(files: &TlsFiles, address: &str) -> Result<Streaming<pb::GenerateEvent>, Status> {
    let channel = files.channel(address, "a").unwrap();
    EngineClient::new(channel).generate(pb::GenerateRequest::default()).await.map(Response::into_inner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_certificates_and_new_connections_reload() {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (node, gateway) = (folder.path().join("node"), folder.path().join("gateway"));
    let end = SystemTime::now() + CERTIFICATE_LIFETIME;
    let names = || vec![tls::node_dns_name("a")];
    issue(&ca, &node, &tls::node_user("a"), names(), end);
    issue(&ca, &gateway, tls::GATEWAY_USER, vec![], end);

    let engine = StubEngine::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let incoming = TlsFiles::in_dir(&node).incoming_grpc(listener).unwrap();
    let server = tonic::transport::Server::builder().add_service(EngineServer::new(engine.clone()));
    let server = tokio::spawn(server.serve_with_incoming(incoming));

    let files = TlsFiles::in_dir(&gateway);
    // Created with the first certificate, connected after it has expired.
    let lazy = files.channel(&address, "a").unwrap();
    let mut stream = ask(&files, &address).await.unwrap();
    let tick = |number: usize| {
        let event = pb::generate_event::Event::Started(pb::Started {
            prompt_tokens: number as u32,
            ..Default::default()
        });
        let streams = engine.streams.lock().unwrap();
        streams[0].send(Ok(pb::GenerateEvent { event: Some(event), ..Default::default() })).unwrap();
    };
    tick(1);
    assert!(stream.message().await.unwrap().is_some());

    // A certificate is valid up to and including its last second.
    while SystemTime::now() < end + Duration::from_secs(1) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tick(2);
    assert!(stream.message().await.unwrap().is_some(), "an open stream asks for no certificate");
    assert!(ask(&files, &address).await.is_err(), "an ended certificate opens nothing");

    // Renewal on one side is not enough; on both it is, without any notification.
    let later = SystemTime::now() + Duration::from_secs(3600);
    issue(&ca, &gateway, tls::GATEWAY_USER, vec![], later);
    assert!(ask(&files, &address).await.is_err(), "the engine's has ended");
    issue(&ca, &node, &tls::node_user("a"), names(), later);
    ask(&files, &address).await.unwrap();
    EngineClient::new(lazy).generate(pb::GenerateRequest::default()).await.unwrap();
    tick(3);
    assert!(stream.message().await.unwrap().is_some());
    let seen = engine.peer_users.lock().unwrap().clone();
    assert_eq!(seen.len(), 3);
    assert!(seen[0] != seen[1] && seen[1] == seen[2], "who came later showed the new certificate");
    server.abort();
}
