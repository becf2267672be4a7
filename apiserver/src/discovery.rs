//! Discovery: groups, versions, resources, schemas, the server's version and health. Everything is derived
//! from the table of kinds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH, VARY};
use http::{HeaderMap, Response, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest, Sha512};

use crate::kinds::resource::Resource;
use crate::kinds::table::Table;
use crate::openapi;
use crate::output::{self, Body};
use crate::status::{ApiError, Result};
use crate::store::StoreError;

/// The Kubernetes version of this API; clients parse it as a semantic version.
pub const GIT_VERSION: &str = "v1.36.3+russet";
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// `/version`.
pub fn version() -> Value {
    json!({
        "major": "1", "minor": "36", "gitVersion": GIT_VERSION, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z", "goVersion": "none", "compiler": "rustc",
        "platform": format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
    })
}

/// `/healthz`, `/livez` and `/readyz`, also with `?verbose`: a server whose store failed is neither live nor
/// ready.
pub fn health(path: &str, query: &str, failure: Option<StoreError>) -> Response<Body> {
    let verbose = query.split('&').any(|part| part == "verbose" || part.starts_with("verbose="));
    let name = path.trim_matches('/');
    match failure {
        Some(error) => output::text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("[+]ping ok\n[-]store failed: {error}\n{name} check failed\n"),
        ),
        None if verbose => {
            output::text(StatusCode::OK, format!("[+]ping ok\n[+]store ok\n{name} check passed\n"))
        }
        None => output::text(StatusCode::OK, "ok"),
    }
}

struct ApiGroup<'a> {
    name: &'a str,
    /// Preferred first.
    versions: Vec<(&'a str, Vec<&'a Resource>)>,
}

fn groups(table: &Table) -> Vec<ApiGroup<'_>> {
    let mut groups: Vec<ApiGroup<'_>> = Vec::new();
    for resource in table.all() {
        let at = groups.iter().position(|group| group.name == resource.group).unwrap_or_else(|| {
            groups.push(ApiGroup { name: &resource.group, versions: Vec::new() });
            groups.len() - 1
        });
        let versions = &mut groups[at].versions;
        match versions.iter_mut().find(|(version, _)| *version == resource.version) {
            Some((_, resources)) => resources.push(resource),
            None => versions.push((&resource.version, vec![resource])),
        }
    }
    for group in &mut groups {
        group
            .versions
            .sort_by_key(|(version, _)| std::cmp::Reverse(crate::kinds::definition::priority(version)));
    }
    groups
}

fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_string() } else { format!("{group}/{version}") }
}

fn accepts_aggregated(accept: &str) -> bool {
    accept.split(',').any(|range| {
        range.contains("g=apidiscovery.k8s.io") && range.contains("v=v2") && !range.contains("v=v2beta1")
    })
}

/// `/api` and `/apis`, plain or aggregated.
pub fn roots(table: &Table, path: &str, headers: &HeaderMap, host: &str) -> Response<Body> {
    let accept = headers.get("accept").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let core = path.trim_end_matches('/') == "/api";
    let chosen: Vec<ApiGroup<'_>> =
        groups(table).into_iter().filter(|group| group.name.is_empty() == core).collect();
    if accepts_aggregated(accept) {
        let list = json!({
            "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {},
            "items": chosen.iter().map(aggregated_group).collect::<Vec<_>>(),
        });
        return tagged(Bytes::from(list.to_string()), AGGREGATED, headers);
    }
    let plain = if core {
        json!({
            "kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": host}],
        })
    } else {
        let groups: Vec<Value> = chosen.iter().map(plain_group).collect();
        json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
    };
    tagged(Bytes::from(plain.to_string()), "application/json", headers)
}

/// `/.well-known/openid-configuration`: who signs the tokens of service accounts, and where its keys are.
pub fn openid(headers: &HeaderMap) -> Value {
    let host = headers.get("host").and_then(|value| value.to_str().ok()).unwrap_or("localhost");
    json!({
        "issuer": crate::auth::tokens::ISSUER, "jwks_uri": format!("https://{host}/openid/v1/jwks"),
        "response_types_supported": ["id_token"], "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["ES256"],
    })
}

/// `/apis/GROUP`.
pub fn group(table: &Table, name: &str) -> Result<Value> {
    let groups = groups(table);
    let group = groups.iter().find(|group| group.name == name).ok_or_else(ApiError::no_such_path)?;
    let mut value = plain_group(group);
    value["kind"] = json!("APIGroup");
    value["apiVersion"] = json!("v1");
    Ok(value)
}

/// `/api/v1` and `/apis/GROUP/VERSION`.
pub fn resources(table: &Table, group: &str, version: &str) -> Result<Value> {
    let groups = groups(table);
    let found = groups
        .iter()
        .find(|known| known.name == group)
        .and_then(|known| known.versions.iter().find(|(known, _)| *known == version))
        .ok_or_else(ApiError::no_such_path)?;
    let mut listed = Vec::new();
    for resource in &found.1 {
        let mut entry = json!({
            "name": resource.plural, "singularName": resource.singular, "namespaced": resource.namespaced,
            "kind": resource.kind, "verbs": resource.verbs,
        });
        for (field, values) in [("shortNames", &resource.short_names), ("categories", &resource.categories)] {
            if !values.is_empty() {
                entry[field] = json!(values);
            }
        }
        listed.push(entry);
        for subresource in &resource.subresources {
            let (group, version, kind, verbs) = subresource_kind(resource, subresource);
            let mut entry = json!({
                "name": format!("{}/{subresource}", resource.plural), "singularName": "",
                "namespaced": resource.namespaced, "kind": kind, "verbs": verbs,
            });
            if (group, version) != (resource.group.as_str(), resource.version.as_str()) {
                entry["group"] = json!(group);
                entry["version"] = json!(version);
            }
            listed.push(entry);
        }
    }
    Ok(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version(group, version),
        "resources": listed,
    }))
}

