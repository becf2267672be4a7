//! Supervisor loop: gathers desired and actual state, calls [`decide`], and executes the actions. It takes no
//! decisions of its own. An unreachable API server only means that the desired state does not change.

mod claim;
mod engine_events;
mod shard_state;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::Reason;
use russet_crds::{Link, ModelCopy, Shard, names};
use russet_telemetry::logfile;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use crate::address::{self, Address, LostAddresses};
use crate::copies::Copies;
use crate::engine_activity::EngineActivity;
use crate::events::EventRecorder;
use crate::grants::Grants;
use crate::hardware;
use crate::metrics::AgentMetrics;
use crate::metrics_proxy::MetricsProxy;
use crate::mqtt::MqttHandle;
use crate::node::SupervisorChannel;
use crate::oom_guard::panics::Panics;
use crate::oom_guard::{self, Headroom, OomGuard};
use crate::process::launch::{self, Launch, PrefixCacheDir, write_config};
use crate::process::record::{self, EngineRecord, ProcessIdentity};
use crate::process::reform::ReformRequest;
use crate::process::spawn::{self, ReservedAddresses};
use crate::process::stop;
use crate::process::watch::{EngineEvent, WatchTarget};
use crate::process::{self, ProcessState};
use crate::shard_actions::{ActualShard, DesiredShard, ShardAction, decide};
use crate::status;
use crate::status_writer::StatusQueue;
use crate::store::Published;
use crate::watcher::ObjectList;

use self::shard_state::{EngineRole, RunningEngine, ShardState, serving_deployments, should_send};

/// Tick interval, at which refused claims are retried: memory becomes free without a notification.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// Dependencies of the supervisor.
pub(crate) struct Setup {
    pub engines: PathBuf,
    pub tls_dir: PathBuf,
    pub binary: PathBuf,
    pub address: Address,
    pub boot_id: String,
    pub limits: SupervisorChannel,
    pub status_queue: StatusQueue,
    pub events: EventRecorder,
    pub metrics: AgentMetrics,
    pub metrics_proxy: MetricsProxy,
    pub copies: Copies,
    /// The links of this node.
    pub links: watch::Receiver<Vec<Link>>,
    /// Remaining memory of the machine.
    pub headroom: watch::Receiver<Headroom>,
    /// Kernel panics of the machine.
    pub panics: watch::Receiver<Panics>,
    /// Counts what engines do.
    pub activity: EngineActivity,
    /// Receives the deployments served here.
    pub mqtt: MqttHandle,
}

pub(crate) struct Supervisor {
    setup: Setup,
    shards: Option<BTreeMap<String, Arc<Shard>>>,
    states: BTreeMap<String, ShardState>,
    grants: Grants,
    oom_guard: OomGuard,
    /// Rank addresses that this machine has lost.
    lost_addresses: LostAddresses,
    /// Whether files may have become unwanted.
    collect_files: bool,
    events: mpsc::UnboundedSender<EngineEvent>,
    inbox: mpsc::UnboundedReceiver<EngineEvent>,
}

impl Supervisor {
    pub fn new(setup: Setup) -> Self {
        let (events, inbox) = mpsc::unbounded_channel();
        let (states, grants) = (BTreeMap::new(), Grants::default());
        let (oom_guard, lost_addresses) = (OomGuard::default(), LostAddresses::default());
        Self {
            setup,
            shards: None,
            states,
            grants,
            oom_guard,
            lost_addresses,
            collect_files: false,
            events,
            inbox,
        }
    }

