//! `https://host/folder`, or `https://host/folder/x.gguf`: a plain directory or a GGUF file of a web server. Its `SHA256SUMS` is the listing if there is one;
//! otherwise the file names of the Hugging Face layout are tried.

use std::collections::BTreeMap;

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use reqwest::Url;
use russet_model::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use russet_model::config::CONFIG;
use russet_model::error::FileError;
use russet_model::gguf::files::{SUFFIX, parts};
use russet_model::index::{INDEX, MAX_INDEX_BYTES, index_files};
use russet_model::sentence_transformers::{MAX_MODULE_BYTES, MODULES, module_files, nested_path};

use super::verify::Digest;
use super::web::WebClient;
use super::{Context, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const SCHEME: Scheme =
    Scheme { prefix: "https://", pinned: false, keys: super::TOKEN, account: &[], list };

/// The listing, in the format of `sha256sum *`.
pub(super) const CHECKSUM_FILE: &str = "SHA256SUMS";
/// Longest such listing: a hundred bytes a file, so ten thousand files.
pub(super) const MAX_CHECKSUM_BYTES: u64 = 1 << 20;

/// Files of the Hugging Face layout beside configuration, index and weights.
const OPTIONAL: &[&str] = &[
    "model.safetensors",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS[0],
    ADAPTER_WEIGHTS[1],
];

fn list<'a>(context: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        let bad = |problem: String| StoreError::BadUri { uri: spec.uri.clone(), problem };
        let uri = spec.uri.trim_end_matches('/');
        let (above, named) = match uri.rsplit_once('/') {
            Some((above, file)) if file.ends_with(SUFFIX) && super::is_allowed_file(file) => {
                (above, Some(file))
            }
            _ => (uri, None),
        };
        let folder = Url::parse(&format!("{above}/")).map_err(|error| bad(error.to_string()))?;
        let web = WebClient::new(&context.client, spec.credentials.token(), &folder);
        match named {
            Some(file) => list_parts(&web, &folder, file).await,
            None => list_folder(&web, &folder).await,
        }
    }
    .boxed()
}

/// A model in GGUF by the name of one of its files.
async fn list_parts(web: &WebClient, folder: &Url, file: &str) -> Result<SourceListing, StoreError> {
    let files = futures::stream::iter(parts(file)).map(|name| async move {
        let bad = |problem: String| StoreError::BadUri { uri: format!("{folder}{name}"), problem };
        let url = folder.join(&name).map_err(|error| bad(error.to_string()))?;
        let size = web.probe(&url).await?.size.unwrap_or_default();
        Ok::<_, StoreError>(SourceFile { name, size, digest: None, location: FileLocation::Web(url) })
    });
    let files = files.buffered(4).try_collect().await?;
    Ok(SourceListing { commit: None, files, web: Some(web.clone()) })
}

pub(super) async fn list_folder(web: &WebClient, folder: &Url) -> Result<SourceListing, StoreError> {
    let url = |name: &str| {
        folder.join(name).map_err(|error| StoreError::BadUri {
            uri: format!("{folder}{name}"),
            problem: error.to_string(),
        })
    };
    let sums = match get_optional(web, &url(CHECKSUM_FILE)?, CHECKSUM_FILE, MAX_CHECKSUM_BYTES).await? {
        Some(text) => parse_checksums(&text),
        None => BTreeMap::new(),
    };
    let names: Vec<String> = if sums.is_empty() {
        let mut names: Vec<String> = OPTIONAL.iter().map(|&name| name.to_owned()).collect();
        names.push(CONFIG.to_owned());
        if let Some(index) = get_optional(web, &url(INDEX)?, INDEX, MAX_INDEX_BYTES).await? {
            names.push(INDEX.to_owned());
            // An index that is none is passed over here as it is where the weights are chosen.
            names.extend(index_files(index.as_bytes()).unwrap_or_default());
        }
        if let Some(modules) = get_optional(web, &url(MODULES)?, MODULES, MAX_MODULE_BYTES).await? {
            names.push(MODULES.to_owned());
            let files = module_files(modules.as_bytes()).unwrap_or_default();
            names.extend(files.iter().filter_map(|name| nested_path(name)));
        }
        names
    } else {
        sums.keys().cloned().collect()
    };
    super::check_file_count(folder.as_str(), names.len())?;
    let listed = !sums.is_empty();
    let files = futures::stream::iter(names)
        .filter_map(|path| std::future::ready(super::stored_name(&path).map(|name| (name, path))))
        .map(|(name, path)| {
            let (digest, url) = (sums.get(&path).cloned(), url(&path));
            async move {
                let url = url?;
                match web.probe(&url).await {
                    Ok(probed) => Ok(Some(SourceFile {
                        name,
                        size: probed.size.unwrap_or_default(),
                        digest: digest.map(Digest::Sha256),
                        location: FileLocation::Web(url),
                    })),
                    // Listed files must exist; files that are only tried may be absent.
                    Err(StoreError::NotFound { .. }) if !listed => Ok(None),
                    Err(error) => Err(error),
                }
            }
        })
        .buffer_unordered(4)
        .try_collect::<Vec<Option<SourceFile>>>()
        .await?;
    Ok(SourceListing { commit: None, files: files.into_iter().flatten().collect(), web: Some(web.clone()) })
}

