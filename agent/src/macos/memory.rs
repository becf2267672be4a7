//! `vm_stat`, `memory_pressure` and `sysctl vm.swapusage`: available memory. None of them is reliable by
//! itself: a machine with its swap nearly full may report 93 percent of its memory as free.

use super::{ParseError, fields, text};

const PAGES: &str = "vm_stat";
const PRESSURE: &str = "memory_pressure";
const SWAP: &str = "sysctl vm.swapusage";

/// Bytes that are free, inactive, speculative or purgeable: what new work can use without swapping.
pub fn available(output: &[u8]) -> Result<u64, ParseError> {
    let text = text(output);
    let missing = |what: &str| ParseError::new(PAGES, format!("no {what}"));
    let size = text.split_once("page size of ").and_then(|(_, rest)| rest.split_whitespace().next());
    let size: u64 = size.and_then(|size| size.parse().ok()).ok_or_else(|| missing("page size"))?;
    let pages = |name: &str| {
        let (_, count) = fields(&text).find(|(key, _)| *key == name)?;
        count.trim_end_matches('.').parse::<u64>().ok()
    };
    let free = pages("Pages free").ok_or_else(|| missing("count of free pages"))?;
    let others = ["Pages inactive", "Pages speculative", "Pages purgeable"].into_iter().filter_map(pages);
    let count = others.fold(free, u64::saturating_add);
    count.checked_mul(size).ok_or_else(|| missing("number of pages that a machine has"))
}

/// Output of `memory_pressure`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Installed bytes.
    pub total: u64,
    /// Free percentage; some releases of macOS leave the line out.
    pub free_percent: Option<u8>,
}

/// Parses the output of `memory_pressure`, with or without `-Q`.
pub fn pressure(output: &[u8]) -> Result<Pressure, ParseError> {
    let text = text(output);
    let total = text.split_once("The system has ").and_then(|(_, rest)| rest.split_whitespace().next());
    let total = total.and_then(|total| total.parse().ok());
    let percent = fields(&text).find(|(key, _)| *key == "System-wide memory free percentage");
    Ok(Pressure {
        total: total.ok_or_else(|| ParseError::new(PRESSURE, "no size of the system"))?,
        free_percent: percent.and_then(|(_, percent)| percent.trim_end_matches('%').parse().ok()),
    })
}

/// Swap, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// Current size; macOS adds swap as needed.
    pub total: u64,
    /// Bytes in use.
    pub used: u64,
}

/// Parses the value of `vm.swapusage`: `total = 10240.00M  used = 9460.62M  free = 779.38M  (encrypted)`.
pub fn swap(value: &str) -> Result<Swap, ParseError> {
    let words: Vec<&str> = value.split_whitespace().collect();
    let bytes = |name: &str| {
        let place = words.windows(3).find(|three| three[0] == name && three[1] == "=");
        let mebibytes = place.and_then(|three| three[2].strip_suffix('M')?.parse::<f64>().ok());
        let mebibytes = mebibytes.filter(|size| size.is_finite() && *size >= 0.0);
        mebibytes.map(|size| (size * f64::from(1 << 20)) as u64)
    };
    let found = bytes("total").zip(bytes("used")).map(|(total, used)| Swap { total, used });
    found.ok_or_else(|| ParseError::new(SWAP, format!("no total and used in mebibytes: {value:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_by_their_size() {
        let output = b"Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:        100.\n\
            Pages active:       7.\nPages inactive:      20.\nPages purgeable:     3.\n";
        assert_eq!(available(output), Ok(123 * 16384));
        assert!(available(b"Pages free: 7.").is_err());
        assert!(available(b"(page size of 16384 bytes)\nPages active: 7.\n").is_err());
        let huge = format!("(page size of 16384 bytes)\nPages free: {}.\n", u64::MAX);
        assert!(available(huge.as_bytes()).is_err());
    }

    #[test]
    fn pressure_may_lack_its_percentage() {
        let output = b"The system has 34359738368 (2097152 pages with a page size of 16384).\n";
        assert_eq!(pressure(output), Ok(Pressure { total: 32 << 30, free_percent: None }));
        let output = [&output[..], b"System-wide memory free percentage: 88%\n"].concat();
        assert_eq!(pressure(&output).unwrap().free_percent, Some(88));
        assert!(pressure(b"").is_err());
    }

    #[test]
    fn swap_is_counted_in_mebibytes() {
        let found = swap("total = 2048.00M  used = 512.50M  free = 1535.50M  (encrypted)").unwrap();
        assert_eq!((found.total, found.used), (2 << 30, 537_395_200));
        for odd in
            ["", "total = 1.00G  used = 2.00G", "total = -1.00M used = 0.00M", "total = NaNM used = 0.00M"]
        {
            assert!(swap(odd).is_err(), "{odd}");
        }
    }
}
