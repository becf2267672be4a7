//! What a journal knows after its process was killed at any moment, and what its files hold.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use russet_crds::{BudgetPeriod, ModelPrice};
use russet_wire::event::Usage;

use super::tables::MAX_AMOUNT;
use super::*;
use crate::budgets::tests::{ANNA, bound, budget, per_month};
use crate::budgets::{Budgets, MemoryBudgets};
use crate::error::ErrorKind;
use crate::metrics::Metrics;

const NOW: i64 = 1_800_000_000;

/// The account of a window before now, of the Budget that a thread writes.
fn account_of(thread: usize, window: i64) -> AccountKey {
    (format!("uid{thread}"), (BudgetPeriod::Hour, NOW - window * 3600))
}

/// What the process below writes, one after the other: a request reserves in two steps, as one that tries providers does, and the
/// one before it ends.
fn entry_of(thread: usize, number: u64) -> JournalEntry {
    let tokens = |tokens| Amount { tokens, ..Amount::ZERO };
    let request = number / 3;
    let of = |request: u64| account_of(thread, i64::try_from(request % 3).unwrap());
    match (number % 3, request.checked_sub(1)) {
        (2, Some(before)) => {
            JournalEntry::Used { id: before, account: of(before), amount: tokens(before % 50) }
        }
        _ => JournalEntry::Reserved { id: request, account: of(request), amount: tokens(100) },
    }
}

/// The same of the only thread that writes.
fn entry(number: u64) -> JournalEntry {
    entry_of(0, number)
}

fn append(log: &mut LogFile, number: u64) {
    let line = log::line(&[entry(number)]).unwrap();
    log.place(&line).write(&line).unwrap();
}

fn used_after(entries: u64) -> HashMap<AccountKey, u64> {
    used_by(0, entries)
}

/// What is used by the first so many entries of a thread, when all that runs then is cut.
fn used_by(thread: usize, entries: u64) -> HashMap<AccountKey, u64> {
    let (mut used, mut open) = (HashMap::new(), HashMap::new());
    for number in 0..entries {
        match entry_of(thread, number) {
            JournalEntry::Reserved { id, account, amount } => {
                *open.entry((id, account)).or_insert(0) += amount.tokens;
            }
            JournalEntry::Used { id, account, amount } => {
                open.remove(&(id, account.clone()));
                *used.entry(account).or_insert(0) += amount.tokens;
            }
        }
    }
    for ((_, account), tokens) in open {
        *used.entry(account).or_insert(0) += tokens;
    }
    used
}

fn tokens_of(recovered: &Recovered) -> HashMap<AccountKey, u64> {
    recovered.used.iter().map(|(account, amount)| (account.clone(), amount.tokens)).collect()
}

/// The variable that makes the test below the process that it kills.
const KILLED: &str = "RUSSET_KILLED_JOURNAL";
/// Threads that write at once, as a gateway has them.
const THREADS: usize = 3;

/// Writes entries of a thread until nobody reads what it says of them.
fn write_all(journal: &Journal, thread: usize) {
    for number in 0.. {
        // It writes faster than such small logs go into the tables.
        while let Err(error) = journal.write(vec![entry_of(thread, number)]) {
            assert!(error.to_string().contains("not in its tables yet"), "{error}");
            std::thread::yield_now();
        }
        if writeln!(std::io::stdout(), "written {thread} {}", number + 1).is_err() {
            return;
        }
    }
}

