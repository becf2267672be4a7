//! A running script: its steps one after another, their expectations, and the results that must be the same
//! wherever the operator is interrupted.
//!
//! ```text
//! settle ─▶ every write in order ─▶ settled ─▶ compared with
//!              └─▶ the world at that write, the operator's memory lost, settled separately    (crash points)
//! during settle: the steps of the block in every gap between writes, all orders tested        (conflicts)
//! ```

use super::script::{Script, SimLine, SimStep};
use super::trace::Trace;
use super::world::World;
use super::{actions, agent, ledger, operator};

/// Maximum number of rounds until a cluster must settle.
const ROUNDS: usize = 60;

/// A running script.
#[derive(Clone, Debug, Default)]
pub struct Story {
    world: World,
    /// What it shows.
    pub trace: Trace,
    /// Number of tested crash points.
    pub crashes: usize,
    /// Number of gaps in which steps of a block were run.
    pub conflicts: usize,
    /// Whether other turns and crashes may give free memory to other replicas.
    loose: bool,
}

/// Order in which deployments are reconciled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turns {
    Ascending,
    Descending,
}

/// Called between two writes with the number of writes so far.
type Between<'b> = &'b mut dyn FnMut(&mut World, usize) -> Result<(), String>;

impl Story {
    /// A story of which only the invariants are checked.
    pub fn loose() -> Self {
        Self { loose: true, ..Self::default() }
    }

    /// What there is.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Runs a script until it deviates; the error names file and line.
    pub fn run(&mut self, script: &Script) -> Result<(), String> {
        for (at, line) in script.lines.iter().enumerate() {
            let SimLine { number, text, step: _ } = line;
            let place = |wrong| format!("tests/sim/scripts/{}.txt:{number}: {text}: {wrong}", script.name);
            self.line(line, &script.lines[at + 1..]).map_err(place)?;
        }
        Ok(())
    }

    fn line(&mut self, line: &SimLine, rest: &[SimLine]) -> Result<(), String> {
        if let SimStep::Expect(expectation) = &line.step {
            return expectation.judge(&self.world, &self.trace);
        }
        self.trace.step(&line.text);
        match &line.step {
            SimStep::Turn(name) => {
                self.world.spec(name)?;
                self.trace.begin();
                for write in operator::turn(&mut self.world, name, &mut self.trace)? {
                    operator::write(&mut self.world, &write, &mut self.trace)?;
                }
                Ok(())
            }
            SimStep::Settle => self.settle(rest),
            SimStep::During(steps) => self.during(steps),
            // The operator's state is on the server; between turns it has nothing to lose.
            SimStep::Restart => Ok(()),
            step => actions::perform(&mut self.world, step).map(|_| ()),
        }
    }

    /// Settles, and again with other turns, and from every write on with the operator's memory lost.
    fn settle(&mut self, rest: &[SimLine]) -> Result<(), String> {
        let mut forks = Vec::new();
        let mut turned = self.world.clone();
        settle(&mut self.world, &mut self.trace, Turns::Ascending, &mut |world, writes| {
            if writes > 0 {
                forks.push((writes, world.clone()));
            }
            Ok(())
        })?;
        let opposite = |wrong| format!("with turns in the opposite order: {wrong}");
        settle(&mut turned, &mut Trace::default(), Turns::Descending, &mut |_, _| Ok(()))
            .map_err(opposite)?;
        self.same(&turned).map_err(opposite)?;
        for (writes, world) in forks {
            let crashed = |wrong| format!("the operator ended after write {writes}: {wrong}");
            let mut fork = Story { world, ..Story::default() };
            settle(&mut fork.world, &mut fork.trace, Turns::Ascending, &mut |_, _| Ok(()))
                .map_err(crashed)?;
            self.same(&fork.world).map_err(crashed)?;
            self.crashes += 1;
            if !self.loose && nodes(&fork.world) != nodes(&self.world) {
                fork.run_rest(rest).map_err(crashed)?;
            }
        }
        Ok(())
    }

    /// The rest of the script from another placement, with only the invariants checked.
    fn run_rest(&mut self, rest: &[SimLine]) -> Result<(), String> {
        for line in rest {
            let done = match &line.step {
                SimStep::Expect(_) | SimStep::Restart => Ok(()),
                SimStep::Settle => {
                    settle(&mut self.world, &mut self.trace, Turns::Ascending, &mut |_, _| Ok(()))
                }
                SimStep::During(steps) => {
                    steps
                        .iter()
                        .try_for_each(|line| actions::perform(&mut self.world, &line.step).map(|_| ()))?;
                    settle(&mut self.world, &mut self.trace, Turns::Ascending, &mut |_, _| Ok(()))
                }
                _ => self.line(line, &[]),
            };
            done.map_err(|wrong| format!("later, in line {}: {wrong}", line.number))?;
        }
        Ok(())
    }

