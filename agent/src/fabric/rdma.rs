//! Whether RDMA can run over a port, as far as this end knows, and what to do if it cannot. Of a pair both ends have to
//! say yes; whether their builds of macOS are equal, and whether they see each other, the planner compares.

use std::net::Ipv4Addr;

use thiserror::Error;

use super::Told;
use crate::macos::thunderbolt::{Bus, Plug};

/// A cable as slow as Thunderbolt 4 brings JACCL down (ml-explore/mlx#4485).
const TOO_SLOW: u64 = 40_000_000_000;

/// Why a port has no RDMA. The text says what to do.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NoRdma {
    /// No cable.
    #[error("nothing is plugged in")]
    NothingPlugged,
    /// Something else than a Mac.
    #[error("no Mac is at the other end of the cable")]
    NoMac,
    /// macOS before 26.2.
    #[error("this macOS has no RDMA over Thunderbolt; update both machines to 26.2 or later")]
    NoSwitch,
    /// It was never enabled.
    #[error(
        "RDMA is disabled on this machine; start it in Recovery, open Terminal and run `rdma_ctl enable`"
    )]
    Disabled,
    /// Ports of Thunderbolt 4 have none.
    #[error("there is no RDMA device {0}; RDMA needs Thunderbolt 5 at both ends")]
    NoDevice(String),
    /// One port of a Mac Studio.
    #[error("{0} is the port of a Mac Studio beside Ethernet, which carries no RDMA; use another port")]
    BesideEthernet(String),
    /// Thunderbolt 4, or a dock, or a bad cable.
    #[error(
        "the cable runs at {0} Gb/s; RDMA needs Thunderbolt 5 (80 Gb/s): a certified cable, and no dock between"
    )]
    TooSlow(u64),
    /// The other machine has it disabled, mostly.
    #[error("{device} is {state} though a Mac is there; enable RDMA on the other machine too")]
    Down {
        /// The device.
        device: String,
        /// In the tool's words.
        state: String,
    },
    /// JACCL finds the other end by an IPv4 address of the port.
    #[error(
        "{0} has no IPv4 address of its own, by which MLX finds the other end; take it out of its bridge and give it one"
    )]
    NoAddress(String),
}

impl NoRdma {
    /// In one word, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NothingPlugged => "NothingPlugged",
            Self::NoMac => "NoMac",
            Self::NoSwitch => "RdmaNotInThisSystem",
            Self::Disabled => "RdmaDisabled",
            Self::NoDevice(_) => "NoRdmaDevice",
            Self::BesideEthernet(_) => "PortBesideEthernet",
            Self::TooSlow(_) => "LinkTooSlow",
            Self::Down { .. } => "RdmaPortDown",
            Self::NoAddress(_) => "NoPortAddress",
        }
    }
}

/// The device of this port, if it can be used. Of several reasons the one that is to be mended first.
pub(super) fn device(
    told: &Told,
    bus: &Bus,
    interface: &str,
    address: Option<Ipv4Addr>,
) -> Result<String, NoRdma> {
    if matches!(bus.plug, Plug::Idle { .. }) {
        return Err(NoRdma::NothingPlugged);
    }
    let peer = bus.peers.first().ok_or(NoRdma::NoMac)?;
    if !told.rdma_enabled.ok_or(NoRdma::NoSwitch)? {
        return Err(NoRdma::Disabled);
    }
    if told.machine == "Mac Studio" && interface == "en2" {
        return Err(NoRdma::BesideEthernet(interface.to_owned()));
    }
    if let Some(bits) = peer.bits_per_second.filter(|bits| *bits <= TOO_SLOW) {
        return Err(NoRdma::TooSlow(bits / 1_000_000_000));
    }
    let device = told.devices.iter().find(|device| device.interface() == interface);
    let device = device.ok_or_else(|| NoRdma::NoDevice(format!("rdma_{interface}")))?;
    if !device.is_active {
        return Err(NoRdma::Down { device: device.name.clone(), state: device.state.clone() });
    }
    address.ok_or_else(|| NoRdma::NoAddress(interface.to_owned()))?;
    Ok(device.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::{ports, tests::joined};

    /// What came of the joined port after a change.
    fn after(change: impl FnOnce(&mut Told)) -> Result<String, NoRdma> {
        let mut told = joined();
        change(&mut told);
        ports(&told).pop().unwrap().rdma
    }

    #[test]
    fn every_reason_is_told_with_what_to_do() {
        type Change = fn(&mut Told);
        let faults: [(&str, Change, &str); 9] = [
            (
                "NothingPlugged",
                |told| told.buses[0].plug = Plug::Idle { most: None },
                "nothing is plugged in",
            ),
            ("NoMac", |told| told.buses[0].peers.clear(), "no Mac is at the other end"),
            ("RdmaNotInThisSystem", |told| told.rdma_enabled = None, "update both machines to 26.2"),
            ("RdmaDisabled", |told| told.rdma_enabled = Some(false), "`rdma_ctl enable`"),
            ("NoRdmaDevice", |told| told.devices.clear(), "no RDMA device rdma_en3"),
            (
                "PortBesideEthernet",
                |told| told.hardware_ports[1].device = "en2".to_owned(),
                "use another port",
            ),
            (
                "LinkTooSlow",
                |told| told.buses[0].peers[0].bits_per_second = Some(TOO_SLOW),
                "runs at 40 Gb/s",
            ),
            (
                "RdmaPortDown",
                |told| {
                    told.devices[1].is_active = false;
                    told.devices[1].state = "PORT_DOWN (1)".to_owned();
                },
                "rdma_en3 is PORT_DOWN (1) though a Mac is there",
            ),
            ("NoPortAddress", |told| told.interfaces.clear(), "en3 has no IPv4 address of its own"),
        ];
        for (reason, change, words) in faults {
            let fault = after(change).unwrap_err();
            assert_eq!(fault.reason(), reason);
            assert!(fault.to_string().contains(words), "{reason}: {fault}");
        }
        assert_eq!(after(|_| ()), Ok("rdma_en3".to_owned()));
    }

    #[test]
    fn what_is_not_told_is_no_reason_and_the_port_matters_on_a_studio_alone() {
        assert!(after(|told| told.buses[0].peers[0].bits_per_second = None).is_ok());
        assert!(after(|told| told.buses[0].plug = Plug::Unknown).is_ok());
        let mini = after(|told| {
            told.machine = "Mac mini".to_owned();
            told.hardware_ports[1].device = "en2".to_owned();
            told.interfaces[0].name = "en2".to_owned();
            told.devices[0].is_active = true;
        });
        assert_eq!(mini, Ok("rdma_en2".to_owned()));
    }
}
