//! A gateway as clients see it: its URL, the key, and its models. Not here: the cluster behind it.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use http::Uri;
use serde_json::Value;

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// What clients get that insist on a key where the gateway wants none.
const PLACEHOLDER_KEY: &str = "any";
/// Names that an error lists.
const MAX_LISTED_NAMES: usize = 20;

/// A gateway, and the model that a client is set up for.
#[derive(Clone, Debug)]
pub struct GatewayEndpoint {
    /// Its URL, without a path.
    pub url: String,
    /// The key that clients send.
    pub key: Option<String>,
    /// The chosen model.
    pub model: ListedModel,
    /// All its models; the chosen one is the first.
    pub models: Vec<ListedModel>,
}

/// A model of the gateway's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedModel {
    /// The name that clients send.
    pub name: String,
    /// Its context length; `None` while it is not known.
    pub context_tokens: Option<u64>,
    /// Whether it serves.
    pub is_ready: bool,
    /// What it waits for.
    pub message: String,
    /// `namespace/name` of the deployments behind it.
    pub deployments: Vec<String>,
}

impl GatewayEndpoint {
    /// The endpoint with the model `wanted`, or the obvious one.
    pub fn new(
        url: String,
        key: Option<String>,
        models: Vec<ListedModel>,
        wanted: Option<&str>,
    ) -> Result<Self> {
        let model = choose(&models, wanted)?.clone();
        let rest = models.into_iter().filter(|other| other.name != model.name);
        let models = std::iter::once(model.clone()).chain(rest).collect();
        Ok(Self { url, key, model, models })
    }

    /// Base URL of OpenAI's dialect.
    pub fn openai_url(&self) -> String {
        format!("{}/v1", self.url)
    }

    /// The key, or a placeholder for clients that insist on one.
    pub fn key_or_placeholder(&self) -> String {
        self.key.clone().unwrap_or_else(|| PLACEHOLDER_KEY.to_owned())
    }

    /// Whether only programs on this machine reach it.
    pub fn is_loopback(&self) -> bool {
        let host = self.url.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
        host.is_some_and(|host| {
            let bare = host.trim_start_matches('[').trim_end_matches(']');
            host == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        })
    }
}

/// A URL without `/v1` and slashes at its end; an error names what is wrong with it.
pub fn normalized(url: &str) -> Result<String> {
    let trimmed = url.trim().trim_end_matches('/');
    let root = trimmed.strip_suffix("/v1").unwrap_or(trimmed).trim_end_matches('/');
    let uri: Uri = root.parse().with_context(|| format!("{url} is no URL; write http://HOST:PORT"))?;
    ensure!(
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some() && uri.query().is_none(),
        "{url} is no URL of a gateway; write http://HOST:PORT"
    );
    Ok(root.to_owned())
}

/// A client for requests to the gateway. The environment's proxies are for other networks.
pub fn http_client() -> Result<reqwest::Client> {
    reqwest::Client::builder()
        .no_proxy()
        .connect_timeout(CONNECT_TIMEOUT)
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .context("cannot set up an HTTP client")
}

/// The models of a list in OpenAI's form; entries of another form are left out.
pub fn parse_models(list: &Value) -> Vec<ListedModel> {
    let entries = list["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    entries.iter().filter_map(parse_model).collect()
}

fn parse_model(entry: &Value) -> Option<ListedModel> {
    let deployments = entry["russet"]["deployments"].as_array().map(Vec::as_slice).unwrap_or_default();
    Some(ListedModel {
        name: entry["id"].as_str()?.to_owned(),
        context_tokens: entry["context_length"].as_u64().filter(|tokens| *tokens > 0),
        // A gateway that does not say so serves what it lists.
        is_ready: entry["russet"]["ready"].as_bool().unwrap_or(true),
        message: entry["russet"]["message"].as_str().unwrap_or_default().to_owned(),
        deployments: deployments.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
    })
}

/// The model `wanted`; without one, the only model, or the one that serves with the largest context.
fn choose<'list>(models: &'list [ListedModel], wanted: Option<&str>) -> Result<&'list ListedModel> {
    if let Some(wanted) = wanted {
        let found = models.iter().find(|model| model.name == wanted);
        return found.with_context(|| format!("the gateway has no model {wanted}; {}", names(models)));
    }
    if let [only] = models {
        return Ok(only);
    }
    let mut largest: Option<&ListedModel> = None;
    for model in models.iter().filter(|model| model.is_ready) {
        // Of equal ones the first.
        if largest.is_none_or(|best| model.context_tokens > best.context_tokens) {
            largest = Some(model);
        }
    }
    match largest {
        Some(model) => Ok(model),
        None => bail!("no model serves yet; {}", names(models)),
    }
}

