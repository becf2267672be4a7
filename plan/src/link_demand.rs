//! What the links between the nodes of a group must be. Not which links there are (`fabric`).

use russet_crds::FabricKind;

/// A link requirement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkDemand {
    /// Minimum kind.
    pub kind: FabricKind,
    /// Bits per second that both ends must report; 0 for no minimum.
    pub bits: u64,
}

impl LinkDemand {
    /// The combination of two requirements.
    pub fn and(self, other: LinkDemand) -> LinkDemand {
        LinkDemand { kind: self.kind.max(other.kind), bits: self.bits.max(other.bits) }
    }
}
