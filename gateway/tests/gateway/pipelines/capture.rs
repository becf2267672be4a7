//! Packets of runs: random Pipelines, keys and zones in a network of its own, with models and addresses of the house and of the
//! internet. Not one packet of a run that stays at home goes there.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_crds::Zone;

use super::*;
use crate::harness::access_key;
use crate::mock_provider::openai;
use crate::zone_capture::{CLOUD, Capture, LAN, apart};

/// Runs with random policies, and how many of them are there at once.
const RUNS: usize = 160;
const AT_ONCE: usize = 60;

#[test]
fn not_one_packet_of_a_run_leaves_its_zone() {
    apart("pipelines::capture::not_one_packet_of_a_run_leaves_its_zone", captured());
}

/// Keys by the zone of their label.
const KEYS: [(&str, Option<&str>); 4] =
    [("free", None), ("house", Some("Lan")), ("home", Some("Local")), ("odd", Some("lan"))];

/// A Pipeline of one or two steps that go beyond the cluster if they may, its key, and how far that is.
fn random_run(random: &mut StdRng, number: usize) -> (Value, &'static str, Zone) {
    let zones = [Zone::Local, Zone::Lan, Zone::Lan, Zone::Cloud];
    let zone = zones[random.random_range(0..zones.len())];
    let (key, label) = KEYS[random.random_range(0..KEYS.len())];
    let limit = label.map_or(zone, |label| zone.min(Zone::of_label(label)));
    let text = format!("marker-{limit}-{number}");
    let mut step = |name: &str| {
        let mut step = match random.random_range(0..5) {
            0 => json!({"http": {"endpointRef": {"name": "lan"}, "body": text}}),
            1 => json!({"http": {"endpointRef": {"name": "cloud"}, "body": text}}),
            2 => json!({"chat": {"model": "far", "prompt": text}}),
            3 => json!({"chat": {"model": "house", "prompt": text}}),
            _ => json!({"embed": {"model": "house", "input": text}}),
        };
        step["name"] = json!(name);
        step["retries"] = json!(0);
        if random.random_bool(0.3) {
            step["forEach"] = json!("$(parameters.values)");
        }
        step
    };
    let mut steps = vec![step("first")];
    if steps[0]["http"].is_null() {
        steps.push(step("second"));
    }
    let parameters = json!([{"name": "values", "default": "[1, 2]"}]);
    (json!({"zone": zone, "parameters": parameters, "steps": steps}), key, limit)
}

async fn captured() {
    let seed = 20_261_130;
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let lab = PipelineLab::start(answer, accept).await;
    let lan = MockProvider::start_at(LAN, |_| Reply::Events(openai(&["whole"]))).await;
    let cloud = MockProvider::start_at(CLOUD, |_| Reply::Status(500, None, "")).await;
    let endpoint = |scheme: &str, of: &MockProvider| format!("{scheme}://{}", of.address);
    for (name, zone, url) in
        [("lan", "Lan", endpoint("http", &lan)), ("cloud", "Cloud", endpoint("https", &cloud))]
    {
        lab.object("HTTPEndpoint", name, json!({"url": format!("{url}/hooks"), "zone": zone}));
        lab.object("ModelProvider", name, json!({"endpoint": format!("{url}/v1"), "zone": zone}));
    }
    for (name, providers) in [("house", &["lan"][..]), ("far", &["cloud", "lan"])] {
        let target = |provider: &&str| json!({"providerRef": {"name": provider}, "model": "x"});
        let targets: Vec<Value> = providers.iter().map(target).collect();
        lab.object("ModelRoute", name, json!({"models": [name], "zone": "Cloud", "targets": targets}));
    }
    for (name, label) in KEYS {
        let mut key = access_key(name, name, |_| {});
        key.metadata.labels = label.map(|zone| BTreeMap::from([("russet.dev/zone".into(), zone.into())]));
        key.metadata.resource_version = Some("2".to_owned());
        lab.objects.apply("accesskeys", serde_json::to_value(key).unwrap());
    }
    // It has no label, so it narrows nothing.
    lab.objects.apply("namespaces", json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "uid": "n", "resourceVersion": "2"},
    }));
    let capture = Capture::start();
    let (gateway, stop) = lab.gateway();
    let (mut stayed, mut left, mut failed) = (0, 0, 0);
    let mut number = 0;
    while number < RUNS {
        // What may reach the cloud is left out: of all the others not one packet may go there.
        let batch: Vec<(usize, Zone)> = std::iter::repeat_with(|| {
            number += 1;
            (number, random_run(&mut random, number))
        })
        .filter(|(_, (.., limit))| *limit < Zone::Cloud)
        .take(AT_ONCE)
        .map(|(number, (pipeline, key, limit))| {
            let name = format!("r{number}");
            lab.object("Pipeline", &name, pipeline);
            lab.run(&name, json!({"pipelineRef": {"name": name}, "keyRef": {"name": key}}));
            (number, limit)
        })
        .collect();
        for (number, limit) in batch {
            let name = format!("r{number}");
            let status = lab.status(&name, |status| status["finishedAt"].is_string()).await;
            let is_finished = ready(&status)["reason"] == "Finished";
            match limit {
                Zone::Local => {
                    assert!(!is_finished, "{name} stayed at home, where nothing is for it: {status}");
                    stayed += 1;
                }
                _ if is_finished => left += 1,
                _ => failed += 1,
            }
            lab.objects.delete("pipelineruns", &name);
            lab.objects.delete("pipelines", &name);
        }
    }
    stop.cancel();
    gateway.await.unwrap();
    // The wire shows what may leave, so it would show the rest.
    let shown = async {
        while !capture.packets().iter().any(|packet| packet.has("marker-Lan-")) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, shown).await.unwrap();
    let packets = capture.packets();
    let to = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        packets.iter().filter(|packet| packet.to == address).count()
    };
    println!(
        "{stayed} runs stayed, {left} left, {failed} failed on their way; {} packets to Lan, {} to Cloud",
        to(LAN),
        to(CLOUD)
    );
    assert_eq!(to(CLOUD), 0, "not even a handshake");
    assert!(stayed > 40 && left > 10 && failed > 10 && to(LAN) > 50, "the policies were not random");
    assert!(packets.iter().all(|packet| !packet.has("marker-Local-")), "a step left");
    assert!(!lan.asked().is_empty() && cloud.asked().is_empty());
}
