//! The one thread on which MLX works: commands come in, answers go out, and batches are begun ahead of their answers.
//!
//! A neighbour that is lost makes the batches fail which wait for it, and MLX's rings fail twice and then wait for ever.
//! So after a first failure of the group nothing is begun any more until the group is left ([`Command::Disband`]). From
//! when that is asked, what comes from neighbours may be anything: what is computed of it ends, and is not believed.

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use russet_wire::partition::Part;
use tokio::sync::oneshot;

use super::{
    InDetail, RuntimeConfig, RuntimeError, ShelfConfig, Stepped,
    drafter::Drafter,
    identity_of,
    prepare::prepare,
    rank::{Rank, Run},
};
use crate::{
    compute::{Addresses, Chosen, ComputeError, Draft, Progress, Step},
    kept::{Order, chain::Key},
    meter::Meter,
    pulse::Batches,
    shelf::{Record, Shelf},
};

/// Time to hear of the next batch after the last one's tokens were told, before the tokens of the one that is being
/// computed are waited for.
const ANSWERING: Duration = Duration::from_micros(300);

pub(super) type Reply<T> = oneshot::Sender<Result<T, ComputeError>>;

/// How much of an answer is asked for.
pub(super) enum Replies {
    Tokens(Reply<Vec<Chosen>>),
    InDetail(Reply<Vec<InDetail>>),
}

impl Replies {
    fn in_detail(&self) -> bool {
        matches!(self, Self::InDetail(_))
    }
}

pub(super) enum Command {
    Load(Reply<()>),
    Join(Addresses, Reply<()>),
    Disband(Reply<()>),
    Run(Vec<Step>, Replies),
    Draft(Vec<Draft>, Reply<Vec<Vec<u32>>>),
    Arrange(Order),
    /// Blocks for a slot of a group, with what was read of them from disk; answered with how many came.
    Fill(u64, u32, Vec<(Key, Option<Record>)>, mpsc::Sender<u32>),
    Stop,
}

/// Bytes of weights, written by the thread and read by anyone.
#[derive(Debug, Default)]
pub(super) struct Bytes {
    loaded: AtomicU64,
    total: AtomicU64,
}

impl Bytes {
    fn tell(&self, loaded: u64, total: u64) {
        self.loaded.store(loaded, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    pub(super) fn progress(&self) -> Progress {
        Progress {
            loaded_bytes: self.loaded.load(Ordering::Relaxed),
            total_bytes: self.total.load(Ordering::Relaxed),
        }
    }
}

/// What the thread shares with the handle to it.
pub(super) struct Shared {
    pub(super) config: RuntimeConfig,
    /// Groups that it was asked to leave so far.
    pub(super) disbanded: Arc<AtomicU64>,
    pub(super) bytes: Arc<Bytes>,
    /// Opened once the weights are loaded.
    pub(super) shelf: Arc<OnceLock<Arc<Shelf>>>,
    pub(super) batches: Batches,
    pub(super) meter: Meter,
    /// Whether a batch is begun before the last one's tokens are read.
    pub(super) looks_ahead: bool,
}

impl Shared {
    /// Whether what is computed counts: not from the call on that has the thread leave a group behind so many others.
    fn sound(&self, disbanded: u64) -> Result<(), RuntimeError> {
        if self.disbanded.load(Ordering::SeqCst) == disbanded { Ok(()) } else { Err(self.disbanding()) }
    }

    fn disbanding(&self) -> RuntimeError {
        RuntimeError::Disbanding { rank: self.config.rank, size: self.config.size() }
    }
}

/// Everything that belongs to the thread.
pub(super) struct Thread {
    shared: Shared,
    rank: Option<Rank>,
    drafter: Option<Drafter>,
    /// An order that failed fails the batch after it: the caches are not what rank 0 thinks.
    trouble: Option<RuntimeError>,
    /// Whether a batch has lost another rank.
    lost: bool,
    /// Groups that were left so far.
    disbanded: u64,
}

impl Thread {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared, rank: None, drafter: None, trouble: None, lost: false, disbanded: 0 }
    }