#[test]
fn a_journal_whose_process_is_killed_is_what_was_written() {
    // Some ten entries, so that most moments are in the middle of a change of tables and logs.
    let open = |path: &Path| Journal::open_with(path, NOW, 1 << 11).unwrap();
    if let Some(path) = std::env::var_os(KILLED) {
        let (journal, _) = open(Path::new(&path));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let journal = &journal;
                scope.spawn(move || write_all(journal, thread));
            }
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let mut before = HashMap::<AccountKey, u64>::new();
    for round in 0..20 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "budgets::journal::tests::a_journal_whose_process_is_killed_is_what_was_written",
            ])
            .arg("--nocapture")
            .env(KILLED, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let limit = rand::random_range(1..3000);
        let (mut written, mut is_killed) = ([0_u64; THREADS], false);
        for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
            // The name of the test may stand before it.
            if let Some((thread, number)) =
                line.rsplit_once("written ").and_then(|(_, said)| said.split_once(' '))
            {
                written[thread.parse::<usize>().unwrap()] = number.parse().unwrap();
                if written.iter().sum::<u64>() >= limit && !is_killed {
                    child.kill().unwrap();
                    is_killed = true;
                }
            }
        }
        child.wait().unwrap();
        assert!(is_killed, "it ended by itself after {written:?} entries");
        let (journal, recovered) = open(&path);
        drop(journal);
        let known = tokens_of(&recovered);
        for (thread, written) in written.into_iter().enumerate() {
            let of_thread = |used: &HashMap<AccountKey, u64>| {
                let mut used = used.clone();
                used.retain(|(uid, _), tokens| *uid == format!("uid{thread}") && *tokens > 0);
                used
            };
            // One more may have been written, and not said.
            let expected = [written, written + 1].map(|entries| {
                let mut used = used_by(thread, entries);
                for (account, tokens) in of_thread(&before) {
                    *used.entry(account).or_insert(0) += tokens;
                }
                of_thread(&used)
            });
            let known = of_thread(&known);
            assert!(
                expected.contains(&known),
                "round {round}, {written} entries of thread {thread}: {known:?} is none of {expected:?}"
            );
        }
        before = known;
    }
}

#[test]
fn a_line_that_was_not_written_to_its_end_hides_no_other() {
    // What of a place is written, when its thread is killed or the disk is full: nothing, or its beginning.
    for (first, second) in [(0, 0), (0, 40), (1, 0), (40, 40), (usize::MAX, 5)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budgets.db");
        let mut log = LogFile::create(&path, 1, "gateway-a").unwrap();
        append(&mut log, 0);
        for torn in [first, second] {
            let line = log::line(&[entry(1)]).unwrap();
            // All but its newline would be a line.
            let end = torn.min(line.len() - 2);
            log.place(&line).write(&line[..end]).unwrap();
        }
        append(&mut log, 2);
        append(&mut log, 3);
        let line = log::line(&[entry(4)]).unwrap();
        log.place(&line).write(&line[..second.min(line.len() - 1)]).unwrap();
        let read = |gateway| {
            let mut entries = Vec::new();
            log::read(&path, 1, gateway, |more| entries.extend(more)).map(|()| entries)
        };
        assert_eq!(read("gateway-a").unwrap(), [0, 2, 3].map(entry), "{first} and {second} bytes");
        // The name of another gateway: its tables are gone.
        assert_eq!(read("gateway-b").unwrap(), []);
    }
}

/// A journal in a folder of its own, with one entry.
fn with_an_entry() -> (tempfile::TempDir, PathBuf, Journal) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let (journal, _) = Journal::open(&path, NOW).unwrap();
    journal.write(vec![entry(0)]).unwrap();
    (folder, path, journal)
}

#[test]
fn what_could_not_be_written_reserves_nothing() {
    let (folder, path, journal) = with_an_entry();
    let write_into = |path: &Path| {
        let log = &mut journal.open.lock().log;
        *log = LogFile::of(File::options().write(true).open(path).unwrap(), log.number, log.bytes);
    };
    write_into(Path::new("/dev/full"));
    // The second step of the same request, and another one.
    for number in [1, 3] {
        assert!(journal.write(vec![entry(number)]).is_err());
        assert_eq!(journal.open.lock().entries, [entry(0)]);
    }
    write_into(&folder.path().join("budgets.log1"));
    // One whose log is full meanwhile.
    let line = log::line(&[entry(3)]).unwrap();
    {
        let mut open = journal.open.lock();
        open.entries.push(entry(3));
        open.end_entries();
        open.take_back(&line);
        assert_eq!((&*open.full, &*open.entries), (&[entry(0)][..], &[][..]));
    }
    journal.write(vec![entry(2)]).unwrap();
    drop(journal);
    let (_, recovered) = Journal::open(&path, NOW).unwrap();
    // What was written is of one request, which a kill would have cut.
    assert_eq!(tokens_of(&recovered), HashMap::from([(account_of(0, 0), 200)]));
}

#[test]
fn a_log_goes_into_the_tables_when_its_last_line_is_written() {
    let (_folder, _, journal) = with_an_entry();
    let line = log::line(&[entry(3)]).unwrap();
    let place = {
        let mut open = journal.open.lock();
        open.entries.push(entry(3));
        let place = open.log.place(&line);
        let next = open.next.take().unwrap();
        open.end(next);
        place
    };
    let mut open = journal.open.lock();
    assert!(open.take_full().is_none(), "a line may still be written");
    // Its disk is full: what it reserves goes into no table.
    open.take_back(&line);
    drop(place);
    assert_eq!(open.take_full(), Some((vec![entry(0)], 1)));
}

