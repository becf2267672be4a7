//! Durability across restarts: stop, start, kill -9.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use bytes::Bytes;
use futures::StreamExt;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, PostParams, WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use russet_apiserver::store::embedded::Embedded;
use russet_apiserver::store::{Expect, Store, Txn, TxnChange, TxnOutcome};
use russet_apiserver::{ApiServerConfig, Error};
use serde_json::json;

use super::support::{DataLocation, TestServer};

#[tokio::test]
async fn restarted_server_keeps_objects_and_expires_old_watches() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let map: ConfigMap =
        serde_json::from_value(json!({"metadata": {"name": "a"}, "data": {"x": "1"}})).unwrap();
    let made = maps.create(&PostParams::default(), &map).await.unwrap();
    let old = made.metadata.resource_version.clone().unwrap();
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "b"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    let folder = cluster.stop().await;
    let cluster = TestServer::start_in(folder).await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    assert_eq!(maps.get("a").await.unwrap().metadata, made.metadata);
    let mut events = maps.watch(&WatchParams::default(), &old).await.unwrap().boxed();
    match events.try_next().await.unwrap().unwrap() {
        WatchEvent::Error(status) => assert_eq!((status.code, status.reason.as_str()), (410, "Expired")),
        other => panic!("{other:?}"),
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_controller_follows_a_server_through_its_restart() {
    for streaming in [false, true] {
        let cluster = TestServer::start().await;
        let address = cluster.running().addr();
        let client = cluster.client();
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
        let config = watcher::Config::default().labels("test=yes");
        let config = if streaming { config.streaming_lists() } else { config };
        let (reader, writer) = reflector::store();
        let stream = reflector::reflector(writer, watcher::watcher(maps.clone(), config).default_backoff());
        let following = tokio::spawn(stream.for_each(|_| std::future::ready(())));
        let labelled = |name: &str| -> ConfigMap {
            serde_json::from_value(json!({"metadata": {"name": name, "labels": {"test": "yes"}}})).unwrap()
        };
        maps.create(&PostParams::default(), &labelled("before")).await.unwrap();
        cluster.eventually("the first is seen", || async { reader.len() == 1 }).await;
        let folder = cluster.stop().await;
        let cluster = TestServer::start_at(folder, address).await;
        maps.create(&PostParams::default(), &labelled("after")).await.unwrap();
        cluster.eventually("the second is seen", || async { reader.len() == 2 }).await;
        following.abort();
        cluster.stop().await;
    }
}

/// Writes after the backup are lost, and every client lists anew: before, and after as many new writes.
#[tokio::test]
async fn clients_follow_a_store_restored_under_them() {
    let cluster = TestServer::start_in(DataLocation::embedded()).await;
    let address = cluster.running().addr();
    let client = cluster.client();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    let named = |name: String| -> ConfigMap {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"test": "yes"}}})).unwrap()
    };
    maps.create(&PostParams::default(), &named("kept".into())).await.unwrap();
    let (mut readers, mut following) = (Vec::new(), Vec::new());
    for streaming in [false, true] {
        let config = watcher::Config::default().labels("test=yes");
        let config = if streaming { config.streaming_lists() } else { config };
        let (reader, writer) = reflector::store();
        let stream = reflector::reflector(writer, watcher::watcher(maps.clone(), config).default_backoff());
        following.push(tokio::spawn(stream.for_each(|_| std::future::ready(()))));
        readers.push(reader);
    }
    let seen = |count: usize| readers.iter().all(|reader| reader.len() == count);
    let request = http::Request::get("/backup").body(Vec::new()).unwrap();
    let backup = client.request_text(request).await.unwrap();
    for number in 0..100 {
        maps.create(&PostParams::default(), &named(format!("lost-{number}"))).await.unwrap();
    }
    cluster.eventually("all are seen", || async { seen(101) }).await;
    let place = cluster.stop().await;
    let store = place.config().data_dir.join("store.redb");
    let restored = russet_apiserver::store::backup::restore(backup.as_bytes(), &store).unwrap();
    assert!(restored.replaced.is_some());
    let cluster = TestServer::start_at(place, address).await;
    cluster.eventually("the lost are gone", || async { seen(1) }).await;
    for number in 0..100 {
        maps.create(&PostParams::default(), &named(format!("new-{number}"))).await.unwrap();
    }
    cluster.eventually("the new are seen", || async { seen(101) }).await;
    let lost = |map: &std::sync::Arc<ConfigMap>| map.metadata.name.as_deref().unwrap().starts_with("lost");
    assert!(!readers.iter().any(|reader| reader.state().iter().any(lost)));
    following.iter().for_each(tokio::task::JoinHandle::abort);
    cluster.stop().await;
}

