//! What earlier connections to a broker tell about the next one: when it is tried, and what is said about the last one's end.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// Maximum backoff. A broker restarts in less, and one that is gone for good costs a packet a minute.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Backoff after failed connections; it doubles.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_secs(1))
    .with_max_delay(MAX_BACKOFF)
    .without_max_times();
/// A connection that ended sooner after it was accepted may have been taken over.
const MIN_CONNECTED: Duration = Duration::from_secs(5);
/// Such ends in a row that mean another client with the same id: a broker that restarts ends one or two.
const MAX_SHORT_CONNECTIONS: u32 = 3;
/// A connection this long shows that nobody contests the id any more: the other one waits for as long as this one.
const UNCONTESTED_AFTER: Duration = Duration::from_secs(150);

/// What earlier connections tell about the next one.
#[derive(Debug)]
pub struct ConnectionHistory {
    delays: ExponentialBackoff,
    /// Connections in a row that were accepted and ended within [`MIN_CONNECTED`].
    short: u32,
    reported: bool,
}

/// What to log about the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The first end of an outage.
    Outage,
    /// Another client has the same id.
    Contested,
    /// Nothing new.
    Known,
}

impl Default for ConnectionHistory {
    fn default() -> Self {
        Self { delays: BACKOFF.build(), short: 0, reported: false }
    }
}

impl ConnectionHistory {
    /// Whether another client seems to have the same id.
    pub fn is_contested(&self) -> bool {
        self.short >= MAX_SHORT_CONNECTIONS
    }

    /// Records an end; the connection was accepted for `elapsed`, or never. Returns the pause before the next.
    pub fn ended(&mut self, elapsed: Option<Duration>) -> (Duration, Report) {
        let enough = if self.is_contested() { UNCONTESTED_AFTER } else { MIN_CONNECTED };
        let mut report = Report::Known;
        match elapsed {
            Some(elapsed) if elapsed >= enough => *self = Self::default(),
            Some(_) => {
                self.short += 1;
                if self.short == MAX_SHORT_CONNECTIONS {
                    report = Report::Contested;
                }
            }
            None => {}
        }
        if report == Report::Known && !self.reported {
            report = Report::Outage;
        }
        self.reported = true;
        let pause = self.delays.next().unwrap_or(MAX_BACKOFF);
        (if self.is_contested() { MAX_BACKOFF } else { pause }, report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contested_client_id_is_said_once_and_retried_each_minute() {
        let seconds = Duration::from_secs;
        let mut history = ConnectionHistory::default();
        for (story, elapsed, pause, report) in [
            ("no broker yet", None, 1, Report::Outage),
            ("still none", None, 2, Report::Known),
            ("an hour online, then its restart", Some(3_600), 1, Report::Outage),
            ("ended at once", Some(0), 2, Report::Known),
            ("ended again", Some(1), 4, Report::Known),
            ("and again", Some(4), 60, Report::Contested),
            ("the other waits a minute too", Some(60), 60, Report::Known),
            ("no broker meanwhile", None, 60, Report::Known),
            ("taken over", Some(90), 60, Report::Known),
            ("the other client is gone", Some(150), 1, Report::Outage),
            ("short", Some(2), 2, Report::Known),
            ("long enough, so it counts anew", Some(5), 1, Report::Outage),
        ] {
            assert_eq!(history.ended(elapsed.map(seconds)), (seconds(pause), report), "{story}");
        }
    }
}
