//! `system_profiler SPHardwareDataType SPDisplaysDataType -json`: model of the machine, and the cores of its
//! GPU.

use serde_json::Value;

use super::{ParseError, json};

const TOOL: &str = "system_profiler SPHardwareDataType SPDisplaysDataType -json";

/// Hardware of a Mac, as far as it was queried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// `Apple M3 Ultra`.
    pub chip: Option<String>,
    /// Model identifier `Mac15,14`: marketing names are ambiguous.
    pub model: Option<String>,
    /// `Mac Studio`.
    pub name: Option<String>,
    /// Cores of the processor, of all types.
    pub cores: Option<u32>,
    /// Cores of the GPU.
    pub gpu_cores: Option<u32>,
}

/// Parses whichever of both lists is present.
pub fn overview(output: &[u8]) -> Result<Overview, ParseError> {
    let all = json(TOOL, output)?;
    let first = |list: &str| all.get(list).and_then(Value::as_array).and_then(|list| list.first()).cloned();
    let (hardware, display) = (first("SPHardwareDataType"), first("SPDisplaysDataType"));
    if hardware.is_none() && display.is_none() {
        return Err(ParseError::new(TOOL, "neither SPHardwareDataType nor SPDisplaysDataType"));
    }
    let word = |of: &Option<Value>, key: &str| of.as_ref()?.get(key)?.as_str().map(str::to_owned);
    Ok(Overview {
        chip: word(&hardware, "chip_type").or_else(|| word(&display, "sppci_model")),
        model: word(&hardware, "machine_model"),
        name: word(&hardware, "machine_name"),
        // "proc 24:16:8:0": all of them, then core types in an order that differs from Mac to Mac.
        cores: word(&hardware, "number_processors")
            .and_then(|cores| cores.strip_prefix("proc ")?.split(':').next()?.parse().ok()),
        gpu_cores: word(&display, "sppci_cores").and_then(|cores| cores.parse().ok()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described_as_far_as_it_was_asked() {
        let hardware =
            br#"{"SPHardwareDataType": [{"chip_type": "Apple M3 Ultra", "machine_model": "Mac15,14",
            "machine_name": "Mac Studio", "number_processors": "proc 28:20:8:0"}]}"#;
        let found = overview(hardware).unwrap();
        assert_eq!(
            (found.cores, found.gpu_cores, found.model.as_deref()),
            (Some(28), None, Some("Mac15,14"))
        );
        let display = br#"{"SPDisplaysDataType": [{"sppci_model": "Apple M3 Ultra", "sppci_cores": "80"}]}"#;
        let found = overview(display).unwrap();
        assert_eq!((found.chip.as_deref(), found.gpu_cores), (Some("Apple M3 Ultra"), Some(80)));
        assert!(overview(b"{}").is_err() && overview(b"Hardware:\n").is_err());
    }
}
