//! An API server that is a list of objects in memory: it serves lists and watches, and creates and deletes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, patch};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::broadcast;

use crate::harness::TEST_TIMEOUT;

/// Objects by plural and name, and the changes to them.
#[derive(Clone)]
pub struct StoredObjects {
    pub stored: Arc<Mutex<BTreeMap<(String, String), Value>>>,
    events: broadcast::Sender<(String, String)>,
    /// Applied statuses, each with its field manager, and patches of lists.
    pub applied: Arc<Mutex<Vec<(String, Value)>>>,
    /// Writes so far: method, plural and name.
    pub writes: Arc<Mutex<Vec<String>>>,
    /// Held while a status is replaced.
    replacing: Arc<Mutex<()>>,
    /// The plural of which nothing may be created, and why.
    pub refused: Arc<Mutex<Option<(String, String)>>>,
    /// What has no answer until the test says so, such as `list pipelines`, and whether it was asked for.
    held: Arc<Mutex<Option<(String, bool)>>>,
}

impl Default for StoredObjects {
    fn default() -> Self {
        Self {
            stored: Arc::default(),
            events: broadcast::channel(64).0,
            applied: Arc::default(),
            writes: Arc::default(),
            replacing: Arc::default(),
            refused: Arc::default(),
            held: Arc::default(),
        }
    }
}

impl StoredObjects {
    pub fn apply(&self, plural: &str, object: Value) {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        self.stored.lock().unwrap().insert((plural.into(), name), object.clone());
        let _ = self.events.send((plural.into(), watch_event("MODIFIED", &object)));
    }

    /// Deletes an object.
    pub fn delete(&self, plural: &str, name: &str) {
        if let Some(object) = self.stored.lock().unwrap().remove(&(plural.into(), name.into())) {
            let _ = self.events.send((plural.into(), watch_event("DELETED", &object)));
        }
    }

    /// Names of the objects of a plural.
    pub fn names(&self, plural: &str) -> Vec<String> {
        let stored = self.stored.lock().unwrap();
        stored.keys().filter(|(of, _)| of == plural).map(|(_, name)| name.clone()).collect()
    }

    /// The objects of a plural.
    fn of(&self, plural: &str) -> Vec<Value> {
        let stored = self.stored.lock().unwrap();
        stored.iter().filter(|((of, _), _)| of == plural).map(|(_, object)| object.clone()).collect()
    }

    /// This has no answer from now on, until `release`.
    pub fn hold(&self, what: &str) {
        *self.held.lock().unwrap() = Some((what.to_owned(), false));
    }

    pub fn release(&self) {
        *self.held.lock().unwrap() = None;
    }

    /// Whether something waits for its answer.
    pub fn holds(&self) -> bool {
        self.held.lock().unwrap().as_ref().is_some_and(|(_, is_asked)| *is_asked)
    }

    async fn wait_while_held(&self, what: &str) {
        let is_held = || match &mut *self.held.lock().unwrap() {
            Some((held, is_asked)) if *held == what => {
                *is_asked = true;
                true
            }
            _ => false,
        };
        while is_held() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn get(&self, plural: &str, name: &str) -> Option<Value> {
        self.stored.lock().unwrap().get(&(plural.to_owned(), name.to_owned())).cloned()
    }
}

/// The copy of a Model on node `a`, of which so many of 100 bytes have arrived.
pub fn model_copy(model: &str, bytes_done: u64) -> Value {
    let ready = if bytes_done == 100 { "True" } else { "False" };
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelCopy",
        "metadata": {"name": format!("default.{model}.a"), "resourceVersion": bytes_done.to_string()},
        "spec": {
            "modelRef": {"namespace": "default", "name": model}, "source": {"uri": format!("hf://owner/{model}")},
            "nodeName": "a", "want": "Files",
        },
        "status": {
            "bytesDone": bytes_done, "bytesTotal": 100,
            "conditions": [{
                "type": "Ready", "status": ready, "reason": "InProgress", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        },
    })
}

/// Waits until a gateway has seen the cluster.
pub async fn until_ready(ready: &AtomicBool) {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while !ready.load(Ordering::Acquire) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("the gateway becomes ready once the API server is there");
}

/// A line of a watch. Every API server sends the type first.
fn watch_event(kind: &str, object: &Value) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

/// An API server on `address` until the guard is dropped: then every connection breaks.
pub fn api_server(address: SocketAddr, objects: StoredObjects) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let router = Router::new()
        .route("/apis/russet.dev/v1alpha1/{plural}", get(list_or_watch))
        .route("/api/v1/{plural}", get(list_or_watch_core))
        .route("/apis/russet.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}/status", patch(apply_status))
        .route("/apis/russet.dev/v1alpha1/namespaces/{namespace}/{plural}", get(list_namespace).post(create))
        .route("/apis/russet.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}", delete(remove).get(read))
        .with_state(objects);
    let socket = runtime.block_on_thread(async move {
        // The previous server closes its socket a moment after its shutdown.
        let bind = async {
            loop {
                let socket = tokio::net::TcpSocket::new_v4().unwrap();
                socket.set_reuseaddr(true).unwrap();
                if socket.bind(address).is_ok() {
                    return socket;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let socket = tokio::time::timeout(TEST_TIMEOUT, bind).await.expect("the port is free again");
        socket.listen(64).unwrap()
    });
    runtime.spawn(async move { axum::serve(socket, router).await });
    runtime
}

/// Runs a future on a runtime from within another one.
trait BlockOnThread {
    fn block_on_thread<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> T;
}

impl BlockOnThread for tokio::runtime::Runtime {
    fn block_on_thread<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> T {
        let handle = self.handle().clone();
        std::thread::spawn(move || handle.block_on(future)).join().unwrap()
    }
}

async fn list_or_watch(
    State(objects): State<StoredObjects>,
    Path(plural): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    if query.get("watch").is_none_or(|watch| watch == "false") {
        objects.wait_while_held(&format!("list {plural}")).await;
        return list(&objects.of(&plural));
    }
    let mut events = objects.events.subscribe();
    // The watch does not track resource versions: it sends every object again.
    let existing = objects.of(&plural);
    Body::from_stream(async_stream::stream! {
        for object in existing {
            yield Ok(watch_event("MODIFIED", &object));
        }
        while let Ok((of, event)) = events.recv().await {
            if of == plural {
                yield Ok::<_, std::convert::Infallible>(event);
            }
        }
    })
    .into_response()
}

/// The same of Kubernetes' own kinds, of which it serves those that the test has stored.
async fn list_or_watch_core(
    state: State<StoredObjects>,
    plural: Path<String>,
    query: Query<BTreeMap<String, String>>,
) -> Response {
    if state.of(&plural).is_empty() {
        return failure(404, "the test has none of this kind");
    }
    list_or_watch(state, plural, query).await
}

/// An API server's error.
fn failure(code: u16, message: &str) -> Response {
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message});
    (axum::http::StatusCode::from_u16(code).unwrap(), Json(status)).into_response()
}

async fn list_namespace(
    State(objects): State<StoredObjects>,
    Path((namespace, plural)): Path<(String, String)>,
) -> Response {
    let mut items = objects.of(&plural);
    items.retain(|object| object["metadata"]["namespace"] == namespace.as_str());
    list(&items)
}

fn list(items: &[Value]) -> Response {
    Json(json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": items,
    }))
    .into_response()
}

