//! Snapshot of gauges, filled at each scrape and then dropped: series of deleted objects disappear. Not here:
//! where the values come from.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prometheus::core::Desc;
use prometheus::proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType};

/// A gauge with `N` labels. A sample with any other number of labels does not compile.
pub struct GaugeFamily<const N: usize> {
    /// Its name.
    pub name: &'static str,
    /// What it measures.
    pub help: &'static str,
    /// Its labels.
    pub labels: [&'static str; N],
}

impl<const N: usize> GaugeFamily<N> {
    /// Its descriptor, for registration.
    pub fn desc(&self) -> Result<Desc, prometheus::Error> {
        let labels = self.labels.iter().map(|label| (*label).to_owned()).collect();
        Desc::new(self.name.to_owned(), self.help.to_owned(), labels, Default::default())
    }
}

/// Gauges of one scrape. A `GaugeVec` would keep a copy of name, help and labels beside every value.
#[derive(Default)]
pub struct GaugeSnapshot(BTreeMap<&'static str, GaugeSamples>);

struct GaugeSamples {
    help: &'static str,
    labels: &'static [&'static str],
    /// Values by label values, in order.
    values: BTreeMap<Vec<Box<str>>, f64>,
}

impl GaugeSnapshot {
    /// Sets a value; the last one wins.
    pub fn set<const N: usize>(&mut self, family: &'static GaugeFamily<N>, labels: [&str; N], value: f64) {
        let GaugeFamily { name, help, labels: names } = family;
        let samples = self.0.entry(name);
        let samples =
            samples.or_insert_with(|| GaugeSamples { help, labels: names, values: BTreeMap::new() });
        samples.values.insert(labels.map(Box::from).into(), value);
    }

    /// 1 for the current state, 0 for the others.
    pub fn set_state<const N: usize>(
        &mut self,
        family: &'static GaugeFamily<N>,
        labels: impl Fn(&'static str) -> [String; N],
        states: &[&'static str],
        now: &str,
    ) {
        for state in states {
            let labels = labels(state);
            self.set(family, labels.each_ref().map(String::as_str), f64::from(u8::from(*state == now)));
        }
    }

    /// 1 if a condition is true, else 0, with its reason; `labels` adds the reason to the labels.
    pub fn set_condition<'a, const N: usize>(
        &mut self,
        family: &'static GaugeFamily<N>,
        condition: Option<&'a Condition>,
        labels: impl FnOnce(&'a str) -> [&'a str; N],
    ) {
        let reason = condition.map_or("Unknown", |condition| condition.reason.as_str());
        let holds = condition.is_some_and(|condition| condition.status == "True");
        self.set(family, labels(reason), f64::from(u8::from(holds)));
    }

    /// The metric families for a registry.
    pub fn families(self) -> Vec<MetricFamily> {
        self.0.into_iter().map(|(name, samples)| samples.family(name)).collect()
    }
}

impl GaugeSamples {
    fn family(self, name: &str) -> MetricFamily {
        let Self { help, labels, values } = self;
        let metrics = values.into_iter().map(|(values, value)| {
            let pairs = labels.iter().zip(values).map(|(name, value)| {
                let mut pair = LabelPair::default();
                pair.set_name((*name).to_owned());
                pair.set_value(value.into());
                pair
            });
            let mut pairs: Vec<LabelPair> = pairs.collect();
            pairs.sort_by(|a, b| a.name().cmp(b.name()));
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            let mut metric = Metric::from_label(pairs);
            metric.set_gauge(gauge);
            metric
        });
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(MetricType::GAUGE);
        family.set_metric(metrics.collect());
        family
    }
}

/// Bytes and counts as metric values; beyond 2^53 the last digits are rounded.
pub fn number(value: u64) -> f64 {
    value as f64
}
