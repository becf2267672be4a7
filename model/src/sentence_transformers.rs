//! The files by which sentence-transformers knows that a model embeds, and how: `modules.json` names the modules behind
//! the transformer, each in a folder of its own. A model's folder has no folders here, so that no file of a source leads
//! out of it: `1_Pooling/config.json` is kept as `1_Pooling.config.json`.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{
    config::MAX_SIZE,
    description::{DenseModule, Pooling, PoolingMode},
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
    json,
    object::Object,
};

/// The list of modules.
pub const MODULES: &str = "modules.json";
/// Settings of the transformer as a module.
pub const SENTENCE_CONFIG: &str = "sentence_bert_config.json";
/// Longest of these files that is read.
pub const MAX_MODULE_BYTES: u64 = 64 << 10;
/// Most modules; published models have up to five.
const MAX_MODULES: usize = 16;
/// Files of a module that are data.
pub const MODULE_FILES: [&str; 2] = ["config.json", "model.safetensors"];
const REMEDY: &str = "use a model whose modules are Transformer, Pooling, Dense and Normalize";

/// The small files of a source, by the names that they have in a model's folder.
pub type ModuleFiles = BTreeMap<String, Vec<u8>>;

/// The name in a model's folder of a module's file, given its path in the repository; `None` where it is no such file.
pub fn flat_name(path: &str) -> Option<String> {
    let (folder, file) = path.split_once('/')?;
    (is_module(folder) && MODULE_FILES.contains(&file)).then(|| format!("{folder}.{file}"))
}

/// The path in the repository of a file that has this name in a model's folder.
pub fn nested_path(name: &str) -> Option<String> {
    let (folder, file) = name.split_once('.')?;
    (is_module(folder) && MODULE_FILES.contains(&file)).then(|| format!("{folder}/{file}"))
}

/// Whether a folder is called as sentence-transformers calls those of modules: `1_Pooling`.
fn is_module(folder: &str) -> bool {
    let Some((number, kind)) = folder.split_once('_') else { return false };
    let digits = (1..=2).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    digits && (1..=40).contains(&kind.len()) && kind.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Names, in a model's folder, of the files beside [`MODULES`] that it takes: of configurations, which [`pooling`] reads,
/// and of the weights of projections.
pub fn module_files(modules: &[u8]) -> Result<Vec<String>, Error> {
    let mut names = vec![SENTENCE_CONFIG.to_owned()];
    for module in read_modules(modules)? {
        let kind = module.kind();
        if matches!(kind, "Pooling" | "Dense") {
            names.push(module.config()?);
        }
        if kind == "Dense" {
            names.extend(flat_name(&format!("{}/model.safetensors", module.path)));
        }
    }
    Ok(names)
}

/// How a model with these files embeds; `None` where it has no modules, and so is none that embeds.
pub fn pooling(files: &ModuleFiles) -> Result<Option<Pooling>, Error> {
    let Some(modules) = files.get(MODULES) else { return Ok(None) };
    let modules = read_modules(modules)?;
    let mut found: Option<Pooling> = None;
    for module in &modules {
        match (module.kind(), &mut found) {
            ("Transformer", None) => {}
            ("Pooling", None) => {
                let Object(config): Object<PoolingConfig> = module.read(files)?;
                found = Some(Pooling { mode: config.mode(&module.path)?, ..Pooling::mean() });
            }
            ("Dense", Some(pooling)) if !pooling.normalize => {
                let Object(config): Object<DenseConfig> = module.read(files)?;
                pooling.dense.push(config.dense(&module.path)?);
            }
            ("Normalize", Some(pooling)) => pooling.normalize = true,
            (kind, _) => {
                let kind = excerpt(kind);
                let reason = format!("a module {kind:?} at this place is not supported");
                return Err(unsupported(MODULES, reason, REMEDY));
            }
        }
    }
    // A list that ends before its pooling is one of a model that does something else.
    let Some(mut pooling) = found else { return Ok(None) };
    if let Some(config) = files.get(SENTENCE_CONFIG) {
        let Object(SentenceConfig { max_seq_length }) = json::read(SENTENCE_CONFIG, config)?;
        pooling.max_tokens = max_seq_length.filter(|&tokens| tokens > 0);
    }
    Ok(Some(pooling))
}

fn unsupported(place: &str, reason: impl Into<String>, remedy: &str) -> Error {
    Unsupported { place: place.to_owned(), reason: reason.into(), remedy: remedy.to_owned() }.into()
}

fn read_modules(bytes: &[u8]) -> Result<Vec<Module>, Error> {
    let modules: Vec<Object<Module>> = json::read(MODULES, bytes)?;
    if modules.len() > MAX_MODULES {
        let problem = format!("it has {} modules, more than the limit of {MAX_MODULES}", modules.len());
        return Err(FileError::bad_json(MODULES, &problem).into());
    }
    Ok(modules.into_iter().map(|Object(module)| module).collect())
}

#[derive(Deserialize)]
struct Module {
    #[serde(default)]
    path: String,
    #[serde(rename = "type")]
    class: String,
}

impl Module {
    /// The last part of its class: `sentence_transformers.models.Pooling` moved in later releases.
    fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }

    /// Name of its configuration in a model's folder.
    fn config(&self) -> Result<String, Error> {
        flat_name(&format!("{}/config.json", self.path)).ok_or_else(|| {
            let path = excerpt(&self.path);
            let reason = format!("the folder {path:?} of a module is not named like `1_Pooling`");
            unsupported(MODULES, reason, "take the files as their repository has them")
        })
    }

    fn read<T: serde::de::DeserializeOwned>(&self, files: &ModuleFiles) -> Result<T, Error> {
        let name = self.config()?;
        let bytes = files.get(&name).ok_or_else(|| FileError::Missing { file: name.clone() })?;
        Ok(json::read(&name, bytes)?)
    }
}