#[test]
fn a_line_with_a_zero_for_its_end_counts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let mut log = LogFile::create(&path, 1, "gateway-a").unwrap();
    (0..4).for_each(|number| append(&mut log, number));
    let file = folder.path().join("budgets.log1");
    let whole = std::fs::read(&file).unwrap();
    let ends: Vec<usize> = (0..whole.len()).filter(|place| whole[*place] == b'\n').collect();
    assert_eq!(ends.len(), 5);
    for cut in 1..=4 {
        let mut damaged = whole.clone();
        damaged[ends[cut]] = 0;
        std::fs::write(&file, &damaged).unwrap();
        let mut entries = Vec::new();
        log::read(&path, 1, "gateway-a", |more| entries.extend(more)).unwrap();
        // Behind the last one there is nothing that would show that it was written.
        let expected: Vec<_> = (0..if cut == 4 { 3 } else { 4 }).map(entry).collect();
        assert_eq!(entries, expected, "line {cut}");
    }
}

#[tokio::test]
async fn a_log_that_the_tables_do_not_take_has_a_bound() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let log = |number| LogFile::create(&path, number, "gateway-a").unwrap();
    let journal = Journal {
        open: Arc::new(Mutex::new(OpenLog::new(log(1), None))),
        folds: None,
        thread: None,
        max_log_bytes: 1 << 11,
        is_failing: AtomicBool::new(false),
    };
    let reserved = || vec![entry(0)];
    let mut written = 0;
    let error = loop {
        match journal.write(reserved()) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("its log has 32"), "{error}");
    // What was used by requests that run is written.
    journal.write(vec![entry(5)]).unwrap();
    assert!(journal.write(reserved()).is_err());
    // A request that may not begin leaves nothing behind, however often it comes.
    let metrics = Arc::new(Metrics::new(&prometheus::Registry::new()).unwrap());
    let memory = MemoryBudgets::of([budget("b", vec![per_month(None, Some(1000), None)])]);
    let mut budgets = Budgets::in_memory(&memory, None, metrics);
    budgets.journal = Some(journal);
    let budgets = Arc::new(budgets);
    let reserve = async || budgets.reserve(&[ANNA], bound(900, 0)).await;
    for _ in 0..3 {
        let error = reserve().await.err().expect("it may not begin");
        assert_eq!(error.kind, ErrorKind::StoreFull, "{error}");
    }
    let journal = budgets.journal.as_ref().unwrap();
    journal.open.lock().next = Some(log(2));
    let reservation = reserve().await.unwrap().unwrap();
    let read = |number| {
        let mut entries = 0;
        log::read(&path, number, "gateway-a", |more| entries += more.len()).unwrap();
        entries
    };
    assert_eq!((read(1), read(2)), (written + 1, 1));
    drop(reservation);
    assert_eq!(read(2), 2);
    let mut late = reserve().await.unwrap().unwrap();
    // Without the thread another gateway may have the tables.
    drop(EndGuard(journal.open.clone()));
    let error = journal.write(vec![entry(5)]).unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
    // A provider is not asked where that cannot be written down, and nobody pays it for what another one answers.
    let fee = ModelPrice { request: "1".parse().unwrap(), ..ModelPrice::default() };
    assert_eq!(late.begin_attempt(fee).await.unwrap_err().kind, ErrorKind::StoreFull);
    late.settle(Usage { prompt_tokens: 900, ..Usage::default() });
    assert_eq!(budgets.give_back().await, None);
    let used = memory.used("b");
    assert_eq!((used.tokens, used.money), (900, 0));
}

#[tokio::test]
async fn after_a_fold_the_tables_have_it_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let (journal, _) = Journal::open(&path, NOW).unwrap();
    for number in 0..100 {
        journal.write(vec![entry(number)]).unwrap();
    }
    journal.fold().await;
    // As the release before this one reads it, which knows no logs.
    let copy = folder.path().join("copy.db");
    for suffix in ["", "-wal"] {
        let name = |path: &Path| format!("{}{suffix}", path.display());
        std::fs::copy(name(&path), name(&copy)).unwrap();
    }
    let (_, recovered) = Journal::open(&copy, NOW).unwrap();
    assert_eq!(tokens_of(&recovered), used_after(100));
    // Nothing is there twice with what comes behind it.
    journal.write(vec![entry(100)]).unwrap();
    drop(journal);
    let (_, recovered) = Journal::open(&path, NOW).unwrap();
    let total: u64 = recovered.used.values().map(|amount| amount.tokens).sum();
    assert_eq!(total, used_after(101).values().sum::<u64>());
}

