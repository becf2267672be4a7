//! Kubeconfig files as kubectl reads them: lists are merged, the first file that says something wins, and a file
//! of a list that is missing is passed over. Unlike kubectl, the proxies of the environment are left alone:
//! they are for other networks, and the control plane is reached directly unless a kubeconfig says `proxy-url`.
//! Not here: connections.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use http::Uri;
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

use crate::kube_client::ApiError;

/// Where a client's configuration is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeconfigSource {
    /// Files, in order of precedence; at least one.
    paths: Vec<PathBuf>,
    /// Whether missing files are passed over.
    is_list: bool,
    /// Context; the current one if absent.
    context: Option<String>,
}

impl KubeconfigSource {
    /// One file, which must exist.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { paths: vec![path.into()], is_list: false, context: None }
    }

    /// The files of the variable KUBECONFIG; `None` if it names none.
    pub fn list(variable: &OsStr) -> Option<Self> {
        let paths: Vec<PathBuf> =
            std::env::split_paths(variable).filter(|path| !path.as_os_str().is_empty()).collect();
        (!paths.is_empty()).then_some(Self { paths, is_list: true, context: None })
    }

    /// The same files with a context other than the current one.
    pub fn with_context(self, context: Option<String>) -> Self {
        Self { context: context.or(self.context.clone()), ..self }
    }

    /// The file with the highest precedence.
    pub fn first(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// All files.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The namespace of the context; `None` if it has none or cannot be read.
    pub fn namespace(&self) -> Option<String> {
        let kubeconfig = self.read().ok()?;
        let name = self.context.as_ref().or(kubeconfig.current_context.as_ref())?;
        let context = kubeconfig.contexts.iter().find(|named| named.name == *name)?.context.as_ref()?;
        context.namespace.clone().filter(|namespace| !namespace.is_empty())
    }

    /// The client configuration of the context.
    pub async fn config(&self) -> Result<Config, ApiError> {
        let failed = |source| self.unusable(self.first(), source);
        let mut kubeconfig = self.read()?;
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let proxy = self.proxy(&kubeconfig)?;
        if proxy.is_none() && environment_is_unreadable() {
            // kube parses the variable all the same, and a password may make it no URL.
            for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
                cluster.proxy_url = Some(UNUSED_PROXY.to_owned());
            }
        }
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(failed)?;
        // kube takes HTTPS_PROXY of the environment too.
        config.proxy_url = proxy;
        Ok(config)
    }

    /// The proxy that the kubeconfig itself names.
    fn proxy(&self, kubeconfig: &Kubeconfig) -> Result<Option<Uri>, ApiError> {
        let Some(name) = self.context.as_ref().or(kubeconfig.current_context.as_ref()) else {
            return Ok(None);
        };
        let context = kubeconfig.contexts.iter().find(|named| named.name == *name);
        let cluster = context.and_then(|named| named.context.as_ref()).map(|context| &context.cluster);
        let cluster = kubeconfig.clusters.iter().find(|named| Some(&named.name) == cluster);
        let proxy = cluster.and_then(|named| named.cluster.as_ref()?.proxy_url.as_deref());
        let Some(proxy) = proxy.map(str::trim).filter(|proxy| !proxy.is_empty()) else { return Ok(None) };
        match proxy.parse::<Uri>() {
            Ok(proxy) => Ok(Some(proxy)),
            Err(_) => {
                Err(ApiError::Proxy { path: self.first().to_owned(), proxy: "one that is no URL".into() })
            }
        }
    }

    /// The merged files.
    fn read(&self) -> Result<Kubeconfig, ApiError> {
        let mut merged: Option<Kubeconfig> = None;
        for path in &self.paths {
            let mut next = match Kubeconfig::read_from(path) {
                Ok(next) => next,
                Err(KubeconfigError::ReadConfig(error, _))
                    if self.is_list && error.kind() == std::io::ErrorKind::NotFound =>
                {
                    continue;
                }
                Err(source) => return Err(self.unusable(path, source)),
            };
            next.current_context = next.current_context.filter(|context| !context.is_empty());
            merged = Some(match merged {
                Some(merged) => merged.merge(next).map_err(|source| self.unusable(path, source))?,
                None => next,
            });
        }
        merged.ok_or_else(|| {
            let missing = std::io::ErrorKind::NotFound.into();
            self.unusable(self.first(), KubeconfigError::ReadConfig(missing, self.first().to_owned()))
        })
    }

    fn unusable(&self, path: &Path, source: KubeconfigError) -> ApiError {
        ApiError::Kubeconfig { path: path.to_owned(), source: Box::new(source) }
    }
}

/// Stands for "no proxy" where kube would read the environment; never connected to.
const UNUSED_PROXY: &str = "http://unused.invalid";

