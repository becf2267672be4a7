//! `/proc/pressure/memory` (PSI): the share of time in which tasks stalled on memory.

/// Percent of the last ten seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pressure {
    /// At least one task was stalled.
    pub some: f64,
    /// All tasks were stalled.
    pub full: f64,
}

/// Parses the file; `None` if the format is unknown, as on a kernel without it.
pub fn memory(text: &str) -> Option<Pressure> {
    let percent = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let value = line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?;
        value.parse::<f64>().ok().filter(|percent| percent.is_finite())
    };
    Some(Pressure { some: percent("some ")?, full: percent("full ")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ten_seconds_count() {
        let text = "some avg10=12.50 avg60=1.00 avg300=0.00 total=7\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=1\n";
        assert_eq!(memory(text), Some(Pressure { some: 12.5, full: 3.0 }));
        assert_eq!(memory("some avg10=12.50\n"), None);
        assert_eq!(memory(""), None);
    }
}
