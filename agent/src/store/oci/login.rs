//! Authentication to a registry: the registry's challenge names a realm, the realm exchanges the login for a
//! token, and the token is sent until the next challenge. The login is sent to the realm over TLS only.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use serde::Deserialize;

use crate::store::source_client::SourceClient;
use crate::store::web::{self, loopback, secret};
use crate::store::{Credentials, StoreError};

/// Secret keys that are read: a login, or the format of `kubectl create secret docker-registry`.
pub(super) const KEYS: &[&str] = &["username", "password", DOCKER];
const DOCKER: &str = ".dockerconfigjson";
/// Maximum size of a token response; tokens have some kilobytes.
const MAX_TOKEN_BYTES: usize = 1 << 20;

/// Credentials of one registry.
pub(in crate::store) struct Registry {
    /// User name and password, as a `Basic` header.
    login: Option<HeaderValue>,
    /// Requested scope: pulling this artifact.
    scope: String,
    authorization: Mutex<Option<HeaderValue>>,
}

/// A challenge of a registry: a scheme and its parameters.
#[derive(Debug, PartialEq)]
struct Challenge {
    scheme: String,
    parameters: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct TokenResponse {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// Credentials for the artifact `name` at `host`, from the Secret's entry for that host.
    pub(super) fn new(
        uri: &str,
        credentials: &Credentials,
        host: &str,
        name: &str,
    ) -> Result<Self, StoreError> {
        let bad = |problem: &str| StoreError::BadUri { uri: uri.to_owned(), problem: problem.to_owned() };
        let login = match (credentials.get("username"), credentials.get("password"), credentials.get(DOCKER))
        {
            (Some(name), Some(password), _) => Some(STANDARD.encode(format!("{name}:{password}"))),
            (None, None, Some(config)) => Some(docker_login(config, host).ok_or_else(|| {
                bad(&format!("its Secret's {DOCKER} has no auth for {host}; add it or name another Secret"))
            })?),
            (None, None, None) => None,
            _ => return Err(bad("its Secret has one of username and password; add the other")),
        };
        let illegal = || bad("its Secret's login has characters that no request may have");
        let login = login.map(|login| secret(&format!("Basic {login}")).ok_or_else(illegal)).transpose()?;
        Ok(Self { login, scope: format!("repository:{name}:pull"), authorization: Mutex::default() })
    }

    /// The current Authorization header.
    pub fn authorization(&self) -> Option<HeaderValue> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Answers a challenge of the registry at `home`; false without a usable answer.
    pub async fn answer_challenge(
        &self,
        client: &SourceClient,
        home: &Url,
        headers: &HeaderMap,
    ) -> Result<bool, StoreError> {
        let asked = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| Challenge::parse(value.to_str().ok()?));
        let asked: Vec<Challenge> = asked.collect();
        let find =
            |scheme: &str| asked.iter().find(|challenge| challenge.scheme.eq_ignore_ascii_case(scheme));
        let answer = match (find("bearer"), find("basic"), &self.login) {
            (Some(challenge), ..) => Some(self.token(client, home, challenge).await?),
            (None, Some(_), Some(login)) => Some(login.clone()),
            _ => None,
        };
        let news = answer.is_some();
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = answer;
        Ok(news)
    }

    async fn token(
        &self,
        client: &SourceClient,
        home: &Url,
        challenge: &Challenge,
    ) -> Result<HeaderValue, StoreError> {
        let unusable = |detail: String| StoreError::Unreachable { what: home.to_string(), detail };
        let realm = challenge.parameters.get("realm").map(String::as_str).unwrap_or_default();
        let mut url = Url::parse(realm)
            .map_err(|_| unusable(format!("it asks for a token from {realm:?}, which is no URL")))?;
        if url.scheme() != "https" && !(url.scheme() == "http" && loopback(&url) && loopback(home)) {
            return Err(unusable(format!(
                "it asks for a token from {realm}, and a login is shown over TLS alone"
            )));
        }
        if let Some(service) = challenge.parameters.get("service") {
            url.query_pairs_mut().append_pair("service", service);
        }
        url.query_pairs_mut().append_pair("scope", &self.scope);
        let mut request = web::get(&url);
        if let Some(login) = &self.login {
            request.headers_mut().insert(AUTHORIZATION, login.clone());
        }
        let response = client.send(request, false).await?;
        web::check(&url, &response)?;
        let body = web::read_body(&url, response, MAX_TOKEN_BYTES).await?;
        let granted: TokenResponse = serde_json::from_slice(&body)
            .map_err(|error| unusable(format!("its realm {realm} answers with no token: {error}")))?;
        let token = granted.token.or(granted.access_token).unwrap_or_default();
        secret(&format!("Bearer {token}"))
            .filter(|_| !token.is_empty())
            .ok_or_else(|| unusable(format!("its realm {realm} answers with no token")))
    }
}

