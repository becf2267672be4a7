//! The chip catalogue: bandwidth, compute and ports of Apple's chips, as data. The stated memory bandwidth is
//! an upper bound; the shaders' TFLOPS are FP32, to which FP16 is equal. Not here: probing. A chip that is
//! not listed has no figures and has to be measured.
//!
//! Sources: Apple's technical specifications for cores, memory, bandwidth and Thunderbolt; shader TFLOPS are
//! cores × 256 flops × clock, collected for huggingface.js (PR 1044) and, for M5, llmfit (PR 551). The M5
//! families have a matrix unit in every GPU core: prefill there runs at 46–50 effective TFLOPS where 20 of
//! shaders at the share other chips reach would give 14–15, so a factor of 3 (Apple says "up to 4"). There is
//! no M5 Ultra on sale, so none is listed.

use crate::performance_model::GpuProfile;

/// One chip as sold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    /// Its name without the manufacturer's, such as `M3 Ultra`.
    pub name: &'static str,
    /// Cores of the GPU.
    pub gpu_cores: u32,
    /// Memory bandwidth, GB/s.
    pub bandwidth: f64,
    /// TFLOPS of the shaders.
    pub teraflops: f64,
    /// Speed of large matrix products relative to its shaders.
    pub matmul_speedup: f64,
    /// Generation of its Thunderbolt ports; RDMA needs 5.
    pub thunderbolt: u8,
    /// Memory sizes it is sold with, GiB, if they distinguish it from its sibling; empty otherwise.
    pub memory: &'static [u32],
}

/// Machines that agents know by model identifier only, because the system hides the chip's name.
const MODEL_IDENTIFIERS: [(&str, &str); 2] = [("Mac15,14", "M3 Ultra"), ("Mac17,9", "M5 Pro")];

const fn chip(name: &'static str, gpu_cores: u32, bandwidth: f64, teraflops: f64, thunderbolt: u8) -> Chip {
    Chip { name, gpu_cores, bandwidth, teraflops, matmul_speedup: 1.0, thunderbolt, memory: &[] }
}

/// The full chip of every name comes before its smaller siblings: most serving machines have it.
pub const CHIPS: [Chip; 35] = [
    chip("M1", 8, 68.0, 2.6, 3),
    chip("M1", 7, 68.0, 2.3, 3),
    chip("M1 Pro", 16, 200.0, 5.2, 4),
    chip("M1 Pro", 14, 200.0, 4.55, 4),
    chip("M1 Max", 32, 400.0, 10.4, 4),
    chip("M1 Max", 24, 400.0, 7.8, 4),
    chip("M1 Ultra", 64, 800.0, 20.9, 4),
    chip("M1 Ultra", 48, 800.0, 15.7, 4),
    chip("M2", 10, 100.0, 3.6, 3),
    chip("M2", 8, 100.0, 2.9, 3),
    chip("M2 Pro", 19, 200.0, 6.8, 4),
    chip("M2 Pro", 16, 200.0, 5.7, 4),
    chip("M2 Max", 38, 400.0, 13.6, 4),
    chip("M2 Max", 30, 400.0, 10.7, 4),
    chip("M2 Ultra", 76, 800.0, 27.2, 4),
    chip("M2 Ultra", 60, 800.0, 21.5, 4),
    chip("M3", 10, 100.0, 4.1, 3),
    chip("M3", 8, 100.0, 3.3, 3),
    chip("M3 Pro", 18, 150.0, 7.4, 4),
    chip("M3 Pro", 14, 150.0, 5.7, 4),
    with_memory_sizes(chip("M3 Max", 40, 400.0, 14.2, 4), &[48, 64, 128]),
    with_memory_sizes(chip("M3 Max", 30, 300.0, 10.7, 4), &[36, 96]),
    with_memory_sizes(chip("M3 Ultra", 80, 819.0, 28.0, 5), &[96, 256, 512]),
    with_memory_sizes(chip("M3 Ultra", 60, 819.0, 21.0, 5), &[96, 256]),
    chip("M4", 10, 120.0, 4.6, 4),
    chip("M4", 8, 120.0, 3.7, 4),
    chip("M4 Pro", 20, 273.0, 9.2, 5),
    chip("M4 Pro", 16, 273.0, 7.4, 5),
    with_memory_sizes(chip("M4 Max", 40, 546.0, 18.4, 5), &[48, 64, 128]),
    with_memory_sizes(chip("M4 Max", 32, 410.0, 14.7, 5), &[36]),
    with_neural_accelerators(chip("M5", 10, 153.6, 5.0, 4)),
    with_neural_accelerators(chip("M5 Pro", 20, 307.0, 10.0, 5)),
    with_neural_accelerators(chip("M5 Pro", 16, 307.0, 8.0, 5)),
    with_neural_accelerators(with_memory_sizes(chip("M5 Max", 40, 614.0, 20.0, 5), &[48, 64, 128])),
    with_neural_accelerators(with_memory_sizes(chip("M5 Max", 32, 460.0, 16.0, 5), &[36])),
];

