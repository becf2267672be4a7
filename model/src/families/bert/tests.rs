//! What a BERT and a RoBERTa are, and what of them is refused; and decoders that embed.

use serde_json::{Value, json};

use crate::{
    description::{Classifier, Pooling, PoolingMode, Task},
    error::Error,
    safetensors::Headers,
    sentence_transformers::{MODULES, ModuleFiles},
    shape::ModelShape,
    tensors::{Role, tensor_role},
    testing::{headers, qwen3},
};

fn bert(fields: Value) -> Value {
    let mut config = json!({
        "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 40, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "attention_probs_dropout_prob": 0.1, "pad_token_id": 0,
    });
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    config
}

/// The tensors of such a model, as Transformers writes them.
fn stored(prefix: &str, classifier: &[&str]) -> Headers {
    let mut tensors = Vec::new();
    let mut push = |name: String, shape: &[u64]| tensors.push((name, "F32", shape.to_vec()));
    for (table, rows) in [("word", 100), ("position", 40), ("token_type", 2)] {
        push(format!("{prefix}embeddings.{table}_embeddings.weight"), &[rows, 64]);
    }
    let mut norms = vec![format!("{prefix}embeddings.LayerNorm")];
    for layer in 0..2 {
        let path = format!("{prefix}encoder.layer.{layer}");
        let square =
            ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"];
        for (field, [rows, columns]) in square
            .map(|field| (field, [64, 64]))
            .into_iter()
            .chain([("intermediate.dense", [128, 64]), ("output.dense", [64, 128])])
        {
            push(format!("{path}.{field}.weight"), &[rows, columns]);
            push(format!("{path}.{field}.bias"), &[rows]);
        }
        norms.extend(["attention.output", "output"].map(|field| format!("{path}.{field}.LayerNorm")));
    }
    for norm in norms {
        push(format!("{norm}.weight"), &[64]);
        push(format!("{norm}.bias"), &[64]);
    }
    for (name, rows) in classifier.iter().zip([64, 1]) {
        push(format!("{name}.weight"), &[rows, 64]);
        push(format!("{name}.bias"), &[rows]);
    }
    headers(&tensors)
}

