//! One rank on one node.

use russet_crds::Backend;

use super::{NodeSlot, RankAssignment, SplitCandidate};
use crate::memory_model::MemoryModel;
use crate::note::Note;

/// Every node that holds the whole model, the best first, and the numbers of those that do not.
///
/// The tightest fit is best, so that large machines stay free for large models; nodes without a replica of
/// the same deployment come first.
pub fn candidates(fit: &MemoryModel<'_>, slots: &[NodeSlot<'_>]) -> (Vec<SplitCandidate>, Vec<Note>) {
    let need = fit.whole_model();
    let mut found = Vec::new();
    let mut notes = Vec::new();
    for slot in slots {
        match slot.free.checked_sub(need.total()) {
            Some(left) => {
                let node = slot.node.to_owned();
                let rank = RankAssignment {
                    node,
                    layers: fit.layers(),
                    memory: need,
                    free_after: left,
                    rdma_devices: Vec::new(),
                };
                found.push(SplitCandidate {
                    ranks: vec![rank],
                    siblings: slot.siblings,
                    tensor_size: 1,
                    backend: Backend::None,
                    backend_reason: None,
                });
            }
            None => notes.push(Note::TooSmall {
                node: slot.node.to_owned(),
                what: {
                    let adapters = fit.adapter_overhead().beside();
                    match fit.draft() {
                        None => format!("the whole model{adapters}"),
                        Some(draft) => {
                            format!("the whole model beside the draft model {}{adapters}", draft.model)
                        }
                    }
                },
                needed: need.total(),
                free: slot.free,
                limit: slot.limit,
            }),
        }
    }
    found.sort_by(|a, b| {
        (a.siblings, a.min_free_after(), &a.ranks[0].node).cmp(&(
            b.siblings,
            b.min_free_after(),
            &b.ranks[0].node,
        ))
    });
    (found, notes)
}
