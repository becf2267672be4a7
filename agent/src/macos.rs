//! Parsers for the tools of macOS, each a file of pure functions: bytes in, facts or an error out. Nothing
//! here runs a tool, and nothing evaluates the results. All of it was written from outputs that people posted
//! (`shared/data/macos`, tested by `tests/recorded.rs`); none was run on a Mac by us.
//!
//! ```text
//! system_profiler ─▶ thunderbolt, overview      ibv_devices, ibv_devinfo, rdma_ctl ─▶ rdma
//! networksetup    ─▶ ports, services            sysctl, sw_vers                    ─▶ system
//! ifconfig, netstat, plutil ─▶ network          vm_stat, memory_pressure           ─▶ memory
//! macmon ─▶ load          powermetrics ─▶ power   panic reports                      ─▶ panic
//! ```

pub mod load;
pub mod memory;
pub mod network;
pub mod overview;
pub mod panic;
pub mod ports;
pub mod power;
pub mod rdma;
pub mod services;
pub mod system;
pub mod thunderbolt;

use thiserror::Error;

/// A tool's output that cannot be parsed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{tool} printed {what}")]
pub struct ParseError {
    /// The tool and its arguments.
    pub tool: &'static str,
    /// What it printed instead, and the remedy if known.
    pub what: String,
}

impl ParseError {
    fn new(tool: &'static str, what: impl Into<String>) -> Self {
        Self { tool, what: what.into() }
    }
}

/// The output as text. Tools print UTF-8; only a device's name could contain something else, and one odd
/// character in it is no reason to drop the output.
fn text(output: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(output)
}

/// The output as JSON.
fn json(tool: &'static str, output: &[u8]) -> Result<serde_json::Value, ParseError> {
    serde_json::from_slice(output).map_err(|error| {
        let begins = text(output).trim_start().chars().take(40).collect::<String>();
        ParseError::new(tool, format!("no JSON ({error}); it begins with {begins:?}"))
    })
}

/// Trimmed `key: value` lines; others are skipped.
fn fields(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(key, value)| (key.trim(), value.trim()))
}

/// Bits per second in `80 Gb/s`, `Up to 120 Gb/s` or `Up to 40 Gb/s x1`.
fn gigabits(speed: &str) -> Option<u64> {
    let number = speed.strip_prefix("Up to ").unwrap_or(speed).split_once(" Gb/s")?.0;
    number.trim().parse::<u64>().ok()?.checked_mul(1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read_whether_connected_or_not() {
        for (speed, bits) in [
            ("80 Gb/s", Some(80_000_000_000)),
            ("Up to 120 Gb/s", Some(120_000_000_000)),
            ("Up to 40 Gb/s x1", Some(40_000_000_000)),
            ("unknown", None),
            ("99999999999999999999 Gb/s", None),
            ("18446744073709551615 Gb/s", None),
        ] {
            assert_eq!(gigabits(speed), bits, "{speed}");
        }
    }

    #[test]
    fn invalid_json_error_quotes_its_start() {
        let error = json("a tool", b"\nThunderbolt/USB4:\n\n  Bus").unwrap_err().to_string();
        assert!(error.starts_with("a tool printed no JSON (expected"), "{error}");
        assert!(error.contains("begins with \"Thunderbolt/USB4:"), "{error}");
    }
}
