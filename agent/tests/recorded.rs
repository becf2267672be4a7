//! Parses every output in the folder of recorded ones, or expects a stated error. They are outputs of Macs
//! that people posted and are not part of this repository: `RUSSET_RECORDED` names the folder. Without it
//! nothing is tested, and each test prints so.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use russet_agent::fabric;
use russet_agent::macos::thunderbolt::{Bus, Plug, buses, cables};
use russet_agent::macos::{
    ParseError, load, memory, network, overview, panic, ports, power, rdma, services, system,
};

/// Parses an output; returns a text for the log.
type ToolParser = fn(&[u8]) -> Result<String, ParseError>;

fn debug_text<T: Debug>(found: Result<T, ParseError>) -> Result<String, ParseError> {
    found.map(|found| format!("{found:?}"))
}

/// Parsers by the prefix of file names; the prefix of a file's kind is left out.
const PARSERS: &[(&str, ToolParser)] = &[
    ("thunderbolt-", |output| debug_text(buses(output))),
    ("networksetup-listallhardwareports-", |output| debug_text(ports::hardware_ports(output))),
    ("networksetup-listnetworkserviceorder-", |output| debug_text(services::service_order(output))),
    ("networksetup-getinfo-", |output| debug_text(services::info(output))),
    ("bridge-preferences-", |output| debug_text(network::bridge_members(output))),
    ("netstat-rn-", |output| debug_text(network::default_routes(output))),
    ("ifconfig-", |output| debug_text(network::interfaces(output))),
    ("rdma_ctl-status-", |output| debug_text(rdma::is_enabled(output))),
    ("ibv_devices-", |output| debug_text(rdma::devices(output))),
    ("ibv_devinfo-", |output| debug_text(rdma::device_infos(output))),
    ("sphardware-", |output| debug_text(overview::overview(output))),
    ("spdisplays-", |output| debug_text(overview::overview(output))),
    ("sysctl-", |output| debug_text(system::Sysctls::read(output))),
    ("sw_vers-", |output| debug_text(system::version(output))),
    ("macmon-", |output| debug_text(load::load(output))),
    ("powermetrics-", |output| debug_text(power::power(output))),
    ("vm_stat-", |output| debug_text(memory::available(output))),
    ("memory_pressure-", |output| debug_text(memory::pressure(output))),
    ("panic-", |output| debug_text(panic::panic(output))),
];

/// Files with an expected error, and words of it.
const REFUSED: &[(&str, &str)] = &[
    // system_profiler without -json, which is not used.
    ("thunderbolt-m1-pro-mbp-tb4-idle.txt", "no JSON"),
    ("thunderbolt-m4-pro-mini-tb5-studio-peer-rdma-service.txt", "no JSON"),
    ("thunderbolt-mac-mini-tb5-idle.txt", "no JSON"),
    ("thunderbolt-mbp-tb5-idle-no-blank-lines.txt", "no JSON"),
    ("thunderbolt-mbp-two-mini-peers-40g.txt", "no JSON"),
    ("thunderbolt-tb4-idle-device-name-ios-receptacles-1-2-4.txt", "no JSON"),
    ("spdisplays-m1-pro-text-three-displays.txt", "no JSON"),
    // Cut from a larger output when posted, with a comma too many.
    ("sphardware-m4-air-excerpt-as-posted.txt", "no JSON"),
    // Documentation, with remarks in it.
    ("macmon-readme-2026-06-transition-example.jsonc", "no JSON"),
    ("macmon-readme-v0.5-example.jsonc", "no JSON"),
    ("macmon-readme-v0.7-example.jsonc", "no JSON"),
    ("macmon-readme-v0.8.1-example.jsonc", "no JSON"),
    // Printed with -n: values without names.
    ("sysctl-n-m3-ultra-512gb-memsize-brand.txt", "no line \"name: value\""),
];

