//! What one request reserved in the Budgets it belongs to, until it is settled. Dropped before that, it is settled with what is
//! known of the answer: a client that leaves pays for what it got.

use std::sync::Arc;

use russet_crds::ModelPrice;
use russet_wire::event::Usage;

use super::account::Hold;
use super::amount::Amount;
use super::journal::{AccountKey, JournalEntry};
use super::{Budgets, Entry};
use crate::error::GatewayError;

/// A reservation of a request.
pub(crate) struct Reservation {
    budgets: Arc<Budgets>,
    id: u64,
    /// Requests and tokens.
    base: Vec<EntryHold>,
    /// Money for a try of a provider.
    attempt: Option<ProviderAttempt>,
    /// Accounts in which tries reserved and the request did not: those of windows that began since.
    later_accounts: Vec<AccountKey>,
    /// Output tokens that it may have at most, where it names none itself.
    answer_tokens: u32,
    prompt_bound: u64,
    /// What is known of an answer that is not complete.
    noted: Usage,
    /// Whether its prompt is that of another answer to the same request, which counts it.
    repeats_prompt: bool,
    /// Whether it counts as a request, and nothing of an answer.
    is_request_alone: bool,
}

/// A hold of a Budget, given back when it is dropped.
pub(super) struct EntryHold {
    entry: Arc<Entry>,
    hold: Hold,
    used: Amount,
}

impl EntryHold {
    pub(super) fn new(entry: Arc<Entry>, hold: Hold) -> Self {
        Self { entry, hold, used: Amount::ZERO }
    }
}

impl Drop for EntryHold {
    fn drop(&mut self) {
        self.entry.accounts.lock().settle(&self.hold, self.used);
    }
}

/// What the energy that a request takes is charged to, whenever an engine is done with it: as often as there are engines, and
/// after its client has left, too.
pub(crate) struct EnergyCharge {
    budgets: Arc<Budgets>,
    accounts: Vec<(Arc<Entry>, AccountKey)>,
}

impl EnergyCharge {
    /// An engine took so many thousandths of a joule.
    pub(crate) fn charge(&self, millijoules: u64) {
        let amount = Amount { millijoules, ..Amount::ZERO };
        // A number of its own: what its request reserved stays reserved.
        let id = self.budgets.next_id();
        let mut entries = Vec::with_capacity(self.accounts.len());
        for (entry, account) in &self.accounts {
            entry.accounts.lock().charge(account, amount);
            entries.push(JournalEntry::Used { id, account: account.clone(), amount });
        }
        self.budgets.record_used(entries);
    }
}

struct ProviderAttempt {
    _holds: Vec<EntryHold>,
    price: ModelPrice,
}

impl Reservation {
    pub(super) fn new(
        budgets: Arc<Budgets>,
        base: Vec<EntryHold>,
        prompt_bound: u64,
        answer_tokens: u32,
    ) -> Self {
        Self {
            id: budgets.next_id(),
            budgets,
            base,
            attempt: None,
            later_accounts: Vec::new(),
            answer_tokens,
            prompt_bound,
            noted: Usage::default(),
            repeats_prompt: false,
            is_request_alone: false,
        }
    }

    /// Whether any of its Budgets counts what answers are made of.
    pub(crate) fn limits_answers(&self) -> bool {
        self.answer_tokens < u32::MAX
    }

    /// Output tokens that the request may have at most.
    pub(crate) fn answer_tokens(&self) -> u32 {
        self.answer_tokens
    }

    /// The same for an answer whose prompt another one counts.
    pub(crate) fn without_prompt(&mut self) {
        self.repeats_prompt = true;
    }

    /// Writes down what is reserved.
    pub(super) fn recorded(mut self) -> Result<Self, GatewayError> {
        let entries = self.base.iter().map(|held| self.reserved(held)).collect();
        let recorded = self.budgets.record(entries);
        if recorded.is_err() {
            // What was not written down needs no end there.
            self.base.clear();
        }
        recorded.map(|()| self)
    }

    fn reserved(&self, EntryHold { hold, .. }: &EntryHold) -> JournalEntry {
        JournalEntry::Reserved { id: self.id, account: hold.account.clone(), amount: hold.amount }
    }

    /// What the energy of its engines is charged to; none where no Budget limits it.
    pub(crate) fn energy_charge(&self) -> Option<EnergyCharge> {
        let limited = self.base.iter().filter(|held| held.hold.amount.millijoules > 0);
        let accounts: Vec<_> = limited.map(|held| (held.entry.clone(), held.hold.account.clone())).collect();
        (!accounts.is_empty()).then(|| EnergyCharge { budgets: self.budgets.clone(), accounts })
    }

    /// Whether any of its Budgets counts money.
    pub(crate) fn counts_money(&self) -> bool {
        self.entries().iter().any(|entry| entry.limits_money())
    }

