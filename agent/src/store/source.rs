//! Listing of a source: its files, the location of each, and their headers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use russet_chat::template::Template;
use russet_model::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MAX_ADAPTER_CONFIG_BYTES};
use russet_model::config::{CONFIG, MAX_CONFIG_BYTES};
use russet_model::error::FileError;
use russet_model::gguf::files::{SUFFIX, gguf_files};
use russet_model::index::{INDEX, MAX_INDEX_BYTES, weight_files};
use russet_model::safetensors::Headers;
use russet_model::sentence_transformers::{
    MAX_MODULE_BYTES, MODULES, ModuleFiles, module_files, nested_path,
};
use russet_model::shape::ModelShape;
use russet_model::tokenizer_files::chat_templates::{ADDITIONAL, ChatTemplate, DEFAULT};
use russet_model::tokenizer_files::{JUDGED, MAX_TEMPLATE_BYTES, TokenizerFiles};
use tokio::sync::Semaphore;

use super::object::RemoteObject;
use super::verify::Digest;
use super::web::WebClient;
use super::{Manifest, StoreError, builtin, file, gguf};

/// Time for a listing, and again for the headers of one model. The largest published ones have 200 files, each a request
/// of some 200 ms; a source that sends a byte now and then would keep the others waiting for ever.
pub(super) const MAX_READ_TIME: Duration = Duration::from_secs(120);
/// Further chat templates that are judged; models have two or three.
const MAX_FURTHER_TEMPLATES: usize = 16;
/// What is said of a model without a chat template.
const NO_TEMPLATE: &str =
    "no chat template, so it takes no conversations: it continues texts at /v1/completions";
/// Bytes of a weight file that are read at once: with its length, the whole header of most files.
const FIRST_READ_BYTES: u64 = 64 << 10;

/// A model's files as its source lists them.
pub struct SourceListing {
    /// Commit the listing belongs to.
    pub commit: Option<String>,
    /// The allowed files, sorted by name.
    pub files: Vec<SourceFile>,
    pub(super) web: Option<WebClient>,
}

/// One file of a source.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Its name; never a path.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Expected digest.
    pub digest: Option<Digest>,
    pub(super) location: FileLocation,
}

/// Location of a file.
#[derive(Clone, Debug)]
pub(super) enum FileLocation {
    Disk(PathBuf),
    BuiltIn(&'static [u8]),
    Web(reqwest::Url),
    Object(RemoteObject),
}

/// Whose turn it is to read headers. Those of one model may take some 100 MB while they are read, so there is one at a
/// time of what comes from outside and one of what is on the disk: a slow source does not delay a received model.
#[derive(Clone)]
pub(super) struct HeaderTurns {
    outside: Arc<Semaphore>,
    on_disk: Arc<Semaphore>,
    limit: Duration,
}

impl Default for HeaderTurns {
    fn default() -> Self {
        let one = || Arc::new(Semaphore::new(1));
        Self { outside: one(), on_disk: one(), limit: MAX_READ_TIME }
    }
}

impl HeaderTurns {
    /// Reads configuration, index, headers of the weight files and the small files of the tokenizer, and drops weight
    /// files that the model does not use.
    pub(super) async fn read(
        &self,
        source: SourceListing,
    ) -> Result<(SourceListing, ModelShape), StoreError> {
        let on_disk = source.files.iter().all(|file| matches!(file.location, FileLocation::Disk(_)));
        let turns = if on_disk { &self.on_disk } else { &self.outside };
        // Never closed: an error would only mean that there is no turn to wait for.
        let _turn = turns.acquire().await;
        within(self.limit, read_headers(source)).await
    }
}

/// The result of `work`, unless it takes longer than `limit`.
pub(super) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(StoreError::TooSlow { limit }))
}

