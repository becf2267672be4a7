//! A round of the campaign, drawn from a seed. Pure except for the number of the round.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

use super::rank::RankMilestone;

/// The stage of the rank at the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// From its start until its weights are in memory.
    Load,
    /// From there until it serves.
    Join,
    /// During prefill.
    Prompt,
    /// During decode.
    Answer,
}

/// The fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Kill -9.
    Kill,
    /// SIGSTOP.
    Freeze,
}

impl Fault {
    /// Seconds within which an agent has to detect the fault, whatever the rank does, as docs/engine.md
    /// promises.
    pub const DETECTION_SECONDS: u32 = 2;
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Kill => "killed",
            Self::Freeze => "frozen",
        })
    }
}

/// One round.
pub struct FaultDraw {
    seed: u64,
    round: u64,
    /// The stage.
    pub aim: Aim,
    /// The rank.
    pub rank: i64,
    /// The fault.
    pub fault: Fault,
    /// The rank that is killed first, so that ranks load and join.
    pub first: i64,
    /// The step of loading or joining.
    pub mark: RankMilestone,
    /// Running streams.
    pub streams: usize,
    /// Chunks of the first stream that are read before the fault.
    pub pieces: usize,
    /// Prompts in prefill at the fault.
    pub prompts: usize,
    /// Percentage of their tokens that is prefilled by then.
    pub read: usize,
}

impl FaultDraw {
    /// The next round for this stage.
    pub fn next(aim: Aim) -> Result<Self> {
        static ROUNDS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
        let seed = match std::env::var("RUSSET_FAULT_SEED").or_else(|_| std::env::var("RUSSET_SLICE")) {
            Ok(text) if text != "all" => {
                text.parse().with_context(|| format!("the seed {text:?} is no number"))?
            }
            _ => 0,
        };
        Ok(Self::for_round(seed, aim, ROUNDS[aim as usize].fetch_add(1, Ordering::Relaxed)))
    }

    fn for_round(seed: u64, aim: Aim, round: u64) -> Self {
        let draw = |what: &str, below: usize| {
            let digest = Sha256::digest(format!("{seed} {aim:?} {round} {what}"));
            let number = digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
            (number % below as u64) as usize
        };
        // Every rank gets every fault equally often; the seed determines the order.
        let turn = seed.wrapping_add(round);
        let marks: &[RankMilestone] = match aim {
            Aim::Load => &[RankMilestone::Born, RankMilestone::Listens, RankMilestone::Listens],
            _ => &[RankMilestone::Loaded, RankMilestone::Joins, RankMilestone::Joined],
        };
        Self {
            seed,
            round,
            aim,
            rank: (turn % 2) as i64,
            fault: if (turn / 2).is_multiple_of(2) { Fault::Kill } else { Fault::Freeze },
            first: draw("first", 2) as i64,
            mark: marks[draw("mark", marks.len())],
            streams: match aim {
                Aim::Prompt => draw("streams", 2),
                _ => 1 + draw("streams", 3),
            },
            pieces: match aim {
                Aim::Answer => 1 + draw("pieces", 200),
                _ => 1,
            },
            prompts: if aim == Aim::Prompt { 1 + draw("prompts", 3) } else { 0 },
            read: draw("read", 80),
        }
    }

    /// Text of a new prompt, a few hundred tokens.
    pub fn long_prompt(&self, number: usize) -> String {
        let Self { seed, round, .. } = self;
        let place = |place: u64| (seed + 31 * round + 7 * number as u64 + place * place) % 90 + 10;
        let sums: Vec<String> = (0..60).map(|at| format!("{} + {}", place(at), place(at + 60))).collect();
        format!("What is {}?", sums.join(" + "))
    }
}

impl fmt::Display for FaultDraw {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, round, aim, rank, fault, first, mark, streams, pieces, prompts, read } = self;
        write!(out, "seed {seed}, round {round}: rank {rank} is {fault} ")?;
        match aim {
            Aim::Load | Aim::Join => write!(out, "({mark}) after rank {first} died beside {streams} answers"),
            Aim::Prompt => write!(out, "{read} % into {prompts} prompts beside {streams} answers"),
            Aim::Answer => write!(out, "after {pieces} pieces of the first of {streams} answers"),
        }
    }
}
