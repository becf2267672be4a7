//! Calibration: the ratio of measured to predicted speed of running groups, applied to candidates of the same
//! kind. Kinds are equal if they split the same model into the same stages on the same chips. Further
//! differences, a layer more on one node or another cable, are left to the prediction.

use russet_crds::{Backend, MeasuredThroughput};

use super::GpuProfile;

/// Key under which measurements apply to candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationKey {
    /// Backend between members.
    pub backend: Backend,
    /// Ranks per stage.
    pub tensor_size: u32,
    /// The machine of every rank, in order.
    pub machines: Vec<GpuProfile>,
}

/// Measurements of groups of one model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration(Vec<CalibrationPoint>);

#[derive(Clone, Debug, PartialEq)]
struct CalibrationPoint {
    key: CalibrationKey,
    factor: f64,
}

impl Calibration {
    /// Adds a group of this kind that measured `rate` and was predicted to reach `predicted`.
    pub fn add(&mut self, kind: CalibrationKey, rate: f64, predicted: f64) {
        let factor = rate / predicted;
        if factor.is_finite() && factor > 0.0 {
            self.0.push(CalibrationPoint { key: kind, factor });
        }
    }

    /// Factor for a prediction: the mean over all groups of the same kind, 1 without any.
    pub fn factor(&self, kind: &CalibrationKey) -> f64 {
        let alike = self.0.iter().filter(|seen| seen.key == *kind);
        let (count, sum) = alike.fold((0.0, 0.0), |(count, sum), seen| (count + 1.0, sum + seen.factor));
        if count > 0.0 { sum / count } else { 1.0 }
    }

    /// Whether there are no measurements.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The rate of a single stream, by which plans are compared. Measurements of several concurrent streams say
/// more about how an engine shares its time.
pub fn single_stream_rate(measured: &MeasuredThroughput) -> Option<f64> {
    let rate = measured.tokens_per_second.parse().ok()?;
    (measured.streams == 1 && f64::is_finite(rate) && rate > 0.0).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chips;

    fn kind(tensor_size: u32, chips: &[&str]) -> CalibrationKey {
        let machine = |chip: &&str| chips::find(chip, None, Some(512)).unwrap().into();
        CalibrationKey { backend: Backend::Ring, tensor_size, machines: chips.iter().map(machine).collect() }
    }

    #[test]
    fn calibration_uses_measurements_of_the_same_kind() {
        let mut seen = Calibration::default();
        assert!(seen.is_empty());
        seen.add(kind(1, &["M4 Max"]), 30.0, 40.0);
        seen.add(kind(1, &["M3 Ultra", "M4 Max"]), 9.0, 10.0);
        seen.add(kind(1, &["M3 Ultra", "M4 Max"]), 7.0, 10.0);
        seen.add(kind(2, &["M4 Max", "M4 Max"]), 12.0, 10.0);
        seen.add(kind(1, &["M1 Ultra"]), f64::NAN, 10.0);
        seen.add(kind(1, &["M1 Ultra"]), 5.0, 0.0);
        for (story, kind, factor) in [
            ("the same chip", kind(1, &["M4 Max"]), 0.75),
            ("the mean of two", kind(1, &["M3 Ultra", "M4 Max"]), 0.8),
            ("the stages the other way round", kind(1, &["M4 Max", "M3 Ultra"]), 1.0),
            ("a tensor group", kind(2, &["M4 Max", "M4 Max"]), 1.2),
            ("a pipeline on these", kind(1, &["M4 Max", "M4 Max"]), 1.0),
            ("over RDMA", CalibrationKey { backend: Backend::Jaccl, ..kind(2, &["M4 Max", "M4 Max"]) }, 1.0),
            ("what is no number measured nothing", kind(1, &["M1 Ultra"]), 1.0),
        ] {
            assert!((seen.factor(&kind) - factor).abs() < 1e-9, "{story}: {}", seen.factor(&kind));
        }
    }

    #[test]
    fn only_single_stream_rates_are_compared() {
        let measured = |rate: &str, streams| MeasuredThroughput {
            tokens_per_second: rate.to_owned(),
            streams,
            ..MeasuredThroughput::default()
        };
        for (measured, rate) in [
            (measured("41.3", 1), Some(41.3)),
            (measured("41.3", 4), None),
            (measured("", 1), None),
            (measured("0", 1), None),
            (measured("NaN", 1), None),
        ] {
            assert_eq!(single_stream_rate(&measured), rate, "{measured:?}");
        }
    }
}
