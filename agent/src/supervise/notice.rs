//! What engines did, as their agent takes note of it: what they said, that they stand still, left their group, began
//! the next one or ended. What is to be done about it is decided elsewhere.

use russet_crds::conditions::Reason;

use super::slot::Part;
use super::{Supervisor, target};
use crate::process::spawn::Addresses;
use crate::process::watch::Notice;
use crate::process::{Event, State};

impl Supervisor {
    /// Takes note of what an engine did.
    pub(super) fn notice(&mut self, (uid, process, event): Notice) {
        let Some(slot) = self.slots.get_mut(&uid) else { return };
        let kept = slot.record.kept;
        let Some(engine) = slot.engine.as_mut().filter(|engine| engine.process == process) else { return };
        // One that was told to end has its own time for that.
        if matches!(event, Event::Stalled(_)) && engine.stopping {
            return;
        }
        match &event {
            // What it says of an earlier formation is of no interest to this one.
            Event::Reported(_) if kept => return,
            Event::Reported(report) => engine.part = engine.part.after(report),
            Event::Formed => {
                tracing::info!(
                    shard = slot.record.name,
                    pid = process.pid,
                    epoch = slot.record.epoch,
                    "engine forms the group anew"
                );
                self.setup.metrics.formed_again(&slot.record.name);
                engine.part = Part::Rank;
                engine
                    .watching
                    .again(target(&self.setup.engines, &slot.record, &process), self.notices.clone());
                slot.record.kept = false;
                return self.save(&uid);
            }
            Event::Refused(why) => {
                tracing::info!(shard = slot.record.name, pid = process.pid, why, "engine is not used again");
                engine.part = Part::Refused;
                return;
            }
            Event::Stalled(_) | Event::Exited(_) => {}
        }
        engine.state = std::mem::take(&mut engine.state).step(&event);
        if let Event::Stalled(trouble) = &event {
            // At once, also while no API server says what is wanted: a rank that stands still is of no use to any plan,
            // and its peers wait for it. Nothing gentler than a kill reaches a frozen process.
            engine.process.kill(&self.setup.boot_id);
            self.setup.metrics.killed(&slot.record.name, trouble.reason());
            // Another one starts in its place, and this epoch has lost nobody yet.
            engine.stopping |= kept;
        }
        if let Event::Reported(report) = event {
            self.grants.uses(&uid, report.memory_bytes);
            slot.report = Some(*report);
        }
        let stopping = engine.stopping;
        match &engine.state {
            State::Failed(reason, message) if slot.failure.is_none() && !kept => {
                tracing::warn!(shard = slot.record.name, ?reason, message, "engine failed");
                self.setup.events.lost(&slot.record, *reason, message);
                slot.failure = Some((*reason, message.clone()));
            }
            State::Gone(how) => {
                tracing::info!(shard = slot.record.name, how, stopping, "engine is gone");
                if !stopping && !kept && slot.failure.is_none() {
                    self.setup.events.lost(&slot.record, Reason::EngineExited, how);
                    slot.failure = Some((Reason::EngineExited, how.clone()));
                }
                // One that was told of the next formation has its addresses; the next process is told the same.
                if slot.addresses.is_none() && kept {
                    slot.addresses = Addresses::again(&slot.record.rendezvous).ok();
                }
                slot.record.kept = false;
                self.setup.metrics.ended(&slot.record.name, stopping);
                slot.engine = None;
                slot.report = None;
                slot.record.process = None;
                self.grants.uses(&uid, 0);
            }
            _ => return,
        }
        slot.record.failed = slot.failure.as_ref().map(|(_, message)| message.clone());
        self.save(&uid);
    }
}