const fn with_memory_sizes(chip: Chip, memory: &'static [u32]) -> Chip {
    Chip { memory, ..chip }
}

const fn with_neural_accelerators(chip: Chip) -> Chip {
    Chip { matmul_speedup: 3.0, ..chip }
}

/// The chip that an agent reports as `name` (`Apple M2 Max`, or `Mac15,14` if the system reports no more).
/// GPU cores distinguish siblings; without them the memory in GiB does if it can, else it is the full chip.
/// `None` for an unknown chip, and for a number of cores that no chip of the name has.
pub fn find(name: &str, gpu_cores: Option<u32>, memory_gib: Option<u32>) -> Option<&'static Chip> {
    let name = name.trim();
    let name = MODEL_IDENTIFIERS.iter().find(|(model, _)| *model == name).map_or(name, |(_, chip)| chip);
    let name = name.strip_prefix("Apple ").unwrap_or(name);
    let mut siblings = CHIPS.iter().filter(|chip| chip.name == name);
    if let Some(cores) = gpu_cores {
        return siblings.find(|chip| chip.gpu_cores == cores);
    }
    let sold_so = |chip: &&Chip| memory_gib.is_none_or(|gib| chip.memory.contains(&gib));
    siblings.clone().find(sold_so).or_else(|| siblings.next())
}

impl From<&Chip> for GpuProfile {
    fn from(chip: &Chip) -> Self {
        GpuProfile {
            bandwidth: chip.bandwidth * 1e9,
            flops: chip.teraflops * 1e12,
            cores: f64::from(chip.gpu_cores),
            matmul_speedup: chip.matmul_speedup,
            // GPUs of M1 and M2 have no BF16; Metal converts every value.
            emulates_bfloat16: chip.name.starts_with("M1") || chip.name.starts_with("M2"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_are_found_as_agents_report_them() {
        for (name, cores, gib, found) in [
            ("Apple M2 Max", None, Some(64), Some(("M2 Max", 38))),
            ("Apple M2 Max", Some(30), Some(64), Some(("M2 Max", 30))),
            ("Apple M3 Ultra", None, Some(512), Some(("M3 Ultra", 80))),
            ("Apple M3 Ultra", Some(60), Some(256), Some(("M3 Ultra", 60))),
            ("Apple M4 Max", None, Some(36), Some(("M4 Max", 32))),
            ("Apple M4 Max", None, None, Some(("M4 Max", 40))),
            ("M5", None, Some(16), Some(("M5", 10))),
            ("Mac17,9", None, Some(48), Some(("M5 Pro", 20))),
            ("Mac15,14", None, None, Some(("M3 Ultra", 80))),
            ("Apple M3 Max", Some(64), None, None), // no such chip: rather none than a wrong one
            ("Apple M1 (Virtual)", None, Some(8), None), // a virtual machine has no GPU of its own
            ("Apple M9 Omega", None, None, None),
            ("Quick 9000", None, None, None),
        ] {
            let chip = find(name, cores, gib);
            assert_eq!(chip.map(|chip| (chip.name, chip.gpu_cores)), found, "{name} {cores:?} {gib:?}");
        }
    }

    #[test]
    fn the_catalogue_is_in_order() {
        for pair in CHIPS.windows(2) {
            if let [full, small] = pair
                && full.name == small.name
            {
                assert!(full.gpu_cores > small.gpu_cores, "{} has its full chip first", full.name);
                assert!(full.teraflops > small.teraflops && full.bandwidth >= small.bandwidth);
            }
        }
        for chip in &CHIPS {
            let clock = GpuProfile::from(chip).clock() / 1e9;
            assert!((1.2..2.0).contains(&clock), "{} {}: {clock} GHz", chip.name, chip.gpu_cores);
            assert_eq!(chip.matmul_speedup > 1.0, chip.name.starts_with("M5"), "{}", chip.name);
        }
    }
}
