//! The load on each control plane, and the measurements.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};
use serde_json::json;

use crate::Error;
use crate::planes::RunningPlane;

/// Total objects.
const OBJECTS: usize = 10_000;
/// Objects that a single client creates while watch latency is measured.
const ALONE_OBJECTS: usize = 500;
/// Objects that a single client creates to measure its rate.
const RATE_OBJECTS: usize = 1_000;
/// Concurrent clients that create objects.
const CLIENTS: usize = 32;
/// Lists of all objects; the median is reported.
const LISTS: usize = 5;
/// Time after a start for work such as filling caches.
const SETTLE_TIME: Duration = Duration::from_secs(5);

/// The figures of one control plane.
pub struct LoadFigures {
    pub ready: f64,
    pub idle: f64,
    pub full: f64,
    pub creates_alone: f64,
    pub creates_together: f64,
    pub watch_p50: f64,
    pub watch_p99: f64,
    pub list: f64,
}

/// Runs all measurements once.
pub async fn measure(plane: &RunningPlane) -> Result<LoadFigures, Error> {
    tokio::time::sleep(SETTLE_TIME).await;
    let idle = plane.resident()?;
    let api: Api<ConfigMap> = Api::namespaced(plane.client.clone(), "default");
    let mut latencies = watch(&api).await?;
    latencies.sort_by(f64::total_cmp);
    let at = |share: usize| latencies[(latencies.len() - 1) * share / 100];

    let started = Instant::now();
    for index in 0..RATE_OBJECTS {
        api.create(&PostParams::default(), &object(&format!("alone-{index}"))?).await?;
    }
    let creates_alone = RATE_OBJECTS as f64 / started.elapsed().as_secs_f64();

    let left = OBJECTS - ALONE_OBJECTS - RATE_OBJECTS;
    let started = Instant::now();
    let clients = (0..CLIENTS).map(|client| {
        let api = api.clone();
        tokio::spawn(async move {
            for index in (client..left).step_by(CLIENTS) {
                api.create(&PostParams::default(), &object(&format!("together-{index}"))?).await?;
            }
            Ok::<_, Error>(())
        })
    });
    for client in futures::future::join_all(clients).await {
        client??;
    }
    let creates_together = left as f64 / started.elapsed().as_secs_f64();

    let mut lists = Vec::new();
    for _ in 0..LISTS {
        let request = http::Request::get("/api/v1/namespaces/default/configmaps").body(Vec::new())?;
        let started = Instant::now();
        let text = plane.client.request_text(request).await?;
        lists.push(started.elapsed().as_secs_f64() * 1e3);
        if text.matches("\"resourceVersion\"").count() < OBJECTS {
            return Err("the list is not whole".into());
        }
    }
    lists.sort_by(f64::total_cmp);
    let full = plane.resident()?;
    Ok(LoadFigures {
        ready: plane.ready,
        idle,
        full,
        creates_alone,
        creates_together,
        watch_p50: at(50),
        watch_p99: at(99),
        list: lists[LISTS / 2],
    })
}

/// Milliseconds from sending each create to its event.
async fn watch(api: &Api<ConfigMap>) -> Result<Vec<f64>, Error> {
    let from =
        api.list(&ListParams::default().limit(1)).await?.metadata.resource_version.ok_or("no revision")?;
    let mut events = api.watch(&WatchParams::default(), &from).await?.boxed();
    let watching = tokio::spawn(async move {
        let mut seen = HashMap::new();
        while seen.len() < ALONE_OBJECTS {
            match events.try_next().await?.ok_or("the watch ended")? {
                WatchEvent::Added(map) => {
                    let name = map.metadata.name.unwrap_or_default();
                    if name.starts_with("watched-") {
                        seen.insert(name, Instant::now());
                    }
                }
                WatchEvent::Error(error) => return Err(Error::from(error.message.clone())),
                _ => {}
            }
        }
        Ok(seen)
    });
    let mut sent = HashMap::new();
    for index in 0..ALONE_OBJECTS {
        let name = format!("watched-{index}");
        let object = object(&name)?;
        sent.insert(name, Instant::now());
        api.create(&PostParams::default(), &object).await?;
    }
    let seen = watching.await??;
    let latency = |(name, at): (&String, &Instant)| Some((*at - *sent.get(name)?).as_secs_f64() * 1e3);
    Ok(seen.iter().filter_map(latency).collect())
}

/// A ConfigMap with a KiB of data.
fn object(name: &str) -> Result<ConfigMap, Error> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"bench": "control-plane"}},
        "data": {"payload": "x".repeat(1024)},
    }))?)
}
