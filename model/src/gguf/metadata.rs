//! Keys and values of a GGUF file, read where they lie: nothing of a vocabulary is copied until a tokenizer is made of
//! it. Every length is doubted before it is used.

use std::collections::BTreeMap;

use super::MAX_HEADER_BYTES;
use crate::excerpt::excerpt;

/// Most keys; published files have up to 60.
const MAX_KEYS: u64 = 4096;
/// Longest key, by the specification.
const MAX_KEY_BYTES: u64 = 65_535;
/// The number of the type of yes and no.
const FLAG: u32 = 7;
/// The number of the type of texts.
const TEXT: u32 = 8;
/// The number of the type of lists.
const LIST: u32 = 9;

/// Why reading stops.
#[derive(Debug, PartialEq)]
pub(super) enum Stop {
    /// So many bytes of the file are needed, counted from its first.
    Short(u64),
    /// What is wrong.
    Bad(String),
}

/// The start of a file, and where reading is.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pub at: u64,
    /// Bytes of the whole file.
    size: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8], size: u64) -> Self {
        Self { bytes, at: 0, size }
    }

    /// Bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of the file from here on.
    pub fn left(&self) -> u64 {
        self.size.saturating_sub(self.at)
    }

    pub fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8], Stop> {
        let end = self.fits(length, what)?;
        let part = self.bytes.get(self.at as usize..end as usize).ok_or(Stop::Short(end))?;
        self.at = end;
        Ok(part)
    }

    /// Where `length` further bytes end, if the file has them and a header may be as long.
    fn fits(&self, length: u64, what: &str) -> Result<u64, Stop> {
        let (at, size) = (self.at, self.size);
        let end = at.checked_add(length).filter(|end| *end <= size);
        let end = end.ok_or_else(|| {
            Stop::Bad(format!("{what} of {length} bytes at {at} ends beyond its {size} bytes"))
        })?;
        if end > MAX_HEADER_BYTES {
            let problem = format!(
                "{what} of {length} bytes at {at} ends beyond {MAX_HEADER_BYTES}, the limit of a header"
            );
            return Err(Stop::Bad(problem));
        }
        Ok(end)
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, Stop> {
        let bytes = self.take(4, what)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte)))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, Stop> {
        let bytes = self.take(8, what)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// A text with its length before it.
    pub fn text(&mut self, limit: u64, what: &str) -> Result<&'a str, Stop> {
        let at = self.at;
        let length = self.u64(what)?;
        if length > limit {
            return Err(Stop::Bad(format!(
                "{what} at {at} has {length} bytes, more than the limit of {limit}"
            )));
        }
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|_| Stop::Bad(format!("{what} at {at} is no UTF-8")))
    }
}

/// A value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetaValue<'a> {
    /// A whole number of any width.
    Whole(i128),
    /// A number of 32 or 64 bits.
    Float(f64),
    /// Yes or no.
    Flag(bool),
    /// A text.
    Text(&'a str),
    /// Several values of one type, none of which is a list.
    List(MetaList<'a>),
}

/// Several values of one type, as their bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MetaList<'a> {
    kind: u32,
    /// How many.
    pub count: u64,
    bytes: &'a [u8],
}

impl<'a> MetaList<'a> {
    /// The texts; those that are no UTF-8 are `None`. Other lists have none.
    pub fn texts(self) -> impl Iterator<Item = Option<&'a str>> {
        let mut left = if self.kind == TEXT { self.bytes } else { &[] };
        std::iter::from_fn(move || {
            let (length, after) = left.split_first_chunk::<8>()?;
            let (text, after) = after.split_at_checked(u64::from_le_bytes(*length) as usize)?;
            left = after;
            Some(std::str::from_utf8(text).ok())
        })
    }

    /// The numbers, if they are some.
    pub fn numbers(self) -> impl Iterator<Item = f64> {
        let width = width(self.kind).unwrap_or(1);
        let bytes = if self.kind == TEXT { &[] } else { self.bytes };
        bytes.chunks_exact(width as usize).map(move |bytes| match scalar(self.kind, bytes) {
            Some(MetaValue::Whole(number)) => number as f64,
            Some(MetaValue::Float(number)) => number,
            _ => f64::NAN,
        })
    }

    /// The values that are yes or no, if they are some.
    pub fn flags(self) -> impl Iterator<Item = bool> {
        let bytes = if self.kind == FLAG { self.bytes } else { &[] };
        bytes.iter().map(|&byte| byte != 0)
    }
}

