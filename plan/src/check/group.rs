//! Invariants of one new group: its layers, sizes, nodes, and the cables that it uses.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Backend, BackendChoice, FabricKind, GroupMember, GroupPlan, KvCacheType, Link, LinkKind};
use russet_model::divisibility::Sharing;
use russet_model::shape::{LayerGroup, ModelShape};
use russet_model::state::LayerState;

use super::Violation;
use crate::placement::Placement;
use crate::pool::{EligibleNodes, LinkDemand};
use crate::snapshot::{Availability, Snapshot};
use crate::valid_deployment::{Split, ValidDeployment};

/// Checks a plan.
pub fn check(
    view: &Snapshot,
    desired: &ValidDeployment,
    name: &str,
    plan: &GroupPlan,
    wrong: &mut Vec<Violation>,
) {
    let group = || name.to_owned();
    let layers: Vec<u32> = plan.members.iter().map(|member| member.layers).collect();
    let size = plan.tensor_size as usize;
    let ordered = plan.members.iter().enumerate().all(|(index, member)| member.rank == index as u32);
    let whole = size > 0 && layers.len().is_multiple_of(size);
    let equal = whole && layers.chunks(size).all(|stage| stage.iter().all(|count| *count == stage[0]));
    let total: u64 = layers.iter().step_by(size.max(1)).map(|&count| u64::from(count)).sum();
    let covered = total == u64::from(desired.shape.layers) && !layers.contains(&0) && !layers.is_empty();
    if !ordered || !equal || !covered {
        wrong.push(Violation::Layers { group: group(), layers, model: desired.shape.layers });
        return;
    }
    let stages: Vec<u32> = layers.iter().copied().step_by(size).collect();
    let asked = match &desired.split {
        Split::Auto => true,
        Split::Single => layers.len() == 1,
        Split::Pipeline => size == 1 && layers.len() >= 2,
        Split::Ranks(ranks) => size == 1 && layers.len() == *ranks as usize,
        Split::Layers(requested) => size == 1 && layers == *requested,
        Split::Tensor(requested) => {
            size > 1 && stages.len() == 1 && requested.is_none_or(|requested| requested as usize == size)
        }
        Split::Hybrid(requested) => {
            let fixed =
                [(requested.size, size), (requested.stages, stages.len()), (requested.ranks, layers.len())];
            size > 1
                && stages.len() > 1
                && fixed.iter().all(|(fixed, is)| fixed.is_none_or(|fixed| fixed as usize == *is))
                && requested.layers.as_ref().is_none_or(|requested| *requested == stages)
        }
    };
    if !asked {
        wrong.push(Violation::Split { group: group(), layers: layers.clone(), split: desired.split.clone() });
    }
    let shape = &desired.shape;
    // The last layers are on the first stage.
    let of_shape = layers_of(shape);
    let stage_of = |layer: usize| {
        let mut begins = stages.iter().scan(of_shape.len(), |begin, count| {
            *begin = begin.saturating_sub(*count as usize);
            Some(*begin)
        });
        begins.position(|begin| begin <= layer)
    };
    for (layer, shared) in of_shape.iter().enumerate() {
        if let Some(owner) = shared.shares_cache_of
            && (owner as usize) < layer
            && stage_of(layer) != stage_of(owner as usize)
        {
            wrong.push(Violation::SharedCache { group: group(), layer: layer as u32, owner });
        }
    }
    if size > 1 && !divides(shape, size) {
        wrong.push(Violation::Indivisible { group: group(), size: plan.tensor_size });
    }
    let draft_model = |plan: &GroupPlan| plan.draft_model_ref.as_ref().map(|draft| draft.name.clone());
    if draft_model(plan) != desired.draft.as_ref().map(|draft| draft.name.clone()) {
        wrong.push(Violation::Draft { group: group(), draft: draft_model(plan) });
    }
    if !plan.adapters.iter().eq(desired.adapters.iter().map(|deployed| &deployed.adapter)) {
        let names = plan.adapters.iter().map(|adapter| adapter.name.clone()).collect();
        wrong.push(Violation::Adapters { group: group(), adapters: names });
    }
    check_reservations(desired, name, plan, wrong);
    let mut seen = BTreeSet::new();
    let mut builds = BTreeSet::new();
    for member in &plan.members {
        if !seen.insert(&member.node_name) {
            wrong.push(Violation::NodeTwice { group: group(), node: member.node_name.clone() });
        }
        match view.nodes.get(&member.node_name) {
            Some(node) if node.availability == Availability::Open => {
                builds.insert(&node.engine_build);
                let is_missing = |option: &&str| !node.engine_options.iter().any(|known| known == option);
                for option in plan.options().filter(is_missing) {
                    let (group, node) = (group(), member.node_name.clone());
                    wrong.push(Violation::Option { group, node, option });
                }
                if size > 1 && !node.supports_tensor {
                    wrong.push(Violation::Indivisible { group: group(), size: plan.tensor_size });
                }
            }
            _ => wrong.push(Violation::NodeClosed { group: group(), node: member.node_name.clone() }),
        }
    }
    let areas = || desired.eligible_nodes.iter();
    if !areas().any(|area| within(view, area, &seen)) {
        let nodes = seen.iter().map(|node| (*node).clone()).collect();
        wrong.push(Violation::NodeEligibility { group: group(), nodes });
    }
    if builds.len() > 1 {
        wrong.push(Violation::Builds { group: group() });
    }
    if let Err(why) = check_backend(view, desired, plan) {
        wrong.push(Violation::Backend { group: group(), backend: plan.backend, why });
    }
}

