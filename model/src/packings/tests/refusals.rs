//! Settings and headers that are refused: each error names what is wrong, with its numbers.

use super::*;

#[test]
fn what_no_exporter_writes_is_refused_with_its_numbers() {
    let fp8 = json!({"quant_method": "fp8"});
    let integers = |bits: u32, more: Value| {
        let mut settings = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int"}}}});
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        settings
    };
    let four = || integers(4, json!({}));
    let awq = |more: Value| {
        let mut settings = json!({"quant_method": "awq", "bits": 4});
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        settings
    };
    let gptq = || json!({"quant_method": "gptq", "bits": 4});
    let tensor = |name: &'static str, dtype: &'static str, shape: &[u64]| -> PlayedTensor {
        (name, dtype, shape.to_vec(), Vec::new())
    };
    let float8 = |scales: &[u64], dtype| {
        vec![tensor("a.weight", "F8_E4M3", &[130, 4]), tensor("a.weight_scale_inv", dtype, scales)]
    };
    let packed = |rows: u64, columns: u64, scales: &[u64]| {
        vec![tensor("a.weight_packed", "I32", &[rows, columns]), tensor("a.weight_scale", "BF16", scales)]
    };
    let columns = |dtype, qweight: &[u64], scales: &[u64], zeros: &[u64]| {
        vec![
            tensor("a.qweight", dtype, qweight),
            tensor("a.scales", "F16", scales),
            tensor("a.qzeros", "I32", zeros),
        ]
    };
    let with = |mut tensors: Vec<PlayedTensor>, more: PlayedTensor| {
        tensors.push(more);
        tensors
    };
    let none: Vec<PlayedTensor> = Vec::new();
    for (settings, tensors, said) in [
        (
            json!({"quant_method": "fp8", "weight_block_size": [32, 32]}),
            none.clone(),
            "weight_block_size: it is [32,32], which is not supported; supported is [128, 128]",
        ),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), none.clone(), "fmt: it is \"e5m2\""),
        (
            fp8.clone(),
            float8(&[1, 1], "F32"),
            "it has shape [1, 1], which is neither one for each 128 × 128 of [130, 4] nor one for all",
        ),
        (fp8.clone(), float8(&[2], "F32"), "it has shape [2]"),
        (fp8, float8(&[2, 1], "U8"), "it is U8 [2, 1], not F16, BF16 or F32 [2, 1]"),
        (
            json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
            none.clone(),
            "format: it is \"float-quantized\", which is not supported; supported is pack-quantized",
        ),
        (json!({"quant_method": "compressed-tensors"}), none.clone(), "config_groups: it is without weights"),
        (
            integers(3, json!({})),
            none.clone(),
            "config_groups.group_0.weights.num_bits: it is 3, which is not supported; supported is 4, 8",
        ),
        (
            integers(
                4,
                json!({"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}),
            ),
            none.clone(),
            "it is of 4 and of 8 bits",
        ),
        (
            integers(4, json!({"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}})),
            none.clone(),
            "config_groups.a.weights.type: it is \"float\"",
        ),
        (four(), vec![tensor("a.weight_packed", "I32", &[8, 4])], "tensor a.weight_scale is missing"),
        (four(), packed(8, 4, &[7, 1]), "it is BF16 [7, 1], not F16, BF16 or F32 [8, 1]"),
        (four(), packed(0, 4, &[0, 1]), "it is I32 [0, 4], not a matrix of I32"),
        (
            four(),
            with(packed(8, 4, &[8, 1]), tensor("a.weight_zero_point", "I8", &[8, 1])),
            "it is I8 [8, 1], not I32 [1, 1]",
        ),
        (
            four(),
            with(packed(8, 4, &[8, 1]), tensor("a.weight_g_idx", "I32", &[32])),
            "a.weight_g_idx: its columns are in the order of activations",
        ),
        (awq(json!({"version": "gemv"})), none.clone(), "version: it is \"gemv\""),
        (
            awq(json!({})),
            columns("I32", &[60, 2], &[2, 16], &[2, 2]),
            "it is I32 [60, 2], not of rows that are a multiple of 8",
        ),
        (
            awq(json!({})),
            columns("I32", &[64, 2], &[2, 15], &[2, 2]),
            "it is F16 [2, 15], not F16, BF16 or F32 [2, 16]",
        ),
        (awq(json!({})), columns("I32", &[64, 2], &[2, 16], &[2, 3]), "it is I32 [2, 3], not I32 [2, 2]"),
        (
            awq(json!({})),
            columns("F16", &[64, 2], &[2, 16], &[2, 2]),
            "it is F16 [64, 2], not a matrix of I32",
        ),
        (
            awq(json!({})),
            with(columns("I32", &[64, 2], &[2, 16], &[2, 2]), tensor("b.qweight", "I32", &[8])),
            "it is I32 [8], not a matrix of I32",
        ),
        (
            json!({"quant_method": "gptq"}),
            none.clone(),
            "bits: it is absent, which is not supported; supported is 4, 8",
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "desc_act": true}),
            none.clone(),
            "quantization_config.desc_act: columns in the order of activations are not supported",
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
            none,
            "checkpoint_format: it is \"marlin\"",
        ),
        (gptq(), columns("I32", &[8, 16], &[2, 16], &[2, 1]), "it is I32 [2, 1], not I32 [2, 2]"),
        (
            gptq(),
            with(columns("I32", &[8, 16], &[2, 16], &[2, 2]), tensor("a.g_idx", "I32", &[63])),
            "it is I32 [63], not I32 [64]",
        ),
        (
            gptq(),
            with(columns("I32", &[8, 16], &[3, 16], &[3, 2]), tensor("a.g_idx", "I32", &[64])),
            "not of inputs that 3 groups share evenly",
        ),
        (
            gptq(),
            with(columns("I32", &[8, 16], &[2, 16], &[2, 2]), tensor("a.weight", "BF16", &[8])),
            "tensor a.weight is there twice",
        ),
    ] {
        let error = conversion(&settings, &tensors).unwrap_err().to_string();
        assert!(error.contains(said), "{settings}: {error}");
    }
}
