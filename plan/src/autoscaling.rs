//! Autoscaling: how many replicas the demand requires. The caller says how many fit. Not here: the write to
//! `/scale`, which the operator does.
//!
//! ```text
//! requests / targetQueue ─┐
//! slow first tokens ──────┤
//! demand history ─────────┴─▶ need ─┬─ more than exist ─▶ at once, as many as fit
//!                                   ├─ fewer ───────────▶ the maximum of the last five minutes
//!                                   └─ no requests ─────▶ none, after idleSeconds or keep_alive, where minReplicas is 0
//! ```

use std::time::Duration;

use jiff::Timestamp;
use russet_crds::Autoscaling;
use russet_crds::conditions::Reason;

use crate::demand::DemandSummary;
use crate::demand_history::ExpectedDemand;

/// Scale-down delay: a replica is quickly stopped and slowly loaded. The same as a HorizontalPodAutoscaler's.
pub(crate) const SCALE_DOWN_DELAY: Duration = Duration::from_secs(300);
/// Minimum interval between two scale-ups for slow first tokens, and after all replicas have become ready:
/// the measurement covers the last minute.
const TTFT_SCALE_UP_INTERVAL: Duration = Duration::from_secs(60);
/// Retry interval after replicas did not fit.
const PLACEMENT_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Current state of a deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScalingInput {
    /// `spec.replicas`.
    pub replicas: i32,
    /// How long a replica has been ready; `None` while none is.
    pub ready_for: Option<Duration>,
    /// Whether all replicas are ready and no change is in progress.
    pub settled: bool,
    /// Its demand.
    pub demand: DemandSummary,
    /// What the last weeks let expect; `None` without `predictive`, and in hours that needed nothing.
    pub expected: Option<ExpectedDemand>,
    /// Whether what they let expect decided last, as the condition says.
    pub by_history: bool,
}

/// State kept between evaluations. Losing it only delays scaling down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScalingHistory {
    /// Since when fewer replicas are needed, and the maximum need since then.
    scale_down_since: Option<(Timestamp, i32)>,
    /// When a change was last in progress.
    last_change: Option<Timestamp>,
    /// Whether replicas were started before anybody asked, and nobody has since.
    started_early: bool,
}

/// The scaling decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingDecision {
    /// Desired replicas.
    pub replicas: i32,
    /// Replicas that the requests need, whatever fits; at most `maxReplicas`. Where more are there than requests asked for, slow
    /// first tokens say nothing of how many would be enough, and do not count.
    pub needed: i32,
    /// Whether demand decides, as a condition reason.
    pub reason: Reason,
    /// The condition message.
    pub message: String,
    /// When to evaluate again without a change.
    pub requeue_after: Option<Duration>,
}

/// What the requests need.
struct RequestNeed {
    /// Requests, held and running.
    requests: u32,
    /// Replicas for them.
    replicas: i32,
    /// Those for their number alone.
    by_queue: i32,
    why: String,
    /// Until first tokens that are slow may add a replica.
    ttft_pause: Option<Duration>,
}

/// Decides; `fits` returns how many of a number of replicas fit.
pub fn scale(
    rules: &Autoscaling,
    seen: &ScalingInput,
    memory: &mut ScalingHistory,
    now: Timestamp,
    fits: impl FnOnce(i32) -> i32,
) -> ScalingDecision {
    if !seen.settled {
        memory.last_change = Some(now);
    }
    let need = request_need(rules, seen, memory, now);
    memory.started_early &= need.requests == 0;
    let decision = decide(rules, seen, memory, now, &need, fits);
    debug_assert!((0..=rules.max_replicas).contains(&decision.replicas));
    let is_expected_more = seen.expected.is_some_and(|expected| expected.replicas > need.by_queue);
    let needed = match need.requests {
        0 => 0,
        _ if is_expected_more => need.by_queue,
        _ => need.replicas,
    }
    .min(rules.max_replicas);
    ScalingDecision { needed, ..decision }
}