/// Whether the ranks of `size` can share each unit. Counted here, and not asked of the shape, which is what planned it; a
/// shape that an older release reported has no units, only the numbers they follow from.
fn divides(shape: &ModelShape, size: usize) -> bool {
    let equal = |count: u32| count > 0 && (count as usize).is_multiple_of(size);
    if shape.shard_units.is_empty() {
        let group = shape.quantization_group_size.max(1);
        let counts = [
            shape.attention_heads,
            shape.key_value_heads,
            shape.intermediate_size,
            shape.attention_heads.saturating_mul(shape.head_dim) / group,
            shape.intermediate_size / group,
        ];
        return counts.into_iter().all(equal);
    }
    shape.shard_units.iter().all(|unit| match unit.sharing {
        Sharing::Equal | Sharing::Unknown => equal(unit.count),
        Sharing::Repeated => {
            equal(unit.count) || (unit.count > 0 && size.is_multiple_of(unit.count as usize))
        }
        Sharing::Uneven => unit.count as usize >= size,
    })
}

/// Whether a pool has all nodes, and every pair of them reports the links that the pool requires.
fn within(view: &Snapshot, area: &EligibleNodes, nodes: &BTreeSet<&String>) -> bool {
    let says = |node: &String, peer: &String, demand: LinkDemand| {
        view.nodes.get(node).is_some_and(|seen| {
            seen.links.iter().any(|link| {
                let kind = match demand.kind {
                    FabricKind::Any => true,
                    FabricKind::Thunderbolt => link.kind == LinkKind::Thunderbolt,
                    FabricKind::ThunderboltRdma => {
                        link.kind == LinkKind::Thunderbolt && link.rdma_device.is_some()
                    }
                    FabricKind::Unknown => false,
                };
                link.peer == *peer && kind && link.bits_per_second.unwrap_or(0) >= demand.bits
            })
        })
    };
    let mut pairs = nodes.iter().flat_map(|a| nodes.iter().map(move |b| (*a, *b))).filter(|(a, b)| a != b);
    nodes.iter().all(|node| area.nodes.as_ref().is_none_or(|all| all.contains(*node)))
        && area.demand.is_none_or(|demand| pairs.all(|(a, b)| says(a, b, demand)))
}

