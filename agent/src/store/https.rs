//! `https://host/folder`: a plain folder of a web server. Its `SHA256SUMS` is the listing where
//! there is one; without, the names a model of the Hugging Face layout may have are tried.

use std::collections::BTreeMap;

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use reqwest::Url;

use super::headers::{self, CONFIG, INDEX};
use super::verify::Digest;
use super::web::Web;
use super::{Context, Place, Scheme, Source, SourceFile, StoreError, Wanted};

pub(super) const SCHEME: Scheme = Scheme { prefix: "https://", pinned: false, list };

/// The listing, as `sha256sum *` writes it.
const SUMS: &str = "SHA256SUMS";

/// Files of the Hugging Face layout beside configuration, index and weights.
const OPTIONAL: &[&str] = &[
    "model.safetensors",
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
];

fn list<'a>(context: &'a Context, wanted: &'a Wanted) -> BoxFuture<'a, Result<Source, StoreError>> {
    async move {
        let folder = Url::parse(&format!("{}/", wanted.uri.trim_end_matches('/'))).map_err(|error| {
            StoreError::BadUri { uri: wanted.uri.clone(), problem: error.to_string() }
        })?;
        list_folder(&Web::new(&context.client, wanted.token.as_deref(), &folder), &folder).await
    }
    .boxed()
}

pub(super) async fn list_folder(web: &Web, folder: &Url) -> Result<Source, StoreError> {
    let url = |name: &str| folder.join(name).map_err(|error| StoreError::BadUri {
        uri: format!("{folder}{name}"),
        problem: error.to_string(),
    });
    let sums = match small(web, &url(SUMS)?).await? {
        Some(text) => sums(&text),
        None => BTreeMap::new(),
    };
    let names: Vec<String> = if sums.is_empty() {
        let mut names: Vec<String> = OPTIONAL.iter().map(|&name| name.to_owned()).collect();
        names.push(CONFIG.to_owned());
        if let Some(index) = small(web, &url(INDEX)?).await? {
            names.push(INDEX.to_owned());
            names.extend(headers::index_files(index.as_bytes())?);
        }
        names
    } else {
        sums.keys().cloned().collect()
    };
    let listed = !sums.is_empty();
    let files = futures::stream::iter(names)
        .filter(|name| std::future::ready(super::takes(name)))
        .map(|name| {
            let (digest, url) = (sums.get(&name).cloned(), url(&name));
            async move {
                let url = url?;
                match web.probe(&url).await {
                    Ok(probed) => Ok(Some(SourceFile {
                        name,
                        size: probed.size.unwrap_or_default(),
                        digest: digest.map(Digest::Sha256),
                        place: Place::Web(url),
                    })),
                    // What a listing names must be there; what was only tried may be absent.
                    Err(StoreError::NotFound { .. }) if !listed => Ok(None),
                    Err(error) => Err(error),
                }
            }
        })
        .buffer_unordered(4)
        .try_collect::<Vec<Option<SourceFile>>>()
        .await?;
    Ok(Source { commit: None, files: files.into_iter().flatten().collect(), web: Some(web.clone()) })
}

/// A small text; `None` when there is none.
async fn small(web: &Web, url: &Url) -> Result<Option<String>, StoreError> {
    let size = match web.probe(url).await {
        Ok(probed) => probed.size.unwrap_or_default().min(headers::MAX_HEADER),
        Err(StoreError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    if size == 0 {
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&web.read(url, 0, size).await?).into_owned()))
}

/// Name to SHA-256; lines that are neither are skipped.
fn sums(text: &str) -> BTreeMap<String, String> {
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

    #[test]
    fn sums_are_read_as_sha256sum_writes_them() {
        let sum = "AB".repeat(32);
        let text = format!("{sum}  config.json\n{sum} *model.safetensors\n# note\nshort  x.json\n{sum}  ./a.json\n");
        let names: Vec<String> = sums(&text).into_keys().collect();
        assert_eq!(names, ["a.json", "config.json", "model.safetensors"]);
        assert_eq!(sums(&text)["config.json"], "ab".repeat(32));
    }
}
