//! One look at the cluster in numbers: gauges that are filled once and handed out. Not where they come
//! from, and nothing that outlives the look, so what is gone from the cluster is gone from the metrics.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prometheus::core::{Collector as _, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, Opts};

/// A gauge with `N` labels. A sample with any other number of them does not compile.
pub struct Family<const N: usize> {
    /// Its name.
    pub name: &'static str,
    /// What it measures.
    pub help: &'static str,
    /// Its labels.
    pub labels: [&'static str; N],
}

impl<const N: usize> Family<N> {
    /// What registers it.
    pub fn desc(&self) -> Result<Desc, prometheus::Error> {
        let labels = self.labels.iter().map(|label| (*label).to_owned()).collect();
        Desc::new(self.name.to_owned(), self.help.to_owned(), labels, Default::default())
    }
}

/// Gauges of one look.
#[derive(Default)]
pub struct Sheet(BTreeMap<&'static str, GaugeVec>);

impl Sheet {
    /// Writes a value down; the newer one wins.
    pub fn set<const N: usize>(&mut self, family: &Family<N>, labels: [&str; N], value: f64) {
        if !self.0.contains_key(family.name) {
            // Names and labels are constants, and `desc` has judged them when they were registered.
            let Ok(gauge) = GaugeVec::new(Opts::new(family.name, family.help), &family.labels) else {
                return;
            };
            self.0.insert(family.name, gauge);
        }
        let gauge = self.0.get(family.name);
        if let Some(Ok(gauge)) = gauge.map(|gauge| gauge.get_metric_with_label_values(&labels)) {
            gauge.set(value);
        }
    }

    /// 1 under the word that holds, 0 under the others.
    pub fn set_state<const N: usize>(
        &mut self,
        family: &Family<N>,
        labels: impl Fn(&'static str) -> [String; N],
        states: &[&'static str],
        now: &str,
    ) {
        for state in states {
            let labels = labels(state);
            self.set(family, labels.each_ref().map(String::as_str), f64::from(u8::from(*state == now)));
        }
    }

    /// 1 while a condition holds, else 0, with its reason; `labels` is told that.
    pub fn set_condition<'a, const N: usize>(
        &mut self,
        family: &Family<N>,
        condition: Option<&'a Condition>,
        labels: impl FnOnce(&'a str) -> [&'a str; N],
    ) {
        let reason = condition.map_or("Unknown", |condition| condition.reason.as_str());
        let holds = condition.is_some_and(|condition| condition.status == "True");
        self.set(family, labels(reason), f64::from(u8::from(holds)));
    }

    /// What a registry hands out.
    pub fn families(&self) -> Vec<MetricFamily> {
        self.0.values().flat_map(|gauge| gauge.collect()).collect()
    }
}

/// Bytes and counts as metrics have them; beyond 2^53 the last digits are rounded.
pub fn number(value: u64) -> f64 {
    value as f64
}