#[test]
fn a_damaged_log_is_kept_aside_with_its_tables() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let (journal, first) = Journal::open(&path, NOW).unwrap();
    for number in 0..9 {
        journal.write(vec![entry(number)]).unwrap();
    }
    let log = folder.path().join("budgets.log1");
    let whole = std::fs::read(&log).unwrap();
    drop(journal);
    // What no gateway has folded, from its first byte on.
    let head = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    for place in (0..head).chain((head..whole.len()).step_by(7)).filter(|place| whole[*place] != b'\n') {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budgets.db");
        let tables = rusqlite::Connection::open(&path).unwrap();
        tables.execute_batch("CREATE TABLE gateway (name TEXT NOT NULL, boot TEXT NOT NULL)").unwrap();
        let named = "INSERT INTO gateway VALUES (?1, 'boot')";
        tables.execute(named, [&first.gateway]).unwrap();
        drop(tables);
        let log = folder.path().join("budgets.log1");
        let mut damaged = whole.clone();
        damaged[place] = 0;
        std::fs::write(&log, &damaged).unwrap();
        let (journal, recovered) = Journal::open(&path, NOW).unwrap();
        assert_ne!(recovered.gateway, first.gateway, "byte {place}");
        let names = std::fs::read_dir(folder.path()).unwrap();
        let names = names.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut aside: Vec<_> = names.filter(|name| name.starts_with("budgets.damaged-")).collect();
        aside.sort();
        let [tables, log] = &aside[..] else { panic!("{aside:?}") };
        assert_eq!(*log, format!("{tables}-log1"));
        assert_eq!(std::fs::read(folder.path().join(log)).unwrap(), damaged);
        // It goes on, and the next start has what it wrote.
        journal.write(vec![entry(0)]).unwrap();
        drop(journal);
        let (_, again) = Journal::open(&path, NOW).unwrap();
        assert_eq!(again.gateway, recovered.gateway);
        assert_eq!(again.used.values().map(|amount| amount.tokens).sum::<u64>(), 100);
    }
}

#[test]
fn the_journal_stays_small_and_forgets_what_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let (journal, _) = Journal::open(&path, NOW).unwrap();
    let amount = Amount { requests: 1, tokens: 10, ..Amount::ZERO };
    for id in 0..20_000_u64 {
        let start = NOW - 60 * i64::try_from(id).unwrap();
        let minute = ("uid".to_owned(), (BudgetPeriod::Minute, start));
        let month = ("uid".to_owned(), (BudgetPeriod::Month, NOW - 86_400 * 20));
        let entries = vec![
            JournalEntry::Reserved { id, account: minute.clone(), amount },
            JournalEntry::Reserved { id, account: month.clone(), amount },
            JournalEntry::Used { id, account: minute, amount },
            JournalEntry::Used { id, account: month, amount },
        ];
        journal.write(entries).unwrap();
    }
    drop(journal);
    let (_, recovered) = Journal::open(&path, NOW).unwrap();
    // Those of an hour, and the month.
    assert_eq!(recovered.used.len(), 61 + 1);
    let month = ("uid".to_owned(), (BudgetPeriod::Month, NOW - 86_400 * 20));
    assert_eq!(recovered.used[&month].tokens, 200_000);
    // What a provider claims may be absurd, and is still a number after the next one.
    let (journal, _) = Journal::open(&path, NOW).unwrap();
    let absurd = Amount { requests: 1, ..Amount::MAX };
    for id in 0..5 {
        let entry = JournalEntry::Used { id, account: month.clone(), amount: absurd };
        journal.write(vec![entry]).unwrap();
    }
    drop(journal);
    let (_, recovered) = Journal::open(&path, NOW).unwrap();
    assert_eq!(recovered.used[&month].tokens, MAX_AMOUNT as u64);
    let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap());
    let sizes: Vec<_> = files.map(|file| (file.file_name(), file.metadata().unwrap().len())).collect();
    assert!(sizes.iter().map(|(_, bytes)| bytes).sum::<u64>() < 1 << 20, "{sizes:?}");
}