async fn read_headers(mut source: SourceListing) -> Result<(SourceListing, ModelShape), StoreError> {
    let names: Vec<&str> = source.files.iter().map(|file| file.name.as_str()).collect();
    if let Some(names) = gguf_files(&names)? {
        return gguf::read_headers(source, names).await;
    }
    if is_adapter(&source) {
        return read_adapter(source).await;
    }
    let config = source.read_small(CONFIG, MAX_CONFIG_BYTES).await?;
    let index = match source.files.iter().any(|file| file.name == INDEX) {
        true => Some(source.read_small(INDEX, MAX_INDEX_BYTES).await?),
        false => None,
    };
    let names: Vec<&str> = source.files.iter().map(|file| file.name.as_str()).collect();
    let weights = weight_files(index.as_deref(), &names)?;
    drop(index);
    let is_weights = |name: &str| name.ends_with(".safetensors") || name.ends_with(SUFFIX);
    let is_module = |name: &str| nested_path(name).is_some();
    source.files.retain(|file| {
        !is_weights(&file.name) || is_module(&file.name) || weights.names.contains(&file.name)
    });

    let mut headers = Headers::default();
    for name in &weights.names {
        headers = source.add_header(name, headers).await?;
    }
    let tokenizer = source.tokenizer_files(&config).await?;
    let modules = source.module_files().await?;
    let shape = blocking(move || {
        let mut shape = ModelShape::read_pooled(&config, &headers, &modules)?;
        shape.notes.extend(weights.note);
        if shape.unsupported.is_none() {
            shape.unsupported = tokenizer.check_tokenizer().err().map(|why| why.to_string());
        }
        if shape.task.is_generate() {
            describe_chat(&tokenizer, &mut shape)?;
        }
        Ok(shape)
    });
    Ok((source, shape.await?))
}

/// Whether a source is of an adapter. Some trainers leave the configuration of its model beside it, and no weights of that.
fn is_adapter(source: &SourceListing) -> bool {
    let has = |name: &str| source.files.iter().any(|file| file.name == name);
    let is_weights = |name: &str| name.ends_with(".safetensors") && !name.ends_with("_adapters.safetensors");
    let names = || source.files.iter().map(|file| file.name.as_str());
    let mut others = names().filter(|name| is_weights(name) && !ADAPTER_WEIGHTS.contains(name));
    has(ADAPTER_CONFIG) && (!has(CONFIG) || others.next().is_none())
}

/// The same of an adapter. Of what is beside it only its configuration and its weights are kept: mlx-lm leaves those of
/// earlier steps there.
async fn read_adapter(mut source: SourceListing) -> Result<(SourceListing, ModelShape), StoreError> {
    let config = source.read_small(ADAPTER_CONFIG, MAX_ADAPTER_CONFIG_BYTES).await?;
    let found = ADAPTER_WEIGHTS.iter().find(|name| source.files.iter().any(|file| file.name == **name));
    let problem = || format!("it has neither {}", ADAPTER_WEIGHTS.join(" nor "));
    let weights = *found.ok_or_else(|| FileError::BadAdapter { problem: problem() })?;
    source.files.retain(|file| [ADAPTER_CONFIG, weights].contains(&file.name.as_str()));
    let headers = source.add_header(weights, Headers::default()).await?;
    let shape = blocking(move || ModelShape::read_adapter(&config, &headers)).await?;
    Ok((source, shape))
}

/// Writes down what is known of a model's answers: why there would be none, how it is best sampled, and whether it takes
/// conversations.
pub(super) fn describe_chat(tokenizer: &TokenizerFiles, shape: &mut ModelShape) -> Result<(), FileError> {
    shape.generation_config = tokenizer.generation_config();
    let templates = match tokenizer.check_chat() {
        Ok(()) => tokenizer.chat_templates()?,
        Err(why) => {
            shape.chat_unsupported = Some(why.to_string());
            return Ok(());
        }
    };
    if !templates.contains_key(DEFAULT) {
        shape.notes.push(NO_TEMPLATE.to_owned());
    }
    let refused = templates.values().find_map(|ChatTemplate { file, source }| {
        let why = Template::check(source).err()?;
        Some(format!("{file}: {why}"))
    });
    shape.chat_unsupported = refused;
    Ok(())
}

/// Parses on another thread: a long header takes some 100 ms.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(result?),
        Err(error) => Err(StoreError::Io { path: PathBuf::new(), source: std::io::Error::other(error) }),
    }
}

impl SourceListing {
    /// A listing of files that are in a folder of this machine: received or published.
    pub(super) fn from_folder(folder: &Path, manifest: &Manifest) -> Self {
        let files = manifest.files.iter().map(|file| SourceFile {
            name: file.name.clone(),
            size: file.size,
            digest: None,
            location: FileLocation::Disk(folder.join(&file.name)),
        });
        Self { commit: None, files: files.collect(), web: None }
    }