/// Whether kube could not parse the environment's proxy.
fn environment_is_unreadable() -> bool {
    let values = ["HTTPS_PROXY", "https_proxy"].into_iter().filter_map(|name| std::env::var(name).ok());
    values.filter(|value| !value.is_empty()).any(|value| value.parse::<Uri>().is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubeconfig(
        current: Option<&str>,
        contexts: &[(&str, &str, &str)],
        clusters: &[(&str, &str)],
    ) -> String {
        let contexts: Vec<String> = contexts
            .iter()
            .map(|(name, cluster, rest)| {
                format!("{{name: {name}, context: {{cluster: {cluster}, user: u{rest}}}}}")
            })
            .collect();
        let clusters: Vec<String> = clusters
            .iter()
            .map(|(name, rest)| format!("{{name: {name}, cluster: {{server: \"http://{name}:1\"{rest}}}}}"))
            .collect();
        let current = current.map(|name| format!("current-context: \"{name}\"\n")).unwrap_or_default();
        format!(
            "apiVersion: v1\nkind: Config\n{current}contexts: [{}]\nclusters: [{}]\nusers: [{{name: u, user: {{}}}}]\n",
            contexts.join(", "),
            clusters.join(", ")
        )
    }

    #[tokio::test]
    async fn kubeconfig_lists_are_merged_and_the_first_file_wins() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
        write("a", kubeconfig(Some("one"), &[("one", "a", ", namespace: lab")], &[("a", "")]));
        write(
            "b",
            kubeconfig(Some("two"), &[("two", "b", ""), ("one", "b", "")], &[("b", ""), ("a", ", x: 1")]),
        );
        write("contexts", kubeconfig(Some("two"), &[("two", "b", "")], &[]));
        write("unset", kubeconfig(Some(""), &[], &[]));
        write("damaged", "][".to_owned());
        let at = |list: &str| -> String {
            let absolute = |name: &str| match name {
                "" => String::new(),
                name => folder.path().join(name).display().to_string(),
            };
            list.split(':').map(absolute).collect::<Vec<_>>().join(":")
        };
        for (list, context, expected) in [
            ("a", None, Ok(("http://a:1/", Some("lab")))),
            ("a:none", None, Ok(("http://a:1/", Some("lab")))),
            ("none:a", None, Ok(("http://a:1/", Some("lab")))),
            ("a:", None, Ok(("http://a:1/", Some("lab")))),
            ("::a", None, Ok(("http://a:1/", Some("lab")))),
            ("a:b", None, Ok(("http://a:1/", Some("lab")))),
            ("b:a", None, Ok(("http://b:1/", None))),
            ("a:b", Some("two"), Ok(("http://b:1/", None))),
            ("contexts:b", None, Ok(("http://b:1/", None))),
            ("unset:a", None, Ok(("http://a:1/", Some("lab")))),
            ("a", Some("elsewhere"), Err("elsewhere")),
            ("none:none", None, Err("none")),
            ("a:damaged", None, Err("damaged")),
        ] {
            let source =
                KubeconfigSource::list(at(list).as_ref()).unwrap().with_context(context.map(str::to_owned));
            let found = source.config().await;
            match expected {
                Ok((server, namespace)) => {
                    assert_eq!(found.unwrap().cluster_url.to_string(), server, "{list}");
                    assert_eq!(source.namespace().as_deref(), namespace, "{list}");
                }
                Err(words) => {
                    let error = found.map(|config| config.cluster_url).unwrap_err();
                    let source =
                        std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                    assert!(format!("{error}: {source}").contains(words), "{list}: {error}: {source}");
                }
            }
        }
        for nothing in ["", ":", "::"] {
            assert_eq!(KubeconfigSource::list(nothing.as_ref()), None);
        }
        // A file that is named by itself must be there.
        assert!(KubeconfigSource::file(folder.path().join("none")).config().await.is_err());
    }

    #[tokio::test]
    async fn only_the_proxy_of_the_kubeconfig_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        for (rest, expected) in [
            ("", Ok(None)),
            (", proxy-url: \"\"", Ok(None)),
            (", proxy-url: \"http://proxy:8080\"", Ok(Some("http://proxy:8080/"))),
            (", proxy-url: \"http://me:se cret@proxy\"", Err("no URL")),
        ] {
            std::fs::write(&path, kubeconfig(Some("one"), &[("one", "a", "")], &[("a", rest)])).unwrap();
            let found = KubeconfigSource::file(&path).config().await;
            match expected {
                Ok(proxy) => {
                    let found = found.unwrap().proxy_url.map(|proxy| proxy.to_string());
                    assert_eq!(found.as_deref(), proxy, "{rest}");
                }
                Err(words) => {
                    let error = found.map(|config| config.cluster_url).unwrap_err().to_string();
                    assert!(error.contains(words) && !error.contains("cret"), "{error}");
                }
            }
        }
    }
}