    /// Does what it is told until it is to stop. A reply nobody waits for any more is not an error: its request went
    /// away.
    pub(super) fn run(mut self, inbox: &mpsc::Receiver<Command>) {
        let mut begun: VecDeque<Begun> = VecDeque::new();
        // Batches that MLX is given before the first one's tokens are read.
        let most = if self.shared.looks_ahead { 2 } else { 1 };
        while let Some(command) = self.next(inbox, &mut begun, most) {
            match command {
                Command::Load(reply) => drop(reply.send(self.load().map_err(ComputeError::from))),
                Command::Join(addresses, reply) => {
                    drop(reply.send(self.join(&addresses).map_err(ComputeError::from)));
                }
                Command::Disband(reply) => {
                    self.end(begun.drain(..));
                    self.disbanded += 1;
                    self.disband();
                    drop(reply.send(Ok(())));
                }
                Command::Run(steps, reply) => {
                    let run = self.begin(&steps, reply.in_detail());
                    self.lost |= run.as_ref().is_err_and(RuntimeError::is_the_groups);
                    begun.push_back(Begun { run, reply, batches: self.shared.batches.clone() });
                }
                Command::Draft(drafts, reply) => {
                    drop(reply.send(self.draft(&drafts).map_err(ComputeError::from)));
                }
                Command::Arrange(order) => self.arrange(order),
                // What was read for a group that was left is of no sequence of this one.
                Command::Fill(group, slot, blocks, filled) if group == self.disbanded => {
                    let _ = filled.send(self.fill(slot, blocks));
                }
                Command::Fill(.., filled) => {
                    let _ = filled.send(0);
                }
                Command::Stop => return,
            }
        }
    }

    fn load(&mut self) -> Result<(), RuntimeError> {
        if self.rank.is_some() {
            self.disband();
            return Ok(());
        }
        let Shared { config, bytes, shelf, meter, .. } = &self.shared;
        prepare(config);
        let open = |part: &Part| {
            let opened = open_shelf(config, part)?;
            Some(shelf.get_or_init(|| opened).clone())
        };
        let rank = Rank::load(config, meter.clone(), open, |loaded, total| bytes.tell(loaded, total))?;
        if config.rank == 0 {
            self.drafter = Drafter::load(config, rank.vocabulary())?;
        }
        self.rank = Some(rank);
        Ok(())
    }

    fn join(&mut self, addresses: &Addresses) -> Result<(), RuntimeError> {
        let too_early = self.too_early("join");
        let rank = self.rank.as_mut().ok_or(too_early)?;
        rank.join(addresses, self.shared.config.devices.as_ref())
    }

    /// Leaves the groups, with nothing in memory but weights.
    fn disband(&mut self) {
        (self.trouble, self.lost) = (None, false);
        for rank in self.rank.iter_mut().chain(self.drafter.as_mut().map(Drafter::rank)) {
            rank.disband();
        }
        russet_mlx::distributed::forget();
        let _ = mlx_rs::memory::clear_cache();
    }

    fn begin(&mut self, steps: &[Step], in_detail: bool) -> Result<Run, RuntimeError> {
        if let Some(error) = self.trouble.take() {
            return Err(error);
        }
        let too_early = self.too_early("step");
        let rank = self.rank.as_mut().ok_or(too_early)?;
        if self.lost {
            return Err(self.shared.disbanding());
        }
        self.shared.sound(self.disbanded)?;
        rank.begin(steps, in_detail)
    }

    fn draft(&mut self, drafts: &[Draft]) -> Result<Vec<Vec<u32>>, RuntimeError> {
        let too_early = self.too_early("guess");
        let drafter = &mut self.drafter;
        self.shared.batches.beside(|| drafter.as_mut().ok_or(too_early)?.draft(drafts))
    }

