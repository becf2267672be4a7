//! One rank on one node.

use russet_crds::Backend;

use super::{Candidate, Rank, Seat};
use crate::fit::Fit;
use crate::note::Note;

/// Every node that holds the whole model, the best first, and the numbers of those that do not.
///
/// The tightest fit wins, so that large machines stay free for large models; before that counts
/// whether a replica of the same deployment is there already.
pub fn candidates(fit: &Fit<'_>, seats: &[Seat<'_>]) -> (Vec<Candidate>, Vec<Note>) {
    let need = fit.whole();
    let mut found = Vec::new();
    let mut notes = Vec::new();
    for seat in seats {
        match seat.free.checked_sub(need.total()) {
            Some(left) => {
                let node = seat.node.to_owned();
                let rank = Rank { node, layers: fit.layers(), need, left, rdma_devices: Vec::new() };
                found.push(Candidate {
                    ranks: vec![rank],
                    siblings: seat.siblings,
                    tensor_size: 1,
                    backend: Backend::None,
                    why_backend: None,
                });
            }
            None => notes.push(Note::TooSmall {
                node: seat.node.to_owned(),
                what: match fit.draft() {
                    None => "the whole model".to_owned(),
                    Some(draft) => format!("the whole model beside the draft model {}", draft.model),
                },
                needed: need.total(),
                free: seat.free,
                limit: seat.limit,
            }),
        }
    }
    found.sort_by(|a, b| {
        (a.siblings, a.left(), &a.ranks[0].node).cmp(&(b.siblings, b.left(), &b.ranks[0].node))
    });
    (found, notes)
}
