//! One gRPC channel per engine, open for the engine's lifetime, and the count of this gateway's requests in
//! flight to each. Not here: which deployment serves a request, see `routes`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls::{TlsError, TlsFiles};
use tonic::transport::Channel;

use crate::routes::{Endpoint, RoutingTable};

/// Channels to engines.
pub struct Backends {
    identity: TlsFiles,
    channels: Mutex<HashMap<Endpoint, EngineChannel>>,
}

struct EngineChannel {
    client: EngineClient<Channel>,
    in_flight: Arc<AtomicUsize>,
}

/// Counts one request in flight to an engine; released on drop.
pub struct InFlightGuard {
    in_flight: Arc<AtomicUsize>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Backends {
    /// No channels yet; `identity` holds the client certificate shown to engines.
    pub fn new(identity: TlsFiles) -> Self {
        Self { identity, channels: Mutex::default() }
    }

    /// The endpoint with the fewest requests from this gateway; the first of equals.
    pub fn least_busy<'a>(&self, endpoints: impl IntoIterator<Item = &'a Endpoint>) -> Option<&'a Endpoint> {
        let channels = self.channels.lock();
        endpoints.into_iter().min_by_key(|endpoint| {
            channels.get(endpoint).map_or(0, |channel| channel.in_flight.load(Ordering::Relaxed))
        })
    }

    /// A client for `endpoint`, and a guard that counts the request.
    pub fn acquire(&self, endpoint: &Endpoint) -> Result<(EngineClient<Channel>, InFlightGuard), TlsError> {
        let mut channels = self.channels.lock();
        let (client, in_flight) = match channels.get(endpoint) {
            Some(channel) => (channel.client.clone(), channel.in_flight.clone()),
            None => {
                // Read again for each engine, so that a renewed certificate is used without a restart.
                let channel = self.identity.channel(&endpoint.address, &endpoint.node)?;
                let created = EngineChannel { client: EngineClient::new(channel), in_flight: Arc::default() };
                let pair = (created.client.clone(), created.in_flight.clone());
                channels.insert(endpoint.clone(), created);
                pair
            }
        };
        in_flight.fetch_add(1, Ordering::Relaxed);
        Ok((client, InFlightGuard { in_flight }))
    }

    /// Removes the channels of engines that are not in `table`; running requests keep theirs.
    pub fn prune(&self, table: &RoutingTable) {
        let mut channels = self.channels.lock();
        channels.retain(|endpoint, _| {
            table.deployments.iter().any(|deployment| deployment.endpoints.contains(endpoint))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_defaults::RequestDefaults;
    use crate::routes::{Deployment, DeploymentState};

    fn endpoint(address: &str) -> Endpoint {
        let (node, group, model) = ("a".into(), "default/g".into(), "small".into());
        Endpoint { address: address.into(), node, group, model, adapters: Default::default(), epoch: 1 }
    }

    fn backends(dir: &std::path::Path) -> Backends {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["a".into()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(dir.join("tls.crt"), certificate.pem()).unwrap();
        std::fs::write(dir.join("tls.key"), key.serialize_pem()).unwrap();
        std::fs::write(dir.join("ca.crt"), certificate.pem()).unwrap();
        Backends::new(TlsFiles::in_dir(dir))
    }

    #[tokio::test]
    async fn least_busy_engine_is_next_and_removed_ones_are_pruned() {
        let dir = tempfile::tempdir().unwrap();
        let backends = backends(dir.path());
        let (one, two) = (endpoint("127.0.0.1:1"), endpoint("127.0.0.1:2"));
        let both = [one.clone(), two.clone()];
        assert_eq!(backends.least_busy(&both), Some(&one));
        let first = backends.acquire(&one).unwrap();
        assert_eq!(backends.least_busy(&both), Some(&two));
        let _second = backends.acquire(&two).unwrap();
        let _third = backends.acquire(&two).unwrap();
        assert_eq!(backends.least_busy(&both), Some(&one));
        drop(first);
        assert_eq!(backends.least_busy(&both), Some(&one));
        assert_eq!(backends.least_busy(&[]), None);

        backends.prune(&RoutingTable {
            synced: true,
            deployments: vec![Deployment {
                adapters: Default::default(),
                namespace: "default".into(),
                name: "m".into(),
                created: 0,
                context_tokens: 1,
                model: "small".into(),
                defaults: RequestDefaults::default(),
                state: DeploymentState::Ready,
                endpoints: vec![two.clone()],
            }],
            aliases: vec![],
        });
        let remaining: Vec<Endpoint> = backends.channels.lock().keys().cloned().collect();
        assert_eq!(remaining, [two]);
    }
}
