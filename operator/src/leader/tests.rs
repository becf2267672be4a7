//! The rules as a table, and candidates against a real API server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::rules::{LeaseAction, ObservedLease, decide};
use super::*;

#[test]
fn lease_is_acquired_when_free_own_or_expired() {
    let seconds = Duration::from_secs;
    let held = |holder: &str, duration: Option<u64>| ObservedLease {
        holder: holder.into(),
        version: "7".into(),
        duration: duration.map(seconds),
    };
    for (seen, age, verdict, what) in [
        (held("", Some(15)), 0, LeaseAction::Take, "nobody holds it"),
        (held("me", Some(15)), 0, LeaseAction::Take, "it is our own of a former life"),
        (held("other", Some(15)), 0, LeaseAction::Wait, "somebody else's, just renewed"),
        (held("other", Some(15)), 14, LeaseAction::Wait, "somebody else's, almost silent long enough"),
        (held("other", Some(15)), 15, LeaseAction::Take, "somebody else's, silent for its duration"),
        (held("other", Some(60)), 59, LeaseAction::Wait, "its holder promised to be slower than we are"),
        (held("other", Some(1)), 14, LeaseAction::Wait, "its holder is quicker than we are"),
        (held("other", None), 14, LeaseAction::Wait, "without a duration ours counts"),
        (held("other", None), 15, LeaseAction::Take, "without a duration ours counts, and is over"),
    ] {
        assert_eq!(decide(&seen, "me", seconds(age), seconds(15)), verdict, "{what}");
    }
}

/// Short periods, in the proportions of the real ones.
const QUICK: Timing = Timing {
    duration: Duration::from_millis(1500),
    deadline: Duration::from_millis(1000),
    retry: Duration::from_millis(100),
};

struct Server {
    running: russet_apiserver::RunningServer,
    client: Client,
    _folder: tempfile::TempDir,
}

impl Server {
    async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let config = russet_apiserver::ApiServerConfig::new(folder.path()).listen(([127, 0, 0, 1], 0).into());
        let running = russet_apiserver::start(config).await.unwrap();
        let kubeconfig = Kubeconfig::read_from(running.kubeconfig()).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
        Self { running, client: Client::try_from(config).unwrap(), _folder: folder }
    }

    async fn holder(&self) -> String {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), names::SYSTEM_NAMESPACE);
        api.get_opt(LEASE)
            .await
            .unwrap()
            .map(|lease| ObservedLease::from_lease(&lease).holder)
            .unwrap_or_default()
    }
}

/// Counts the acting candidates and records whether there was ever more than one.
#[derive(Clone, Default)]
struct ActingCounter {
    acting: Arc<AtomicUsize>,
    crowded: Arc<AtomicBool>,
}

struct ActingGuard(ActingCounter);

impl Drop for ActingGuard {
    fn drop(&mut self) {
        self.0.acting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ActingCounter {
    fn start_acting(&self) -> ActingGuard {
        if self.acting.fetch_add(1, Ordering::SeqCst) > 0 {
            self.crowded.store(true, Ordering::SeqCst);
        }
        ActingGuard(self.clone())
    }
}

struct TestCandidate {
    leads: Arc<AtomicBool>,
    stands_by: Arc<AtomicBool>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Option<()>>,
}

impl TestCandidate {
    fn start(server: &Server, identity: &'static str, stage: &ActingCounter) -> Self {
        let (leads, stands_by) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (stop, stopped) = oneshot::channel::<()>();
        let (client, stage) = (server.client.clone(), stage.clone());
        let (flag, ready) = (leads.clone(), stands_by.clone());
        let task = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.await;
            };
            run_as_leader(client, identity, QUICK, &ready, shutdown, || {
                let (stage, flag) = (stage.clone(), flag.clone());
                async move {
                    let _acting = stage.start_acting();
                    flag.store(true, Ordering::SeqCst);
                    std::future::pending::<()>().await;
                }
            })
            .await
        });
        Self { leads, stands_by, stop, task }
    }
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let holds = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(60), holds).await.is_ok(), "never happened: {what}");
}

fn is(flag: &Arc<AtomicBool>) -> bool {
    flag.load(Ordering::SeqCst)
}

#[tokio::test]
async fn standby_takes_over_when_the_leader_dies_or_leaves() {
    let server = Server::start().await;
    let stage = ActingCounter::default();
    let first = TestCandidate::start(&server, "first", &stage);
    until("the first leads", || is(&first.leads)).await;
    let second = TestCandidate::start(&server, "second", &stage);
    until("the second stands by", || is(&second.stands_by)).await;
    assert!(!is(&second.leads));
    // As after a kill -9: the Lease is not released.
    first.task.abort();
    until("the second leads", || is(&second.leads)).await;
    assert_eq!(server.holder().await, "second");

    let third = TestCandidate::start(&server, "third", &stage);
    until("the third stands by", || is(&third.stands_by)).await;
    second.stop.send(()).unwrap();
    assert!(second.task.await.unwrap().is_none());
    until("the third leads", || is(&third.leads)).await;
    third.stop.send(()).unwrap();
    third.task.await.unwrap();
    assert_eq!(server.holder().await, "", "who leaves gives the Lease back");
    assert!(!is(&stage.crowded), "two acted at once");
    server.running.shutdown().await;
}

#[tokio::test]
async fn returning_holder_reacquires_its_lease_at_once() {
    let server = Server::start().await;
    let api: Api<Lease> = Api::namespaced(server.client.clone(), names::SYSTEM_NAMESPACE);
    let ready = AtomicBool::new(false);
    for life in ["the first", "the second"] {
        // Acquired and dropped without a release, as after a kill -9.
        let election = Election { api: api.clone(), identity: "same", timing: DEFAULT_TIMING };
        let won = tokio::time::timeout(Duration::from_secs(60), election.acquire(&ready)).await;
        assert!(won.is_ok(), "{life} life never leads");
        assert!(!ready.load(Ordering::SeqCst), "{life} life stood by before it took the Lease");
        assert_eq!(server.holder().await, "same");
    }
    server.running.shutdown().await;
}

#[tokio::test]
async fn leader_stops_when_it_cannot_renew_or_is_replaced() {
    let server = Server::start().await;
    let stage = ActingCounter::default();
    let replaced = TestCandidate::start(&server, "replaced", &stage);
    until("it leads", || is(&replaced.leads)).await;
    let api: Api<Lease> = Api::namespaced(server.client.clone(), names::SYSTEM_NAMESPACE);
    let thief = Election { api: api.clone(), identity: "thief", timing: DEFAULT_TIMING };
    let taken = async {
        loop {
            let lease = api.get(LEASE).await.unwrap();
            let spec = thief.acquired_spec(&lease.spec.clone().unwrap());
            if thief.write(lease, spec).await.is_ok() {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), taken).await.unwrap();
    until("nobody acts", || stage.acting.load(Ordering::SeqCst) == 0).await;
    replaced.stop.send(()).unwrap();
    replaced.task.await.unwrap();
    assert_eq!(server.holder().await, "thief", "who does not hold it gives nothing back");

    let lonely = TestCandidate::start(&server, "thief", &stage);
    until("it leads", || is(&lonely.leads)).await;
    let Server { running, client: _, _folder } = server;
    running.shutdown().await;
    until("without a server nobody acts", || stage.acting.load(Ordering::SeqCst) == 0).await;
    assert!(!is(&lonely.stands_by), "who sees no Lease is not ready");
    lonely.task.abort();
    assert!(!is(&stage.crowded));
}
