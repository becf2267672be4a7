//! Claims: memory and addresses for one epoch of a rank, or a refusal. Not here: what follows a claim.

use kube::ResourceExt as _;
use russet_crds::conditions::Reason;
use russet_crds::{Rendezvous, Shard};

use super::Supervisor;
use super::shard_state::{ShardState, wording};
use crate::hardware;
use crate::process::launch;
use crate::process::record::EngineRecord;
use crate::process::spawn::ReservedAddresses;

impl Supervisor {
    /// Grants memory and addresses for one epoch, or records the refusal.
    pub(super) fn claim(&mut self, uid: &str, epoch: i64) {
        let Some(shard) = self.shard(uid) else { return };
        let reserved = shard.spec.reserved_bytes();
        let record = EngineRecord {
            shard: uid.to_owned(),
            namespace: shard.namespace().unwrap_or_default(),
            name: shard.name_any(),
            deployment: Some(shard.spec.served_model_name.clone()),
            epoch,
            reserved,
            control: Some(russet_rpc::CONTROL_VERSION),
            ..EngineRecord::default()
        };
        let deployment = format!("{}/{}", record.namespace, shard.spec.served_model_name);
        let mut before = self.states.remove(uid);
        // At a claim, only an engine without a group can exist.
        let retained_engine = before.as_mut().and_then(|slot| slot.engine.take());
        let known = before.as_ref().and_then(|slot| slot.refusal.clone());
        let mut slot = ShardState::new(record);
        (slot.conditions, slot.sent) = match before {
            Some(before) => (before.conditions, before.sent),
            None => (shard.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default(), None),
        };
        // Unknown counts as zero: without a measurement nothing is granted.
        let available = hardware::available_memory().unwrap_or(0);
        let limits = self.setup.limits.limits();
        let memory = |refusal: String| (Reason::MemoryRefused, refusal);
        let usable = match launch::unsupported_field(&shard.spec) {
            Some(why) => Err((Reason::NewerRelease, why)),
            None => Ok(()),
        };
        let usable = usable.and_then(|()| match self.setup.panics.borrow().refusal(&deployment, reserved) {
            Some(why) => Err((Reason::HeldAfterPanics, why)),
            None => Ok(()),
        });
        let granted = usable.and_then(|()| {
            let granted = self.grants.grant(uid, reserved, &limits, available);
            granted.map_err(|refusal| memory(refusal.to_string()))
        });
        let allocated = granted.and_then(|()| {
            self.addresses(&shard).map_err(|error| memory(format!("no address could be allocated: {error}")))
        });
        match allocated {
            Ok(addresses) => {
                slot.record.rendezvous = addresses.rendezvous().clone();
                slot.addresses = Some(addresses);
                slot.claimed = true;
                let pid = retained_engine.as_ref().map(|engine| engine.process.pid);
                tracing::info!(
                    shard = slot.record.name,
                    epoch,
                    rpc = slot.record.rendezvous.rpc,
                    pid,
                    "claimed"
                );
                if let Some(engine) = retained_engine {
                    slot.reuse_engine(engine);
                }
            }
            Err((_, why)) if let Some(engine) = retained_engine => {
                // Its memory is freed once it has exited; then the claim is retried.
                tracing::info!(shard = slot.record.name, why, "claim refused with the weights in memory");
                slot.reuse_engine(engine);
                self.states.insert(uid.to_owned(), slot);
                return self.stop(uid, "its claim was refused");
            }
            Err(refusal) => {
                self.grants.release(uid);
                // Numbers change all the time; the first ones stay, so that the status is not rewritten.
                let same = known.filter(|(_, known)| wording(known) == wording(&refusal.1));
                if same.is_none() {
                    tracing::warn!(shard = slot.record.name, refusal = refusal.1, "claim refused");
                    self.setup.metrics.refused(&slot.record.name);
                }
                slot.refusal = same.or(Some(refusal));
            }
        }
        let claimed = slot.claimed;
        self.states.insert(uid.to_owned(), slot);
        if claimed {
            self.save(uid);
        }
    }

    /// New addresses, or, when an agent lost its records, those that the peers know already.
    fn addresses(&self, shard: &Shard) -> std::io::Result<ReservedAddresses> {
        let own = shard.spec.peers.iter().find(|peer| peer.rank == shard.spec.rank);
        let known = own.and_then(|peer| {
            ReservedAddresses::rebind(&Rendezvous {
                rpc: peer.rpc.clone(),
                ring: peer.ring.clone(),
                tensor: peer.tensor.clone(),
            })
            .ok()
        });
        match known {
            Some(addresses) => Ok(addresses),
            None => ReservedAddresses::allocate(*self.setup.address.borrow()),
        }
    }
}