fn request_need(
    rules: &Autoscaling,
    seen: &ScalingInput,
    memory: &ScalingHistory,
    now: Timestamp,
) -> RequestNeed {
    let Autoscaling { target_queue, target_ttft_milliseconds, .. } = *rules;
    let ScalingInput { replicas, settled, demand, .. } = *seen;
    let requests = demand.waiting.saturating_add(demand.active);
    let by_queue = i32::try_from(requests.div_ceil(target_queue.max(1))).unwrap_or(i32::MAX);
    let slow = demand.ttft_milliseconds.zip(target_ttft_milliseconds).filter(|(took, target)| took > target);
    let rested = memory.last_change.map_or(TTFT_SCALE_UP_INTERVAL, |moved| since(moved, now));
    let by_ttft = match slow {
        Some(_) if settled && rested >= TTFT_SCALE_UP_INTERVAL => replicas.saturating_add(1),
        Some(_) => replicas,
        None => 0,
    };
    let why = match slow {
        Some((took, target)) if by_ttft > by_queue => {
            format!("first tokens take {took} ms, more than {target}")
        }
        _ => format!("{requests} requests ({} of them held), {target_queue} a replica", demand.waiting),
    };
    let ttft_pause = slow
        .and_then(|_| TTFT_SCALE_UP_INTERVAL.checked_sub(rested))
        .filter(|pause| settled && !pause.is_zero());
    RequestNeed { requests, replicas: by_queue.max(by_ttft), by_queue, why, ttft_pause }
}

fn decide(
    rules: &Autoscaling,
    seen: &ScalingInput,
    memory: &mut ScalingHistory,
    now: Timestamp,
    need: &RequestNeed,
    fits: impl FnOnce(i32) -> i32,
) -> ScalingDecision {
    let Autoscaling { min_replicas, max_replicas, idle_seconds, max_idle_seconds, .. } = *rules;
    let ScalingInput { replicas, ready_for: answering, demand, expected, .. } = *seen;
    if replicas == 0 && min_replicas > 0 {
        let message = "spec.replicas is 0, which stops it; set it to 1 or more and demand decides again";
        return said(0, Reason::ScalingDisabled, message.to_owned(), None);
    }
    let mut stays_for = None;
    match expected.filter(|_| need.requests == 0) {
        Some(expected) if replicas == 0 => return start_early(rules, expected, memory, now, fits),
        None if need.requests == 0 && min_replicas == 0 => {
            if replicas == 0 {
                let message = "no requests; the next request starts it";
                return said(0, Reason::Idle, message.to_owned(), None);
            }
            let idle = Duration::from_secs(idle_seconds.into());
            let max_idle = Duration::from_secs(max_idle_seconds.unwrap_or(idle_seconds).into());
            stays_for = demand.stays_for(idle, max_idle, answering).filter(|_| answering.is_some());
            if answering.is_none() && (memory.started_early || seen.by_history) {
                // Its hours are over, and nobody waits for what is not ready yet.
                stays_for = Some(demand.stays_for(idle, max_idle, None).unwrap_or_default());
            }
        }
        _ => {}
    }
    if stays_for.is_some_and(|stays_for| stays_for.is_zero()) {
        *memory = ScalingHistory::default();
        let message = match demand.keep_for {
            Some(_) => "no requests, and the keep_alive of the last ones is over; the next request starts it"
                .to_owned(),
            None => format!("no requests for {idle_seconds} s; the next request starts it"),
        };
        return said(0, Reason::Idle, message, None);
    }
    // Expected beyond what there would be anyway.
    let beyond =
        |expected: &ExpectedDemand| expected.replicas.min(max_replicas) > need.replicas.max(min_replicas);
    let expected = expected.filter(beyond);
    let (replicas_needed, why) = match &expected {
        Some(expected) => (expected.replicas, expected.to_string()),
        None => (need.replicas, need.why.clone()),
    };
    let mut decision = steer(rules, seen, memory, now, replicas_needed, &why, fits);
    if expected.is_some() && decision.reason == Reason::ScaledByDemand {
        decision.reason = Reason::ScaledByHistory;
        if decision.replicas == replicas {
            decision.message = format!("{}: {why}", count(replicas));
        }
    }
    let again = [decision.requeue_after, stays_for, need.ttft_pause].into_iter().flatten().min();
    ScalingDecision { requeue_after: again, ..decision }
}

