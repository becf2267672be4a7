//! The matrices that an adapter changes, from the names and shapes of its tensors.

use std::collections::BTreeMap;

use super::{AdapterKind, config::AdapterConfig};
use crate::{
    error::{Error, FileError, Unsupported},
    safetensors::{Entry, Headers, shorten},
};

/// What PEFT puts before the paths of a model's modules.
const PEFT_PREFIX: &str = "base_model.model.";

/// One of the two narrow matrices of a product, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Name of the tensor.
    pub tensor: String,
    /// Whether its last two dimensions are swapped where it is used.
    pub transposed: bool,
}

/// One matrix that an adapter changes, or one of each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterModule {
    /// The module's path in the model.
    pub path: String,
    /// `[inputs, rank]`, or `[experts, inputs, rank]`.
    pub a: Factor,
    /// `[rank, outputs]`, or `[experts, rank, outputs]`.
    pub b: Factor,
    /// Name of the tensor with the lengths of the rows, `[outputs]`: of DoRA.
    pub magnitude: Option<String>,
    /// What the product is multiplied by.
    pub scale: f32,
    /// Width of the product.
    pub rank: u64,
    /// Columns of the matrix.
    pub inputs: u64,
    /// Rows of the matrix.
    pub outputs: u64,
    /// How many experts there are; `None` where it is one matrix.
    pub experts: Option<u64>,
}

/// A part of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    A,
    B,
    Magnitude,
}

/// Ends of the names of tensors: of mlx-lm, then of PEFT, whose factors are transposed.
const ENDS: &[(&str, Part, bool)] = &[
    (".lora_a", Part::A, false),
    (".lora_b", Part::B, false),
    (".m", Part::Magnitude, false),
    (".lora_A.weight", Part::A, true),
    (".lora_B.weight", Part::B, true),
    (".lora_magnitude_vector", Part::Magnitude, true),
    (".lora_magnitude_vector.weight", Part::Magnitude, true),
];

#[derive(Default)]
struct Found<'a> {
    a: Option<(&'a str, &'a Entry, bool)>,
    b: Option<(&'a str, &'a Entry, bool)>,
    magnitude: Option<(&'a str, &'a Entry)>,
}

/// The modules of all tensors.
pub(super) fn modules(config: &AdapterConfig, headers: &Headers) -> Result<Vec<AdapterModule>, Error> {
    let mut found = BTreeMap::<&str, Found<'_>>::new();
    for (name, entry) in headers.iter() {
        let part = ENDS
            .iter()
            .find_map(|(end, part, transposed)| Some((name.strip_suffix(end)?, part, *transposed)));
        let Some((path, part, transposed)) = part else {
            let reason = "it is no part of a LoRA or DoRA of a matrix";
            let remedy = "use an adapter of matrices alone, or fuse it into the model";
            return Err(Unsupported::tensor(&shorten(name), reason, remedy).into());
        };
        if !entry.dtype.is_float() {
            let reason = format!("element type {} is not supported in an adapter", entry.dtype);
            return Err(Unsupported::tensor(&shorten(name), reason, "save it in 16 or 32 bits").into());
        }
        let path = path.strip_prefix(PEFT_PREFIX).unwrap_or(path);
        let found = found.entry(path).or_default();
        let twice = match part {
            Part::A => found.a.replace((name, entry, transposed)).is_some(),
            Part::B => found.b.replace((name, entry, transposed)).is_some(),
            Part::Magnitude => found.magnitude.replace((name, entry)).is_some(),
        };
        if twice {
            return Err(disagree(path, "has a part of its adapter twice"));
        }
    }
    if found.is_empty() {
        let problem = "it changes nothing: its files have no tensor".to_owned();
        return Err(FileError::BadAdapter { problem }.into());
    }
    found.into_iter().map(|(path, found)| module(config, path, &found)).collect()
}

fn module(config: &AdapterConfig, path: &str, found: &Found<'_>) -> Result<AdapterModule, Error> {
    let (Some((a, a_entry, a_turned)), Some((b, b_entry, b_turned))) = (found.a, found.b) else {
        return Err(disagree(path, "has one of the two matrices of its adapter only"));
    };
    let shapes = || format!("its adapter's matrices are {:?} and {:?}", a_entry.shape, b_entry.shape);
    let (experts, a_shape, b_shape, turned) = match (&a_entry.shape[..], &b_entry.shape[..]) {
        (&[a0, a1], &[b0, b1]) => (None, [a0, a1], [b0, b1], [a_turned, b_turned]),
        // mlx-lm's of experts are transposed, unlike its others.
        (&[count, a0, a1], &[other, b0, b1]) if count == other && !a_turned && !b_turned => {
            (Some(count), [a0, a1], [b0, b1], [true, true])
        }
        _ => return Err(disagree(path, &format!("cannot be changed: {}", shapes()))),
    };
    let of = |[rows, columns]: [u64; 2], turned: bool| if turned { (columns, rows) } else { (rows, columns) };
    let ((inputs, rank), (other, outputs)) = (of(a_shape, turned[0]), of(b_shape, turned[1]));
    if rank != other || [rank, inputs, outputs].contains(&0) {
        return Err(disagree(path, &format!("cannot be changed: {}", shapes())));
    }
    let magnitude = match (config.kind(), found.magnitude) {
        (AdapterKind::Dora, Some((name, entry))) if entry.elements() == outputs && experts.is_none() => {
            Some(name.to_owned())
        }
        (AdapterKind::Dora, found) => {
            let found = found.map_or_else(|| "no".to_owned(), |(_, entry)| format!("{:?}", entry.shape));
            return Err(disagree(path, &format!("has {outputs} rows, and {found} lengths of them for DoRA")));
        }
        (_, Some(_)) => return Err(disagree(path, "has lengths of its rows, and its adapter is no DoRA")),
        (_, None) => None,
    };
    Ok(AdapterModule {
        path: path.to_owned(),
        a: Factor { tensor: a.to_owned(), transposed: turned[0] },
        b: Factor { tensor: b.to_owned(), transposed: turned[1] },
        magnitude,
        scale: config.scale(path, rank),
        rank,
        inputs,
        outputs,
        experts,
    })
}

fn disagree(path: &str, how: &str) -> Error {
    Error::File(FileError::BadAdapter { problem: format!("module {} {how}", shorten(path)) })
}
