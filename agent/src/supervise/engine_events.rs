//! Handles engine events: reports, hangs, groups left, reforms and exits. Records them, and kills the process of a hung
//! engine. Not here: when an engine is hung (`process/watchdog`), and the decisions that follow (`shard_actions`).

use russet_crds::conditions::Reason;

use super::shard_state::EngineRole;
use super::{Supervisor, target};
use crate::process::spawn::ReservedAddresses;
use crate::process::watch::EngineEvent;
use crate::process::{ProcessEvent, ProcessState};

impl Supervisor {
    /// Handles an engine event.
    pub(super) fn handle_event(&mut self, (uid, process, event): EngineEvent) {
        let Some(slot) = self.states.get_mut(&uid) else { return };
        let retained = slot.record.kept;
        let Some(engine) = slot.engine.as_mut().filter(|engine| engine.process == process) else { return };
        // A stopping engine has its own timeout.
        if matches!(event, ProcessEvent::Hung(_)) && engine.stopping {
            return;
        }
        match &event {
            // Reports about an earlier formation are ignored.
            ProcessEvent::Reported(_) if retained => return,
            ProcessEvent::Reported(report) => engine.role = engine.role.next(report),
            ProcessEvent::Reformed => {
                tracing::info!(
                    shard = slot.record.name,
                    pid = process.pid,
                    epoch = slot.record.epoch,
                    "engine re-forms its group"
                );
                self.setup.metrics.reformed(&slot.record.name);
                engine.role = EngineRole::Member;
                engine.watch.retarget(target(&self.setup, &slot.record, &process), self.events.clone());
                slot.record.kept = false;
                return self.save(&uid);
            }
            ProcessEvent::ReformRefused(why) => {
                tracing::info!(shard = slot.record.name, pid = process.pid, why, "engine is not used again");
                engine.role = EngineRole::ReformRefused;
                return;
            }
            ProcessEvent::Hung(_) | ProcessEvent::Exited(_) => {}
        }
        engine.state = std::mem::take(&mut engine.state).step(&event);
        if let ProcessEvent::Hung(hang) = &event {
            // At once, even while the API server is unreachable: a hung rank is useless to any plan, and its
            // peers wait for it. Only SIGKILL reaches a frozen process.
            engine.process.kill(&self.setup.boot_id);
            self.setup.metrics.killed(&slot.record.name, hang.reason());
            // Another process replaces it, and this epoch has lost no rank yet.
            engine.stopping |= retained;
        }
        if let ProcessEvent::Reported(report) = event {
            self.grants.set_used(&uid, report.memory_bytes);
            slot.report = Some(*report);
        }
        let stopping = engine.stopping;
        match &engine.state {
            ProcessState::Failed(reason, message) if slot.failure.is_none() && !retained => {
                tracing::warn!(shard = slot.record.name, ?reason, message, "engine failed");
                self.setup.events.rank_lost(&slot.record, *reason, message);
                slot.failure = Some((*reason, message.clone()));
            }
            ProcessState::Exited(how) => {
                tracing::info!(shard = slot.record.name, how, stopping, "engine is gone");
                if !stopping && !retained && slot.failure.is_none() {
                    self.setup.events.rank_lost(&slot.record, Reason::EngineExited, how);
                    slot.failure = Some((Reason::EngineExited, how.clone()));
                }
                // A reforming engine had the reserved addresses; the next process gets the same ones.
                if slot.addresses.is_none() && retained {
                    slot.addresses = ReservedAddresses::rebind(&slot.record.rendezvous).ok();
                }
                slot.record.kept = false;
                self.setup.metrics.ended(&slot.record.name, stopping);
                slot.engine = None;
                slot.report = None;
                slot.record.process = None;
                self.grants.set_used(&uid, 0);
            }
            _ => return,
        }
        slot.record.failed = slot.failure.as_ref().map(|(_, message)| message.clone());
        self.save(&uid);
    }
}