    /// Settles with the steps of a block in every gap between writes.
    fn during(&mut self, steps: &[SimLine]) -> Result<(), String> {
        let mut writes = 0;
        settle(&mut self.world.clone(), &mut Trace::default(), Turns::Ascending, &mut |_, now| {
            writes = now;
            Ok(())
        })?;
        let before = self.world.clone();
        // The golden file shows all of them after the first write.
        interrupted(&mut self.world, &mut self.trace, steps, &vec![writes.min(1); steps.len()])?;
        for gaps in gaps(steps.len(), writes) {
            let failed = |wrong| format!("with its steps after writes {gaps:?}: {wrong}");
            let mut fork = before.clone();
            interrupted(&mut fork, &mut Trace::default(), steps, &gaps).map_err(failed)?;
            self.same(&fork).map_err(failed)?;
            self.conflicts += 1;
        }
        Ok(())
    }

    /// Whether another world has the same replicas.
    fn same(&self, other: &World) -> Result<(), String> {
        let (own, other) = (ledger::outcome(&self.world), ledger::outcome(other));
        if own == other || self.loose {
            return Ok(());
        }
        Err(format!("replicas came to {other:?} (groups, answering) instead of {own:?}"))
    }
}

/// The nodes of every replica.
fn nodes(world: &World) -> Vec<(String, Vec<String>)> {
    let nodes = |group: &russet_crds::ShardGroup| {
        group.spec.plan.members.iter().map(|member| member.node_name.clone()).collect()
    };
    let living = world.living().into_iter();
    living
        .map(|group| (format!("{}-{}", group.spec.deployment_ref.name, group.spec.replica), nodes(group)))
        .collect()
}

/// Every way to distribute `steps`, in order, over the gaps after 0 to `writes` writes.
fn gaps(steps: usize, writes: usize) -> Vec<Vec<usize>> {
    let Some(fewer) = steps.checked_sub(1) else { return vec![Vec::new()] };
    let heads = gaps(fewer, writes).into_iter();
    heads
        .flat_map(|head| {
            let from = head.last().copied().unwrap_or(0);
            (from..=writes).map(move |gap| [head.clone(), vec![gap]].concat())
        })
        .collect()
}

/// Settles with each step run after the number of writes of its gap. The operator continues with the writes
/// that it decided before the step, as a real one would.
fn interrupted(
    world: &mut World,
    trace: &mut Trace,
    steps: &[SimLine],
    gaps: &[usize],
) -> Result<(), String> {
    let mut left: Vec<(&SimLine, usize)> = steps.iter().zip(gaps.iter().copied()).rev().collect();
    let mut done = Vec::new();
    settle(world, trace, Turns::Ascending, &mut |world, writes| {
        while let Some((line, _)) = left.pop_if(|(_, gap)| *gap <= writes) {
            actions::perform(world, &line.step)?;
            done.push(line.text.clone());
        }
        Ok(())
    })?;
    // Steps that changed the pending writes leave fewer gaps than were counted.
    if !left.is_empty() {
        for (line, _) in left.into_iter().rev() {
            actions::perform(world, &line.step)?;
        }
        settle(world, trace, Turns::Ascending, &mut |_, _| Ok(()))?;
    }
    Ok(())
}

/// Reconciles every deployment and steps the agents until nothing changes.
fn settle(world: &mut World, trace: &mut Trace, turns: Turns, between: Between<'_>) -> Result<(), String> {
    trace.begin();
    trace.sees(world);
    let mut writes = 0;
    between(world, writes)?;
    for round in 1..=ROUNDS {
        let before = writes;
        let mut names: Vec<String> = world.deployments.keys().cloned().collect();
        if turns == Turns::Descending {
            names.reverse();
        }
        for name in names {
            for write in operator::turn(world, &name, trace)? {
                operator::write(world, &write, trace)?;
                trace.sees(world);
                writes += 1;
                between(world, writes)?;
            }
        }
        let acted = agent::step(world);
        trace.sees(world);
        if !acted && writes == before {
            trace.calm(world, round);
            return ledger::unsettled(world).into_iter().next().map_or(Ok(()), Err);
        }
    }
    Err(format!("after {ROUNDS} rounds something still changes"))
}