    /// Reserves what an answer of a provider with these prices may cost; an error names the Budget that has too little left.
    pub(crate) async fn begin_attempt(&mut self, price: ModelPrice) -> Result<(), GatewayError> {
        self.end_attempt();
        let money = price.of(self.prompt_bound, 0, self.answer_tokens.into()).nanos;
        let need = Amount { money, ..Amount::ZERO };
        let holds =
            self.budgets.hold_all(&self.entries(), need).await.map_err(|rejection| rejection.error())?;
        // Where it cannot be written down, nothing is asked, and nothing is to be paid.
        self.budgets.record(holds.iter().map(|held| self.reserved(held)).collect())?;
        for EntryHold { hold, .. } in &holds {
            let is_known = self.base.iter().map(|held| &held.hold.account).chain(&self.later_accounts);
            if !is_known.into_iter().any(|account| *account == hold.account) {
                self.later_accounts.push(hold.account.clone());
            }
        }
        self.attempt = Some(ProviderAttempt { _holds: holds, price });
        Ok(())
    }

    /// The provider did not answer, and wants nothing for it.
    pub(crate) fn end_attempt(&mut self) {
        self.attempt = None;
    }

    fn entries(&self) -> Vec<Arc<Entry>> {
        let mut entries: Vec<Arc<Entry>> = Vec::new();
        for EntryHold { entry, .. } in &self.base {
            if !entries.iter().any(|known| Arc::ptr_eq(known, entry)) {
                entries.push(entry.clone());
            }
        }
        entries
    }

    /// An engine reads a prompt of so many tokens.
    pub(crate) fn note_prompt(&mut self, tokens: u32) {
        self.noted.prompt_tokens = tokens;
    }

    /// So many tokens of the answer are there.
    pub(crate) fn note_answer(&mut self, tokens: usize) {
        self.noted.completion_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        // A provider says how long a prompt was when it is done.
        if self.noted.prompt_tokens == 0 {
            self.noted.prompt_tokens = u32::try_from(self.prompt_bound).unwrap_or(u32::MAX);
        }
    }

    /// Settles an answer that is complete.
    pub(crate) fn settle(mut self, usage: Usage) {
        self.noted = usage;
    }

    /// Settles a request whose answer other requests make, which count all but itself.
    pub(crate) fn settle_request(mut self) {
        self.is_request_alone = true;
    }

    fn close(&mut self) {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = self.noted;
        let (prompt, cached, answer) =
            (prompt_tokens.into(), cached_tokens.into(), u64::from(completion_tokens));
        let is_used = prompt + answer > 0 || self.is_request_alone;
        let counted_prompt = if self.repeats_prompt { 0 } else { prompt };
        let attempt = self.attempt.take();
        let money = attempt.as_ref().map_or(0, |attempt| attempt.price.of(prompt, cached, answer).nanos);
        let used = if is_used {
            let requests = u64::from(!self.repeats_prompt);
            Amount { requests, tokens: counted_prompt + answer, money, millijoules: 0 }
        } else {
            Amount::ZERO
        };
        drop(attempt);
        let mut entries = Vec::with_capacity(self.base.len());
        for mut held in std::mem::take(&mut self.base) {
            held.used = used;
            entries.push(JournalEntry::Used {
                id: self.id,
                account: held.hold.account.clone(),
                amount: used,
            });
        }
        // What was used counts where the request began.
        entries.extend(
            std::mem::take(&mut self.later_accounts).into_iter().map(|account| JournalEntry::Used {
                id: self.id,
                account,
                amount: Amount::ZERO,
            }),
        );
        if !entries.is_empty() {
            self.budgets.record_used(entries);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::{BudgetPeriod, Money, TokenPrice};

    use super::super::MemoryBudgets;
    use super::super::tests::{ANNA, bound, budget, per_month};
    use super::*;

    #[tokio::test]
    async fn a_try_in_a_later_window_is_ended_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budgets.db");
        let memory = MemoryBudgets::of([budget("b", vec![per_month(None, None, Some("1"))])]);
        let budgets = memory.gateway(Some(&path));
        let mut reservation = budgets.reserve(&[ANNA], bound(1000, 1000)).await.unwrap().unwrap();
        let now = reservation.base[0].hold.account.clone();
        assert_eq!(now.1.0, BudgetPeriod::Month);
        // As if the request had begun a month before; its hold there is of no account that there is.
        reservation.base[0].hold.account.1.1 -= 86_400 * 28;
        let fee: Money = "0.5".parse().unwrap();
        let free: Money = "0".parse().unwrap();
        let tokens = TokenPrice { input: free, cached_input: None, output: free };
        let price = ModelPrice { tokens, request: fee };
        for _ in 0..2 {
            reservation.begin_attempt(price).await.unwrap();
        }
        assert_eq!(reservation.later_accounts, std::slice::from_ref(&now));
        reservation.settle(Usage { prompt_tokens: 900, completion_tokens: 100, cached_tokens: 0 });
        budgets.close().await;
        drop(budgets);
        let (_, recovered) = super::super::Journal::open(&path, jiff::Timestamp::now().as_second()).unwrap();
        let money = |account: &AccountKey| recovered.used.get(account).map_or(0, |amount| amount.money);
        assert_eq!(money(&now), 0, "{recovered:?}");
    }
}