fn check_reservations(desired: &ValidDeployment, name: &str, plan: &GroupPlan, wrong: &mut Vec<Violation>) {
    let (shape, size) = (&desired.shape, plan.tensor_size as usize);
    let tokens = u128::from(match desired.capacity.kv_tokens {
        Some(tokens) => tokens,
        None => u64::from(desired.capacity.context_tokens) * u64::from(desired.capacity.max_sequences),
    });
    let layers = layers_of(shape);
    // Ranks among which keys and values are shared.
    let heads = shape
        .shard_units
        .iter()
        .filter(|unit| unit.sharing == Sharing::Repeated)
        .map(|unit| unit.count as usize)
        .min();
    let holders = heads.map_or(size, |heads| size.min(heads)).max(1) as u128;
    // Walk the layers from the end, as rank 0 holds the last ones.
    let mut rest: &[LayerGroup] = &layers;
    for stage in plan.members.chunks(size) {
        let (before, own) = rest.split_at(rest.len() - stage[0].layers as usize);
        rest = before;
        for member in stage {
            let (head, embeds) = (member.rank == 0, before.is_empty());
            let mut takes = 0_u128;
            for layer in own {
                let whole = layer.weight_bytes.min(layer.replicated_bytes);
                let keys = layer.kv_bytes.min(layer.weight_bytes - whole);
                takes += u128::from(whole)
                    + u128::from(layer.weight_bytes - whole - keys) / size as u128
                    + u128::from(keys) / holders;
                let state = state_bytes(desired, layer, tokens);
                let state = match layer.state.replicated {
                    true => state,
                    false if layer.state.per_token_bytes > 0 => state / holders,
                    false => state / size as u128,
                };
                takes = takes.saturating_add(state);
            }
            if head {
                takes += u128::from(shape.head_bytes);
            }
            if embeds || (head && shape.tied) {
                takes += u128::from(shape.embedding_bytes);
            }
            if embeds {
                takes += u128::from(shape.per_layer_input_bytes);
            }
            if let Some(draft) = desired.draft.as_ref().filter(|_| head) {
                takes += u128::from(draft.shape.total_bytes());
                takes += u128::from(draft.shape.kv_bytes_per_token()) * tokens;
            }
            takes += desired.adapters.iter().map(|adapter| u128::from(adapter.shape.bytes)).sum::<u128>();
            let headroom = takes * u128::from(desired.capacity.headroom_percent) / 100;
            let reserved = member.reserved_bytes();
            if u128::from(reserved) < takes + headroom || u128::from(member.overhead_bytes) < 64 << 20 {
                let (group, rank) = (name.to_owned(), member.rank);
                let takes = u64::try_from(takes).unwrap_or(u64::MAX);
                wrong.push(Violation::Reservation { group, rank, reserved, takes });
            }
        }
    }
}

/// Every layer by itself. Of headers that an older release read all keep keys and values of every token.
fn layers_of(shape: &ModelShape) -> Vec<LayerGroup> {
    let each = |group: &LayerGroup| vec![LayerGroup { count: 1, ..group.clone() }; group.count as usize];
    let count: u64 = shape.layer_groups.iter().map(|group| u64::from(group.count)).sum();
    if count == shape.layer_bytes.len() as u64 && count > 0 {
        return shape.layer_groups.iter().flat_map(each).collect();
    }
    let state = LayerState { per_token_bytes: shape.kv_bytes_per_token_per_layer, ..LayerState::default() };
    let layer = |&weight_bytes: &u64| LayerGroup {
        count: 1,
        weight_bytes,
        replicated_bytes: shape.replicated_layer_bytes,
        state,
        ..LayerGroup::default()
    };
    shape.layer_bytes.iter().map(layer).collect()
}

/// What a layer keeps of so many tokens, on all ranks of a tensor group together.
fn state_bytes(desired: &ValidDeployment, layer: &LayerGroup, tokens: u128) -> u128 {
    let sequences = u128::from(desired.capacity.max_sequences);
    let LayerState { per_token_bytes, window_tokens, fixed_bytes, replicated } = layer.state;
    let kept = match window_tokens {
        // A snapshot beside each sequence's own.
        Some(window) => 2 * tokens.min(u128::from(window) * sequences),
        None => tokens,
    };
    // A latent is kept as computed.
    let each = match per_token_bytes == desired.shape.kv_bytes_per_token_per_layer && !replicated {
        true => kv_bytes_per_token(desired),
        false => u128::from(per_token_bytes),
    };
    // A state beside its snapshot and the one of before a step with drafts.
    each.saturating_mul(kept).saturating_add(3 * u128::from(fixed_bytes) * sequences)
}

/// KV-cache bytes of a token in one layer: the values of each head, and a scale and a bias for each group of
/// them.
fn kv_bytes_per_token(desired: &ValidDeployment) -> u128 {
    let shape = &desired.shape;
    let (heads, width) = (2 * u128::from(shape.key_value_heads), u128::from(shape.head_dim));
    let computed = u128::from(shape.kv_bytes_per_token_per_layer);
    let group = if width.is_multiple_of(64) { 64 } else { 32 };
    let per_head = |bits: u128| width * bits / 8 + width / group * 2 * (computed / (heads * width).max(1));
    match desired.capacity.engine.kv_cache {
        KvCacheType::AsComputed | KvCacheType::Unknown => computed,
        KvCacheType::Int8 => heads * per_head(8),
        KvCacheType::Int4 => heads * per_head(4),
    }
}

