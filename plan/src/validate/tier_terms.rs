//! A tier's terms for a deployment: pools, a strategy, a priority, and its own nodes or the shared ones.

use std::collections::BTreeSet;
use std::sync::Arc;

use russet_crds::{LocalReference, TierMode};

use super::invalid;
use crate::note::Note;
use crate::pool::EligibleNodes;
use crate::snapshot::Snapshot;
use crate::tier_info::TierInfo;
use crate::valid_deployment::IdleReason;

/// A deployment's tier, if it names one, and its workload group.
pub struct TierTerms<'a> {
    tier: Option<(&'a str, &'a TierInfo)>,
    group: Option<&'a str>,
}

impl<'a> TierTerms<'a> {
    /// Looks the tier up; the notes say what is wrong with the names.
    pub fn for_deployment(
        view: &'a Snapshot,
        namespace: &str,
        tier_ref: Option<&'a LocalReference>,
        group: Option<&'a str>,
    ) -> Result<Self, Vec<Note>> {
        let Some(LocalReference { name }) = tier_ref else {
            return match group {
                Some(_) => Err(invalid_group("is one of a tier's; name the tier in spec.tierRef")),
                None => Ok(Self { tier: None, group: None }),
            };
        };
        let Some(tier) = view.tiers.get(name) else {
            let known = view.tiers.keys().cloned().collect();
            return Err(vec![Note::TierUnknown { tier: name.clone(), known }]);
        };
        if !tier.namespaces.is_empty() && !tier.namespaces.iter().any(|allowed| allowed == namespace) {
            let (tier, namespace) = (name.clone(), namespace.to_owned());
            return Err(vec![Note::TierNotAllowed { tier, namespace }]);
        }
        if let Some(wrong) = &tier.schedule_error {
            return Err(vec![wrong.clone()]);
        }
        let there_is = || tier.groups.join(", ");
        match (tier.mode, group) {
            (TierMode::Unknown, _) => {
                return Err(vec![Note::Newer { field: format!("Tier {name} spec.mode") }]);
            }
            (TierMode::Cluster, Some(_)) => {
                return Err(invalid_group(&format!(
                    "Tier {name} is a Cluster tier and has none; leave it out"
                )));
            }
            (TierMode::Dedicated, None) => {
                return Err(invalid_group(&format!(
                    "Tier {name} is Dedicated; name one of its groups: {}",
                    there_is()
                )));
            }
            (TierMode::Dedicated, Some(group)) if !tier.groups.iter().any(|known| known == group) => {
                return Err(invalid_group(&format!(
                    "Tier {name} has no group {group:?}; it has {}",
                    there_is()
                )));
            }
            (TierMode::Dedicated, Some(_)) | (TierMode::Cluster, None) => {}
        }
        Ok(Self { tier: Some((name, tier)), group })
    }

    /// The pools of the tier, or those that the deployment names itself.
    pub fn pools<'p>(&self, own: &'p [LocalReference]) -> &'p [LocalReference]
    where
        'a: 'p,
    {
        self.tier.map_or(own, |(_, tier)| &tier.pools)
    }

    /// The strategy of a deployment that names none.
    pub fn strategy(&self) -> Option<&'a LocalReference> {
        self.tier.and_then(|(_, tier)| tier.strategy.as_ref())
    }

    /// Its name.
    pub fn name(&self) -> Option<String> {
        self.tier.map(|(name, _)| name.to_owned())
    }

    /// Whether its replicas may preempt those of lower priority.
    pub fn preempts(&self) -> bool {
        self.tier.is_some_and(|(_, tier)| tier.preempts)
    }

    /// Whether its tier names the namespaces that may use it, and so may preempt replicas of others.
    pub fn preempts_everywhere(&self) -> bool {
        self.tier.is_some_and(|(_, tier)| !tier.namespaces.is_empty())
    }

    /// Why no replica should run now.
    pub fn idle_reason(&self) -> Option<IdleReason> {
        let (name, tier) = self.tier.filter(|(_, tier)| !tier.active_hours.open)?;
        Some(IdleReason::Schedule { tier: name.to_owned(), opens: tier.active_hours.until })
    }

    /// Priority of its replicas.
    pub fn priority(&self) -> i32 {
        self.tier.map_or(0, |(_, tier)| tier.priority)
    }

    /// The tier and the workload group whose nodes it shares.
    pub fn dedicated_group(&self) -> Option<(String, String)> {
        let ((tier, _), group) = (self.tier?, self.group?);
        Some((tier.to_owned(), group.to_owned()))
    }

    /// Eligible nodes reduced to its own, or to shared ones.
    pub fn restrict(&self, view: &Snapshot, area: EligibleNodes) -> EligibleNodes {
        let owners = view.node_owners();
        let own = self.dedicated_group();
        if owners.is_empty() && own.is_none() {
            return area;
        }
        let nodes: BTreeSet<String> = view
            .nodes
            .keys()
            .filter(|node| area.contains(node) && owners.get(node.as_str()) == own.as_ref())
            .cloned()
            .collect();
        EligibleNodes { nodes: Some(Arc::new(nodes)), ..area }
    }
}

fn invalid_group(why: &str) -> Vec<Note> {
    vec![invalid("spec.workloadGroup".to_owned(), why.to_owned())]
}