#[derive(Deserialize)]
struct SentenceConfig {
    #[serde(default)]
    max_seq_length: Option<u32>,
}

#[derive(Deserialize)]
struct PoolingConfig {
    /// As newer releases write it.
    #[serde(default)]
    pooling_mode: Option<String>,
    #[serde(default)]
    pooling_mode_cls_token: bool,
    #[serde(default)]
    pooling_mode_mean_tokens: bool,
    #[serde(default)]
    pooling_mode_max_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_sqrt_len_tokens: bool,
    #[serde(default)]
    pooling_mode_weightedmean_tokens: bool,
    #[serde(default)]
    pooling_mode_lasttoken: bool,
}

impl PoolingConfig {
    fn mode(&self, path: &str) -> Result<PoolingMode, Error> {
        let flags = [
            (self.pooling_mode_cls_token, "cls"),
            (self.pooling_mode_mean_tokens, "mean"),
            (self.pooling_mode_max_tokens, "max"),
            (self.pooling_mode_mean_sqrt_len_tokens, "mean_sqrt_len_tokens"),
            (self.pooling_mode_weightedmean_tokens, "weightedmean"),
            (self.pooling_mode_lasttoken, "lasttoken"),
        ];
        let flags: Vec<&str> = flags.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let modes = self.pooling_mode.as_deref().map_or(flags, |mode| vec![mode]);
        match modes[..] {
            ["cls"] => Ok(PoolingMode::Cls),
            ["mean"] => Ok(PoolingMode::Mean),
            ["max"] => Ok(PoolingMode::Max),
            ["lasttoken"] => Ok(PoolingMode::LastToken),
            _ => {
                let modes: String = modes.join(" with ").chars().take(100).collect();
                let reason =
                    format!("pooling {modes:?} is not supported; supported are cls, mean, max and lasttoken");
                Err(unsupported(path, reason, "use a model with one of these"))
            }
        }
    }
}

#[derive(Deserialize)]
struct DenseConfig {
    in_features: u32,
    out_features: u32,
    #[serde(default = "yes")]
    bias: bool,
    #[serde(default)]
    activation_function: Option<String>,
}

fn yes() -> bool {
    true
}

