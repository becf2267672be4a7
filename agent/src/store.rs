//! Model store of this machine: sources (one file per scheme and one line in [`SCHEMES`]), headers,
//! downloads, verification and publishing. Every byte of a published directory was hashed after its last
//! write. Knows nothing of Kubernetes but the reasons it reports.
//!
//! ```text
//! uri ─▶ scheme lists ─▶ headers ─▶ shape
//!                   └──▶ download (*.part, resumed) ─▶ verify (re-read) ─▶ publish (one rename)
//! other machines ──────▶ incoming (chunks, each re-read) ───────────────────┘        │
//!                                                local_chunks ◀── served to machines ┘
//! ```

mod builtin;
pub mod chunks;
mod credentials;
pub mod disk_space;
pub mod download;
mod error;
mod file;
mod gguf;
mod host_pauses;
mod https;
mod hub;
mod incoming;
mod local_chunks;
pub mod model_dirs;
mod object;
mod oci;
mod private_sources;
mod received;
mod reuse;
mod scope;
mod source;
mod source_client;
pub mod verify;
mod web;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{StreamExt as _, TryStreamExt as _};
use russet_crds::conditions::Reason;
use russet_model::index::MAX_FILES;
use russet_model::sentence_transformers;
use russet_model::shape::{ModelShape, READER};
use russet_model::tokenizer_files::chat_templates;
use tokio::sync::watch;

pub use self::credentials::Credentials;
use self::disk_space::DiskReservations;
pub use self::disk_space::{DiskReserve, DiskUsage};
pub use self::error::StoreError;
pub use self::incoming::IncomingModel;
pub use self::local_chunks::LocalChunks;
pub use self::model_dirs::{Manifest, Published};
use self::model_dirs::{ModelDirs, SourceRecord};
pub use self::private_sources::{Cidr, CidrError};
pub use self::scope::SourceScope;
use self::scope::key_at;
use self::source::{FileLocation, HeaderTurns, MAX_READ_TIME, within};
pub use self::source::{SourceFile, SourceListing};
use self::source_client::SourceClient;
use crate::transfer_limits::TransferLimiter;

/// A kind of source for weights. A new one is one file and one line in [`SCHEMES`].
pub struct Scheme {
    /// Prefix of its URIs.
    pub prefix: &'static str,
    /// Whether a revision is resolved to a commit, which identifies the bytes.
    pub pinned: bool,
    /// Secret keys it reads, of which at least one must be present. Empty for schemes without credentials.
    pub keys: &'static [&'static str],
    /// Those of the keys that say which server and which account is meant: with another value the same URI names other
    /// bytes.
    pub account: &'static [&'static str],
    list: for<'a> fn(&'a Context, &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>>,
}

/// Every scheme.
pub const SCHEMES: &[Scheme] = &[
    file::SCHEME,
    hub::SCHEME,
    https::SCHEME,
    object::S3,
    object::GOOGLE,
    object::AZURE,
    oci::SCHEME,
    builtin::SCHEME,
];

/// Most files of a source: as many weight files as a model may have, and as many others.
const MAX_SOURCE_FILES: usize = 2 * MAX_FILES;

/// Secret keys of sources that use a bearer token.
const TOKEN: &[&str] = &["token"];

/// Configuration and HTTP client shared by all schemes.
#[derive(Clone)]
pub struct Context {
    /// Directories that `file://` may read; empty allows none.
    pub allow_file_roots: Vec<PathBuf>,
    /// Directories that `file://` never reads, whatever is allowed: what this machine keeps for its cluster.
    pub closed_dirs: Vec<PathBuf>,
    /// Base URL of the hub.
    pub hf_endpoint: reqwest::Url,
    /// First backoff after a failed transfer; doubles up to 30 s while nothing arrives.
    pub retry: Duration,
    /// Rate limit for bytes from outside the cluster.
    pub limiter: TransferLimiter,
    client: SourceClient,
}

