//! The requested split: mode, ranks, tensorSize and layersPerRank combined to one value for the planner, or
//! their errors.

use russet_crds::{BackendChoice, Sharding, ShardingMode};
use russet_model::partition::Partition;
use russet_model::shape::ModelShape;

use super::{MAX_RANKS, RequestedSplit, invalid};
use crate::fabric::MAX_MESH_RANKS;
use crate::note::Note;
use crate::valid_deployment::{HybridConstraints, Split};

const MODE: &str = "mode";
const RANKS: &str = "ranks";
const SIZE: &str = "tensorSize";
const LAYERS: &str = "layersPerRank";
const BACKEND: &str = "backend";

/// Parses the split; the result is only valid if no note was added.
pub fn split(asked: &RequestedSplit, shape: &ModelShape, notes: &mut Vec<Note>) -> Split {
    let Sharding { mode, ranks, tensor_size, layers_per_rank, backend, kv: _, min_bits_per_second: _ } =
        &asked.sharding;
    let before = notes.len();
    if !shape.task.is_generate() {
        return one_rank(asked, notes);
    }
    if let Some(ranks) = *ranks
        && (ranks == 0 || ranks > MAX_RANKS)
    {
        notes.push(invalid(asked.field(RANKS), format!("{ranks} ranks cannot be; use 1 to {MAX_RANKS}")));
    }
    if let Some(layers) = layers_per_rank {
        if layers.len() > MAX_RANKS as usize {
            let problem = format!("{} ranks are too many; name at most {MAX_RANKS}", layers.len());
            notes.push(invalid(asked.field(LAYERS), problem));
        }
        let together = shape.kept_together();
        let partition = Partition::new(layers.clone(), shape.layers);
        if let Err(error) = partition.and_then(|partition| partition.keeps_together(&together)) {
            notes.push(invalid(asked.field(LAYERS), error.to_string()));
        }
    }
    if *backend == BackendChoice::Unknown {
        notes.push(Note::Newer { field: asked.field(BACKEND) });
    }
    let rdma = matches!(backend, BackendChoice::Jaccl | BackendChoice::JacclRing);
    let cut = match mode {
        ShardingMode::Unknown => {
            notes.push(Note::Newer { field: asked.field(MODE) });
            return Split::Auto;
        }
        ShardingMode::Tensor | ShardingMode::Hybrid => true,
        ShardingMode::Auto => rdma || tensor_size.is_some_and(|size| size > 1),
        ShardingMode::Single | ShardingMode::Pipeline => {
            if tensor_size.is_some_and(|size| size != 1) {
                let problem =
                    format!("{mode:?} cuts no layer; leave tensorSize out, or use mode Tensor or Hybrid");
                notes.push(invalid(asked.field(SIZE), problem));
            }
            if rdma {
                let problem = format!(
                    "{backend:?} carries the sums of tensor groups, and mode {mode:?} has none; use Auto, or mode Tensor or Hybrid"
                );
                notes.push(invalid(asked.field(BACKEND), problem));
            }
            false
        }
    };
    // The numbers below are compared with each other; invalid ones were reported above.
    if notes.len() > before {
        return Split::Auto;
    }
    let layers = layers_per_rank.as_deref();
    if cut { tensor(asked, layers, shape, notes) } else { pipeline(asked, *mode, layers, shape, notes) }
}

fn pipeline(
    asked: &RequestedSplit,
    mode: ShardingMode,
    layers: Option<&[u32]>,
    shape: &ModelShape,
    notes: &mut Vec<Note>,
) -> Split {
    let ranks = asked.sharding.ranks;
    let most = shape.max_stages();
    if let Some(ranks) = ranks.filter(|&ranks| ranks > most) {
        let problem = format!(
            "{ranks} ranks cannot share {} layers; every rank needs one{}, so ask for at most {most}",
            shape.layers,
            together(shape)
        );
        notes.push(invalid(asked.field(RANKS), problem));
    }
    if let (Some(ranks), Some(layers)) = (ranks, layers)
        && ranks as usize != layers.len()
    {
        let problem = format!("names {} ranks, ranks says {ranks}; make them equal", layers.len());
        notes.push(invalid(asked.field(LAYERS), problem));
    }
    let size = layers.map(|layers| layers.len() as u32).or(ranks);
    if let (ShardingMode::Single, Some(size)) = (mode, size)
        && size != 1
    {
        let problem = format!("Single runs on one rank, not {size}; leave ranks out or use Pipeline");
        notes.push(invalid(asked.field(MODE), problem));
    }
    match (size, layers, mode) {
        (Some(1), ..) | (None, _, ShardingMode::Single) => Split::Single,
        (Some(_), Some(layers), _) => Split::Layers(layers.to_vec()),
        (Some(ranks), None, _) => Split::Ranks(ranks),
        (None, _, ShardingMode::Pipeline) => Split::Pipeline,
        (None, ..) => Split::Auto,
    }
}

