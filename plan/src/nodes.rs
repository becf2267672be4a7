//! The machines of a view by name, with their cabling, which is computed once: on first use, and again only
//! after a machine has changed.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;

use crate::fabric::cabling::Cabling;
use crate::node_info::NodeInfo;

/// Machines; read and changed like the map it wraps.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    by_name: BTreeMap<String, NodeInfo>,
    cabling: OnceLock<Cabling>,
}

impl Nodes {
    /// The cables between them, regardless of use.
    pub fn cabling(&self) -> &Cabling {
        self.cabling.get_or_init(|| Cabling::from_nodes(&self.by_name))
    }
}

impl Deref for Nodes {
    type Target = BTreeMap<String, NodeInfo>;

    fn deref(&self) -> &BTreeMap<String, NodeInfo> {
        &self.by_name
    }
}

impl DerefMut for Nodes {
    fn deref_mut(&mut self) -> &mut BTreeMap<String, NodeInfo> {
        self.cabling.take();
        &mut self.by_name
    }
}

impl FromIterator<(String, NodeInfo)> for Nodes {
    fn from_iter<I: IntoIterator<Item = (String, NodeInfo)>>(nodes: I) -> Self {
        Self { by_name: nodes.into_iter().collect(), cabling: OnceLock::new() }
    }
}

impl PartialEq for Nodes {
    fn eq(&self, other: &Self) -> bool {
        self.by_name == other.by_name
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::{Link, LinkKind};

    use super::*;

    #[test]
    fn cables_are_looked_for_again_after_a_change() {
        let node = |peer: &str| {
            let link = Link {
                peer: peer.to_owned(),
                kind: LinkKind::Thunderbolt,
                rdma_device: Some("rdma_en3".to_owned()),
                ..Link::default()
            };
            NodeInfo { links: vec![link], ..NodeInfo::default() }
        };
        let mut nodes: Nodes = [("a", node("b")), ("b", node("a"))]
            .into_iter()
            .map(|(name, node)| (name.to_owned(), node))
            .collect();
        assert_eq!(nodes.cabling().between("b", "a").len(), 1);
        nodes.get_mut("a").unwrap().links.clear();
        assert!(nodes.cabling().between("b", "a").is_empty());
    }
}
