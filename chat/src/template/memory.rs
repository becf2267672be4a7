//! Memory of a template: every text and list that it makes counts against a budget, kept or not, so that what it holds at
//! once is bounded too. Fuel bounds its steps alone, and a step may double a text.
//!
//! The compiled template is changed before it runs: a step that can make a value is followed by one that counts it, and
//! operators whose result has no bound are replaced by filters that look at their operands first.

use std::cell::Cell;
use std::fmt::{self, Write as _};

use minijinja::machinery::{self, Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};
use thiserror::Error as ThisError;

use super::filters;

/// Bytes that a template may make of any conversation. At the last step before the end it holds at most twice this. The
/// fuzz target tries many templates, each of which may use all of it, with a hundredth.
pub(super) const MIN_BUDGET: usize = if cfg!(fuzzing) { 1 << 17 } else { 16 << 20 };
/// Bytes that it may make besides for each byte of the conversation: real templates make three to five, trimming and
/// concatenating each message.
const BUDGET_PER_BYTE: usize = 16;
/// Bytes that a place in a list takes, and that a list itself takes.
pub(super) const ITEM_BYTES: usize = 32;
/// Bytes of a place in a sum of lists, on average: minijinja copies the places of one sum in some ten.
const SUM_ITEM_BYTES: usize = 4;
/// Depth of lists within lists: what walks through them, dropping them included, recurses.
const MAX_NESTING: usize = 64;

/// Filter that counts a value and returns it.
const COUNT: &str = "russet_count";
/// Filter that counts a sum and returns it.
const COUNT_SUM: &str = "russet_count_sum";
/// Filter that counts a list with all that it holds, and returns it.
const COUNT_DEEP: &str = "russet_count_deep";

thread_local! {
    /// What is left to the template that this thread renders.
    static BUDGET: Cell<usize> = const { Cell::new(0) };
}

/// The template has made more text and lists than it may.
#[derive(Debug, ThisError)]
#[error("the budget of the template is used up")]
pub(super) struct OverBudget;

/// Sets the budget of this thread for a conversation of these bytes.
pub(super) fn start(conversation_bytes: usize) {
    BUDGET.set(MIN_BUDGET.saturating_add(conversation_bytes.saturating_mul(BUDGET_PER_BYTE)));
}

/// Bytes that may still be made.
pub(super) fn left() -> usize {
    BUDGET.get()
}

/// Counts bytes.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let left = left().checked_sub(bytes);
    // After an overrun nothing more is made, also where the template goes on.
    BUDGET.set(left.unwrap_or(0));
    left.map(drop).ok_or_else(over_budget)
}

/// Fails if this many bytes would not fit; counts nothing.
pub(super) fn check(bytes: Option<usize>) -> Result<(), Error> {
    if bytes.is_some_and(|bytes| bytes <= left()) { Ok(()) } else { Err(over_budget()) }
}

fn over_budget() -> Error {
    Error::new(ErrorKind::InvalidOperation, "the template makes too much text").with_source(OverBudget)
}

/// Counts a value by itself: a text by its bytes, a list by its places.
pub(super) fn charge_value(value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return charge(text.len());
    }
    match value.kind() {
        ValueKind::Bytes | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            charge(value.len().unwrap_or(0).saturating_add(1).saturating_mul(ITEM_BYTES))
        }
        _ => Ok(()),
    }
}

/// The text of a value, which may be a list of lists that hold the same text many times.
pub(super) fn bounded_text(value: &Value) -> Result<String, Error> {
    let mut text = BoundedText::default();
    text.push(value)?;
    Ok(text.text)
}

/// A text that grows up to the budget.
#[derive(Default)]
pub(super) struct BoundedText {
    pub(super) text: String,
}

impl BoundedText {
    /// Appends a value as it would be written.
    pub(super) fn push(&mut self, value: &Value) -> Result<(), Error> {
        write!(self, "{value}").map_err(|_| over_budget())
    }
}

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.text.len() + text.len() > left() {
            return Err(fmt::Error);
        }
        self.text.push_str(text);
        Ok(())
    }
}

/// Bytes that a value holds and what it refers to, each time it does; an error beyond the budget.
fn deep_bytes(value: &Value, depth: usize, sum: &mut usize) -> Result<(), Error> {
    let own = value.as_str().map_or(ITEM_BYTES, str::len);
    *sum = sum.saturating_add(own);
    check(Some(*sum))?;
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        if depth == MAX_NESTING {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("lists nest more than {MAX_NESTING} deep"),
            ));
        }
        for item in value.try_iter()?.checked() {
            let item = item?;
            if value.kind() == ValueKind::Map {
                deep_bytes(&value.get_item(&item)?, depth + 1, sum)?;
            }
            deep_bytes(&item, depth + 1, sum)?;
        }
    }
    Ok(())
}