    /// Runs until the agent exits.
    pub async fn run(mut self, mut shards: ObjectList<Shard>, mut copies: ObjectList<ModelCopy>) {
        self.adopt();
        let mut ticks = tokio::time::interval(TICK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut copies_known = false;
        loop {
            let mut copies_changed = false;
            tokio::select! {
                Ok(()) = shards.changed() => {
                    let listed = shards.borrow_and_update().clone();
                    self.shards = listed.map(|listed| by_uid(&listed));
                }
                Ok(()) = copies.changed() => copies_changed = true,
                Some(notice) = self.inbox.recv() => self.handle_event(notice),
                () = self.setup.copies.changed() => {}
                () = self.setup.limits.limits_changed() => {}
                Ok(()) = self.setup.address.changed() => {}
                _ = ticks.tick() => {
                    self.rotate_logs();
                    self.check_addresses();
                    self.check_memory();
                }
            }
            // Reports arrive in bursts; one decision handles them all.
            while let Ok(notice) = self.inbox.try_recv() {
                self.handle_event(notice);
            }
            let listed = if copies_changed { copies.borrow_and_update().clone() } else { None };
            if let Some(listed) = listed {
                self.setup.copies.sync(&listed);
                copies_known = true;
                self.collect_files = true;
            }
            self.apply();
            self.report();
            self.note_file_use();
            // Before the first list of copies, nothing may be taken for unwanted.
            if copies_known && std::mem::take(&mut self.collect_files) {
                let slots = self.states.values();
                let in_use: BTreeSet<String> =
                    slots.flat_map(|slot| slot.record.files()).map(str::to_owned).collect();
                self.setup.copies.collect(in_use).await;
            }
        }
    }

    /// Adopts the engines of an earlier run of this agent, before any claim.
    fn adopt(&mut self) {
        for record in record::load(&self.setup.engines) {
            let mut slot = ShardState::new(record.clone());
            slot.claimed = true;
            let folder = record::folder(&self.setup.engines, &record.shard);
            match &record.process {
                Some(process) if process.alive(&self.setup.boot_id) => {
                    tracing::info!(
                        shard = record.name,
                        pid = process.pid,
                        epoch = record.epoch,
                        "engine re-adopted"
                    );
                    let mut running = self.running(&record, process.clone(), None);
                    if record.kept {
                        // It waits for this epoch's formation, or received it and has not started. Another
                        // process replaces it, because the agent cannot tell which of the two its next report
                        // would come from.
                        process.kill(&self.setup.boot_id);
                        running.stopping = true;
                    }
                    slot.engine = Some(running);
                    if let Some(why) = record.version_mismatch() {
                        tracing::warn!(shard = record.name, why, "engine is not adopted");
                        slot.failure = Some((Reason::EngineFailed, why));
                    }
                }
                Some(process) => {
                    let words = spawn::last_log_line(&folder);
                    let message = format!(
                        "engine process {} ended while the agent was not running; its last line: {words}",
                        process.pid
                    );
                    slot.failure = Some((Reason::EngineExited, message));
                    slot.record.process = None;
                    // Otherwise it would be a suspect in a later kernel panic.
                    if let Err(error) = record::save(&self.setup.engines, &slot.record) {
                        tracing::warn!(shard = record.name, %error, "the end of an engine could not be noted");
                    }
                }
                None => match (&record.failed, ReservedAddresses::rebind(&record.rendezvous)) {
                    (Some(failed), _) => slot.failure = Some((Reason::EngineExited, failed.clone())),
                    (None, Ok(addresses)) => slot.addresses = Some(addresses),
                    (None, Err(error)) => {
                        tracing::info!(shard = record.name, %error, "claimed again after the agent was not running");
                        record::remove(&self.setup.engines, &record.shard);
                        continue;
                    }
                },
            }
            self.grants.restore(&record.shard, record.reserved);
            self.states.insert(record.shard.clone(), slot);
        }
    }

    fn running(
        &self,
        record: &EngineRecord,
        process: ProcessIdentity,
        child: Option<tokio::process::Child>,
    ) -> RunningEngine {
        let watching =
            process::watch::watch(target(&self.setup, record, &process), child, self.events.clone());
        let (state, part) = (ProcessState::default(), EngineRole::Member);
        RunningEngine { process, state, stopping: false, shutdown: None, role: part, watch: watching }
    }

    /// Rotates logs, so that an engine that runs for months does not fill the disk.
    fn rotate_logs(&self) {
        for (uid, _) in self.states.iter().filter(|(_, slot)| slot.engine.is_some()) {
            let log = spawn::log_path(&record::folder(&self.setup.engines, uid));
            logfile::rotate(&log, logfile::MAX_LOG_BYTES);
        }
    }

    fn check_addresses(&mut self) {
        let used = self.states.values().filter_map(|slot| address::ip_of(&slot.record.rendezvous.rpc));
        if self.lost_addresses.update(used, address::is_here) {
            tracing::warn!("this machine has lost an address that ranks were published at");
        }
    }

    /// Kills a rank that would take the machine down.
    fn check_memory(&mut self) {
        // Each measurement counts once.
        if !self.setup.headroom.has_changed().unwrap_or(false) {
            return;
        }
        let left = *self.setup.headroom.borrow_and_update();
        let over = |slot: &ShardState| {
            slot.failure.is_some() || slot.engine.as_ref().is_some_and(|engine| engine.stopping)
        };
        let ending = self.states.values().any(|slot| slot.engine.is_some() && over(slot));
        let running = self.states.iter().filter_map(|(uid, slot)| {
            let engine = slot.engine.as_ref().filter(|_| !over(slot))?;
            // MLX's own count includes the GPU's memory, the system's everything else.
            let reported = slot.report.as_ref().map_or(0, |report| report.memory_bytes);
            let holds = reported.max(hardware::process_memory(engine.process.pid).unwrap_or(0));
            let (granted, age) = (slot.record.reserved, slot.since.elapsed());
            Some(oom_guard::RankUsage { shard: uid.clone(), used: holds, granted, age })
        });
        let running: Vec<oom_guard::RankUsage> = running.collect();
        let end = self.oom_guard.check(&left, &running, ending);
        let Some(oom_guard::Kill { shard, reason, message }) = end else { return };
        if let Some(slot) = self.states.get(&shard)
            && let Some(engine) = &slot.engine
        {
            engine.process.kill(&self.setup.boot_id);
            self.setup.metrics.killed(&slot.record.name, reason);
        }
        self.fail(&shard, reason, message);
    }

    fn save(&self, uid: &str) {
        if let Some(slot) = self.states.get(uid)
            && let Err(error) = record::save(&self.setup.engines, &slot.record)
        {
            tracing::error!(shard = slot.record.name, %error, "the engine's record could not be written; a restarted agent will not find it");
        }
    }

    fn apply(&mut self) {
        let desired = self.shards.as_ref().map(|shards| {
            let desired = shards.iter().map(|(uid, shard)| (uid.clone(), self.desired(shard)));
            desired.collect::<BTreeMap<String, DesiredShard>>()
        });
        let best = *self.setup.address.borrow();
        let held: BTreeMap<String, ActualShard> = self
            .states
            .iter()
            .map(|(uid, slot)| (uid.clone(), slot.actual(best, &self.lost_addresses)))
            .collect();
        for action in decide(desired.as_ref(), &held) {
            match action {
                ShardAction::Claim { shard, epoch } => self.claim(&shard, epoch),
                ShardAction::Start { shard } | ShardAction::Reform { shard } => self.start(&shard),
                ShardAction::LeaveGroup { shard } => self.leave_group(&shard),
                ShardAction::Drain { shard } => self.drain(&shard),
                ShardAction::Stop { shard, why } => self.stop(&shard, why),
                ShardAction::Fail { shard, reason, message } => self.fail(&shard, reason, message),
                ShardAction::Release { shard } => {
                    self.grants.release(&shard);
                    self.states.remove(&shard);
                    // Its copy may have been removed before it, while it still read the files.
                    self.collect_files = true;
                    record::remove(&self.setup.engines, &shard);
                }
            }
        }
        self.setup.limits.set_granted(self.grants.total());
        let shown = self.states.iter().filter_map(|(uid, slot)| {
            let address = &slot.report.as_ref()?.metrics_address;
            (!address.is_empty()).then(|| (uid.clone(), address.clone()))
        });
        self.setup.metrics_proxy.set(shown.collect());
        let states = self.states.values().filter_map(|slot| slot.engine.as_ref());
        self.setup.metrics.engines(states.map(|engine| engine.state.label()));
        self.setup.mqtt.set(
            self.shards.as_ref().map(|shards| serving_deployments(&self.states, shards)).unwrap_or_default(),
        );
    }

    /// Marks files of running engines as in use.
    fn note_file_use(&self) {
        let now = Timestamp::now();
        for (uid, _) in self.states.iter().filter(|(_, slot)| slot.engine.is_some()) {
            if let Some(shard) = self.shard(uid) {
                copies_of(&shard).for_each(|copy| self.setup.copies.note_use(&copy, now));
            }
        }
    }

    fn desired(&self, shard: &Shard) -> DesiredShard {
        DesiredShard {
            epoch: shard.spec.epoch,
            rank: shard.spec.rank,
            size: shard.spec.layers_per_rank.len(),
            peers: shard.spec.peers.clone(),
            files_ready: published(&self.setup.copies, shard).is_some(),
        }
    }

    fn shard(&self, uid: &str) -> Option<Arc<Shard>> {
        self.shards.as_ref()?.get(uid).cloned()
    }

    /// Starts the engine's rank in this epoch: with the existing process, or with a new one.
    fn start(&mut self, uid: &str) {
        let Some(shard) = self.shard(uid) else { return };
        let Some(PublishedFiles { model: published, draft, adapters }) =
            published(&self.setup.copies, &shard)
        else {
            return;
        };
        let Some(slot) = self.states.get_mut(uid) else { return };
        let Some(addresses) = slot.addresses.take() else {
            let message =
                format!("{} is no longer this rank's; the group must re-form", slot.record.rendezvous.rpc);
            return self.fail(uid, Reason::EngineNotStarted, message);
        };
        let socket = record::socket(&self.setup.engines, uid);
        let folder = record::folder(&self.setup.engines, uid);
        let free = hardware::disk(&published.path).map_or(0, |(_, free)| free);
        let links = self.setup.links.borrow().clone();
        let adapter_dirs: Vec<PathBuf> = adapters.iter().map(|adapter| adapter.path.clone()).collect();
        let launch = Launch {
            binary: &self.setup.binary,
            spec: &shard.spec,
            shard_uid: uid,
            rendezvous: &slot.record.rendezvous,
            model_dir: &published.path,
            draft_dir: draft.as_ref().map(|draft| draft.path.as_path()),
            adapter_dirs: &adapter_dirs,
            tls_dir: &self.setup.tls_dir,
            socket: &socket,
            links: &links,
            prefix_cache: PrefixCacheDir::for_rank(&published.prefix_cache_dir(), &shard.spec, free),
        };
        slot.record.model_key = Some(published.id);
        slot.record.draft_key = draft.as_ref().map(|draft| draft.id.clone());
        slot.record.adapter_keys = adapters.into_iter().map(|adapter| adapter.id).collect();
        let unconfigured =
            |error| format!("the engine cannot be configured: {}", russet_telemetry::errors::chain(&error));
        let json = match launch.config_json() {
            Ok(json) => json,
            Err(error) => return self.fail(uid, Reason::EngineNotStarted, unconfigured(error)),
        };
        let written = write_config(&folder, &json);
        if let Some(engine) = &mut slot.engine {
            // It holds its weights and gets the text; the file is for a new process, and for people.
            if let Err(error) = written {
                let error = russet_telemetry::errors::chain(&error);
                tracing::warn!(shard = slot.record.name, error, "the engine's configuration is not on disk");
            }
            addresses.release();
            engine.role = EngineRole::Forming;
            let (process, notices) = (engine.process.clone(), self.events.clone());
            let asking =
                ReformRequest { shard: uid.to_owned(), process, socket: socket.clone(), events: notices };
            return asking.reform(json);
        }
        let path = match written {
            Ok(path) => path,
            Err(error) => return self.fail(uid, Reason::EngineNotStarted, unconfigured(error)),
        };
        addresses.release();
        let child = match spawn::start(&launch, &path, &folder) {
            Ok(child) => child,
            Err(error) => {
                let binary = self.setup.binary.display();
                let message = format!(
                    "the engine {binary} cannot be started: {error}; build russet-engine, or name it with --engine-binary or RUSSET_ENGINE"
                );
                return self.fail(uid, Reason::EngineNotStarted, message);
            }
        };
        // A child that has just exited has no start time; waiting for it reports the exit.
        let pid = child.id().unwrap_or_default();
        let boot_id = self.setup.boot_id.clone();
        let process = ProcessIdentity::from_pid(pid, &boot_id).unwrap_or(ProcessIdentity {
            pid,
            start: String::new(),
            boot_id,
        });
        tracing::info!(shard = slot.record.name, pid, epoch = slot.record.epoch, "engine started");
        slot.record.process = Some(process.clone());
        let record = slot.record.clone();
        self.setup.metrics.started(&record.name);
        let running = self.running(&record, process, Some(child));
        if let Some(slot) = self.states.get_mut(uid) {
            slot.engine = Some(running);
        }
        self.save(uid);
    }

    /// Has an engine leave a group that is formed again without it.
    fn leave_group(&mut self, uid: &str) {
        let socket = record::socket(&self.setup.engines, uid);
        let Some(slot) = self.states.get_mut(uid) else { return };
        let Some(engine) = &mut slot.engine else { return };
        engine.role = EngineRole::LeavingGroup(Instant::now());
        let (process, notices) = (engine.process.clone(), self.events.clone());
        let asking = ReformRequest { shard: uid.to_owned(), process, socket, events: notices };
        asking.leave_group("the group has a higher epoch");
    }

    /// Lets an engine finish its requests. Its memory stays granted until its process has exited.
    fn drain(&mut self, uid: &str) {
        let socket = record::socket(&self.setup.engines, uid);
        let Some(slot) = self.states.get_mut(uid) else { return };
        let Some(engine) = &mut slot.engine else { return };
        tracing::info!(
            shard = slot.record.name,
            pid = engine.process.pid,
            "the Shard was deleted; its engine finishes running requests and exits"
        );
        engine.stopping = true;
        engine.shutdown = Some(stop::graceful(engine.process.clone(), socket, stop::KILL_TIMEOUT));
    }

    fn stop(&mut self, uid: &str, why: &str) {
        let Some(slot) = self.states.get_mut(uid) else { return };
        let Some(engine) = &mut slot.engine else { return };
        tracing::info!(shard = slot.record.name, pid = engine.process.pid, why, "engine is stopped");
        engine.stopping = true;
        engine.process.kill(&self.setup.boot_id);
    }

    fn fail(&mut self, uid: &str, reason: Reason, message: String) {
        let Some(slot) = self.states.get_mut(uid) else { return };
        tracing::warn!(shard = slot.record.name, message, "the rank cannot serve");
        self.setup.events.rank_lost(&slot.record, reason, &message);
        slot.record.failed = Some(message.clone());
        slot.failure = Some((reason, message));
        self.save(uid);
    }

    /// Reports every Shard whose status changed.
    fn report(&mut self) {
        let Some(shards) = &self.shards else { return };
        let links = self.setup.links.borrow().clone();
        let cabled: Vec<_> =
            launch::carrying_ring(&links).map(|(link, _, end)| (link.peer.clone(), end)).collect();
        for (uid, slot) in &mut self.states {
            let Some(shard) = shards.get(uid) else { continue };
            // Statuses of an earlier epoch are not reported.
            if slot.record.epoch < shard.spec.epoch {
                continue;
            }
            let rank = status::RankReport {
                epoch: slot.record.epoch,
                rendezvous: slot.claimed.then_some(&slot.record.rendezvous),
                refusal: slot.refusal.as_ref().map(|(reason, why)| (*reason, why.as_str())),
                files: published(&self.setup.copies, shard).is_some(),
                // An engine that waits for this epoch's formation is not part of it yet.
                engine: slot
                    .engine
                    .as_ref()
                    .filter(|_| !slot.record.kept)
                    .map(|engine| (engine.process.pid, &engine.state)),
                report: slot.report.as_ref(),
                measured: slot.sent.as_ref().and_then(|(sent, _)| sent.measured.as_ref()),
                failure: slot.failure.as_ref().map(|(reason, message)| (*reason, message.as_str())),
                cabled: &cabled,
                interface: Some(hardware::interface_of),
            };
            if slot.conditions.is_empty()
                && let Some(status) = &shard.status
            {
                slot.conditions.clone_from(&status.conditions);
            }
            let generation = shard.metadata.generation;
            let status = status::shard(&shard.spec, &rank, &slot.conditions, generation, Timestamp::now());
            slot.conditions.clone_from(&status.conditions);
            if should_send(slot.sent.as_ref(), &status) {
                self.setup.status_queue.shard(&slot.record.namespace, &slot.record.name, &status);
                slot.sent = Some((status, Instant::now()));
            }
        }
    }
}

/// The watch target of a process.
fn target(setup: &Setup, record: &EngineRecord, process: &ProcessIdentity) -> WatchTarget {
    let engines = &setup.engines;
    WatchTarget {
        shard: record.shard.clone(),
        epoch: record.epoch,
        process: process.clone(),
        socket: record::socket(engines, &record.shard),
        folder: record::folder(engines, &record.shard),
        activity: setup.activity.clone(),
    }
}

/// The files that a rank reads.
struct PublishedFiles {
    model: Published,
    draft: Option<Published>,
    adapters: Vec<Published>,
}

/// The files of a Shard, once all are published.
fn published(copies: &Copies, shard: &Shard) -> Option<PublishedFiles> {
    let all: Option<Vec<Published>> = copies_of(shard).map(|copy| copies.published(&copy)).collect();
    let mut all = all?.into_iter();
    let model = all.next()?;
    let draft = if shard.spec.draft_model_ref.is_some() { Some(all.next()?) } else { None };
    Some(PublishedFiles { model, draft, adapters: all.collect() })
}

/// Names of the ModelCopies of a Shard: the model's, then the draft model's, then those of the adapters.
fn copies_of(shard: &Shard) -> impl Iterator<Item = String> {
    let namespace = shard.namespace().unwrap_or_default();
    shard.spec.models().map(move |model| names::model_copy(&namespace, model, &shard.spec.node_name))
}

/// Shards that are not being deleted, by UID.
fn by_uid(shards: &[Arc<Shard>]) -> BTreeMap<String, Arc<Shard>> {
    let live = shards.iter().filter(|shard| shard.metadata.deletion_timestamp.is_none());
    live.filter_map(|shard| Some((shard.uid()?, shard.clone()))).collect()
}
