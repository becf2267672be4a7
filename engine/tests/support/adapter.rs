//! Adapters with random weights, as mlx-lm writes them.

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use tempfile::TempDir;

/// Width of every product.
const RANK: usize = 4;

/// A module that an adapter changes: its name in a layer, columns and rows, and how many experts it is of.
pub type AdaptedModule = (&'static str, usize, usize, Option<usize>);

/// An adapter as mlx-lm writes it: of these modules of every of four layers.
pub fn adapter(kind: &str, seed: u64, modules: &[AdaptedModule]) -> TempDir {
    let mut random = StdRng::seed_from_u64(seed);
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: String, shape: Vec<usize>, around: f32| {
        let begin = data.len();
        let count: usize = shape.iter().product();
        data.extend((0..count).flat_map(|_| (around + random.random_range(-0.3..0.3_f32)).to_le_bytes()));
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    };
    for layer in 0..4 {
        for &(module, inputs, outputs, experts) in modules {
            let path = format!("model.layers.{layer}.{module}");
            let (a, b) = match experts {
                None => (vec![inputs, RANK], vec![RANK, outputs]),
                Some(count) => (vec![count, RANK, inputs], vec![count, outputs, RANK]),
            };
            add(format!("{path}.lora_a"), a, 0.0);
            add(format!("{path}.lora_b"), b, 0.0);
            if kind == "dora" {
                add(format!("{path}.m"), vec![outputs], 1.0);
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(dir.path().join("adapters.safetensors"), file).unwrap();
    let config =
        json!({"fine_tune_type": kind, "lora_parameters": {"rank": RANK, "scale": 1.0, "dropout": 0.0}});
    std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    dir
}