/// Adds the filters that [`counted`] puts into templates, and output that counts.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter(COUNT, |value: Value| charge_value(&value).map(|()| value));
    environment.add_filter(COUNT_SUM, |value: Value| {
        let bytes = match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.len().unwrap_or(0).saturating_mul(SUM_ITEM_BYTES).saturating_add(ITEM_BYTES)
            }
            _ => value.as_str().map_or(0, str::len),
        };
        charge(bytes).map(|()| value)
    });
    environment.add_filter(COUNT_DEEP, |value: Value| {
        let mut sum = 0;
        deep_bytes(&value, 0, &mut sum)?;
        charge(sum).map(|()| value)
    });
    environment.set_formatter(|output, state, value| {
        match value.as_str() {
            Some(text) => charge(text.len())?,
            None => charge(bounded_text(value)?.len())?,
        }
        minijinja::escape_formatter(output, state, value)
    });
}

/// The same source, in which no product is computed while it is compiled: a filter on an operand makes it no constant.
pub(super) fn unfolded(source: &str, syntax: SyntaxConfig) -> String {
    let (mut changed, mut from, mut operand) = (String::with_capacity(source.len()), 0, None);
    for (token, span) in machinery::tokenize(source, false, syntax).map_while(Result::ok) {
        if matches!(token, Token::Mul)
            && let Some(end) = operand
            && let Some(text) = source.get(from..end)
        {
            changed.push_str(text);
            changed.push('|');
            changed.push_str(COUNT);
            from = end;
        }
        // After these it unpacks arguments.
        let unpacks = matches!(token, Token::ParenOpen | Token::Comma);
        operand = (!unpacks).then_some(span.end_offset as usize);
    }
    changed.push_str(&source[from..]);
    changed
}

/// The same template, counting.
pub(super) fn counted<'source>(original: &Instructions<'source>) -> Instructions<'source> {
    let steps = || (0..).map_while(|at| original.get(at));
    let replaced = |step: &Instruction<'source>| -> (Vec<Instruction<'source>>, Option<&'static str>) {
        let filter = |name| vec![Instruction::ApplyFilter(name, Some(2), !0)];
        match step {
            Instruction::EmitRaw(text) => {
                (vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit], None)
            }
            Instruction::Include(_) | Instruction::LoadBlocks => {
                (vec![Instruction::ApplyFilter(filters::OTHER_TEMPLATE, Some(1), !0)], None)
            }
            Instruction::StringConcat => (filter(filters::CONCAT), None),
            Instruction::Mul => (filter(filters::MULTIPLY), None),
            Instruction::Rem => (filter(filters::REMAINDER), None),
            Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::BuildMap(_) => {
                (vec![step.clone()], Some(COUNT_DEEP))
            }
            // At most as long as both operands, which were counted.
            Instruction::Add => (vec![step.clone()], Some(COUNT_SUM)),
            Instruction::Slice => (vec![Instruction::ApplyFilter(filters::SLICE, Some(4), !0)], Some(COUNT)),
            Instruction::EndCapture
            | Instruction::ApplyFilter(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_) => (vec![step.clone()], Some(COUNT)),
            step => (vec![step.clone()], None),
        }
    };
    // Where each step is in the changed template; one place more for the end.
    let mut places = vec![0u32];
    for step in steps() {
        let (steps, count) = replaced(step);
        let last = places.last().copied().unwrap_or_default();
        places.push(last + steps.len() as u32 + u32::from(count.is_some()));
    }
    let mut changed = Instructions::new(original.name(), original.source());
    for (at, step) in (0..).zip(steps()) {
        let line = original.get_line(at).unwrap_or_default() as u16;
        let (steps, count) = replaced(step);
        let count = count.map(|filter| Instruction::ApplyFilter(filter, Some(1), !0));
        for mut step in steps.into_iter().chain(count) {
            match &mut step {
                Instruction::Jump(target)
                | Instruction::JumpIfFalse(target)
                | Instruction::JumpIfFalseOrPop(target)
                | Instruction::JumpIfTrueOrPop(target)
                | Instruction::Iterate(target)
                | Instruction::BuildMacro(_, target, _) => {
                    *target = places.get(*target as usize).copied().unwrap_or(*target);
                }
                _ => {}
            }
            changed.add_with_line(step, line);
        }
    }
    changed
}
