//! `nvidia-smi`, which queries NVML: load, power and temperature of NVIDIA GPUs.

use crate::machine_load::MachineLoad;

/// Arguments of the query.
pub const QUERY_ARGUMENTS: [&str; 2] =
    ["--query-gpu=utilization.gpu,power.draw,temperature.gpu", "--format=csv,noheader,nounits"];

/// Parses a line for each GPU: mean load, total power, highest temperature. Unknown values are `[N/A]`.
pub fn load(output: &[u8]) -> Option<MachineLoad> {
    let text = String::from_utf8_lossy(output);
    let column = |place: usize| -> Vec<f64> {
        let cells = text.lines().filter_map(|line| line.split(',').nth(place)?.trim().parse::<f64>().ok());
        cells.filter(|number| number.is_finite()).collect()
    };
    let [busy, watts, celsius] = [column(0), column(1), column(2)];
    let some = |of: &[f64], value: f64| (!of.is_empty()).then_some(value);
    let load = MachineLoad {
        gpu: some(&busy, busy.iter().sum::<f64>() / busy.len() as f64 / 100.0),
        gpu_watts: some(&watts, watts.iter().sum()),
        gpu_celsius: some(&celsius, celsius.iter().copied().fold(f64::MIN, f64::max)),
        ..MachineLoad::default()
    };
    (load != MachineLoad::default()).then_some(load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_gpus_are_one_machine() {
        let found = load(b"50, 120.50, 61\n100, [N/A], 70\n").unwrap();
        assert_eq!((found.gpu, found.gpu_watts, found.gpu_celsius), (Some(0.75), Some(120.5), Some(70.0)));
        assert_eq!((found.watts, found.cpu_celsius), (None, None));
        assert_eq!(load(b"No devices were found\n"), None);
        assert_eq!(load(b""), None);
    }
}
