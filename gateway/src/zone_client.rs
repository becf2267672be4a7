//! The only sockets of a gateway to addresses that people listed: providers, and endpoints of Pipelines. A client connects to
//! addresses of its zone alone, whatever a name resolves to. Redirects are not followed and proxies not used: both would lead
//! elsewhere.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, Url};
use russet_crds::Zone;
use russet_rpc::addresses::{is_loopback, is_private, is_public};

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client for each zone, made when the first request leaves: they read the certificates of this machine, and most gateways
/// need none. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct ZoneClients(Arc<OnceLock<Result<HttpClients, String>>>);

impl ZoneClients {
    /// The client of a zone; an error says why there is none.
    pub(crate) fn of(&self, zone: Zone) -> Result<&Client, String> {
        let clients = self.0.get_or_init(|| HttpClients::new().map_err(|error| error.to_string()));
        let clients = clients.as_ref().map_err(|error| format!("this gateway has no client: {error}"))?;
        clients.of(zone).ok_or_else(|| "its zone is of a newer release".to_owned())
    }
}

/// A client for each zone.
struct HttpClients {
    local: Client,
    lan: Client,
    cloud: Client,
}

impl HttpClients {
    fn new() -> Result<Self, reqwest::Error> {
        let client = |zone| {
            Client::builder()
                .user_agent(concat!("russet-gateway/", env!("CARGO_PKG_VERSION")))
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
                .dns_resolver(Arc::new(ZoneResolver(zone)))
                .connect_timeout(CONNECT_TIMEOUT)
                .build()
        };
        Ok(Self { local: client(Zone::Local)?, lan: client(Zone::Lan)?, cloud: client(Zone::Cloud)? })
    }

    fn of(&self, zone: Zone) -> Option<&Client> {
        match zone {
            Zone::Local => Some(&self.local),
            Zone::Lan => Some(&self.lan),
            Zone::Cloud => Some(&self.cloud),
            Zone::Unknown => None,
        }
    }
}

/// Whether an address is in a zone. None is in two, so that a provider of the cloud cannot be a way to machines at home.
fn is_in(zone: Zone, address: IpAddr) -> bool {
    match zone {
        Zone::Local => is_loopback(address),
        Zone::Lan => is_private(address),
        Zone::Cloud => is_public(address),
        Zone::Unknown => false,
    }
}

/// A resolver that leaves out addresses of other zones.
#[derive(Debug)]
struct ZoneResolver(Zone);

/// No address of a name is in the zone.
#[derive(Debug, thiserror::Error)]
#[error("it has no address in the zone {0}")]
struct OutOfZone(Zone);

impl Resolve for ZoneResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let Self(zone) = *self;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let inside: Vec<SocketAddr> = found.filter(|found| is_in(zone, found.ip())).collect();
            if inside.is_empty() {
                return Err(OutOfZone(zone).into());
            }
            Ok(Box::new(inside.into_iter()) as Addrs)
        })
    }
}

/// An address in a zone; an error where its host is an address of another one.
pub(crate) fn url_in(text: &str, zone: Zone) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("its endpoint is no URL: {error}"))?;
    if zone == Zone::Cloud && url.scheme() != "https" {
        return Err("its endpoint has no https://".to_owned());
    }
    let host = url.host_str().unwrap_or_default();
    match host.trim_matches(['[', ']']).parse() {
        // Names are resolved, and their addresses checked then.
        Ok(address) if !is_in(zone, address) => Err(OutOfZone(zone).to_string()),
        _ => Ok(url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_in_one_zone_at_most() {
        let zones = [Zone::Local, Zone::Lan, Zone::Cloud, Zone::Unknown];
        for (text, expected) in [
            ("127.0.0.1", Some(Zone::Local)),
            ("192.168.1.7", Some(Zone::Lan)),
            ("100.100.1.1", Some(Zone::Lan)),
            ("169.254.169.254", None),
            ("1.1.1.1", Some(Zone::Cloud)),
            ("0.0.0.0", None),
            ("::ffff:10.0.0.1", Some(Zone::Lan)),
        ] {
            let address = text.parse().unwrap();
            let found: Vec<Zone> = zones.into_iter().filter(|zone| is_in(*zone, address)).collect();
            assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{text}");
        }
    }

    #[test]
    fn an_endpoint_of_another_zone_is_no_url() {
        for (endpoint, zone, expected) in [
            ("http://127.0.0.1:8080/v1", Zone::Local, Ok("http://127.0.0.1:8080/v1")),
            ("http://[::1]:8080/v1/", Zone::Local, Ok("http://[::1]:8080/v1/")),
            ("http://127.0.0.1:8080/v1", Zone::Lan, Err("it has no address in the zone Lan")),
            ("https://10.0.0.1/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
            ("http://api.example.com/v1", Zone::Cloud, Err("its endpoint has no https://")),
            ("http://studio.local/v1", Zone::Lan, Ok("http://studio.local/v1")),
            ("https://[::ffff:127.0.0.1]/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
            // Forms of an address that only URLs know.
            ("https://2130706433/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
            ("https://0x7f.1/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
        ] {
            let found = url_in(endpoint, zone).map(String::from);
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{endpoint} {zone}");
        }
    }
}