/// Files that are not outputs of a macOS tool, and why they are not parsed here.
const ELSEWHERE: &[(&str, &str)] = &[
    ("SOURCES.md", "says where the others come from"),
    (
        "hostfile-",
        "MLX's own configuration, whose matrices engine/src/jaccl.rs and plan/tests/cabling.rs read",
    ),
    ("jaccl-devices-matrix-", "read by engine/src/jaccl.rs"),
    ("mlx-distributed_config-", "words of MLX's own set-up tool, which nobody runs"),
];

/// The parser of files with this name.
fn parser(name: &str) -> Option<ToolParser> {
    let kind =
        ["modelled-", "anonymised-"].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    PARSERS.iter().find(|(prefix, _)| kind.starts_with(prefix)).map(|(_, reader)| *reader)
}

/// Names of all files, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn folder() -> Option<PathBuf> {
    russet_tests::provided::path("RUSSET_RECORDED")
}

fn read(name: &str) -> Option<Vec<u8>> {
    let path = folder()?.join(name);
    Some(std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

fn read_buses(name: &str) -> Option<Vec<Bus>> {
    Some(buses(&read(name)?).unwrap())
}

#[test]
fn recorded_tool_outputs_parse_or_fail_for_stated_reasons() {
    let Some(folder) = folder() else { return };
    let (mut read_well, mut refused) = (0, 0);
    for name in &names(&folder) {
        if let Some((_, why)) = ELSEWHERE.iter().find(|(prefix, _)| name.starts_with(prefix)) {
            eprintln!("{name}: not read here: {why}");
            continue;
        }
        let reader = parser(name).unwrap_or_else(|| panic!("nobody reads {name}"));
        let reason = REFUSED.iter().find(|(refused, _)| refused == name).map(|(_, reason)| reason);
        match (reader(&read(name).unwrap()), reason) {
            (Ok(found), None) => {
                eprintln!("{name}: {found}");
                read_well += 1;
            }
            (Err(error), Some(reason)) => {
                assert!(error.to_string().contains(reason), "{name}: {error}");
                eprintln!("{name}: refused: {error}");
                refused += 1;
            }
            (Ok(found), Some(_)) => panic!("{name} was to be refused, and was read: {found}"),
            (Err(error), None) => panic!("{name}: {error}"),
        }
    }
    eprintln!("{read_well} outputs read, {refused} refused");
    assert_eq!(refused, REFUSED.len(), "each that is to be refused is there");
}

/// Truncated or damaged outputs are parsed or refused, without a panic.
#[test]
fn damaged_tool_output_never_panics_its_parser() {
    let Some(folder) = folder() else { return };
    let (mut tried, mut refused) = (0, 0);
    for name in &names(&folder) {
        let (Some(reader), Some(whole)) = (parser(name), read(name)) else { continue };
        let mut attempt = |output: &[u8]| {
            tried += 1;
            refused += u32::from(reader(output).is_err());
        };
        for place in (0..whole.len()).step_by(whole.len().div_ceil(300).max(1)) {
            attempt(&whole[..place]);
            attempt(&whole[place..]);
            for byte in [0, b':', b'"', b'9', b'\n', 0xff] {
                let mut damaged = whole.clone();
                damaged[place] = byte;
                attempt(&damaged);
            }
        }
    }
    eprintln!("{tried} damaged outputs, {refused} refused");
    assert!(refused > 0 && refused < tried, "{refused} of {tried} refused");
}

#[test]
fn machines_on_one_cable_see_each_other() {
    for (left, right, bits, rdma) in [
        (
            "thunderbolt-m5-max-mbp-a-tb5-mac-peer-and-tb5-hub.json",
            "thunderbolt-m5-max-mbp-b-tb5-mac-peer-and-tb3-nvme.json",
            80_000_000_000,
            // RDMA is enabled on the second Mac only, so only the first Mac is offered it.
            [Some(true), Some(false)],
        ),
        (
            "thunderbolt-m3-ultra-studio-tb5-mbp-peer-and-drive.json",
            "thunderbolt-m5-max-mbp-tb5-one-studio-peer.json",
            80_000_000_000,
            [Some(true), Some(false)],
        ),
    ] {
        let Some((left, right)) = read_buses(left).zip(read_buses(right)) else { return };
        let found = cables(&[&left, &right]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].bits_per_second, Some(bits));
        assert!(!found[0].is_loop && !found[0].is_one_sided, "{found:?}");
        let offers =
            |buses: &[Bus]| buses.iter().flat_map(|bus| &bus.peers).find_map(|peer| peer.offers_rdma);
        assert_eq!([offers(&left), offers(&right)], rdma);
    }
}

#[test]
fn mac_behind_a_dock_is_found_and_the_dock_named() {
    let Some(found) = read_buses("thunderbolt-m3-ultra-studio-two-links-one-through-dock.json") else {
        return;
    };
    let peers: Vec<_> =
        found.iter().flat_map(|bus| bus.peers.iter().map(move |peer| (bus.receptacle, peer))).collect();
    assert_eq!(peers.len(), 2);
    assert_eq!(
        (peers[0].0, peers[0].1.through.len(), peers[0].1.bits_per_second),
        (Some(6), 0, Some(80_000_000_000))
    );
    assert_eq!((peers[1].0, &peers[1].1.through[..]), (Some(3), &["ThunderBay Flex 8".to_owned()][..]));
    assert_eq!(peers[1].1.bits_per_second, Some(40_000_000_000));
    assert!(peers.iter().all(|(_, peer)| peer.model == "Mac16,5"));
    let idle = found
        .iter()
        .filter(|bus| matches!(bus.plug, Plug::Idle { max_bits_per_second: Some(120_000_000_000) }));
    assert_eq!(idle.count(), 3);
}

#[test]
fn ports_are_interfaces_by_name_and_never_by_number() {
    for (file, expected) in [
        ("networksetup-listallhardwareports-m5-max-mbp.txt", &[(1, "en1"), (2, "en6"), (3, "en2")][..]),
        (
            "networksetup-listallhardwareports-m3-ultra-studio-trimmed.txt",
            &[(1, "en2"), (2, "en3"), (3, "en4"), (4, "en5"), (5, "en6"), (6, "en7")],
        ),
    ] {
        let Some(output) = read(file) else { return };
        let ports = ports::hardware_ports(&output).unwrap();
        let found: Vec<_> =
            ports.iter().filter_map(|port| Some((port.receptacle()?, port.device.as_str()))).collect();
        assert_eq!(found, expected, "{file}");
    }
}

#[test]
fn rdma_device_is_active_with_cable_and_both_switches_on() {
    for (file, active) in [
        ("ibv_devinfo-m5-max-three-ports-all-down.txt", &[][..]),
        ("ibv_devinfo-m4-pro-mini-abridged-whitespace-collapsed.txt", &["en2", "en3", "en4"]),
        ("ibv_devinfo-m3-ultra-one-active-abridged.txt", &["en3"]),
        ("ibv_devinfo-grep-two-active-three-node-mesh.txt", &["en3", "en4"]),
        ("modelled-ibv_devinfo-six-ports-rdma_en7-active.txt", &["en7"]),
    ] {
        let Some(output) = read(file) else { return };
        let devices = rdma::device_infos(&output).unwrap();
        let found: Vec<_> =
            devices.iter().filter(|device| device.is_active).map(rdma::RdmaDevice::interface).collect();
        assert_eq!(found, active, "{file}");
    }
    for (file, addresses) in [
        ("modelled-ibv_devinfo-v-with-ipv4-mapped-gid.txt", 1),
        ("modelled-ibv_devinfo-v-without-ipv4-mapped-gid.txt", 0),
    ] {
        let Some(output) = read(file) else { return };
        assert_eq!(
            rdma::device_infos(&output).unwrap()[0].addresses.as_ref().map(Vec::len),
            Some(addresses),
            "{file}"
        );
    }
    for (file, count) in [
        ("ibv_devices-m3-ultra-six-ports-spaces.txt", 6),
        ("ibv_devices-m4-pro-mini-guid-masked-by-poster.txt", 3),
        ("ibv_devices-tb4-mac-rdma-enabled-but-empty.txt", 0),
        ("ibv_devices-rdma-disabled-header-only.txt", 0),
    ] {
        let Some(output) = read(file) else { return };
        assert_eq!(rdma::devices(&output).unwrap().len(), count, "{file}");
    }
}

#[test]
fn gpu_memory_panics_are_recognised_in_truncated_reports() {
    for (file, place, task) in [
        ("panic-iogpumemory-m4-mini-macos-26.4-25E246-excerpt.txt", "IOGPUMemory.cpp:550", None),
        ("panic-iogpumemory-t6041-macos-15-24G517-line-492-excerpt.txt", "IOGPUMemory.cpp:492", None),
        ("panic-iogpumemory-m3-max-macos-26.3.1-key-lines.txt", "IOGPUMemory.cpp:550", Some("python3.13")),
        ("panic-iogpumemory-m4-max-panicked-task-and-kext.txt", "IOGPUMemory.cpp:550", Some("python3")),
        ("panic-iogpugroupmemory-m3-ultra-macos-26.4.1.txt", "IOGPUGroupMemory.cpp:323", None),
    ] {
        let Some(output) = read(file) else { return };
        let found = panic::panic(&output).unwrap();
        assert_eq!((found.location.as_str(), found.task.as_deref()), (place, task), "{file}");
        assert!(found.is_gpu_memory(), "{file}");
    }
}

#[test]
fn recorded_machines_match_their_tool_output() {
    for (file, chip, cores, gib) in [
        ("sysctl-m2-max-macos-26.6.2.txt", "Apple M2 Max", 12, 64),
        ("sysctl-m5-macbook.txt", "Apple M5", 10, 16),
        ("sysctl-m2-pro-with-swap-and-unknown-oid.txt", "Apple M2 Pro", 12, 16),
        ("sysctl-m5-pro-mac17-9.txt", "Mac17,9", 0, 48),
    ] {
        let Some(output) = read(file) else { return };
        let machine = russet_agent::hardware::macos::machine(&output, b"").unwrap();
        let expected = (Some(chip), cores, gib << 30);
        assert_eq!((machine.chip.as_deref(), machine.cores, machine.memory), expected, "{file}");
    }
    for (file, expected) in [
        ("sw_vers-macos-14.2.1.txt", "macOS 14.2.1 (23C71)"),
        ("sw_vers-macos-26.5.txt", "macOS 26.5 (25F71)"),
    ] {
        let Some(output) = read(file) else { return };
        assert_eq!(russet_agent::hardware::macos::os(&output), expected, "{file}");
    }
    for (file, pages) in [
        ("vm_stat-mini-32gb.txt", 100_509 + 840_387 + 25_780 + 26_929),
        ("vm_stat-m3-ultra-512gb-excerpt.txt", 9_563_156_u64 + 11_287_075 + 133_882 + 89_568),
    ] {
        let Some(output) = read(file) else { return };
        assert_eq!(memory::available(&output), Ok(pages * 16384), "{file}");
    }
    for (file, chip, cores, gpu_cores) in [
        ("sphardware-m2-ultra-studio-four-part-processors.json", "Apple M2 Ultra", Some(24), None),
        ("sphardware-m5-max-mbp-four-part-processors.json", "Apple M5 Max", Some(18), None),
        ("sphardware-and-displays-m2-pro-mbp-compact-excerpt.json", "Apple M2 Pro", Some(12), Some(19)),
        ("spdisplays-m3-max-no-displays.json", "Apple M3 Max", None, Some(40)),
    ] {
        let Some(output) = read(file) else { return };
        let found = overview::overview(&output).unwrap();
        assert_eq!(
            (found.chip.as_deref(), found.cores, found.gpu_cores),
            (Some(chip), cores, gpu_cores),
            "{file}"
        );
    }
}

#[test]
fn machine_load_is_read_under_old_and_new_field_names() {
    for (file, gpu) in [
        ("macmon-pipe-v0.6-two-lines-no-timestamp.jsonl", 0.01348789),
        ("macmon-pipe-v0.6-timestamp-16gb.jsonl", 0.013633215799927711),
        ("macmon-pipe-v0.7-cpu_usage_pct-16gb-heavy-swap.jsonl", 0.00957),
    ] {
        let Some(output) = read(file) else { return };
        assert_eq!(load::load(&output).unwrap().gpu, Some(gpu), "{file}");
    }
    for (file, watts) in [
        ("macmon-pipe-v0.6-timestamp-16gb.jsonl", 10.4955415725708),
        ("macmon-pipe-v0.6-two-lines-no-timestamp.jsonl", 10.272432),
        ("macmon-pipe-v0.7-cpu_usage_pct-16gb-heavy-swap.jsonl", 35.68),
        ("macmon-pipe-v0.8-transition-m1-max-old-and-new-fields.json", 18.952476501464844),
    ] {
        let Some(output) = read(file) else { return };
        assert_eq!(load::load(&output).unwrap().watts, Some(watts), "{file}");
    }
    for (file, milliwatts, pressure) in [
        ("powermetrics-m2-pro-gpu_power-macos-26.3.txt", Some(4.0), None),
        ("powermetrics-m3-ultra-trimmed.plist", Some(476.674), Some("Nominal")),
        ("powermetrics-soc-power-trimmed.plist", Some(169.958), None),
        ("powermetrics-thermal-m4-max-trimmed.plist", None, Some("Nominal")),
        ("powermetrics-thermal-text-nominal.txt", None, Some("Nominal")),
    ] {
        let Some(output) = read(file) else { return };
        let found = power::power(&output).unwrap();
        assert_eq!(
            (found.gpu_watts.map(|watts| watts * 1e3), found.thermal_pressure.as_deref()),
            (milliwatts, pressure),
            "{file}"
        );
    }
}

#[test]
fn a_cable_without_rdma_says_which_end_has_it_disabled() {
    // Both ends of one cable: RDMA is disabled on the first Mac and enabled on the second.
    let files =
        ("networksetup-listallhardwareports-m5-max-mbp.txt", "ibv_devinfo-m5-max-three-ports-all-down.txt");
    let Some((hardware, devices)) = read(files.0).zip(read(files.1)) else { return };
    let hardware_ports = ports::hardware_ports(&hardware).unwrap();
    for (file, enabled, devices, reason) in [
        ("thunderbolt-m5-max-mbp-a-tb5-mac-peer-and-tb5-hub.json", false, vec![], "RdmaDisabled"),
        (
            "thunderbolt-m5-max-mbp-b-tb5-mac-peer-and-tb3-nvme.json",
            true,
            rdma::device_infos(&devices).unwrap(),
            "RdmaDisabledThere",
        ),
    ] {
        let facts = fabric::PortFacts {
            machine: "MacBook Pro".to_owned(),
            buses: read_buses(file).unwrap(),
            hardware_ports: hardware_ports.clone(),
            interfaces: Vec::new(),
            rdma_enabled: Some(enabled),
            devices,
            default_routes: Vec::new(),
        };
        let found = fabric::ports(&facts);
        assert_eq!(
            found.iter().map(|port| port.interface.as_str()).collect::<Vec<_>>(),
            ["en1", "en6", "en2"]
        );
        let joined: Vec<_> = found.iter().filter(|port| !port.peers.is_empty()).collect();
        assert_eq!(joined.len(), 1, "{file}: {found:?}");
        assert_eq!(joined[0].reason.as_deref(), Some(reason), "{file}: {:?}", joined[0].message);
        let others = found.iter().filter(|port| port.peers.is_empty());
        let others: Vec<_> = others.filter_map(|port| port.reason.as_deref()).collect();
        assert!(
            others.len() == 2 && others.iter().all(|reason| ["NothingPlugged", "NoMachine"].contains(reason)),
            "{file}: {others:?}"
        );
    }
}