fn names(models: &[ListedModel]) -> String {
    if models.is_empty() {
        return "it has none: add one, for example with `russet run builtin://smoke`".to_owned();
    }
    let shown: Vec<&str> = models.iter().take(MAX_LISTED_NAMES).map(|model| model.name.as_str()).collect();
    let more = match models.len() > shown.len() {
        true => format!(" and {} more", models.len() - shown.len()),
        false => String::new(),
    };
    format!("name one with --model: {}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn listed(name: &str, context: u64, is_ready: bool) -> ListedModel {
        let entry = json!({"id": name, "context_length": context, "russet": {"ready": is_ready}});
        parse_model(&entry).unwrap()
    }

    #[test]
    fn models_have_their_context_state_and_deployments() {
        let list = json!({"object": "list", "data": [
            {"id": "smoke", "context_length": 4096, "russet": {
                "ready": false, "message": "0 of 1 replicas are ready", "deployments": ["default/smoke"]}},
            {"id": "other", "context_length": 0},
            {"no": "id"},
        ]});
        let models = parse_models(&list);
        assert_eq!(
            models[0],
            ListedModel {
                name: "smoke".into(),
                context_tokens: Some(4096),
                is_ready: false,
                message: "0 of 1 replicas are ready".into(),
                deployments: vec!["default/smoke".into()],
            }
        );
        assert_eq!((models.len(), models[1].context_tokens, models[1].is_ready), (2, None, true));
        assert_eq!(parse_models(&json!({"data": 1})), []);
    }

    #[test]
    fn the_only_or_the_largest_model_that_serves_is_chosen() {
        let (small, large) = (listed("small", 4096, true), listed("large", 32768, true));
        let (waiting, equal) = (listed("waiting", 65536, false), listed("equal", 32768, true));
        let all = [small.clone(), waiting.clone(), large, equal];
        for (models, wanted, expected) in [
            (&all[..], None, Ok("large")),
            (&all[..], Some("small"), Ok("small")),
            (&all[..], Some("waiting"), Ok("waiting")),
            (&all[..], Some("gone"), Err("small, waiting, large, equal")),
            (std::slice::from_ref(&waiting), None, Ok("waiting")),
            (
                &[waiting.clone(), waiting.clone()],
                None,
                Err("no model serves yet; name one with --model: waiting"),
            ),
            (&[], None, Err("it has none")),
        ] {
            match (choose(models, wanted), expected) {
                (Ok(model), Ok(name)) => assert_eq!(model.name, name),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, _) => panic!("{wanted:?}: {found:?}"),
            }
        }
        let endpoint = GatewayEndpoint::new("http://x".into(), None, all.to_vec(), None).unwrap();
        let names: Vec<&str> = endpoint.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["large", "small", "waiting", "equal"]);
    }

    #[test]
    fn urls_lose_their_path_and_others_are_refused() {
        for (url, expected) in [
            ("http://127.0.0.1:52415", "http://127.0.0.1:52415"),
            ("https://studio.local:8443/v1/", "https://studio.local:8443"),
            ("http://[::1]:1//", "http://[::1]:1"),
            ("https://example.org/russet/v1", "https://example.org/russet"),
        ] {
            assert_eq!(normalized(url).unwrap(), expected);
        }
        for url in ["", "localhost:52415", "ftp://x", "http://", "http://a b", "http://x/?a=1"] {
            let error = normalized(url).unwrap_err().to_string();
            assert!(error.contains("http://HOST:PORT"), "{url}: {error}");
        }
        for (url, loopback) in [
            ("http://127.0.0.1:52415", true),
            ("http://[::1]:1", true),
            ("http://localhost", true),
            ("https://studio.local:8443", false),
        ] {
            let endpoint = GatewayEndpoint::new(url.into(), None, vec![listed("a", 1, true)], None).unwrap();
            assert_eq!(endpoint.is_loopback(), loopback, "{url}");
        }
    }
}
