//! Proxy for the metrics of this machine's engines: each engine serves them on loopback at a port that
//! changes with every start and is unreachable from outside. Not here: the agent's own metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use russet_telemetry::admin::{Page, Pages};

/// Scrape timeout. A healthy engine answers from memory, and Prometheus gives up too.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

/// Metrics address of each engine, by its Shard's UID. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct MetricsProxy(Arc<Mutex<BTreeMap<String, String>>>);

impl MetricsProxy {
    /// Replaces the set of running engines.
    pub fn set(&self, engines: BTreeMap<String, String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = engines;
    }

    /// `/engines/UID/metrics` of every engine.
    pub fn pages(&self) -> Pages {
        let engines = self.clone();
        // Loopback must not go through a configured proxy.
        let client = reqwest::Client::builder().no_proxy().timeout(SCRAPE_TIMEOUT).build();
        let client =
            client.inspect_err(|error| tracing::error!(%error, "metrics of engines are not exported"));
        let client = client.ok();
        Arc::new(move |path| {
            let (engines, client) = (engines.clone(), client.clone());
            Box::pin(async move { engines.page(&client?, &path).await })
        })
    }

    async fn page(&self, client: &reqwest::Client, path: &str) -> Option<Page> {
        let uid = path.strip_prefix("/engines/")?.strip_suffix("/metrics")?;
        let address = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(uid)?.clone();
        let answer = client.get(format!("http://{address}/metrics")).send().await.ok()?;
        let answer = answer.error_for_status().ok()?;
        let content_type = answer.headers().get("content-type")?.to_str().ok()?.to_owned();
        Some(Page { content_type, text: answer.text().await.ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn metrics_proxy_serves_only_local_engines() {
        rustls::crypto::ring::default_provider().install_default().ok();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let engine = axum::Router::new().route("/metrics", axum::routing::get(|| async { "steps 3\n" }));
        tokio::spawn(async move { axum::serve(listener, engine).await });
        let exposition = MetricsProxy::default();
        let pages = exposition.pages();
        let known = "/engines/uid-1/metrics";
        assert_eq!(pages(known.to_owned()).await, None);
        exposition.set(BTreeMap::from([("uid-1".to_owned(), address)]));
        assert_eq!(pages(known.to_owned()).await.unwrap().text, "steps 3\n");
        for path in ["/engines/uid-2/metrics", "/engines/uid-1", "/engines/127.0.0.1:1/metrics", "/"] {
            assert_eq!(pages(path.to_owned()).await, None, "{path}");
        }
        exposition.set(BTreeMap::new());
        assert_eq!(pages(known.to_owned()).await, None);
    }
}