impl DenseConfig {
    fn dense(self, path: &str) -> Result<DenseModule, Error> {
        let Self { in_features: inputs, out_features: outputs, bias, activation_function } = self;
        if [inputs, outputs].iter().any(|&size| size == 0 || size > MAX_SIZE) {
            let reason = format!("a projection from {inputs} to {outputs} values cannot be");
            return Err(unsupported(path, reason, "take the files as their repository has them"));
        }
        let activation = activation_function.as_deref().and_then(|class| class.rsplit('.').next());
        let tanh = match activation {
            None | Some("Tanh") => true,
            Some("Identity") => false,
            Some(other) => {
                let other = excerpt(other);
                let reason =
                    format!("activation {other:?} is not supported; supported are Tanh and Identity");
                return Err(unsupported(path, reason, "use a model with one of these"));
            }
        };
        Ok(DenseModule { folder: path.to_owned(), inputs, outputs, bias, tanh })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn files(modules: &[(&str, &str)], configs: &[(&str, Value)]) -> ModuleFiles {
        let modules: Vec<Value> =
            modules.iter().map(|(path, class)| json!({"path": path, "type": class})).collect();
        let mut files = ModuleFiles::from([(MODULES.to_owned(), json!(modules).to_string().into_bytes())]);
        let configs = configs.iter().map(|(name, config)| ((*name).to_owned(), config.to_string().into()));
        files.extend(configs);
        files
    }

    const TRANSFORMER: (&str, &str) = ("", "sentence_transformers.models.Transformer");
    const POOLING: (&str, &str) = ("1_Pooling", "sentence_transformers.models.Pooling");
    const NORMALIZE: (&str, &str) = ("2_Normalize", "sentence_transformers.models.Normalize");

    #[test]
    fn modules_become_pooling_projections_and_a_norm() {
        let mean = json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false});
        let plain = files(
            &[TRANSFORMER, POOLING, NORMALIZE],
            &[("1_Pooling.config.json", mean.clone()), (SENTENCE_CONFIG, json!({"max_seq_length": 256}))],
        );
        let expected = Pooling { normalize: true, max_tokens: Some(256), ..Pooling::mean() };
        assert_eq!(pooling(&plain).unwrap(), Some(expected));
        let dense = |inputs, outputs| {
            json!({"in_features": inputs, "out_features": outputs, "bias": false,
                   "activation_function": "torch.nn.modules.linear.Identity"})
        };
        let gemma = files(
            &[
                TRANSFORMER,
                ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
                ("2_Dense", "sentence_transformers.models.Dense"),
                ("3_Dense", "sentence_transformers.models.Dense"),
                ("4_Normalize", "sentence_transformers.models.Normalize"),
            ],
            &[
                ("1_Pooling.config.json", json!({"pooling_mode": "mean"})),
                ("2_Dense.config.json", dense(768, 3072)),
                ("3_Dense.config.json", dense(3072, 768)),
            ],
        );
        let found = pooling(&gemma).unwrap().unwrap();
        assert_eq!((found.dense.len(), found.width(100), found.normalize), (2, 768, true));
        assert_eq!(found.bytes(), 2 * 768 * 3072 * 4);
        let names = module_files(&gemma[MODULES]).unwrap();
        let (dense, weights) = ("2_Dense.config.json", "2_Dense.model.safetensors");
        assert_eq!(names[..4], [SENTENCE_CONFIG, "1_Pooling.config.json", dense, weights]);
        assert_eq!(names.len(), 6);
        for (mode, expected) in
            [("cls", PoolingMode::Cls), ("max", PoolingMode::Max), ("lasttoken", PoolingMode::LastToken)]
        {
            let config = json!({"pooling_mode": mode});
            let files = files(&[TRANSFORMER, POOLING], &[("1_Pooling.config.json", config)]);
            assert_eq!(pooling(&files).unwrap().unwrap().mode, expected);
        }
        assert_eq!(pooling(&ModuleFiles::new()).unwrap(), None);
    }

    #[test]
    fn modules_that_are_not_run_are_refused_by_name() {
        let two = json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true});
        let relu = json!({"in_features": 4, "out_features": 4, "activation_function": "torch.nn.ReLU"});
        let none = json!({"in_features": 0, "out_features": 4});
        let mean = || ("1_Pooling.config.json", json!({"pooling_mode": "mean"}));
        let dense = ("2_Dense", "sentence_transformers.models.Dense");
        for (files, said) in [
            (files(&[TRANSFORMER, POOLING], &[("1_Pooling.config.json", two)]), "pooling \"cls with mean\""),
            (files(&[TRANSFORMER, POOLING], &[]), "1_Pooling.config.json is missing"),
            (files(&[TRANSFORMER, ("../x", POOLING.1)], &[]), "the folder \"../x\" of a module"),
            (files(&[TRANSFORMER, ("1_CNN", "sentence_transformers.models.CNN")], &[]), "a module \"CNN\""),
            (files(&[TRANSFORMER, NORMALIZE], &[]), "a module \"Normalize\""),
            (
                files(&[TRANSFORMER, POOLING, dense], &[mean(), ("2_Dense.config.json", relu)]),
                "activation \"ReLU\"",
            ),
            (
                files(&[TRANSFORMER, POOLING, dense], &[mean(), ("2_Dense.config.json", none)]),
                "from 0 to 4 values",
            ),
            (ModuleFiles::from([(MODULES.to_owned(), b"{}".to_vec())]), "modules.json is not valid JSON"),
        ] {
            let error = pooling(&files).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
        let many = vec![TRANSFORMER; MAX_MODULES + 1];
        assert!(pooling(&files(&many, &[])).unwrap_err().to_string().contains("17 modules"));
    }

    #[test]
    fn files_of_modules_have_flat_names_and_no_others() {
        for (path, name) in [
            ("1_Pooling/config.json", Some("1_Pooling.config.json")),
            ("2_Dense/model.safetensors", Some("2_Dense.model.safetensors")),
            ("2_Dense/pytorch_model.bin", None),
            ("onnx/config.json", None),
            ("../config.json", None),
            ("1_../config.json", None),
            ("1_Pooling/../config.json", None),
            ("100_Pooling/config.json", None),
            ("config.json", None),
        ] {
            assert_eq!(flat_name(path).as_deref(), name, "{path}");
            if let Some(name) = name {
                assert_eq!(nested_path(name).as_deref(), Some(path));
            }
        }
        assert_eq!(nested_path("model.safetensors"), None);
    }
}