    /// Bytes of all files, saturating: a source may announce any sizes.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.size))
    }

    pub(super) fn file(&self, name: &str) -> Result<&SourceFile, StoreError> {
        self.files
            .iter()
            .find(|file| file.name == name)
            .ok_or_else(|| FileError::Missing { file: name.to_owned() }.into())
    }

    /// `headers` with that of one more file.
    async fn add_header(&self, name: &str, mut headers: Headers) -> Result<Headers, StoreError> {
        let file = self.file(name)?;
        let mut start = self.read(file, 0, FIRST_READ_BYTES.min(file.size)).await?;
        let length = headers.next_length(name, start.get(..8).unwrap_or(&start), file.size)?;
        let (read, end) = (start.len() as u64, 8 + length);
        if read < end {
            start.extend(self.read(file, read, end - read).await?);
        }
        let (name, size) = (name.to_owned(), file.size);
        blocking(move || {
            let header = start.get(8..end as usize).unwrap_or_default();
            headers.add(&name, header, size).map(|()| headers)
        })
        .await
    }

    /// The small files of the tokenizer. Those of unknown or no length are left to the engine.
    pub(super) async fn tokenizer_files(&self, config: &[u8]) -> Result<TokenizerFiles, StoreError> {
        let mut judged = Vec::new();
        let names: Vec<String> = self.files.iter().map(|file| file.name.clone()).collect();
        let further = names.iter().filter(|name| name.starts_with(ADDITIONAL));
        let further = further.take(MAX_FURTHER_TEMPLATES).map(|name| (name.as_str(), MAX_TEMPLATE_BYTES));
        for (name, most) in JUDGED.into_iter().chain(further) {
            if self.files.iter().any(|file| file.name == name && (1..=most).contains(&file.size)) {
                judged.push((name.to_owned(), self.read_small(name, most).await?));
            }
        }
        Ok(TokenizerFiles { names, config: config.to_vec(), judged })
    }

    /// The small files of sentence-transformers; none where the model has no list of modules.
    async fn module_files(&self) -> Result<ModuleFiles, StoreError> {
        let has = |name: &str| self.files.iter().any(|file| file.name == name);
        let mut files = ModuleFiles::new();
        if !has(MODULES) {
            return Ok(files);
        }
        let modules = self.read_small(MODULES, MAX_MODULE_BYTES).await?;
        // A list that cannot be used is the model's fault, and is told with it.
        for name in module_files(&modules).unwrap_or_default() {
            if has(&name) && name.ends_with(".json") {
                let config = self.read_small(&name, MAX_MODULE_BYTES).await?;
                files.insert(name, config);
            }
        }
        files.insert(MODULES.to_owned(), modules);
        Ok(files)
    }

    /// Reads a small file, such as the configuration.
    async fn read_small(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        let file = self.file(name)?;
        if file.size > limit {
            return Err(FileError::TooLarge { file: name.to_owned(), size: file.size, limit }.into());
        }
        self.read(file, 0, file.size).await
    }

    /// `length` bytes of a file from `offset` on.
    pub(super) async fn read(
        &self,
        file: &SourceFile,
        offset: u64,
        length: u64,
    ) -> Result<Vec<u8>, StoreError> {
        if length == 0 {
            return Ok(Vec::new());
        }
        match (&file.location, &self.web) {
            (FileLocation::Disk(path), _) => file::read(path, offset, length).await,
            (FileLocation::BuiltIn(bytes), _) => builtin::read(bytes, offset, length),
            (FileLocation::Web(url), Some(web)) => web.read(url, offset, length, file.size).await,
            (FileLocation::Object(object), _) => object.read(offset, length).await,
            (FileLocation::Web(url), None) => Err(StoreError::Unreachable {
                what: url.to_string(),
                detail: "the listing carries no web client; report this as a bug".into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::source_client::SourceClient;
    use super::*;

    /// The smoke model that agents carry, without the files of these names.
    async fn smoke(without: &[&str]) -> SourceListing {
        let context = super::super::Context::new("http://127.0.0.1:1", Vec::new()).unwrap();
        let spec = super::super::SourceSpec { uri: "builtin://smoke".to_owned(), ..Default::default() };
        let mut source = (builtin::SCHEME.list)(&context, &spec).await.unwrap();
        source.files.retain(|file| !without.contains(&file.name.as_str()));
        source
    }

    fn carried(name: &str, bytes: impl Into<Vec<u8>>) -> SourceFile {
        let bytes: &'static [u8] = Box::leak(bytes.into().into_boxed_slice());
        let (name, size) = (name.to_owned(), bytes.len() as u64);
        SourceFile { name, size, digest: None, location: FileLocation::BuiltIn(bytes) }
    }

    #[tokio::test]
    async fn tokenizer_is_judged_with_the_headers() {
        for (without, added, said) in [
            (&[][..], vec![], None),
            (&["tokenizer.json"], vec![], Some("tokenizer.json: it is missing; ")),
            (
                &["tokenizer.json"],
                vec![carried("tokenizer.model", "x")],
                Some("tokenizer.json: it is missing, and tokenizer.model is not read"),
            ),
            (&["tokenizer_config.json"], vec![], None),
            (
                &["tokenizer_config.json"],
                vec![carried("chat_template.jinja", "{% for m in messages %}")],
                Some("chat_template.jinja: the chat template does not parse: "),
            ),
            (
                &[],
                vec![carried("additional_chat_templates.rag.jinja", "{% if %}")],
                Some("additional_chat_templates.rag.jinja: the chat template does not parse: "),
            ),
            (&["tokenizer_config.json"], vec![carried("chat_template.jinja", "{{ messages }}")], None),
            (
                &["generation_config.json"],
                vec![carried("generation_config.json", r#"{"eos_token_id": "two"}"#)],
                Some("generation_config.json is not valid JSON"),
            ),
        ] {
            let mut source = smoke(without).await;
            let has_template = added.iter().any(|file| file.name == "chat_template.jinja");
            source.files.extend(added);
            let (_, shape) = HeaderTurns::default().read(source).await.unwrap();
            let is_noted = shape.notes.iter().any(|note| note == NO_TEMPLATE);
            assert_eq!(is_noted, without == ["tokenizer_config.json"] && !has_template, "{:?}", shape.notes);
            let why = shape.unsupported.or(shape.chat_unsupported);
            assert_eq!(why.is_some(), said.is_some(), "{why:?}");
            assert!(why.as_ref().is_none_or(|why| why.contains(said.unwrap())), "{why:?}");
        }
    }

    #[tokio::test]
    async fn an_adapter_is_known_by_its_configuration() {
        let tensors = |names: [(&str, [u64; 2]); 2]| {
            let (mut header, mut end) = (serde_json::Map::new(), 0);
            for (name, shape) in names {
                let begin = end;
                end += shape.iter().product::<u64>() * 4;
                let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]});
                header.insert(name.to_owned(), entry);
            }
            let header = serde_json::to_vec(&header).unwrap();
            [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; end as usize]].concat()
        };
        let path = "model.layers.1.self_attn.q_proj";
        let mlx = tensors([(&format!("{path}.lora_a"), [8, 2]), (&format!("{path}.lora_b"), [2, 6])]);
        let peft = format!("base_model.model.{path}");
        let peft =
            tensors([(&format!("{peft}.lora_A.weight"), [2, 8]), (&format!("{peft}.lora_B.weight"), [6, 2])]);
        let of_mlx = r#"{"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 20.0}}"#;
        let of_peft = r#"{"peft_type": "LORA", "lora_alpha": 4, "bias": "none"}"#;
        let odd = r#"{"peft_type": "LORA", "lora_alpha": 4, "bias": "all"}"#;
        for (config, weights, bytes, unsupported) in [
            (of_mlx, "adapters.safetensors", mlx.clone(), None),
            (of_peft, "adapter_model.safetensors", peft.clone(), None),
            (odd, "adapter_model.safetensors", peft, Some("adapter_config.json bias")),
        ] {
            let files = vec![
                carried("0000100_adapters.safetensors", mlx.clone()),
                carried("README.md", "x"),
                carried(ADAPTER_CONFIG, config),
                carried(weights, bytes),
            ];
            let source = SourceListing { commit: None, files, web: None };
            let (source, shape) = HeaderTurns::default().read(source).await.unwrap();
            let kept: Vec<&str> = source.files.iter().map(|file| file.name.as_str()).collect();
            assert_eq!(kept, [ADAPTER_CONFIG, weights]);
            let adapter = shape.adapter.as_ref().unwrap();
            match unsupported {
                None => assert_eq!((adapter.layers, adapter.rank, shape.total_bytes()), (2, 2, 112)),
                Some(why) => assert!(shape.unsupported.unwrap().contains(why)),
            }
        }
        let files = vec![carried(ADAPTER_CONFIG, of_mlx)];
        let error = HeaderTurns::default()
            .read(SourceListing { commit: None, files, web: None })
            .await
            .err()
            .unwrap();
        assert!(format!("{error:?}").contains("neither adapters.safetensors nor adapter_model"), "{error:?}");
        let beside = [
            carried(CONFIG, "{}"),
            carried(ADAPTER_CONFIG, of_mlx),
            carried("adapters.safetensors", mlx.clone()),
        ];
        let beside = SourceListing { commit: None, files: beside.into(), web: None };
        assert!(HeaderTurns::default().read(beside).await.unwrap().1.adapter.is_some());
        // Beside a model they are what they always were: not used.
        let mut model = smoke(&[]).await;
        model.files.extend([carried(ADAPTER_CONFIG, of_mlx), carried("adapters.safetensors", mlx)]);
        let (model, shape) = HeaderTurns::default().read(model).await.unwrap();
        assert!(shape.adapter.is_none() && model.file("adapters.safetensors").is_err());
    }

    #[tokio::test]
    async fn recommended_sampling_is_part_of_the_shape() {
        let mut source = smoke(&["generation_config.json"]).await;
        let config = r#"{"eos_token_id": 2, "temperature": 0.6, "top_k": 20, "top_p": 7}"#;
        source.files.push(carried("generation_config.json", config));
        let (_, shape) = HeaderTurns::default().read(source).await.unwrap();
        let found = shape.generation_config.unwrap();
        assert_eq!((found.temperature, found.top_k, found.top_p), (Some(0.6), Some(20), None));
    }

    #[tokio::test]
    async fn index_that_is_passed_over_is_a_note_of_the_model() {
        let mut source = smoke(&["model.safetensors.index.json"]).await;
        let index = r#"{"weight_map": {"t": "model-00001-of-00002.safetensors"}}"#;
        source.files.push(carried(INDEX, index));
        let (_, shape) = HeaderTurns::default().read(source).await.unwrap();
        assert_eq!(shape.unsupported, None);
        assert!(shape.notes[0].contains("names 1 that are not there"), "{:?}", shape.notes);
    }

    #[tokio::test]
    async fn long_files_are_refused_before_they_are_read() {
        for (name, limit) in [(CONFIG, MAX_CONFIG_BYTES), (INDEX, MAX_INDEX_BYTES)] {
            let mut source = smoke(&[name]).await;
            source.files.push(SourceFile { size: limit + 1, ..carried(name, "{}") });
            let error = HeaderTurns::default().read(source).await.err().unwrap();
            let too_large =
                matches!(&error, StoreError::Header(FileError::TooLarge { file, .. }) if file == name);
            assert!(too_large, "{error}");
        }
    }

    #[tokio::test]
    async fn slow_source_gives_way_and_delays_none_on_the_disk() {
        rustls::crypto::ring::default_provider().install_default().ok();
        // It accepts and never answers.
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let folder = reqwest::Url::parse(&format!("http://{}/", silent.local_addr().unwrap())).unwrap();
        let mut slow = smoke(&[]).await;
        slow.web = Some(WebClient::new(&SourceClient::new(&folder, &[]).unwrap(), None, &folder));
        for file in &mut slow.files {
            file.location = FileLocation::Web(folder.join(&file.name).unwrap());
        }
        let disk = tempfile::tempdir().unwrap();
        let mut local = smoke(&[]).await;
        for file in &mut local.files {
            let FileLocation::BuiltIn(bytes) = &file.location else { panic!("{file:?}") };
            let path = disk.path().join(&file.name);
            std::fs::write(&path, bytes).unwrap();
            file.location = FileLocation::Disk(path);
        }
        let next = smoke(&[]).await;
        // Long enough that what is on the disk is read meanwhile.
        let turns = HeaderTurns { limit: Duration::from_secs(2), ..HeaderTurns::default() };
        let ended = Mutex::new(Vec::new());
        let read = |name: &'static str, source| {
            let (turns, ended) = (&turns, &ended);
            async move {
                let result = turns.read(source).await.map(|_| ());
                ended.lock().unwrap().push((name, result.map_err(|error| error.to_string())));
            }
        };
        tokio::join!(read("slow", slow), read("next", next), read("local", local));
        let ended = ended.into_inner().unwrap();
        let order: Vec<&str> = ended.iter().map(|(name, _)| *name).collect();
        assert_eq!(order, ["local", "slow", "next"], "{ended:?}");
        assert!(ended[1].1.as_ref().unwrap_err().contains("within 2 s"), "{ended:?}");
        assert!(ended[0].1.is_ok() && ended[2].1.is_ok(), "{ended:?}");
    }
}
