//! Fitting: the same loss for every engine, and a deterministic search for its minimum.

use russet_plan::performance_model::{Coefficients, EngineFamily};

use super::rows::{Row, RowSplit};

/// A fitted field of the coefficients.
pub type Field = fn(&mut Coefficients) -> &mut f64;

/// The fitted fields of an engine, six at most.
pub fn fitted(engine: EngineFamily) -> Vec<(&'static str, Field)> {
    let layer: (&str, Field) = ("layer", |by| &mut by.layer);
    let expert: (&str, Field) = ("expert", |by| &mut by.expert);
    let attention: (&str, Field) = ("attention", |by| &mut by.attention);
    let gemm: (&str, Field) = ("gemm", |by| &mut by.gemm);
    let start: (&str, Field) = ("start", |by| &mut by.start);
    let core: (&str, Field) = ("core", |by| &mut by.core);
    let hop: (&str, Field) = ("hop", |by| &mut by.hop);
    match engine {
        EngineFamily::Mlx => vec![layer, core, expert, attention, gemm, start],
        EngineFamily::LlamaCpp => vec![layer, expert, attention, gemm, hop],
        EngineFamily::Ds4 => vec![expert, attention, gemm, hop],
    }
}

/// Minimum prompt length: shorter ones are mostly start-up, which differs between programs.
pub const LONG_PROMPT: u32 = 256;

/// Logarithms of predicted over measured.
pub fn errors<'a>(rows: &'a [&Row], by: &'a Coefficients) -> impl Iterator<Item = f64> + 'a {
    rows.iter().flat_map(move |row| {
        let speed = row.predict(by);
        let rate = row.rate.map(|rate| (speed.total / rate).ln());
        let alone = row.split == RowSplit::Single && row.load.streams == 1 && row.load.prompt >= LONG_PROMPT;
        let prefill = row.prefill.filter(|_| alone).map(|rate| (speed.prefill / rate).ln());
        rate.into_iter().chain(prefill)
    })
}

/// Mean Huber loss: quadratic up to a tenth, so that a few outliers do not dominate.
pub fn loss(rows: &[&Row], by: &Coefficients) -> f64 {
    const BEND: f64 = 0.1;
    let (mut sum, mut count) = (0.0, 0.0);
    for error in errors(rows, by) {
        let error = error.abs();
        sum += if error < BEND { error * error / (2.0 * BEND) } else { error - BEND / 2.0 };
        count += 1.0;
    }
    sum / f64::max(count, 1.0)
}

/// Nelder–Mead simplex over the logarithms of the fitted coefficients, from `start`, initially `reach` wide.
pub fn fit(rows: &[&Row], engine: EngineFamily, start: Coefficients, reach: f64, steps: u32) -> Coefficients {
    let fields = fitted(engine);
    let coefficients = |point: &[f64]| {
        let mut by = start;
        for ((_, field), value) in fields.iter().zip(point) {
            *field(&mut by) *= value.exp();
        }
        by
    };
    let judge = |point: Vec<f64>| (loss(rows, &coefficients(&point)), point);
    let mut simplex = vec![judge(vec![0.0; fields.len()])];
    for index in 0..fields.len() {
        let mut point = vec![0.0; fields.len()];
        point[index] = reach;
        simplex.push(judge(point));
    }
    let worst = fields.len();
    for _ in 0..steps {
        simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
        let middle: Vec<f64> = (0..worst)
            .map(|axis| simplex[..worst].iter().map(|(_, point)| point[axis]).sum::<f64>() / worst as f64)
            .collect();
        let from_worst = |factor: f64| {
            let pairs = middle.iter().zip(&simplex[worst].1);
            judge(pairs.map(|(middle, worst)| middle + factor * (middle - worst)).collect())
        };
        let mirrored = from_worst(1.0);
        if mirrored.0 < simplex[0].0 {
            let further = from_worst(2.0);
            simplex[worst] = if further.0 < mirrored.0 { further } else { mirrored };
        } else if mirrored.0 < simplex[worst - 1].0 {
            simplex[worst] = mirrored;
        } else {
            let nearer = from_worst(-0.5);
            if nearer.0 < simplex[worst].0 {
                simplex[worst] = nearer;
            } else {
                let best = simplex[0].1.clone();
                for (value, point) in &mut simplex[1..] {
                    let halfway = best.iter().zip(point.iter()).map(|(best, at)| (best + at) / 2.0).collect();
                    (*value, *point) = judge(halfway);
                }
            }
        }
    }
    simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
    coefficients(&simplex[0].1)
}
