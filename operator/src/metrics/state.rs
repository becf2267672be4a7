//! The collector of what the caches hold, computed when somebody looks and kept by nobody.

use jiff::Timestamp;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use super::sheet::{Family, Sheet};
use super::{copies, deployments, groups, nodes, tiers};
use crate::watched::Watched;

const LEADER: Family<0> = Family {
    name: "russet_operator_leader",
    help: "1 while this operator acts, 0 while it stands by or waits for its caches.",
    labels: [],
};

/// The cluster in numbers.
pub struct State {
    watched: Watched,
    descs: Vec<Desc>,
}

impl State {
    /// A collector over what is watched.
    pub fn new(watched: Watched) -> Result<Self, prometheus::Error> {
        let mut descs = vec![LEADER.desc()?];
        for more in
            [deployments::descs()?, groups::descs()?, nodes::descs()?, tiers::descs()?, copies::descs()?]
        {
            descs.extend(more);
        }
        Ok(Self { watched, descs })
    }
}

impl Collector for State {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut sheet = Sheet::default();
        let stores = self.watched.stores();
        sheet.set(&LEADER, [], f64::from(u8::from(stores.is_some())));
        if let Some(stores) = stores {
            let deployments = stores.deployments.state();
            deployments::write(&mut sheet, &deployments);
            groups::write(&mut sheet, &stores.groups.state());
            nodes::write(&mut sheet, &stores, Timestamp::now());
            tiers::write(&mut sheet, &stores.pools.state(), &stores.tiers.state());
            copies::write(&mut sheet, &stores.copies.state());
        }
        sheet.families()
    }
}