#[test]
fn encoders_embed_and_with_a_classifier_rerank() {
    let one = json!({"id2label": {"0": "LABEL_0"}});
    let logits = json!({"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}});
    let roberta = |fields: Value| {
        let mut config = bert(json!({"model_type": "xlm-roberta", "pad_token_id": 1}));
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        config
    };
    let bert_head = ["bert.pooler.dense", "classifier"];
    let roberta_head = ["classifier.dense", "classifier.out_proj"];
    for (config, headers, classifier, context) in [
        (bert(json!({})), stored("", &[]), None, 40),
        (bert(json!({})), stored("bert.", &["bert.pooler.dense"]), None, 40),
        (bert(one.clone()), stored("bert.", &bert_head), Some(Classifier { sigmoid: true }), 40),
        (bert(logits), stored("bert.", &bert_head), Some(Classifier { sigmoid: false }), 40),
        (roberta(json!({})), stored("", &[]), None, 38),
        (roberta(one), stored("roberta.", &roberta_head), Some(Classifier { sigmoid: true }), 38),
    ] {
        let model = crate::read(config.to_string().as_bytes(), &headers).unwrap();
        let description = &model.description;
        let encoder = description.encoder.unwrap();
        assert_eq!((encoder.classifier, description.context_length), (classifier, context), "{config}");
        let task = if classifier.is_some() { Task::Rerank } else { Task::Embed };
        assert_eq!(description.task(), task);
        let shape = ModelShape::of(&model);
        assert_eq!((shape.task, shape.kv_bytes_per_token(), shape.max_stages()), (task, 0, 1));
        assert_eq!(shape.tensor_sizes(), [1]);
        assert_eq!(shape.why_indivisible(2).unwrap(), "1 model that does not generate cannot be cut into 2");
        let biases = if classifier.is_some() { 64 * 64 + 64 + 64 + 1 } else { 0 };
        let layer = 4 * (64 * 64 + 64) + 2 * 64 * 128 + 128 + 64 + 4 * 64;
        assert_eq!(shape.parameters, 142 * 64 + 2 * 64 + 2 * layer + biases);
        // Every tensor has the role by which sizes are told of models that are not run.
        for (tensor, _) in &model.tensors {
            assert_eq!(tensor_role(&tensor.sources[0]), Some(tensor.role), "{tensor:?}");
            assert_eq!(tensor_role(&tensor.name), Some(tensor.role), "{tensor:?}");
        }
        assert!(model.tensors.iter().any(|(tensor, _)| tensor.role == Role::Layer(1)));
    }
}

#[test]
fn encoders_that_are_not_run_say_why() {
    let head = ["bert.pooler.dense", "classifier"];
    for (fields, headers, said) in [
        (json!({"position_embedding_type": "relative_key"}), stored("", &[]), "positions \"relative_key\""),
        (json!({"hidden_act": "relu"}), stored("", &[]), "activation \"relu\""),
        (json!({"is_decoder": true}), stored("", &[]), "is_decoder of a bert model"),
        (json!({"id2label": {"0": "a", "1": "b"}}), stored("bert.", &head), "a classifier of 2 classes"),
        (json!({}), stored("bert.", &head), "a classifier of 2 classes"),
        (
            json!({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.ReLU"}),
            stored("bert.", &head),
            "activation \"ReLU\"",
        ),
        (json!({"num_attention_heads": 5}), stored("", &[]), "5 heads of 64 values"),
        (json!({"hidden_size": 32}), stored("", &[]), "config.json calls for [100, 32]"),
        (
            json!({"model_type": "roberta", "pad_token_id": 40}),
            stored("", &[]),
            "40 positions, of which 41 are padding's",
        ),
    ] {
        let error =
            crate::read(bert(fields.clone()).to_string().as_bytes(), &headers).unwrap_err().to_string();
        assert!(error.contains(said), "{fields}: {error}");
    }
}

fn modules(dense: Option<Value>) -> ModuleFiles {
    let mut list = vec![
        json!({"path": "", "type": "sentence_transformers.models.Transformer"}),
        json!({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}),
    ];
    let mut files = ModuleFiles::new();
    if let Some(config) = dense {
        list.push(json!({"path": "2_Dense", "type": "sentence_transformers.models.Dense"}));
        files.insert("2_Dense.config.json".into(), config.to_string().into());
    }
    list.push(json!({"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}));
    files.insert(MODULES.into(), json!(list).to_string().into());
    files.insert("1_Pooling.config.json".into(), json!({"pooling_mode": "lasttoken"}).to_string().into());
    files
}

#[test]
fn decoder_with_modules_embeds_and_needs_no_head() {
    // Exported as the model within, without its prefix, and without the head that config.json speaks of.
    let mut config = qwen3(2);
    config["tie_word_embeddings"] = json!(false);
    let tensors = crate::testing::tensors(&config, "BF16", None, false);
    let without_head = tensors.iter().filter(|(name, ..)| name != "lm_head.weight");
    let bare = without_head
        .map(|(name, dtype, shape)| (name.strip_prefix("model.").unwrap().to_owned(), *dtype, shape.clone()));
    let headers = headers(&bare.collect::<Vec<_>>());
    let read = |files: &ModuleFiles| crate::read_pooled(config.to_string().as_bytes(), &headers, None, files);
    let model = read(&modules(None)).unwrap();
    let pooling = Pooling { mode: PoolingMode::LastToken, normalize: true, ..Pooling::mean() };
    assert_eq!(model.description.pooling, Some(pooling));
    let shape = ModelShape::read_pooled(config.to_string().as_bytes(), &headers, &modules(None)).unwrap();
    assert_eq!((shape.task, shape.unsupported, shape.kv_bytes_per_token_per_layer), (Task::Embed, None, 0));
    assert!(!shape.quantized.is_empty(), "its matrices can be packed like those of others");
    // Without modules it generates, and lacks its head.
    assert!(matches!(read(&ModuleFiles::new()), Err(Error::File(_))));
    // A projection adds what it takes to the head.
    let dense = json!({"in_features": 64, "out_features": 32, "bias": false});
    let with_dense = ModelShape::of(&read(&modules(Some(dense))).unwrap());
    assert_eq!(with_dense.head_bytes - shape.head_bytes, 64 * 32 * 4);
    let narrow = json!({"in_features": 32, "out_features": 32});
    let error = read(&modules(Some(narrow))).unwrap_err().to_string();
    assert!(error.contains("reads 32 values, but is given 64"), "{error}");
}

#[test]
fn gemma_that_sees_ahead_embeds_with_half_its_window() {
    let config = json!({
        "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "vocab_size": 100,
        "max_position_embeddings": 2048, "sliding_window": 512, "use_bidirectional_attention": true,
    });
    let tensors = crate::testing::tensors(&config, "BF16", None, false);
    let model = crate::read(config.to_string().as_bytes(), &headers(&tensors)).unwrap();
    let window = |layer: &crate::description::Layer| match &layer.mixer {
        Some(crate::description::Mixer::Attention(attention)) => {
            assert!(!attention.causal);
            attention.window
        }
        other => panic!("{other:?}"),
    };
    let windows: Vec<Option<u32>> = model.description.layers.iter().map(window).collect();
    assert_eq!(windows, [Some(257), Some(257), Some(257), Some(257), Some(257), None]);
    assert_eq!(model.description.task(), Task::Embed);
}
