//! What running groups measure takes the place of what was predicted. A rate counts once enough answers
//! stand behind it; it is never mixed with the prediction, so that people see one or the other.

/// Answers behind a rate before it counts: the first ones load kernels and fill caches.
pub const ENOUGH: u32 = 8;

/// A rate that was measured on a running group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Tokens a second.
    pub rate: f64,
    /// Answers it is the mean of.
    pub samples: u32,
}

/// The rate to plan with, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Counted {
    /// Nothing was measured yet, or too little.
    Predicted(f64),
    /// Measured on the group itself.
    Measured(f64),
}

impl Counted {
    /// Which of the two counts. A rate that is no positive number was not measured.
    pub fn of(predicted: f64, measured: Option<Measured>) -> Self {
        match measured {
            Some(Measured { rate, samples }) if samples >= ENOUGH && rate.is_finite() && rate > 0.0 => {
                Counted::Measured(rate)
            }
            _ => Counted::Predicted(predicted),
        }
    }

    /// Tokens a second.
    pub fn rate(self) -> f64 {
        match self {
            Counted::Predicted(rate) | Counted::Measured(rate) => rate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_answers_replace_the_prediction() {
        let measured = |rate, samples| Some(Measured { rate, samples });
        for (measured, counted) in [
            (None, Counted::Predicted(30.0)),
            (measured(20.0, 0), Counted::Predicted(30.0)),
            (measured(20.0, ENOUGH - 1), Counted::Predicted(30.0)),
            (measured(20.0, ENOUGH), Counted::Measured(20.0)),
            (measured(0.0, 100), Counted::Predicted(30.0)),
            (measured(f64::NAN, 100), Counted::Predicted(30.0)),
        ] {
            assert_eq!(Counted::of(30.0, measured), counted, "{measured:?}");
        }
        assert_eq!(Counted::of(30.0, measured(20.0, ENOUGH)).rate(), 20.0);
    }
}
