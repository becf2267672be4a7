//! One gRPC channel an engine, kept as long as the engine is, and how many requests each one has
//! from this gateway. Which deployment to ask is `routes`' business.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls::{Files, TlsError};
use tonic::transport::Channel;

use crate::routes::{Endpoint, Table};

/// Channels to engines.
pub struct Backends {
    identity: Files,
    known: Mutex<HashMap<Endpoint, Known>>,
}

struct Known {
    client: EngineClient<Channel>,
    outstanding: Arc<AtomicUsize>,
}

/// One request's place in the count of its engine, given back when dropped.
pub struct Lease {
    outstanding: Arc<AtomicUsize>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Backends {
    /// No channels yet; engines are asked as the gateway whose certificate `identity` holds.
    pub fn new(identity: Files) -> Self {
        Self { identity, known: Mutex::default() }
    }

    /// The endpoint with the fewest requests from here; the first of equals.
    pub fn least_busy<'a>(&self, endpoints: impl IntoIterator<Item = &'a Endpoint>) -> Option<&'a Endpoint> {
        let known = self.known.lock();
        endpoints.into_iter().min_by_key(|endpoint| {
            known.get(endpoint).map_or(0, |known| known.outstanding.load(Ordering::Relaxed))
        })
    }

    /// A client for `endpoint`, and a place in its count.
    pub fn lease(&self, endpoint: &Endpoint) -> Result<(EngineClient<Channel>, Lease), TlsError> {
        let mut known = self.known.lock();
        let (client, outstanding) = match known.get(endpoint) {
            Some(known) => (known.client.clone(), known.outstanding.clone()),
            None => {
                // Read anew for each engine, so that a renewed certificate is used without a restart.
                let channel = self.identity.channel(&endpoint.address, &endpoint.node)?;
                let fresh = Known { client: EngineClient::new(channel), outstanding: Arc::default() };
                let pair = (fresh.client.clone(), fresh.outstanding.clone());
                known.insert(endpoint.clone(), fresh);
                pair
            }
        };
        outstanding.fetch_add(1, Ordering::Relaxed);
        Ok((client, Lease { outstanding }))
    }

    /// Forgets the channels of engines that `table` no longer knows; running requests keep theirs.
    pub fn prune(&self, table: &Table) {
        let mut known = self.known.lock();
        known.retain(|endpoint, _| {
            table.deployments.iter().any(|deployment| deployment.endpoints.contains(endpoint))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::{Deployment, State};

    fn endpoint(address: &str) -> Endpoint {
        let (node, group, model) = ("a".into(), "default/g".into(), "small".into());
        Endpoint { address: address.into(), node, group, model, epoch: 1 }
    }

    fn backends(dir: &std::path::Path) -> Backends {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["a".into()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(dir.join("tls.crt"), certificate.pem()).unwrap();
        std::fs::write(dir.join("tls.key"), key.serialize_pem()).unwrap();
        std::fs::write(dir.join("ca.crt"), certificate.pem()).unwrap();
        Backends::new(Files::in_dir(dir))
    }

    #[tokio::test]
    async fn the_engine_with_the_fewest_requests_is_next_and_gone_ones_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let backends = backends(dir.path());
        let (one, two) = (endpoint("127.0.0.1:1"), endpoint("127.0.0.1:2"));
        let both = [one.clone(), two.clone()];
        assert_eq!(backends.least_busy(&both), Some(&one));
        let first = backends.lease(&one).unwrap();
        assert_eq!(backends.least_busy(&both), Some(&two));
        let _second = backends.lease(&two).unwrap();
        let _third = backends.lease(&two).unwrap();
        assert_eq!(backends.least_busy(&both), Some(&one));
        drop(first);
        assert_eq!(backends.least_busy(&both), Some(&one));
        assert_eq!(backends.least_busy(&[]), None);

        backends.prune(&Table {
            synced: true,
            deployments: vec![Deployment {
                namespace: "default".into(),
                name: "m".into(),
                created: 0,
                context_tokens: 1,
                model: "small".into(),
                state: State::Ready,
                endpoints: vec![two.clone()],
            }],
            names: vec![],
        });
        let known: Vec<Endpoint> = backends.known.lock().keys().cloned().collect();
        assert_eq!(known, [two]);
    }
}
