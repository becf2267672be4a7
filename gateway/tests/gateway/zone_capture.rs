//! Packets that leave: a gateway in a network of its own, with providers on addresses of the house and of the internet, random
//! policies and random faults. Not one packet of a request that stays at home goes there.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_crds::{ModelRoute, Zone};
use russet_gateway::routes::{DeploymentState, Provider, RoutingTable};
use russet_wire::event::FinishReason;
use rustix::net::{AddressFamily, RecvFlags, SocketType, eth, recv, socket, sockopt};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, ScriptStep, access_key, finished, limits, started, token};
use crate::mock_provider::{MockProvider, Reply, openai, openai_begun};

/// Requests with random policies.
const REQUESTS: usize = 10_000;
/// Requests at once.
const AT_ONCE: usize = 16;
/// Of the house, and of the internet: both on loopback's interface here.
pub const LAN: &str = "192.168.77.1";
pub const CLOUD: &str = "93.184.216.34";
/// Set where this program runs in a network of its own.
const APART: &str = "RUSSET_ZONE_CAPTURE";

#[test]
fn not_one_packet_of_ten_thousand_requests_leaves_its_zone() {
    apart("zone_capture::not_one_packet_of_ten_thousand_requests_leaves_its_zone", captured());
}

/// Runs this program with this test alone in a network of its own, and in it `inside`.
pub fn apart(test: &str, inside: impl Future<Output = ()>) {
    if std::env::var_os(APART).is_some() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(inside);
    }
    let mut apart = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        apart.arg("--map-root-user");
    }
    let network = format!(
        "ip link set lo up && ip addr add {LAN}/32 dev lo && ip addr add {CLOUD}/32 dev lo && exec \"$@\""
    );
    apart.args(["--net", "sh", "-c", &network, "sh"]);
    let probe = Command::new(apart.get_program()).args(apart.get_args()).arg("true").output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("skipped: network namespaces cannot be made here");
        return;
    }
    apart.arg(std::env::current_exe().unwrap());
    let run = apart.args(["--exact", test, "--nocapture"]).env(APART, "1").output().unwrap();
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
    said.lines().filter(|line| line.contains("packets to")).for_each(|line| println!("{line}"));
}

/// Packets on the wire to or from addresses that are not of loopback.
pub struct Capture {
    packets: Arc<Mutex<Vec<Packet>>>,
    stop: Arc<AtomicBool>,
    reader: Option<std::thread::JoinHandle<()>>,
}

#[derive(Clone)]
pub struct Packet {
    pub to: IpAddr,
    pub bytes: Vec<u8>,
}

impl Packet {
    /// Whether this text is in it.
    pub fn has(&self, text: &str) -> bool {
        self.bytes.windows(text.len()).any(|part| part == text.as_bytes())
    }
}