fn tensor(
    asked: &RequestedSplit,
    layers: Option<&[u32]>,
    shape: &ModelShape,
    notes: &mut Vec<Note>,
) -> Split {
    let Sharding { mode, ranks, tensor_size: size, backend, .. } = asked.sharding;
    let stages = layers.map(|layers| layers.len() as u32);
    let members = size.or(ranks.map(|ranks| ranks / stages.unwrap_or(1).max(1)));
    let members = members.filter(|_| size.is_some() || stages.is_some() || mode == ShardingMode::Tensor);
    if let Some(members) =
        members.filter(|&members| backend == BackendChoice::Jaccl && members > MAX_MESH_RANKS)
    {
        let problem = format!(
            "Jaccl joins at most {MAX_MESH_RANKS} ranks, and every stage has {members}; use JacclRing or Auto, or fewer ranks a stage"
        );
        notes.push(invalid(asked.field(BACKEND), problem));
    }
    let sizes = shape.tensor_sizes();
    let list = alternatives(&sizes);
    // Mode Tensor has one stage; Auto has several if the numbers say so.
    let single = match mode {
        ShardingMode::Tensor => true,
        ShardingMode::Hybrid => false,
        _ => match (ranks, size, stages) {
            (_, _, Some(stages)) => stages == 1,
            (Some(ranks), Some(size), None) => ranks == size,
            _ => true,
        },
    };
    if single {
        if stages.is_some_and(|stages| stages > 1) {
            let problem = "mode Tensor has one stage with every layer; leave it out, or use mode Hybrid for several stages";
            notes.push(invalid(asked.field(LAYERS), problem.to_owned()));
        }
        if let (Some(ranks), Some(size)) = (ranks, size)
            && ranks != size
        {
            let problem = format!(
                "{size} differs from the {ranks} of ranks, but in mode Tensor all ranks share every layer; make them equal, or use mode Hybrid"
            );
            notes.push(invalid(asked.field(SIZE), problem));
        }
        let field = if size.is_some() { SIZE } else { RANKS };
        let requested = size.or(ranks);
        match requested.map_or_else(|| indivisible_reason(&sizes, shape), |size| shape.why_indivisible(size))
        {
            Some(why) => notes.push(invalid(asked.field(field), format!("{why}; use {list}"))),
            None if requested == Some(1) => return Split::Single,
            None => {}
        }
        return Split::Tensor(requested);
    }
    if let Some(why) = size.and_then(|size| shape.why_indivisible(size)) {
        notes.push(invalid(asked.field(SIZE), format!("{why}; use {list}")));
    } else if size.is_none()
        && let Some(why) = indivisible_reason(&sizes, shape)
    {
        notes.push(invalid(asked.field(MODE), format!("{why}; use Pipeline")));
    }
    if size == Some(1) {
        return pipeline(asked, ShardingMode::Pipeline, layers, shape, notes);
    }
    let hybrid = HybridConstraints { stages, size, ranks, layers: layers.map(<[u32]>::to_vec) };
    if let Some(ranks) = ranks
        && notes.is_empty()
        && shapes(&hybrid, shape).is_empty()
    {
        let problem = match (stages, size) {
            (Some(stages), Some(size)) => format!(
                "{ranks} ranks are not {stages} stages of {size}; use {} ranks",
                stages.saturating_mul(size)
            ),
            (_, Some(size)) => format!(
                "{ranks} ranks do not make two or more stages of {size}, with a layer for each of {} at most{}; use a multiple of {size}",
                shape.max_stages(),
                together(shape)
            ),
            _ => format!(
                "{ranks} ranks do not make two or more stages of equal size, each of {list} ranks; use another number of ranks"
            ),
        };
        notes.push(invalid(asked.field(RANKS), problem));
    }
    Split::Hybrid(hybrid)
}

/// Every `(stages, size)` that satisfies the constraints, the fewest ranks first.
pub fn shapes(hybrid: &HybridConstraints, shape: &ModelShape) -> Vec<(u32, u32)> {
    let sizes = shape.tensor_sizes().into_iter().filter(|&size| size > 1);
    let pairs = sizes
        .flat_map(|size| (2..=shape.max_stages().min(MAX_RANKS / size)).map(move |stages| (stages, size)));
    let mut allowed: Vec<(u32, u32)> = pairs
        .filter(|&(stages, size)| {
            hybrid.stages.is_none_or(|required| required == stages)
                && hybrid.size.is_none_or(|required| required == size)
                && hybrid.ranks.is_none_or(|required| required == stages * size)
        })
        .collect();
    allowed.sort_by_key(|&(stages, size)| (stages * size, size));
    allowed
}

/// The split of a model that embeds or scores: one rank computes a text at once.
fn one_rank(asked: &RequestedSplit, notes: &mut Vec<Note>) -> Split {
    let Sharding { mode, ranks, tensor_size, layers_per_rank, .. } = &asked.sharding;
    let stages = layers_per_rank.as_ref().map(|layers| layers.len() as u32);
    let several = |count: &Option<u32>| count.filter(|&count| count != 1);
    let requested = [(RANKS, ranks), (SIZE, tensor_size), (LAYERS, &stages)]
        .into_iter()
        .find_map(|(field, count)| Some((field, several(count)?.to_string())));
    let split = match mode {
        ShardingMode::Auto | ShardingMode::Single => None,
        mode => Some((MODE, format!("{mode:?}"))),
    };
    if let Some((field, value)) = requested.or(split) {
        let why = "the model embeds or scores texts, which one rank computes whole; leave it out, or use mode Single";
        notes.push(invalid(asked.field(field), format!("it is {value}, but {why}")));
    }
    Split::Single
}

/// Which layers one rank holds together, for a sentence about the others; empty where none are.
fn together(shape: &ModelShape) -> String {
    let runs = shape.kept_together();
    let runs = runs.iter().map(|run| format!("{} to {}", run.start, run.end - 1)).collect::<Vec<_>>();
    match runs.is_empty() {
        true => String::new(),
        false => format!(", and layers {} share keys and values and stay together", runs.join(" and ")),
    }
}

/// Why the model cannot be sharded at all.
fn indivisible_reason(sizes: &[u32], shape: &ModelShape) -> Option<String> {
    if sizes.len() > 1 {
        return None;
    }
    shape.why_indivisible(2).or_else(|| Some("its layers cannot be cut".to_owned()))
}

/// `1, 2, 4 or 8`.
fn alternatives(sizes: &[u32]) -> String {
    let words: Vec<String> = sizes.iter().map(u32::to_string).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => words.concat(),
    }
}