/// A model as a user specified it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceSpec {
    /// The source's URI.
    pub uri: String,
    /// Commit if one is known, else branch or tag, else the default branch.
    pub revision: Option<String>,
    /// Whether `revision` is a commit.
    pub pinned: bool,
    /// Credentials for the source.
    pub credentials: Credentials,
    /// Required SHA-256 of the manifest.
    pub sha256: Option<String>,
    /// Who asks.
    pub scope: SourceScope,
    /// Content id with which this copy was complete before.
    pub content: Option<String>,
    /// Content id of which other machines may have sent a part.
    pub received: Option<String>,
}

/// Contents of a source's headers.
#[derive(Clone, Debug)]
pub struct Headers {
    /// Sizes and layers.
    pub shape: ModelShape,
    /// Commit, for schemes that have one.
    pub commit: Option<String>,
    /// Bytes of all files to fetch.
    pub bytes_total: u64,
}

/// Progress of a copy, watched by the status reporter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TransferProgress {
    /// Current stage.
    pub stage: TransferStage,
    /// Bytes on disk.
    pub done: u64,
    /// Bytes required; 0 while unknown.
    pub total: u64,
    /// Commit, once resolved.
    pub commit: Option<String>,
    /// Shape, once read.
    pub shape: Option<ModelShape>,
    /// Nodes that sent bytes; empty when they come from the source.
    pub from: BTreeSet<String>,
    /// Why the transfer is stalled, until bytes flow again.
    pub last_error: Option<(Reason, String)>,
}

/// Stage of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransferStage {
    /// Listing and reading headers.
    #[default]
    Resolving,
    /// Transferring bytes.
    Downloading,
    /// Reading the bytes again and hashing them.
    Verifying,
}

/// Whether Russet fetches a file of that name. Weights are data: files that could be code are never fetched,
/// and a name cannot point outside the model's own directory.
pub fn is_allowed_file(name: &str) -> bool {
    let plain = !name.is_empty()
        && name.len() <= 200
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+=".contains(&byte));
    let suffix = name.rsplit_once('.').map(|(_, suffix)| suffix);
    let data = matches!(suffix, Some("safetensors" | "gguf" | "json" | "txt" | "jinja"));
    plain && (data || name == "tokenizer.model") && name != model_dirs::MANIFEST
}

/// The name in a model's folder of a source's file; `None` for one that is not fetched. Files of modules and further chat
/// templates lie in folders of their own there.
fn stored_name(path: &str) -> Option<String> {
    let name = match path.contains('/') {
        true => sentence_transformers::flat_name(path).or_else(|| chat_templates::flat_name(path))?,
        false => path.to_owned(),
    };
    is_allowed_file(&name).then_some(name)
}

impl Context {
    /// A context whose hub is `hf_endpoint`, wherever that is; other sources are on the public internet.
    pub fn new(hf_endpoint: &str, allow_file_roots: Vec<PathBuf>) -> Result<Self, StoreError> {
        let hf_endpoint = reqwest::Url::parse(hf_endpoint)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| StoreError::BadUri {
                uri: hf_endpoint.to_owned(),
                problem: "HF_ENDPOINT must be a URL such as https://huggingface.co".into(),
            })?;
        let client = new_client(&hf_endpoint, &[])?;
        Ok(Self {
            allow_file_roots,
            closed_dirs: Vec::new(),
            hf_endpoint,
            retry: Duration::from_millis(500),
            limiter: TransferLimiter::default(),
            client,
        })
    }

    /// The same context, whose sources may also be at these addresses.
    pub fn with_private_sources(self, allowed: &[Cidr]) -> Result<Self, StoreError> {
        Ok(Self { client: new_client(&self.hf_endpoint, allowed)?, ..self })
    }
}