fn subresource_kind<'a>(
    resource: &'a Resource,
    subresource: &str,
) -> (&'a str, &'a str, &'a str, &'static [&'static str]) {
    match subresource {
        "scale" => ("autoscaling", "v1", "Scale", &["get", "patch", "update"]),
        "token" => ("authentication.k8s.io", "v1", "TokenRequest", &["create"]),
        "finalize" => (&resource.group, &resource.version, &resource.kind, &["update"]),
        _ => (&resource.group, &resource.version, &resource.kind, &["get", "patch", "update"]),
    }
}

fn plain_group(group: &ApiGroup<'_>) -> Value {
    let versions: Vec<Value> = group
        .versions
        .iter()
        .map(|(version, _)| json!({"groupVersion": group_version(group.name, version), "version": version}))
        .collect();
    json!({"name": group.name, "versions": versions, "preferredVersion": versions.first()})
}

fn aggregated_group(group: &ApiGroup<'_>) -> Value {
    let versions: Vec<Value> = group
        .versions
        .iter()
        .map(|(version, resources)| {
            let resources: Vec<Value> =
                resources.iter().map(|resource| aggregated_resource(resource)).collect();
            json!({"version": version, "resources": resources, "freshness": "Current"})
        })
        .collect();
    let metadata = if group.name.is_empty() { json!({}) } else { json!({"name": group.name}) };
    json!({"metadata": metadata, "versions": versions})
}

fn aggregated_resource(resource: &Resource) -> Value {
    let kind =
        |group: &str, version: &str, kind: &str| json!({"group": group, "version": version, "kind": kind});
    let mut entry = json!({
        "resource": resource.plural,
        "responseKind": kind(&resource.group, &resource.version, &resource.kind),
        "scope": if resource.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": resource.singular,
        "verbs": resource.verbs,
    });
    for (field, values) in [("shortNames", &resource.short_names), ("categories", &resource.categories)] {
        if !values.is_empty() {
            entry[field] = json!(values);
        }
    }
    if !resource.subresources.is_empty() {
        let subresources = resource.subresources.iter().map(|subresource| {
            let (group, version, name, verbs) = subresource_kind(resource, subresource);
            json!({"subresource": subresource, "responseKind": kind(group, version, name), "verbs": verbs})
        });
        entry["subresources"] = subresources.collect();
    }
    entry
}

/// A response with an ETag, which a client may cache.
fn tagged(body: Bytes, content_type: &'static str, headers: &HeaderMap) -> Response<Body> {
    let tag = format!("\"{}\"", hex::encode_upper(Sha512::digest(&body)));
    let same = headers.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = if same {
        output::bytes(StatusCode::NOT_MODIFIED, Bytes::new())
    } else {
        output::bytes(StatusCode::OK, body)
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(VARY, HeaderValue::from_static("Accept"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("public"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(ETAG, tag);
    }
    response
}

/// The OpenAPI documents, built on first request and cached until the table changes.
#[derive(Debug, Default)]
pub struct OpenApiDocuments {
    cached: Mutex<Option<CachedDocuments>>,
}

#[derive(Debug)]
struct CachedDocuments {
    table: Arc<Table>,
    documents: Arc<BTreeMap<String, (String, Bytes)>>,
}

impl OpenApiDocuments {
    fn get(&self, table: &Arc<Table>) -> Arc<BTreeMap<String, (String, Bytes)>> {
        let mut made = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = made.as_ref()
            && Arc::ptr_eq(&made.table, table)
        {
            return made.documents.clone();
        }
        let mut documents = BTreeMap::new();
        for group in groups(table) {
            for (version, resources) in &group.versions {
                let shown: Vec<openapi::Resource<'_>> = resources
                    .iter()
                    .map(|resource| openapi::Resource {
                        group: &resource.group,
                        version: &resource.version,
                        kind: &resource.kind,
                        plural: &resource.plural,
                        namespaced: resource.namespaced,
                        verbs: resource.verbs,
                        subresources: &resource.subresources,
                        schema: resource.custom.as_ref().map(|custom| &custom.openapi),
                    })
                    .collect();
                let name = group_version(group.name, version);
                let document = Bytes::from(openapi::document(&name, &shown).to_string());
                let path = if group.name.is_empty() { format!("api/{name}") } else { format!("apis/{name}") };
                documents.insert(path, (hex::encode_upper(Sha512::digest(&document)), document));
            }
        }
        let documents = Arc::new(documents);
        *made = Some(CachedDocuments { table: table.clone(), documents: documents.clone() });
        documents
    }

    /// Handles `/openapi/v3` and all paths under it.
    pub fn answer(&self, table: &Arc<Table>, path: &str, headers: &HeaderMap) -> Result<Response<Body>> {
        let documents = self.get(table);
        let rest = path.trim_start_matches("/openapi/v3").trim_matches('/');
        if rest.is_empty() {
            let paths: serde_json::Map<String, Value> = documents
                .iter()
                .map(|(path, (hash, _))| {
                    (path.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{path}?hash={hash}")}))
                })
                .collect();
            let index = Bytes::from(json!({"paths": paths}).to_string());
            return Ok(tagged(index, "application/json", headers));
        }
        let (_, document) = documents.get(rest).ok_or_else(ApiError::no_such_path)?;
        Ok(tagged(document.clone(), "application/json", headers))
    }
}
