//! What replicas of one deployment have in common beside their nodes: domains in which everything fails together,
//! such as a zone, a rack or a UPS, which owners name by a label. And which replicas there are to be, since where
//! one too many stands decides which one goes.

use std::collections::{BTreeMap, BTreeSet};

use crate::snapshot::{Group, Key, Snapshot};
use crate::validate::ValidDeployment;

/// What fails together: the nodes of one label's value, or a node by itself that has no such label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Domain<'v> {
    Label(&'v str),
    Node(&'v str),
}

fn domain<'v>(view: &'v Snapshot, key: &str, node: &'v str) -> Domain<'v> {
    let label = view.nodes.get(node).and_then(|seen| seen.labels.get(key));
    label.map_or(Domain::Node(node), |value| Domain::Label(value))
}

/// The domains of a deployment's other replicas.
pub struct Spread<'v> {
    view: &'v Snapshot,
    key: &'v str,
    replicas: BTreeMap<i32, BTreeSet<Domain<'v>>>,
}

impl<'v> Spread<'v> {
    /// Around one replica, as if the groups for which `without` is true were gone.
    pub fn around(
        view: &'v Snapshot,
        want: &'v ValidDeployment,
        replica: i32,
        without: impl Fn(&Key) -> bool,
    ) -> Self {
        let key = want.topology_key.as_str();
        let others = view
            .groups_of(&want.namespace, &want.name)
            .filter(|(key, group)| group.replica != replica && !group.deleting && !without(key));
        let mut replicas: BTreeMap<i32, BTreeSet<Domain<'v>>> = BTreeMap::new();
        for (_, group) in others {
            let domains = group.nodes().map(|node| domain(view, key, node));
            replicas.entry(group.replica).or_default().extend(domains);
        }
        Self { view, key, replicas }
    }

    /// How many of the other replicas have a rank in a domain of one of these nodes.
    pub fn crowd<'n>(&self, nodes: impl Iterator<Item = &'n str>) -> usize {
        if self.replicas.is_empty() {
            return 0;
        }
        let own: BTreeSet<Domain<'_>> = nodes.map(|node| domain(self.view, self.key, node)).collect();
        self.replicas.values().filter(|domains| own.iter().any(|one| domains.contains(one))).count()
    }

    /// The labelled domains that these nodes have in common with other replicas, and these.
    pub fn shared<'n>(&self, nodes: impl Iterator<Item = &'n str>) -> (Vec<String>, Vec<i32>) {
        let own: BTreeSet<Domain<'_>> = nodes.map(|node| domain(self.view, self.key, node)).collect();
        let labelled = own.iter().filter_map(|one| match one {
            Domain::Label(value) => Some((one, *value)),
            Domain::Node(_) => None,
        });
        let (mut values, mut with) = (Vec::new(), BTreeSet::new());
        for (one, value) in labelled {
            let there = self.replicas.iter().filter(|(_, domains)| domains.contains(one));
            let before = with.len();
            with.extend(there.map(|(replica, _)| *replica));
            if with.len() > before {
                values.push(value.to_owned());
            }
        }
        (values, with.into_iter().collect())
    }
}

/// The replicas there are to be, by their indices, and those there are too many, in the order in which they go.
/// `groups` are the deployment's that are not being deleted.
///
/// Those that exist stay, and the lowest free indices come. Of too many those go first that do not answer, then
/// those that stand where most do. Who goes next is asked of what is left, so that somebody who begins anew in
/// the middle ends the same way.
pub fn counted(
    view: &Snapshot,
    groups: &[(&Key, &Group)],
    replicas: i32,
    key: &str,
) -> (BTreeSet<i32>, Vec<i32>) {
    let there: BTreeSet<i32> = groups.iter().map(|(_, group)| group.replica).collect();
    let count = usize::try_from(replicas).unwrap_or(0);
    if count == 0 {
        return (BTreeSet::new(), there.into_iter().collect());
    }
    if there.len() <= count {
        let free = (0..).filter(|index| !there.contains(index)).take(count - there.len());
        return (free.chain(there.iter().copied()).collect(), Vec::new());
    }
    let mut left = standing(view, groups, key);
    let mut surplus = Vec::new();
    while let Some(goes) = fullest(&left).filter(|_| left.len() > count) {
        left.remove(&goes);
        surplus.push(goes);
    }
    (left.into_keys().collect(), surplus)
}

/// A replica that exists.
struct Standing<'v> {
    answers: bool,
    nodes: BTreeSet<&'v str>,
    domains: BTreeSet<Domain<'v>>,
}

fn standing<'v>(view: &'v Snapshot, groups: &[(&Key, &'v Group)], key: &str) -> BTreeMap<i32, Standing<'v>> {
    let mut replicas: BTreeMap<i32, Standing<'v>> = BTreeMap::new();
    for (_, group) in groups {
        let new = Standing { answers: false, nodes: BTreeSet::new(), domains: BTreeSet::new() };
        let replica = replicas.entry(group.replica).or_insert(new);
        replica.answers |= group.ready;
        replica.nodes.extend(group.nodes());
        replica.domains.extend(group.nodes().map(|node| domain(view, key, node)));
    }
    replicas
}

/// The one that goes first.
fn fullest(replicas: &BTreeMap<i32, Standing<'_>>) -> Option<i32> {
    let rank = |(index, one): &(&i32, &Standing<'_>)| {
        let beside = replicas.values().filter(|other| !other.domains.is_disjoint(&one.domains)).count();
        let on = replicas.values().filter(|other| !other.nodes.is_disjoint(&one.nodes)).count();
        (!one.answers, beside, on, **index)
    };
    replicas.iter().max_by_key(rank).map(|(index, _)| *index)
}
