//! `macmon pipe`: a JSON object per second with a Mac's load. Its fields were renamed: up to 0.7 a load is a
//! pair of megahertz and ratio (`gpu_usage`), from 0.8 there are separate numbers (`gpu_freq_mhz`,
//! `gpu_active_ratio`), and for some releases both.

use serde_json::Value;

use super::{ParseError, json};
use crate::machine_load::MachineLoad;
use crate::machine_power::plausible;

const TOOL: &str = "macmon pipe";

/// Watts of the whole Mac. Where its sensor tells none, macmon gives 0 or those of the chip alone, `all_power`.
pub fn machine_watts(system: f64, chip: Option<f64>) -> Option<f64> {
    plausible(system).filter(|watts| chip.is_none_or(|chip| *watts > chip))
}

/// Parses the last of the lines.
pub fn load(output: &[u8]) -> Result<MachineLoad, ParseError> {
    let mut lines = output.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    let last = lines.next_back().ok_or_else(|| ParseError::new(TOOL, "nothing"))?;
    let sample = json(TOOL, last)?;
    let memory = sample.get("memory");
    if memory.is_none() {
        return Err(ParseError::new(TOOL, "an object without memory"));
    }
    let number = |of: Option<&Value>, key: &str| of?.get(key)?.as_f64().filter(|number| number.is_finite());
    let bytes = |key| memory.and_then(|memory| memory.get(key)).and_then(Value::as_u64);
    let pair = || sample.get("gpu_usage")?.get(1)?.as_f64();
    Ok(MachineLoad {
        gpu: number(Some(&sample), "gpu_active_ratio").or_else(pair).map(|ratio| ratio.clamp(0.0, 1.0)),
        watts: number(Some(&sample), "sys_power")
            .and_then(|watts| machine_watts(watts, number(Some(&sample), "all_power"))),
        gpu_watts: number(Some(&sample), "gpu_power"),
        cpu_celsius: number(sample.get("temp"), "cpu_temp_avg"),
        gpu_celsius: number(sample.get("temp"), "gpu_temp_avg"),
        memory_used: bytes("ram_usage"),
        swap_used: bytes("swap_usage"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_under_old_names_and_new_ones() {
        let old = br#"{"memory":{"ram_usage":1},"gpu_usage":[461,0.25],"sys_power":10.5}"#;
        let new = br#"{"memory":{"ram_usage":2,"swap_usage":3},"gpu_active_ratio":0.5,"gpu_usage":[461,0.25],"temp":{"gpu_temp_avg":40}}"#;
        let found = load(&[&old[..], b"\n", new, b"\n"].concat()).unwrap();
        assert_eq!((found.gpu, found.gpu_celsius, found.memory_used), (Some(0.5), Some(40.0), Some(2)));
        let found = load(old).unwrap();
        assert_eq!((found.gpu, found.watts, found.swap_used), (Some(0.25), Some(10.5), None));
        for (power, expected) in [
            (r#""all_power":0.65,"sys_power":10.5"#, Some(10.5)),
            (r#""all_power":14.05,"sys_power":14.05"#, None),
            (r#""all_power":0.65,"sys_power":0.0"#, None),
            (r#""all_power":0.65"#, None),
        ] {
            let line = format!(r#"{{"memory":{{"ram_usage":1}},{power}}}"#);
            assert_eq!(load(line.as_bytes()).unwrap().watts, expected, "{power}");
        }
        assert!(load(b"\n").is_err() && load(b"{}").is_err() && load(br#"{"temp": 1 // Celsius"#).is_err());
    }
}
