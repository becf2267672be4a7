//! Random stories: scripts drawn from a seed, the same in every run. A story that violates an invariant is
//! printed as a script, to be kept under a name of its own.

/// Pseudo-random numbers, the same in every run.
struct StoryRng(u64);

impl StoryRng {
    /// A number from 0 to `bound`, exclusive.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    /// One of these.
    fn pick<'t>(&mut self, choices: &[&'t str]) -> &'t str {
        choices[self.below(choices.len())]
    }
}

const CHIPS: [&str; 4] = ["M3 Ultra", "M4 Max", "M4 Pro", "M2 Max"];
const NODES: [&str; 5] = ["a", "b", "c", "d", "e"];
const DEPLOYMENTS: [&str; 3] = ["chat", "code", "docs"];
const SPLITS: [&str; 6] = [
    "mode=auto ranks=",
    "mode=single ranks=",
    "mode=pipeline ranks=",
    "mode=tensor ranks=",
    "mode=pipeline ranks=2",
    "mode=tensor ranks=2",
];

const TIERS: [&str; 4] = [
    "tier top cluster priority=100 preemption=lower",
    "tier middle cluster priority=50 preemption=lower min-residency=60",
    "tier day cluster priority=10 hours=08:00-20:00",
    "tier kept cluster priority=5 residency=always",
];

/// The script of a seed.
pub fn story(seed: u64) -> String {
    let mut dice = StoryRng(seed);
    let mut lines = Vec::new();
    let nodes = &NODES[..2 + dice.below(NODES.len() - 1)];
    let disks = dice.below(2) == 0;
    for node in nodes {
        let memory = dice.pick(&["16Gi", "24Gi", "36Gi", "64Gi"]);
        let (rack, zone) = (dice.pick(&["one", "two"]), dice.pick(&["", " zone=east", " zone=west"]));
        // In half of the stories disks are unknown.
        let disk = if disks { dice.pick(&["", " disk=20Gi", " disk=30Gi", " disk=100Gi"]) } else { "" };
        lines.push(format!("node {node} \"Apple {}\" {memory} rack={rack}{zone}{disk}", dice.pick(&CHIPS)));
    }
    for (at, near) in nodes.iter().enumerate() {
        for far in &nodes[at + 1..] {
            if dice.below(3) > 0 {
                lines.push(format!(
                    "cable {near} {far} {}",
                    dice.pick(&["rdma", "rdma", "thunderbolt", "ethernet"])
                ));
            }
        }
    }
    lines.push("pool one rack=one".to_owned());
    lines.push("model small toy layer=1Gi".to_owned());
    lines.push("model large toy layers=20 layer=1Gi".to_owned());
    // Half of the stories have no tiers.
    let tiers: &[&str] = if dice.below(2) == 0 { &[""] } else { &["", "top", "middle", "day", "kept"] };
    lines.extend(TIERS.iter().filter(|_| tiers.len() > 1).map(|tier| (*tier).to_owned()));
    for name in DEPLOYMENTS {
        let (model, split) = (dice.pick(&["small", "small", "large"]), dice.pick(&SPLITS));
        let pools = dice.pick(&["", "", "", " pools=one"]);
        let tier = dice.pick(tiers);
        let replicas = 1 + dice.below(2);
        lines.push(format!("deploy {name} model={model} replicas={replicas} {split}{pools} tier={tier}"));
    }
    lines.push("settle".to_owned());
    for _ in 0..4 + dice.below(5) {
        for _ in 0..1 + dice.below(2) {
            lines.push(event(&mut dice, nodes, tiers));
        }
        if dice.below(3) == 0 {
            lines.push(format!("turn {}", dice.pick(&DEPLOYMENTS)));
            lines.push(event(&mut dice, nodes, tiers));
        }
        lines.push("settle".to_owned());
    }
    lines.join("\n")
}

fn event(dice: &mut StoryRng, nodes: &[&str], tiers: &[&str]) -> String {
    let (node, peer, name) = (dice.pick(nodes), dice.pick(nodes), dice.pick(&DEPLOYMENTS));
    match dice.below(17) {
        0 | 1 => format!("edit {name} context={}", dice.pick(&["4096", "8192", "16384"])),
        2 => format!("edit {name} {}", dice.pick(&SPLITS)),
        3 => format!("edit {name} pools={}", dice.pick(&["", "one"])),
        4 => format!("edit {name} model={}", dice.pick(&["small", "large"])),
        5 => format!("scale {name} {}", dice.below(4)),
        6 => format!("drain {node}"),
        7 => format!("cordon {node}"),
        8 => format!("uncordon {node}"),
        9 => format!("lose {node}"),
        10 => format!("back {node}"),
        11 => format!("clock {}", dice.pick(&["30s", "60s", "5m", "7h"])),
        12 => format!("refuse {node}"),
        13 => format!("release {node}"),
        14 => format!("skew {node} {}", dice.pick(&["1", "2"])),
        15 => format!("edit {name} tier={}", dice.pick(tiers)),
        _ if node != peer => format!("rdma {node} {}\nlabel {peer} rack=one", dice.pick(&["on", "off"])),
        _ => format!("not-ready {name} new\nready {name}"),
    }
}