fn new_client(hf_endpoint: &reqwest::Url, allowed: &[Cidr]) -> Result<SourceClient, StoreError> {
    SourceClient::new(hf_endpoint, allowed).map_err(|error| StoreError::Unreachable {
        what: "the web".into(),
        detail: format!("no HTTP client could be made: {error}"),
    })
}

/// The store of one machine.
#[derive(Clone)]
pub struct Store {
    context: Context,
    dirs: ModelDirs,
    disk_reserve: DiskReserve,
    reservations: DiskReservations,
    /// Models being received from other machines, by content id.
    incoming: Arc<Mutex<BTreeMap<String, Weak<LocalChunks>>>>,
    /// Published models that peers requested, by content id; saves reading the manifest for each piece.
    shared: Arc<Mutex<BTreeMap<String, Arc<LocalChunks>>>>,
    /// Files whose SHA-256 differs from a peer's manifest, by the manifest's id.
    mismatches: Arc<Mutex<BTreeMap<String, String>>>,
    header_turns: HeaderTurns,
}

impl Store {
    /// Opens the store under `root` and creates it if absent.
    pub fn open(root: PathBuf, mut context: Context) -> Result<Self, StoreError> {
        let dirs = ModelDirs::open(root)?;
        // The models of every namespace are here.
        context.closed_dirs.push(dirs.root().to_owned());
        Ok(Self {
            context,
            dirs,
            disk_reserve: DiskReserve::default(),
            reservations: DiskReservations::default(),
            incoming: Arc::default(),
            shared: Arc::default(),
            mismatches: Arc::default(),
            header_turns: HeaderTurns::default(),
        })
    }

    /// Free disk space that the machine's owner reserves.
    pub fn disk_reserve(&self) -> &DiskReserve {
        &self.disk_reserve
    }

    /// The disk under the store.
    pub fn disk(&self) -> Result<DiskUsage, StoreError> {
        let (total, free) = self.dirs.disk()?;
        Ok(DiskUsage { total, free, models: self.dirs.bytes(), reserve: self.disk_reserve.bytes_for(total) })
    }

    /// Checks that the missing bytes of a copy fit on the disk now.
    pub fn check_space(&self, key: &str, need: u64) -> Result<(), StoreError> {
        self.reservations.check(&self.dirs, &self.disk_reserve, key, need)
    }

    /// A published directory with its shape as this release reads it: the release that published it may have been older.
    /// What cannot be read stays as it was.
    pub async fn read_anew(&self, mut published: Published) -> Published {
        let Published { path, manifest, .. } = &mut published;
        if manifest.shape.reader < READER {
            match self.header_turns.read(SourceListing::from_folder(path, manifest)).await {
                Ok((_, shape)) => manifest.shape = shape,
                Err(error) => tracing::warn!(
                    folder = %path.display(),
                    error = russet_telemetry::errors::chain(&error),
                    "the model's headers cannot be read again; what an older release read of them stays"
                ),
            }
        }
        published
    }

    /// The complete or partial chunks of the model with this content id, to send to other machines. Blocks.
    pub fn local_chunks(&self, id: &str) -> Option<Arc<LocalChunks>> {
        if let Some(held) = lock(&self.incoming).get(id).and_then(Weak::upgrade) {
            return Some(held);
        }
        let mut given = lock(&self.shared);
        // Removed models are neither served nor kept in memory.
        given.retain(|_, held| held.folder().exists());
        if let Some(held) = given.get(id) {
            return Some(held.clone());
        }
        let Published { path, manifest, .. } = self.dirs.published(id)?;
        let held = Arc::new(LocalChunks::new(Arc::new(manifest), path, true));
        given.insert(id.to_owned(), held.clone());
        Some(held)
    }

    /// Removes published and partial directories whose key and content id are not in `keep`; returns the ids
    /// of the removed published ones.
    pub fn collect(&self, keep: &BTreeSet<String>) -> Result<Vec<String>, StoreError> {
        self.dirs.collect(keep)
    }

