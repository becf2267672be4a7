//! Which parts of a model's tensors an adapter changes.

use std::collections::{BTreeMap, HashMap};

use super::{Adapter, AdapterModule};
use crate::{
    error::Unsupported,
    safetensors::shorten,
    tensors::{Recipe, Role, Rows, Stored, Tensor, without_prefix},
};

/// What an adapter does to one tensor of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptedTensor {
    /// Which of the adapter's modules changes it.
    pub module: usize,
    /// The rows of that module that it is made of; `None` where it is all of them.
    pub rows: Option<Rows>,
}

/// An adapter and a model: what it does to each of its tensors, by name.
pub type Binding = HashMap<String, AdaptedTensor>;

impl Adapter {
    /// What it does to a model's tensors. Each of its modules has to be of the model and of the same shape.
    pub fn bind(&self, tensors: &[(Tensor, Stored)]) -> Result<Binding, Unsupported> {
        let by_path: BTreeMap<&str, usize> = self
            .modules
            .iter()
            .enumerate()
            .map(|(index, module)| (without_prefix(&module.path), index))
            .collect();
        let mut bound = Binding::new();
        let mut used = vec![false; self.modules.len()];
        let matrices = tensors.iter().map(|(tensor, _)| tensor).filter(|tensor| tensor.is_matrix);
        for tensor in matrices.filter(|tensor| matches!(tensor.role, Role::Layer(_))) {
            let of = |name: &str| {
                let path = without_prefix(name).strip_suffix(".weight")?;
                by_path.get(path).copied()
            };
            let source = match &tensor.sources[..] {
                [source] => of(source),
                _ => None,
            };
            let Some(module) = source.or_else(|| of(&tensor.name)) else { continue };
            let rows = match tensor.recipe {
                Recipe::AsIs | Recipe::Stack => None,
                Recipe::Rows(rows) if rows.dim == 0 && source.is_some() => Some(rows),
                // The model's own name of a part is another module than the one that is stored.
                Recipe::Rows(_) if source.is_none() => None,
                Recipe::Rows(_) | Recipe::HeadRows { .. } | Recipe::AddOne => {
                    return Err(not_adapted(&self.modules[module], "the engine takes this matrix apart"));
                }
            };
            self.modules[module].check_shape(tensor, rows)?;
            used[module] = true;
            bound.insert(tensor.name.clone(), AdaptedTensor { module, rows });
        }
        match used.iter().position(|used| !used) {
            Some(unused) => {
                Err(not_adapted(&self.modules[unused], "the model has no such matrix in a layer"))
            }
            None => Ok(bound),
        }
    }
}

impl AdapterModule {
    /// That it is of the shape that the tensor has, or the whole that the tensor has some rows of.
    fn check_shape(&self, tensor: &Tensor, rows: Option<Rows>) -> Result<(), Unsupported> {
        let mut shape = tensor.shape.clone();
        if let (Some(rows), Some(first)) = (rows, shape.first_mut()) {
            *first = rows.of;
        }
        let mut own: Vec<u64> = self.experts.into_iter().collect();
        own.extend([self.outputs, self.inputs]);
        if own == shape {
            return Ok(());
        }
        let reason = format!("the adapter is of a matrix {own:?}, and the model's is {shape:?}");
        let remedy = "use an adapter that was trained on this model";
        Err(Unsupported::tensor(&shorten(&self.path), reason, remedy))
    }
}

fn not_adapted(module: &AdapterModule, why: &str) -> Unsupported {
    let reason = format!("its adapter cannot be used: {why}");
    Unsupported::tensor(
        &shorten(&module.path),
        reason,
        "use an adapter that was trained on this model, or fuse it",
    )
}