/// A small text file of this name; `None` if absent.
async fn get_optional(
    web: &WebClient,
    url: &Url,
    name: &str,
    limit: u64,
) -> Result<Option<String>, StoreError> {
    let size = match web.probe(url).await {
        Ok(probed) => probed.size.unwrap_or_default(),
        Err(StoreError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    // Half of a listing would be another model.
    if size > limit {
        return Err(FileError::TooLarge { file: name.to_owned(), size, limit }.into());
    }
    if size == 0 {
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&web.read(url, 0, size, size).await?).into_owned()))
}

/// SHA-256 by file name; other lines are skipped.
pub(super) fn parse_checksums(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| {
            let (sum, name) = line.split_once(char::is_whitespace)?;
            let name = name.trim().trim_start_matches('*').trim_start_matches("./");
            let hex = sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
            hex.then(|| (name.to_owned(), sum.to_ascii_lowercase()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::source_client::SourceClient;

    #[test]
    fn sums_are_read_as_sha256sum_writes_them() {
        let sum = "AB".repeat(32);
        let text =
            format!("{sum}  config.json\n{sum} *model.safetensors\n# note\nshort  x.json\n{sum}  ./a.json\n");
        let names: Vec<String> = parse_checksums(&text).into_keys().collect();
        assert_eq!(names, ["a.json", "config.json", "model.safetensors"]);
        assert_eq!(parse_checksums(&text)["config.json"], "ab".repeat(32));
    }

    /// Serves `files` as a plain directory and lists it.
    async fn listed(files: &[(&'static str, String)]) -> Result<Vec<String>, StoreError> {
        rustls::crypto::ring::default_provider().install_default().ok();
        let mut router = axum::Router::new();
        for (name, text) in files.iter().cloned() {
            router = router.route(&format!("/m/{name}"), axum::routing::get(move || async move { text }));
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let folder = Url::parse(&format!("http://{}/m/", listener.local_addr().unwrap())).unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let allowed = ["127.0.0.1".parse().unwrap()];
        let web = WebClient::new(&SourceClient::new(&folder, &allowed).unwrap(), None, &folder);
        let source = list_folder(&web, &folder).await;
        server.abort();
        let mut names: Vec<String> = source?
            .files
            .iter()
            .map(|file| format!("{} {} {}", file.name, file.size, file.digest.is_some()))
            .collect();
        names.sort();
        Ok(names)
    }

    #[tokio::test]
    async fn folder_without_listing_is_probed_by_usual_file_names() {
        let index = r#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#.to_owned();
        let files = [
            (CONFIG, "{}".to_owned()),
            (INDEX, index),
            ("m-1.safetensors", "1".into()),
            ("m-2.safetensors", "22".into()),
            ("tokenizer.json", "333".into()),
        ];
        let names = listed(&files).await.unwrap();
        assert_eq!(names[..3], ["config.json 2 false", "m-1.safetensors 1 false", "m-2.safetensors 2 false"]);
        assert_eq!((names.len(), names[4].as_str()), (5, "tokenizer.json 3 false"));
    }

    #[tokio::test]
    async fn adapter_is_found_by_its_usual_file_names() {
        for weights in ADAPTER_WEIGHTS {
            let files = [(ADAPTER_CONFIG, "{}".to_owned()), (weights, "1".into())];
            let expected = [format!("{ADAPTER_CONFIG} 2 false"), format!("{weights} 1 false")];
            assert_eq!(listed(&files).await.unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn modules_are_found_by_their_list_and_by_sums() {
        let modules = r#"[{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"},
            {"path": "2_Dense", "type": "a.Dense"}]"#;
        let files = [
            (CONFIG, "{}".to_owned()),
            (MODULES, modules.to_owned()),
            ("1_Pooling/config.json", "1".into()),
            ("2_Dense/config.json", "22".into()),
            ("2_Dense/model.safetensors", "333".into()),
        ];
        let names = listed(&files).await.unwrap();
        let expected = [
            "1_Pooling.config.json 1 false",
            "2_Dense.config.json 2 false",
            "2_Dense.model.safetensors 3 false",
        ];
        assert_eq!(names[..3], expected);
        let sum = "ab".repeat(32);
        let sums = format!("{sum}  config.json\n{sum}  1_Pooling/config.json\n{sum}  onnx/config.json\n");
        let all = [(CHECKSUM_FILE, sums), (CONFIG, "{}".into()), ("1_Pooling/config.json", "1".into())];
        assert_eq!(listed(&all).await.unwrap(), ["1_Pooling.config.json 1 true", "config.json 2 true"]);
    }

    #[tokio::test]
    async fn listing_names_all_files_and_digests_and_all_must_exist() {
        let sum = "ab".repeat(32);
        let sums = format!("{sum}  config.json\n{sum}  run.py\n{sum}  model.safetensors\n");
        let all = [
            (CHECKSUM_FILE, sums.clone()),
            (CONFIG, "{}".into()),
            ("model.safetensors", "1".into()),
            ("run.py", "x".into()),
        ];
        assert_eq!(listed(&all).await.unwrap(), ["config.json 2 true", "model.safetensors 1 true"]);
        let missing = listed(&all[..2]).await.unwrap_err();
        assert!(
            matches!(&missing, StoreError::NotFound { what, .. } if what.ends_with("model.safetensors")),
            "{missing}"
        );
    }
}
