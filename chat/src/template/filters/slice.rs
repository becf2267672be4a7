//! `value[start:stop:step]` with Python's rules. minijinja's own panics where an empty list is reversed.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, Value};

use super::super::memory::{self, ITEM_BYTES};
use super::invalid;

/// The part of a text or list.
pub(super) fn slice(value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let forwards = bound(&step)?.is_none_or(|step| step == 1);
        let chars: Vec<char> = if forwards && text.is_ascii() {
            // No list of its characters: a template cuts a long text in many small steps.
            let range = Range::new(&start, &stop, &step, text.len())?;
            let cut = text.get(range.first..range.first + range.count).unwrap_or_default();
            return Ok(Value::from(cut));
        } else {
            memory::check(text.len().checked_mul(size_of::<char>()))?;
            text.chars().collect()
        };
        let cut: String = Range::new(&start, &stop, &step, chars.len())?.map(|at| chars[at]).collect();
        return Ok(Value::from(cut));
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Err(invalid(format!("{} cannot be sliced", value.kind())));
    }
    memory::check(value.len().unwrap_or(0).checked_mul(ITEM_BYTES))?;
    let items: Vec<Value> = value.try_iter()?.collect();
    let cut = Range::new(&start, &stop, &step, items.len())?.map(|at| items[at].clone());
    Ok(if value.is_tuple() {
        Value::from(Tuple::from(cut.collect::<Vec<_>>()))
    } else {
        Value::from(cut.collect::<Vec<_>>())
    })
}

/// Indices of a slice, each within the length.
struct Range {
    first: usize,
    count: usize,
    step: i64,
}

impl Range {
    fn new(start: &Value, stop: &Value, step: &Value, length: usize) -> Result<Self, Error> {
        let step = bound(step)?.unwrap_or(1);
        let length = i64::try_from(length).unwrap_or(i64::MAX);
        // As `PySlice_AdjustIndices`: backwards, the place before the first item is -1.
        let (low, high) = if step < 0 { (-1, length - 1) } else { (0, length) };
        let place = |value: Option<i64>, default: i64| match value {
            Some(at) if at < 0 => at.saturating_add(length).clamp(low, high),
            Some(at) => at.clamp(low, high),
            None => default,
        };
        let (start, stop) = (bound(start)?, bound(stop)?);
        let (first, distance) = match step {
            0 => return Err(invalid("the step of a slice cannot be zero")),
            1.. => {
                let first = place(start, low);
                (first, place(stop, high) - first)
            }
            _ => {
                let first = place(start, high);
                (first, first - place(stop, low))
            }
        };
        let stride = step.unsigned_abs();
        let count = u64::try_from(distance).unwrap_or(0).div_ceil(stride);
        Ok(Self { first: usize::try_from(first).unwrap_or(0), count: count as usize, step })
    }
}

impl Iterator for Range {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.count = self.count.checked_sub(1)?;
        let at = self.first;
        self.first = at.saturating_add_signed(isize::try_from(self.step).unwrap_or(isize::MAX));
        Some(at)
    }
}

/// An index, which may be left out.
fn bound(value: &Value) -> Result<Option<i64>, Error> {
    if value.is_none() {
        return Ok(None);
    }
    if let Ok(number) = i64::try_from(value.clone()) {
        return Ok(Some(number));
    }
    Err(invalid(format!("slices are of integers, not of {}", value.kind())))
}