/// The metadata of a file.
#[derive(Debug, Default)]
pub struct Metadata<'a> {
    values: BTreeMap<&'a str, MetaValue<'a>>,
}

impl<'a> Metadata<'a> {
    pub(super) fn read(cursor: &mut Cursor<'a>, count: u64) -> Result<Self, Stop> {
        if count > MAX_KEYS {
            return Err(Stop::Bad(format!(
                "its metadata has {count} keys, more than the limit of {MAX_KEYS}"
            )));
        }
        let mut values = BTreeMap::new();
        for _ in 0..count {
            let key = cursor.text(MAX_KEY_BYTES, "a key of the metadata")?;
            let kind = cursor.u32("the type of a value")?;
            let value = value(cursor, key, kind)?;
            if values.insert(key, value).is_some() {
                return Err(Stop::Bad(format!("its metadata has {:?} twice", excerpt(key))));
            }
        }
        Ok(Self { values })
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<MetaValue<'a>> {
        self.values.get(key).copied()
    }

    /// A text.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        match self.get(key)? {
            MetaValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number that is not negative.
    pub fn whole(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            MetaValue::Whole(number) => u64::try_from(number).ok(),
            _ => None,
        }
    }

    /// A list.
    pub fn list(&self, key: &str) -> Option<MetaList<'a>> {
        match self.get(key)? {
            MetaValue::List(list) => Some(list),
            _ => None,
        }
    }

    /// All of it, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, MetaValue<'a>)> {
        self.values.iter().map(|(key, value)| (*key, *value))
    }
}

fn value<'a>(cursor: &mut Cursor<'a>, key: &str, kind: u32) -> Result<MetaValue<'a>, Stop> {
    let key = excerpt(key);
    match kind {
        TEXT => cursor.text(MAX_HEADER_BYTES, &format!("the value of {key:?}")).map(MetaValue::Text),
        LIST => list(cursor, &key).map(MetaValue::List),
        _ => {
            let unknown = || Stop::Bad(format!("the value of {key:?} has type {kind}, which there is not"));
            let bytes = cursor.take(width(kind).ok_or_else(unknown)?, &format!("the value of {key:?}"))?;
            scalar(kind, bytes).ok_or_else(unknown)
        }
    }
}

fn list<'a>(cursor: &mut Cursor<'a>, key: &str) -> Result<MetaList<'a>, Stop> {
    let what = format!("the list of {key:?}");
    let (kind, count) = (cursor.u32(&what)?, cursor.u64(&what)?);
    if kind == LIST {
        let problem = format!("the value of {key:?} is a list of {count} lists, and no model has such");
        return Err(Stop::Bad(problem));
    }
    let unknown = || Stop::Bad(format!("{what} is of type {kind}, which there is not"));
    // A text takes at least its length.
    let each = if kind == TEXT { 8 } else { width(kind).ok_or_else(unknown)? };
    let start = cursor.at;
    let least = count.checked_mul(each).ok_or_else(|| Stop::Bad(format!("{what} has {count} values")))?;
    cursor.fits(least, &what)?;
    if kind != TEXT {
        return Ok(MetaList { kind, count, bytes: cursor.take(least, &what)? });
    }
    for _ in 0..count {
        let length = cursor.u64(&what)?;
        cursor.take(length, &what)?;
    }
    let bytes = cursor.bytes.get(start as usize..cursor.at as usize).unwrap_or_default();
    Ok(MetaList { kind, count, bytes })
}

/// Bytes of a value of a type that has always as many.
fn width(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | FLAG => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

fn scalar<'a>(kind: u32, bytes: &[u8]) -> Option<MetaValue<'a>> {
    let unsigned = bytes.iter().rev().fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
    Some(match kind {
        0 | 2 | 4 | 10 => MetaValue::Whole(unsigned.into()),
        1 => MetaValue::Whole((unsigned as i8).into()),
        3 => MetaValue::Whole((unsigned as i16).into()),
        5 => MetaValue::Whole((unsigned as i32).into()),
        11 => MetaValue::Whole((unsigned as i64).into()),
        6 => MetaValue::Float(f32::from_bits(unsigned as u32).into()),
        12 => MetaValue::Float(f64::from_bits(unsigned)),
        FLAG => MetaValue::Flag(unsigned != 0),
        _ => return None,
    })
}