    /// Reads the headers of `spec` without copying it.
    pub async fn headers(&self, spec: &SourceSpec) -> Result<Headers, StoreError> {
        let mut sizes = ActualSizes::default();
        loop {
            match self.headers_listed(spec, &sizes).await {
                Err(error) => sizes.correct(error)?,
                read => return read,
            }
        }
    }

    async fn headers_listed(&self, spec: &SourceSpec, sizes: &ActualSizes) -> Result<Headers, StoreError> {
        let source = self.list(spec, sizes).await?;
        let (source, shape) = self.header_turns.read(source).await?;
        Ok(Headers { shape, commit: source.commit.clone(), bytes_total: source.bytes() })
    }

    /// Copies `spec` to this machine and publishes it, resuming what an earlier attempt left. Interrupted
    /// transfers are resumed for as long as the caller polls; every other error is returned.
    pub async fn fetch(
        &self,
        spec: &SourceSpec,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<Published, StoreError> {
        if let Some(published) = self.published(spec) {
            return Ok(published);
        }
        let mut sizes = ActualSizes::default();
        loop {
            match self.fetch_listed(spec, &sizes, progress).await {
                Err(error) => sizes.correct(error)?,
                published => return published,
            }
        }
    }

    async fn fetch_listed(
        &self,
        spec: &SourceSpec,
        sizes: &ActualSizes,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<Published, StoreError> {
        progress.send_modify(|state| state.stage = TransferStage::Resolving);
        let source = self.list(spec, sizes).await?;
        let (source, shape) = self.header_turns.read(source).await?;
        let commit = source.commit.clone();
        let key = key_at(spec, commit.as_deref());
        let account = self.account(spec);
        let known = self.dirs.record_of(&key).filter(|record| self.is_same_account(spec, record));
        if let Some(published) = known.and_then(|record| self.dirs.published(&record.id)) {
            return Ok(published);
        }
        if let Some(published) = self.find_shown(spec, &source).await? {
            let id = published.id.clone();
            self.dirs.record(&key, &SourceRecord { id, account })?;
            self.dirs.remove_partial(&key)?;
            return Ok(self.read_anew(published).await);
        }
        if let Some(published) = self.complete_received(spec, &source, progress).await? {
            return Ok(published);
        }
        let partial = self.dirs.partial_of(&key, account.as_deref())?;
        let total = source.bytes();
        let done: u64 = source.files.iter().map(|file| download::present_bytes(&partial, file)).sum();
        progress.send_modify(|state| {
            state.stage = TransferStage::Downloading;
            state.done = done;
            state.total = total;
            state.commit = commit.clone();
            state.shape = Some(shape.clone());
        });
        let _promise = self.reservations.reserve(&self.dirs, &self.disk_reserve, &key, total)?;

        // Four at once: enough to hide the latency of small files, few enough that a slow disk
        // still writes long runs.
        let transfers: Vec<_> = source
            .files
            .iter()
            .map(|file| download::file(&self.context, &source, file, &partial, progress))
            .collect();
        futures::stream::iter(transfers).buffer_unordered(4).try_collect::<Vec<()>>().await?;

        progress.send_modify(|state| {
            state.stage = TransferStage::Verifying;
            state.last_error = None;
        });
        let manifest = Manifest {
            uri: spec.uri.clone(),
            commit,
            files: verify::all(&partial, &source.files).await?,
            shape,
            own_sha256: true,
        };
        if let Err(error) = manifest.check_pin(spec) {
            self.dirs.remove_partial(&key)?;
            return Err(error);
        }
        // Record the name first, so that the directory is never taken for an unused one.
        let id = manifest.id();
        self.dirs.record(&key, &SourceRecord { id: id.clone(), account })?;
        let published = self.dirs.publish(&key, &manifest)?;
        // Partial data from other machines, received before they were lost.
        self.dirs.remove_partial(&id)?;
        Ok(published)
    }

    /// Prepares to receive the bytes of `manifest`, which [`Manifest::matches_id`] of the requested id, or
    /// resumes an earlier attempt. Blocks while it reads the existing data again.
    pub fn receive(&self, spec: &SourceSpec, manifest: Manifest) -> Result<IncomingModel, StoreError> {
        manifest.check_pin(spec)?;
        let id = manifest.id();
        if spec.sha256.is_some()
            && let Some(file) = lock(&self.mismatches).get(&id)
        {
            return Err(StoreError::Sha256Mismatch { file: file.clone(), id });
        }
        let partial = self.dirs.partial(&id)?;
        let room = self.reservations.reserve(&self.dirs, &self.disk_reserve, &id, manifest.bytes())?;
        let receiving = IncomingModel::open(partial, Arc::new(manifest), room)?;
        lock(&self.incoming).insert(id, Arc::downgrade(receiving.local_chunks()));
        Ok(receiving)
    }

    /// Publishes what was received, under the source it belongs to. Every chunk was read again after it was
    /// written.
    pub async fn publish_received(
        &self,
        spec: &SourceSpec,
        received: &IncomingModel,
    ) -> Result<Published, StoreError> {
        let held = received.local_chunks().clone();
        let own_sha256 = spec.sha256.is_some();
        if own_sha256 && let Err(error) = self.verify_sha256(held.folder(), held.manifest()).await {
            self.dirs.remove_partial(&held.manifest().id())?;
            return Err(error);
        }
        let source = SourceListing::from_folder(held.folder(), held.manifest());
        // The sending machine's statement of the shape is not trusted.
        let (_, shape) = self.header_turns.read(source).await?;
        let pinned = spec.revision.clone().filter(|_| spec.pinned);
        let commit = pinned.or_else(|| held.manifest().commit.clone());
        let manifest = Manifest {
            uri: spec.uri.clone(),
            commit: commit.clone(),
            shape,
            own_sha256,
            ..(**held.manifest()).clone()
        };
        let (id, key) = (manifest.id(), key_at(spec, commit.as_deref()));
        let (dirs, record) =
            (self.dirs.clone(), SourceRecord { id: id.clone(), account: self.account(spec) });
        let published = tokio::task::spawn_blocking(move || {
            dirs.record(&key, &record)?;
            let published = dirs.publish(&id, &manifest)?;
            // Partial data from the source, fetched before another machine had the model.
            dirs.remove_partial(&key)?;
            Ok::<_, StoreError>(published)
        });
        let published = match published.await {
            Ok(published) => published?,
            Err(error) => return Err(StoreError::io(held.folder())(std::io::Error::other(error))),
        };
        lock(&self.incoming).remove(&published.id);
        Ok(published)
    }

    /// Reuses files that exist here under the content id, for a source that was never fetched here.
    pub async fn adopt(&self, spec: &SourceSpec, id: &str) -> Result<Option<Published>, StoreError> {
        let (Some(key), Some(published)) = (self.key(spec), self.dirs.published(id)) else {
            return Ok(None);
        };
        published.manifest.check_pin(spec)?;
        if spec.sha256.is_some() && !published.manifest.own_sha256 {
            self.verify_sha256(&published.path, &published.manifest).await?;
        }
        self.dirs.record(&key, &SourceRecord { id: id.to_owned(), account: self.account(spec) })?;
        Ok(Some(published))
    }

    /// Checks the SHA-256 of the files against another machine's manifest. The id of a model binds its
    /// manifest, not the manifest's author: a pin is worth something only if each machine verifies the bytes
    /// itself.
    async fn verify_sha256(&self, folder: &Path, manifest: &Manifest) -> Result<(), StoreError> {
        let id = manifest.id();
        let known = lock(&self.mismatches).get(&id).cloned();
        let wrong = match known {
            Some(file) => Some(file),
            None => verify::find_mismatch(folder, &manifest.files).await?,
        };
        let Some(file) = wrong else { return Ok(()) };
        lock(&self.mismatches).insert(id.clone(), file.clone());
        Err(StoreError::Sha256Mismatch { file, id })
    }

    async fn list(&self, spec: &SourceSpec, sizes: &ActualSizes) -> Result<SourceListing, StoreError> {
        let list = scheme_of(&spec.uri)?.list;
        let mut source = within(MAX_READ_TIME, list(&self.context, spec)).await?;
        for file in &mut source.files {
            if let FileLocation::Web(url) = &file.location
                && let Some(size) = sizes.0.get(url.as_str())
            {
                file.size = *size;
            }
        }
        source.files.retain(|file| is_allowed_file(&file.name));
        source.files.sort_by(|a, b| a.name.cmp(&b.name));
        source.files.dedup_by(|a, b| a.name == b.name);
        check_file_count(&spec.uri, source.files.len())?;
        let mut seen = BTreeMap::new();
        for file in &source.files {
            if let Some(twin) = seen.insert(file.name.to_ascii_lowercase(), &file.name) {
                return Err(StoreError::BadUri {
                    uri: spec.uri.clone(),
                    problem: format!(
                        "its files {twin} and {} differ in capitals alone, and would be one file on many disks; rename one of them",
                        file.name
                    ),
                });
            }
        }
        Ok(source)
    }
}

/// Refuses a source with more files than a model has: each costs requests.
fn check_file_count(uri: &str, files: usize) -> Result<(), StoreError> {
    if files <= MAX_SOURCE_FILES {
        return Ok(());
    }
    let problem = format!(
        "it has {files} files, more than the limit of {MAX_SOURCE_FILES}; name a folder with one model and nothing else"
    );
    Err(StoreError::BadUri { uri: uri.to_owned(), problem })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sizes that files turned out to have, by URL, where the listing has others.
#[derive(Default)]
struct ActualSizes(BTreeMap<String, u64>);

impl ActualSizes {
    /// Takes the size that a file's own headers say. A file that has yet another one the next time is an error.
    fn correct(&mut self, error: StoreError) -> Result<(), StoreError> {
        match error {
            StoreError::WrongSize { what, listed, actual } if !self.0.contains_key(&what) => {
                tracing::warn!(
                    what,
                    listed,
                    actual,
                    "a file's size is listed wrongly; its own headers count"
                );
                self.0.insert(what, actual);
                Ok(())
            }
            other => Err(other),
        }
    }
}

/// The scheme of a URI.
pub fn scheme_of(uri: &str) -> Result<&'static Scheme, StoreError> {
    SCHEMES
        .iter()
        .find(|scheme| uri.starts_with(scheme.prefix))
        .ok_or_else(|| StoreError::UnknownScheme { uri: uri.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn published_model_is_read_anew_where_an_older_release_read_it() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let store =
            Store::open(folder.path().to_owned(), Context::new("http://127.0.0.1:1", vec![]).unwrap())
                .unwrap();
        let spec = SourceSpec { uri: "builtin://smoke".to_owned(), ..SourceSpec::default() };
        let progress = watch::Sender::new(TransferProgress::default());
        let published = store.fetch(&spec, &progress).await.unwrap();
        let older = ModelShape { architecture: "llama".to_owned(), ..ModelShape::default() };
        let manifest = Manifest { shape: older.clone(), ..published.manifest.clone() };
        let path = published.path.join(model_dirs::MANIFEST);
        std::fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
        let found = store.published(&spec).unwrap();
        assert_eq!(found.manifest.shape, older);
        assert_eq!(store.read_anew(found.clone()).await, published);
        // What cannot be read any more stays.
        std::fs::remove_file(published.path.join("config.json")).unwrap();
        assert_eq!(store.read_anew(found.clone()).await, found);
    }

    #[test]
    fn only_allowed_data_files_of_the_model_are_fetched() {
        for (name, taken) in [
            ("config.json", true),
            ("model-00001-of-00002.safetensors", true),
            ("tokenizer.model", true),
            ("chat_template.jinja", true),
            ("merges.txt", true),
            ("modeling_llama.py", false),
            ("pytorch_model.bin", false),
            ("weights.pkl", false),
            ("consolidated.pth", false),
            ("../config.json", false),
            ("additional_chat_templates/rag.jinja", false),
            ("additional_chat_templates.rag.jinja", true),
            ("original/params.json", false),
            ("a\\b.json", false),
            (".hidden.json", false),
            ("evil\0.json", false),
            ("MANIFEST.json", false),
            ("README.md", false),
            ("", false),
        ] {
            assert_eq!(is_allowed_file(name), taken, "{name:?}");
            assert_eq!(stored_name(name).is_some(), taken || name.contains("templates/"), "{name:?}");
        }
        let further = stored_name("additional_chat_templates/rag.jinja");
        assert_eq!(further.as_deref(), Some("additional_chat_templates.rag.jinja"));
        for hostile in ["../x.jinja", "a/../x.jinja", ".x.jinja/../y.jinja", "a b.jinja", "\u{202e}.jinja"] {
            assert_eq!(stored_name(&format!("additional_chat_templates/{hostile}")), None, "{hostile}");
        }
    }

    #[test]
    fn every_scheme_may_be_written_into_a_model() {
        let kinds = russet_crds::all();
        let models = kinds.iter().find(|kind| kind.spec.names.plural == "models").unwrap();
        let schema = serde_json::to_string(models).unwrap();
        let known: Vec<&str> = SCHEMES.iter().map(|scheme| scheme.prefix.trim_end_matches("://")).collect();
        let written = |text: &str| text.split('|').map(str::to_owned).collect::<BTreeSet<_>>();
        let pattern = schema.split_once("\"^(hf|").unwrap().1.split_once(')').unwrap().0;
        assert_eq!(written(&format!("hf|{pattern}")), written(&known.join("|")));
    }

    #[test]
    fn file_names_cannot_leave_the_folder_or_break_a_shell() {
        let hostile = [
            "../",
            "..\\",
            "/",
            "\\",
            "./",
            "a/",
            "a/../",
            "//",
            "C:\\",
            "C:",
            "~",
            "~root/",
            ".",
            "..",
            "\0",
            "\n",
            "\r",
            "\t",
            "\u{1b}[2J",
            "\u{7f}",
            "\u{202e}",
            "\u{200b}",
            "\u{feff}",
            "\u{ff0e}\u{ff0e}\u{ff0f}",
            " ",
            "%2e%2e%2f",
            "%00",
            ":",
            "*",
            "?",
            "\"",
            "'",
            "<",
            ">",
            "|",
            ";",
            "&",
            "$(id)",
            "`id`",
            "!",
            "#",
            "{a,b}",
            "é",
            "e\u{301}",
            "\u{2215}",
            "file:///etc/",
            "nul\0",
        ];
        let names =
            ["config.json", "model.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"];
        let mut refused = 0;
        for bad in hostile {
            for name in names {
                assert!(is_allowed_file(name), "{name}");
                let (stem, suffix) = name.rsplit_once('.').unwrap();
                let within = format!("{stem}{bad}x.{suffix}");
                // A dot within a name is like any other character; at the beginning it hides the file.
                for tried in [format!("{bad}{name}"), within] {
                    if tried.trim_start_matches('.').len() == tried.len() && matches!(bad, "." | "..") {
                        continue;
                    }
                    assert!(!is_allowed_file(&tried), "{tried:?}");
                    refused += 1;
                }
            }
        }
        assert!(refused >= 200, "{refused}");
        assert!(!is_allowed_file(&format!("{}.json", "a".repeat(200))), "longer than some disks take");
    }
}