#[tokio::test]
async fn a_watch_from_the_future_has_expired() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let future = "9000000000000000000";
    let mut events = maps.watch(&WatchParams::default(), future).await.unwrap().boxed();
    match events.try_next().await.unwrap().unwrap() {
        WatchEvent::Error(status) => {
            assert_eq!((status.code, status.reason.as_str()), (410, "Expired"));
            assert!(status.message.contains("list anew"), "{status:?}");
        }
        other => panic!("{other:?}"),
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_backup_is_the_administrators_alone() {
    let cluster = TestServer::start().await;
    for (user, allowed) in [(None, true), (Some("somebody"), false)] {
        let client = match user {
            None => cluster.client(),
            Some(user) => cluster.client_as(user, &[]).await,
        };
        let request = http::Request::get("/backup").body(Vec::new()).unwrap();
        let backup = client.request_text(request).await;
        assert_eq!(backup.is_ok(), allowed, "{user:?}: {backup:?}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_file_is_released_when_a_server_stops_during_writes() {
    let mut place = DataLocation::create();
    for round in 0..25 {
        let cluster = TestServer::start_in(place).await;
        let busy: Vec<_> = (0..16)
            .map(|client| {
                let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
                tokio::spawn(async move {
                    for number in 0.. {
                        let name = format!("map-{round}-{client}-{number}");
                        let map = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
                        maps.create(&PostParams::default(), &map).await.unwrap();
                    }
                })
            })
            .collect();
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
        let last = format!("map-{round}-15-0");
        cluster.eventually("writes are answered", || async { maps.get(&last).await.is_ok() }).await;
        drop(maps);
        // The client is gone, and its write is still in progress.
        for client in busy {
            client.abort();
            assert!(client.await.unwrap_err().is_cancelled(), "a write failed before the server stopped");
        }
        // A server does not start on a file that another server has open.
        place = cluster.stop().await;
    }
}

#[tokio::test]
async fn port_or_directory_in_use_is_an_error_with_a_remedy() {
    let cluster = TestServer::start_in(DataLocation::embedded()).await;
    let folder = tempfile::tempdir().unwrap();
    let taken =
        russet_apiserver::start(ApiServerConfig::new(folder.path()).listen(cluster.running().addr())).await;
    let Err(error @ Error::Listen { .. }) = taken else { panic!("it started") };
    let port = cluster.running().addr().port().to_string();
    assert!(error.to_string().contains(&port) && error.to_string().contains("--api-port"), "{error}");
    let used = cluster.running().kubeconfig().parent().unwrap().to_path_buf();
    let taken = russet_apiserver::start(ApiServerConfig::new(used).listen(([127, 0, 0, 1], 0).into())).await;
    let Err(error @ Error::Store(_)) = taken else { panic!("it started") };
    assert!(error.to_string().contains("stop it first"), "{error}");
    cluster.stop().await;
}

/// Where the child process of the next test writes; unset in every other run.
const CHILD: &str = "RUSSET_STORE_CHILD";

/// Not a test of its own: the child process of the next one, which writes until it is killed.
#[tokio::test]
async fn a_writer_that_will_be_killed() {
    let Ok(folder) = std::env::var(CHILD) else { return };
    let store = Embedded::open(&std::path::Path::new(&folder).join("store.redb")).unwrap();
    for round in 0.. {
        let writes = (0..8).map(|writer| {
            let key = format!("/registry/test/{round}-{writer}");
            let change = TxnChange::Put(Bytes::from(json!({"round": round}).to_string()));
            let store = &store;
            async move {
                let outcome =
                    store.txn(Txn { key: key.clone(), expect: Expect::Absent, change }).await.unwrap();
                let TxnOutcome::Committed(record) = outcome else { panic!("{outcome:?}") };
                println!("acknowledged {key} {}", record.revision);
            }
        });
        futures::future::join_all(writes).await;
    }
}

#[test]
fn kill_during_writes_loses_nothing_acknowledged() {
    // The test's name in this binary.
    let (_, here) = module_path!().split_once("::").unwrap();
    let writer = format!("{here}::a_writer_that_will_be_killed");
    for acknowledged in [1, 50, 400] {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([&writer, "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut seen = Vec::new();
        for line in lines {
            // The test harness prints lines of its own, one without a line end.
            if let Some((_, rest)) = line.split_once("acknowledged ") {
                let (key, revision) = rest.split_once(' ').unwrap();
                seen.push((key.to_string(), revision.parse::<u64>().unwrap()));
            }
            if seen.len() == acknowledged {
                // SIGKILL: no destructor runs, no buffer is written. Output printed before counts, too.
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(seen.len() >= acknowledged, "the child ended early after {} writes", seen.len());
        let store = Embedded::open(&folder.path().join("store.redb")).unwrap();
        for (key, revision) in &seen {
            let record = store.get(key).unwrap_or_else(|| panic!("{key} was acknowledged and is lost"));
            assert_eq!(record.revision, *revision);
        }
        assert!(store.revision() >= seen.iter().map(|(_, revision)| *revision).max().unwrap());
    }
}
