//! What the logs of the journal have and its tables have not yet, added up: of a thousand requests that ended, a sum for each
//! window is left. No IO but the reading of the tables.

use std::collections::{HashMap, HashSet};

use rusqlite::Connection;

use super::tables::period;
use super::{AccountKey, JournalEntry, JournalError};
use crate::budgets::amount::Amount;

/// What a request reserved of an account, by the number of the request.
pub(super) type HoldKey = (u64, AccountKey);

/// Changes that the tables have not yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Backlog {
    /// What requests that ended used, in all.
    pub(super) used: HashMap<AccountKey, Amount>,
    /// What requests that run may use, beyond what the table has of them.
    pub(super) reserved: HashMap<HoldKey, Amount>,
    /// What is no longer reserved, and the table has.
    pub(super) released: Vec<HoldKey>,
    /// What the table has of requests that run.
    pub(super) in_table: HashSet<HoldKey>,
}

impl Backlog {
    /// Nothing, beside the tables of a file.
    pub(super) fn of_tables(connection: &Connection) -> Result<Self, JournalError> {
        let mut in_table = HashSet::new();
        let mut rows = connection.prepare("SELECT id, budget, per, start FROM reserved")?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let per: String = row.get(2)?;
            let Some(per) = period(&per) else { continue };
            let id = u64::try_from(row.get::<_, i64>(0)?).unwrap_or(0);
            in_table.insert((id, (row.get(1)?, (per, row.get(3)?))));
        }
        Ok(Self { in_table, ..Self::default() })
    }

    /// Adds what the log says next.
    pub(super) fn add(&mut self, entries: Vec<JournalEntry>) {
        for entry in entries {
            match entry {
                JournalEntry::Reserved { id, account, amount } => {
                    let reserved = self.reserved.entry((id, account)).or_default();
                    *reserved = reserved.plus(amount);
                }
                JournalEntry::Used { id, account, amount } => {
                    let used = self.used.entry(account.clone()).or_default();
                    *used = used.plus(amount);
                    let key = (id, account);
                    self.reserved.remove(&key);
                    if self.in_table.remove(&key) {
                        self.released.push(key);
                    }
                }
            }
        }
    }
}