/// The login for `host` in a Docker configuration.
fn docker_login(config: &str, host: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct DockerConfig {
        auths: BTreeMap<String, Login>,
    }
    #[derive(Deserialize)]
    struct Login {
        auth: Option<String>,
        username: Option<String>,
        password: Option<String>,
    }
    let config: DockerConfig = serde_json::from_str(config).ok()?;
    let of_host = |key: &str| {
        let key = key.trim_start_matches("https://").trim_start_matches("http://");
        key.split('/').next() == Some(host)
    };
    let (_, login) = config.auths.into_iter().find(|(key, _)| of_host(key))?;
    match login {
        Login { auth: Some(auth), .. } if !auth.is_empty() => Some(auth),
        Login { username, password, .. } => Some(STANDARD.encode(format!("{}:{}", username?, password?))),
    }
}

impl Challenge {
    /// Parses `Bearer realm="https://…",service="…"`, as far as possible.
    fn parse(text: &str) -> Option<Self> {
        let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        let mut parameters = BTreeMap::new();
        while let Some((key, after)) = rest.split_once('=') {
            let (value, after) = value(after.trim_start())?;
            parameters.insert(key.trim_matches([' ', ',']).to_ascii_lowercase(), value);
            rest = after;
        }
        (!scheme.is_empty()).then(|| Self { scheme: scheme.to_owned(), parameters })
    }
}

/// A value, quoted or not, and the rest; `None` for an unterminated quote.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(',').unwrap_or(text.len());
        return Some((text[..end].trim().to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_is_read_with_or_without_quotes() {
        let challenge = |scheme: &str, parameters: &[(&str, &str)]| {
            let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            Some(Challenge { scheme: scheme.to_owned(), parameters: parameters.collect() })
        };
        for (text, expected) in [
            (
                r#"Bearer realm="https://auth.example/token",service="a \"b\", c",Scope=x"#,
                challenge(
                    "Bearer",
                    &[("realm", "https://auth.example/token"), ("service", "a \"b\", c"), ("scope", "x")],
                ),
            ),
            ("Basic realm=x", challenge("Basic", &[("realm", "x")])),
            ("Basic", challenge("Basic", &[])),
            (r#"Bearer realm="https://never.ends"#, None),
            ("", None),
        ] {
            assert_eq!(Challenge::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn a_login_is_read_as_people_and_as_kubectl_write_it() {
        let header = |secret: &[(&str, &str)]| {
            let secret = secret.iter().map(|(key, value)| ((*key).to_owned(), (*value).into()));
            let registry = Registry::new("oci://ghcr.io/a:b", &Credentials::new(secret), "ghcr.io", "a");
            registry.map(|registry| registry.login.map(|login| login.to_str().unwrap().to_owned()))
        };
        let both = Some("Basic bWU6c2VjcmV0".to_owned());
        let docker = |auths: &str| format!(r#"{{"auths": {{{auths}}}}}"#);
        assert_eq!(header(&[]).unwrap(), None);
        assert_eq!(header(&[("username", "me"), ("password", "secret")]).unwrap(), both);
        for auths in [
            r#""ghcr.io": {"auth": "bWU6c2VjcmV0"}"#,
            r#""x.io": {"auth": "eDp5"}, "https://ghcr.io/v2/": {"username": "me", "password": "secret"}"#,
        ] {
            assert_eq!(header(&[(DOCKER, &docker(auths))]).unwrap(), both);
        }
        header(&[("username", "me")]).unwrap_err();
        header(&[(DOCKER, &docker(r#""ghcr.io.evil": {"auth": "eDp5"}"#))]).unwrap_err();
        header(&[(DOCKER, "no json")]).unwrap_err();
    }
}
