//! What a journal knows after its process was killed at any moment, and what its files hold.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};

use russet_crds::BudgetPeriod;

use super::tables::MAX_AMOUNT;
use super::*;
use crate::budgets::tests::{ANNA, bound, budget, per_month};
use crate::budgets::{Budgets, MemoryBudgets};
use crate::error::ErrorKind;
use crate::metrics::Metrics;

const NOW: i64 = 1_800_000_000;

/// The account of a window before now.
fn account(window: i64) -> AccountKey {
    ("uid".to_owned(), (BudgetPeriod::Hour, NOW - window * 3600))
}

/// What the process below writes, one after the other: a request reserves in two steps, as one that tries providers does, and the
/// one before it ends.
fn entry(number: u64) -> JournalEntry {
    let tokens = |tokens| Amount { tokens, ..Amount::ZERO };
    let request = number / 3;
    let of = |request: u64| account(i64::try_from(request % 3).unwrap());
    match (number % 3, request.checked_sub(1)) {
        (2, Some(before)) => {
            JournalEntry::Used { id: before, account: of(before), amount: tokens(before % 50) }
        }
        _ => JournalEntry::Reserved { id: request, account: of(request), amount: tokens(100) },
    }
}

/// What is used by the first so many entries, when all that runs then is cut.
fn used_after(entries: u64) -> HashMap<AccountKey, u64> {
    let (mut used, mut open) = (HashMap::new(), HashMap::new());
    for number in 0..entries {
        match entry(number) {
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

/// The variable that makes the test below the process that it kills.
const KILLED: &str = "RUSSET_KILLED_JOURNAL";

#[test]
fn a_journal_whose_process_is_killed_is_what_was_written() {
    // Some ten entries, so that most moments are in the middle of a change of tables and logs.
    let open = |path: &Path| Journal::open_with(path, NOW, 1 << 11).unwrap();
    if let Some(path) = std::env::var_os(KILLED) {
        let (journal, _) = open(Path::new(&path));
        for number in 0.. {
            // It writes faster than such small logs go into the tables.
            while let Err(error) = journal.write(vec![entry(number)]) {
                assert!(error.to_string().contains("not in its tables yet"), "{error}");
                std::thread::yield_now();
            }
            if writeln!(std::io::stdout(), "written {}", number + 1).is_err() {
                return;
            }
        }
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
        let (mut written, mut is_killed) = (0, false);
        for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
            if let Some(number) = line.strip_prefix("written ") {
                written = number.parse().unwrap();
                if written >= limit && !is_killed {
                    child.kill().unwrap();
                    is_killed = true;
                }
            }
        }
        child.wait().unwrap();
        assert!(is_killed, "it ended by itself after {written} entries");
        let (journal, recovered) = open(&path);
        drop(journal);
        let known: HashMap<_, _> =
            recovered.used.iter().map(|(account, amount)| (account.clone(), amount.tokens)).collect();
        // One more may have been written, and not said.
        let expected = [written, written + 1].map(|entries| {
            let mut used = used_after(entries);
            for (account, tokens) in &before {
                *used.entry(account.clone()).or_insert(0) += tokens;
            }
            used
        });
        assert!(
            expected.contains(&known),
            "round {round}, {written} entries: {known:?} is none of {expected:?}"
        );
        before = known;
    }
}

#[test]
fn what_a_write_left_behind_that_failed_is_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let mut log = LogFile::create(&path, 1, "gateway-a").unwrap();
    log.append(&[entry(0)]).unwrap();
    // The disk was full in the middle of a long line, and then a shorter one went in.
    let end = log.bytes;
    let torn = File::options().write(true).open(folder.path().join("budgets.log1")).unwrap();
    torn.write_all_at(&[b'x'; 900], end).unwrap();
    log.append(&[entry(1)]).unwrap();
    let read = |gateway| {
        let mut entries = Vec::new();
        log::read(&path, 1, gateway, |more| entries.extend(more)).map(|()| entries.len())
    };
    assert_eq!(read("gateway-a").unwrap(), 2);
    // The name of another gateway: its tables are gone.
    assert_eq!(read("gateway-b").unwrap(), 0);
}

#[tokio::test]
async fn a_log_that_the_tables_do_not_take_has_a_bound() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("budgets.db");
    let log = |number| LogFile::create(&path, number, "gateway-a").unwrap();
    let (entries, full) = (Vec::new(), Vec::new());
    let open = OpenLog { log: log(1), entries, full, last_full: 0, next: None, has_ended: false };
    let journal = Journal {
        open: Arc::new(Mutex::new(open)),
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
    // Without the thread another gateway may have the tables.
    drop(EndGuard(journal.open.clone()));
    let error = journal.write(vec![entry(5)]).unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
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
    let known: HashMap<_, _> =
        recovered.used.iter().map(|(account, amount)| (account.clone(), amount.tokens)).collect();
    assert_eq!(known, used_after(100));
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
