//! `powermetrics`, as text or as a property list: power and thermal pressure. It needs root; without it,
//! [`load`](super::load) has everything but the pressure. Its `freq_hz` counts megahertz, so it is not read
//! here.

use plist::Value;

use super::{ParseError, fields, text};

const TOOL: &str = "powermetrics";

/// Output of `powermetrics`, as far as it was queried.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Power {
    /// Watts of processor, GPU and neural engine together.
    pub watts: Option<f64>,
    /// Watts of the GPU.
    pub gpu_watts: Option<f64>,
    /// Utilisation of the GPU, between 0 and 1.
    pub gpu: Option<f64>,
    /// `Nominal`, `Moderate`, `Heavy`, `Trapping` or `Sleeping`.
    pub thermal_pressure: Option<String>,
}

/// Parses either format; of several samples the last.
pub fn power(output: &[u8]) -> Result<Power, ParseError> {
    let found = if output.trim_ascii_start().starts_with(b"<?xml") {
        parse_plist(output)?
    } else {
        parse_text(&text(output))
    };
    if found == Power::default() {
        return Err(ParseError::new(TOOL, "neither power nor thermal pressure"));
    }
    Ok(found)
}

fn parse_plist(output: &[u8]) -> Result<Power, ParseError> {
    // Samples are separated by a zero byte.
    let mut samples = output.split(|byte| *byte == 0).filter(|sample| !sample.trim_ascii().is_empty());
    let all = Value::from_reader_xml(samples.next_back().unwrap_or_default())
        .map_err(|error| ParseError::new(TOOL, format!("no property list ({error})")))?;
    let all = all.as_dictionary();
    let number = |part: &str, key: &str| all?.get(part)?.as_dictionary()?.get(key)?.as_real();
    let pressure = || all?.get("thermal_pressure")?.as_string().map(str::to_owned);
    Ok(Power {
        watts: number("processor", "combined_power").map(|milliwatts| milliwatts / 1e3),
        gpu_watts: number("processor", "gpu_power").map(|milliwatts| milliwatts / 1e3),
        gpu: number("gpu", "idle_ratio").map(|idle| (1.0 - idle).clamp(0.0, 1.0)),
        thermal_pressure: pressure(),
    })
}

fn parse_text(text: &str) -> Power {
    let last = |name: &str| fields(text).filter(|(key, _)| *key == name).last().map(|(_, value)| value);
    let watts = |name: &str| Some(last(name)?.strip_suffix(" mW")?.parse::<f64>().ok()? / 1e3);
    let residency = || last("GPU HW active residency")?.split('%').next()?.trim().parse::<f64>().ok();
    Power {
        watts: watts("Combined Power (CPU + GPU + ANE)"),
        gpu_watts: watts("GPU Power"),
        gpu: residency().map(|percent| (percent / 100.0).clamp(0.0, 1.0)),
        thermal_pressure: last("Current pressure level").map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let words = b"GPU HW active residency:  25.00% (444 MHz: .97%)\nGPU Power: 9462 mW\n\
            Combined Power (CPU + GPU + ANE): 18378 mW\nCurrent pressure level: Heavy\n";
        let list = br#"<?xml version="1.0" encoding="UTF-8"?><plist version="1.0"><dict>
            <key>processor</key><dict><key>gpu_power</key><real>9462</real>
            <key>combined_power</key><real>18378</real></dict>
            <key>gpu</key><dict><key>idle_ratio</key><real>0.75</real></dict>
            <key>thermal_pressure</key><string>Heavy</string></dict></plist>"#;
        let expected = Power {
            watts: Some(18.378),
            gpu_watts: Some(9.462),
            gpu: Some(0.25),
            thermal_pressure: Some("Heavy".to_owned()),
        };
        assert_eq!(power(words), Ok(expected.clone()));
        assert_eq!(power(list), Ok(expected.clone()));
        assert_eq!(power(&[b"<?xml?>\0".as_slice(), list, b"\0"].concat()), Ok(expected), "the last sample");
    }

    #[test]
    fn empty_power_output_is_refused() {
        assert!(power(b"powermetrics must be invoked as the superuser\n").is_err());
        assert!(
            power(b"<?xml version=\"1.0\"?><plist>").unwrap_err().to_string().contains("no property list")
        );
    }
}
