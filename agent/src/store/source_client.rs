//! Requests of the store: every one of them, to whichever server a source, its redirects, its registry or its Secret name,
//! goes through here, so that none reaches an address that sources may not be at, and none disturbs a host that asked
//! for a pause.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::{Client, Request, Response, StatusCode, Url};

use super::StoreError;
use super::host_pauses::HostPauses;
use super::private_sources::{AddressFilter, AddressRefused, Cidr, FilteringResolver, normal};
use super::web;

/// Variables in which the machine's owner names proxies, as reqwest reads them.
const PROXIES: [&str; 6] =
    ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];

/// The client of all sources.
#[derive(Clone, Debug)]
pub(super) struct SourceClient {
    /// For what authors of Models name.
    client: Client,
    filter: Arc<AddressFilter>,
    /// For the hub, which the machine's owner names in `HF_ENDPOINT`: it may be at any address.
    hub_client: Client,
    hub: Url,
    pauses: HostPauses,
}

impl SourceClient {
    /// A client that reaches public addresses, those in `allowed`, and the hub.
    pub fn new(hub: &Url, allowed: &[Cidr]) -> Result<Self, reqwest::Error> {
        let proxies: BTreeSet<String> =
            PROXIES.iter().filter_map(|name| proxy_host(&std::env::var(name).ok()?)).collect();
        let filter = Arc::new(AddressFilter::new(allowed.to_vec(), proxies.clone()));
        let owners = proxies.into_iter().chain(hub.host_str().map(normal)).collect();
        let hub_filter = Arc::new(AddressFilter::new(allowed.to_vec(), owners));
        Ok(Self {
            client: client(&filter)?,
            filter,
            hub_client: client(&hub_filter)?,
            hub: hub.clone(),
            pauses: HostPauses::default(),
        })
    }

    /// Whether a URL is one of the hub's.
    pub fn is_hub(&self, url: &Url) -> bool {
        url.origin() == self.hub.origin()
    }

    /// Sends a request, and follows no redirect. The hub may lead to other ports of its own host (`from_hub`).
    pub async fn send(&self, request: Request, from_hub: bool) -> Result<Response, StoreError> {
        let url = request.url().clone();
        let to_hub = self.is_hub(&url) || (from_hub && url.host_str() == self.hub.host_str());
        if !to_hub && self.filter.check(&url).is_err() {
            return Err(refused(&url));
        }
        if let Some(left) = self.pauses.left(&url, Instant::now()) {
            let detail = "to this node, which reads several models there".to_owned();
            return Err(StoreError::busy(url.to_string(), detail, left));
        }
        let client = if to_hub { &self.hub_client } else { &self.client };
        let mut response = client.execute(request).await.map_err(|error| unreachable(&url, &error))?;
        match response.status() {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                let pause = self.pauses.refused(&url, response.headers(), Instant::now());
                response.extensions_mut().insert(AskedPause(pause));
            }
            _ => self.pauses.answered(&url, Instant::now()),
        }
        Ok(response)
    }
}

/// The pause that a host asked for in a response.
#[derive(Clone, Copy, Debug)]
struct AskedPause(Duration);

/// Time for which the host of a response wants no requests.
pub(super) fn asked_pause(response: &Response) -> Duration {
    response.extensions().get::<AskedPause>().map_or(Duration::ZERO, |asked| asked.0)
}

fn client(filter: &Arc<AddressFilter>) -> Result<Client, reqwest::Error> {
    Client::builder()
        .user_agent(concat!("russet-agent/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .dns_resolver(Arc::new(FilteringResolver(filter.clone())))
        .connect_timeout(Duration::from_secs(10))
        // A stalled transfer must end to be resumed; slow ones may run as long as bytes arrive.
        .read_timeout(Duration::from_secs(30))
        .build()
}

/// The host of a proxy, which may be written without a scheme.
fn proxy_host(text: &str) -> Option<String> {
    let url = Url::parse(text).ok().filter(Url::has_host);
    let url = url.or_else(|| Url::parse(&format!("http://{text}")).ok())?;
    Some(normal(url.host_str()?))
}

/// The one message for every refused address, which tells nothing about the networks of this machine.
fn refused(url: &Url) -> StoreError {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    StoreError::PrivateAddress { what: format!("{}://{host}{port}", url.scheme()) }
}

pub(super) fn unreachable(url: &Url, error: &reqwest::Error) -> StoreError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<AddressRefused>() {
            return refused(url);
        }
        cause = error.source();
    }
    StoreError::Unreachable { what: url.to_string(), detail: web::causes(error) }
}

#[cfg(test)]
mod tests;
