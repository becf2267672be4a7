//! Spans of time on the command line: a number of minutes, hours or days.

use jiff::SignedDuration;

/// The span of a text such as `90m`, `12h` or `30d`; none of any other.
pub fn parse(text: &str) -> Option<SignedDuration> {
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1))?;
    let number: u32 = number.parse().ok().filter(|number| *number > 0)?;
    let seconds = match unit {
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return None,
    };
    Some(SignedDuration::from_secs(i64::from(number) * seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_minutes_hours_and_days() {
        for (text, seconds) in [("1m", 60), ("12h", 43_200), ("30d", 2_592_000)] {
            assert_eq!(parse(text), Some(SignedDuration::from_secs(seconds)), "{text}");
        }
        for text in ["", "d", "30", "0d", "-1d", "1.5h", "1w", "9999999999d", "3ö"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
