//! Files of adapters that are read, refused, and bound to a model.

use serde_json::{Value, json};

use super::*;
use crate::{
    error::Error,
    tensors::{Recipe, Rows, ShardAxis, Stored, Tensor},
};

/// Headers of one file of 32-bit tensors with these names and shapes.
fn headers(tensors: &[(&str, &[u64])]) -> Headers {
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let begin = end;
        end += shape.iter().product::<u64>() * 4;
        header.insert(
            (*name).to_owned(),
            json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut headers = Headers::default();
    headers.add("adapters.safetensors", &header, 8 + header.len() as u64 + end).unwrap();
    headers
}

fn mlx(kind: &str) -> Value {
    json!({"fine_tune_type": kind, "num_layers": 2, "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0}})
}

fn read(config: &Value, tensors: &[(&str, &[u64])]) -> Result<Adapter, String> {
    let config = serde_json::to_vec(config).unwrap();
    Adapter::read(&config, &headers(tensors)).map_err(|error| error.to_string())
}

const Q: &str = "model.layers.1.self_attn.q_proj";

#[test]
fn adapters_of_both_makers_are_read() {
    let [a, b, m] = [".lora_a", ".lora_b", ".m"].map(|end| format!("{Q}{end}"));
    let lora = read(&mlx("lora"), &[(&a, &[8, 2]), (&b, &[2, 6])]).unwrap();
    let expected = AdapterModule {
        path: Q.to_owned(),
        a: Factor { tensor: a.clone(), transposed: false },
        b: Factor { tensor: b.clone(), transposed: false },
        magnitude: None,
        scale: 20.0,
        rank: 2,
        inputs: 8,
        outputs: 6,
        experts: None,
    };
    assert_eq!(lora.modules, [expected]);
    let shape =
        AdapterShape { kind: AdapterKind::Lora, rank: 2, layers: 2, modules: 1, widest: 6, bytes: 112 };
    assert_eq!(lora.shape(), shape);
    let dora = read(&mlx("dora"), &[(&a, &[8, 2]), (&b, &[2, 6]), (&m, &[6])]).unwrap();
    assert_eq!((dora.kind, dora.modules[0].magnitude.as_deref()), (AdapterKind::Dora, Some(m.as_str())));
    let experts = read(&mlx("lora"), &[(&a, &[4, 2, 8]), (&b, &[4, 6, 2])]).unwrap();
    let AdapterModule { inputs, outputs, rank, experts, a: Factor { transposed, .. }, .. } =
        experts.modules[0];
    assert_eq!((inputs, outputs, rank, experts, transposed), (8, 6, 2, Some(4), true));

    // PEFT's: another prefix, transposed factors, a scale by the rank.
    let [a, b, m] = [".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"]
        .map(|end| format!("base_model.model.{Q}{end}"));
    let base =
        json!({"peft_type": "LORA", "r": 2, "lora_alpha": 32, "bias": "none", "modules_to_save": null});
    for (fields, has_lengths, scale) in [
        (json!({}), false, 16.0),
        (json!({"use_rslora": true}), false, 32.0 / 2_f32.sqrt()),
        (json!({"alpha_pattern": {"q_proj": 8}}), false, 4.0),
        (json!({"alpha_pattern": {"proj": 8}}), false, 16.0),
        (json!({"use_dora": true}), true, 16.0),
    ] {
        let mut config = base.clone();
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let mut tensors: Vec<(&str, &[u64])> = vec![(&a, &[2, 8]), (&b, &[6, 2])];
        tensors.extend(has_lengths.then_some((m.as_str(), &[6][..])));
        let adapter = read(&config, &tensors).unwrap();
        let module = &adapter.modules[0];
        assert_eq!((module.path.as_str(), module.scale), (Q, scale), "{fields}");
        assert_eq!((module.inputs, module.outputs, module.rank, module.a.transposed), (8, 6, 2, true));
        assert_eq!(module.magnitude.is_some(), has_lengths);
    }
}

#[test]
fn what_no_engine_computes_is_refused_by_name() {
    let [a, b, m] = [".lora_a", ".lora_b", ".m"].map(|end| format!("{Q}{end}"));
    let pair: &[(&str, &[u64])] = &[(&a, &[8, 2]), (&b, &[2, 6])];
    let peft = |fields: Value| {
        let mut config = json!({"peft_type": "LORA", "lora_alpha": 32});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        config
    };
    let odd = format!("{Q}.lora_c");
    for (config, tensors, expected) in [
        (json!({}), pair, "adapter_config.json lora_parameters.scale: it is missing"),
        (mlx("full"), pair, "adapter_config.json fine_tune_type: \"full\" is not supported"),
        (peft(json!({"peft_type": "IA3"})), pair, "peft_type: \"IA3\" is not supported"),
        (
            peft(json!({"modules_to_save": ["lm_head"]})),
            pair,
            "modules_to_save: [\"lm_head\"] is not supported",
        ),
        (peft(json!({"bias": "all"})), pair, "bias: \"all\" is not supported"),
        (peft(json!({"lora_alpha": "x"})), pair, "lora_alpha: \"x\" is no number"),
        (peft(json!({"alpha_pattern": {".*": 1}})), pair, "alpha_pattern: \".*\" is no name"),
        (mlx("lora"), &[], "it changes nothing"),
        (mlx("lora"), &[(&a, &[8, 2])], "has one of the two matrices"),
        (mlx("lora"), &[(&a, &[8, 2]), (&b, &[3, 6])], "matrices are [8, 2] and [3, 6]"),
        (mlx("lora"), &[(&a, &[8, 2]), (&b, &[2, 6]), (&odd, &[1])], "it is no part of a LoRA or DoRA"),
        (mlx("lora"), &[(&a, &[8, 2]), (&b, &[2, 6]), (&m, &[6])], "its adapter is no DoRA"),
        (mlx("dora"), pair, "has 6 rows, and no lengths of them"),
        (mlx("dora"), &[(&a, &[8, 2]), (&b, &[2, 6]), (&m, &[5])], "has 6 rows, and [5] lengths"),
        (mlx("lora"), &[("lm_head.lora_a", &[8, 2]), ("lm_head.lora_b", &[2, 6])], "outside the layers"),
    ] {
        let error = read(&config, tensors).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // Agents report it, so that nothing is placed.
    let config = serde_json::to_vec(&mlx("full")).unwrap();
    let shape = ModelShape::read_adapter(&config, &headers(pair)).unwrap();
    assert!(shape.unsupported.unwrap().contains("fine_tune_type") && shape.adapter.is_some());
}

fn tensor(name: &str, source: &str, shape: &[u64], recipe: Recipe) -> (Tensor, Stored) {
    let tensor = Tensor {
        name: name.to_owned(),
        role: tensor_role(name).unwrap(),
        shape: shape.to_vec(),
        axis: ShardAxis::Replicated,
        sources: vec![source.to_owned()],
        recipe,
        is_matrix: true,
        packs_to: None,
        is_auxiliary: false,
    };
    (tensor, Stored::default())
}

#[test]
fn modules_are_bound_to_the_tensors_of_a_model() {
    let (a, b) = ("model.layers.0.attn.qkv_proj.lora_a", "model.layers.0.attn.qkv_proj.lora_b");
    let adapter = read(&mlx("lora"), &[(a, &[8, 2]), (b, &[2, 6])]).unwrap();
    let part = |name: &str, from: u64| {
        let recipe = Recipe::Rows(Rows { dim: 0, of: 6, from, step: 1 });
        let name = format!("model.layers.0.attn.{name}.weight");
        tensor(&name, "language_model.model.layers.0.attn.qkv_proj.weight", &[3, 8], recipe)
    };
    let bound = adapter.bind(&[part("q_proj", 0), part("k_proj", 3)]).unwrap();
    let rows = |name: &str| bound[&format!("model.layers.0.attn.{name}.weight")].rows.unwrap().from;
    assert_eq!((bound.len(), rows("q_proj"), rows("k_proj")), (2, 0, 3));

    let own = "model.layers.0.attn.qkv_proj.weight";
    let whole = |shape: &[u64], recipe| [tensor(own, own, shape, recipe)];
    assert_eq!(adapter.bind(&whole(&[6, 8], Recipe::AsIs)).unwrap()[own].rows, None);
    let heads = Recipe::HeadRows { of: 6, from: 0, transposed: false };
    for (tensors, expected) in [
        (whole(&[6, 16], Recipe::AsIs), "is of a matrix [6, 8], and the model's is [6, 16]"),
        (whole(&[1, 3, 8], heads), "the engine takes this matrix apart"),
        ([tensor("lm_head.weight", "lm_head.weight", &[6, 8], Recipe::AsIs)], "the model has no such matrix"),
    ] {
        let error = Error::from(adapter.bind(&tensors).unwrap_err()).to_string();
        assert!(error.contains("model.layers.0.attn.qkv_proj") && error.contains(expected), "{error}");
    }
}
