//! Adapters at work: which one each position of a batch passes, and what it adds to a matrix product. Sequences of several
//! adapters and of the model itself run in one batch; each adapter computes over the whole batch, and positions of others
//! keep what they had.

mod files;

use std::{cell::RefCell, collections::BTreeSet, rc::Rc};

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{gather_mm, select},
};

pub use files::AdapterFiles;

/// Which adapter each position of the running batch passes. The decoder selects before it runs its layers, which share it.
#[derive(Debug, Default)]
pub struct ActiveAdapters {
    selection: RefCell<Selection>,
}

#[derive(Debug, Default)]
enum Selection {
    /// No position passes an adapter.
    #[default]
    None,
    /// All pass this one.
    All(u32),
    /// Those pass each where the mask, `[positions]`, says so.
    Some(Vec<(u32, Array)>),
}

impl ActiveAdapters {
    /// Selects for a batch: the number of positions of each sequence, in order, and the number of its adapter, 0 for none.
    pub fn select(&self, sequences: impl Iterator<Item = (i32, u32)> + Clone) {
        // Of most batches: nothing is made.
        if sequences.clone().all(|(_, number)| number == 0) {
            self.selection.replace(Selection::None);
            return;
        }
        let sequences: Vec<(i32, u32)> = sequences.collect();
        let numbers: BTreeSet<u32> = sequences.iter().map(|(_, number)| *number).collect();
        let selection = match numbers.iter().copied().collect::<Vec<_>>()[..] {
            [one] => Selection::All(one),
            _ => Selection::Some(
                numbers
                    .into_iter()
                    .filter(|number| *number > 0)
                    .map(|number| {
                        let own = |(length, of): &(i32, u32)| vec![*of == number; *length as usize];
                        let mask: Vec<bool> = sequences.iter().flat_map(own).collect();
                        (number, Array::from_slice(&mask, &[mask.len() as i32]))
                    })
                    .collect(),
            ),
        };
        self.selection.replace(selection);
    }
}

/// What one adapter adds to one matrix, or to the matrix of each expert: this rank's part.
#[derive(Debug)]
pub struct LowRank {
    /// The adapter's number, from 1 on.
    pub number: u32,
    /// `[inputs, rank]`, or `[experts, inputs, rank]`.
    pub a: Array,
    /// `[rank, outputs]`, or `[experts, rank, outputs]`.
    pub b: Array,
    /// What the product is multiplied by, a number of the type of `b`.
    pub scale: Array,
    /// Of DoRA, what makes the rows as long as they were trained to be, `[outputs]`.
    pub row_scale: Option<Array>,
}

impl LowRank {
    /// `product`, which is the matrix's own for `x`, with what the adapter makes of it.
    fn change(&self, x: &Array, product: &Array) -> Result<Array, Exception> {
        let added = x.matmul(&self.a)?.matmul(&self.b)?;
        self.add(&added, x.dtype(), product)
    }

    /// The same of experts, `x` and `product` as [`crate::weights::Weight::gather`] has them.
    fn change_of_experts(
        &self,
        x: &Array,
        experts: &Array,
        is_sorted: bool,
        product: &Array,
    ) -> Result<Array, Exception> {
        let narrow = gather_mm(x, &self.a, None, experts, is_sorted)?;
        let added = gather_mm(&narrow, &self.b, None, experts, is_sorted)?;
        self.add(&added, x.dtype(), product)
    }

    fn add(&self, added: &Array, dtype: Dtype, product: &Array) -> Result<Array, Exception> {
        let sum = product.add(added.multiply(&self.scale)?.as_dtype(dtype)?)?;
        match &self.row_scale {
            None => Ok(sum),
            Some(scale) => sum.multiply(scale.as_dtype(dtype)?),
        }
    }
}

/// The adapters of one matrix; none of most, which is why they lie apart.
#[derive(Debug, Default)]
pub struct Adapted(Option<Box<Changes>>);

#[derive(Debug)]
struct Changes {
    active: Rc<ActiveAdapters>,
    each: Vec<LowRank>,
}

impl Adapted {
    /// These, of a rank whose decoder selects by `active`.
    pub fn new(active: Rc<ActiveAdapters>, changes: Vec<LowRank>) -> Self {
        Self((!changes.is_empty()).then(|| Box::new(Changes { active, each: changes })))
    }

    /// Whether no adapter ever changes the matrix.
    pub fn is_never(&self) -> bool {
        self.0.is_none()
    }

    /// The matrix's own product for `x`, `[1, positions, inputs]`, without a bias, with what the adapters of the positions
    /// make of it.
    pub fn apply(&self, x: &Array, product: Array) -> Result<Array, Exception> {
        let at = |mask: &Array| mask.reshape(&[1, -1, 1]);
        self.changed(product, at, |change, product| change.change(x, product))
    }

    /// The same of experts: `positions` are those of the rows of `x`, where these are sorted by experts.
    pub fn apply_to_experts(
        &self,
        x: &Array,
        experts: &Array,
        positions: Option<&Array>,
        product: Array,
    ) -> Result<Array, Exception> {
        let at = |mask: &Array| match positions {
            None => mask.reshape(&[1, -1, 1, 1, 1]),
            Some(positions) => mask.take_axis(positions, 0)?.reshape(&[-1, 1, 1]),
        };
        let is_sorted = positions.is_some();
        self.changed(product, at, |change, product| change.change_of_experts(x, experts, is_sorted, product))
    }

    /// `product` after every selected change; `at` gives a mask of positions the product's shape.
    fn changed(
        &self,
        mut product: Array,
        at: impl Fn(&Array) -> Result<Array, Exception>,
        change: impl Fn(&LowRank, &Array) -> Result<Array, Exception>,
    ) -> Result<Array, Exception> {
        let Some(changes) = &self.0 else { return Ok(product) };
        let own = |number: u32| changes.each.iter().find(move |change| change.number == number);
        match &*changes.active.selection.borrow() {
            Selection::None => {}
            Selection::All(number) => {
                if let Some(own) = own(*number) {
                    product = change(own, &product)?;
                }
            }
            Selection::Some(masks) => {
                for (number, mask) in masks {
                    if let Some(own) = own(*number) {
                        product = select(at(mask)?, change(own, &product)?, &product)?;
                    }
                }
            }
        }
        Ok(product)
    }
}
