//! Partial and complete failures of etcd, and wrong etcd settings.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};
use russet_apiserver::Error;

use crate::api::support::{DataLocation, SharedEtcd, TestServer, code, etcd};
use crate::two_servers::map;

fn maps(cluster: &TestServer) -> Api<ConfigMap> {
    Api::namespaced(cluster.client(), "kube-public")
}

#[tokio::test]
async fn tls_members_fail_in_turn_and_acknowledged_writes_survive() {
    let etcd = SharedEtcd::with_members(3, true);
    let cluster = TestServer::start_in(DataLocation::in_etcd(etcd.clone())).await;
    let api = maps(&cluster);
    let from = api.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut acknowledged = Vec::new();
    for at in 0..3 {
        etcd.etcd().kill(at).unwrap();
        for index in 0..10 {
            let name = format!("m{at}-{index}");
            // While etcd elects a new leader, a write may be rejected or remain undecided, but an
            // acknowledged one is never lost.
            let taken = || async {
                matches!(code(api.create(&PostParams::default(), &map(&name, "x")).await), 0 | 409)
            };
            cluster.eventually("a write is taken", taken).await;
            acknowledged.push(name);
        }
        etcd.etcd().restart(at).unwrap();
    }
    for name in &acknowledged {
        assert_eq!(code(api.get(name).await), 0, "{name}");
    }
    // Its watch survived all of it and delivered every event once.
    let mut events = api.watch(&WatchParams::default(), &from).await.unwrap().boxed();
    let mut seen = Vec::new();
    while seen.len() < acknowledged.len() {
        match tokio::time::timeout(Duration::from_secs(60), events.try_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
        {
            WatchEvent::Added(map) => seen.extend(map.metadata.name.filter(|name| name.starts_with('m'))),
            WatchEvent::Bookmark(_) => {}
            event => panic!("{event:?}"),
        }
    }
    assert_eq!(seen, acknowledged);
    cluster.stop().await;
}

#[tokio::test]
async fn requests_fail_with_a_message_without_quorum_and_recover() {
    let etcd = SharedEtcd::with_members(3, false);
    let cluster = TestServer::start_in(DataLocation::in_etcd(etcd.clone())).await;
    let api = maps(&cluster);
    api.create(&PostParams::default(), &map("before", "x")).await.unwrap();
    let health = || {
        let client = cluster.client();
        async move { client.request_text(http::Request::get("/readyz").body(Vec::new()).unwrap()).await }
    };
    assert_eq!(health().await.unwrap(), "ok");
    for at in [1, 2] {
        etcd.etcd().kill(at).unwrap();
    }
    for outcome in [
        api.create(&PostParams::default(), &map("during", "x")).await.map(|_| ()),
        api.get("before").await.map(|_| ()),
    ] {
        let Err(kube::Error::Api(status)) = outcome else { panic!("{outcome:?}") };
        assert!(matches!(status.code, 503 | 504), "{status:?}");
        assert!(
            status.message.contains("etcd") && status.message.contains("127.0.0.1"),
            "{}",
            status.message
        );
        assert_eq!(status.details.map(|details| details.retry_after_seconds), Some(1));
    }
    cluster.eventually("the server says that it is not ready", || async { health().await.is_err() }).await;
    // Reads that accept the server's current state are still answered.
    let old = ListParams::default().match_any();
    assert_eq!(
        api.list(&old)
            .await
            .unwrap()
            .items
            .iter()
            .filter(|map| map.metadata.name.as_deref() == Some("before"))
            .count(),
        1
    );
    for at in [1, 2] {
        etcd.etcd().restart(at).unwrap();
    }
    let again =
        || async { matches!(code(api.create(&PostParams::default(), &map("after", "x")).await), 0 | 409) };
    cluster.eventually("a write is taken again", again).await;
    cluster.eventually("the server is ready again", || async { health().await.is_ok() }).await;
    assert_eq!(code(api.get("before").await), 0);
    cluster.stop().await;
}

#[tokio::test]
async fn one_of_two_servers_compacts_history_and_watches_continue() {
    let etcd = SharedEtcd::with_members(1, false);
    let start = |etcd: &std::sync::Arc<SharedEtcd>| {
        let place = DataLocation::in_etcd(etcd.clone());
        let mut config = place.config();
        if let Some(etcd) = &mut config.etcd {
            etcd.compaction = Duration::from_millis(200);
        }
        TestServer::start_with(place, config)
    };
    let (one, other) = (start(&etcd).await, start(&etcd).await);
    let api = maps(&one);
    let mut events = api.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    let first = api.create(&PostParams::default(), &map("first", "x")).await.unwrap();
    let first = first.metadata.resource_version.unwrap();
    // etcd has compacted the first revision, though the servers' own history still contains it.
    let endpoint = etcd.config().endpoints[0].clone();
    let mut direct = etcd_client::Client::connect([endpoint], None).await.unwrap();
    let mut written = 0;
    loop {
        let old = etcd_client::GetOptions::new().with_revision(first.parse().unwrap());
        match direct.get("/anything", Some(old)).await {
            Err(error) if error.to_string().contains("compacted") => break,
            _ if written > 3000 => panic!("never compacted"),
            _ => {
                written += 1;
                maps(&other).create(&PostParams::default(), &map(&format!("n{written}"), "x")).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    let mut seen = 0;
    while seen < written {
        match tokio::time::timeout(Duration::from_secs(60), events.try_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
        {
            WatchEvent::Added(map)
                if map.metadata.name.as_deref().is_some_and(|name| name.starts_with('n')) =>
            {
                seen += 1
            }
            WatchEvent::Error(error) => panic!("{error:?}"),
            _ => {}
        }
    }
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn a_wrong_authority_scheme_or_data_directory_is_named_at_once() {
    let etcd = SharedEtcd::with_members(1, true);
    let folder = tempfile::tempdir().unwrap();
    let strange = etcd::Tls::make(folder.path()).unwrap();
    let place = DataLocation::in_etcd(etcd.clone());
    let started = |change: &dyn Fn(&mut russet_apiserver::store::etcd::EtcdConfig)| {
        let mut config = place.config();
        change(config.etcd.as_mut().unwrap());
        async move {
            match russet_apiserver::start(config).await {
                Ok(_) => panic!("it started"),
                Err(error) => error,
            }
        }
    };
    let ready = TestServer::start_in(DataLocation::in_etcd(etcd.clone())).await;
    let error = started(&|etcd| etcd.ca_file = Some(strange.ca.clone())).await;
    assert!(error.to_string().to_lowercase().contains("certificate"), "{error}");
    let error = started(&|etcd| {
        etcd.cert_file = Some(strange.cert.clone());
        etcd.key_file = Some(strange.key.clone());
    })
    .await;
    assert!(matches!(error, Error::Store(_)), "{error}");
    let error = started(&|etcd| etcd.ca_file = None).await;
    assert!(error.to_string().contains("--etcd-cafile"), "{error}");
    let error = started(&|etcd| etcd.endpoints = vec!["127.0.0.1:2379".into()]).await;
    assert!(error.to_string().contains("https://"), "{error}");
    // A data directory of another control plane.
    let alone = TestServer::start_in(DataLocation::embedded()).await.stop().await;
    let error = match russet_apiserver::start(alone.moved_to(&etcd)).await {
        Ok(_) => panic!("it started"),
        Err(error) => error,
    };
    assert!(error.to_string().contains("another control plane"), "{error}");
    ready.stop().await;
}