/// Starts the first replicas before anybody asks. Unlike a request, an expectation waits until there is room: it starts no
/// replica that would wait for nodes, and so preempts none.
fn start_early(
    rules: &Autoscaling,
    expected: ExpectedDemand,
    memory: &mut ScalingHistory,
    now: Timestamp,
    fits: impl FnOnce(i32) -> i32,
) -> ScalingDecision {
    let wanted = expected.replicas.min(rules.max_replicas);
    let to = fits(wanted).clamp(0, wanted);
    let again = (to < wanted).then_some(PLACEMENT_RETRY_INTERVAL);
    if to == 0 {
        let message = format!("{expected}, and none fits now; the next request starts it");
        return said(0, Reason::NothingFits, message, again);
    }
    memory.last_change = Some(now);
    memory.started_early = true;
    let short = if to < wanted { format!("; {to} fit") } else { String::new() };
    said(to, Reason::ScaledByHistory, format!("from 0 to {}: {expected}{short}", count(to)), again)
}

fn said(replicas: i32, reason: Reason, message: String, again: Option<Duration>) -> ScalingDecision {
    ScalingDecision { replicas, needed: 0, reason, message, requeue_after: again }
}

/// A number of replicas in words.
fn count(replicas: i32) -> String {
    if replicas == 1 { "1 replica".to_owned() } else { format!("{replicas} replicas") }
}

/// From the needed to the desired number of replicas.
fn steer(
    rules: &Autoscaling,
    seen: &ScalingInput,
    memory: &mut ScalingHistory,
    now: Timestamp,
    need: i32,
    why: &str,
    fits: impl FnOnce(i32) -> i32,
) -> ScalingDecision {
    let Autoscaling { min_replicas, max_replicas, .. } = *rules;
    let replicas = seen.replicas;
    let need = need.clamp(min_replicas.clamp(1, max_replicas), max_replicas);
    let moves = |to: i32, why: &str| format!("from {replicas} to {to} replicas: {why}");
    if replicas > max_replicas {
        let why = format!("maxReplicas is {max_replicas}");
        return said(max_replicas, Reason::ScaledByDemand, moves(max_replicas, &why), None);
    }
    if need > replicas {
        memory.scale_down_since = None;
        // The first replica is requested even if it does not fit: then the planner says why.
        let to = fits(need).clamp(replicas.max(1), need);
        let reason = if to < need { Reason::NothingFits } else { Reason::ScaledByDemand };
        let short = if to < need { format!("; {need} are needed, {to} fit") } else { String::new() };
        let message = match to > replicas {
            true => moves(to, &format!("{why}{short}")),
            false => format!("{replicas} replicas{short}"),
        };
        if to > replicas {
            memory.last_change = Some(now);
        }
        return said(to, reason, message, (to < need).then_some(PLACEMENT_RETRY_INTERVAL));
    }
    if need == replicas {
        memory.scale_down_since = None;
        return said(replicas, Reason::ScaledByDemand, format!("{replicas} replicas match the demand"), None);
    }
    let (since_when, most) =
        memory.scale_down_since.map_or((now, need), |(since, most)| (since, most.max(need)));
    memory.scale_down_since = Some((since_when, most));
    let waited = since(since_when, now);
    if waited < SCALE_DOWN_DELAY {
        let message = format!("{replicas} replicas; fewer are needed, and stopped once that lasts");
        return said(replicas, Reason::ScaledByDemand, message, Some(SCALE_DOWN_DELAY - waited));
    }
    memory.scale_down_since = None;
    memory.last_change = Some(now);
    let why = format!("no more were needed for {} s", SCALE_DOWN_DELAY.as_secs());
    said(most, Reason::ScaledByDemand, moves(most, &why), None)
}

fn since(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

#[cfg(test)]
mod burst;
#[cfg(test)]
mod tests;