/// Whether the backend is one that was requested, and its cables exist.
fn check_backend(view: &Snapshot, desired: &ValidDeployment, plan: &GroupPlan) -> Result<(), String> {
    let size = plan.tensor_size as usize;
    let named = plan.members.iter().any(|member| !member.rdma_devices.is_empty());
    let asked = match (size, plan.members.len(), plan.backend) {
        (1, 1, Backend::None) => true,
        (1, 2.., Backend::Ring) => true,
        (1, ..) => false,
        (_, _, Backend::Ring) => matches!(desired.backend, BackendChoice::Auto | BackendChoice::Ring),
        (_, _, Backend::Jaccl) => matches!(desired.backend, BackendChoice::Auto | BackendChoice::Jaccl),
        (_, _, Backend::JacclRing) => {
            matches!(desired.backend, BackendChoice::Auto | BackendChoice::JacclRing)
        }
        (_, _, Backend::None | Backend::Unknown) => false,
    };
    if !asked {
        return Err(format!("{:?} of {} ranks was asked for", desired.backend, plan.members.len()));
    }
    match plan.backend {
        Backend::Jaccl if size > 8 => return Err(format!("{size} ranks are too many for a mesh")),
        Backend::Jaccl | Backend::JacclRing => {}
        _ if named => return Err("devices are named for nothing".to_owned()),
        _ => return Ok(()),
    }
    for team in plan.members.chunks(size) {
        let mut wires = BTreeSet::new();
        for (a, member) in team.iter().enumerate() {
            if member.rdma_devices.len() != size {
                return Err(format!("rank {} names {} cells", member.rank, member.rdma_devices.len()));
            }
            for (b, peer) in team.iter().enumerate() {
                let neighbours = (a + 1) % size == b || (b + 1) % size == a;
                let connected = a != b && (plan.backend == Backend::Jaccl || neighbours);
                check_cell(view, (member, b), (peer, a), connected)?;
                if connected {
                    wires.insert(member.rdma_devices[b].len());
                }
            }
        }
        if wires.len() != 1 || wires.iter().any(|&count| count > 4) {
            return Err(format!("the members have {wires:?} wires"));
        }
    }
    Ok(())
}

type CableEnd<'a> = (&'a GroupMember, usize);

fn check_cell(view: &Snapshot, near: CableEnd<'_>, far: CableEnd<'_>, connected: bool) -> Result<(), String> {
    let ends = |end: CableEnd<'_>| end.0.rdma_devices.get(end.1).cloned().unwrap_or_default();
    let (own, other) = (ends(near), ends(far));
    let pair = format!("{} and {}", near.0.node_name, far.0.node_name);
    if own.is_empty() == connected || own.len() != other.len() {
        return Err(format!("{pair} name {own:?} and {other:?}"));
    }
    let link = |node: &str, peer: &str, device: &str| -> Option<Link> {
        let links = &view.nodes.get(node)?.links;
        let fits = |link: &&Link| {
            link.peer == peer
                && link.kind == LinkKind::Thunderbolt
                && link.rdma_device.as_deref() == Some(device)
        };
        links.iter().find(fits).cloned()
    };
    for (own, other) in own.iter().zip(&other) {
        let (near, far) = (&near.0.node_name, &far.0.node_name);
        let (Some(near), Some(far)) = (link(near, far, own), link(far, near, other)) else {
            return Err(format!("{own} and {other} are no cable of {pair}"));
        };
        let differ = |a: &Option<String>, b: &Option<String>| a.is_some() && b.is_some() && a != b;
        if differ(&near.address, &far.peer_address) || differ(&near.peer_address, &far.address) {
            return Err(format!("{own} and {other} are different cables of {pair}"));
        }
    }
    Ok(())
}

/// No RDMA port is used by two groups, not even while one of them is stopping.
pub fn check_ports(view: &Snapshot, placement: &Placement, wrong: &mut Vec<Violation>) {
    let existing = view.groups.values().map(|group| &group.plan);
    let mut uses: BTreeMap<(&str, &str), BTreeSet<usize>> = BTreeMap::new();
    for (index, plan) in existing.chain(placement.create.iter().map(|new| &new.plan)).enumerate() {
        for member in &plan.members {
            for device in member.rdma_devices.iter().flatten() {
                uses.entry((&member.node_name, device)).or_default().insert(index);
            }
        }
    }
    for ((node, device), groups) in uses {
        if groups.len() > 1 {
            wrong.push(Violation::PortTwice { node: node.to_owned(), device: device.to_owned() });
        }
    }
}
