//! `networksetup -listnetworkserviceorder` and `-getinfo SERVICE`: network services in the order of their
//! routes, and how each gets its address. An interface may have none, one or several; a disabled one has an
//! asterisk instead of its number.

use std::net::Ipv4Addr;

use super::{ParseError, fields, text};

const ORDER: &str = "networksetup -listnetworkserviceorder";
const INFO: &str = "networksetup -getinfo";

/// A network service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkService {
    /// Its name, which users may change.
    pub name: String,
    /// Its port, `Thunderbolt 1` or a VPN client's identifier.
    pub port: String,
    /// Its interface; VPN clients have none.
    pub device: Option<String>,
    /// Whether it is enabled.
    pub enabled: bool,
}

/// Parses the services, in the order of their routes.
pub fn service_order(output: &[u8]) -> Result<Vec<NetworkService>, ParseError> {
    let text = text(output);
    let mut services = Vec::new();
    let mut open: Option<(String, bool)> = None;
    // A blank at the end of a name belongs to it: `networksetup` knows the service by no other name.
    for line in text.lines().map(|line| line.trim_end_matches('\r').trim_start()) {
        if let Some(inner) = line.trim_end().strip_prefix("(Hardware Port: ") {
            let inner = inner.strip_suffix(')').unwrap_or(inner);
            let (port, device) = inner
                .rsplit_once(", Device:")
                .ok_or_else(|| ParseError::new(ORDER, format!("a hardware port without a device: {line}")))?;
            let (name, enabled) =
                open.take().ok_or_else(|| ParseError::new(ORDER, format!("{line} of no service")))?;
            let device = Some(device.trim().to_owned()).filter(|device| !device.is_empty());
            services.push(NetworkService { name, port: port.to_owned(), device, enabled });
        } else if let Some((number, name)) = line.strip_prefix('(').and_then(|rest| rest.split_once(") "))
            && (number == "*" || number.parse::<u32>().is_ok())
        {
            open = Some((name.to_owned(), number != "*"));
        }
    }
    if services.is_empty() { Err(ParseError::new(ORDER, "no service")) } else { Ok(services) }
}

/// How a service gets its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceInfo {
    /// `DHCP`, `Manual`.
    pub configuration: String,
    /// Its address, if it has one.
    pub address: Option<Ipv4Addr>,
    /// Its router, if it has one.
    pub router: Option<Ipv4Addr>,
}

/// Parses the information about a service.
pub fn info(output: &[u8]) -> Result<ServiceInfo, ParseError> {
    let text = text(output);
    let configuration = text.lines().find_map(|line| line.trim().strip_suffix(" Configuration"));
    let configuration = configuration.ok_or_else(|| ParseError::new(INFO, "no configuration"))?.to_owned();
    let address =
        |name| fields(&text).find(|(key, _)| *key == name).and_then(|(_, value)| value.parse().ok());
    Ok(ServiceInfo { configuration, address: address("IP address"), router: address("Router") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_an_order_and_may_be_disabled_or_have_no_device() {
        let output = b"An asterisk (*) denotes that a network service is disabled.\n(1) Wi-Fi (home)\n\
            (Hardware Port: Wi-Fi, Device: en0)\n\n(*) Thunderbolt Bridge\n\
            (Hardware Port: Thunderbolt Bridge, Device: bridge0)\n\n(3) VPN\n(Hardware Port: a.b, Device: )\n\
            (4) Cable \r\n(Hardware Port: Thunderbolt 1, Device: en3)\r\n";
        let services = service_order(output).unwrap();
        let short: Vec<_> = services
            .iter()
            .map(|service| (service.name.as_str(), service.device.as_deref(), service.enabled))
            .collect();
        assert_eq!(
            short,
            [
                ("Wi-Fi (home)", Some("en0"), true),
                ("Thunderbolt Bridge", Some("bridge0"), false),
                ("VPN", None, true),
                // `networksetup` knows it by its blank.
                ("Cable ", Some("en3"), true)
            ]
        );
        assert!(service_order(b"").is_err());
        assert!(service_order(b"(Hardware Port: Wi-Fi, Device: en0)\n").is_err());
    }

    #[test]
    fn missing_service_address_parses_as_none() {
        let output =
            b"Manual Configuration\nIP address: 192.0.2.7\nSubnet mask: 255.255.255.252\nRouter: (null)\n";
        let info = info(output).unwrap();
        assert_eq!(info.configuration, "Manual");
        assert_eq!((info.address, info.router), (Some([192, 0, 2, 7].into()), None));
        assert!(super::info(b"You must be root").is_err());
    }
}
