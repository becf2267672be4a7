//! Durations in texts, as Go writes them and OpenAI's quota headers have them: `120ms`, `8.64s`, `1m0s`, `8h27m35s`.

use std::time::Duration;

/// The duration as text, rounded up: a client that waits this long has waited long enough.
pub(crate) fn short_text(duration: Duration) -> String {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}s", ms as f64 / 1000.0),
        _ => {
            let seconds = ms.div_ceil(1000);
            let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
            if hours > 0 { format!("{hours}h{minutes}m{seconds}s") } else { format!("{minutes}m{seconds}s") }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        for (ms, expected) in [
            (0, "0ms"),
            (120, "120ms"),
            (1_000, "1s"),
            (8_640, "8.64s"),
            (59_999, "59.999s"),
            (60_000, "1m0s"),
            (61_500, "1m2s"),
            (119_500, "2m0s"),
            (3_599_500, "1h0m0s"),
            (30_455_000, "8h27m35s"),
        ] {
            assert_eq!(short_text(Duration::from_millis(ms)), expected);
        }
        assert_eq!(short_text(Duration::from_nanos(1)), "1ms");
    }
}