    fn arrange(&mut self, order: Order) {
        if let (Order::Reset { slot }, Some(drafter)) = (&order, &mut self.drafter)
            && let Err(error) = drafter.reset(*slot)
        {
            tracing::warn!(%error, slot, "the draft model keeps what it has read");
        }
        let sound = || self.shared.sound(self.disbanded).is_ok();
        if let Some(Err(error)) = self.rank.as_mut().map(|rank| rank.arrange(order, sound)) {
            self.trouble = Some(error);
        }
    }

    /// How many of the blocks are in the slot now.
    fn fill(&mut self, slot: u32, blocks: Vec<(Key, Option<Record>)>) -> u32 {
        let too_early = self.too_early("fill");
        let rank = &mut self.rank;
        let filled = || rank.as_mut().ok_or(too_early)?.fill(slot, blocks);
        self.shared.batches.beside(filled).unwrap_or_else(|error| {
            tracing::warn!(%error, "blocks from disk are not used");
            0
        })
    }

    /// Waits for batches and answers.
    fn end(&mut self, begun: impl Iterator<Item = Begun>) {
        for begun in begun {
            self.lost |= begun.end(|| self.shared.sound(self.disbanded));
        }
    }

    /// The next command; `None` when there will be none. Batches that were begun are ended meanwhile, the oldest
    /// first, but not before the next one had a chance to be begun: MLX should never be without work.
    fn next(
        &mut self,
        inbox: &mpsc::Receiver<Command>,
        begun: &mut VecDeque<Begun>,
        most: usize,
    ) -> Option<Command> {
        loop {
            let command = match begun.len() {
                0 => return inbox.recv().ok(),
                1 => inbox.recv_timeout(ANSWERING),
                _ => inbox.try_recv().map_err(|error| match error {
                    mpsc::TryRecvError::Empty => mpsc::RecvTimeoutError::Timeout,
                    mpsc::TryRecvError::Disconnected => mpsc::RecvTimeoutError::Disconnected,
                }),
            };
            match command {
                // One that waits for tokens nobody knows yet is begun while others are on their way; never more than
                // that.
                Ok(command @ Command::Run(..)) if begun.len() >= most => {
                    self.end(begun.drain(..=begun.len() - most));
                    return Some(command);
                }
                Ok(command) => return Some(command),
                Err(mpsc::RecvTimeoutError::Timeout) => self.end(begun.drain(..1)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn too_early(&self, asked: &'static str) -> RuntimeError {
        RuntimeError::TooEarly { rank: self.shared.config.rank, asked }
    }
}

/// The shelf of this part of the model. Without it nothing is kept on disk, and everything else works.
fn open_shelf(config: &RuntimeConfig, part: &Part) -> Option<Arc<Shelf>> {
    let ShelfConfig { folder, most_bytes } = config.shelf.as_ref()?;
    let opened = Shelf::open(folder, &identity_of(config, part), *most_bytes);
    let folder = folder.display();
    opened
        .inspect_err(|error| tracing::warn!(%folder, %error, "the prefix cache is kept in memory only"))
        .ok()
}

/// A batch that MLX works on, and who waits for it.
struct Begun {
    run: Result<Run, RuntimeError>,
    reply: Replies,
    batches: Batches,
}

impl Begun {
    /// Waits for it and answers; whether it lost another rank.
    fn end(self, sound: impl Fn() -> Result<(), RuntimeError>) -> bool {
        let ended = self.run.and_then(Run::end).and_then(|ended| sound().map(|()| ended));
        self.batches.end(ended.is_ok());
        let lost = ended.as_ref().is_err_and(RuntimeError::is_the_groups);
        match self.reply {
            Replies::Tokens(reply) => {
                let token = |stepped: Result<Stepped, _>| stepped.map(|stepped| stepped.token);
                let tokens = |step: InDetail| step.into_iter().map(token).collect();
                let steps = |steps: Vec<InDetail>| steps.into_iter().map(tokens).collect();
                let _ = reply.send(ended.map(steps).map_err(ComputeError::from));
            }
            Replies::InDetail(reply) => drop(reply.send(ended.map_err(ComputeError::from))),
        }
        lost
    }
}