impl Capture {
    pub fn start() -> Self {
        let wire = socket(AddressFamily::PACKET, SocketType::RAW, Some(eth::ALL)).unwrap();
        sockopt::set_socket_recv_buffer_size(&wire, 64 << 20).unwrap();
        sockopt::set_socket_timeout(&wire, sockopt::Timeout::Recv, Some(Duration::from_millis(50))).unwrap();
        let (packets, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (kept, ended) = (packets.clone(), stop.clone());
        let reader = std::thread::spawn(move || {
            let mut buffer = vec![0_u8; 128 * 1024];
            while !ended.load(Ordering::Acquire) {
                let Ok((length, _)) = recv(&wire, buffer.as_mut_slice(), RecvFlags::empty()) else {
                    continue;
                };
                // Ethernet, then IPv4 with its addresses.
                let Some(addresses) = buffer.get(26..34).filter(|_| length >= 34 && buffer[12..14] == [8, 0])
                else {
                    continue;
                };
                let address = |bytes: &[u8]| IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let (from, to) = (address(&addresses[..4]), address(&addresses[4..]));
                if !from.is_loopback() || !to.is_loopback() {
                    kept.lock().unwrap().push(Packet { to, bytes: buffer[34..length].to_vec() });
                }
            }
        });
        Self { packets, stop, reader: Some(reader) }
    }

    pub fn packets(&self) -> Vec<Packet> {
        self.packets.lock().unwrap().clone()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// What a random reply does.
fn fault(number: u32) -> Reply {
    match number % 6 {
        0 => Reply::Status(503, None, "busy"),
        1 => Reply::Status(429, Some(("retry-after", "0")), ""),
        2 => Reply::Events(openai_begun(&["half"])),
        3 => Reply::Events(vec!["{".into()]),
        _ => Reply::Events(openai(&["whole"])),
    }
}

/// One policy, and how far it lets a request go.
struct Policy {
    spec: Value,
    key: Option<&'static str>,
    namespace: Option<&'static str>,
    header: Option<&'static str>,
    limit: Zone,
}

fn random_policy(random: &mut StdRng) -> Policy {
    // Most let a request go to the house, so that many do.
    const LABELS: [Option<&str>; 12] = [
        None,
        None,
        None,
        None,
        None,
        Some("Lan"),
        Some("Lan"),
        Some("Lan"),
        Some("Cloud"),
        Some("Local"),
        Some("lan"),
        Some(""),
    ];
    let mut label = || LABELS[random.random_range(0..LABELS.len())];
    let (key, namespace, header) = (label(), label(), label());
    let zones = [Zone::Local, Zone::Lan, Zone::Lan, Zone::Cloud];
    let route = zones[random.random_range(0..zones.len())];
    let rule = [None, Some(Zone::Local), Some(Zone::Lan), Some(Zone::Cloud)][random.random_range(0..4)];
    let limit = [key, namespace, header]
        .into_iter()
        .flatten()
        .map(Zone::of_label)
        .chain(rule)
        .fold(route, std::cmp::min);
    let mut targets = vec![
        json!({"deploymentRef": {"name": "m"}}),
        json!({"providerRef": {"name": "lan"}, "model": "x"}),
        json!({"providerRef": {"name": "cloud"}, "model": "x"}),
    ];
    for last in (1..targets.len()).rev() {
        targets.swap(last, random.random_range(0..=last));
    }
    if random.random_bool(0.5) {
        targets.retain(|target| target.get("deploymentRef").is_none());
    }
    let pick = ["InOrder", "Fastest", "Largest"][random.random_range(0..3)];
    let mut rules = Vec::new();
    if let Some(zone) = rule {
        rules.push(json!({"name": "r", "zone": zone, "targets": targets, "pick": pick}));
    }
    let mut spec = json!({
        "models": ["auto"], "zone": route, "targets": targets, "rules": rules, "pick": pick,
        "onUnavailable": "Fail", "deadlineSeconds": 1,
    });
    if random.random_bool(0.3) {
        spec["cache"] = json!({"ttlSeconds": 60});
    }
    if random.random_bool(0.3) {
        spec["maxWaitSeconds"] = json!(1);
    }
    Policy { spec, key, namespace, header, limit }
}

fn publish(lab: &GatewayLab, policies: &[(String, Policy)], providers: &[Provider]) {
    let aliases = policies.iter().flat_map(|(namespace, policy)| {
        let object = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute",
            "metadata": {"name": "auto", "namespace": namespace}, "spec": policy.spec,
        });
        let route: ModelRoute = serde_json::from_value(object).unwrap();
        RoutingTable::from_objects(&[], &[], &[route]).aliases
    });
    let aliases = aliases.collect();
    let zones = policies
        .iter()
        .filter_map(|(namespace, policy)| Some((namespace.clone(), policy.namespace?.to_owned())));
    let zones: BTreeMap<String, String> = zones.collect();
    lab.change(|table| {
        let engines = table.deployments.clone();
        table.aliases = aliases;
        table.namespace_zones = Some(zones);
        // Each policy has a namespace of its own, with the same objects.
        table.deployments = policies
            .iter()
            .flat_map(|(namespace, _)| engines.iter().take(1).map(move |one| (namespace, one)))
            .map(|(namespace, one)| russet_gateway::routes::Deployment {
                namespace: namespace.clone(),
                ..one.clone()
            })
            .collect();
        table.providers = policies
            .iter()
            .flat_map(|(namespace, _)| providers.iter().map(move |one| (namespace, one)))
            .map(|(namespace, one)| Provider { namespace: namespace.clone(), ..one.clone() })
            .collect();
    });
}

/// Texts of the requests that have arrived at a provider.
fn prompts(provider: &MockProvider) -> Vec<String> {
    let asked = provider.asked();
    asked
        .iter()
        .map(|asked| asked.body["messages"][0]["content"].as_str().unwrap_or_default().to_owned())
        .collect()
}

async fn captured() {
    let seed = 20_261_129;
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let lab = GatewayLab::start(limits()).await;
    let number = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let replies = number.clone();
    let lan = MockProvider::start_at(LAN, move |_| fault(replies.fetch_add(1, Ordering::Relaxed))).await;
    let cloud = MockProvider::start_at(CLOUD, |_| Reply::Status(500, None, "")).await;
    // The engine fails now and then, with an error of its own or as one that is full.
    let engine = lab.engine("a", move |_| match number.fetch_add(1, Ordering::Relaxed) % 4 {
        0 => vec![ScriptStep::Break(tonic::Code::Internal, "a bug")],
        1 => vec![ScriptStep::Break(tonic::Code::ResourceExhausted, "full")],
        _ => vec![started(), token("home"), finished(FinishReason::Stop)],
    });
    let mut cloud_object = cloud.object("cloud", Zone::Cloud);
    cloud_object.spec.endpoint = format!("https://{CLOUD}:{}/v1", cloud.address.port());
    let providers = [lan.object("lan", Zone::Lan), cloud_object];
    let capture = Capture::start();
    let (mut done, mut may_leave, mut refused) = (0, 0, 0);
    while done < REQUESTS {
        // What may reach the cloud is left out: of all the others not one packet may go there.
        let policies =
            std::iter::repeat_with(|| random_policy(&mut random)).filter(|one| one.limit < Zone::Cloud);
        let policies: Vec<(String, Policy)> =
            policies.take(100).enumerate().map(|(place, policy)| (format!("n{place}"), policy)).collect();
        let keys = policies.iter().map(|(namespace, policy)| {
            let mut key = access_key("k", namespace, |_| {});
            key.metadata.namespace = Some(namespace.clone());
            key.metadata.labels =
                policy.key.map(|zone| BTreeMap::from([("russet.dev/zone".into(), zone.into())]));
            key
        });
        lab.keys(&keys.collect::<Vec<_>>());
        let state = if random.random_bool(0.5) {
            DeploymentState::Ready
        } else {
            DeploymentState::Working("it loads".into())
        };
        let engines: &[_] = if state == DeploymentState::Ready { &[&engine] } else { &[] };
        lab.publish(&[("m", state, engines)]);
        publish(&lab, &policies, &providers);
        let sends = policies.iter().flat_map(|policy| std::iter::repeat_n(policy, 5)).enumerate();
        let calls = sends.map(|(place, (namespace, policy))| {
            let path = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"][place % 4];
            let text = format!("marker-{}-{}", policy.limit, done + place);
            let messages = json!([{"role": "user", "content": text}]);
            let body = match path {
                "/v1/responses" => json!({"model": "auto", "input": text, "stream": place % 3 == 0}),
                _ => {
                    json!({"model": "auto", "messages": messages, "max_tokens": 9, "stream": place % 3 == 0})
                }
            };
            let mut call = lab.client.post(lab.url(path)).bearer_auth(namespace).json(&body);
            if let Some(zone) = policy.header {
                call = call.header("x-russet-labels", format!("russet.dev/zone={zone}"));
            }
            call
        });
        let calls: Vec<_> = calls.collect();
        done += calls.len();
        may_leave += policies.iter().filter(|(_, policy)| policy.limit == Zone::Lan).count();
        let mut answers = futures::StreamExt::buffer_unordered(
            futures::stream::iter(calls.into_iter().map(async |call| {
                let response = call.send().await.unwrap();
                let status = response.status().as_u16();
                response.bytes().await.unwrap();
                status
            })),
            AT_ONCE,
        );
        while let Some(status) = futures::StreamExt::next(&mut answers).await {
            refused += usize::from(status == 403);
        }
    }
    // The wire shows what may leave, so it would show the rest.
    tokio::time::timeout(crate::harness::TEST_TIMEOUT, async {
        while !capture.packets().iter().any(|packet| packet.has("marker-Lan-")) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    let packets = capture.packets();
    let to =
        |address: &str| packets.iter().filter(|one| one.to == address.parse::<IpAddr>().unwrap()).count();
    println!(
        "{done} requests, {refused} refused, {} policies that allow Lan, {} packets to Lan, {} to Cloud",
        may_leave,
        to(LAN),
        to(CLOUD)
    );
    assert_eq!(to(CLOUD), 0, "not even a handshake");
    assert!(to(LAN) > 1000 && refused > 1000 && may_leave > 300, "the policies were not random");
    for packet in &packets {
        assert!(!packet.has("marker-Local-"), "a request left");
    }
    assert!(prompts(&lan).iter().all(|prompt| prompt.starts_with("marker-Lan-")), "{:?}", prompts(&lan));
    assert_eq!(cloud.asked().len(), 0);
}
