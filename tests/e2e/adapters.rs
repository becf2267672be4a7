//! Adapters beside their model: fetched and verified like models, on every node of a replica, chosen by requests.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use russet_tests::cluster::TestCluster;
use serde_json::{Value, json};

use crate::mistakes::{apply, until_message};
use crate::path::{
    answers_right, apply_to_smoke, delete_and_wait, delete_object, prompts, serves, shards_of,
};

/// Matrices of the smoke model that the adapters change: names, columns and rows.
const MODULES: [(&str, usize, usize); 3] =
    [("self_attn.q_proj", 256, 256), ("self_attn.v_proj", 256, 128), ("mlp.down_proj", 512, 256)];
/// Width of their products.
const RANK: usize = 4;

/// Two adapters, of mlx-lm and of PEFT, answer beside their model on two nodes, each in its own way; a Model of an adapter
/// is deleted once no engine reads it.
pub async fn adapters(cluster: &mut TestCluster) -> Result<()> {
    let (pirate, clerk) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write_adapter(pirate.path(), 1, false)?;
    write_adapter(clerk.path(), 2, true)?;
    cluster.hub.add("adapters/pirate", pirate.path());
    cluster.hub.add("adapters/clerk", clerk.path());
    let model = |name: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: {name}}}\n\
             spec: {{source: {{uri: 'hf://adapters/{name}'}}}}\n"
        )
    };
    let deployment = |model: &str, adapters: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: tuned}}\n\
             spec:\n  modelRef: {{name: {model}}}\n  adapters: [{adapters}]\n  sharding:\n    mode: Pipeline\n    \
             ranks: 2\n    kv: {{contextTokens: 1024, maxSequences: 4}}\n"
        )
    };
    apply(cluster, &format!("{}---\n{}", model("pirate"), model("clerk"))).await?;
    apply_to_smoke(cluster, &deployment("pirate", "")).await?;
    until_message(cluster, "modeldeployments tuned", "Ready", &["pirate: it is an adapter", "spec.adapters"])
        .await?;
    let both = "{name: pirate, modelRef: {name: pirate}}, {name: clerk, modelRef: {name: clerk}}";
    apply(cluster, &deployment("smoke", both)).await?;
    serves(cluster, "tuned").await?;

    for (node, shard) in ["node-a", "node-b"].iter().zip(shards_of(cluster, "tuned").await?) {
        let adapters = shard["spec"]["adapters"].as_array().context("no adapters")?;
        ensure!(adapters.len() == 2, "a rank has {adapters:?}");
        for adapter in ["pirate", "clerk"] {
            let copies = cluster.get("modelcopies").await?;
            let is_there = |copy: &Value| {
                copy["spec"]["modelRef"]["name"] == adapter && copy["spec"]["nodeName"] == *node
            };
            let found = copies["items"].as_array().is_some_and(|all| all.iter().any(is_there));
            ensure!(found, "{node} has no copy of {adapter}");
        }
    }
    let models: Value = reqwest::get(format!("{}/models", cluster.base_url())).await?.json().await?;
    let ids: Vec<&str> = models["data"]
        .as_array()
        .context("no models")?
        .iter()
        .filter_map(|model| model["id"].as_str())
        .collect();
    for id in ["tuned", "tuned:pirate", "tuned:clerk"] {
        ensure!(ids.contains(&id), "/v1/models has {ids:?}");
    }

    // All at once, then one after the other: each as if it were alone.
    let names = ["tuned", "tuned:pirate", "tuned:clerk"];
    let together = try_join_all(names.map(|name| answer(cluster.base_url(), name))).await?;
    for (name, beside) in names.iter().zip(&together) {
        let alone = answer(cluster.base_url(), name).await?;
        ensure!(alone == *beside, "{name} says {alone:?} alone and {beside:?} beside others");
    }
    ensure!(together[0].contains("42"), "the model itself says {:?}", together[0]);
    ensure!(
        together[0] != together[1] && together[0] != together[2] && together[1] != together[2],
        "adapters change nothing: {together:?}"
    );
    answers_right(cluster, "tuned", prompts()?.into_iter().take(3)).await?;
    let (status, unknown) = ask(cluster.base_url(), "tuned:sailor").await?;
    ensure!(
        status == 404 && unknown["error"]["param"] == "model",
        "an unknown adapter is {status}: {unknown}"
    );

    // The Model of an adapter stays while an engine reads it.
    delete_object(cluster, "models/pirate").await?;
    ensure!(answer(cluster.base_url(), "tuned:pirate").await? == together[1], "its Model is on its way out");
    apply(cluster, &deployment("smoke", "{name: clerk, modelRef: {name: clerk}}")).await?;
    cluster.until("pirate is gone", async |cluster| Ok(cluster.get("models pirate").await.is_err())).await?;
    serves(cluster, "tuned").await?;
    ensure!(answer(cluster.base_url(), "tuned:clerk").await? == together[2], "clerk answers as before");
    let (status, _) = ask(cluster.base_url(), "tuned:pirate").await?;
    ensure!(status == 404, "an adapter that left the spec is {status}");
    delete_and_wait(cluster, "tuned").await?;
    delete_object(cluster, "models/clerk").await
}

async fn ask(base_url: String, model: &str) -> Result<(u16, Value)> {
    let messages = [json!({"role": "user", "content": "What is 17 + 25?"})];
    let body = json!({"model": model, "messages": messages, "max_tokens": 24, "temperature": 0});
    let answer =
        reqwest::Client::new().post(format!("{base_url}/chat/completions")).json(&body).send().await?;
    Ok((answer.status().as_u16(), answer.json().await?))
}

async fn answer(base_url: String, model: &str) -> Result<String> {
    let (status, body) = ask(base_url, model).await?;
    let text = body["choices"][0]["message"]["content"].as_str();
    Ok(text.with_context(|| format!("{model} answers {status}: {body}"))?.to_owned())
}

/// An adapter of the smoke model, of numbers that are as good as any.
fn write_adapter(folder: &Path, seed: u32, peft: bool) -> Result<()> {
    let mut state = seed;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for layer in 0..4 {
        for (module, inputs, outputs) in MODULES {
            let path = format!("model.layers.{layer}.{module}");
            let (names, shapes) = if peft {
                let names = ["lora_A", "lora_B"].map(|part| format!("base_model.model.{path}.{part}.weight"));
                (names, [[RANK, inputs], [outputs, RANK]])
            } else {
                (["lora_a", "lora_b"].map(|part| format!("{path}.{part}")), [[inputs, RANK], [RANK, outputs]])
            };
            for (name, shape) in names.into_iter().zip(shapes) {
                let begin = data.len();
                let count: usize = shape.iter().product();
                data.extend((0..count).flat_map(|_| number().to_le_bytes()));
                let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
                header.insert(name, entry);
            }
        }
    }
    let header = serde_json::to_vec(&header)?;
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let (name, config) = if peft {
        (
            "adapter_model.safetensors",
            json!({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}),
        )
    } else {
        let parameters = json!({"rank": RANK, "scale": 1.0, "dropout": 0.0});
        ("adapters.safetensors", json!({"fine_tune_type": "lora", "lora_parameters": parameters}))
    };
    std::fs::write(folder.join(name), file)?;
    std::fs::write(folder.join("adapter_config.json"), config.to_string())?;
    Ok(())
}