async fn create(
    State(objects): State<StoredObjects>,
    Path((namespace, plural)): Path<(String, String)>,
    Json(mut object): Json<Value>,
) -> Response {
    if let Some((refused, why)) = &*objects.refused.lock().unwrap()
        && *refused == plural
    {
        return failure(403, why);
    }
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    if objects.get(&plural, &name).is_some() {
        return failure(409, "it exists already");
    }
    objects.writes.lock().unwrap().push(format!("create {plural} {name}"));
    let metadata = &mut object["metadata"];
    assert_eq!(metadata["namespace"], namespace.as_str());
    metadata["uid"] = json!(format!("uid-of-{name}"));
    metadata["resourceVersion"] = json!("2");
    metadata["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    objects.apply(&plural, object.clone());
    (axum::http::StatusCode::CREATED, Json(object)).into_response()
}

async fn remove(
    State(objects): State<StoredObjects>,
    Path((_, plural, name)): Path<(String, String, String)>,
    body: axum::body::Bytes,
) -> Response {
    let Some(object) = objects.get(&plural, &name) else { return failure(404, "not found") };
    let options: Value = serde_json::from_slice(&body).unwrap_or_default();
    assert_eq!(options["preconditions"]["uid"], object["metadata"]["uid"], "{options}");
    objects.writes.lock().unwrap().push(format!("delete {plural} {name}"));
    objects.stored.lock().unwrap().remove(&(plural.clone(), name));
    let _ = objects.events.send((plural, watch_event("DELETED", &object)));
    Json(json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})).into_response()
}

/// Replaces the status of a Budget or a PipelineRun in place of the version that is named.
fn replace_status(objects: &StoredObjects, plural: &str, name: &str, patch: &Value) -> Response {
    let Some(mut object) = objects.get(plural, name) else { return failure(404, "not found") };
    let version = &mut object["metadata"]["resourceVersion"];
    if patch["metadata"]["resourceVersion"] != *version {
        return failure(409, "it is another version");
    }
    *version = json!((version.as_str().unwrap().parse::<u64>().unwrap() + 1).to_string());
    object["status"] = patch["status"].clone();
    objects.apply(plural, object.clone());
    Json(object).into_response()
}

async fn read(
    State(objects): State<StoredObjects>,
    Path((_, plural, name)): Path<(String, String, String)>,
) -> Response {
    objects.wait_while_held(&format!("get {plural}")).await;
    objects
        .get(&plural, &name)
        .map_or_else(|| failure(404, "not found"), |object| Json(object).into_response())
}

/// Records an apply or a patch, and returns the object unchanged; of a Budget or a PipelineRun it replaces the status.
async fn apply_status(
    State(objects): State<StoredObjects>,
    Path((_, plural, name)): Path<(String, String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
    body: axum::body::Bytes,
) -> Response {
    let patch: Value = serde_json::from_slice(&body).unwrap();
    if ["budgets", "pipelineruns"].contains(&plural.as_str()) {
        let _one_at_a_time = objects.replacing.lock().unwrap();
        return replace_status(&objects, &plural, &name, &patch);
    }
    let Some(object) = objects.stored.lock().unwrap().get(&(plural, name)).cloned() else {
        return axum::http::StatusCode::NOT_FOUND.into_response();
    };
    let manager = query.get("fieldManager").cloned().unwrap_or_default();
    let status = if patch.is_array() { patch } else { patch["status"].clone() };
    objects.applied.lock().unwrap().push((manager, status));
    Json(object).into_response()
}
